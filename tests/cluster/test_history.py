"""Reading stored messages, on a real Redis."""

import asyncio

import msgspec
import pytest

from helpers.bus_publishing import Outgoing, publish_all
from redpoll.cluster.bus import Bus, Unavailable
from redpoll.cluster.envelopes import event_tail
from redpoll.cluster.history import History, Page, Row
from redpoll.cluster.redis.keys import cap_of_shard
from redpoll.cluster.redis.link import Link, LinkDown
from redpoll.protocol.apps import App, HistoryRule
from redpoll.protocol.history import InvalidOffset, UnknownEpoch

RULE = HistoryRule(id="abcdef", name="news", prefix=True, keep=1_000, seconds=3_600)
APP = App(id="7", name="test", keys=(), history=(RULE,))


@pytest.fixture
def history(link, keys) -> History:
    return History(link, keys)


@pytest.fixture
def publish(link, keys):
    """`await publish(5)`: publishes five events on `news`, whose data are consecutive numbers."""
    bus, numbers = Bus(link, keys), iter(range(10**6))

    async def publish(count: int, *, channel: str = "news", data: str = "") -> None:
        for _ in range(0, count, 100):
            share = min(count, 100)
            count -= share
            await publish_all(bus, APP, [Outgoing(channel, "e", data or str(next(numbers))) for _ in range(share)])

    return publish


async def asked(method, *args, **more):
    """Returns the outcome that a `done` callback got."""
    future = asyncio.get_running_loop().create_future()
    method(*args, **more, done=future.set_result)
    assert not future.done()
    return await future


def numbers(page: Page) -> list[int]:
    return [int(row.data) for row in page.rows]


def test_row_has_what_was_published():
    row = Row(1_795_229_775_333_584, 3, event_tail("é", '{"a":1}', skip="1.2", trace="ab" * 16, user="ü"))
    assert (row.event, row.data, row.user, row.skip, row.time_ms) == ("é", '{"a":1}', "ü", "1.2", 1_795_229_775_333)
    head = b"e 1795229775333584 3 "
    assert row.envelope() == head + row.tail
    assert row.envelope(skip=False) == head + b"-" + row.tail[3:]
    plain = Row(5, 0, event_tail("e", ""))
    assert (plain.event, plain.data, plain.user, plain.skip) == ("e", "", None, None)


def test_page_follows_an_offset_if_nothing_is_between_them():
    rows = [Row(5, 3, b""), Row(8, 5, b"")]
    assert Page("E", 8, rows, False).follows("E", 3)
    assert not Page("E", 8, rows, False).follows("F", 3)
    # Trimmed, expired or undone.
    assert not Page("E", 8, rows, False).follows("E", 2)
    assert Page("E", 8, [], False).follows("E", 8)
    assert not Page("E", 8, [], False).follows("E", 7)
    assert not Page("E", 8, [], False).follows("E", 9)


def test_position_of_another_epoch_or_of_the_future_is_refused():
    page = Page("E", 8, [], False)
    page.check("E", 8)
    with pytest.raises(UnknownEpoch, match="'E'"):
        page.check("F", 8)
    with pytest.raises(InvalidOffset, match="8"):
        page.check("E", 9)
    with pytest.raises(UnknownEpoch, match="no history"):
        Page("", 0, [], False).check("", 0)


async def test_pages_follow_each_other(history, publish):
    await publish(150)
    since, seen, pages = 0, [], 0
    while True:
        page = await asked(history.page, "7", "news", since, 500)
        pages += 1
        seen += numbers(page)
        if not page.more:
            break
        since = page.rows[-1].offset
    assert seen == list(range(150))
    assert (pages, page.rows[-1].offset) == (3, page.top)
    page = await asked(history.page, "7", "news", page.top, 10)
    assert (page.rows, page.more) == ([], False)


async def test_page_of_large_messages_has_fewer_of_them(history, publish):
    await publish(30, data="x" * 10_000)
    page = await asked(history.page, "7", "news", 0, 64)
    assert (len(page.rows), page.more) == (13, True)


async def test_channel_of_which_nothing_was_stored_has_an_empty_page(history):
    assert await asked(history.page, "7", "news", 0, 64) == Page("", 0, [], False)
    assert await history.read("7", "news", limit=5) == Page("", 0, [], False)
    assert await asked(history.locate, "7", "news", count=5) == 0


async def test_pages_that_many_ask_for_are_awaited_a_few_at_a_time(history, publish, link, wait_until):
    await publish(3)
    pages: list[Page] = []
    before = link.unanswered
    for _ in range(100):
        history.page("7", "news", 0, 64, pages.append)
    assert link.unanswered - before == 16
    await wait_until(lambda: len(pages) == 100)
    assert all(numbers(page) == [0, 1, 2] for page in pages)
    history.page("7", "news", 0, 64, pages.append)
    assert link.unanswered - before == 1


async def test_pages_asked_for_while_redis_is_away_end_without_an_answer(history, link, wait_until):
    outcomes: list[Exception] = []
    for _ in range(40):
        history.page("7", "news", 0, 64, outcomes.append)
    link.drop("for the test")
    history.locate("7", "news", outcomes.append, count=3)
    await wait_until(lambda: len(outcomes) == 41)
    assert all(isinstance(outcome, LinkDown) for outcome in outcomes)
    async with asyncio.timeout(60):
        await link.wait_up()
    assert await asked(history.page, "7", "news", 0, 64) == Page("", 0, [], False)


async def test_last_messages_are_located_by_their_number(history, publish):
    await publish(600)
    for count in (1, 255, 256, 257, 600, 1_000):
        since = await asked(history.locate, "7", "news", count=count)
        page = await asked(history.page, "7", "news", since, 64)
        assert numbers(page)[0] == max(0, 600 - count)


async def test_last_messages_are_located_by_their_time(history, publish):
    await publish(2)
    rows = (await history.read("7", "news", limit=5)).rows
    assert await asked(history.locate, "7", "news", seconds=30) < rows[0].offset
    after = await asked(history.locate, "7", "news", after_ms=rows[0].offset / 1000)
    assert numbers(await asked(history.page, "7", "news", after, 64)) == [1]
    assert (await asked(history.page, "7", "news", await asked(history.locate, "7", "news", seconds=0), 64)).rows == []


async def test_reading_without_bounds_gives_the_newest_oldest_first(history, publish):
    await publish(300)
    page = await history.read("7", "news", limit=150)
    assert (numbers(page), page.more, page.rows[-1].offset) == (list(range(150, 300)), True, page.top)
    page = await history.read("7", "news", limit=1_000)
    assert (numbers(page), page.more) == (list(range(300)), False)


async def test_reading_continues_from_either_end(history, publish):
    await publish(300)
    rows = (await history.read("7", "news", limit=1_000)).rows
    page = await history.read("7", "news", limit=100, before=rows[200].offset)
    assert (numbers(page), page.more) == (list(range(100, 200)), True)
    page = await history.read("7", "news", limit=100, before=rows[100].offset)
    assert (numbers(page), page.more) == (list(range(100)), False)
    page = await history.read("7", "news", limit=100, since=rows[150].offset)
    assert (numbers(page), page.more) == (list(range(151, 251)), True)
    page = await history.read("7", "news", limit=100, since=rows[150].offset, newest=True)
    assert (numbers(page), page.more) == (list(range(200, 300)), True)
    bounds = {"since": rows[10].offset, "until": rows[20].offset}
    assert numbers(await history.read("7", "news", limit=100, **bounds)) == list(range(11, 21))
    assert numbers(await history.read("7", "news", limit=100, until=rows[2].offset)) == [0, 1, 2]
    assert numbers(await history.read("7", "news", limit=2, newest=False)) == [0, 1]
    assert numbers(await history.read("7", "news", limit=9, before=rows[5].offset, until=rows[9].offset)) == [*range(5)]
    assert numbers(await history.read("7", "news", limit=9, before=0)) == []


async def test_reading_stops_at_its_bytes(history, publish):
    await publish(20, data="x" * 10_000)
    page = await history.read("7", "news", limit=100, max_bytes=45_000)
    assert (len(page.rows), page.more) == (4, True)
    page = await history.read("7", "news", limit=100, max_bytes=1)
    assert (len(page.rows), page.more) == (1, True)


async def test_reading_from_another_epoch_or_from_the_future_is_refused(history, publish):
    await publish(1)
    found = await history.read("7", "news", limit=1)
    assert len((await history.read("7", "news", limit=1, since=0, epoch=found.epoch)).rows) == 1
    with pytest.raises(UnknownEpoch):
        await history.read("7", "news", limit=1, since=0, epoch="other")
    with pytest.raises(UnknownEpoch):
        await history.read("7", "other", limit=1, since=0, epoch=found.epoch)
    for bounds in ({"since": found.top + 1}, {"before": found.top + 1}):
        with pytest.raises(InvalidOffset):
            await history.read("7", "news", limit=1, epoch=found.epoch, **bounds)


async def test_bounds_beyond_all_offsets_are_accepted(history, publish):
    await publish(3)
    for since in (-(10**30), -1, 0):
        assert numbers(await history.read("7", "news", limit=9, since=since)) == [0, 1, 2]
        assert numbers(await asked(history.page, "7", "news", since, 9)) == [0, 1, 2]
    assert numbers(await history.read("7", "news", limit=9, before=10**30)) == [0, 1, 2]
    assert numbers(await history.read("7", "news", limit=9, since=10**30)) == []
    assert numbers(await asked(history.page, "7", "news", 10**30, 9)) == []


async def test_cleared_history_is_empty_and_has_another_epoch(history, publish):
    assert await history.clear("7", "news") is None
    await publish(3)
    before = await history.read("7", "news", limit=9)
    epoch = await history.clear("7", "news")
    page = await history.read("7", "news", limit=9)
    assert epoch not in (None, before.epoch)
    assert page == Page(epoch, before.top, [], False)
    await publish(1)
    page = await history.read("7", "news", limit=9)
    assert (page.epoch, numbers(page), page.rows[0].prev) == (epoch, [3], before.top)


async def test_history_cleared_between_two_pages_is_read_again_from_the_start(history, publish, link):
    await publish(100)
    execute, calls = link.execute, []

    async def clearing(script, names, args=()):
        calls.append(script.name)
        if calls == ["history", "history"]:
            await history.clear("7", "news")
            await publish(2)
        return await execute(script, names, args)

    link.execute = clearing
    assert numbers(await history.read("7", "news", limit=100, since=0)) == [100, 101]


async def test_reading_from_a_redis_that_is_away_is_unavailable(keys, monkeypatch):
    link = Link("unix:///nowhere/redis.sock")
    monkeypatch.setattr("redpoll.cluster.bus.ask_within.__defaults__", (0.05,))
    history = History(link, keys)
    with pytest.raises(Unavailable):
        await history.read("7", "news", limit=1)
    with pytest.raises(Unavailable):
        await history.clear("7", "news")


async def test_large_history_delays_no_other_command(history, publish, link):
    """Read in pages: other commands run between two pages, and each page is short."""
    await publish(1_000, data="x" * 2_000)
    reading = asyncio.ensure_future(history.read("7", "news", limit=1_000))
    pings = 0
    while not reading.done():
        await link.ask(b"PING")
        pings += 1
    assert len((await reading).rows) == 1_000
    assert pings > 1_000 * 2_000 / (128 * 1_024) / 2


async def test_history_begins_for_a_reader_once(history, link, keys):
    epoch, top = await asked(history.begin, APP, "news", RULE)
    assert await asked(history.begin, APP, "news", RULE) == (epoch, top)
    assert 0 < await link.ask(b"TTL", keys.history_meta("7", "news")) <= 300
    page = await asked(history.page, "7", "news", 0, 64)
    assert page == Page(epoch, top, [], False, top)


async def test_first_message_follows_the_position_of_a_history_that_was_begun(history, link, keys, publish):
    epoch, top = await asked(history.begin, APP, "news", RULE)
    await publish(2)
    page = await asked(history.page, "7", "news", top, 64)
    assert page.follows(epoch, top)
    assert numbers(page) == [0, 1]
    # It has messages now, so it lives a day longer than they do, and than those of its last reader's time would.
    key = keys.history_meta("7", "news")
    kept_s = await link.ask(b"TTL", key)
    assert kept_s > 86_400
    await link.ask(b"EXPIRE", key, 1_000)
    assert await asked(history.begin, APP, "news", RULE) == (epoch, page.top)
    assert kept_s - 120 < await link.ask(b"TTL", key) <= kept_s


async def test_readers_alone_take_half_of_the_cap(link, keys):
    history = History(link, keys.in_shard(3))
    app = App(id="7", name="test", keys=(), history=(RULE,), max_history_channels=64)
    half = -(-cap_of_shard(64) // 2)
    begun = [await asked(history.begin, app, f"news{n}", RULE) for n in range(half + 1)]
    assert [outcome is not None for outcome in begun] == [True] * half + [False]
    # One that has begun goes on.
    assert await asked(history.begin, app, "news0", RULE) == begun[0]


async def test_page_knows_where_its_epoch_began(history, link, keys):
    bus = Bus(link, keys)
    await publish_all(bus, APP, [Outgoing("news", "e", "0")])
    changed = App(id="7", name="test", keys=(), history=(msgspec.structs.replace(RULE, era="new"),))
    await publish_all(bus, changed, [Outgoing("news", "e", "1"), Outgoing("news", "e", "2")])
    page = await asked(history.page, "7", "news", 0, 64)
    assert numbers(page) == [0, 1, 2]
    assert page.base == page.rows[1].prev


async def test_page_says_that_the_channel_has_ended(history, link, keys, publish):
    await publish(1)
    assert not (await asked(history.page, "7", "news", 0, 64)).ended
    await link.ask(b"HSET", keys.history_meta("7", "news"), b"z", b"1")
    assert (await asked(history.page, "7", "news", 0, 64)).ended
    await history.clear("7", "news")
    assert not (await asked(history.page, "7", "news", 0, 64)).ended
