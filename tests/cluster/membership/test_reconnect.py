"""Breaks of the connection, fencing, and a Redis that is killed or emptied: clients notice nothing, and in the end
Redis is right."""

import asyncio

import pytest

from helpers.bus_publishing import Outgoing, publish_all
from redpoll.cluster.bus import Bus
from redpoll.cluster.membership.connection_state import ConnectionState
from redpoll.cluster.membership.hold_call import hold_keys
from redpoll.cluster.membership.reaper import Reaper
from redpoll.cluster.redis.scripts import HOLD
from redpoll.cluster.roll_call import RollCall

ROOM = "presence-room"


# The connection breaks


async def test_break_is_seen_by_no_client_and_changes_no_count(a, b, wait_until, truth):
    watcher = await b.attach(ROOM, "watcher")
    sockets = [a.join(ROOM, f"u{n}") for n in range(600)] + [a.join("news") for _ in range(3)]
    await wait_until(lambda: all(socket.state == "attached" for socket in sockets))
    await wait_until(lambda: len(watcher.users) == 601)
    frames = len(watcher.frames)
    for _ in range(3):
        ups = a.link.connects
        a.link.drop("for the test")
        await wait_until(lambda ups=ups: a.link.connects > ups)
        await truth.settled([a, b])
    assert len(watcher.frames) == frames
    assert not any(socket.frames for socket in sockets[512:])


async def test_changes_during_a_break_are_reported_afterwards(a, b, wait_until, truth):
    watcher = await b.attach(ROOM, "watcher")
    going = await a.attach(ROOM, "going")
    staying = await a.attach(ROOM, "staying")
    connect, other_attached = a.link._connect, asyncio.Event()

    async def connect_later():
        await other_attached.wait()
        return await connect()

    # The break lasts until the other worker has its change, however slow the machine is.
    a.link._connect = connect_later
    a.link.drop("for the test")
    a.leave(going)
    coming = a.join(ROOM, "coming")
    unheard = await b.attach(ROOM, "other")
    assert coming.state == "pending"
    other_attached.set()
    await wait_until(lambda: coming.state == "attached")
    await truth.settled([a, b])
    assert watcher.users == {"watcher", "staying", "coming", "other"}
    assert ("added", "other") in staying.frames
    assert unheard.users == watcher.users


@pytest.mark.parametrize("wanted", [True, False])
async def test_join_with_a_lost_reply_is_repeated_or_removed(a, b, wait_until, truth, wanted):
    watcher = await b.attach(ROOM, "watcher")
    a.deafen()
    socket = a.join(ROOM, "u")
    await wait_until(lambda: watcher.frames == [("added", "u")])
    assert socket.state == "pending"
    a.link.drop("for the test")
    if not wanted:
        a.leave(socket)
    await truth.settled([a, b])
    assert watcher.frames[1:] == ([] if wanted else [("removed", "u")])
    assert socket.state == ("attached" if wanted else "left")


async def test_leave_with_a_lost_reply_is_repeated(a, b, wait_until, truth):
    watcher = await b.attach(ROOM, "watcher")
    await a.attach(ROOM, "stays")
    socket = await a.attach(ROOM, "u")
    a.deafen()
    a.leave(socket)
    await wait_until(lambda: ("removed", "u") in watcher.frames)
    a.link.drop("for the test")
    await truth.settled([a, b])
    assert watcher.users == {"watcher", "stays"}
    assert watcher.frames.count(("removed", "u")) == 1


async def test_channels_listed_for_us_that_nobody_holds_are_released(a, b, link, keys, wait_until, truth):
    watcher = await b.attach("presence-lost", "watcher")
    for channel, users in (("lost", []), ("presence-lost", [f"u{n}" for n in range(300)])):
        kind = "p" if users else "c"
        names = hold_keys(keys, a.registry.worker_id, "7", channel, kind, "")
        args = [a.registry.worker_id, 1, kind, "", "7", channel, 3, 0, keys.topic("7", channel), keys.publish]
        pairs = [part for user in users for part in (user, "")]
        assert (await link.execute(HOLD, names, [*args, 0, len(users), *pairs]))[0] == b"OK"
    await wait_until(lambda: len(watcher.users) == 301)
    a.link.drop("for the test")
    # A join of such a channel waits until it is cleared.
    socket = a.join("presence-lost", "u7")
    await wait_until(lambda: socket.state == "attached")
    await truth.settled([a, b])
    assert watcher.users == {"watcher", "u7"}


async def test_events_flow_again_after_a_break(a, link, keys, wait_until):
    socket = await a.attach("news")
    bus = Bus(link, keys)
    a.link.drop("for the test")
    await wait_until(lambda: a.link.connects == 2)
    roll_call = RollCall(link, keys)
    link.on_push = lambda topic, answer: roll_call.received(answer)
    roll_call.begin()
    while await roll_call.absent([a.registry.worker_id.rpartition(".")[0]]):
        await link.ask(b"PING")
    assert await publish_all(bus, a.app, [Outgoing("news", "e", "1")]) == [1]
    await wait_until(lambda: len(socket.events) == 1)


async def test_refused_subscribe_breaks_the_connection_and_attaches_no_socket(start_worker, link, redis, wait_until):
    # The topics of the worker itself, but none of channels.
    own = [b"&*:sys", b"&*here:*", b"&*canary:*", b"&*box:*"]
    await link.ask(b"ACL", b"SETUSER", b"limited", b"on", b">pw", b"~*", b"+@all", *own)

    class Limited:
        url = f"unix://limited:pw@{redis.path}"

    worker = await start_worker(server=Limited)
    socket = worker.join("news")
    await wait_until(lambda: worker.link.connects >= 2)
    assert socket.state == "pending"
    await link.ask(b"ACL", b"SETUSER", b"limited", b"&*")
    await wait_until(lambda: socket.state == "attached")
    await worker.kill()
    await link.ask(b"ACL", b"DELUSER", b"limited")


async def test_thousands_of_channels_are_asserted_again(a, b, wait_until, truth, link):
    sockets = [a.join(f"news-{n}") for n in range(2500)]
    sockets += [a.join(f"presence-{n}", "u") for n in range(200)]
    await wait_until(lambda: all(socket.state == "attached" for socket in sockets))
    # A beat that Redis answers between FLUSHALL and the break would fence the worker.
    await a.stop_beats()
    await link.ask(b"FLUSHALL")
    a.link.drop("for the test")
    late = a.join("presence-late", "u")
    await wait_until(lambda: late.state == "attached")
    await truth.settled([a])
    assert a.registry.fenced == 0
    assert a.registry.worker_id.endswith(".1")


# Fenced, emptied, reaped by mistake


async def test_fenced_worker_takes_its_next_name_and_its_clients_notice_nothing(a, b, link, keys, wait_until, truth):
    own = [await a.attach(ROOM, f"u{n}") for n in range(3)]
    watcher = await b.attach(ROOM, "watcher")
    await Reaper(link, keys, "ffffffffffff").reap(a.registry.worker_id)
    await wait_until(lambda: a.registry.worker_id.endswith(".1"))
    await truth.settled([a, b])
    assert a.registry.fenced == 1
    for user in ("u0", "u1", "u2"):
        seen = [what for what, who in watcher.frames if who == user]
        assert seen in ([], ["removed", "added"])
    assert all(socket.state == "attached" for socket in own)


async def test_worker_that_is_fenced_while_it_reads_whom_redis_lists_keeps_who_joins_under_its_next_name(
    a, b, link, keys, wait_until, truth, monkeypatch
):
    before, went_on, asked = a.registry.worker_id, asyncio.Event(), a.link.ask
    # As after a leave that Redis has lost again.
    args = [before, 1, "p", "", "7", ROOM, 1, 0, keys.topic("7", ROOM), keys.publish, 0, 1, "ghost", ""]
    assert (await link.execute(HOLD, hold_keys(keys, before, "7", ROOM, "p", ""), args))[0] == b"OK"
    scans = []

    async def ask(*command):
        answer = await asked(*command)
        if command[0] == b"HSCAN":
            scans.append(command)
            await went_on.wait()
        return answer

    monkeypatch.setattr(a.link, "ask", ask)
    a.link.drop("test")
    await wait_until(lambda: bool(scans))
    await Reaper(link, keys, "ffffffffffff").reap(before)
    await wait_until(lambda: a.registry.worker_id != before and a.registry.connection_state is ConnectionState.OPEN)
    alice = await a.attach(ROOM, "alice")
    went_on.set()
    await b.attach(ROOM, "bob")
    await wait_until(lambda: ("added", "bob") in alice.frames)
    assert a.sockets.faults == []
    a.leave(alice)
    await truth.settled([a, b])


async def test_worker_fenced_between_beats_learns_it_from_its_next_call(a, b, link, keys, truth):
    await a.attach(ROOM, "u")
    w = a.registry.worker_id
    await a.stop_beats()
    reaping = asyncio.ensure_future(Reaper(link, keys, "ffffffffffff").reap(w))
    await reaping
    late = await a.attach(ROOM, "late")
    assert a.registry.worker_id != w
    assert late.snapshot == {"u", "late"}
    await truth.settled([a, b])


async def test_emptied_redis_is_filled_again_by_the_living_workers(start_worker, link, wait_until, truth):
    # The second look comes after the test, because the other worker may be slow.
    a, b = [await start_worker(k, second_look_s=60) for k in (1, 2)]
    first = await a.attach(ROOM, "u1")
    second = await b.attach(ROOM, "u2")
    await b.attach("news")
    await wait_until(lambda: first.users == {"u1", "u2"})
    await link.ask(b"FLUSHALL")
    await wait_until(lambda: a.registry.worker_id.endswith(".1") and b.registry.worker_id.endswith(".1"))
    await truth.settled([a, b])
    # Known users make no frame.
    assert first.frames == [("added", "u2")]
    assert second.frames == []


# Redis dies, or hangs


async def test_killed_redis_comes_back_with_its_data(own_redis, start_worker, wait_until, keys):
    a, b = await start_worker(1, server=own_redis), await start_worker(2, server=own_redis)
    first = await a.attach(ROOM, "u1")
    await b.attach(ROOM, "u2")
    await wait_until(lambda: first.users == {"u1", "u2"})
    own_redis.kill()
    waiting = b.join(ROOM, "u3")
    await wait_until(lambda: not a.link.up and not b.link.up)
    own_redis.start()
    await wait_until(lambda: waiting.state == "attached")
    await wait_until(lambda: first.users == {"u1", "u2", "u3"})
    assert first.frames == [("added", "u2"), ("added", "u3")]
    assert a.registry.worker_id.endswith(".0")
    assert b.registry.worker_id.endswith(".0")
    assert first.frames.count(("added", "u3")) == 1


async def test_redis_killed_under_churn_loses_no_member(own_redis, start_worker, keys, make_truth):
    workers = [await start_worker(k, server=own_redis) for k in range(3)]
    sockets = []
    for round_ in range(3):
        for n in range(60):
            worker = workers[n % 3]
            sockets.append((worker, worker.join(f"presence-{n % 4}", f"u{n % 7}")))
            if n % 4 == 3:
                other, socket = sockets[(n * 7) % len(sockets)]
                if socket.state != "left":
                    other.leave(socket)
            if n == 30:
                own_redis.kill()
                if round_ == 2:
                    for file in own_redis.folder.glob("appendonlydir/*"):
                        file.unlink()
                own_redis.start()
            await asyncio.sleep(0)
        truth = await make_truth(own_redis)
        await truth.settled(workers)


async def test_connection_to_a_hanging_redis_is_dropped_and_replaced(own_redis, start_worker, wait_until):
    worker = await start_worker(server=own_redis, unanswered_s=0.5, away_s=0.25)
    worker.directory.complete = True
    socket = await worker.attach(ROOM, "u")
    await wait_until(lambda: worker.registry.ready)
    own_redis.pause()
    try:
        waiting = worker.join(ROOM, "v")
        await wait_until(lambda: not worker.link.up)
        assert not worker.registry.ready
        assert waiting.state == "pending"
    finally:
        own_redis.resume()
    await wait_until(lambda: waiting.state == "attached")
    # The commands queued on the abandoned connection ran too, and were refused or changed nothing.
    assert socket.frames == [("added", "v")]
    assert worker.registry.local_channel("7", ROOM).attached == 2


async def test_short_pause_breaks_nothing(own_redis, start_worker, wait_until):
    # The pause is as long as several canaries, of which one may be missing.
    worker = await start_worker(server=own_redis, canary_s=0.02)
    own_redis.pause()
    socket = worker.join(ROOM, "u")
    await asyncio.sleep(0.2)
    own_redis.resume()
    await wait_until(lambda: socket.state == "attached")
    assert worker.link.connects == 1
