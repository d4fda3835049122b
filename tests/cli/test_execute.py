"""Commands on records, executed in this process or by a running server."""

import asyncio
import json
import os
import subprocess
import sys
from dataclasses import dataclass, replace

import aiohttp
import pytest
from click.testing import CliRunner

from helpers.server import Server
from helpers.wire import Api, Socket, eventually
from redpoll.cli import main
from redpoll.config import data_files
from redpoll.host import datafolder
from redpoll.ipc.command_socket import ask, socket_path


def test_records_commands_do_not_need_to_read_the_certificate(typed, monkeypatch):
    for name, value in (("PORT", "0"), ("CERT", "/nowhere/tls.crt"), ("KEY", "/nowhere/tls.key")):
        monkeypatch.setenv(f"REDPOLL_TLS_{name}", value)
    assert typed("app", "list").exit_code == 0
    assert typed("check-config").exit_code == 2


def test_folder_in_use_without_a_command_socket_is_reported(typed, tmp_path, monkeypatch):
    monkeypatch.setattr("redpoll.cli.execute._WAIT_FOR_SERVER_S", 0.0)
    with datafolder.lock(tmp_path / "data", "serve"):
        result = typed("app", "list")
    assert result.exit_code == 1
    assert "is in use by redpoll serve" in result.stderr


@pytest.mark.parametrize("words", [("app", "list"), ("migrate",), ("restore", "FILE")])
def test_a_folder_that_cannot_be_locked_is_not_called_in_use(typed, app_id, tmp_path, words):
    file = tmp_path / "saved.sqlite"
    assert typed("backup", str(file)).exit_code == 0
    data = tmp_path / "data"
    (data / "redpoll.sqlite").unlink()
    (data / "lock").unlink()
    (data / "lock").mkdir()
    result = typed(*(str(file) if word == "FILE" else word for word in words))
    assert (result.exit_code, result.stderr.count("\n")) == (1, 1)
    assert result.stderr.endswith(f"the data folder {data} can't be used: Is a directory\n")


def test_a_folder_that_cannot_be_created_is_reported(typed, tmp_path):
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file" / "data", tmp_path / ("a" * 300)):
        result = typed("app", "list", "--data-dir", str(folder))
        assert (result.exit_code, result.stderr.count("\n")) == (1, 1)
        assert result.stderr.startswith(f"redpoll: the data folder {folder} can't be used: ")


def test_a_command_says_when_no_server_has_used_the_folder(typed, tmp_path):
    """It succeeds there, so nothing else would show that another folder was meant."""
    sentence = f"no server has used the data folder {tmp_path / 'data'}; --data-dir names another\n"
    first = typed("app", "create", "shop", "--json")
    assert (first.exit_code, first.stderr, json.loads(first.stdout)["name"]) == (0, sentence, "shop")
    assert typed("app", "create", "second").stderr == ""


def test_server_that_owns_the_folder_executes_the_command(typed, tmp_path):
    code = (
        "import asyncio, sys\n"
        "from pathlib import Path\n"
        "from redpoll.host import datafolder\n"
        "from redpoll.ipc.command_socket import socket_path\n"
        "from redpoll.control.commands import commands\n"
        "from redpoll.control.commands.context import Context\n"
        "from redpoll.control.records.records import Records\n"
        "from redpoll.config.settings import Settings\n"
        "from redpoll.store.store import Store, database_url\n"
        "async def serve(folder):\n"
        "    store = await Store.open(database_url(folder))\n"
        "    records = Records(store)\n"
        "    await records.load()\n"
        "    print('held', flush=True)\n"
        "    await asyncio.to_thread(sys.stdin.readline)\n"
        "    async with commands.serve_commands(Context(store, records, Settings()), socket_path(folder)):\n"
        "        await asyncio.to_thread(sys.stdin.readline)\n"
        "    print(*(app.name for app in records.apps.values()), flush=True)\n"
        "folder = Path(sys.argv[1])\n"
        "with datafolder.lock(folder, 'serve'):\n"
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
            answer, _ = asking.communicate(timeout=60)
        assert json.loads(answer)["name"] == "while it runs"
        server.stdin.write("\n")
        server.stdin.flush()
        assert server.stdout.readline() == "while it runs\n"


@pytest.mark.parametrize(
    "words",
    [
        ("app", "set", "APP", "max_connections=7"),
        ("app", "list"),
        ("key", "disable", "APP", "KEY"),
        ("token", "revoke", "TOKEN"),
        ("apply", "FILE"),
        ("migrate",),
        ("store", "copy", "sqlite:STORE", "sqlite:NEW"),
    ],
)
def test_commands_leave_an_old_record_store_alone_when_the_records_are_in_postgres(typed, app_id, tmp_path, words):
    store, file = tmp_path / "data" / "redpoll.sqlite", tmp_path / "apps.toml"
    file.write_text("[[apps]]\nid = 'shop'\nkey = 'k'\nsecret = 's'\n")
    before = store.read_bytes()
    data_files.note_postgres(store.parent, "PostgreSQL at db/redpoll")
    meant = {"APP": app_id, "FILE": str(file), "sqlite:STORE": f"sqlite:{store}", "sqlite:NEW": f"sqlite:{file}.new"}
    result = typed(*(meant.get(word, word) for word in words))
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1), result.output
    assert result.stderr.startswith(f"the records of {store.parent} are in PostgreSQL at db/redpoll: ")
    assert store.read_bytes() == before
    (store.parent / data_files.MARKER).unlink()
    assert json.loads(typed("app", "list", "--json").stdout)[0]["id"] == app_id


def test_root_reads_the_marker_with_the_rights_of_the_folders_owner(typed, foreign, tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("root's")
    (foreign / data_files.MARKER).symlink_to(secret)
    result = typed("app", "list")
    assert (result.exit_code, "root's" in result.stderr) == (2, False)


def test_root_leaves_no_file_of_its_own_in_somebody_elses_folder(typed, foreign):
    assert typed("app", "list").exit_code == 0
    assert {path.name: path.stat().st_uid for path in foreign.iterdir()} == {"lock": 65_534, "redpoll.sqlite": 65_534}
    assert os.geteuid() == 0


def test_root_follows_no_link_of_the_folders_owner(typed, foreign, tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("root's")
    (foreign / "lock").symlink_to(victim)
    result = typed("app", "list")
    assert (result.exit_code, "can't be used" in result.stderr, victim.read_text()) == (1, True, "root's")


# -- beside a running server


@pytest.fixture(scope="module")
def server():
    with Server(workers=2) as running:
        yield running


def execute(server: Server, *words: str) -> object:
    """Runs a command on the server's data folder and returns its JSON output."""
    done = CliRunner().invoke(main, [*words, "--json", "--data-dir", str(server.folder / "data")])
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


@pytest.fixture
def command(server):
    """`command("app", "list")` runs a command beside the running server and returns its JSON output."""
    return lambda *words: execute(server, *words)


@dataclass
class Credentials:
    """The server's port and one of the app's keys, in the form that wire's clients need."""

    port: int
    app_id: str
    app_key: str
    app_secret: str


@pytest.fixture
def app(command, server):
    """A new app, with its first key."""
    created = command("app", "create", "live")
    return Credentials(server.port, created["id"], created["key"], created["secret"])


async def refused_with(target: Credentials) -> int | None:
    """The code with which a new connection is refused; None if it is accepted."""
    client = await Socket.connect(target, established=False)
    try:
        first = await client.next()
        return first["data"]["code"] if first["event"] == "pusher:error" else None
    finally:
        client.abort()
        # abort takes effect in the loop's next turn. Without this, a server that stops now would wait for this client.
        await asyncio.sleep(0)


async def everywhere(target: Credentials) -> set[int | None]:
    """The result of new connections on both workers. The kernel picks the worker, so 20 connections miss one with a
    probability of 2e-6."""
    return {await refused_with(target) for _ in range(20)}


async def status_of(target: Credentials) -> int:
    async with Api(target) as api:
        status, _ = await api.ask("GET", "/channels")
        return status


async def test_keys_are_rotated_while_clients_stay_connected(app, command):
    client = await Socket.connect(app)
    await client.subscribe("news")
    added = command("key", "add", app.app_id)
    new = replace(app, app_key=added["key"], app_secret=added["secret"])
    for target in (app, new):
        await eventually(lambda target=target: everywhere(target), {None})
        assert await status_of(target) == 200
    command("key", "disable", app.app_id, app.app_key)
    await eventually(lambda: everywhere(app), {4001})
    assert await status_of(app) == 401
    async with Api(new) as api:
        assert await api.ask("POST", "/events", {"name": "after", "channels": ["news"], "data": "{}"}) == (200, {})
    await client.next("after", "news")
    command("key", "add", app.app_id, app.app_key)
    await eventually(lambda: everywhere(app), {None})
    assert await status_of(app) == 200
    await client.close()


def test_apps_are_listed_by_id_as_after_a_restart(server, command):
    for number in range(6):
        ask(socket_path(server.folder / "data"), "app create", {"name": f"app {number}"})
    ids = [app["id"] for app in command("app", "list")]
    assert (len(ids) > 6, ids) == (True, sorted(ids))


async def test_an_app_is_switched_off_and_on_again(app, command):
    client = await Socket.connect(app)
    command("app", "set", app.app_id, "enabled=false")
    assert await client.until_closed() == 4003
    await eventually(lambda: everywhere(app), {4003})
    assert await status_of(app) == 403
    command("app", "set", app.app_id, "enabled=true")
    await eventually(lambda: everywhere(app), {None})
    assert await status_of(app) == 200


async def test_token_works_until_it_is_revoked(app, command):
    token = command("token", "create", app.app_id, "--name", "CI", "--scope", "read", "--expires", "1h")

    async def answer() -> tuple[int, str | None]:
        headers = {"Authorization": f"Bearer {token['token']}"}
        url = f"http://127.0.0.1:{app.port}/apps/{app.app_id}/channels"
        async with aiohttp.ClientSession() as session, session.get(url, headers=headers) as response:
            return response.status, (await response.json()).get("code")

    assert await answer() == (200, None)
    (listed,) = command("token", "list", app.app_id)
    assert listed["last_used_at"] is not None
    command("token", "revoke", token["id"])
    assert await answer() == (401, "token_revoked")


async def test_history_rule_applies_at_once(app, command):
    rule = command("history", "rule", "add", app.app_id, "--prefix", "news-", "--keep", "5", "--seconds", "60")
    event = {"name": "e", "channels": ["news-1"], "data": "stored"}

    async def stored() -> list[str]:
        async with Api(app) as api:
            assert await api.ask("POST", "/events", event) == (200, {})
        page = command("history", "show", app.app_id, "news-1", "--limit", "1")
        return [message["data"] for message in page["messages"]]

    await eventually(stored, ["stored"])
    epoch = command("history", "show", app.app_id, "news-1")["epoch"]
    assert command("history", "clear", app.app_id, "news-1")["epoch"] != epoch
    assert command("history", "show", app.app_id, "news-1")["messages"] == []
    assert command("history", "rule", "remove", app.app_id, rule["id"]) == rule


async def test_changes_made_while_no_server_runs_apply_at_the_next_start(app, command, server):
    await eventually(lambda: everywhere(app), {None})
    server.stop()
    await asyncio.to_thread(command, "key", "add", app.app_id, "offline")
    await asyncio.to_thread(command, "key", "disable", app.app_id, app.app_key)
    server.start()
    for key, code in ((app.app_key, 4001), ("offline", None)):
        target = replace(app, port=server.port, app_key=key)
        await eventually(lambda target=target: everywhere(target), {code})
