"""The command `redpoll` as it is typed: output, exit codes, with and without a server."""

import json
import os
import subprocess
import sys

import pytest
from click.testing import CliRunner

import redpoll
from redpoll import datafolder
from redpoll.cli import main
from redpoll.config import TABLE


@pytest.fixture
def typed(tmp_path, monkeypatch):
    """`typed("app", "list")` → click's result; the data folder is `tmp_path / "data"`, the environment is
    clean.
    """
    for name in list(os.environ):
        if name.startswith(("REDPOLL_", "SOKETI_", "PUSHER_")) or name == "REDIS_URL":
            monkeypatch.delenv(name)
    monkeypatch.setenv("REDPOLL_DATA_DIR", str(tmp_path / "data"))
    umask = os.umask(0o022)

    def run(*words: str):
        return CliRunner().invoke(main, words)

    yield run
    os.umask(umask)


def test_version(typed):
    assert typed("version").output == f"redpoll {redpoll.__version__}\n"


def test_good_settings_are_called_good(typed):
    result = typed("check-config", "--port", "0")
    assert (result.exit_code, result.stdout) == (0, "the settings are good\n")


def test_every_fault_is_printed_and_the_code_is_2(typed, monkeypatch, tmp_path):
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


def test_an_unknown_variable_is_a_warning_only(typed, monkeypatch):
    monkeypatch.setenv("REDPOLL_PROT", "1")
    result = typed("check-config")
    assert result.exit_code == 0
    assert result.stderr == "warning: REDPOLL_PROT is no setting; did you mean REDPOLL_PORT?\n"


def test_every_setting_but_the_app_has_a_flag(typed):
    text = typed("serve", "--help").output
    for setting in TABLE:
        assert (f"{setting.flag} VALUE" in text) is not setting.name.startswith("app_")


def test_what_serve_cannot_start_is_one_sentence_and_1(typed, tmp_path):
    with datafolder.hold(tmp_path / "data", "serve"):
        result = typed("serve", "--port", "0", "--control-port", "0")
    assert result.exit_code == 1
    (line,) = result.stderr.splitlines()
    assert line.startswith("redpoll: the data folder ")


def test_an_app_is_made_listed_and_shown_without_a_server(typed, tmp_path):
    made = json.loads(typed("app", "create", "demo", "--json").stdout)
    assert json.loads(typed("app", "list", "--json").stdout) == [made]
    assert json.loads(typed("app", "show", made["id"], "--json").stdout) == made
    assert made["name"] == "demo"
    assert (tmp_path / "data" / "redpoll.sqlite").stat().st_mode & 0o077 == 0


def test_for_people_an_app_comes_with_how_to_use_it(typed):
    text = typed("app", "create", "demo").stdout
    assert "PUSHER_URL=http://" in text
    assert "127.0.0.1:6001" in text
    (line,) = typed("app", "list").stdout.splitlines()
    assert line.endswith("demo")
    shown = typed("app", "show", line.split()[0]).stdout
    assert shown.startswith("id ")
    assert "secret  " in shown


def test_an_app_that_is_not_there_is_one_sentence_and_1(typed):
    result = typed("app", "show", "5")
    assert (result.exit_code, result.stderr) == (1, "redpoll: there is no app with the id 5\n")


def test_a_folder_that_is_held_without_taking_commands_is_told(typed, tmp_path, monkeypatch):
    monkeypatch.setattr("redpoll.cli._WAIT_FOR_SERVER_S", 0.0)
    with datafolder.hold(tmp_path / "data", "serve"):
        result = typed("app", "list")
    assert result.exit_code == 1
    assert "is in use by redpoll serve" in result.stderr


def test_a_server_that_holds_the_folder_does_it(typed, tmp_path):
    code = (
        "import asyncio, sys\n"
        "from pathlib import Path\n"
        "from redpoll import datafolder\n"
        "from redpoll.control import commands\n"
        "from redpoll.control.records import Records\n"
        "from redpoll.store.store import Store, database_url\n"
        "async def serve(folder):\n"
        "    records = Records(await Store.open(database_url(folder)))\n"
        "    await records.load()\n"
        "    print('held', flush=True)\n"
        "    await asyncio.to_thread(sys.stdin.readline)\n"
        "    await commands.serve_commands(records, commands.socket_path(folder))\n"
        "    await asyncio.to_thread(sys.stdin.readline)\n"
        "    print(*(app.name for app in records.apps.values()), flush=True)\n"
        "folder = Path(sys.argv[1])\n"
        "with datafolder.hold(folder, 'serve'):\n"
        "    asyncio.run(serve(folder))\n"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "data")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        assert server.stdin is not None
        assert server.stdout.readline() == "held\n"
        # The command comes while the server is still starting: it waits for the socket.
        words = [sys.executable, "-m", "redpoll", "app", "create", "while it runs", "--json"]
        with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as asking:
            server.stdin.write("\n")
            server.stdin.flush()
            answer, _ = asking.communicate(timeout=20)
        assert json.loads(answer)["name"] == "while it runs"
        server.stdin.write("\n")
        server.stdin.flush()
        assert server.stdout.readline() == "while it runs\n"
