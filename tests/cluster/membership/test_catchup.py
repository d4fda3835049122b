"""Workers on a real Redis, whose connections break while events are published to channels with history.

In every test, the recorded sockets (conftest.py) check that each event follows the one before it.
"""

import asyncio
import random

import pytest

from cluster.links import note_holds
from helpers.bus_publishing import Outgoing, publish_all
from helpers.proxy import Proxy
from helpers.sentinel import redis_pair
from helpers.unkeyed import shard
from redpoll import _frame
from redpoll.cluster.bus import Bus, Unavailable
from redpoll.cluster.history import MAX_DELIVERED, History, HistoryPosition
from redpoll.cluster.membership.reaper import Reaper
from redpoll.cluster.redis.link import Link
from redpoll.protocol.apps import HistoryRule

NEWS = "news"


def rule(**more) -> HistoryRule:
    return HistoryRule(**{"id": "abcdef", "name": "", "prefix": True, "keep": 10_000, "seconds": 3_600} | more)


@pytest.fixture
def app(make_app):
    return make_app(history=(rule(),))


@pytest.fixture
async def worker(start_worker, app):
    worker = await start_worker(1)
    worker.app = app
    return worker


@pytest.fixture
def bus(link, keys):
    return Bus(link, keys)


async def attach(worker, wait_until, channel=NEWS, user=None):
    socket = worker.join(channel, user)
    await wait_until(lambda: socket.state == "attached")
    return socket


def data(socket) -> list[str]:
    return [_frame.envelope(payload)[7].decode() for payload in socket.events]


def numbers(socket) -> list[int]:
    return [int(text) for text in data(socket)]


async def send(bus, app, *texts, channel=NEWS) -> None:
    await publish_all(bus, app, [Outgoing(channel, "e", str(text)) for text in texts])


async def away(worker, wait_until) -> None:
    """The worker's connection is gone, and doesn't come back before `back`."""
    worker.registry._reconnect._register = asyncio.Event().wait
    worker.link.drop("for the test")
    await wait_until(lambda: worker.link.up)


async def back(worker, wait_until) -> None:
    del worker.registry._reconnect._register
    connects = worker.link.connects
    worker.link.drop("for the test")
    await wait_until(lambda: worker.link.connects > connects)


def settled(worker, channel=NEWS) -> bool:
    local_channel = worker.registry.local_channel("7", channel)
    return local_channel is not None and local_channel.history is not None and local_channel.history.live


# Positions


async def test_joiner_gets_the_position_after_which_its_events_come(worker, bus, app, link, keys, wait_until):
    first = await attach(worker, wait_until)
    epoch, offset = first.place
    assert epoch
    assert offset == (await History(link, keys).read("7", NEWS, limit=1)).top
    await send(bus, app, 1, 2)
    await wait_until(lambda: len(first.events) == 2)
    second = await attach(worker, wait_until)
    assert second.place == (epoch, _frame.offsets(first.events[1])[0])
    await send(bus, app, 3)
    await wait_until(lambda: second.events)
    assert (data(first), data(second)) == (["1", "2", "3"], ["3"])
    assert worker.sockets.lost_places == []
    assert not worker.sockets.faults


async def test_channels_without_history_have_no_position(start_worker, wait_until, make_app, bus):
    worker = await start_worker(1)
    worker.app = app = make_app(history=(rule(name="other"),))
    socket = await attach(worker, wait_until)
    await send(bus, app, 1)
    await wait_until(lambda: socket.events)
    assert socket.place is None
    assert socket.events == [b"e 0 0 - - 0 1\ne1"]
    assert worker.registry.catchups == 0


async def test_joiners_that_race_publishes_get_exactly_the_events_after_their_position(
    start_worker, app, bus, link, keys, wait_until
):
    workers = [await start_worker(k) for k in (1, 2)]
    for worker in workers:
        worker.app = app
    rng, sockets, sending, sent = random.Random(5), [], [], 0
    for _ in range(150):
        if rng.random() < 0.5:
            share = rng.randrange(1, 4)
            sending.append(asyncio.ensure_future(send(bus, app, *range(sent, sent + share))))
            sent += share
        sockets.append(rng.choice(workers).join(NEWS))
        if rng.random() < 0.5:
            await asyncio.sleep(0)
        if rng.random() < 0.3:
            await workers[0].link.ask(b"PING")
    await asyncio.gather(*sending)
    rows = (await History(link, keys).read("7", NEWS, limit=1_000)).rows
    await wait_until(lambda: all(socket.state == "attached" for socket in sockets))
    for socket in sockets:
        due = [int(row.data) for row in rows if row.offset > socket.place[1]]
        await wait_until(lambda socket=socket, due=due: len(socket.events) >= len(due))
        assert numbers(socket) == due
    assert len({socket.place for socket in sockets}) > 20


async def without_position(start_worker, make_app, link, keys, wait_until):
    """A worker with a subscriber for which no history could begin: half of the app's cap in the shard is taken."""
    worker = await start_worker(1)
    worker.app = make_app(history=(rule(),), max_history_channels=64)
    ends_ms = (int((await link.ask(b"TIME"))[0]) + 3_600) * 1_000
    await link.ask(b"ZADD", keys.histories(shard("7", NEWS), "7"), ends_ms, "other")
    socket = await attach(worker, wait_until)
    assert socket.place is None
    return worker, socket


async def test_channel_without_a_position_has_one_from_its_first_message_on(
    start_worker, make_app, bus, link, keys, wait_until
):
    """What was published during a break was stored and never delivered, and no client learned of the gap."""
    worker, socket = await without_position(start_worker, make_app, link, keys, wait_until)
    await send(bus, worker.app, 1)
    await wait_until(lambda: settled(worker))
    await away(worker, wait_until)
    await send(bus, worker.app, 2)
    await back(worker, wait_until)
    await wait_until(lambda: len(socket.events) == 2)
    await send(bus, worker.app, 3)
    await wait_until(lambda: len(socket.events) == 3)
    assert numbers(socket) == [1, 2, 3]
    # A client that recovers got the epoch after the first message, and goes on from there.
    assert [(name, offset) for name, _, offset in worker.sockets.lost_places] == [
        (NEWS, _frame.offsets(socket.events[0])[0])
    ]
    assert (bus.unkept, worker.sockets.faults) == (0, [])


async def test_first_message_that_was_published_during_a_break_is_known_to_be_missing(
    start_worker, make_app, bus, link, keys, wait_until
):
    worker, socket = await without_position(start_worker, make_app, link, keys, wait_until)
    await away(worker, wait_until)
    await send(bus, worker.app, 1)
    await back(worker, wait_until)
    await wait_until(lambda: settled(worker))
    page = await History(link, keys).read("7", NEWS, limit=1)
    assert worker.sockets.lost_places == [(NEWS, page.epoch, page.top)]
    await send(bus, worker.app, 2)
    await wait_until(lambda: socket.events)
    assert numbers(socket) == [2]
    assert not worker.sockets.faults


async def test_events_that_are_not_stored_ask_for_no_position(start_worker, make_app, bus, link, keys, wait_until):
    worker, socket = await without_position(start_worker, make_app, link, keys, wait_until)
    # The whole cap is taken.
    await link.ask(b"ZADD", keys.histories(shard("7", NEWS), "7"), b"+inf", "third")
    calls = []
    note_holds(worker.registry, calls.append)
    await send(bus, worker.app, 1, 2)
    await wait_until(lambda: len(socket.events) == 2)
    await attach(worker, wait_until)
    assert (bus.unkept, len(calls)) == (2, 1)


# The connection breaks


async def test_events_published_during_a_break_come_once_and_in_order(worker, bus, app, wait_until):
    socket = await attach(worker, wait_until)
    await send(bus, app, 0, 1)
    await wait_until(lambda: len(socket.events) == 2)
    await away(worker, wait_until)
    await send(bus, app, *range(2, 300))
    assert len(socket.events) == 2
    await back(worker, wait_until)
    await wait_until(lambda: len(socket.events) == 300)
    await send(bus, app, 300)
    await wait_until(lambda: len(socket.events) == 301)
    assert numbers(socket) == list(range(301))
    assert socket.place_at == 0
    assert (worker.sockets.lost_places, worker.sockets.faults) == ([], [])


@pytest.mark.parametrize("seed", range(3))
async def test_random_breaks_lose_and_repeat_nothing(seed, redis, start_worker, app, bus, link, keys, wait_until):
    rng, sent = random.Random(seed), 0
    with Proxy(redis.path) as proxy:
        workers = [await start_worker(1, server=proxy), await start_worker(2)]
        sockets = []
        for worker in workers:
            worker.app = app
            sockets += [await attach(worker, wait_until) for _ in range(2)]
        for _ in range(120):
            share = rng.choice((1, 5, 70))
            await send(bus, app, *range(sent, sent + share))
            sent += share
            if rng.random() < 0.1:
                proxy.cut()
            if rng.random() < 0.1:
                rng.choice(workers).link.drop("for the test")
            if rng.random() < 0.1 and workers[0].link.up:
                workers[0].deafen()
                workers[0].link.flush()
                asyncio.get_running_loop().call_later(0.005, workers[0].link.drop, "for the test")
            await asyncio.sleep(rng.choice((0, 0.001, 0.02)))
        for socket in sockets:
            await wait_until(lambda socket=socket: len(socket.events) >= sent)
            assert numbers(socket) == list(range(sent))
        for worker in workers:
            assert worker.registry.catchups >= 1
            assert (worker.sockets.lost_places, worker.sockets.faults) == ([], [])


async def test_connection_that_hangs_until_it_is_closed_loses_nothing(redis, start_worker, app, bus, wait_until):
    with Proxy(redis.path) as proxy:
        worker = await start_worker(1, server=proxy, unanswered_s=0.5)
        worker.app = app
        socket = await attach(worker, wait_until)
        proxy.stall()
        await send(bus, app, *range(100))
        await wait_until(lambda: worker.link.reconnects or not worker.link.up)
        proxy.resume()
        await send(bus, app, *range(100, 200))
        await wait_until(lambda: len(socket.events) >= 200)
        assert numbers(socket) == list(range(200))
        assert (worker.sockets.lost_places, worker.sockets.faults) == ([], [])


@pytest.mark.parametrize("kill_at", [150, 400])
async def test_redis_killed_with_its_data_loses_and_repeats_nothing(
    kill_at, own_redis, start_worker, app, keys, wait_until
):
    worker = await start_worker(1, server=own_redis)
    worker.app = app
    socket = await attach(worker, wait_until)
    link = Link(own_redis.url, first_delay_s=0.01, max_delay_s=0.05)
    link.start()
    bus, sent = Bus(link, keys), 0
    killing: asyncio.Future[None] | None = None

    def kill() -> None:
        own_redis.kill()
        own_redis.start()

    # The thread that kills may be slower than the publisher.
    while sent < 600 or not killing.done():
        if sent == kill_at and killing is None:
            killing = asyncio.ensure_future(asyncio.to_thread(kill))
        try:
            await publish_all(bus, app, [Outgoing(NEWS, "e", str(sent))], once=f"m{sent}", within_s=0.5)
        except Unavailable:
            # A publisher that got 503 sends the same request again, with the same id.
            await asyncio.sleep(0.005)
        else:
            sent += 1
    await killing
    await wait_until(lambda: len(socket.events) >= sent)
    assert numbers(socket) == list(range(sent))
    assert link.reconnects > 0
    assert worker.link.reconnects > 0
    assert (worker.sockets.lost_places, worker.sockets.faults) == ([], [])
    await link.close()


async def test_socket_that_joins_during_a_catch_up_gets_all_after_its_position(
    worker, bus, app, link, keys, wait_until
):
    first = await attach(worker, wait_until)
    await send(bus, app, 0)
    await wait_until(lambda: first.events)
    page, asked = worker.registry.history.page, []
    worker.registry.history.page = lambda *args: asked.append(args)
    await away(worker, wait_until)
    await send(bus, app, *range(1, 100))
    await back(worker, wait_until)
    await wait_until(lambda: asked)
    late = await attach(worker, wait_until)
    assert late.place == (first.place[0], _frame.offsets(first.events[0])[0])
    worker.registry.history.page = page
    page(*asked[0])
    await wait_until(lambda: len(late.events) == 99)
    assert numbers(late) == list(range(1, 100))
    assert numbers(first) == list(range(100))


async def test_channel_whose_last_socket_left_during_a_break_forgets_its_position(worker, bus, app, wait_until):
    socket = await attach(worker, wait_until)
    await away(worker, wait_until)
    worker.leave(socket)
    await send(bus, app, 1, 2)
    late = worker.join(NEWS)
    await back(worker, wait_until)
    await wait_until(lambda: late.state == "attached")
    await send(bus, app, 3)
    await wait_until(lambda: late.events)
    assert data(late) == ["3"]
    assert worker.registry.catchups == 0


async def test_sender_is_skipped_in_catch_up_and_live(worker, bus, app, wait_until):
    socket = await attach(worker, wait_until)
    await away(worker, wait_until)
    await publish_all(bus, app, [Outgoing(NEWS, "e", "1", skip="1.2")])
    await back(worker, wait_until)
    await wait_until(lambda: socket.events)
    assert _frame.envelope(socket.events[0])[2:4] == (1, 2)


async def test_many_channels_catch_up_side_by_side(worker, bus, app, wait_until):
    sockets = {f"news-{n}": worker.join(f"news-{n}") for n in range(300)}
    await wait_until(lambda: all(socket.state == "attached" for socket in sockets.values()))
    await away(worker, wait_until)
    await publish_all(bus, app, [Outgoing(channel, "e", str(n)) for channel in sockets for n in range(3)])
    await back(worker, wait_until)
    await wait_until(lambda: all(len(socket.events) == 3 for socket in sockets.values()))
    assert all(numbers(socket) == [0, 1, 2] for socket in sockets.values())


async def test_worker_fenced_on_a_connection_that_lives_misses_nothing(worker, bus, app, link, keys, wait_until):
    socket = await attach(worker, wait_until)
    reaping = asyncio.ensure_future(Reaper(link, keys, "ffffffffffff").reap(worker.registry.worker_id))
    for number in range(100):
        await send(bus, app, number)
    await reaping
    await wait_until(lambda: worker.registry.worker_id.endswith(".1"))
    await send(bus, app, 100)
    await wait_until(lambda: len(socket.events) == 101)
    assert numbers(socket) == list(range(101))
    assert (worker.sockets.lost_places, worker.sockets.faults) == ([], [])


# Gaps that can't be filled


@pytest.fixture
def short(worker, make_app):
    """A rule that keeps five messages."""
    worker.app = make_app(history=(rule(keep=5),))
    return worker.app


async def test_trimmed_gap_is_reported_and_later_events_come(worker, short, bus, wait_until):
    socket = await attach(worker, wait_until)
    await send(bus, short, 0)
    await wait_until(lambda: socket.events)
    await away(worker, wait_until)
    await send(bus, short, *range(1, 21))
    await back(worker, wait_until)
    await wait_until(lambda: len(socket.events) == 6)
    await send(bus, short, 21)
    await wait_until(lambda: len(socket.events) == 7)
    assert numbers(socket) == [0, 16, 17, 18, 19, 20, 21]
    ((channel, epoch, offset),) = worker.sockets.lost_places
    assert (channel, epoch, offset) == (NEWS, socket.place[0], _frame.offsets(socket.events[1])[1])
    assert socket.place_at == 1
    assert not worker.sockets.faults


async def test_expired_gap_is_reported(worker, make_app, bus, link, keys, wait_until):
    worker.app = app = make_app(history=(rule(seconds=1),))
    socket = await attach(worker, wait_until)
    await send(bus, app, 0)
    await away(worker, wait_until)
    await send(bus, app, 1)
    top = (await History(link, keys).read("7", NEWS, limit=1)).top
    await link.ask(b"PEXPIRE", keys.history("7", NEWS), 1)
    while await link.ask(b"EXISTS", keys.history("7", NEWS)):
        pass
    await back(worker, wait_until)
    await wait_until(lambda: worker.sockets.lost_places)
    assert worker.sockets.lost_places[0][2] == top
    await send(bus, app, 2)
    await wait_until(lambda: data(socket)[-1:] == ["2"])
    assert "1" not in data(socket)
    assert not worker.sockets.faults


async def test_cleared_history_is_reported_with_its_new_epoch_and_later_events_come(
    worker, app, bus, link, keys, wait_until
):
    socket = await attach(worker, wait_until)
    await send(bus, app, 1)
    epoch = await History(link, keys).clear("7", NEWS)
    await send(bus, app, 2)
    await wait_until(lambda: len(socket.events) == 2)
    assert socket.place == (epoch, _frame.offsets(socket.events[0])[0])
    assert socket.place_at == 1
    assert worker.registry.catchups == 0
    assert (await attach(worker, wait_until)).place == (epoch, _frame.offsets(socket.events[1])[0])


async def test_history_cleared_during_a_break_is_reported(worker, app, bus, link, keys, wait_until):
    socket = await attach(worker, wait_until)
    await send(bus, app, 1)
    await wait_until(lambda: socket.events)
    await away(worker, wait_until)
    await send(bus, app, 2)
    epoch = await History(link, keys).clear("7", NEWS)
    await send(bus, app, 3)
    await back(worker, wait_until)
    await wait_until(lambda: len(socket.events) == 2)
    assert data(socket) == ["1", "3"]
    assert (socket.place[0], socket.place_at) == (epoch, 1)
    assert not worker.sockets.faults


async def test_emptied_redis_has_a_new_history_of_which_nothing_is_missed(worker, app, bus, link, wait_until):
    socket = await attach(worker, wait_until)
    await send(bus, app, 1)
    await wait_until(lambda: socket.events)
    before = socket.place
    await link.ask(b"FLUSHALL")
    await send(bus, app, 2, 3)
    await wait_until(lambda: worker.registry.worker_id.endswith(".1"))
    await send(bus, app, 4)
    await wait_until(lambda: len(socket.events) == 4)
    assert data(socket) == ["1", "2", "3", "4"]
    assert socket.place != before
    assert not worker.sockets.faults


async def test_history_lost_during_a_break_is_reported_when_a_new_one_begins(worker, app, bus, link, keys, wait_until):
    socket = await attach(worker, wait_until)
    before = socket.place
    await away(worker, wait_until)
    await link.ask(b"DEL", keys.history("7", NEWS), keys.history_meta("7", NEWS))
    await back(worker, wait_until)
    await wait_until(lambda: settled(worker))
    assert socket.place == before
    await send(bus, app, 1)
    await wait_until(lambda: socket.events)
    page = await History(link, keys).read("7", NEWS, limit=1)
    assert socket.place == (page.epoch, page.rows[0].prev)
    assert page.epoch != before[0]
    assert not worker.sockets.faults


async def test_history_that_expired_while_subscribed_begins_a_new_epoch(worker, app, bus, link, keys, wait_until):
    socket = await attach(worker, wait_until)
    await send(bus, app, 1)
    await link.ask(b"DEL", keys.history("7", NEWS), keys.history_meta("7", NEWS))
    late = await attach(worker, wait_until)
    # The joiner's `hold` began the new one.
    assert late.place == socket.place
    assert len(worker.sockets.lost_places) == 1
    assert worker.registry.catchups == 0
    await link.ask(b"DEL", keys.history_meta("7", NEWS))
    await send(bus, app, 2)
    await wait_until(lambda: late.events)
    assert len(worker.sockets.lost_places) == 2
    assert (data(socket), data(late)) == (["1", "2"], ["2"])
    assert not worker.sockets.faults


async def test_publisher_that_is_faster_than_the_reader_is_not_waited_for(worker, make_app, bus, wait_until):
    worker.app = app = make_app(history=(rule(keep=200),))
    socket = await attach(worker, wait_until)
    page, pages, sent = worker.registry.history.page, [], [0]

    def outrun(*args) -> None:
        async def publish_then_read() -> None:
            await send(bus, app, *range(sent[0], sent[0] + 70))
            sent[0] += 70
            page(*args)

        pages.append(asyncio.ensure_future(publish_then_read()))

    worker.registry.history.page = outrun
    await away(worker, wait_until)
    await back(worker, wait_until)
    await wait_until(lambda: settled(worker))
    assert len(pages) == (200 + 8 * 64) // 64 + 1
    assert len(worker.sockets.lost_places) == 1
    await send(bus, app, -1)
    await wait_until(lambda: data(socket)[-1:] == ["-1"])
    seen = numbers(socket)[:-1]
    assert seen == list(range(len(seen)))
    assert not worker.sockets.faults


# Events that are not stored


async def test_unstored_event_is_passed_on_and_leaves_the_position_as_it_is(worker, app, bus, link, keys, wait_until):
    socket = await attach(worker, wait_until)
    await send(bus, app, 1)
    bus.publish(app, NEWS, "client-e", "typing", done=lambda reply: None)
    await send(bus, app, 2)
    await wait_until(lambda: len(socket.events) == 3)
    assert data(socket) == ["1", "typing", "2"]
    assert [int(row.data) for row in (await History(link, keys).read("7", NEWS, limit=9)).rows] == [1, 2]
    assert (worker.registry.catchups, worker.sockets.faults) == (0, [])


async def test_unstored_event_is_passed_on_while_the_channel_catches_up(worker, app, bus, keys, wait_until):
    socket = await attach(worker, wait_until)
    page, asked = worker.registry.history.page, []
    worker.registry.history.page = lambda *args: asked.append(args)
    await away(worker, wait_until)
    await send(bus, app, 1)
    await back(worker, wait_until)
    await wait_until(lambda: asked)
    bus.publish(app, NEWS, "client-e", "typing", done=lambda reply: None)
    await send(bus, app, 2)
    await wait_until(lambda: data(socket) == ["typing"])
    page(*asked[0])
    await wait_until(lambda: data(socket) == ["typing", "1", "2"])


async def test_clients_events_are_stored_where_the_rule_says_so(worker, make_app, bus, link, keys, wait_until):
    worker.app = app = make_app(history=(rule(client_events=True),))
    socket = await attach(worker, wait_until)
    receivers: list[int] = []
    bus.publish(app, NEWS, "client-e", "1", skip="1.2", user="u", done=receivers.append)
    await wait_until(lambda: socket.events and receivers)
    (row,) = (await History(link, keys).read("7", NEWS, limit=9)).rows
    assert (row.event, row.data, row.user, row.skip) == ("client-e", "1", "u", "1.2")
    assert row.envelope() == socket.events[0]
    assert receivers == [1]


async def test_channel_beyond_the_apps_cap_gets_its_events_and_has_no_position(
    start_worker, make_app, bus, link, keys, wait_until
):
    worker = await start_worker(1)
    # At most one in each shard.
    worker.app = app = make_app(history=(rule(),), max_history_channels=1)
    channels = [f"news-{n}" for n in range(200)]
    await publish_all(bus, app, [Outgoing(channel, "e", "0") for channel in channels])
    histories = await link.ask(b"KEYS", b"*:h:*")
    assert 0 < len(histories) <= 64
    assert bus.unkept == 200 - len(histories)
    sockets = {channel: worker.join(channel) for channel in channels}
    await wait_until(lambda: all(socket.state == "attached" for socket in sockets.values()))
    assert sum(socket.place is not None for socket in sockets.values()) == len(histories)
    await publish_all(bus, app, [Outgoing(channel, "e", "1") for channel in channels])
    await wait_until(lambda: all(socket.events for socket in sockets.values()))
    assert all(data(socket) == ["1"] for socket in sockets.values())
    assert (worker.registry.catchups, worker.sockets.faults) == (0, [])


# Rules come and go


async def test_rule_that_is_made_while_a_channel_is_held_is_in_force_at_once(
    start_worker, make_app, bus, link, keys, wait_until
):
    worker = await start_worker(1)
    old, new = make_app(), make_app(history=(rule(),))
    worker.app = old
    socket = await attach(worker, wait_until)
    await send(bus, old, 1)
    worker.registry.app_changed(old, new)
    await wait_until(lambda: settled(worker))
    await away(worker, wait_until)
    await send(bus, new, 2)
    await back(worker, wait_until)
    await wait_until(lambda: len(socket.events) == 2)
    assert data(socket) == ["1", "2"]
    worker.registry.app_changed(new, old)
    await wait_until(lambda: worker.registry.local_channel("7", NEWS).history is None)
    await send(bus, new, 3)
    await send(bus, old, 4)
    await wait_until(lambda: len(socket.events) == 4)
    assert data(socket) == ["1", "2", "3", "4"]


# Errors


async def test_failed_page_is_read_again(worker, app, bus, link, keys, wait_until):
    socket = await attach(worker, wait_until)
    await away(worker, wait_until)
    await send(bus, app, 1)
    await link.ask(b"RENAME", keys.history("7", NEWS), b"aside")
    await link.ask(b"SET", keys.history("7", NEWS), b"no stream")
    await back(worker, wait_until)
    await wait_until(lambda: worker.registry.errors >= 3)
    assert socket.events == []
    await link.ask(b"RENAME", b"aside", keys.history("7", NEWS))
    await wait_until(lambda: data(socket) == ["1"])
    assert (worker.registry.catchups, worker.sockets.lost_places) == (1, [])


async def test_event_whose_delivery_fails_does_not_stop_the_others(worker, app, bus, wait_until):
    problems: list[dict] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: problems.append(context))
    socket = await attach(worker, wait_until)
    await away(worker, wait_until)
    await send(bus, app, *range(10))
    take = worker.registry.catchup._on_event

    def fail_at_five(local_channel, payload) -> None:
        take(local_channel, payload)
        assert not payload.endswith(b"e5")

    worker.registry.catchup._on_event = fail_at_five
    await back(worker, wait_until)
    await wait_until(lambda: len(socket.events) == 10)
    assert numbers(socket) == list(range(10))
    assert len(problems) == 1
    await wait_until(lambda: settled(worker))


# Histories that lost what was delivered


class Split:
    """Two primaries that had the same history when they were parted, `former` and `present`. The worker is at the
    former one until `heal`."""

    def __init__(self, pair, proxy, keys) -> None:
        self.pair = pair
        self.proxy = proxy
        self.former, self.present = (
            Link(node.url, first_delay_s=0.01, max_delay_s=0.05) for node in (pair.primary, pair.replica)
        )
        self.buses = {link: Bus(link, keys) for link in (self.former, self.present)}

    async def open(self) -> None:
        self.former.start()
        await self.former.wait_up()

    async def part(self) -> None:
        assert await self.former.ask(b"WAIT", 1, 60_000) == 1
        with self.pair.replica.client() as client:
            client.replicaof("NO", "ONE")
        self.present.start()
        await self.present.wait_up()

    async def send(self, link, app, *texts) -> None:
        await send(self.buses[link], app, *texts)

    def heal(self, back: bool = False) -> None:
        node = self.pair.primary if back else self.pair.replica
        self.proxy.upstream = ("127.0.0.1", node.port)
        self.proxy.cut()

    async def close(self) -> None:
        await self.former.close()
        await self.present.close()


@pytest.fixture
async def split(keys):
    with redis_pair() as pair, Proxy(("127.0.0.1", pair.primary.port)) as proxy:
        split = Split(pair, proxy, keys)
        await split.open()
        yield split
        await split.close()


@pytest.fixture
async def cut_off(split, start_worker, app, wait_until):
    """A worker that is cut off, and its subscriber, who has two messages from before that."""
    worker = await start_worker(1, server=split.proxy)
    worker.app = app
    socket = await attach(worker, wait_until)
    await split.send(split.former, app, "a", "b")
    await wait_until(lambda: len(socket.events) == 2)
    await split.part()
    return worker, socket


async def events(wait_until, socket, count) -> list[str]:
    await wait_until(lambda: len(socket.events) >= count)
    return data(socket)


async def test_after_a_split_the_messages_of_the_other_side_come_once_and_in_order(split, cut_off, app, wait_until):
    """83 of 83 were never delivered: the catch-up began at the top, because the last offset was unknown there."""
    worker, socket = cut_off
    common = worker.registry.local_channel("7", NEWS).history.last
    here, there = ([f"{side}{n}" for n in range(100)] for side in ("here ", "there "))
    for n in range(100):
        await split.send(split.former, app, here[n])
        await split.send(split.present, app, there[n])
    assert await events(wait_until, socket, 102) == ["a", "b", *here]
    split.heal()
    assert await events(wait_until, socket, 202) == ["a", "b", *here, *there]
    await split.send(split.present, app, "later")
    assert (await events(wait_until, socket, 203))[-1] == "later"
    # Recovering clients learn that the history goes on after the last message that both sides have.
    assert worker.sockets.lost_places == [(NEWS, socket.place[0], common)]
    assert (socket.place_at, worker.sockets.faults) == (102, [])
    assert (await attach(worker, wait_until)).place[1] == worker.registry.local_channel("7", NEWS).history.last


async def test_after_a_split_without_other_messages_none_comes_twice(split, cut_off, app, wait_until):
    worker, socket = cut_off
    common = worker.registry.local_channel("7", NEWS).history.last
    await split.send(split.former, app, "c", "d")
    await events(wait_until, socket, 4)
    split.heal()
    await wait_until(lambda: worker.sockets.lost_places)
    assert worker.sockets.lost_places == [(NEWS, socket.place[0], common)]
    await split.send(split.present, app, "e")
    assert await events(wait_until, socket, 5) == ["a", "b", "c", "d", "e"]
    # The former one is the primary once more.
    split.heal(back=True)
    await wait_until(lambda: len(worker.sockets.lost_places) == 2)
    await split.send(split.former, app, "f")
    assert await events(wait_until, socket, 6) == ["a", "b", "c", "d", "e", "f"]
    assert worker.sockets.faults == []


async def test_after_a_split_with_more_messages_than_a_worker_remembers_the_gap_is_reported(
    split, cut_off, app, wait_until, monkeypatch
):
    worker, socket = cut_off
    monkeypatch.setattr("redpoll.cluster.history.MAX_DELIVERED", 4)
    await split.send(split.present, app, "early")
    here = [f"here {n}" for n in range(20)]
    await split.send(split.former, app, *here)
    await split.send(split.present, app, "late")
    await events(wait_until, socket, 22)
    split.heal()
    # What is newer than the oldest offset that the worker remembers comes nevertheless.
    assert await events(wait_until, socket, 23) == ["a", "b", *here, "late"]
    assert len(worker.sockets.lost_places) == 1
    assert worker.sockets.faults == []


async def test_position_remembers_a_bounded_number_of_offsets():
    position = HistoryPosition("e", 1, True)
    for offset in range(2, 2_000):
        position.advance(offset)
        assert min(offset, MAX_DELIVERED) <= len(position.delivered) <= 2 * MAX_DELIVERED
        assert position.delivered[-1] == position.last == offset
    position.begin("f", 5)
    assert list(position.delivered) == [5]
