"""Workers on a real Redis: what their clients see, and what Redis holds."""

import asyncio

import pytest

from redpoll.cluster.bus import Bus, Outgoing
from redpoll.cluster.keys import shard
from redpoll.cluster.reaper import Reaper
from redpoll.cluster.scripts import HOLD

ROOM = "presence-room"


@pytest.fixture
async def a(start_worker):
    return await start_worker(1)


@pytest.fixture
async def b(start_worker):
    return await start_worker(2)


async def attach(worker, channel, user=None, wait=None, **more):
    socket = worker.join(channel, user, **more)
    await wait(lambda: socket.state != "pending")
    assert socket.state == "attached"
    return socket


# Joins and leaves


async def test_subscribe_is_answered_with_everyone_who_is_there(a, b, wait_until, truth):
    first = await attach(a, ROOM, "u1", wait_until, info=b'{"n":1}')
    second = await attach(b, ROOM, "u2", wait_until)
    assert first.snapshot == {"u1"}
    assert second.snapshot == {"u1", "u2"}
    await wait_until(lambda: first.frames == [("added", "u2")])
    assert second.frames == []
    await truth.settled([a, b])
    b.leave(second)
    await wait_until(lambda: first.frames[-1] == ("removed", "u2"))
    await truth.settled([a, b])


async def test_info_of_a_member_reaches_the_other_workers(a, b, wait_until):
    infos = []
    a.sockets.member_added = lambda held, user, info: infos.append((user, info))
    await attach(a, ROOM, "u1", wait_until, info=b'{"n":1}')
    await attach(b, ROOM, "u2", wait_until, info=b'{"n":2}')
    await wait_until(lambda: infos == [("u2", b'{"n":2}')])
    assert b.registry.held("7", ROOM).roster["u1"] == b'{"n":1}'
    await attach(b, ROOM, "u1", wait_until, info=b'{"n":3}')
    await wait_until(lambda: a.registry.held("7", ROOM).roster["u1"] == b'{"n":3}')
    assert len(infos) == 1


async def test_second_tab_does_not_announce_member_again(a, b, wait_until, truth):
    observer = await attach(a, ROOM, "watcher", wait_until)
    tabs = [await attach(worker, ROOM, "u", wait_until) for worker in (a, b, b)]
    for tab, worker in zip(tabs[:2], (a, b), strict=False):
        worker.leave(tab)
    await truth.settled([a, b])
    assert observer.frames == [("added", "u")]
    b.leave(tabs[2])
    await wait_until(lambda: observer.frames == [("added", "u"), ("removed", "u")])


async def test_joiners_of_one_tick_share_a_snapshot_and_get_no_frames(a, b, wait_until):
    early = await attach(a, ROOM, "early", wait_until)
    together = [a.join(ROOM, f"u{n}") for n in range(5)]
    await wait_until(lambda: all(each.state == "attached" for each in together))
    everyone = {"early", *(f"u{n}" for n in range(5))}
    assert all(each.snapshot == everyone and not each.frames for each in together)
    assert early.frames == [("added", f"u{n}") for n in range(5)]


async def test_full_channel_refuses_users_and_admits_their_tabs(a, b, wait_until, truth):
    await attach(a, ROOM, "u1", wait_until, cap=2)
    await attach(b, ROOM, "u2", wait_until, cap=2)
    third = b.join(ROOM, "u3", cap=2)
    other = a.join(ROOM, "u2", cap=2)
    await wait_until(lambda: "pending" not in (third.state, other.state))
    assert (third.state, third.reason, other.state) == ("refused", "members", "attached")
    await truth.settled([a, b])


async def test_refused_alone_leaves_the_channel_unheld(a, b, wait_until, truth):
    await attach(a, ROOM, "u1", wait_until, cap=1)
    refused = b.join(ROOM, "u2", cap=1)
    await wait_until(lambda: refused.state == "refused" and b.registry.channels == 0)
    await wait_until(lambda: b.sockets.dropped_channels == [ROOM])
    await truth.settled([a, b])


async def test_subscribe_withdrawn_before_it_is_sent_tells_redis_nothing(a, link, truth):
    socket = a.join(ROOM, "u")
    a.leave(socket)
    assert a.registry.channels == 0
    await a.link.ask(b"PING")
    assert await truth.channel_keys() == []


async def test_subscribe_withdrawn_in_flight_leaves_without_a_frame(a, b, wait_until, truth):
    socket = a.join(ROOM, "u")
    await asyncio.sleep(0)
    a.link.flush()
    a.leave(socket)
    assert a.registry.channels == 1
    await wait_until(lambda: a.registry.channels == 0)
    assert socket.snapshot is None
    assert await truth.channel_keys() == []


async def test_subscribe_behind_a_withdrawn_one_is_an_entry_of_its_own(a, b, wait_until, truth):
    observer = await attach(b, ROOM, "watcher", wait_until)
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


async def test_public_channels_count_sockets_and_have_no_roster(a, b, wait_until, truth):
    sockets = [await attach(a, "news", None, wait_until) for _ in range(3)]
    await attach(b, "news", None, wait_until)
    assert await truth.counts("news") == 4
    assert a.registry.held("7", "news").roster is None
    a.leave(sockets[0])
    await truth.settled([a, b])
    assert await truth.counts("news") == 3


async def test_nothing_is_left_of_a_channel_that_all_have_left(a, b, wait_until, truth):
    for worker in (a, b):
        for channel, user in ((ROOM, "u"), ("news", None), (ROOM, "v")):
            await attach(worker, channel, user, wait_until)
    for worker in (a, b):
        worker.leave_all()
    await wait_until(lambda: a.registry.channels == b.registry.channels == 0)
    assert await truth.channel_keys() == []
    assert sorted(a.sockets.dropped_channels) == ["news", ROOM]
    topics = await a.link.ask(b"PUBSUB", b"CHANNELS", b"*:t:*")
    assert topics == []


async def test_events_reach_whoever_is_attached_and_nobody_after(a, wait_until, link, keys):
    bus = Bus(link, keys)
    socket = await attach(a, "news", None, wait_until)
    assert await bus.publish_all(a.app, [Outgoing("news", "e", "1"), Outgoing("other", "e", "2")]) == [1, 0]
    await wait_until(lambda: len(socket.events) == 1)
    a.leave(socket)
    await wait_until(lambda: a.registry.channels == 0)
    assert await bus.publish_all(a.app, [Outgoing("news", "e", "3")]) == [0]
    assert socket.events == [b"e 0 0 - - 0 1\ne1"]


# Group commit


async def test_joins_and_leaves_of_one_tick_are_one_call_per_256(a, wait_until, truth):
    before = a.link.commands
    sockets = [a.join(ROOM, f"u{n}") for n in range(600)]
    await wait_until(lambda: all(socket.state == "attached" for socket in sockets))
    # SUBSCRIBE, and three calls one after the other; beats may have come between.
    assert a.link.commands - before <= 4 + 5
    assert all(len(socket.snapshot) in (256, 512, 600) for socket in sockets)
    before = a.link.commands
    a.leave_all()
    await wait_until(lambda: a.registry.channels == 0)
    assert a.link.commands - before <= 4 + 5
    assert await truth.channel_keys() == []


async def test_at_most_one_call_per_channel_is_under_way(a, wait_until, truth):
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
    leaving = [await attach(a, f"old-{n}", None, wait_until) for n in range(20)]
    order = []
    run = a.link.run

    def noting(script, keys, args, done):
        if script is HOLD:
            order.append(args[5])
        run(script, keys, args, done)

    a.link.run = noting
    for socket in leaving:
        a.leave(socket)
    await attach(a, "new", None, wait_until)
    assert order[0] == "new"
    await wait_until(lambda: a.registry.channels == 1)


# Errors of Redis


async def test_call_that_redis_fails_is_made_again_and_holds_up_no_other_channel(a, link, keys, wait_until, truth):
    await link.ask(b"SET", keys.counts("7", "bad"), b"no hash")
    bad = a.join("bad")
    await attach(a, "good", None, wait_until)
    await wait_until(lambda: a.registry.errors >= 3)
    assert bad.state == "pending"
    await link.ask(b"DEL", keys.counts("7", "bad"))
    await wait_until(lambda: bad.state == "attached")
    await truth.settled([a])


async def test_leave_that_redis_fails_is_made_again_too(a, link, keys, wait_until, truth):
    socket = await attach(a, ROOM, "u", wait_until)
    await link.ask(b"RENAME", keys.members("7", ROOM), b"aside")
    await link.ask(b"SET", keys.members("7", ROOM), b"no hash")
    a.leave(socket)
    await wait_until(lambda: a.registry.errors >= 2)
    await link.ask(b"RENAME", b"aside", keys.members("7", ROOM))
    await wait_until(lambda: a.registry.channels == 0)
    assert await truth.channel_keys() == []


# The connection breaks


async def test_break_is_seen_by_no_client_and_changes_no_count(a, b, wait_until, truth):
    watcher = await attach(b, ROOM, "watcher", wait_until)
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


async def test_what_happened_during_a_break_is_told_afterwards(a, b, wait_until, truth):
    watcher = await attach(b, ROOM, "watcher", wait_until)
    going = await attach(a, ROOM, "going", wait_until)
    staying = await attach(a, ROOM, "staying", wait_until)
    a.link.drop("for the test")
    a.leave(going)
    coming = a.join(ROOM, "coming")
    unheard = await attach(b, ROOM, "other", wait_until)
    assert coming.state == "pending"
    await wait_until(lambda: coming.state == "attached")
    await truth.settled([a, b])
    assert watcher.users == {"watcher", "staying", "coming", "other"}
    assert ("added", "other") in staying.frames
    assert unheard.users == watcher.users


@pytest.mark.parametrize("wanted", [True, False])
async def test_join_whose_answer_was_lost_is_made_again_or_taken_back(a, b, wait_until, truth, wanted):
    watcher = await attach(b, ROOM, "watcher", wait_until)
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


async def test_leave_whose_answer_was_lost_is_told_again(a, b, wait_until, truth):
    watcher = await attach(b, ROOM, "watcher", wait_until)
    await attach(a, ROOM, "stays", wait_until)
    socket = await attach(a, ROOM, "u", wait_until)
    a.deafen()
    a.leave(socket)
    await wait_until(lambda: ("removed", "u") in watcher.frames)
    a.link.drop("for the test")
    await truth.settled([a, b])
    assert watcher.users == {"watcher", "stays"}
    assert watcher.frames.count(("removed", "u")) == 1


async def test_channels_that_redis_lists_for_us_and_nobody_holds_are_cleared_away(a, b, link, keys, wait_until, truth):
    watcher = await attach(b, "presence-lost", "watcher", wait_until)
    for channel, users in (("lost", []), ("presence-lost", [f"u{n}" for n in range(300)])):
        at = shard("7", channel)
        names = [keys.worker(at, a.registry.w), keys.counts("7", channel), keys.occupied(at, "7")]
        names += [keys.clock(at), keys.members("7", channel)]
        kind = "p" if users else "c"
        args = [a.registry.w, 1, kind, "", "7", channel, 3, 0, keys.topic("7", channel), keys.publish]
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
    socket = await attach(a, "news", None, wait_until)
    bus = Bus(link, keys)
    a.link.drop("for the test")
    await wait_until(lambda: a.link.connects == 2)
    while await bus.workers_listening() == 0:
        await link.ask(b"PING")
    assert await bus.publish_all(a.app, [Outgoing("news", "e", "1")]) == [1]
    await wait_until(lambda: len(socket.events) == 1)


async def test_subscribe_refused_by_redis_breaks_the_connection_and_attaches_nobody(
    start_worker, link, redis, wait_until
):
    await link.ask(b"ACL", b"SETUSER", b"limited", b"on", b">pw", b"~*", b"+@all", b"&*:sys")

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


async def test_thousands_of_channels_are_told_again(a, b, wait_until, truth, link):
    sockets = [a.join(f"news-{n}") for n in range(2500)]
    sockets += [a.join(f"presence-{n}", "u") for n in range(200)]
    await wait_until(lambda: all(socket.state == "attached" for socket in sockets))
    await link.ask(b"FLUSHALL")
    a.link.drop("for the test")
    late = a.join("presence-late", "u")
    await wait_until(lambda: late.state == "attached")
    await truth.settled([a])
    assert a.registry.fenced == 0
    assert a.registry.w.endswith(".1")


# Fenced, emptied, reaped by mistake


async def test_fenced_worker_takes_its_next_name_and_its_clients_notice_nothing(a, b, link, keys, wait_until, truth):
    own = [await attach(a, ROOM, f"u{n}", wait_until) for n in range(3)]
    watcher = await attach(b, ROOM, "watcher", wait_until)
    await Reaper(link, keys, "ffffffffffff").reap(a.registry.w)
    await wait_until(lambda: a.registry.w.endswith(".1"))
    await truth.settled([a, b])
    assert a.registry.fenced == 1
    for user in ("u0", "u1", "u2"):
        seen = [what for what, who in watcher.frames if who == user]
        assert seen in ([], ["removed", "added"])
    assert all(socket.state == "attached" for socket in own)


async def test_worker_fenced_between_beats_learns_it_from_its_next_call(a, b, link, keys, wait_until, truth):
    await attach(a, ROOM, "u", wait_until)
    w = a.registry.w
    a.registry._incarnation.close()
    reaping = asyncio.ensure_future(Reaper(link, keys, "ffffffffffff").reap(w))
    await reaping
    late = await attach(a, ROOM, "late", wait_until)
    assert a.registry.w != w
    assert late.snapshot == {"u", "late"}
    await truth.settled([a, b])


async def test_emptied_redis_is_filled_again_by_those_who_live(a, b, link, wait_until, truth):
    first = await attach(a, ROOM, "u1", wait_until)
    second = await attach(b, ROOM, "u2", wait_until)
    await attach(b, "news", None, wait_until)
    await wait_until(lambda: first.users == {"u1", "u2"})
    await link.ask(b"FLUSHALL")
    await wait_until(lambda: a.registry.w.endswith(".1") and b.registry.w.endswith(".1"))
    await truth.settled([a, b])
    # Known users make no frame.
    assert first.frames == [("added", "u2")]
    assert second.frames == []


async def test_user_missing_after_a_break_is_removed_at_the_second_look_only(start_worker, link, wait_until, truth):
    a = await start_worker(1, second_look_s=0.4)
    b = await start_worker(2)
    watcher = await attach(a, ROOM, "watcher", wait_until)
    await attach(b, ROOM, "u", wait_until)
    await wait_until(lambda: "u" in watcher.users)
    await b.kill()
    await link.ask(b"FLUSHALL")
    loop = asyncio.get_running_loop()
    await wait_until(lambda: a.registry.w.endswith(".1"))
    began = loop.time()
    await wait_until(lambda: ("removed", "u") in watcher.frames)
    assert loop.time() - began > 0.3
    await truth.settled([a])


async def test_user_who_is_told_again_before_the_second_look_makes_no_frame(start_worker, link, wait_until, truth):
    a = await start_worker(1, second_look_s=0.2)
    b = await start_worker(2, beat_s=0.1)
    watcher = await attach(a, ROOM, "watcher", wait_until)
    await attach(b, ROOM, "u", wait_until)
    await wait_until(lambda: "u" in watcher.users)
    frames = list(watcher.frames)
    await link.ask(b"FLUSHALL")
    a.link.drop("for the test")
    await wait_until(lambda: a.registry.w.endswith(".1") and b.registry.w.endswith(".1"))
    looks = []
    a.registry._listener.member_removed = lambda held, user: looks.append(user)
    await wait_until(lambda: not a.registry.held("7", ROOM).look)
    await truth.settled([a, b])
    assert watcher.frames == frames
    assert looks == []


# Redis is away


async def test_killed_redis_comes_back_with_everything_as_it_was(own_redis, start_worker, wait_until, keys):
    a, b = await start_worker(1, server=own_redis), await start_worker(2, server=own_redis)
    first = await attach(a, ROOM, "u1", wait_until)
    await attach(b, ROOM, "u2", wait_until)
    await wait_until(lambda: first.users == {"u1", "u2"})
    own_redis.kill()
    waiting = b.join(ROOM, "u3")
    await wait_until(lambda: not a.link.up and not b.link.up)
    own_redis.start()
    await wait_until(lambda: waiting.state == "attached")
    await wait_until(lambda: first.users == {"u1", "u2", "u3"})
    assert first.frames == [("added", "u2"), ("added", "u3")]
    assert a.registry.w.endswith(".0")
    assert b.registry.w.endswith(".0")
    assert first.frames.count(("added", "u3")) == 1


async def test_redis_killed_under_churn_loses_nobody(own_redis, start_worker, wait_until, keys, make_truth):
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


async def test_connection_of_a_hanging_redis_is_given_up_and_made_anew(own_redis, start_worker, wait_until):
    worker = await start_worker(server=own_redis)
    socket = await attach(worker, ROOM, "u", wait_until)
    own_redis.pause()
    try:
        waiting = worker.join(ROOM, "v")
        await wait_until(lambda: not worker.link.up)
        assert not worker.registry.ready
        assert waiting.state == "pending"
    finally:
        own_redis.resume()
    await wait_until(lambda: waiting.state == "attached")
    # What the abandoned connection had queued ran as well, and was refused or said the same.
    assert socket.frames == [("added", "v")]
    assert worker.registry.held("7", ROOM).attached == 2


async def test_short_pause_breaks_nothing(own_redis, start_worker, wait_until):
    worker = await start_worker(server=own_redis, unanswered_s=30)
    own_redis.pause()
    socket = worker.join(ROOM, "u")
    await asyncio.sleep(0.2)
    own_redis.resume()
    await wait_until(lambda: socket.state == "attached")
    assert worker.link.connects == 1


async def test_join_that_waits_too_long_is_refused_as_unavailable(own_redis, start_worker, wait_until):
    worker = await start_worker(server=own_redis, join_wait_s=0.2)
    own_redis.kill()
    await wait_until(lambda: not worker.link.up)
    sockets = [worker.join(ROOM, "u"), worker.join("news")]
    await wait_until(lambda: all(socket.reason == "unavailable" for socket in sockets))
    assert worker.registry.channels == 0
    own_redis.start()
    late = worker.join(ROOM, "u")
    await wait_until(lambda: late.state == "attached")
    assert late.snapshot == {"u"}


async def test_join_refused_in_flight_is_taken_back_when_redis_accepts_it(
    own_redis, start_worker, wait_until, make_truth
):
    worker = await start_worker(server=own_redis, join_wait_s=0.1, unanswered_s=30)
    own_redis.pause()
    try:
        socket = worker.join(ROOM, "u")
        await wait_until(lambda: socket.state == "refused")
    finally:
        own_redis.resume()
    await wait_until(lambda: worker.registry.channels == 0)
    truth = await make_truth(own_redis)
    assert await truth.channel_keys() == []


async def test_worker_is_not_ready_once_redis_was_away_too_long(own_redis, start_worker, wait_until):
    worker = await start_worker(server=own_redis)
    worker.directory.complete = True
    assert worker.registry.ready
    own_redis.kill()
    await wait_until(lambda: not worker.link.up)
    assert worker.registry.ready
    await wait_until(lambda: not worker.registry.ready)
    own_redis.start()
    await wait_until(lambda: worker.registry.ready)


# The clean end


async def test_worker_that_ends_cleanly_leaves_nothing(a, link, keys, wait_until, truth):
    await attach(a, ROOM, "u", wait_until)
    a.leave_all()
    assert await a.registry.finish()
    assert await link.ask(b"KEYS", b"*:w:*") == []
    assert await link.ask(b"EXISTS", keys.beat) == 0


async def test_worker_that_cannot_end_cleanly_is_left_to_the_reaper(a, link, keys, wait_until):
    await attach(a, ROOM, "u", wait_until)
    assert not await a.registry.finish(timeout_s=0.05)
    assert await link.ask(b"HEXISTS", keys.beat, a.registry.w) == 1


async def test_message_on_sys_reaches_whoever_listens(a, link, keys, wait_until):
    await link.ask(b"PUBLISH", keys.sys, b'{"close":"1.2"}')
    await wait_until(lambda: a.sys == [{"close": "1.2"}])


async def test_failing_listener_does_not_stop_the_registry(a, b, wait_until, link, truth):
    problems = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: problems.append(context))
    real = a.sockets.joined
    a.sockets.joined = lambda held, *joined: 1 / 0
    a.join("news")
    await wait_until(lambda: problems)
    a.sockets.joined = real
    await attach(a, "other", None, wait_until)
    assert isinstance(problems[0]["exception"], ZeroDivisionError)
