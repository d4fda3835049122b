"""Settings from flags, environment and file: who wins, and what is said about what is wrong."""

import os
import tomllib
from pathlib import Path

import pytest

from redpoll import config
from redpoll.config import ConfigError, Settings, load

ROOT = Path(__file__).parent.parent


def faults_of(flags=None, environment=None, config_path=None) -> dict[str, str]:
    """Path → text of everything that is wrong."""
    with pytest.raises(ConfigError) as caught:
        load(flags or {}, environment or {}, config_path)
    return {fault.path: fault.text for fault in caught.value.faults}


def written(tmp_path: Path, text: str) -> str:
    path = tmp_path / "redpoll.toml"
    path.write_text(text)
    return str(path)


def test_without_anything_given_the_defaults_hold():
    settings, warnings = load({}, {})
    assert (settings.host, settings.port) == ("0.0.0.0", 6001)
    assert (settings.control_host, settings.control_port) == ("127.0.0.1", 9601)
    assert settings.workers == len(os.sched_getaffinity(0))
    assert warnings == []


def test_flag_wins_over_environment_over_file_over_default(tmp_path):
    path = written(tmp_path, 'host = "10.0.0.1"\nport = 1001\ncontrol_port = 1002\n')
    environment = {"REDPOLL_PORT": "2001", "REDPOLL_CONTROL_PORT": "2002"}
    settings, _ = load({"control_port": "3002", "host": None}, environment, path)
    assert (settings.host, settings.port, settings.control_port) == ("10.0.0.1", 2001, 3002)
    assert settings.control_host == "127.0.0.1"


def test_the_file_may_be_named_in_the_environment(tmp_path):
    settings, _ = load({}, {"REDPOLL_CONFIG": written(tmp_path, "port = 7001")})
    assert settings.port == 7001


def test_seconds_in_the_environment_may_have_decimals():
    settings, _ = load({}, {"REDPOLL_PONG_TIMEOUT_S": "1.5", "REDPOLL_ACTIVITY_TIMEOUT_S": "30"})
    assert (settings.pong_timeout_s, settings.activity_timeout_s) == (1.5, 30.0)


def test_whole_seconds_in_the_file_are_seconds(tmp_path):
    settings, _ = load({}, {}, written(tmp_path, "shutdown_grace_s = 20"))
    assert settings.shutdown_grace_s == 20.0


def test_names_of_soketi_and_pusher_are_understood():
    environment = {
        "SOKETI_PORT": "6002",
        "SOKETI_METRICS_SERVER_PORT": "9602",
        "SOKETI_SHUTDOWN_GRACE_PERIOD": "3500",  # soketi counts milliseconds
        "REDIS_URL": "redis://cache:6379/1",
        "SOKETI_DEFAULT_APP_ID": "12",
        "SOKETI_DEFAULT_APP_KEY": "app-key",
        "SOKETI_DEFAULT_APP_SECRET": "app-secret",
    }
    settings, warnings = load({}, environment)
    assert (settings.port, settings.control_port, settings.shutdown_grace_s) == (6002, 9602, 3.5)
    assert settings.redis_url == "redis://cache:6379/1"
    assert (settings.app_id, settings.app_key, settings.app_secret) == ("12", "app-key", "app-secret")
    assert warnings == []


def test_our_own_name_wins_over_an_alias():
    settings, _ = load({}, {"SOKETI_PORT": "1", "REDPOLL_PORT": "2"})
    assert settings.port == 2


def test_the_three_of_an_app_come_from_one_family_of_names():
    environment = {"PUSHER_APP_ID": "1", "PUSHER_APP_KEY": "k", "PUSHER_APP_SECRET": "s"}
    settings, _ = load({}, environment)
    assert (settings.app_id, settings.app_key, settings.app_secret) == ("1", "k", "s")
    # A key of ours beside an id and a secret that belong to an account at Pusher would open nothing.
    faults = faults_of(environment=environment | {"REDPOLL_APP_KEY": "mine"})
    assert list(faults) == ["REDPOLL_APP_ID (app_id), REDPOLL_APP_SECRET (app_secret)"]


@pytest.mark.parametrize("missing", ["ID", "KEY", "SECRET"])
def test_an_app_given_in_part_is_a_fault(missing):
    environment = {"REDPOLL_APP_ID": "1", "REDPOLL_APP_KEY": "k", "REDPOLL_APP_SECRET": "s"}
    del environment[f"REDPOLL_APP_{missing}"]
    (path,) = faults_of(environment=environment)
    assert path.startswith(f"REDPOLL_APP_{missing} ")


def test_an_app_may_be_given_in_the_file_and_its_secret_in_the_environment(tmp_path):
    path = written(tmp_path, 'app_id = "9"\napp_key = "k"')
    settings, _ = load({}, {"REDPOLL_APP_SECRET": "s"}, path)
    assert (settings.app_id, settings.app_key, settings.app_secret) == ("9", "k", "s")


@pytest.mark.parametrize("app_id", ["12a", "-1", "1.5", "٣", "1" * 19])
def test_an_app_id_is_decimal_digits(app_id):
    faults = faults_of(environment={"REDPOLL_APP_ID": app_id, "REDPOLL_APP_KEY": "k", "REDPOLL_APP_SECRET": "s"})
    assert list(faults) == ["REDPOLL_APP_ID"]


@pytest.mark.parametrize("text", ["a:b", "a/b", "a@b", "a b", "a\n", "ä"])
def test_keys_and_secrets_hold_nothing_that_a_url_would_misread(text):
    faults = faults_of(environment={"REDPOLL_APP_ID": "1", "REDPOLL_APP_KEY": text, "REDPOLL_APP_SECRET": text})
    assert set(faults) == {"REDPOLL_APP_KEY", "REDPOLL_APP_SECRET"}


def test_every_fault_is_told_at_once_each_with_its_path(tmp_path):
    path = written(tmp_path, 'workers = "many"\npong_timeout_s = -1\nprot = 6001\n')
    environment = {"REDPOLL_MAX_MESSAGE_BYTES": "64k", "REDPOLL_REDIS_URL": "http://cache"}
    faults = faults_of({"port": "70000"}, environment, path)
    assert set(faults) == {
        "--port",
        "REDPOLL_MAX_MESSAGE_BYTES",
        "REDPOLL_REDIS_URL",
        f"{path}: $.workers",
        f"{path}: $.pong_timeout_s",
        f"{path}: $.prot",
    }
    assert "<= 65535" in faults["--port"]
    assert "'70000'" in faults["--port"]
    assert "did you mean port?" in faults[f"{path}: $.prot"]


@pytest.mark.parametrize("text", ["nan", "inf", "-inf", "1e9", ""])
def test_a_time_is_a_number_within_its_bounds(text):
    if text == "":
        assert load({}, {"REDPOLL_HEAD_TIMEOUT_S": text})[0].head_timeout_s == 10.0
    else:
        assert list(faults_of(environment={"REDPOLL_HEAD_TIMEOUT_S": text})) == ["REDPOLL_HEAD_TIMEOUT_S"]


def test_a_wrong_secret_is_not_repeated(tmp_path):
    faults = faults_of(config_path=written(tmp_path, "app_secret = 12345678"))
    assert not any("12345678" in text for text in faults.values())


def test_an_empty_variable_counts_as_not_given(tmp_path):
    settings, _ = load({}, {"REDPOLL_PORT": "", "PUSHER_APP_ID": ""}, written(tmp_path, "port = 5000"))
    assert (settings.port, settings.app_id) == (5000, "")


@pytest.mark.parametrize(
    "url", ["redis://h", "redis://:p%40@h:6380/3", "redis://user:p@[::1]:6379", "unix:///run/redis.sock"]
)
def test_urls_of_redis(url):
    assert load({"redis_url": url}, {})[0].redis_url == url


@pytest.mark.parametrize(
    "url", ["localhost:6379", "redis://", "redis://h:port", "redis://h/db", "unix://redis.sock", "rediss://h"]
)
def test_other_urls_are_faults_that_do_not_tell_the_password(url):
    assert list(faults_of({"redis_url": url})) == ["--redis-url"]


def test_a_wrong_redis_url_is_told_without_its_password():
    (text,) = faults_of({"redis_url": "http://user:hunter2@cache"}).values()
    assert "hunter2" not in text


def test_one_port_cannot_be_both():
    assert "both 7000" in faults_of({"port": "7000", "control_port": "7000"})["--control-port"]
    load({"port": "0", "control_port": "0"}, {})


def test_a_file_that_is_missing_or_no_toml_is_a_fault(tmp_path):
    missing = str(tmp_path / "none.toml")
    assert "No such file" in faults_of(config_path=missing)[missing]
    broken = written(tmp_path, "port = = 1")
    assert "not TOML" in faults_of(config_path=broken)[broken]


def test_an_unknown_variable_is_a_warning_that_names_the_nearest():
    _, warnings = load({}, {"REDPOLL_WORKER": "4", "REDPOLL_DEBUG": "1", "OTHER": "x"})
    assert warnings == ["REDPOLL_WORKER is no setting; did you mean REDPOLL_WORKERS?"]


def test_the_sample_file_is_the_table():
    assert (ROOT / "deploy" / "redpoll.toml").read_text() == config.sample(), (
        "write deploy/redpoll.toml anew from redpoll.config.sample()"
    )


def test_the_sample_file_shows_the_defaults():
    lines = [line[1:] for line in config.sample().splitlines() if line.startswith("#") and line[1] != " "]
    assert tomllib.loads("\n".join(lines)) == {setting.name: setting.default for setting in config.TABLE}


def test_every_default_is_within_its_own_bounds():
    for setting in config.TABLE:
        if setting.default != "":
            load({}, {setting.variable: str(setting.default)})
    assert Settings().port == 6001
