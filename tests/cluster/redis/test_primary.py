"""What a link and a bus do when their server becomes a replica, refuses writes, or is silent."""

import asyncio

import pytest
import redis as redis_py
from redis.exceptions import ResponseError

from helpers.bus_publishing import Outgoing, call_of
from redpoll.cluster.bus import Bus, Unavailable
from redpoll.cluster.redis.keys import Keys
from redpoll.cluster.redis.link import Link
from redpoll.control.publish.publisher import Publisher
from redpoll.protocol.apps import App

APP = App(id="1", name="one", keys=())
EVENT = call_of(APP, [Outgoing("c", "e", "d")])


@pytest.fixture
async def link(own_redis):
    link = Link(own_redis.url, first_delay_s=0.01, max_delay_s=0.05)
    link.start()
    await link.wait_up()
    yield link
    await link.close()


@pytest.fixture
def bus(link):
    return Bus(link, Keys())


@pytest.fixture
async def publisher(bus):
    async def subscribed():
        pass

    publisher = Publisher(bus, subscribed, confirm_s=60.0)
    publisher.open = True
    yield publisher
    publisher.close()


@pytest.fixture
def looks_often(monkeypatch):
    monkeypatch.setitem(Link.__init__.__kwdefaults__, "look_every_s", 0.02)
    monkeypatch.setitem(Link.__init__.__kwdefaults__, "max_unanswered_looks", 100_000)


@pytest.fixture
def looks_never(monkeypatch):
    monkeypatch.setitem(Link.__init__.__kwdefaults__, "look_every_s", 3600.0)


async def demote(redis):
    """The server becomes a replica of one that doesn't answer, and keeps its connections."""
    await asyncio.to_thread(redis.call, "REPLICAOF", "127.0.0.1", "1")


async def promote(redis):
    await asyncio.to_thread(redis.call, "REPLICAOF", "NO", "ONE")


async def test_link_leaves_a_server_that_became_a_replica_and_waits_until_it_is_a_primary(
    looks_often, own_redis, link, wait_until
):
    await demote(own_redis)
    await wait_until(lambda: not link.up)
    # One connection for all questions, so that the others are the link's.
    with redis_py.Redis(unix_socket_path=own_redis.path) as client:
        refused = client.info("stats")["total_connections_received"]
        await wait_until(lambda: client.info("stats")["total_connections_received"] > refused + 2)
    assert link.connects == 1
    await promote(own_redis)
    await wait_until(lambda: link.up)


async def test_publish_on_a_replica_is_not_confirmed(looks_never, own_redis, link, publisher):
    await publisher.publish_all(EVENT, None)
    await demote(own_redis)
    with pytest.raises(Unavailable):
        await publisher.publish_all(EVENT, None)
    assert (publisher.events_published, publisher.unconfirmed) == (1, 1)


async def test_publish_is_refused_while_redis_has_too_few_replicas_to_write(
    looks_often, own_redis, link, bus, publisher, wait_until
):
    own_redis.call("CONFIG", "SET", "min-replicas-to-write", "1")
    # Looks are so frequent here that a server which is only slow may seem silent for a moment.
    await wait_until(lambda: link.refusal == "" or link.refusal.startswith("NOREPLICAS"))
    with pytest.raises(Unavailable, match="NOREPLICAS"):
        await publisher.publish_all(EVENT, None)
    await wait_until(lambda: link.refusal.startswith("NOREPLICAS"))
    sent = bus.published
    with pytest.raises(Unavailable, match="NOREPLICAS"):
        await publisher.publish_all(EVENT, None)
    assert bus.published == sent
    own_redis.call("CONFIG", "SET", "min-replicas-to-write", "0")
    await wait_until(lambda: publisher.takes)
    await publisher.publish_all(EVENT, None)
    assert link.connects == 1


async def test_redis_that_is_full_still_publishes(own_redis, publisher):
    own_redis.call("CONFIG", "SET", "maxmemory", "1")
    with pytest.raises(ResponseError, match="maxmemory"):
        own_redis.call("SET", "key", "value")
    await publisher.publish_all(EVENT, None)
    assert publisher.events_published == 1


async def test_redis_that_cannot_write_its_file_still_publishes(own_redis, publisher, wait_until):
    (own_redis.folder / "dump.rdb").mkdir()
    own_redis.call("CONFIG", "SET", "save", "3600 1000000")
    own_redis.call("BGSAVE")
    await wait_until(lambda: own_redis.call("INFO", "persistence")["rdb_last_bgsave_status"] == "err")
    with pytest.raises(ResponseError, match="MISCONF"):
        own_redis.call("SET", "key", "value")
    await publisher.publish_all(EVENT, None)
    assert publisher.events_published == 1


async def test_publish_is_refused_at_once_while_redis_is_silent(looks_often, own_redis, publisher, wait_until):
    own_redis.pause()
    try:
        await wait_until(lambda: not publisher.takes)
        with pytest.raises(Unavailable, match="doesn't answer"):
            await publisher.publish_all(EVENT, None)
    finally:
        own_redis.resume()
    await wait_until(lambda: publisher.takes)
    await publisher.publish_all(EVENT, None)
