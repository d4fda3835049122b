"""Whole servers put channels where their record store's shard key says, and older stores leave them where they are."""

import contextlib
import sqlite3

from helpers import old_store
from helpers.bus_publishing import publish_all
from helpers.server import APP_ID, Server
from helpers.walk import command
from helpers.wire import Api, Socket
from redpoll.cluster.bus import Bus
from redpoll.cluster.redis.keys import Keys
from redpoll.cluster.redis.link import Link
from redpoll.protocol.apps import App, HistoryRule

CHANNEL = "stored-a"
RULE = ("--prefix", "stored-", "--keep", "10", "--seconds", "3600")


def make_old(server: Server) -> None:
    """Takes the store of a stopped server back to the migration before."""
    with contextlib.closing(sqlite3.connect(server.folder / "data" / "redpoll.sqlite")) as database:
        for statement in old_store.STATEMENTS:
            database.execute(statement)
        database.commit()


async def test_a_history_stored_before_the_migration_is_found_after_it(redis):
    with Server(workers=1, redis_url=redis.url) as server:
        command(server, "history", "rule", "add", APP_ID, *RULE)
        server.stop()
        make_old(server)
        # As the release before stores it.
        rule = HistoryRule(id="0a0b0c", name="stored-", prefix=True, keep=10, seconds=3600)
        link = Link(redis.url)
        link.start()
        await link.wait_up()
        item = (CHANNEL, "before", "{}", None)
        await publish_all(Bus(link, Keys()), App(id=APP_ID, name="x", keys=(), history=(rule,)), [item])
        await link.close()
        server.start()
        async with Api(server) as api:
            await api.publish(CHANNEL, "after", "{}")
            found = await api.get(f"/channels/{CHANNEL}/history")
        assert [message["event"] for message in found["messages"]] == ["before", "after"]


async def test_nodes_of_one_record_store_agree_and_a_stranger_does_not(redis, postgres_url):
    channels = [f"room-{number}" for number in range(100)]
    settings = {"redis_url": redis.url, "database_url": postgres_url, "workers": 1}
    with Server(**settings, node_name="a") as a, Server(**settings, node_name="b") as b:
        client = await Socket.connect(a)
        for channel in channels:
            await client.subscribe(channel)
        async with Api(b) as api:
            for channel in channels:
                await api.publish(channel, channel, "{}")
        for channel in channels:
            assert (await client.next(channel))["channel"] == channel
        with a.redis() as connection:
            keys = set(connection.scan_iter(f"rp:*:c:{APP_ID}:room-*", count=1000))
        client.abort()
    guessed = {Keys().counts(APP_ID, channel) for channel in channels}
    # A stranger who knows everything but the key guesses one place in 64.
    assert (len(keys), len(keys & guessed) < 20) == (100, True)
