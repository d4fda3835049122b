"""Settings from flags, environment and file: precedence, checks and error messages."""

import base64
import math
import sys
from pathlib import Path

import pytest

from config.faults import faults_of
from helpers.certs import self_signed
from redpoll.config.cgroups import usable_cpus
from redpoll.config.config import TABLE, Settings, _is_service_link, load
from redpoll.config.redis_url import RedisUrl
from redpoll.config.setting_table import VARIABLES


def written(tmp_path: Path, text: str) -> str:
    path = tmp_path / "redpoll.toml"
    path.write_text(text)
    return str(path)


def test_defaults_apply_without_any_settings():
    settings, warnings = load({}, {})
    assert (settings.host, settings.port) == ("0.0.0.0", 6001)
    assert (settings.control_host, settings.control_port) == ("127.0.0.1", 9601)
    assert settings.workers == math.ceil(usable_cpus())
    assert warnings == []


def test_flag_overrides_environment_overrides_file_overrides_default(tmp_path):
    path = written(tmp_path, 'host = "10.0.0.1"\nport = 1001\ncontrol_port = 1002\n')
    environment = {"REDPOLL_PORT": "2001", "REDPOLL_CONTROL_PORT": "2002"}
    settings, _ = load({"control_port": "3002", "host": None}, environment, path)
    assert (settings.host, settings.port, settings.control_port) == ("10.0.0.1", 2001, 3002)
    assert settings.control_host == "127.0.0.1"


def test_environment_can_name_the_file(tmp_path):
    settings, _ = load({}, {"REDPOLL_CONFIG": written(tmp_path, "port = 7001")})
    assert settings.port == 7001


def test_seconds_in_the_environment_can_have_decimals():
    settings, _ = load({}, {"REDPOLL_PONG_TIMEOUT_S": "1.5", "REDPOLL_ACTIVITY_TIMEOUT_S": "30"})
    assert (settings.pong_timeout_s, settings.activity_timeout_s) == (1.5, 30.0)


def test_whole_seconds_in_the_file_are_accepted(tmp_path):
    settings, _ = load({}, {}, written(tmp_path, "shutdown_grace_s = 20"))
    assert settings.shutdown_grace_s == 20.0


def test_soketi_and_pusher_variables_are_accepted():
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


def test_reverb_variables_are_accepted():
    environment = {
        "REVERB_SERVER_HOST": "127.0.0.1",
        "REVERB_SERVER_PORT": "8080",
        "REVERB_HOST": "ws.example.com",  # where clients connect, not where the server listens
        "REVERB_PORT": "443",
        "REVERB_APP_ID": "my-app",
        "REVERB_APP_KEY": "key",
        "REVERB_APP_SECRET": "secret",
        "PUSHER_APP_ID": "1",
    }
    settings, warnings = load({}, environment)
    assert (settings.host, settings.port, settings.app_id) == ("127.0.0.1", 8080, "my-app")
    assert warnings == []


def test_path_prefix_is_written_with_one_slash_before_it():
    for text in ("live", "/live", "/live/"):
        assert load({}, {"REVERB_SERVER_PATH": text})[0].path_prefix == "/live"
    assert load({}, {"SOKETI_PATH_PREFIX": "/"})[0].path_prefix == ""
    assert list(faults_of(environment={"REDPOLL_PATH_PREFIX": "/a b"})) == ["REDPOLL_PATH_PREFIX"]


def test_own_variable_overrides_an_alias():
    settings, _ = load({}, {"SOKETI_PORT": "1", "REDPOLL_PORT": "2"})
    assert settings.port == 2


def test_app_values_come_from_one_family_of_variables():
    environment = {"PUSHER_APP_ID": "1", "PUSHER_APP_KEY": "k", "PUSHER_APP_SECRET": "s"}
    settings, _ = load({}, environment)
    assert (settings.app_id, settings.app_key, settings.app_secret) == ("1", "k", "s")
    # A key of this server doesn't work with the id and secret of an account at Pusher.
    faults = faults_of(environment=environment | {"REDPOLL_APP_KEY": "mine"})
    assert list(faults) == ["REDPOLL_APP_ID (app_id), REDPOLL_APP_SECRET (app_secret)"]


@pytest.mark.parametrize("missing", ["ID", "KEY", "SECRET"])
def test_incomplete_app_is_a_fault(missing):
    environment = {"REDPOLL_APP_ID": "1", "REDPOLL_APP_KEY": "k", "REDPOLL_APP_SECRET": "s"}
    del environment[f"REDPOLL_APP_{missing}"]
    (path,) = faults_of(environment=environment)
    assert path.startswith(f"REDPOLL_APP_{missing} ")


def test_app_can_be_in_the_file_and_its_secret_in_the_environment(tmp_path):
    path = written(tmp_path, 'app_id = "9"\napp_key = "k"')
    settings, _ = load({}, {"REDPOLL_APP_SECRET": "s"}, path)
    assert (settings.app_id, settings.app_key, settings.app_secret) == ("9", "k", "s")


@pytest.mark.parametrize("app_id", ["12a", "-1", "my_app.1", "a..b", "app-id", "1" * 64])
def test_app_id_may_have_the_characters_of_other_servers(app_id):
    settings, _ = load({}, {"REVERB_APP_ID": app_id, "REVERB_APP_KEY": "a.b", "REVERB_APP_SECRET": "s+/="})
    assert (settings.app_id, settings.app_key, settings.app_secret) == (app_id, "a.b", "s+/=")


@pytest.mark.parametrize("app_id", [".", "..", "a b", "a/b", "a:b", "a%b", "٣", "1" * 65])
def test_app_id_that_would_break_paths_or_redis_keys_is_refused(app_id):
    faults = faults_of(environment={"REDPOLL_APP_ID": app_id, "REDPOLL_APP_KEY": "k", "REDPOLL_APP_SECRET": "s"})
    assert list(faults) == ["REDPOLL_APP_ID"]


@pytest.mark.parametrize("text", ["a b", "a\n", "ä", 'a"b', "a$b", "a#b"])
def test_keys_and_secrets_can_not_have_characters_with_a_meaning_in_settings_files(text):
    faults = faults_of(environment={"REDPOLL_APP_ID": "1", "REDPOLL_APP_KEY": text, "REDPOLL_APP_SECRET": text})
    assert set(faults) == {"REDPOLL_APP_KEY", "REDPOLL_APP_SECRET"}


@pytest.mark.parametrize("key", ["a:b", "a/b", "a@b", "..", "k" * 129])
def test_keys_can_not_have_characters_with_a_meaning_in_paths_and_signatures(key):
    faults = faults_of(environment={"REDPOLL_APP_ID": "1", "REDPOLL_APP_KEY": key, "REDPOLL_APP_SECRET": "s"})
    assert list(faults) == ["REDPOLL_APP_KEY"]


def test_all_faults_are_reported_together_with_their_paths(tmp_path):
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
def test_times_must_be_numbers_within_bounds(text):
    if text == "":
        assert load({}, {"REDPOLL_HEAD_TIMEOUT_S": text})[0].head_timeout_s == 10.0
    else:
        assert list(faults_of(environment={"REDPOLL_HEAD_TIMEOUT_S": text})) == ["REDPOLL_HEAD_TIMEOUT_S"]


def test_wrong_secret_is_not_in_the_message(tmp_path):
    faults = faults_of(config_path=written(tmp_path, "app_secret = 12345678"))
    assert not any("12345678" in text for text in faults.values())


def test_empty_variable_counts_as_not_set(tmp_path):
    settings, _ = load({}, {"REDPOLL_PORT": "", "PUSHER_APP_ID": ""}, written(tmp_path, "port = 5000"))
    assert (settings.port, settings.app_id) == (5000, "")


def test_database_without_a_shared_redis_gives_a_warning():
    settings = {"REDPOLL_DATABASE_URL": "postgresql://a:b@h1,h2/x?target_session_attrs=read-write&sslmode=verify-full"}
    assert any("redis_url is not" in warning for warning in load({}, settings)[1])
    assert load({}, {**settings, "REDPOLL_REDIS_URL": "redis://cache"})[1] == []


def test_files_for_tls_with_redis_are_checked(tmp_path):
    cert, key = map(str, self_signed(tmp_path))
    url = {"redis_url": "rediss://h"}
    settings, warnings = load({**url, "redis_ca_file": cert, "redis_cert_file": cert, "redis_key_file": key}, {})
    assert RedisUrl.parse(settings.full_redis_url()).cert_file == cert
    assert warnings == []
    assert list(faults_of({**url, "redis_cert_file": cert})) == ["REDPOLL_REDIS_KEY_FILE (redis_key_file)"]
    faults = faults_of({**url, "redis_ca_file": "/none", "redis_cert_file": cert, "redis_key_file": "/none"})
    assert list(faults) == ["--redis-ca-file", "--redis-key-file"]
    assert any("no TLS is used" in text for text in load({"redis_url": "redis://h", "redis_ca_file": cert}, {})[1])


@pytest.mark.parametrize(
    ("parameters", "fault"),
    [
        ("sslmode=verify-full&sslrootcert={cert}&sslcert={cert}&sslkey={key}", None),
        ("sslmode=verify-full&sslrootcert={none}", "its sslrootcert {none} can't be read: No such file or directory"),
        ("sslmode=require&sslrootcert={key}", "its sslrootcert {key} contains no PEM certificates"),
        ("sslcert={cert}&sslkey={none}", "its sslkey {none} can't be read: No such file or directory"),
        # Neither is read.
        ("sslmode=prefer&sslrootcert={none}", None),
        ("sslmode=disable&sslcert={none}", None),
    ],
)
def test_files_for_tls_with_postgres_are_checked(tmp_path, parameters, fault):
    cert, key = self_signed(tmp_path)
    files = {"cert": cert, "key": key, "none": tmp_path / "none.pem"}
    environment = {"REDPOLL_DATABASE_URL": f"postgresql://u:hunter2@localhost/r?{parameters.format_map(files)}"}
    assert load({}, environment, read_files=False)
    if fault is None:
        assert load({}, environment)
    else:
        assert faults_of({}, environment) == {"REDPOLL_DATABASE_URL": fault.format_map(files)}


def test_public_and_control_port_must_differ():
    assert "both 7000" in faults_of({"port": "7000", "control_port": "7000"})["--control-port"]
    load({"port": "0", "control_port": "0"}, {})


def test_missing_or_malformed_file_is_a_fault(tmp_path):
    missing = str(tmp_path / "none.toml")
    assert "No such file" in faults_of(config_path=missing)[missing]
    broken = written(tmp_path, "port = = 1")
    assert "not valid TOML" in faults_of(config_path=broken)[broken]


def test_unknown_variable_is_a_warning_with_a_suggestion():
    _, warnings = load({}, {"REDPOLL_WORKER": "4", "OTHER": "x"})
    assert warnings == ["REDPOLL_WORKER is not a setting; did you mean REDPOLL_WORKERS?"]


@pytest.mark.parametrize("name", ["DEBUG", "SIGNING_KEY", "TOKEN", "URL"])
def test_variables_of_other_programs_of_redpoll_are_no_unknown_ones(name):
    assert load({}, {f"REDPOLL_{name}": "x"}) == load({}, {})


def service_links(service: str) -> dict[str, str]:
    """What Kubernetes sets in each pod for a Service with the ports http (80) and https (443)."""
    links = {f"{service}_SERVICE_HOST": "10.96.12.3", f"{service}_SERVICE_PORT": "80"}
    links |= {f"{service}_SERVICE_PORT_HTTP": "80", f"{service}_SERVICE_PORT_HTTPS": "443"}
    links[f"{service}_PORT"] = "tcp://10.96.12.3:80"
    for port in ("80", "443"):
        name = f"{service}_PORT_{port}_TCP"
        links |= {name: f"tcp://10.96.12.3:{port}", f"{name}_PROTO": "tcp", f"{name}_PORT": port}
        links[f"{name}_ADDR"] = "10.96.12.3"
    return links


@pytest.mark.parametrize("service", ["REDPOLL", "REDPOLL_CONTROL", "REDPOLL_TLS", "SOKETI", "REVERB_SERVER"])
def test_variables_that_kubernetes_makes_for_a_service_are_no_settings(service):
    settings, warnings = load({}, service_links(service))
    assert (settings, warnings) == load({}, {})


@pytest.mark.parametrize("value", ["udp://10.96.12.3:80", "sctp://[fd00::1]:80", "tcp://10.96.12.3:6001"])
def test_a_port_of_a_service_does_not_hide_the_port_in_the_file(tmp_path, value):
    settings, _ = load({}, {"REDPOLL_PORT": value}, written(tmp_path, "port = 7001"))
    assert settings.port == 7001


def test_what_only_resembles_a_variable_of_a_service_is_reported():
    assert list(faults_of(environment={"REDPOLL_PORT": "tcp:10.96.12.3:80"})) == ["REDPOLL_PORT"]
    typos = {"REDPOLL_SERVICE": "x", "REDPOLL_PORT_80": "80", "REDPOLL_PROT": "1"}
    assert [warning.split()[0] for warning in load({}, typos)[1]] == sorted(typos)


def test_no_setting_has_the_name_of_a_variable_of_a_service():
    assert [name for name in VARIABLES if _is_service_link(name, "1")] == []


def test_earlier_name_of_a_setting_is_refused_with_the_new_one(tmp_path):
    path = written(tmp_path, "max_owed_bytes = 100000")
    old = {"REDPOLL_MAX_OWED_BYTES": "100000"}
    assert faults_of({"max_owed_bytes": "100000"}, old, path) == {
        "--max-owed-bytes": "was renamed to --max-unsent-bytes",
        "REDPOLL_MAX_OWED_BYTES": "was renamed to REDPOLL_MAX_UNSENT_BYTES",
        f"{path}: $.max_owed_bytes": "was renamed to max_unsent_bytes",
    }


def test_every_default_is_within_its_own_bounds():
    for setting in TABLE:
        if setting.default not in ("", (), None):
            default = ",".join(map(str, setting.default)) if setting.is_list else str(setting.default)
            load({}, {setting.variable: default})
    assert Settings().port == 6001


# -- lists, booleans, none


@pytest.mark.parametrize("text", ["10.0.0.0/8,::1", " 10.0.0.0/8 , ::1 ,"])
def test_lists_are_comma_separated_in_flags_and_environment(text):
    assert load({}, {"REDPOLL_TRUSTED_PROXIES": text})[0].trusted_proxies == ("10.0.0.0/8", "::1")
    assert load({"trusted_proxies": text}, {})[0].trusted_proxies == ("10.0.0.0/8", "::1")


def test_each_item_of_a_list_of_seconds_is_checked(tmp_path):
    assert load({}, {"REDPOLL_WEBHOOK_RETRY_AFTER_S": "0.1, 2,300"})[0].webhook_retry_after_s == (0.1, 2.0, 300.0)
    written_so = written(tmp_path, "webhook_retry_after_s = [1, 2.5]")
    assert load({}, {}, written_so)[0].webhook_retry_after_s == (1.0, 2.5)
    faults = faults_of(environment={"REDPOLL_WEBHOOK_RETRY_AFTER_S": "10,0"})
    assert "> 0.0 - at `$[1]`" in faults["REDPOLL_WEBHOOK_RETRY_AFTER_S"]


def test_lists_are_arrays_in_the_file(tmp_path):
    path = written(tmp_path, 'trusted_proxies = ["10.0.0.0/8", "::1"]')
    assert load({}, {}, path)[0].trusted_proxies == ("10.0.0.0/8", "::1")
    wrong = written(tmp_path, 'trusted_proxies = "10.0.0.0/8,::1"')
    assert "Expected `array`" in faults_of(config_path=wrong)[f"{wrong}: $.trusted_proxies"]


@pytest.mark.parametrize("variable", ["REDPOLL_TRUSTED_PROXIES", "REDPOLL_WEBHOOK_ALLOW_ADDRESSES"])
@pytest.mark.parametrize("network", ["10.0.0.1/8", "10.0.0.0/33", "proxy.example", "10.0.0"])
def test_malformed_network_is_a_fault(variable, network):
    faults = faults_of(environment={variable: f"127.0.0.1,{network}"})
    assert "is not an address or network" in faults[variable]
    assert network.partition("/")[0] in faults[variable]


@pytest.mark.parametrize(("text", "value"), [("1", True), ("true", True), ("0", False), ("false", False)])
def test_booleans_are_1_0_true_or_false(text, value):
    assert load({}, {"REDPOLL_PROXY_PROTOCOL": text})[0].proxy_protocol is value


def test_other_booleans_are_refused():
    assert list(faults_of({"proxy_protocol": "v2"})) == ["--proxy-protocol"]


def test_rate_limit_can_be_disabled():
    assert load({}, {"REDPOLL_TRIGGER_RATE_PER_MINUTE": "0"})[0].trigger_rate_per_minute == 0
    assert list(faults_of({"trigger_rate_per_minute": "-1"})) == ["--trigger-rate-per-minute"]


# -- the key of encrypted channels


def test_the_master_key_is_32_bytes_in_base64():
    text = base64.b64encode(bytes(range(32))).decode()
    assert load({}, {"REDPOLL_ENCRYPTION_MASTER_KEY": text})[0].master_key() == bytes(range(32))
    assert load({}, {})[0].master_key() is None


@pytest.mark.parametrize("text", ["c2hvcnQ=", "no base64!", "A" * 44, "hunter2"])
def test_malformed_master_key_is_a_fault_that_does_not_repeat_it(text):
    faults = faults_of(environment={"REDPOLL_ENCRYPTION_MASTER_KEY": text})
    assert "is not 32 bytes in base64" in faults["REDPOLL_ENCRYPTION_MASTER_KEY"]
    assert text not in faults["REDPOLL_ENCRYPTION_MASTER_KEY"]


# -- TLS


@pytest.fixture
def tls(tmp_path):
    """Variables of a server with a TLS port."""
    cert, key = self_signed(tmp_path)
    return {"REDPOLL_TLS_PORT": "0", "REDPOLL_TLS_CERT": str(cert), "REDPOLL_TLS_KEY": str(key)}


def test_tls_port_with_certificate_and_key_is_accepted(tls):
    settings, warnings = load({}, tls)
    assert (settings.tls_port, settings.tls_cert, settings.tls_key) == (
        0,
        (tls["REDPOLL_TLS_CERT"],),
        (tls["REDPOLL_TLS_KEY"],),
    )
    assert warnings == []


def test_missing_or_empty_tls_port_is_none(tmp_path):
    assert load({}, {})[0].tls_port is None
    assert load({"tls_port": ""}, {}, written(tmp_path, "tls_port = 6002"))[0].tls_port is None
    assert load({}, {}, written(tmp_path, 'tls_port = ""'))[0].tls_port is None


def test_tls_port_out_of_bounds_is_a_fault():
    assert "<= 65535" in faults_of({"tls_port": "70000"})["--tls-port"]
    assert faults_of({"tls_port": "x"})["--tls-port"].startswith("Expected `int`, got `str`")


def test_a_port_with_tls_and_no_certificate_is_a_fault(tls):
    assert list(faults_of({"tls_port": "6002"})) == ["REDPOLL_TLS_CERT (tls_cert)"]
    assert list(faults_of({"tls_client_ca": tls["REDPOLL_TLS_CERT"]})) == ["REDPOLL_TLS_CERT (tls_cert)"]


def test_a_certificate_without_a_key_is_a_fault(tls):
    del tls["REDPOLL_TLS_KEY"]
    assert "names no file for the certificate" in faults_of(environment=tls)["REDPOLL_TLS_KEY (tls_key)"]


def test_certificates_may_be_a_list_or_one_of_them_in_the_file(tls, tmp_path):
    cert, key = tls["REDPOLL_TLS_CERT"], tls["REDPOLL_TLS_KEY"]
    one = written(tmp_path, f'tls_port = 0\ntls_cert = "{cert}"\ntls_key = "{key}"')
    assert load({}, {}, one)[0].tls_cert == (cert,)
    several = written(tmp_path, f'tls_port = 0\ntls_cert = ["{cert}", "{cert}"]\ntls_key = ["{key}", "{key}"]')
    assert load({}, {}, several)[0].tls_cert == (cert, cert)
    assert load({"tls_cert": f"{cert},{cert}", "tls_key": f"{key}, {key}"}, tls)[0].tls_key == (key, key)
    folder = written(tmp_path, f'tls_port = 0\ntls_cert = "{tmp_path}"')
    assert load({}, {}, folder)[0].tls_cert == (str(tmp_path),)


def test_a_python_without_ssl_is_named(tls, monkeypatch):
    monkeypatch.setitem(sys.modules, "ssl", None)
    faults = faults_of({"tls_client_ca": tls["REDPOLL_TLS_CERT"]}, tls)
    assert list(faults) == ["REDPOLL_TLS_CERT", "--tls-client-ca"]
    assert all("without the module ssl" in text for text in faults.values())


def test_authorities_of_clients_are_checked(tls, tmp_path):
    assert load({"tls_client_ca": tls["REDPOLL_TLS_CERT"]}, tls)[0].tls_client_ca == tls["REDPOLL_TLS_CERT"]
    path = str(tmp_path / "none.pem")
    assert (
        faults_of({"tls_client_ca": path}, tls)["--tls-client-ca"] == f"{path} can't be read: No such file or directory"
    )


def test_soketi_certificate_without_a_tls_port_is_a_warning(tls):
    _, warnings = load({}, {"SOKETI_SSL_CERT": tls["REDPOLL_TLS_CERT"], "SOKETI_SSL_KEY": tls["REDPOLL_TLS_KEY"]})
    assert warnings == ["tls_cert or tls_key is set but tls_port is not: nothing is served over TLS"]


def test_soketi_certificate_variables_work_with_a_tls_port(tls):
    environment = {"SOKETI_SSL_CERT": tls["REDPOLL_TLS_CERT"], "SOKETI_SSL_KEY": tls["REDPOLL_TLS_KEY"]}
    assert load({"tls_port": "0"}, environment)[0].tls_cert == (tls["REDPOLL_TLS_CERT"],)


def test_unreadable_files_are_reported_with_their_paths(tls, tmp_path):
    tls |= {"REDPOLL_TLS_CERT": str(tmp_path / "none.crt"), "REDPOLL_TLS_KEY": str(tmp_path)}
    faults = faults_of(environment=tls)
    assert "No such file" in faults["REDPOLL_TLS_CERT"]
    assert "Is a directory" in faults["REDPOLL_TLS_KEY"]


def test_the_key_of_another_certificate_is_a_fault(tls, tmp_path):
    _, other_key = self_signed(tmp_path, "other")
    faults = faults_of({"tls_key": str(other_key)}, tls)
    assert "is not the key of the certificate" in faults["--tls-key"]


def test_read_files_false_skips_the_certificate_files(tls):
    tls |= {"REDPOLL_TLS_KEY": "/nowhere/key.pem"}
    assert load({}, tls, read_files=False)[0].tls_key == ("/nowhere/key.pem",)


def test_public_control_and_tls_port_must_differ(tls):
    faults = faults_of({"port": "7000", "control_port": "7001"}, tls | {"REDPOLL_TLS_PORT": "7000"})
    assert faults == {"REDPOLL_TLS_PORT": "public port and TLS port are both 7000; use different ports"}
    faults = faults_of({"tls_port": "9601"}, tls)
    assert "control port and TLS port are both 9601" in faults["--tls-port"]


# -- webhooks and the dashboard


def test_webhook_ca_file_is_checked(tmp_path, tls):
    path = tls["REDPOLL_TLS_CERT"]
    good = {"REDPOLL_WEBHOOK_CA_FILE": path}
    assert load({}, good)[0].webhook_ca_file == path
    for name, content, fault in (("empty.pem", "", "no PEM certificates"), ("gone.pem", None, "can't be read")):
        wrong = tmp_path / name
        if content is not None:
            wrong.write_text(content)
        given = {"REDPOLL_WEBHOOK_CA_FILE": str(wrong)}
        assert fault in faults_of(environment=given)["REDPOLL_WEBHOOK_CA_FILE"]
        assert load({}, given, read_files=False)[0].webhook_ca_file == str(wrong)


def test_short_admin_password_is_a_warning():
    (warning,) = load({}, {"REDPOLL_ADMIN_PASSWORD": "secret"})[1]
    assert warning == "admin_password has fewer than 12 characters and is easy to guess"
    assert load({}, {"REDPOLL_ADMIN_PASSWORD": "correct horse battery"})[1] == []


@pytest.mark.parametrize(
    ("mode", "content", "warned"),
    [
        (0o644, 'app_id = "1"\napp_key = "k"\napp_secret = "s"', True),
        (0o640, 'app_id = "1"\napp_key = "k"\napp_secret = "s"', False),
        (0o644, 'redis_url = "redis://:secret@h"', True),
        (0o644, 'redis_url = "redis://h"', False),
        (0o644, "port = 6001", False),
    ],
)
def test_a_settings_file_with_secrets_that_others_can_read_is_warned_of(tmp_path, mode, content, warned):
    file = tmp_path / "redpoll.toml"
    file.write_text(content)
    file.chmod(mode)
    _, warnings = load({}, {}, str(file))
    text = f"{file}: other users of this machine can read its secrets; close it with: chmod 640 {file}"
    assert [warning for warning in warnings if "chmod 640" in warning] == ([text] if warned else [])


def test_a_proxy_header_from_anybody_is_warned_of():
    assert any("proxy_protocol" in warning for warning in load({}, {"REDPOLL_PROXY_PROTOCOL": "1"})[1])
    named = {"REDPOLL_PROXY_PROTOCOL": "1", "REDPOLL_TRUSTED_PROXIES": "10.0.0.2"}
    assert not any("proxy_protocol" in warning for warning in load({}, named)[1])
