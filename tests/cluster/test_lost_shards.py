"""Control and supervisor while they have lost some shards of a real Redis Cluster: work on the others goes on."""

import asyncio
import hashlib
from contextlib import asynccontextmanager

import pytest

from helpers.sentinel import redis_cluster
from redpoll.cluster.idempotency import Idempotency, Outcome
from redpoll.cluster.membership.reaper import Reaper
from redpoll.cluster.outbox import Outbox
from redpoll.cluster.quota import Quota
from redpoll.cluster.redis.cluster_link import ClusterLink
from redpoll.cluster.redis.keys import SHARDS, Keys, shard_of_name
from redpoll.cluster.redis.link import LinkDown
from redpoll.cluster.redis.slot_map import SlotMap

RUN = "0123456789ab"
KEYS = Keys("rp", sharded=True)


@pytest.fixture(scope="module")
def cluster():
    # A node that stops for a moment isn't replaced.
    with redis_cluster(node_timeout_ms=60_000) as cluster:
        yield cluster


@pytest.fixture
async def link(cluster, monkeypatch):
    monkeypatch.setitem(SlotMap.__init__.__kwdefaults__, "answer_within_s", 60.0)
    link = ClusterLink(cluster.url, connected_within_s=60.0, max_unanswered_looks=100_000)
    link.start()
    await link.wait_up()
    for node in cluster.masters():
        with node.client() as client:
            client.flushall()
    yield link
    await link.close()


@asynccontextmanager
async def without(link, shard):
    """The master of this shard is lost: the shards that are lost with it."""
    read, may_return = link.slot_map.read, asyncio.Event()

    async def read_later():
        await may_return.wait()
        return await read()

    link.slot_map.read = read_later
    link.drop_connection(shard, "for the test")
    assert not link.up
    yield set(range(SHARDS)) - link.kept_shards
    link.slot_map.read = read
    may_return.set()
    await link.wait_up()


async def write_row(link, at):
    fields = (b"k", b"channel.occupied", b"a", b"7", b"c", b"c", b"t", b"1")
    await link.ask(b"XADD", KEYS.outbox(at), b"*", *fields)


async def test_webhook_rows_of_other_shards_are_read(link):
    outbox = Outbox(link, KEYS, 0)
    for at in range(SHARDS):
        await write_row(link, at)
    async with without(link, SHARDS - 1) as lost:
        for _ in range(2):
            errors = outbox.errors
            taken = await outbox.take()
            assert {row.shard for row in taken.rows} == set(range(SHARDS)) - lost
            assert outbox.errors - errors == len(lost)
        outbox.committed(taken.rows)
        assert (await outbox.take()).rows == []
    assert {row.shard for row in (await outbox.take()).rows} == lost
    link.drop("for the test")
    with pytest.raises(LinkDown):
        await outbox.take()


async def test_rows_of_a_master_that_was_replaced_during_a_take_are_not_skipped(link, monkeypatch):
    """They may have smaller stamps than those that its predecessor answered with."""
    outbox = Outbox(link, KEYS, 0)
    at = SHARDS - 1
    for _ in range(400):
        await write_row(link, at)
    execute, calls = link.execute, []

    async def executing(*call):
        reply = await execute(*call)
        calls.append(call)
        if len(calls) == SHARDS:
            async with without(link, at):
                pass
        return reply

    monkeypatch.setattr(link, "execute", executing)
    first = await outbox.take()
    assert (len(first.rows), first.more) == (15, True)
    outbox.committed(first.rows)
    assert (await outbox.take()).rows[:15] == first.rows


async def test_unanswered_read_of_the_beats_costs_only_the_connection_to_their_master(link, monkeypatch, wait_until):
    beats, others = link.masters[0], {at for at in range(SHARDS) if link.masters[at] != link.masters[0]}

    async def silent(*command):
        await asyncio.Event().wait()

    monkeypatch.setattr(link, "ask", silent)
    downs = []
    link.on_down = lambda reason: downs.append((reason, link.kept_shards))
    reaping = asyncio.create_task(Reaper(link, KEYS, RUN, read_s=0.05, unanswered_s=0.01).run())
    await wait_until(lambda: downs)
    reaping.cancel()
    await asyncio.gather(reaping, return_exceptions=True)
    reason, kept_shards = downs[0]
    assert kept_shards == others
    assert f"{beats[0]}:{beats[1]}" in reason
    assert "unanswered" in reason


async def test_counters_and_correlation_ids_of_other_shards_are_there(link):
    """Publishes that needed them got 503 while any master was away."""
    quota, idempotency = Quota(link, KEYS, confirm_s=60.0), Idempotency(link, KEYS, confirm_s=60.0)
    apps = [str(number) for number in range(1000)]
    ids = [f"id-{number}" for number in range(1000)]
    async with without(link, SHARDS - 1) as lost:
        here = next(app for app in apps if quota.shard(app) not in lost)
        there = next(app for app in apps if quota.shard(app) in lost)
        waiting = asyncio.create_task(quota.spend(there, 4, 10))
        assert await quota.spend(here, 3, 10) == (True, 3)
        known = next(one for one in ids if shard_of_name(KEYS.request(here, hashed(one))) not in lost)
        assert (await idempotency.claim(here, known, b"request")).outcome is Outcome.NEW
        assert not waiting.done()
    assert await waiting == (True, 4)


def hashed(correlation_id: str) -> str:
    return hashlib.sha256(correlation_id.encode()).hexdigest()[:32]
