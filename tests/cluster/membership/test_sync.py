"""Bounds and order of calls. test_registry.py shows that the calls are right."""

import asyncio

from msgspec import structs

from redpoll.cluster.keys import cap_of_shard, shard
from redpoll.cluster.scripts import HOLD
from redpoll.protocol.apps import HistoryRule


async def test_at_most_32_rosters_are_awaited(start_worker, wait_until, truth):
    worker = await start_worker()
    awaited, most = set(), 0
    run = worker.link.run

    def watch(script, keys, args, done):
        nonlocal most
        if len(args) > 3 and "r" in str(args[3]):
            awaited.add(args[5])
            most = max(most, len(awaited))

            def answered(reply):
                awaited.discard(args[5])
                done(reply)

            run(script, keys, args, answered)
        else:
            run(script, keys, args, done)

    worker.link.run = watch
    sockets = [worker.join(f"presence-{n}", "u") for n in range(100)]
    await wait_until(lambda: all(socket.state == "attached" for socket in sockets))
    assert most == 32
    worker.link.drop("for the test")
    await truth.settled([worker])
    assert most == 32


async def test_changes_wait_until_everything_is_asserted(start_worker, wait_until, truth, link):
    worker = await start_worker()
    old = [worker.join(f"old-{n}") for n in range(50)]
    await wait_until(lambda: all(socket.state == "attached" for socket in old))
    order = []
    run = worker.link.run

    def note(script, keys, args, done):
        if len(args) > 5:
            order.append(args[5])
        run(script, keys, args, done)

    worker.link.run = note
    worker.link.drop("for the test")
    new = worker.join("new")
    await wait_until(lambda: new.state == "attached")
    assert order[-1] == "new"
    assert sorted(order[:-1]) == sorted(f"old-{n}" for n in range(50))


async def test_topics_of_one_tick_go_in_one_subscribe_ahead_of_the_calls(start_worker, wait_until):
    # No beats, because they would be counted among the calls.
    worker = await start_worker(beat_s=60, unanswered_s=120)
    commands = []
    call = worker.link.call

    def note(*command, **more):
        commands.append(command[0])
        call(*command, **more)

    worker.link.call = note
    sockets = [worker.join(f"news-{n}") for n in range(1001)]
    await wait_until(lambda: all(socket.state == "attached" for socket in sockets))
    commands = [command for command in commands if command != b"PING"]
    assert commands[:3] == [b"SUBSCRIBE", b"SUBSCRIBE", b"EVALSHA"]
    assert commands.count(b"SUBSCRIBE") == 2


async def test_channel_left_and_joined_again_in_one_tick_stays_subscribed(start_worker, wait_until, link, keys):
    worker = await start_worker()
    for _ in range(20):
        socket = worker.join("news")
        await wait_until(lambda socket=socket: socket.state == "attached")
        worker.leave(socket)
        await wait_until(lambda: worker.registry.local_channel("7", "news") is None)
        again = worker.join("news")
        await wait_until(lambda again=again: again.state == "attached")
        assert await link.ask(b"PUBLISH", keys.topic("7", "news"), b"e 0 0 - - 0 1\ne") == 1
        worker.leave(again)
        await asyncio.sleep(0)
        last = worker.join("news")
        await wait_until(lambda last=last: last.state == "attached")
        assert await link.ask(b"PUBLISH", keys.topic("7", "news"), b"e 0 0 - - 0 1\ne") == 1
        worker.leave(last)


async def test_channel_that_waits_for_its_retry_holds_up_no_other_after_a_break(
    start_worker, wait_until, link, keys, truth
):
    worker = await start_worker(retry_s=0.5, max_retry_s=0.5)
    sockets = [worker.join("bad"), worker.join("good")]
    await wait_until(lambda: all(socket.state == "attached" for socket in sockets))
    await link.ask(b"RENAME", keys.counts("7", "bad"), b"aside")
    await link.ask(b"SET", keys.counts("7", "bad"), b"no hash")
    worker.join("bad")
    await wait_until(lambda: worker.registry.errors)
    worker.link.drop("for the test")
    late = worker.join("late")
    await wait_until(lambda: late.state == "attached")
    await link.ask(b"RENAME", b"aside", keys.counts("7", "bad"))
    await truth.settled([worker])


async def test_at_most_64_cached_events_are_awaited(start_worker, wait_until, truth):
    worker = await start_worker()
    awaited, most = set(), 0
    run = worker.link.run

    def watch(script, keys, args, done):
        nonlocal most
        if len(args) > 3 and "c" in str(args[3]):
            awaited.add(args[5])
            most = max(most, len(awaited))

            def answered(reply):
                awaited.discard(args[5])
                done(reply)

            run(script, keys, args, answered)
        else:
            run(script, keys, args, done)

    worker.link.run = watch
    sockets = [worker.join(f"cache-{n}") for n in range(200)] + [worker.join(f"news-{n}") for n in range(200)]
    await wait_until(lambda: all(socket.state == "attached" for socket in sockets))
    assert most == 64
    await truth.settled([worker])


# Flags for webhooks and history


def watch(worker) -> list[list]:
    """The arguments of all later calls of `hold`."""
    calls, run = [], worker.link.run

    def note(script, keys, args, done):
        if script is HOLD:
            calls.append(list(args))
        run(script, keys, args, done)

    worker.link.run = note
    return calls


async def joined(worker, channel, wait_until):
    socket = worker.join(channel)
    await wait_until(lambda: socket.state == "attached")
    return socket


async def test_leaves_are_debounced_if_webhooks_want_them(start_worker, wait_until):
    for k, debounced in ((1, True), (2, False)):
        worker = await start_worker(k, debounced=debounced)
        calls = watch(worker)
        await joined(worker, "plain", wait_until)
        worker.app = structs.replace(worker.app, hooks="om")
        await joined(worker, "hooked", wait_until)
        assert [call[3] for call in calls] == ["l", "lod" if debounced else "lo"]


async def test_each_call_for_a_history_names_an_epoch_of_its_own(start_worker, wait_until, link, keys):
    worker = await start_worker()
    calls = watch(worker)
    rule = HistoryRule(id="0a0a0a", name="", prefix=True, keep=10, seconds=60, era="0e")
    worker.app = structs.replace(worker.app, history=(rule,), max_history_channels=100, max_occupied_channels=0)
    await joined(worker, "a", wait_until)
    await joined(worker, "a", wait_until)
    (first, *more), (second, *same) = (call[-4:] for call in calls)
    assert more == same == [60, cap_of_shard(100), "0e"]
    assert first != second
    assert await link.ask(b"HGET", keys.history_meta("7", "a"), b"e") == first.encode()


async def test_dropped_rows_are_counted_and_the_rest_of_the_reply_is_used(start_worker, wait_until, link, keys):
    worker = await start_worker()
    worker.app = structs.replace(worker.app, hooks="xs", subscription_count=True)
    at = shard("7", "cache-news")
    lua = "for n = 1, 10000 do redis.call('XADD', KEYS[1], n .. '-0', 'k', 'x') end"
    await link.ask(b"EVAL", lua, 1, keys.outbox(at))
    socket = await joined(worker, "cache-news", wait_until)
    assert (socket.cached, socket.counts) == (b"", [1])
    assert worker.registry._sync.unhooked == 2
