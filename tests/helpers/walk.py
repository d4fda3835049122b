"""Uses one running server in every way that involves Redis: channels, presence, history, cache, webhooks, limits.

Tests call `walk(server)` on each kind of Redis. Not a test.
"""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterable

from click.testing import CliRunner

from helpers.receiver import Receiver
from helpers.server import Server
from helpers.wire import Api, Socket, eventually
from redpoll.cli import main

# For a server that sends webhooks to a receiver of these tests, without a debounce.
WEBHOOKS = {"webhook_allow_http": 1, "webhook_allow_addresses": "127.0.0.0/8", "webhook_debounce_s": 0}
ADDED, REMOVED = "pusher_internal:member_added", "pusher_internal:member_removed"


def command(server: Server, *words: str) -> str:
    """What the command prints."""
    result = CliRunner().invoke(main, [*words, "--data-dir", str(server.folder / "data")])
    assert result.exit_code == 0, result.output
    return result.stdout


async def walk(server: Server, rooms: Iterable[str] = ("room",)) -> None:
    """`server` has the settings WEBHOOKS. The channels of each room are in other shards."""
    app = server.app_id
    command(server, "history", "rule", "add", app, "--prefix", "kept-", "--keep", "100", "--seconds", "3600")
    command(server, "app", "set", app, "idempotency=true", "max_connections=100", "plan=free")
    async with Receiver() as receiver, Api(server) as api:
        made = json.loads(command(server, "webhook", "create", app, receiver.url, "--json"))
        for room in rooms:
            await _visit(server, api, receiver, room)
        command(server, "webhook", "delete", made["id"])
    command(server, "app", "set", app, "idempotency=false", "max_connections=0", "plan=pro")


async def _visit(server: Server, api: Api, receiver: Receiver, room: str) -> None:
    presence, kept, cached, public = f"presence-{room}", f"kept-{room}", f"cache-{room}", f"public-{room}"
    alice, bob = await Socket.connect(server), await Socket.connect(server)
    await alice.subscribe(presence, "alice")
    await bob.subscribe(presence, "bob")
    await alice.next(ADDED, presence)
    for channel in (kept, cached, public):
        await alice.subscribe(channel)
    await bob.subscribe(public)
    event = {"name": "said", "channels": [kept], "data": "once", "correlation_id": room}
    assert await api.ask("POST", "/events", event) == (200, {})
    assert (await api.ask("POST", "/events", event))[0] == 200
    await api.publish([public, cached, kept], "said", "to all")
    batch = [{"name": "said", "channel": channel, "data": "batch"} for channel in (public, kept)]
    assert (await api.ask("POST", "/batch_events", {"batch": batch}))[0] == 200
    for channel, expected in {public: ["to all", "batch"], kept: ["once", "to all", "batch"]}.items():
        await alice.until(lambda: len(alice.all("said", channel)) == len(expected))  # noqa: B023
        assert [frame["data"] for frame in alice.all("said", channel)] == expected
    await bob.subscribe(cached)
    assert (await bob.next("said", cached))["data"] == "to all"
    bob.send({"event": "client-wave", "channel": presence, "data": {}})
    await alice.next("client-wave", presence)
    messages = (await api.get(f"/channels/{kept}/history"))["messages"]
    assert sorted(message["data"] for message in messages) == ["batch", "once", "to all"]
    assert await api.users(presence) == ["alice", "bob"]
    assert {presence, public} <= set((await api.get("/channels"))["channels"])
    await bob.close()
    await alice.next(REMOVED, presence)
    await eventually(lambda: api.users(presence), ["alice"])
    await alice.close()

    # Occupied, two members, a client event, two members gone, vacated.
    async def told() -> int:
        # With its quotes: another room's name may begin with this one's.
        return b" ".join(request.body for request in receiver.requests).count(f'"{presence}"'.encode())

    await eventually(told, 7)


def pages(server: Server) -> str:
    """/metrics and /readyz."""
    text = ""
    for path in ("/metrics", "/readyz"):
        with urllib.request.urlopen(server.control_url + path, timeout=60) as response:
            text += response.read().decode()
    return text
