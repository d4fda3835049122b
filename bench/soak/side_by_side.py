"""Runs a server of an earlier commit and one of this checkout as two nodes of one cluster, as a rolling upgrade does.

    python -m bench.soak.side_by_side --from COMMIT       from any commit
    python -m bench.soak.side_by_side --checkout DIR      from a checkout whose extensions are built already

Both share a Redis and a PostgreSQL of their own. Clients of each node subscribe, are members of one presence channel,
and get what is published through either node; each node shows what was changed on the other; webhooks come once. Then
Redis loses its data, the old node is drained and stopped, and the new one carries on. At last the old one joins again,
as when an upgrade is taken back. Two consecutive releases must pass. It takes about a minute after the build.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import tempfile
from pathlib import Path

from bench.arguments import parser_of
from bench.soak.upgrade import Upgraded, built, check, joined
from helpers.ports import reserved_ports
from helpers.postgres import PostgresServer
from helpers.receiver import Receiver
from helpers.sentinel import RedisNode
from helpers.wire import Api, Socket, eventually

MESSAGES = 100
ROOM = "presence-room"


def alive(server: Upgraded) -> list[tuple[str, bool]]:
    """The living nodes as this one lists them, and whether they are drained."""
    return sorted((row["name"], row["draining"]) for row in server.command("node", "list") if row["alive"])


async def shows(server: Upgraded, *words: str, expected: object, key: str) -> None:
    async def asked() -> object:
        return sorted(row[key] for row in await asyncio.to_thread(server.command, *words))

    await eventually(asked, expected)


async def published(servers: list[Upgraded], clients: list[Socket], first: int) -> int:
    """Publishes through all nodes by turns. Every client must get each event once, and all must get the same order."""
    apis = [Api(server) for server in servers]
    async with contextlib.AsyncExitStack() as stack:
        for api in apis:
            await stack.enter_async_context(api)
        for number in range(first, first + MESSAGES):
            await apis[number % len(apis)].publish("stored-news", "n", str(number))
    expected = [str(number) for number in range(first, first + MESSAGES)]
    for client in clients:
        await client.until(lambda: numbers(client, first)[-1:] == expected[-1:], what="the events")  # noqa: B023
        check(f"what a client gets of {MESSAGES} events", numbers(client, first), expected)
    return first + MESSAGES


def numbers(client: Socket, first: int) -> list[str]:
    return [one["data"] for one in client.all("n") if int(one["data"]) >= first]


async def takes_publishes(server: Upgraded) -> None:
    async with Api(server) as api:

        async def answer() -> int:
            return (await api.ask("POST", "/events", {"name": "probe", "channels": ["unheard"], "data": ""}))[0]

        await eventually(answer, 200)


async def side_by_side(checkout: Path, redis: RedisNode, database_url: str) -> None:
    settings = {
        "workers": 2,
        "database_url": database_url,
        "webhook_allow_http": 1,
        "webhook_allow_addresses": "127.0.0.0/8",
        "webhook_debounce_s": 0,
    }
    old = Upgraded(redis_url=redis.url, node_name="old", **settings)
    old.checkout = checkout
    new = Upgraded(redis_url=redis.url, node_name="new", **settings)
    async with Receiver() as receiver:
        with old:
            app = old.app_id
            rule = ("history", "rule", "add", app, "--prefix", "stored-", "--keep", "1000", "--seconds", "3600")
            old.command(*rule)
            with new:
                await both(old, new, receiver, redis)


async def both(old: Upgraded, new: Upgraded, receiver: Receiver, redis: RedisNode) -> None:
    app = old.app_id
    expected = [("new", False), ("old", False)]
    for node in (old, new):
        check(f"nodes that {node.settings['node_name']} lists", alive(node), expected)

    # Records: what is changed on one node takes effect on the other.
    made = [node.command("app", "create", f"made on {node.settings['node_name']}")["id"] for node in (old, new)]
    for node in (old, new):
        await shows(node, "app", "list", expected=sorted([app, *made]), key="id")
    hook = new.command("webhook", "create", app, receiver.url, "--events", "member.added,member.removed")
    await shows(old, "webhook", "list", app, expected=[hook["id"]], key="id")
    print("as before: apps and webhooks of both")

    # Members, counts and events.
    members = {}
    for node, user in ((old, "anna"), (new, "ben")):
        members[user] = await Socket.connect(node)
        await members[user].subscribe(ROOM, user)
    for node in (old, new):
        async with Api(node) as api:
            await eventually(lambda: api.users(ROOM), ["anna", "ben"])
    await members["anna"].until(lambda: members["anna"].all("pusher_internal:member_added", ROOM))
    clients = [(await joined(node, None))[0] for node in (old, new)]
    number = await published([old, new], clients, 0)
    print(f"as before: members of both, {MESSAGES} events through both, in one order")
    pages = []
    for node in (old, new):
        async with Api(node) as api:
            pages.append(await api.get("/channels/stored-news/history", limit="1000"))
    check("history of both", pages[0], pages[1])

    # Redis loses its data. Publishes wait for the workers of both.
    await asyncio.to_thread(redis.kill)
    await asyncio.to_thread(redis.start)
    for node in (old, new):
        await takes_publishes(node)
    number = await published([old, new], clients, number)
    for node in (old, new):
        async with Api(node) as api:
            await eventually(lambda: api.users(ROOM), ["anna", "ben"])
    print("as before: members and events after Redis lost its data")

    # The old node is drained by the new one. Its client recovers on the new one and misses nothing.
    async with Api(old) as api:
        page = await api.get("/channels/stored-news/history", limit="1")
    place = {"epoch": page["epoch"], "offset": clients[0].all("n")[-1]["offset"]}
    new.command("node", "drain", "old", "--within", "1")
    check("close code of the drained client", await clients[0].until_closed(), 4200)
    check("close code of the drained member", await members["anna"].until_closed(), 4200)
    check("nodes while the old one is drained", alive(new), [("new", False), ("old", True)])
    number = await published([old, new], clients[1:], number)
    clients[0], success = await joined(new, place)
    check("recovered on the new node", success["recovered"], True)
    await clients[0].until(lambda: len(clients[0].all("n")) == MESSAGES)
    await asyncio.to_thread(old.stop)
    await eventually(lambda: asyncio.to_thread(leader, new), "new")
    number = await published([new], clients, number)
    async with Api(new) as api:
        await eventually(lambda: api.users(ROOM), ["ben"])

    async def announced() -> list[tuple[str, str]]:
        bodies = {request.headers["x-service-delivery"]: request.json() for request in receiver.requests}
        return sorted((body["event"], body["data"]["user_id"]) for body in bodies.values())

    wanted = [("member.added", "anna"), ("member.added", "ben"), ("member.removed", "anna")]
    await eventually(announced, wanted)
    print("as before: events and webhooks after the old node was drained and stopped")

    # The upgrade is taken back.
    await asyncio.to_thread(old.start)
    await eventually(lambda: asyncio.to_thread(alive, new), [("new", False), ("old", False)])
    clients.append((await joined(old, None))[0])
    await published([new, old], clients, number)
    print("as before: events after the old node joined again")
    for client in (*clients, members["ben"]):
        client.abort()


def leader(node: Upgraded) -> str | None:
    return next((row["name"] for row in node.command("node", "list") if row["leader"]), None)


def main() -> None:
    parser = parser_of(__doc__, saves=False)
    old = parser.add_mutually_exclusive_group(required=True)
    old.add_argument("--from", dest="commit", help="the commit of the old node")
    old.add_argument("--checkout", type=Path, help="an existing checkout of it, with its extensions built")
    options = parser.parse_args()
    os.environ.pop("REDIS_URL", None)
    with contextlib.ExitStack() as stack:
        checkout = options.checkout or stack.enter_context(built(options.commit))
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="rp")))
        (port,) = stack.enter_context(reserved_ports(1))
        redis = RedisNode(folder, port, ["--port", str(port), "--save", "", "--appendonly", "no"])
        redis.start()
        stack.callback(redis.kill)
        postgres = PostgresServer()
        postgres.start()
        stack.callback(postgres.close)
        # Empty: the old node makes the tables, and the new one changes them.
        database_url = postgres.url(postgres.create_database(empty=True))
        asyncio.run(side_by_side(checkout.resolve(), redis, database_url))


if __name__ == "__main__":
    main()
