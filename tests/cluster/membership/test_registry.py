"""Workers on a real Redis: what their clients see, and what Redis holds."""

import asyncio

from cluster.links import note_holds
from helpers.bus_publishing import Outgoing, publish_all
from redpoll.cluster.bus import Bus
from redpoll.cluster.membership.join import JoinState
from redpoll.cluster.questions import CloseSocket, publication
from redpoll.cluster.redis.scripts import HOLD

ROOM = "presence-room"


# Joins and leaves


async def test_refused_first_subscriber_leaves_no_channel_behind(a, b, wait_until, truth):
    await a.attach(ROOM, "u1", cap=1)
    refused = b.join(ROOM, "u2", cap=1)
    await wait_until(lambda: refused.state == "refused" and b.registry.channels == 0)
    await wait_until(lambda: b.sockets.dropped_channels == [ROOM])
    await truth.settled([a, b])


async def test_subscribe_withdrawn_before_it_is_sent_makes_no_call(a, link, truth):
    socket = a.join(ROOM, "u")
    a.leave(socket)
    assert a.registry.channels == 0
    await a.link.ask(b"PING")
    assert await truth.channel_keys() == []


async def test_subscribe_withdrawn_in_flight_leaves_without_a_frame(a, b, wait_until, truth):
    # The reply isn't read before the client has left.
    a.deafen()
    socket = a.join(ROOM, "u")
    # Not always in the next pass of the loop: a slice ends early on a busy machine.
    await wait_until(lambda: a.registry.sync.in_flight == 1)
    a.link.flush()
    a.leave(socket)
    assert a.registry.channels == 1
    a.hear()
    await wait_until(lambda: a.registry.channels == 0)
    assert socket.snapshot is None
    assert (socket.join.state, bool(a.registry.joins)) == (JoinState.WITHDRAWN, False)
    assert await truth.channel_keys() == []


async def test_subscribe_after_a_withdrawn_one_is_an_entry_of_its_own(a, b, wait_until, truth):
    observer = await b.attach(ROOM, "watcher")
    withdrawn = []
    for _ in range(20):
        socket = a.join(ROOM, "u")
        await asyncio.sleep(0)
        if socket.state == "pending":
            withdrawn.append(socket)
        a.leave(socket)
    last = a.join(ROOM, "u")
    await wait_until(lambda: last.state == "attached")
    await truth.settled([a, b])
    assert withdrawn
    assert not any(socket.snapshot for socket in withdrawn)
    assert observer.users == {"watcher", "u"}


async def test_public_channels_count_sockets_and_have_no_roster(a, b, truth):
    sockets = [await a.attach("news") for _ in range(3)]
    await b.attach("news")
    assert await truth.counts("news") == 4
    assert a.registry.local_channel("7", "news").roster is None
    a.leave(sockets[0])
    await truth.settled([a, b])
    assert await truth.counts("news") == 3


async def test_nothing_is_left_of_a_channel_that_all_have_left(a, b, wait_until, truth):
    for worker in (a, b):
        for channel, user in ((ROOM, "u"), ("news", None), (ROOM, "v")):
            await worker.attach(channel, user)
    for worker in (a, b):
        worker.leave_all()
    await wait_until(lambda: a.registry.channels == b.registry.channels == 0)
    assert await truth.channel_keys() == []
    assert sorted(a.sockets.dropped_channels) == ["news", ROOM]
    # The topics are unsubscribed after the channels are dropped.
    async with asyncio.timeout(60):
        while await a.link.ask(b"PUBSUB", b"CHANNELS", b"*:t:*"):
            await asyncio.sleep(0.005)


async def test_events_reach_attached_sockets_only(a, wait_until, link, keys):
    bus = Bus(link, keys)
    socket = await a.attach("news")
    assert await publish_all(bus, a.app, [Outgoing("news", "e", "1"), Outgoing("other", "e", "2")]) == [1, 0]
    await wait_until(lambda: len(socket.events) == 1)
    a.leave(socket)
    await wait_until(lambda: a.registry.channels == 0)
    # The topic is unsubscribed after the channel is dropped.
    async with asyncio.timeout(60):
        while await link.subscribers([keys.topic("7", "news")]) != [0]:
            await asyncio.sleep(0.005)
    assert await publish_all(bus, a.app, [Outgoing("news", "e", "3")]) == [0]
    assert socket.events == [b"e 0 0 - - 0 1\ne1"]


# Group commit


async def test_joins_and_leaves_of_one_tick_are_one_call_per_256(a, wait_until, truth):
    calls = []
    run = a.link.run

    def counting(script, keys, args, done):
        calls.append(script)
        run(script, keys, args, done)

    a.link.run = counting
    sockets = [a.join(ROOM, f"u{n}") for n in range(600)]
    await wait_until(lambda: all(socket.state == "attached" for socket in sockets))
    assert calls.count(HOLD) == 3
    assert all(len(socket.snapshot) in (256, 512, 600) for socket in sockets)
    a.leave_all()
    await wait_until(lambda: a.registry.channels == 0)
    assert calls.count(HOLD) == 6
    assert await truth.channel_keys() == []


async def test_at_most_one_call_per_channel_is_under_way(a, truth):
    calls = []
    run = a.link.run

    def counting(script, keys, args, done):
        if script is HOLD:
            calls.append(1)
            assert len(calls) == 1

            def answered(reply):
                calls.pop()
                done(reply)

            run(script, keys, args, answered)
        else:
            run(script, keys, args, done)

    a.link.run = counting
    sockets = []
    for n in range(300):
        sockets.append(a.join(ROOM, f"u{n}"))
        if n % 3 == 0:
            await asyncio.sleep(0)
        if n % 7 == 0:
            a.leave(sockets[n // 2])
    await truth.settled([a])


async def test_calls_with_joins_go_first(a, wait_until):
    leaving = [await a.attach(f"old-{n}") for n in range(20)]
    order = []
    note_holds(a.registry, order.append)
    for socket in leaving:
        a.leave(socket)
    await a.attach("new")
    assert order[0] == "new"
    await wait_until(lambda: a.registry.channels == 1)


# Errors of Redis


async def test_failed_call_is_repeated_and_delays_no_other_channel(a, link, keys, wait_until, truth):
    await link.ask(b"SET", keys.counts("7", "bad"), b"no hash")
    bad = a.join("bad")
    await a.attach("good")
    await wait_until(lambda: a.registry.errors >= 3)
    assert bad.state == "pending"
    await link.ask(b"DEL", keys.counts("7", "bad"))
    await wait_until(lambda: bad.state == "attached")
    await truth.settled([a])


async def test_failed_leave_is_repeated(a, link, keys, wait_until, truth):
    socket = await a.attach(ROOM, "u")
    await link.ask(b"RENAME", keys.members("7", ROOM), b"aside")
    await link.ask(b"SET", keys.members("7", ROOM), b"no hash")
    a.leave(socket)
    await wait_until(lambda: a.registry.errors >= 2)
    await link.ask(b"RENAME", b"aside", keys.members("7", ROOM))
    await wait_until(lambda: a.registry.channels == 0)
    assert await truth.channel_keys() == []


# Redis is away


async def test_join_that_waits_too_long_is_refused_as_unavailable(own_redis, start_worker, wait_until):
    worker = await start_worker(server=own_redis, join_wait_s=0.2)
    own_redis.kill()
    await wait_until(lambda: not worker.link.up)
    sockets = [worker.join(ROOM, "u"), worker.join("news")]
    await wait_until(lambda: all(socket.reason == "unavailable" for socket in sockets))
    assert worker.registry.channels == 0
    own_redis.start()
    # The worker must connect and register first, which may take longer than the wait above.
    worker.registry.joins.wait_s = 60.0
    late = worker.join(ROOM, "u")
    await wait_until(lambda: late.state == "attached")
    assert late.snapshot == {"u"}


async def test_join_refused_in_flight_leaves_again_when_redis_accepts_it(
    own_redis, start_worker, wait_until, make_truth
):
    worker = await start_worker(server=own_redis, join_wait_s=0.1)
    own_redis.pause()
    try:
        socket = worker.join(ROOM, "u")
        await wait_until(lambda: socket.state == "refused")
        assert socket.join.state is JoinState.WITHDRAWN
    finally:
        own_redis.resume()
    await wait_until(lambda: worker.registry.channels == 0)
    truth = await make_truth(own_redis)
    assert await truth.channel_keys() == []


async def test_worker_is_not_ready_after_redis_was_away_too_long(own_redis, start_worker, wait_until):
    worker = await start_worker(server=own_redis, away_s=0.25)
    worker.directory.complete = True
    now = worker.link.clock()
    worker.link.clock = lambda: now
    await wait_until(lambda: worker.registry.ready)
    own_redis.kill()
    await wait_until(lambda: not worker.link.up)
    assert worker.registry.ready
    worker.link.clock = lambda: now + 1
    assert not worker.registry.ready
    own_redis.start()
    await wait_until(lambda: worker.registry.ready)


# The clean end


async def test_worker_that_ends_cleanly_leaves_nothing(a, link, keys, truth):
    await a.attach(ROOM, "u")
    a.leave_all()
    assert await a.registry.finish(timeout_s=60)
    assert await link.ask(b"KEYS", b"*:w:*") == []
    assert await link.ask(b"EXISTS", keys.beat) == 0


async def test_worker_that_cannot_end_cleanly_is_left_to_the_reaper(a, link, keys):
    await a.attach(ROOM, "u")
    assert not await a.registry.finish(timeout_s=0.05)
    assert await link.ask(b"HEXISTS", keys.beat, a.registry.worker_id) == 1


async def test_message_on_sys_reaches_the_owner(a, link, keys, wait_until):
    heard: list[CloseSocket] = []
    a.answerers.hear(CloseSocket, heard.append)
    await link.ask(*publication(keys, CloseSocket("1", "1.2")))
    await wait_until(lambda: heard == [CloseSocket("1", "1.2")])


async def test_exception_in_an_event_handler_does_not_stop_the_registry(a, b, wait_until, link, truth):
    problems = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: problems.append(context))
    real = a.sockets.joined
    a.sockets.joined = lambda local_channel, *joined: 1 / 0
    a.join("news")
    await wait_until(lambda: problems)
    a.sockets.joined = real
    await a.attach("other")
    assert isinstance(problems[0]["exception"], ZeroDivisionError)
