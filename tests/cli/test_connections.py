"""`redpoll connections` against a server."""

import asyncio
import json

from helpers.wire import Socket


async def test_connections_are_listed_shown_and_closed(typed, server):
    where = ("--data-dir", str(server.folder / "data"))

    async def run(verb, *words):
        return await asyncio.to_thread(typed, "connections", verb, server.app_id, *words, *where)

    first, second = await Socket.connect(server), await Socket.connect(server)
    await second.subscribe("listed")
    listed = json.loads((await run("list", "--json")).stdout)
    assert {first.socket_id, second.socket_id} <= {row["socket"] for row in listed["connections"]}
    (line,) = (await run("list", "--channel", "listed")).stdout.splitlines()
    assert line.startswith(second.socket_id)
    assert "127.0.0.1" in line
    assert (await run("show", second.socket_id)).stdout.splitlines()[1:] == ["  listed"]
    assert (await run("kick", second.socket_id)).stdout == f"closed {second.socket_id}\n"
    assert await second.until_closed() == 4009
    for verb in ("show", "kick"):
        missing = await run(verb, second.socket_id)
        assert (missing.exit_code, "no connection with the socket id" in missing.stderr) == (1, True)
    first.abort()


def test_without_a_server_there_are_none(typed, app_id):
    result = typed("connections", "list", app_id)
    assert (result.exit_code, "needs a running server" in result.stderr) == (1, True)
