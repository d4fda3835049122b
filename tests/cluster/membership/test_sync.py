"""Bounds and order of calls. test_registry.py shows that the calls are right."""

import asyncio

import pytest
from msgspec import structs

from cluster.links import note_holds
from helpers.unkeyed import shard
from redpoll.cluster.membership.connection_state import ConnectionState
from redpoll.cluster.membership.hold_call import Flag
from redpoll.cluster.membership.join import Stage
from redpoll.cluster.redis.keys import cap_of_shard
from redpoll.cluster.redis.scripts import HOLD
from redpoll.protocol.apps import HistoryRule


@pytest.mark.parametrize(("kind", "flag", "bound"), [("presence", Flag.ROSTER, 32), ("cache", Flag.CACHED, 64)])
async def test_bounded_number_of_big_replies_is_awaited(start_worker, wait_until, truth, kind, flag, bound):
    worker = await start_worker()
    awaited, most = set(), 0
    run = worker.link.run

    def watch(script, keys, args, done):
        nonlocal most
        if script is not HOLD or flag not in args[3]:
            run(script, keys, args, done)
            return
        awaited.add(args[5])
        most = max(most, len(awaited))

        def answered(reply):
            awaited.discard(args[5])
            done(reply)

        run(script, keys, args, answered)

    worker.link.run = watch
    # A slice that a busy machine ends early might never have so many awaited.
    worker.registry.sync.slices.clock = lambda: 0.0
    user = "u" if kind == "presence" else None
    sockets = [worker.join(f"{kind}-{n}", user) for n in range(200)] + [worker.join(f"news-{n}") for n in range(200)]
    await wait_until(lambda: all(socket.state == "attached" for socket in sockets))
    assert most == bound
    worker.link.drop("for the test")
    await truth.settled([worker])
    assert most == bound


async def test_new_subscribe_does_not_wait_until_everything_is_asserted(start_worker, wait_until, truth):
    worker = await start_worker()
    old = [worker.join(f"old-{n}") for n in range(50)]
    await wait_until(lambda: all(socket.state == "attached" for socket in old))
    order = []
    note_holds(worker.registry, order.append)
    worker.link.drop("for the test")
    new, again = worker.join("new"), worker.join("old-49")
    await wait_until(lambda: new.state == again.state == "attached")
    assert order[:2] == ["new", "old-49"]
    await truth.settled([worker])
    # One call asserts each channel; the second subscribe to old-49 goes with the call after that.
    assert sorted(order) == sorted(["new", "old-49", *(f"old-{n}" for n in range(50))])


async def test_subscribe_overtakes_the_rosters_that_a_re_assertion_reads(start_worker, wait_until, truth):
    worker = await start_worker()
    old = [worker.join(f"presence-{n}", "u") for n in range(150)]
    await wait_until(lambda: all(socket.state == "attached" for socket in old))
    order = []
    run = worker.link.run

    def note(script, keys, args, done):
        if script is HOLD:
            order.append(args[5])
            if len(order) == 32:
                # As many rosters as may be awaited, and the others wait.
                worker.join("presence-new", "u")
        run(script, keys, args, done)

    worker.link.run = note
    # The subscribe gets its place before the slice ends, and no answer comes in between.
    worker.registry.sync.slices.clock = lambda: 0.0
    worker.link.drop("for the test")
    await wait_until(lambda: len(order) >= 151)
    assert order.index("presence-new") < 32 + 32
    await truth.settled([worker])


async def test_connection_is_open_again_when_the_last_channel_left_before_its_turn(start_worker, wait_until, link):
    worker = await start_worker()
    socket = await worker.attach("news")
    # There is no call that would assert it under the next name, because nobody is left by then.
    agenda = worker.registry.sync.agenda
    move = agenda.move

    def move_and_leave(local_channel, stage):
        move(local_channel, stage)
        if stage is Stage.ASSERTING:
            worker.leave(socket)

    agenda.move = move_and_leave
    await link.ask(b"FLUSHALL")
    worker.link.drop("for the test")
    await wait_until(lambda: not list(worker.registry.local_channels()))
    assert worker.registry.connection_state is ConnectionState.OPEN


def count_per_pass(worker):
    """Notes the channels of the calls that each pass of the loop makes, while the clock says that each step takes a
    whole slice."""
    passes = []
    step = worker.registry.sync.slices.run
    clock = iter(range(1_000_000))
    worker.registry.sync.slices.clock = lambda: next(clock)

    def begin_pass():
        passes.append([])
        step()

    note_holds(worker.registry, lambda channel: passes[-1].append(channel))
    worker.registry.sync.slices.run = begin_pass
    return passes


async def test_one_slice_of_the_channels_is_asserted_in_each_pass_of_the_loop(start_worker, wait_until, truth):
    worker = await start_worker()
    sockets = [worker.join(f"old-{n}") for n in range(700)]
    await wait_until(lambda: all(socket.state == "attached" for socket in sockets))
    passes = count_per_pass(worker)
    worker.link.drop("for the test")
    await wait_until(lambda: sum(map(len, passes)) == 700)
    await truth.settled([worker])
    assert max(map(len, passes)) == 1


async def test_calls_that_no_client_waits_for_leave_redis_free_for_those_that_have_one(start_worker, wait_until, truth):
    worker = await start_worker()
    sockets = [worker.join(f"news-{n}") for n in range(1_200)]
    await wait_until(lambda: all(socket.state == "attached" for socket in sockets))
    # While replies wait in memory, the link would begin to read again by itself.
    await worker.link.ask(b"PING")
    worker.deafen()
    for socket in sockets:
        worker.leave(socket)
    await wait_until(lambda: worker.registry.sync.in_flight == 100)
    new = worker.join("new")
    await wait_until(lambda: worker.registry.sync.in_flight == 101)
    worker.hear()
    await wait_until(lambda: new.state == "attached")
    await truth.settled([worker])


async def test_topics_of_one_tick_go_in_subscribes_of_a_thousand_ahead_of_their_calls(start_worker, wait_until):
    # No beats, because they would be counted among the calls.
    worker = await start_worker(beat_s=60, unanswered_s=120)
    commands = []
    call = worker.link.call

    def note(*command, **more):
        commands.append(command[0])
        call(*command, **more)

    worker.link.call = note
    note_holds(worker.registry, lambda channel: commands.append("hold"))
    sockets = [worker.join(f"news-{n}") for n in range(1001)]
    await wait_until(lambda: all(socket.state == "attached" for socket in sockets))
    commands = [command for command in commands if command in (b"SUBSCRIBE", "hold")]
    first, second = [at for at, command in enumerate(commands) if command == b"SUBSCRIBE"]
    assert first == 0
    # All calls of the first thousand go before the second SUBSCRIBE; a call may be repeated meanwhile.
    assert second >= 1001


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


# Flags for webhooks and history


def watch(worker) -> list[list]:
    """The arguments of all later calls of `hold` in its long form."""
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
    for k, debounce_s in ((1, 2.5), (2, 0)):
        worker = await start_worker(k, debounce_s=debounce_s)
        calls = watch(worker)
        await joined(worker, "plain", wait_until)
        worker.app = structs.replace(worker.app, hooks="om")
        await joined(worker, "hooked", wait_until)
        assert [call[3] for call in calls] == ["lod" if debounce_s else "lo"]
        assert (calls[-1][-1] == 2500) == (debounce_s > 0)


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
    assert worker.registry.unhooked == 2
