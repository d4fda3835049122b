"""subscription_count over several workers on a real Redis."""

import asyncio
import time

import pytest

from cluster.announced import announced_count
from redpoll.cluster.directory import DirectoryWriter
from redpoll.cluster.membership.connection_state import ConnectionState
from redpoll.cluster.membership.reaper import Reaper


@pytest.fixture
async def a(start_worker, make_app):
    worker = await start_worker(1)
    worker.app = make_app(subscription_count=True)
    return worker


@pytest.fixture
async def b(start_worker, make_app):
    worker = await start_worker(2)
    worker.app = make_app(subscription_count=True)
    return worker


def everyone(*workers):
    return [socket for worker in workers for socket in worker.sockets.attached.get("news", [])]


def all_know(n, *workers):
    return lambda: [socket.counts[-1:] for socket in everyone(*workers)] == [[n]] * n


async def test_joiner_gets_the_count_and_the_others_get_the_new_one(a, b, wait_until):
    first = a.join("news")
    await wait_until(lambda: first.counts == [1])
    second = b.join("news")
    await wait_until(lambda: second.counts[:1] == [2])
    await wait_until(lambda: first.counts == [1, 2])
    b.leave(second)
    await wait_until(lambda: first.counts == [1, 2, 1])
    await wait_until(lambda: b.registry.channels == 0)


async def test_changes_within_a_quarter_second_make_one_announcement(a, b, wait_until):
    witness = a.join("news")
    await wait_until(lambda: witness.counts == [1])
    began = time.monotonic()
    for n in range(60):
        (a, b)[n % 2].join("news")
        await asyncio.sleep(0.01)
    await wait_until(all_know(61, a, b))
    windows = (time.monotonic() - began) / 0.25
    # This worker's own joiners get the count with their success frames. Others get about one frame per window.
    assert len(witness.counts) <= windows + 2


async def test_above_a_hundred_a_count_is_announced_every_five_seconds(a, b, wait_until, link, keys):
    pushes = []
    began = time.monotonic()
    link.on_push = lambda topic, payload: pushes.append(payload)
    link.subscribe([keys.topic("7", "news")])
    sockets = [(a, b)[n % 2].join("news") for n in range(150)]
    await wait_until(lambda: all(socket.state == "attached" for socket in sockets))
    for socket, worker in zip(sockets[:30], [a, b] * 15, strict=True):
        worker.leave(socket)
        await asyncio.sleep(0.02)
    local_channel = a.registry.local_channel("7", "news")
    await wait_until(all_know(120, a, b), timeout_s=60)
    # Our own connection may bring it a moment later than theirs.
    await wait_until(lambda: pushes[-1].endswith(b" 120"))
    assert len(pushes) <= (time.monotonic() - began) / 5 + 3
    assert local_channel.tally.sent == 120


async def test_count_that_returns_to_its_old_value_is_sent_to_those_who_got_another(a, b, wait_until):
    first = a.join("news")
    await wait_until(lambda: first.counts == [1])
    second = b.join("news")
    await wait_until(all_know(2, a, b))
    third, fourth = a.join("news"), b.join("news")
    await wait_until(lambda: third.state == fourth.state == "attached")
    a.leave(third)
    await wait_until(all_know(3, a, b))
    b.leave(second)
    await wait_until(all_know(2, a, b))


async def test_last_count_is_right_after_churn(a, b, wait_until):
    sockets = []
    for n in range(200):
        worker = (a, b)[n % 2]
        sockets.append((worker, worker.join("news")))
        if n % 3:
            owner, socket = sockets.pop((n * 7) % len(sockets))
            owner.leave(socket)
        if n % 5 == 0:
            await asyncio.sleep(0.005)
    await wait_until(all_know(len(sockets), a, b))
    assert len(everyone(a, b)) == len(sockets)


async def test_leave_of_the_last_subscriber_is_announced_before_the_channel_is_dropped(a, b, wait_until):
    stays = a.join("news")
    await wait_until(lambda: stays.state == "attached")
    goes = b.join("news")
    await wait_until(lambda: goes.state == "attached")
    b.leave(goes)
    await wait_until(lambda: stays.counts[-1] == 1 and b.registry.channels == 0)


async def test_ending_worker_announces_the_count_with_its_last_call(a, b, wait_until, truth):
    stays = a.join("news")
    sockets = [b.join("news") for _ in range(200)]
    await wait_until(lambda: all(socket.state == "attached" for socket in [stays, *sockets]))
    b.leave_all()
    assert await b.registry.finish(timeout_s=60)
    await wait_until(lambda: stays.counts[-1] == 1)


async def test_presence_channels_send_no_count(a, wait_until):
    socket = a.join("presence-room", "u")
    await wait_until(lambda: socket.state == "attached")
    assert socket.counts == []


async def test_reaped_worker_is_counted_out(a, b, wait_until, link, keys):
    await DirectoryWriter(link, keys).fill([a.app], 1)
    stays = a.join("news")
    sockets = [b.join("news") for _ in range(3)]
    await wait_until(lambda: all(socket.state == "attached" for socket in sockets))
    await wait_until(lambda: stays.counts[-1:] == [4])
    await b.kill()
    await Reaper(link, keys, "ffffffffffff").reap(b.registry.worker_id)
    await wait_until(lambda: stays.counts[-1] == 1)


async def test_count_turned_on_is_sent_to_attached_sockets_and_turned_off_is_not(a, b, make_app, wait_until):
    on, off = make_app(subscription_count=True), make_app()
    a.app = b.app = off
    sockets = [a.join("news"), b.join("news")]
    await wait_until(lambda: all(socket.state == "attached" for socket in sockets))
    assert [socket.counts for socket in sockets] == [[], []]
    for worker in (a, b):
        worker.registry.app_changed(off, on)
        worker.app = on
    await wait_until(all_know(2, a, b))
    for worker in (a, b):
        worker.registry.app_changed(on, off)
        worker.app = off
    third = a.join("news")
    await wait_until(lambda: third.state == "attached")
    assert third.counts == []
    assert sockets[0].counts[-1] == 2


async def test_counts_are_right_again_when_redis_restarts(own_redis, start_worker, make_app, wait_until):
    workers = [await start_worker(k, server=own_redis) for k in (1, 2)]
    for worker in workers:
        worker.app = make_app(subscription_count=True)
    sockets = [worker.join("news") for worker in workers for _ in range(5)]
    await wait_until(all_know(10, *workers))
    own_redis.kill()
    workers[0].leave(sockets[0])
    workers[1].leave(sockets[5])
    workers[1].leave(sockets[6])
    own_redis.start()
    await wait_until(all_know(7, *workers))


async def test_counts_are_right_again_when_redis_lost_everything(a, b, wait_until, link):
    sockets = [worker.join("news") for worker in (a, b) for _ in range(3)]
    await wait_until(all_know(6, a, b))
    await link.ask(b"FLUSHALL")
    a.leave(sockets[0])
    for worker in (a, b):
        worker.link.drop("for the test")
    await wait_until(lambda: a.registry.fenced or a.link.connects == 2)
    await wait_until(all_know(5, a, b))


async def test_others_changes_during_a_break_are_sent_afterwards(a, b, wait_until):
    sockets = [worker.join("news") for worker in (a, b)]
    await wait_until(all_know(2, a, b))
    for round_ in range(5):
        a.link.drop("for the test")
        more = b.join("news")
        await wait_until(lambda more=more: more.state == "attached")
        await wait_until(all_know(3 + round_, a, b))
    assert sockets[0].state == "attached"


@pytest.mark.parametrize("changes", [False, True])
async def test_after_a_break_only_a_changed_count_is_announced(a, b, make_app, link, keys, wait_until, changes):
    """Each quiet channel made a webhook with an unchanged number."""
    rows = keys.outbox(keys.shard("7", "news"))
    a.app = b.app = make_app(subscription_count=True, hooks="s")
    sockets = [worker.join("news") for worker in (a, b) for _ in range(2)]
    await wait_until(all_know(4, a, b))
    # As if a minute had passed since the last announcement.
    await link.ask(b"DEL", announced_count(keys, "7", "news"))
    written = await link.ask(b"XLEN", rows)
    for worker in (a, b):
        worker.link.drop("for the test")
    if changes:
        a.leave(sockets[0])
    for worker in (a, b):
        registry, local_channel = worker.registry, worker.registry.local_channel("7", "news")
        await wait_until(lambda worker=worker: worker.link.connects >= 2)
        await wait_until(lambda registry=registry: registry.connection_state is ConnectionState.OPEN)
        await wait_until(lambda held=local_channel: held.tally.settled and not held.busy)
    await wait_until(all_know(3 if changes else 4, a, b))
    assert await link.ask(b"XLEN", rows) == written + changes


async def test_count_pushed_before_the_assertion_does_not_include_our_change(a, b, keys, wait_until):
    going, staying, other = a.join("news"), a.join("news"), b.join("news")
    await wait_until(all_know(3, a, b))
    a.link.drop("for the test")
    a.leave(going)
    # As if another worker had announced it between our SUBSCRIBE and our `hold`.
    a.registry.push(keys.topic("7", "news"), b"n ffffffffffff.1.0 1 3")
    await wait_until(all_know(2, a, b))
    assert staying.state == other.state == "attached"
