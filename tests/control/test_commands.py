"""The operator's commands, run here and asked of a running server."""

import asyncio
import json
import socket

import pytest

from redpoll.control import commands
from redpoll.control.commands import CommandError
from redpoll.control.records import Records
from redpoll.protocol.apps import SETTINGS
from redpoll.protocol.auth import token_hash
from redpoll.store.store import Store, database_url


@pytest.fixture
async def records(tmp_path):
    store = await Store.open(database_url(tmp_path))
    made = Records(store)
    await made.load()
    yield made
    await store.close()


@pytest.fixture
async def served(records, tmp_path):
    """`await served(verb, args)` asks over the socket, as the command line does."""
    path = commands.socket_path(tmp_path)
    server = await commands.serve_commands(records, path)

    async def ask(verb: str, args: dict) -> object:
        return await asyncio.to_thread(commands.ask, path, verb, args, 10.0)

    ask.path = path
    yield ask
    server.close()


async def test_an_app_has_one_shape_everywhere(records):
    made = await commands.run(records, "app create", {"name": "demo"})
    assert list(made) == ["id", "name", "key", "secret", "keys"]
    assert made["keys"] == [{"key": made["key"], "secret": made["secret"], "enabled": True}]
    assert await commands.run(records, "app show", {"id": made["id"]}) == made
    assert await commands.run(records, "app list", {}) == [made]


async def test_settings_are_taken_as_text_and_shown_with_their_values(records):
    made = await commands.run(records, "app create", {"name": "demo"})
    args = {"id": made["id"], "settings": {"plan": "free", "allowed_origins": "a.example, *.b.example"}}
    shown = await commands.run(records, "app set", args)
    assert shown["id"] == made["id"]
    assert list(shown["settings"]) == list(SETTINGS)
    assert shown["settings"]["plan"] == records.apps[made["id"]].plan == "free"
    assert records.apps[made["id"]].allowed_origins == ("a.example", "*.b.example")
    assert await commands.run(records, "app set", {"id": made["id"], "settings": {}}) == shown


async def test_one_wrong_setting_keeps_all_from_being_changed(records):
    made = await commands.run(records, "app create", {"name": "demo"})
    before = records.apps[made["id"]]
    settings = {"plan": "free", "enabled": "perhaps", "colour": "red"}
    with pytest.raises(CommandError) as caught:
        await commands.run(records, "app set", {"id": made["id"], "settings": settings})
    first, second = str(caught.value).splitlines()
    assert "enabled" in first
    assert "colour" in second
    assert records.apps[made["id"]] is before


async def test_keys_and_tokens_have_their_shapes(records, served):
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


async def test_a_server_does_the_same_over_its_socket(records, served):
    made = await served("app create", {"name": "Büro"})
    assert made["name"] == "Büro"
    assert records.apps[made["id"]].name == "Büro"
    assert await served("app list", {}) == [made]


async def test_what_cannot_be_done_is_told_in_words(served):
    with pytest.raises(CommandError, match="there is no app with the id 5"):
        await served("app show", {"id": "5"})
    for verb, more in (("key list", {}), ("key add", {"key": None}), ("key disable", {"key": "k"}), ("token list", {})):
        with pytest.raises(CommandError, match="there is no app with the id 5"):
            await served(verb, {"app": "5", **more})
    with pytest.raises(CommandError, match="1 to 200 printable characters"):
        await served("app create", {"name": ""})
    with pytest.raises(CommandError, match="knows no command 'app destroy'"):
        await served("app destroy", {})


async def test_the_socket_is_for_its_owner_only(served):
    assert served.path.stat().st_mode & 0o777 == 0o600


async def test_the_socket_of_a_dead_server_is_taken_over(records, tmp_path):
    path = commands.socket_path(tmp_path)
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    server = await commands.serve_commands(records, path)
    assert await asyncio.to_thread(commands.ask, path, "app list", {}) == []
    server.close()


async def test_a_folder_too_deep_for_a_socket_path_still_has_one(records, tmp_path):
    deep = tmp_path / ("d" * 100)
    deep.mkdir()
    server = await commands.serve_commands(records, commands.socket_path(deep))
    assert await asyncio.to_thread(commands.ask, commands.socket_path(deep), "app list", {}) == []
    server.close()


@pytest.mark.parametrize("request_line", [b"hello\n", b"{}\n", b"[1]\n", b'{"verb": 1, "args": 2}\n', b"\n", b'{"verb'])
async def test_garbage_is_answered_and_harms_nobody(served, request_line):
    reader, writer = await asyncio.open_unix_connection(str(served.path))
    writer.write(request_line)
    writer.write_eof()
    assert "error" in json.loads(await reader.read())
    writer.close()
    assert await served("app list", {}) == []


async def test_no_server_is_an_error_of_the_connection(tmp_path):
    with pytest.raises(FileNotFoundError):
        commands.ask(commands.socket_path(tmp_path), "app list", {})


async def test_a_server_that_ends_before_it_answers_is_not_asked_again_in_silence(tmp_path):
    async def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readline()
        writer.close()

    async with await asyncio.start_unix_server(hang_up, commands.socket_path(tmp_path)):
        with pytest.raises(CommandError, match="may have done it all the same"):
            await asyncio.to_thread(commands.ask, commands.socket_path(tmp_path), "app create", {"name": "x"})
