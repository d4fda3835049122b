"""A channel's tail: who joins, what they get, and when they end. The test answers for the history."""

import asyncio

import pytest

from redpoll._fanout import Flusher
from redpoll.cluster.envelopes import event_envelope, event_tail
from redpoll.cluster.history import Page, Row
from redpoll.cluster.redis.link import LinkDown
from redpoll.worker.streams.formats import Batch
from redpoll.worker.streams.tail import Tail, TailState


class History:
    """Pages, one at a time, when the test says so."""

    def __init__(self) -> None:
        self.asked: list[int] = []
        self.waiting: list = []

    def page(self, app_id, channel, since, count, done) -> None:
        self.asked.append(since)
        self.waiting.append(done)

    def answer(self, outcome) -> None:
        self.waiting.pop(0)(outcome)


class Poll:
    """A reader who waits for one answer."""

    form = None

    def __init__(self) -> None:
        self.batches: list[Batch] = []
        self.reads = 0

    def answer(self, batch: Batch) -> None:
        self.batches.append(batch)

    def read_on(self) -> None:
        self.reads += 1

    @property
    def got(self) -> list[int]:
        return [message.offset for batch in self.batches for message in batch.messages]


class Table:
    def __init__(self) -> None:
        self.history = History()
        self.sent: list[tuple[str, int]] = []
        self.dismissed: list[Poll] = []
        self.tail = Tail(
            "1",
            "c",
            b"t",
            self.history,
            Flusher(lambda: None),
            lambda *counted: self.sent.append(counted),
            self.dismissed.append,
        )
        self.tail.subscribed()

    def join(self, at: int, epoch: str = "e") -> Poll:
        poll = Poll()
        self.tail.readers[poll] = None
        self.tail.join(poll, epoch, at, None)
        return poll

    def push(self, offset: int, prev: int | None = None, data: str = "x") -> None:
        prev = offset - 1 if prev is None else prev
        self.tail.pushed(event_envelope("n", data, offset=offset, prev=prev))


def page(*offsets: int, epoch: str = "e", top: int = 0, more: bool = False, ended: bool = False) -> Page:
    rows = [Row(offset, offset - 1, event_tail("n", "x")) for offset in offsets]
    return Page(epoch, top or (offsets[-1] if offsets else 0), rows, more, ended=ended)


@pytest.fixture
async def table() -> Table:
    return Table()


async def settle() -> None:
    """Lets the loop call what was scheduled."""
    for _ in range(3):
        await asyncio.sleep(0)


async def test_first_reader_places_the_tail_and_gets_what_comes(table):
    assert table.tail.state is TailState.UNPLACED
    poll = table.join(5)
    assert table.tail.state is TailState.LIVE
    table.push(6)
    assert poll.got == [6]
    assert table.sent == [("1", 1)]
    assert table.history.asked == []


async def test_page_that_was_asked_for_before_the_subscription_does_not_place_the_tail(table):
    """A message that was published between them came to nobody, and long polls got 204 without it."""
    table.tail.lost()
    early, waiting = Poll(), table.join(5)
    table.tail.readers[early] = None
    table.tail.subscribed()
    table.tail.join(early, "e", 5, None)
    await settle()
    assert (table.tail.state, early.reads, waiting.reads) == (TailState.UNPLACED, 1, 1)
    # Their next pages were asked for after it.
    table.tail.join(early, "e", 6, None)
    assert table.tail.after("e", 6) == []
    table.tail.join(waiting, "e", 6, None)
    table.push(7)
    assert (early.got, waiting.got) == ([7], [7])


async def test_poll_is_answered_once(table):
    poll = table.join(5)
    table.push(6)
    table.push(7)
    assert poll.got == [6]


async def test_event_that_was_delivered_is_not_delivered_again(table):
    table.join(5)
    table.push(6)
    poll = table.join(6)
    table.push(6)
    assert poll.batches == []


async def test_events_that_are_not_stored_are_not_in_the_stream(table):
    poll = table.join(5)
    table.tail.pushed(event_envelope("n", "x"))
    assert poll.batches == []
    assert table.tail.state is TailState.LIVE


async def test_missed_event_is_read_from_the_history(table):
    poll = table.join(5)
    table.push(8)
    assert table.tail.state is TailState.CATCHING_UP
    assert table.history.asked == [5]
    # The page has it.
    table.push(9)
    assert poll.batches == []
    table.history.answer(page(6, 7, 8, 9))
    assert poll.got == [6, 7, 8, 9]
    assert (table.tail.state, table.tail.last) == (TailState.LIVE, 9)


async def test_long_gap_is_read_page_by_page(table):
    poll = table.join(5)
    table.push(9)
    table.history.answer(page(6, 7, more=True, top=9))
    assert poll.got == [6, 7]
    assert not poll.batches[0].up_to_date
    assert table.history.asked == [5, 7]
    table.history.answer(page(8, 9))
    assert (table.tail.state, table.tail.last) == (TailState.LIVE, 9)


async def test_gap_that_cannot_be_filled_ends_the_readers(table):
    poll = table.join(5)
    table.push(9)
    # Those after 5 are no longer stored.
    table.history.answer(page(8, 9))
    assert table.dismissed == [poll]
    assert table.tail.state is TailState.UNPLACED


async def test_break_is_bridged(table):
    poll = table.join(5)
    table.tail.lost()
    assert table.tail.state is TailState.AWAY
    table.push(7)
    table.tail.subscribed()
    assert table.history.asked == [5]
    table.history.answer(LinkDown("again"))
    assert table.tail.state is TailState.CATCHING_UP
    table.tail.lost()
    table.tail.subscribed()
    table.history.answer(page(6, 7))
    assert poll.got == [6, 7]


async def test_another_epoch_after_a_break_ends_the_readers(table):
    poll = table.join(5)
    table.tail.lost()
    table.tail.subscribed()
    table.history.answer(page(6, epoch="f"))
    assert table.dismissed == [poll]


async def test_cleared_history_ends_the_readers_and_the_tail_begins_again(table):
    poll = table.join(5)
    table.tail.pushed(b"x f")
    assert table.dismissed == [poll]
    later = table.join(5, epoch="f")
    table.push(6)
    assert later.got == [6]
    assert poll.got == []


async def test_reader_who_comes_while_the_tail_catches_up_reads_again(table):
    table.join(5)
    table.push(8)
    late = table.join(7)
    table.history.answer(page(6, 7, 8))
    await settle()
    assert late.reads == 1
    assert late.got == []


async def test_reader_beyond_the_tail_makes_it_catch_up(table):
    early = table.join(5)
    late = table.join(7)
    assert table.history.asked == [5]
    table.history.answer(page(6, 7))
    await settle()
    assert (early.got, late.reads) == ([6, 7], 1)


async def test_error_of_redis_is_no_loss(table, monkeypatch):
    monkeypatch.setattr("redpoll.worker.streams.tail._RETRY_S", 0)
    poll = table.join(5)
    table.push(8)
    table.history.answer(ValueError("an error"))
    await settle()
    assert table.history.asked == [5, 5]
    table.history.answer(page(6, 7, 8))
    assert poll.got == [6, 7, 8]


async def test_end_comes_after_the_last_event(table):
    poll = table.join(5)
    table.push(6)
    other = table.join(6)
    table.tail.pushed(b"z 6")
    assert poll.got == [6]
    assert [batch.ended for batch in other.batches] == [True]
    assert table.tail.ended
    assert table.tail.after("e", 6) == []


async def test_end_that_was_missed_shows_in_the_page(table):
    poll = table.join(5)
    table.tail.lost()
    table.tail.subscribed()
    table.history.answer(page(ended=True, top=5))
    assert [(batch.ended, batch.messages) for batch in poll.batches] == [(True, [])]


async def test_last_messages_are_remembered(table):
    table.join(5)
    for offset in range(6, 106):
        table.push(offset)
    tail = table.tail
    assert tail.after("e", 105) == []
    assert [message.offset for message in tail.after("e", 102) or ()] == [103, 104, 105]
    assert tail.after("e", 41) is not None
    # Older ones, positions between two messages and other epochs are read from the history.
    assert tail.after("e", 40) is None
    assert tail.after("e", 0) is None
    assert tail.after("f", 104) is None
    tail.lost()
    assert tail.after("e", 105) is None


async def test_memory_of_large_messages_is_bounded(table):
    table.join(5)
    for offset in range(6, 16):
        table.push(offset, data="x" * 20_000)
    assert table.tail.after("e", 12) is not None
    assert table.tail.after("e", 11) is None


async def test_reader_who_leaves_gets_nothing(table):
    poll = table.join(5)
    table.tail.leave(poll)
    table.tail.leave(poll)
    table.push(6)
    assert poll.batches == []
    assert table.sent == []
