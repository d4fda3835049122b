import pytest

from redpoll.config.redis_url import RedisUrl, with_tls_files


@pytest.mark.parametrize(
    ("url", "parsed"),
    [
        ("redis://h", RedisUrl(hosts=(("h", 6379),))),
        ("redis://u:p%40@h:7/3", RedisUrl(hosts=(("h", 7),), username="u", password="p@", database=3)),
        ("redis://:p@[::1]:7?db=2", RedisUrl(hosts=(("::1", 7),), password="p", database=2)),
        ("redis://[::1]", RedisUrl(hosts=(("::1", 6379),))),
        ("redis://h:7\n", RedisUrl(hosts=(("h", 7),))),
        ("unix:///a/b.sock", RedisUrl(path="/a/b.sock")),
        ("unix:/a/b.sock?db=4", RedisUrl(path="/a/b.sock", database=4)),
        ("unix://u:p@/a?db=4", RedisUrl(path="/a", username="u", password="p", database=4)),
        ("unix:///a?username=u&password=x", RedisUrl(path="/a", username="u", password="x")),
        ("rediss://u:p@h", RedisUrl(hosts=(("h", 6379),), username="u", password="p", tls=True)),
        (
            "redis+sentinel://u:p@a,b:7/main?sentinel_user=su&sentinel_password=s%26p&db=2",
            RedisUrl(
                hosts=(("a", 26379), ("b", 7)),
                username="u",
                password="p",
                database=2,
                service="main",
                sentinel_username="su",
                sentinel_password="s&p",
            ),
        ),
        ("redis+cluster://:p@a,b:7", RedisUrl(hosts=(("a", 6379), ("b", 7)), password="p", cluster=True)),
        ("rediss+sentinel://a/main", RedisUrl(hosts=(("a", 26379),), service="main", tls=True)),
    ],
)
def test_url_names_hosts_credentials_and_database(url, parsed):
    assert RedisUrl.parse(url) == parsed


def test_tls_files_are_parameters_of_the_url():
    url = with_tls_files("rediss://h", "/a b/ca.pem", "/c.pem", "/k&y.pem")
    parsed = RedisUrl.parse(url)
    assert (parsed.ca_file, parsed.cert_file, parsed.key_file) == ("/a b/ca.pem", "/c.pem", "/k&y.pem")
    url = with_tls_files("rediss+sentinel://h/s?sentinel_password=x", "/ca.pem", "", "")
    parsed = RedisUrl.parse(url)
    assert (parsed.sentinel_password, parsed.ca_file, parsed.cert_file) == ("x", "/ca.pem", "")
    assert with_tls_files("redis://h", "", "", "") == "redis://h"


@pytest.mark.parametrize(
    ("url", "fault"),
    [
        ("http://u:hunter2@h", "must begin with"),
        ("unix+sentinel:///a", "must begin with"),
        ("unix://hunter2/a", "absolute path"),
        ("redis://:hunter2@", "no host"),
        ("redis://:hunter2/@h", "no host"),
        ("redis://u:hunter2/x@h", "port"),
        ("redis://h:70000", "port"),
        ("redis://u:hunter2@[h", "closing bracket"),
        ("redis://u:1/hunter2@h", "database"),
        ("redis://:hunter2@a,b", "several hosts"),
        ("redis+sentinel://:hunter2@a,b", "no service"),
        ("redis+cluster://:hunter2@a,b/1", "only database 0"),
    ],
)
def test_faults_say_what_to_write_and_quote_nothing(url, fault):
    with pytest.raises(ValueError, match=fault) as raised:
        RedisUrl.parse(url)
    assert "hunter2" not in str(raised.value)


@pytest.mark.parametrize(
    ("url", "place"),
    [
        ("redis://u:hunter2@h", "h:6379"),
        ("redis://u:[hunter2@h", "h:6379"),
        ("rediss://[::1]/2", "[::1]:6379"),
        ("unix://u:hunter2@/a", "/a"),
        ("redis+sentinel://u:hunter2@a,[::1]:7/main", "the master of main, says Sentinel at a:26379,[::1]:7"),
    ],
)
def test_what_messages_show_has_no_credentials(url, place):
    parsed = RedisUrl.parse(url)
    assert parsed.place == place
    assert "hunter2" not in repr(parsed)


def test_no_context_without_tls():
    assert RedisUrl.parse("redis://h").tls_context() is None
