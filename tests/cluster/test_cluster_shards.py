"""Shards of a real Redis Cluster that move or fail: what concerns the other shards isn't written again."""

import asyncio
from binascii import crc_hqx

import pytest
from structlog.testing import capture_logs

from cluster.links import note_holds
from helpers.bus_publishing import Outgoing, Replies, call_of, publish_all
from helpers.sentinel import RedisNode, redis_cluster
from helpers.unkeyed import shard
from redpoll.cluster.bus import Bus
from redpoll.cluster.membership.connection_state import ConnectionState, Reach
from redpoll.cluster.membership.reaper import Reaper
from redpoll.cluster.redis.cluster_link import ClusterLink
from redpoll.cluster.redis.keys import TAGS
from redpoll.cluster.redis.link import Link
from redpoll.cluster.redis.slot_map import SlotMap

APP = "7"
CHANNELS = 640
# Slots of two shards of the first master.
MOVING, OTHER = 3, 5


@pytest.fixture
def cluster():
    # A node that stops for a moment isn't replaced, and the others go on without one that is killed.
    with redis_cluster(node_timeout_ms=60_000) as cluster:
        for node in cluster.nodes:
            with node.client() as client:
                client.config_set("cluster-require-full-coverage", "no")
        yield cluster


@pytest.fixture(autouse=True)
def _patient_with_nodes(monkeypatch):
    monkeypatch.setitem(SlotMap.__init__.__kwdefaults__, "answer_within_s", 60.0)
    monkeypatch.setitem(ClusterLink.__init__.__kwdefaults__, "connected_within_s", 60.0)
    monkeypatch.setitem(ClusterLink.__init__.__kwdefaults__, "repeat_for_s", 60.0)
    # The looks are scripts, too, and no test here needs them.
    monkeypatch.setitem(Link.__init__.__kwdefaults__, "look_every_s", 3_600.0)


def is_replicated(master: RedisNode) -> bool:
    with master.client() as client:
        _, offset, replicas = client.execute_command("ROLE")
    return all(int(acknowledged) >= offset for _, _, acknowledged in replicas)


def slot_of(at: int) -> int:
    return crc_hqx(TAGS[at], 0) % 16384


def channel_in(at: int, prefix: str = "") -> str:
    return next(name for name in (f"{prefix}{number}" for number in range(10_000)) if shard(APP, name) == at)


def is_open(worker) -> bool:
    return worker.registry.connection_state is ConnectionState.OPEN and worker.registry.reach is Reach.SUBSCRIBED


async def hold_many(worker, wait_until) -> list:
    sockets = [worker.join(f"news-{number}") for number in range(CHANNELS)]
    sockets += [worker.join(f"presence-{number}", "u") for number in range(64)]
    await wait_until(lambda: all(socket.state == "attached" for socket in sockets))
    await wait_until(lambda: is_open(worker) and not worker.registry.sync.in_flight)
    return sockets


def note_written(worker) -> tuple[list[str], list[bytes]]:
    """The channels of later calls of `hold`, and the topics subscribed later."""
    held: list[str] = []
    topics: list[bytes] = []
    note_holds(worker.registry, held.append)
    subscribe = worker.link.subscribe
    worker.link.subscribe = lambda names, *more: (topics.extend(names), subscribe(names, *more))
    return held, topics


def commands(cluster) -> dict[str, int]:
    """How often the masters carried out scripts and SSUBSCRIBE commands."""
    counts = {"script": 0, "ssubscribe": 0}
    for node in cluster.masters():
        with node.client() as client:
            for name, entry in client.info("commandstats").items():
                kind = name.removeprefix("cmdstat_")
                kind = "script" if kind in ("evalsha", "eval") else kind
                if kind in counts:
                    counts[kind] += entry["calls"]
    return counts


def reset_commands(cluster) -> None:
    for node in cluster.masters():
        with node.client() as client:
            client.config_resetstat()


async def published(worker, channels: list[str]) -> None:
    """Publishes on each of these channels until each is confirmed."""
    bus = Bus(worker.link, worker.keys)
    for channel in channels:
        await publish_all(bus, worker.app, [Outgoing(channel, "e", "1")])


async def test_moved_slot_makes_only_its_own_channels_written_again(cluster, start_worker, wait_until, make_truth):
    a, b = [await start_worker(k, server=cluster, beat_s=60.0) for k in (1, 2)]
    sockets = await hold_many(a, wait_until)
    of_shard = {socket.channel for socket in sockets if shard(APP, socket.channel) == MOVING}
    assert 0 < len(of_shard) < len(sockets) / 20
    watcher = await b.attach(f"presence-{channel_in(MOVING)}", "w")
    await wait_until(lambda: is_open(b))
    held, topics = note_written(a)
    reset_commands(cluster)
    with capture_logs() as logs:
        await asyncio.to_thread(cluster.move_slot, slot_of(MOVING))
        for worker in (a, b):
            await wait_until(lambda worker=worker: worker.link.connects > 1 and is_open(worker))
    counts = commands(cluster)
    assert set(held) == of_shard, counts
    assert len(held) < 2 * len(of_shard)
    # For each of the two workers a beat and a registration.
    assert counts["script"] < 2 * len(of_shard) + 10
    # Of each worker: canaries to three masters, the shard's topics, and the last ones.
    assert counts["ssubscribe"] < 20
    assert {shard_of(topic) for topic in topics if b":t:" in topic} == {MOVING}
    states = {entry["state"] for entry in logs if entry["event"] == "redis connection state changed"}
    assert states == {"partly", "reasserting", "open"}
    assert a.registry.incarnation.generations[MOVING] == 2
    assert a.registry.incarnation.generations[OTHER] == 1
    events = [len(socket.events) for socket in sockets]
    await published(b, [socket.channel for socket in sockets])
    await wait_until(lambda: [len(socket.events) for socket in sockets] == [count + 1 for count in events])
    a.leave(sockets[0])
    truth = await make_truth(cluster)
    await truth.settled([a, b])
    assert watcher.frames == []


def shard_of(topic: bytes) -> int:
    return TAGS.index(topic.split(b"{")[1].split(b"}")[0])


async def test_failed_master_makes_no_channels_of_the_others_written_again(
    cluster, start_worker, wait_until, make_truth
):
    a, b = [await start_worker(k, server=cluster, beat_s=60.0) for k in (1, 2)]
    sockets = await hold_many(a, wait_until)
    failing = next(node for node in cluster.masters() if node.port == a.link.masters[MOVING][1])
    failed = {at for at in range(64) if a.link.masters[at][1] == failing.port}
    assert 0 < len(failed) < 64
    others = [socket for socket in sockets if shard(APP, socket.channel) not in failed]
    held, topics = note_written(a)
    # Redis replicates later than it answers, and a worker whose registration is lost takes its next name.
    await wait_until(lambda: is_replicated(failing))
    await asyncio.to_thread(failing.kill)
    await wait_until(lambda: not a.link.up and not b.link.up)
    # Without the failing master, events, joins and leaves of the others' channels go on.
    at_others = next(at for at in range(64) if at not in failed)
    late, left = await a.attach(channel_in(at_others, "late-")), others.pop()
    a.leave(left)
    waiting = a.join(channel_in(MOVING, "late-"))
    await wait_until(lambda: a.registry.local_channel(APP, left.channel) is None)
    for socket in others:
        replies = Replies(1)
        Bus(b.link, b.keys).post(call_of(a.app, [Outgoing(socket.channel, "e", "1")]), done=replies)
        assert await replies.of_events[0] == 1
    await wait_until(lambda: all(len(socket.events) == 1 for socket in others))
    assert a.registry.connection_state is ConnectionState.PARTLY
    assert not b.link.up
    assert waiting.state == "pending"

    def take_over() -> None:
        for node in cluster.nodes:
            if node.process is not None:
                with node.client() as client:
                    role = client.execute_command("ROLE")
                    if role[0] == "slave" and role[2] == failing.port:
                        client.execute_command("CLUSTER", "FAILOVER", "TAKEOVER")

    held.remove(late.channel)
    held.remove(left.channel)
    await asyncio.to_thread(take_over)
    await wait_until(lambda: a.link.up and b.link.up and is_open(a) and is_open(b), timeout_s=60)
    await wait_until(lambda: waiting.state == "attached")
    assert {shard(APP, channel) for channel in held} <= failed
    assert {shard_of(topic) for topic in topics if b":t:" in topic} <= failed | {at_others}
    await published(b, [socket.channel for socket in (*sockets[:60], waiting, late) if socket.state == "attached"])
    truth = await make_truth(cluster)
    await truth.settled([a, b])


async def test_worker_that_is_given_up_while_shards_are_lost_takes_its_next_name(
    cluster, start_worker, wait_until, make_truth
):
    a, b = [await start_worker(k, server=cluster, beat_s=60.0) for k in (1, 2)]
    sockets = await hold_many(a, wait_until)
    w, read, may_return = a.registry.worker_id, a.link.slot_map.read, asyncio.Event()

    async def read_later():
        await may_return.wait()
        return await read()

    for is_known in (True, False):
        may_return.clear()
        a.link.slot_map.read = read_later
        a.link.drop_connection(MOVING, "for the test")
        assert a.registry.connection_state is ConnectionState.PARTLY
        await Reaper(b.link, b.keys, "ffffffffffff").reap(a.registry.worker_id)
        if is_known:
            # It learns it from a call in a shard that it didn't lose.
            kept = min(a.link.kept_shards)
            late = a.join(channel_in(kept, f"late-{kept}-"))
            await wait_until(lambda: a.registry.connection_state is ConnectionState.DOWN)
        may_return.set()
        await wait_until(lambda w=w: a.registry.worker_id != w and is_open(a))
        w = a.registry.worker_id
    assert w.endswith(".2")
    await wait_until(lambda: late.state == "attached")
    assert all(socket.state == "attached" for socket in sockets)
    truth = await make_truth(cluster)
    await truth.settled([a, b])


async def test_subscribes_to_all_masters_go_on_when_redis_has_forgotten_the_scripts(cluster, start_worker, wait_until):
    worker = await start_worker(server=cluster, beat_s=60.0)
    for node in cluster.masters():
        with node.client() as client:
            client.script_flush()
    sockets = [worker.join(f"news-{number}") for number in range(CHANNELS)]
    await wait_until(lambda: all(socket.state == "attached" for socket in sockets))
    assert worker.registry.sync.errors == 0
