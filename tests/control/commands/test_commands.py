"""The operator's commands, executed in this process and by a running server over its socket."""

import asyncio
import contextlib
import json
import socket
import sqlite3

import pytest
import sqlalchemy as sa

from redpoll.config.config import Settings
from redpoll.control.commands import commands
from redpoll.control.commands.context import Context
from redpoll.control.records.records import Records
from redpoll.ipc.command_socket import CommandError, ask, socket_path
from redpoll.protocol.apps import SETTINGS, HistoryRule
from redpoll.protocol.auth import token_hash
from redpoll.store.store import Store, database_url


@pytest.fixture
async def context(tmp_path):
    """The context of a command while no server runs."""
    store = await Store.open(database_url(tmp_path))
    made = Context(store, Records(store), Settings())
    await made.records.load()
    yield made
    await store.close()


@pytest.fixture
def records(context):
    return context.records


@pytest.fixture
async def served(context, tmp_path):
    """`await served(verb, args)` sends a command over the socket, as the command line does."""
    path = socket_path(tmp_path)

    async def send(verb: str, args: dict) -> object:
        return await asyncio.to_thread(ask, path, verb, args, 60.0)

    send.path = path
    async with commands.serve_commands(context, path):
        yield send


async def test_app_create_show_and_list_return_the_same_fields(context):
    made = await commands.run(context, "app create", {"name": "demo"})
    assert list(made) == ["id", "name", "key", "secret", "keys"]
    assert made["keys"] == [{"key": made["key"], "secret": made["secret"], "enabled": True}]
    assert await commands.run(context, "app show", {"id": made["id"]}) == made
    assert await commands.run(context, "app list", {}) == [made]


async def test_records_in_postgres_are_not_restored_from_a_file(context, monkeypatch):
    restored = []
    monkeypatch.setattr(context, "cluster", object())
    monkeypatch.setattr(context, "restore", restored.append)
    monkeypatch.setattr(context.store, "shared", True)
    with pytest.raises(CommandError, match="pg_restore"):
        await commands.run(context, "server restore", {"file": "x"})
    assert restored == []


async def test_settings_are_set_as_text_and_shown_as_values(context, records):
    made = await commands.run(context, "app create", {"name": "demo"})
    args = {"id": made["id"], "settings": {"plan": "free", "allowed_origins": "a.example, *.b.example"}}
    shown = await commands.run(context, "app set", args)
    assert shown["id"] == made["id"]
    assert list(shown["settings"]) == list(SETTINGS)
    assert shown["settings"]["plan"] == records.apps[made["id"]].plan == "free"
    assert records.apps[made["id"]].allowed_origins == ("a.example", "*.b.example")
    assert await commands.run(context, "app set", {"id": made["id"], "settings": {}}) == shown


async def test_one_wrong_setting_prevents_all_changes(context, records):
    made = await commands.run(context, "app create", {"name": "demo"})
    before = records.apps[made["id"]]
    settings = {"plan": "free", "enabled": "perhaps", "colour": "red"}
    with pytest.raises(CommandError) as caught:
        await commands.run(context, "app set", {"id": made["id"], "settings": settings})
    first, second = str(caught.value).splitlines()
    assert "enabled" in first
    assert "colour" in second
    assert records.apps[made["id"]] is before


async def test_commands_for_keys_and_tokens_return_documented_fields(records, served):
    app = await served("app create", {"name": "demo"})
    added = await served("key add", {"app": app["id"], "key": None})
    assert list(added) == ["key", "secret"]
    assert await served("key list", {"app": app["id"]}) == [*app["keys"], added | {"enabled": True}]
    disabled = await served("key disable", {"app": app["id"], "key": app["key"]})
    assert disabled == app["keys"][0] | {"enabled": False}
    args = {"app": app["id"], "name": "CI", "scopes": ["publish"], "lasts_s": 60}
    token = await served("token create", args)
    assert list(token) == ["id", "token", "name", "scopes", "expires_at"]
    held = records.tokens[token_hash(token["token"])]
    assert (token["id"], token["scopes"], token["expires_at"]) == (held.id, ["publish"], int(held.expires_at))
    (listed,) = await served("token list", {"app": app["id"]})
    assert listed == {
        "id": held.id,
        "name": "CI",
        "prefix": token["token"][:8],
        "scopes": ["publish"],
        "created_at": int(held.created_at),
        "expires_at": int(held.expires_at),
        "last_used_at": None,
        "revoked_at": None,
    }
    (revoked,) = await served("token revoke", {"ids": [held.id]})
    assert revoked == listed | {"revoked_at": revoked["revoked_at"]}
    assert records.tokens[held.hash].revoked_at is not None


async def test_history_rules_are_created_listed_and_removed(records, served):
    app = (await served("app create", {"name": "x"}))["id"]
    fields = {"app": app, "name": "news-", "prefix": True, "keep": 100, "seconds": 60, "replay": 10}
    made = await served("history rule add", fields)
    assert list(made) == [name for name in HistoryRule.__struct_fields__ if name != "era"]
    unset = {"replay_seconds": 0, "client_events": False, "max_rate": None, "latest": False, "join": "", "by": ""}
    assert made == {"id": made["id"]} | unset | {name: value for name, value in fields.items() if name != "app"}
    assert await served("history rule list", {"app": app}) == [made]
    assert records.apps[app].history_rule("news-1").id == made["id"]
    with pytest.raises(CommandError, match=f"already has the rule {made['id']} for channels that begin with 'news-'"):
        await served("history rule add", fields)
    with pytest.raises(CommandError, match="seconds must be between"):
        await served("history rule add", {"app": app, "name": "a", "keep": 1})
    with pytest.raises(CommandError, match="no history rule with the id 123456"):
        await served("history rule remove", {"app": app, "rule": "123456"})
    assert await served("history rule remove", {"app": app, "rule": made["id"]}) == made
    assert await served("history rule list", {"app": app}) == []


async def test_history_commands_need_a_running_server(context):
    app = await context.records.create_app("x")
    args = {"app": app.id, "channel": "c", "query": {}}
    for verb in ("history show", "history clear"):
        with pytest.raises(CommandError, match="needs a running server, and none runs on this data folder"):
            await commands.run(context, verb, args)


async def test_running_server_executes_commands_over_its_socket(records, served):
    made = await served("app create", {"name": "Büro"})
    assert made["name"] == "Büro"
    assert records.apps[made["id"]].name == "Büro"
    assert await served("app list", {}) == [made]


async def test_impossible_commands_are_refused_with_a_reason(served):
    with pytest.raises(CommandError, match="there is no app with the id 5"):
        await served("app show", {"id": "5"})
    for verb, more in (
        ("key list", {}),
        ("key add", {"key": None}),
        ("key disable", {"key": "k"}),
        ("token list", {}),
        ("history rule list", {}),
        ("history rule add", {"name": "c", "keep": 1, "seconds": 1}),
        ("history rule remove", {"rule": "0"}),
        ("history show", {"channel": "c", "query": {}}),
        ("history clear", {"channel": "c"}),
    ):
        with pytest.raises(CommandError, match="there is no app with the id 5"):
            await served(verb, {"app": "5", **more})
    with pytest.raises(CommandError, match="1 to 200 printable characters"):
        await served("app create", {"name": ""})
    with pytest.raises(CommandError, match="doesn't know the command 'app destroy'"):
        await served("app destroy", {})


async def test_only_the_owner_may_use_the_socket(served):
    assert served.path.stat().st_mode & 0o777 == 0o600


async def test_socket_of_a_dead_server_is_replaced(context, tmp_path):
    path = socket_path(tmp_path)
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    async with commands.serve_commands(context, path):
        assert await asyncio.to_thread(ask, path, "app list", {}) == []


async def test_data_folder_with_a_long_path_has_a_socket(context, tmp_path):
    deep = tmp_path / ("d" * 100)
    deep.mkdir()
    async with commands.serve_commands(context, socket_path(deep)):
        assert await asyncio.to_thread(ask, socket_path(deep), "app list", {}) == []


async def test_command_that_runs_when_the_server_stops_is_answered(context, tmp_path, monkeypatch):
    """The store was closed under it, and the operator read "the server failed"."""
    path, begun, may_end = socket_path(tmp_path), asyncio.Event(), asyncio.Event()
    listed = commands.COMMANDS["app list"]

    async def slow(*args):
        begun.set()
        await may_end.wait()
        return await listed(*args)

    monkeypatch.setitem(commands.COMMANDS, "app list", slow)
    monkeypatch.setattr(commands, "_FINISH_WITHIN_S", 60.0)
    async with commands.serve_commands(context, path):
        asking = asyncio.create_task(asyncio.to_thread(ask, path, "app list", {}))
        await begun.wait()
        asyncio.get_running_loop().call_soon(may_end.set)
    assert await asking == []


@pytest.mark.parametrize("request_line", [b"hello\n", b"{}\n", b"[1]\n", b'{"verb": 1, "args": 2}\n', b"\n", b'{"verb'])
async def test_invalid_request_gets_an_error_and_the_socket_keeps_working(served, request_line):
    reader, writer = await asyncio.open_unix_connection(str(served.path))
    writer.write(request_line)
    writer.write_eof()
    assert "error" in json.loads(await reader.read())
    writer.close()
    assert await served("app list", {}) == []


async def test_locked_record_store_is_named_in_the_error(context, served, tmp_path):
    made = await commands.run(context, "app create", {"name": "demo"})
    async with context.store.reading() as connection:
        await connection.execute(sa.text("PRAGMA busy_timeout=10"))
    with contextlib.closing(sqlite3.connect(tmp_path / "redpoll.sqlite", isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(CommandError, match=r"^the record store failed: database is locked$"):
            await served("key add", {"app": made["id"], "key": "k" * 20})


async def test_request_may_be_as_long_as_a_command_line(context, served):
    with pytest.raises(CommandError, match="the server is still starting"):
        await served("dead-letter retry", {"ids": [f"{number:036}" for number in range(50_000)]})
