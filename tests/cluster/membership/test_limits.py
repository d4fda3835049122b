"""What subscribes may leave in Redis: occupied channels of an app, and histories in which nothing was published."""

import asyncio

import pytest

from helpers.bus_publishing import Outgoing, publish_all
from helpers.unkeyed import shard
from redpoll.cluster.bus import Bus
from redpoll.cluster.membership.connection_state import ConnectionState
from redpoll.cluster.membership.reaper import Reaper
from redpoll.protocol.apps import HistoryRule

RULE = HistoryRule(id="0a0b0c", name="", prefix=True, keep=10, seconds=3_600)


def of_one_shard(count: int) -> list[str]:
    """Channels whose keys are in one shard."""
    names = (f"room-{n}" for n in range(10_000))
    return [name for name in names if shard("7", name) == 5][:count]


async def outcome(socket, wait_until) -> str:
    await wait_until(lambda: socket.state != "pending")
    return socket.reason or socket.state


async def nothing_held(worker, wait_until) -> None:
    await wait_until(lambda: not list(worker.registry.local_channels()))


# Occupied channels


@pytest.mark.parametrize("prefix", ["", "presence-"])
async def test_subscribes_to_further_channels_are_refused_at_the_apps_limit(a, b, make_app, wait_until, truth, prefix):
    one, two = f"{prefix}one", f"{prefix}two"
    a.app = b.app = make_app(max_occupied_channels=1)
    u, v, w = ("u", "v", "w") if prefix else (None, None, None)
    first = await a.attach(one, u)
    assert await outcome(a.join(two, u), wait_until) == "channels"
    assert await outcome(b.join(two, u), wait_until) == "channels"
    # Another subscriber of an occupied channel adds none.
    assert await outcome(b.join(one, v), wait_until) == "attached"
    assert await outcome(a.join(one, w), wait_until) == "attached"
    assert await truth.counts(two) == 0
    for worker in (a, b):
        worker.leave_all()
    assert first.state == "left"
    await nothing_held(a, wait_until)
    await nothing_held(b, wait_until)
    assert await outcome(b.join(two, u), wait_until) == "attached"
    await truth.settled([a, b])


@pytest.mark.parametrize(("prefix", "most"), [("private-", 100), ("presence-", 100), ("", 50)])
async def test_small_limit_is_exact_though_workers_subscribe_at_once(
    a, b, start_worker, make_app, wait_until, truth, prefix, most
):
    """Of a limit of 100, 256 signed channels were let in, and 128 public ones."""
    workers = [a, b, await start_worker(3)]
    user = "u" if prefix == "presence-" else None
    sockets = []
    for worker in workers:
        worker.app = make_app(max_occupied_channels=100)
    for n in range(60):
        for at, worker in enumerate(workers):
            # Every tenth channel at two workers.
            sockets.append(worker.join(f"{prefix}{at if n % 10 else 'shared'}-{n}", user))
    outcomes = [await outcome(socket, wait_until) for socket in sockets]
    assert set(outcomes) == {"attached", "channels"}
    occupied = {socket.channel for socket in sockets if socket.state == "attached"}
    assert len(occupied) == most
    await truth.settled(workers)


async def test_refused_and_left_channels_make_room(a, b, make_app, wait_until, truth):
    a.app = b.app = make_app(max_occupied_channels=10)
    for _ in range(3):
        sockets = [worker.join(f"private-{n}") for n in range(15) for worker in (a, b)]
        for at, socket in enumerate(sockets):
            if at % 3 == 0:
                # Some wait for their topic, others for a place.
                await asyncio.sleep(0)
                (a, b)[at % 2].leave(socket)
        for socket in sockets:
            await outcome(socket, wait_until)
        occupied = {socket.channel for socket in sockets if socket.state == "attached"}
        assert len(occupied) <= 10
        await truth.settled([a, b])
        a.leave_all()
        b.leave_all()
        await nothing_held(a, wait_until)
        await nothing_held(b, wait_until)
    assert [await outcome(a.join(f"private-{n}"), wait_until) for n in range(11)] == ["attached"] * 10 + ["channels"]


async def test_strangers_who_fill_one_shard_keep_nobody_from_it(a, b, make_app, wait_until):
    """32 anonymous sockets that computed the names of one shard kept everyone from a chosen private channel."""
    a.app = b.app = make_app(max_occupied_channels=12_800)
    names = [f"{prefix}{n}" for prefix in ("", "private-") for n in range(30_000)]
    names = [name for name in names if shard("7", name) == 5]
    public = [name for name in names if not name.startswith("private-")]
    # An even share of the shard is 200.
    sockets = [a.join(name) for name in public[:300]]
    assert {await outcome(socket, wait_until) for socket in sockets} == {"attached"}
    assert await outcome(b.join(names[-1]), wait_until) == "attached"
    assert await outcome(b.join(public[300]), wait_until) == "attached"


async def test_public_channels_take_at_most_half_of_the_places(a, make_app, wait_until):
    a.app = make_app(max_occupied_channels=4)
    public, private = (["1", "2", "3"], ["private-1", "private-2", "private-3"])
    assert [await outcome(a.join(name), wait_until) for name in public] == ["attached", "attached", "channels"]
    assert [await outcome(a.join(name), wait_until) for name in private] == ["attached", "attached", "channels"]
    # Those that others occupy count too.
    a.leave_all()
    await nothing_held(a, wait_until)
    assert [await outcome(a.join(name), wait_until) for name in private] == ["attached", "attached", "attached"]
    assert await outcome(a.join(public[0]), wait_until) == "channels"


async def test_refused_channel_begins_no_history(a, link, keys, make_app, wait_until):
    one, two = of_one_shard(2)
    a.app = make_app(max_occupied_channels=1, history=(RULE,))
    await a.attach(one)
    assert await outcome(a.join(two), wait_until) == "channels"
    assert await link.ask(b"EXISTS", keys.history_meta("7", two)) == 0


async def test_without_a_limit_calls_are_as_before(a, make_app, wait_until):
    a.app = make_app(max_occupied_channels=0)
    sockets = [a.join(name) for name in of_one_shard(50)]
    await wait_until(lambda: all(socket.state == "attached" for socket in sockets))
    assert all(local_channel.settings.share is None for local_channel in a.registry.local_channels())


# Histories


@pytest.fixture
async def keeping(a, make_app):
    a.app = make_app(history=(RULE,))
    return a


async def test_history_without_a_message_ends_minutes_after_its_last_subscriber(keeping, b, link, keys, wait_until):
    """A visitor who subscribed and left left a key for the rule's seconds and a day: 16,000 keys in seconds."""
    b.app = keeping.app
    key = keys.history_meta("7", "room")
    one, two = await keeping.attach("room"), await b.attach("room")
    assert one.place is not None
    assert one.place == two.place
    assert await link.ask(b"TTL", key) > 3_600
    keeping.leave(one)
    await nothing_held(keeping, wait_until)
    assert await link.ask(b"TTL", key) > 3_600
    b.leave(two)
    await nothing_held(b, wait_until)
    assert 0 < await link.ask(b"TTL", key) <= 300
    # Whoever returns within that time finds the same history, and it lasts.
    again = await keeping.attach("room")
    assert again.place == one.place
    assert await link.ask(b"TTL", key) > 3_600


async def test_history_with_a_message_lives_a_day_longer_than_it_and_a_month_while_clients_subscribe(
    keeping, b, link, keys, wait_until
):
    """27 million keys stayed of channels that had been used once, for messages of 36,000 channels."""
    b.app = keeping.app
    bus, key = Bus(link, keys), keys.history_meta("7", "room")

    async def publish() -> None:
        await publish_all(bus, keeping.app, [Outgoing("room", "e", "1")])

    await publish()
    assert 86_400 + 3_600 < await link.ask(b"TTL", key) <= 86_400 + 3_600 + 60
    # In a quiet channel the epoch must not end under its subscribers.
    one, two = await keeping.attach("room"), await b.attach("room")
    assert await link.ask(b"TTL", key) > 30 * 86_400
    keeping.leave(one)
    await nothing_held(keeping, wait_until)
    # As if a minute had passed.
    await link.ask(b"HDEL", key, b"x")
    await publish()
    assert await link.ask(b"TTL", key) > 30 * 86_400
    b.leave(two)
    await nothing_held(b, wait_until)
    assert 86_400 < await link.ask(b"TTL", key) <= 86_400 + 3_600


async def test_subscribes_count_towards_the_cap_on_histories_and_take_at_most_half(a, link, keys, make_app, wait_until):
    # Four in each shard.
    a.app = make_app(history=(RULE,), max_history_channels=128)
    names = of_one_shard(6)
    sockets = [await a.attach(name) for name in names]
    assert [socket.place is not None for socket in sockets] == [True, True, False, False, False, False]
    bus = Bus(link, keys)
    await publish_all(bus, a.app, [Outgoing(name, "e", "1") for name in names])
    assert bus.unkept == 2
    assert await link.ask(b"ZCARD", keys.histories(5, "7")) == 4


async def test_left_histories_make_room_when_they_end(a, link, keys, make_app, wait_until):
    a.app = make_app(history=(RULE,), max_history_channels=64)
    one, two = of_one_shard(2)
    a.leave(await a.attach(one))
    await nothing_held(a, wait_until)
    now_ms = int((await link.ask(b"TIME"))[0]) * 1000
    ends_ms = int(float(await link.ask(b"ZSCORE", keys.histories(5, "7"), one)))
    assert now_ms < ends_ms <= now_ms + 302_000
    assert (await a.attach(two)).place is None
    a.leave_all()
    await nothing_held(a, wait_until)
    # As if the five minutes were over.
    await link.ask(b"ZADD", keys.histories(5, "7"), now_ms - 1, one)
    await link.ask(b"DEL", keys.history_meta("7", one))
    assert (await a.attach(two)).place is not None


async def test_history_lives_on_with_a_worker_that_was_reaped_by_mistake(keeping, link, keys, wait_until):
    """It ended five minutes later under its subscribers, who were told that messages may be missing."""
    socket = await keeping.attach("room")
    key, name = keys.history_meta("7", "room"), keeping.registry.worker_id
    reaper = Reaper(link, keys, "r", has_history=lambda app_id, channel: True)
    await reaper.reap(name)
    registry, local_channel = keeping.registry, keeping.registry.local_channel("7", "room")
    await wait_until(lambda: registry.worker_id != name and registry.connection_state is ConnectionState.OPEN)
    await wait_until(lambda: local_channel.settled and not local_channel.busy)
    assert await link.ask(b"TTL", key) > 3_600
    await publish_all(Bus(link, keys), keeping.app, [Outgoing("room", "e", "1")])
    await wait_until(lambda: socket.events)
    assert (keeping.sockets.lost_places, keeping.sockets.faults) == ([], [])


async def test_reaper_ends_histories_that_a_dead_worker_began(keeping, link, keys, wait_until):
    await keeping.attach("room")
    await keeping.kill()
    reaper = Reaper(link, keys, "r", has_history=lambda app_id, channel: (app_id, channel) == ("7", "room"))
    await reaper.reap(keeping.registry.worker_id)
    assert 0 < await link.ask(b"TTL", keys.history_meta("7", "room")) <= 300
