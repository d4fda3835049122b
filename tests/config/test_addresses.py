"""Settings that are hosts or URLs: which are taken, what is wrong with the others, and no password in a message."""

import pytest

from config.faults import faults_of
from redpoll.config import addresses
from redpoll.config.config import load


@pytest.mark.parametrize(
    "url",
    [
        "redis://h",
        "redis://:p%40@h:6380/3",
        "redis://user:p@[::1]:6379",
        "unix:///run/redis.sock",
        "rediss://h",
        "redis+sentinel://a,b:7/main?sentinel_password=x",
        "redis+cluster://a,b:7",
    ],
)
def test_redis_urls_are_accepted(url):
    assert load({"redis_url": url}, {})[0].redis_url == url


@pytest.mark.parametrize(
    "url", ["localhost:6379", "redis://", "redis://h:port", "redis://h/db", "unix://redis.sock", "redis+proxy://h"]
)
def test_other_redis_urls_are_faults(url):
    assert list(faults_of({"redis_url": url})) == ["--redis-url"]


@pytest.mark.parametrize(
    ("url", "fault"),
    [
        ("mysql://user:hunter2@db/x", "must begin with postgresql://"),
        ("postgresql://user:hunter2@db", "names no database"),
        ("postgresql://user:hunter2@[db/x", "is not a URL; of several hosts, one in brackets must come first"),
        ("postgresql://user:hunter2/half@db/x", "has a special character that isn't escaped"),
        ("postgresql://user:12/hunter2@db/x", "has a special character that isn't escaped"),
        ("postgresql://user:/hunter2@db/x", "has a special character that isn't escaped"),
        ("postgresql://user:a@hunter2@db/x", "has a special character that isn't escaped"),
        ("postgresql://user:12?hunter2@db/x", "has a special character that isn't escaped"),
        ("postgresql://user:12/a#hunter2@db/x", "has a special character that isn't escaped"),
        ("postgresql://user:12/a?hunter2@db/x", "has parameters that aren't NAME=VALUE"),
        ("postgresql://user:hunter2@db:port/x", "has a port that isn't a number from 1 to 65535"),
        ("postgresql://user:hunter2@[::1]:99999,db/x", "has a port that isn't a number from 1 to 65535"),
        ("postgresql://user:hunter2@db/x?port=5432,0", "has a port that isn't a number from 1 to 65535"),
        ("postgresql://user:hunter2@db,/x", "has a host with a part that is empty"),
    ],
)
def test_other_database_urls_are_faults_and_messages_omit_the_password(url, fault):
    (text,) = faults_of({}, {"REDPOLL_DATABASE_URL": url}).values()
    assert text.startswith(fault)
    assert "hunter2" not in text


def test_database_url_is_a_fault_if_the_driver_is_not_installed(monkeypatch):
    url = {"REDPOLL_DATABASE_URL": "postgresql://user:hunter2@db/redpoll?sslmode=verify-full"}
    installed = addresses.find_spec
    monkeypatch.setattr(addresses, "find_spec", lambda name: None if name == "asyncpg" else installed(name))
    assert faults_of({}, url) == {
        "REDPOLL_DATABASE_URL": "names PostgreSQL, and its driver is missing: pip install 'redpoll[postgres]'"
    }
    # Without the setting the driver isn't needed.
    assert load({}, {})[0].database_url == ""


@pytest.mark.parametrize("url", ["http://user:hunter2@cache", "redis://user:hunter2/@cache"])
def test_message_about_a_redis_url_omits_the_password(url):
    (text,) = faults_of({"redis_url": url}).values()
    assert "hunter2" not in text


@pytest.mark.parametrize("host", ["ws..example.com", ".x", "a" * 64, "a\udcff"])
@pytest.mark.parametrize("name", ["REDPOLL_HOST", "REDPOLL_CONTROL_HOST"])
def test_impossible_host_names_are_faults(name, host):
    assert list(faults_of(environment={name: host})) == [name]


@pytest.mark.parametrize(
    ("name", "url"),
    [
        ("REDPOLL_REDIS_URL", "redis://a..b:6379"),
        ("REDPOLL_REDIS_URL", f"redis+sentinel://one,{'a' * 64}:26379/main"),
        ("REDPOLL_DATABASE_URL", "postgresql://u:secret@db..x/r"),
        ("REDPOLL_DATABASE_URL", "postgresql://u:secret@db:5432,.x:5432/r"),
    ],
)
def test_urls_with_impossible_host_names_are_faults(name, url):
    (fault,) = faults_of(environment={name: url}).items()
    assert fault[0] == name
    assert "63 characters" in fault[1]
    assert "secret" not in fault[1]


@pytest.mark.parametrize(
    "url",
    [
        f"postgresql://u@%2Fvar%2Frun%2F{'a' * 64}/r",
        "postgresql://u@[::1]:5432,db/r",
        "postgresql://u:p%2F%40@%2Frun%3Aa:5433/r",
        "postgresql://db/r?user=u@tenant&port=5433",
        "postgresql:///r?host=/run",
    ],
)
def test_sockets_and_addresses_of_postgres_are_no_host_names(url):
    assert load({}, {"REDPOLL_DATABASE_URL": url})[0].database_url == url


@pytest.mark.parametrize("url", ["https://ws.example.com", "http://127.0.0.1:6001/", "https://[::1]:443"])
def test_public_url_is_scheme_host_and_port(url):
    assert load({}, {"REDPOLL_PUBLIC_URL": url})[0].public_url == url.rstrip("/")


@pytest.mark.parametrize(
    "url", ["ws.example.com", "wss://ws.example.com", "https://", "https://a/app", "https://a:x", "https://u@a", "//a"]
)
def test_other_public_urls_are_faults(url):
    assert list(faults_of(environment={"REDPOLL_PUBLIC_URL": url})) == ["REDPOLL_PUBLIC_URL"]


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ('redis_url = ["redis://:S3CRET@h"]', "redis_url"),
        ('otel_endpoint = "ftp://user:S3CRET@h"', "otel_endpoint"),
        ('otel_endpoint = "http://h:S3CRET/x"', "otel_endpoint"),
        ('public_url = "https://h:S3CRET"', "public_url"),
        ("database_url = 'postgresql://u:S3CRET@[h/d'", "database_url"),
    ],
)
def test_no_fault_quotes_a_url_with_credentials(tmp_path, line, name):
    file = tmp_path / "redpoll.toml"
    file.write_text(line)
    (text,) = faults_of({}, {}, str(file)).values()
    assert "S3CRET" not in text


@pytest.mark.parametrize(
    ("url", "warned"),
    [
        ("postgresql://u:p@db/redpoll", True),
        ("postgresql://u:p@db/redpoll?sslmode=require", True),
        ("postgresql://u:p@db/redpoll?sslmode=verify-full", False),
        ("postgresql://u:p@db,db2/redpoll?application_name=x&sslmode=verify-ca", False),
        ("postgresql://u:p@[::1]:5433,127.0.0.1/redpoll", False),
        ("postgresql://u:p@localhost,db/redpoll", True),
        ("postgresql:///redpoll?host=/run/postgresql", False),
        ("postgresql:///redpoll?host=::1", False),
        ("postgresql:///redpoll?host=2001:db8::1", True),
        ("postgresql://u@/redpoll?host=db", True),
        ("postgresql:///redpoll", False),
    ],
)
def test_postgresql_elsewhere_without_a_checked_certificate_is_warned_of(url, warned):
    _, warnings = load({}, {"REDPOLL_DATABASE_URL": url, "REDPOLL_REDIS_URL": "redis://h"})
    assert any("sslmode=verify-full" in warning for warning in warnings) is warned
    assert not any(":p@" in warning for warning in warnings)
