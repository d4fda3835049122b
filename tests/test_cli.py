"""The command `redpoll` as it is typed: output, exit codes, with and without a server."""

import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass, replace

import aiohttp
import pytest
from click.testing import CliRunner

import redpoll
from redpoll import datafolder
from redpoll.cli import main
from redpoll.config import TABLE
from redpoll.protocol.apps import SETTINGS
from server import Server
from wire import Api, Socket, eventually


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


def test_every_setting_but_the_app_and_secrets_has_a_flag(typed):
    text = typed("serve", "--help").output
    for setting in TABLE:
        without = setting.name.startswith("app_") or setting.is_secret
        assert (f"{setting.flag} VALUE" in text) is not without


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


@pytest.fixture
def app_id(typed):
    """Of an app that was made without a server."""
    return json.loads(typed("app", "create", "demo", "--json").stdout)["id"]


def test_settings_are_changed_and_shown_in_the_words_they_are_given_in(typed, app_id):
    given = ("plan=free", "client_events=0", "allowed_origins=a.example,*.b.example", "cache_ttl_s=60")
    result = typed("app", "set", app_id, *given)
    assert result.stdout.splitlines() == ["plan=free", "client_events=false", *given[2:]]
    shown = typed("app", "set", app_id).stdout.splitlines()
    assert [line.partition("=")[0] for line in shown] == list(SETTINGS)
    assert typed("app", "set", app_id, *shown).stdout.splitlines() == shown
    assert typed("app", "show", app_id).stdout.endswith("\n".join(shown) + "\n")
    values = json.loads(typed("app", "set", app_id, "--json").stdout)["settings"]
    assert (values["client_events"], values["allowed_origins"]) == (False, ["a.example", "*.b.example"])


def test_every_fault_of_an_assignment_is_told_and_nothing_is_changed(typed, app_id):
    result = typed("app", "set", app_id, "plan=free", "plan=pro", "enabled=maybe", "colour=red", "watchlist")
    assert (result.exit_code, result.stdout) == (2, "")
    starts = ("plan is given more than once", "enabled must be", "there is no setting 'colour'", "'watchlist' is not")
    lines = result.stderr.splitlines()
    assert len(lines) == len(starts)
    assert all(line.startswith(start) for line, start in zip(lines, starts, strict=True))
    assert "plan=pro" in typed("app", "set", app_id).stdout


def test_an_app_is_switched_off_and_on(typed, app_id):
    assert typed("app", "set", app_id, "enabled=false").stdout == "enabled=false\n"
    assert typed("app", "set", app_id, "enabled=true").stdout == "enabled=true\n"


def test_a_key_takes_the_place_of_another(typed, app_id):
    (old,) = json.loads(typed("key", "list", app_id, "--json").stdout)
    added = json.loads(typed("key", "add", app_id, "--json").stdout)
    assert list(added) == ["key", "secret"]
    assert typed("key", "disable", app_id, old["key"]).stdout == f"{old['key']}  (disabled)\n"
    assert typed("key", "list", app_id).stdout.splitlines() == [
        f"{old['key']}  {old['secret']}  (disabled)",
        f"{added['key']}  {added['secret']}",
    ]
    assert json.loads(typed("app", "show", app_id, "--json").stdout)["key"] == added["key"]
    back = typed("key", "add", app_id, old["key"]).stdout
    assert back == f"key     {old['key']}\nsecret  {old['secret']}\n"


def test_the_last_key_is_not_disabled(typed, app_id):
    (only,) = json.loads(typed("key", "list", app_id, "--json").stdout)
    result = typed("key", "disable", app_id, only["key"])
    assert result.exit_code == 1
    assert "is the last enabled key" in result.stderr


def test_a_token_is_shown_once(typed, app_id):
    before_s = time.time()
    result = typed("token", "create", app_id, "--name", "CI", "--scope", "publish", "--expires", "30d", "--json")
    made = json.loads(result.stdout)
    assert list(made) == ["id", "token", "name", "scopes", "expires_at"]
    assert (made["name"], made["scopes"]) == ("CI", ["publish"])
    assert 0 <= made["expires_at"] + 1 - before_s - 30 * 86_400 < 30
    listed = typed("token", "list", app_id)
    assert made["token"] not in listed.stdout
    assert listed.stdout.startswith(f"{made['id']}  {made['token'][:8]}…  publish  expires ")


@pytest.mark.parametrize(
    ("words", "scopes"),
    [
        (["publish,read"], ["publish", "read"]),
        (["read", "publish"], ["publish", "read"]),
        (["auth, read", "read"], ["read", "auth"]),
        (["all"], ["all"]),
    ],
)
def test_scopes_are_repeated_or_have_commas(typed, app_id, words, scopes):
    options = [part for word in words for part in ("--scope", word)]
    assert json.loads(typed("token", "create", app_id, "--name", "n", *options, "--json").stdout)["scopes"] == scopes


def test_a_scope_that_is_none_is_one_sentence(typed, app_id):
    result = typed("token", "create", app_id, "--name", "n", "--scope", "write")
    assert (result.exit_code, result.stderr) == (
        1,
        "redpoll: a token has one scope or more out of publish, read, auth, all, not 'write'\n",
    )


@pytest.mark.parametrize(("text", "seconds"), [("90s", 90), ("15m", 900), ("12h", 43_200), ("30d", 2_592_000)])
def test_a_token_lasts_for_seconds_minutes_hours_or_days(typed, app_id, text, seconds):
    typed("token", "create", app_id, "--name", "n", "--scope", "all", "--expires", text)
    (token,) = json.loads(typed("token", "list", app_id, "--json").stdout)
    assert token["expires_at"] - token["created_at"] == seconds


@pytest.mark.parametrize("text", ["30", "d", "0d", "-1d", "1.5h", "1w", "1d2h", ""])
def test_another_time_is_a_fault(typed, app_id, text):
    result = typed("token", "create", app_id, "--name", "n", "--scope", "all", "--expires", text)
    assert result.exit_code == 2
    assert result.stderr.startswith("--expires: a number with s, m, h or d")


def test_tokens_are_revoked(typed, app_id):
    for name in ("a", "b"):
        typed("token", "create", app_id, "--name", name, "--scope", "all")
    ids = [token["id"] for token in json.loads(typed("token", "list", app_id, "--json").stdout)]
    result = typed("token", "revoke", *ids)
    assert [line.split()[:2] for line in result.stdout.splitlines()] == [[ids[0], "revoked"], [ids[1], "revoked"]]
    assert all(token["revoked_at"] for token in json.loads(typed("token", "list", app_id, "--json").stdout))
    assert "  revoked " in typed("token", "list", app_id).stdout
    assert typed("token", "revoke", ids[0], "nix").stderr == (
        "redpoll: there is no token with the id nix; nothing was revoked\n"
    )


def test_records_are_at_hand_where_the_certificate_cannot_be_read(typed, monkeypatch):
    for name, value in (("PORT", "0"), ("CERT", "/nowhere/tls.crt"), ("KEY", "/nowhere/tls.key")):
        monkeypatch.setenv(f"REDPOLL_TLS_{name}", value)
    assert typed("app", "list").exit_code == 0
    assert typed("check-config").exit_code == 2


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


# -- beside a running server


@pytest.fixture(scope="module")
def server():
    with Server(workers=2) as running:
        yield running


def carried_out(server: Server, *words: str) -> object:
    """What a command on the server's data folder printed as JSON."""
    line = [sys.executable, "-m", "redpoll", *words, "--json", "--data-dir", str(server.folder / "data")]
    done = subprocess.run(line, capture_output=True, text=True, env=server.environment(), timeout=30, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture
def command(server):
    """`command("app", "list")` → what the command printed, carried out beside the running server."""
    return lambda *words: carried_out(server, *words)


@dataclass
class Credentials:
    """An app as wire's clients want it: where the server is, and one of the app's keys."""

    port: int
    app_id: str
    app_key: str
    app_secret: str


@pytest.fixture
def app(command, server):
    """A new app, with its first key."""
    made = command("app", "create", "live")
    return Credentials(server.port, made["id"], made["key"], made["secret"])


async def refused_with(target: Credentials) -> int | None:
    """The code with which a new connection is refused; None where it is let in."""
    client = await Socket.connect(target, established=False)
    try:
        first = await client.next()
        return first["data"]["code"] if first["event"] == "pusher:error" else None
    finally:
        client.abort()


async def everywhere(target: Credentials) -> set[int | None]:
    """What both workers say to a new connection; the kernel chooses, so 20 of them miss one with a chance of 2e-6."""
    return {await refused_with(target) for _ in range(20)}


async def status_of(target: Credentials) -> int:
    async with Api(target) as api:
        status, _ = await api.ask("GET", "/channels")
        return status


async def test_a_key_is_changed_while_clients_stay_connected(app, command):
    client = await Socket.connect(app)
    await client.subscribe("news")
    added = command("key", "add", app.app_id)
    new = replace(app, app_key=added["key"], app_secret=added["secret"])
    for target in (app, new):
        await eventually(lambda each=target: everywhere(each), {None})
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


async def test_an_app_is_switched_off_and_on_again(app, command):
    client = await Socket.connect(app)
    command("app", "set", app.app_id, "enabled=false")
    assert await client.until_closed() == 4003
    await eventually(lambda: everywhere(app), {4003})
    assert await status_of(app) == 403
    command("app", "set", app.app_id, "enabled=true")
    await eventually(lambda: everywhere(app), {None})
    assert await status_of(app) == 200


async def test_a_token_opens_until_it_is_revoked(app, command):
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


async def test_what_was_changed_while_no_server_ran_is_in_force_at_its_next_start():
    with Server(workers=2) as server:
        before = Credentials(server.port, server.app_id, server.app_key, server.app_secret)
        await eventually(lambda: everywhere(before), {None})
        server.stop()
        carried_out(server, "key", "add", server.app_id, "offline")
        carried_out(server, "key", "disable", server.app_id, server.app_key)
        server.start()
        for key, code in ((server.app_key, 4001), ("offline", None)):
            target = Credentials(server.port, server.app_id, key, "")
            await eventually(lambda each=target: everywhere(each), {code})
