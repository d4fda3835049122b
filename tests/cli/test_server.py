"""`serve`, `check-config`, `version`: output and exit codes."""

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

import redpoll
from helpers.server import Server
from redpoll.config import data_files
from redpoll.config.config import TABLE
from redpoll.host import datafolder


@pytest.fixture
def environment():
    """`environment(**settings)`: that of a server with these settings."""
    servers = []

    def of_server(**settings):
        servers.append(Server(**settings))
        return servers[-1].environment()

    yield of_server
    for server in servers:
        server.folder.rmdir()


def test_version(typed):
    assert typed("version").output == f"redpoll {redpoll.__version__}\n"


def test_check_config_accepts_valid_settings(typed):
    result = typed("check-config", "--port", "0")
    assert (result.exit_code, result.stdout) == (0, "the settings are valid\n")


def test_every_fault_is_printed_and_the_exit_code_is_2(typed, monkeypatch, tmp_path):
    path = tmp_path / "redpoll.toml"
    path.write_text("prot = 1\n")
    monkeypatch.setenv("REDPOLL_WORKERS", "-1")
    for command in ("check-config", "serve"):
        result = typed(command, "--port", "x", "--config", str(path))
        assert result.exit_code == 2
        assert result.stdout == ""
        starts = [line.split(": ")[0] for line in result.stderr.splitlines()]
        assert starts == [str(path), "--port", "REDPOLL_WORKERS"]
    assert not (tmp_path / "data").exists()


def test_health_of_a_running_server(server, typed, wait_until_true):
    def health(*words: str):
        result = typed("health", "--data-dir", str(server.folder / "data"), *words)
        return result.exit_code, result.stdout

    # On a busy machine an answer may come later than the 3 s after which the command gives up.
    wait_until_true(lambda: health() == (0, "ready\n"))
    wait_until_true(lambda: json.loads(health("--json")[1]) == {"ready": True, "reason": None})


def test_health_without_a_server_exits_with_1(typed, tmp_path):
    result = typed("health")
    assert result.exit_code == 1
    assert result.stderr.startswith("redpoll: not ready: no server answers on the data folder ")
    assert not (tmp_path / "data").exists()


def test_health_of_a_server_that_is_not_ready_says_why(typed, monkeypatch):
    monkeypatch.setattr("redpoll.ipc.command_socket.ask", lambda *_args: {"obstacle": "Redis doesn't answer"})
    result = typed("health")
    assert (result.exit_code, result.stderr) == (1, "redpoll: not ready: Redis doesn't answer\n")
    result = typed("health", "--json")
    assert json.loads(result.stdout)["ready"] is False


def test_health_needs_no_port_and_publish_says_which_address_it_needs(typed, wait_until_true):
    with Server(workers=1, proxy_protocol=True) as server:
        folder = str(server.folder / "data")
        wait_until_true(lambda: typed("health", "--data-dir", folder).stdout == "ready\n")
        result = typed("publish", "news", "hello", "1", "--data-dir", folder)
        assert (result.exit_code, "PROXY protocol" in result.stderr) == (1, True)


def test_unknown_variable_is_only_a_warning(typed, monkeypatch):
    monkeypatch.setenv("REDPOLL_PROT", "1")
    result = typed("check-config")
    assert result.exit_code == 0
    assert result.stderr == "warning: REDPOLL_PROT is not a setting; did you mean REDPOLL_PORT?\n"


def test_every_setting_except_app_and_secrets_has_a_flag(typed):
    text = typed("serve", "--help").output
    for setting in TABLE:
        without = setting.name.startswith("app_") or setting.is_secret
        assert (f"{setting.flag} VALUE" in text) is not without


def test_serve_on_a_used_data_folder_exits_with_1(typed, tmp_path):
    with datafolder.lock(tmp_path / "data", "serve"):
        result = typed("serve", "--port", "0", "--control-port", "0")
    assert result.exit_code == 1
    (line,) = result.stderr.splitlines()
    assert line.startswith("redpoll: the data folder ")


def test_help_shows_list_defaults_in_their_typed_form(typed):
    text = " ".join(typed("serve", "--help").output.split())
    assert "[s] Default: 10.0,60.0,300.0." in text
    assert "Default: ()" not in text
    assert "Default: None" not in text


def test_settings_and_version_as_json(typed):
    assert json.loads(typed("version", "--json").stdout) == {"version": redpoll.__version__}
    assert json.loads(typed("check-config", "--json").stdout)["faults"] == []
    wrong = typed("check-config", "--port", "x", "--json")
    assert wrong.exit_code == 2
    assert "port" in json.loads(wrong.stdout)["faults"][0]


def test_root_starts_no_server_in_somebody_elses_folder(typed, foreign):
    result = typed("serve")
    assert result.exit_code == 1
    assert "belongs to nobody" in result.stderr
    assert list(foreign.iterdir()) == []


def test_a_server_starts_in_a_pod_beside_a_service_named_redpoll(tmp_path, environment):
    file = tmp_path / "redpoll.toml"
    file.write_text('host = "127.0.0.1"\nport = 0\ncontrol_port = 0\nworkers = 1\n')
    links = {"PORT": "tcp://10.96.12.3:80", "PORT_80_TCP": "tcp://10.96.12.3:80", "PORT_80_TCP_ADDR": "10.96.12.3"}
    links |= {"SERVICE_HOST": "10.96.12.3", "SERVICE_PORT": "80", "SERVICE_PORT_HTTP": "80"}
    command = [sys.executable, "-m", "redpoll", "serve", "--config", str(file), "--data-dir", str(tmp_path / "data")]
    with (
        open(tmp_path / "err", "w") as errors,
        subprocess.Popen(command, env=environment(**links), stdout=subprocess.PIPE, stderr=errors, text=True) as server,
    ):
        printed = []
        while not printed or (printed[-1] and not printed[-1].startswith("ready ")):
            printed.append(server.stdout.readline())
        server.send_signal(signal.SIGTERM)
    said = (tmp_path / "err").read_text()
    assert (server.returncode, printed[-1].startswith("ready public=http://127.0.0.1:")) == (0, True), said
    assert "is not a setting" not in said


def test_a_server_whose_standard_streams_are_closed_serves(tmp_path, environment):
    """A worker's pipe got number 1, and the ready line went into it."""
    redpoll = f"exec {sys.executable} -m redpoll serve --port 0 --control-port 0 --workers 1 --data-dir data"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(str(tmp_path / "notify"))
        systemd.settimeout(60)
        variables = environment() | {"NOTIFY_SOCKET": str(tmp_path / "notify")}
        with subprocess.Popen(["sh", "-c", f"{redpoll} <&- >&- 2>&-"], env=variables, cwd=tmp_path) as server:
            try:
                assert systemd.recv(100) == b"READY=1"
                assert Path(f"/proc/{server.pid}/fd/1").readlink() == Path(os.devnull)
            finally:
                server.send_signal(signal.SIGTERM)
    assert server.returncode == 0


def test_serve_refuses_a_folder_whose_records_are_in_postgres(typed, app_id, tmp_path):
    data_files.note_postgres(tmp_path / "data", "PostgreSQL at db/redpoll")
    result = typed("serve", "--port", "0", "--control-port", "0")
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
    assert f"the records of {tmp_path / 'data'} are in PostgreSQL at db/redpoll: set database_url" in result.stderr
    assert "redpoll store copy" in result.stderr
