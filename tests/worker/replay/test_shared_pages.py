"""Which page is read next, and for which replays. The test answers for the history."""

import pytest

from redpoll._fanout import Flusher, Sink
from redpoll.cluster.envelopes import event_tail
from redpoll.cluster.history import HistoryPosition, Page, Row
from redpoll.cluster.membership.hold_call import CHANNEL
from redpoll.cluster.membership.local_channel import LocalChannel
from redpoll.cluster.redis.link import LinkDown
from redpoll.worker.hub.channel import Channel
from redpoll.worker.replay.replay import Replay, State
from redpoll.worker.replay.shared_pages import SharedPages


class Client(Sink):
    def __init__(self, name: str, flusher: Flusher) -> None:
        super().__init__(flusher)
        self.name = name


class History:
    """Pages of messages 1, 2, 3 …, one at a time, when the test says so."""

    def __init__(self) -> None:
        self.asked: list[int] = []
        self.waiting: list = []

    def page(self, app_id, channel, since, count, done) -> None:
        self.asked.append(since)
        self.waiting.append(done)

    def answer(self, *offsets: int, more: bool = False, epoch: str = "e") -> None:
        rows = [Row(offset, offset - 1, event_tail("n", "")) for offset in offsets]
        self.waiting.pop()(Page(epoch, 100, rows, more))


class Table:
    """One channel and what its replays were served."""

    def __init__(self) -> None:
        self.history = History()
        self.served: list[tuple[str, int]] = []
        self.lost = 0
        self.retried: list[Replay] = []
        self.local_channel = LocalChannel("1", "c", CHANNEL, b"t")
        self.local_channel.history = HistoryPosition("e", 100, True)
        self.local_channel.audience = Channel(Flusher(lambda: None), b"c")
        self.readers = self.local_channel.audience.make_readers()
        self.pages = SharedPages(self.history, self, self.on_page, self.on_lost)
        self.fails = False

    def wait_retry(self, replay: Replay) -> None:
        replay.state = State.WAITING_TO_RETRY
        self.retried.append(replay)

    def add(self, name: str, at: int) -> Replay:
        client = Client(name, self.readers.replaying.flusher)
        replay = Replay(self.local_channel, client, 0.0)
        replay.at, replay.state = at, State.WAITING_FOR_PAGE
        self.readers.replays[client] = replay
        self.pages.read_next(self.local_channel)
        return replay

    def on_page(self, replay, readers, page) -> None:
        if self.fails:
            raise ValueError("no frame")
        self.served.append((replay.connection.name, len(page.offsets) - page.start(replay.at)))
        replay.at = max(replay.at, page.offsets[-1])
        if replay.at >= 100:
            readers.finish(replay)

    def on_lost(self, readers) -> None:
        self.lost += 1
        for replay in list(readers.replays.values()):
            readers.finish(replay)


def test_waiting_replays_share_pages_from_the_lowest_offset():
    table = Table()
    table.add("a", 50)
    table.add("b", 20)
    table.add("c", 40)
    assert table.history.asked == [50]
    table.history.answer(51, 52, more=True)
    # The reading that began at 50 continues; the others wait for it.
    assert table.served == [("a", 2)]
    assert table.history.asked == [50, 52]
    table.history.answer(100)
    assert table.history.asked == [50, 52, 20]
    table.history.answer(*range(21, 45), more=True)
    assert table.served[2:] == [("b", 24), ("c", 4)]
    assert table.history.asked[-1] == 44


def test_a_later_replay_joins_when_the_reading_reaches_it():
    table = Table()
    table.add("a", 10)
    table.add("b", 30)
    table.history.answer(11, 12, more=True)
    assert table.served == [("a", 2)]
    assert [replay.connection.name for replay in table.readers.sharing] == ["a", "b"]


def test_a_replay_that_left_is_not_served():
    table = Table()
    leaving = table.add("a", 10)
    table.add("b", 30)
    table.readers.discard(leaving.connection)
    table.history.answer(11, 12, more=True)
    assert table.served == []
    assert table.history.asked == [10, 30]


def test_a_failed_page_is_asked_for_again_later():
    table = Table()
    replay = table.add("a", 10)
    table.history.waiting.pop()(LinkDown(sent=True))
    assert table.retried == [replay]
    assert not table.history.waiting


@pytest.mark.parametrize("epoch", ["another", ""])
def test_a_page_of_another_epoch_ends_the_replays(epoch):
    table = Table()
    table.add("a", 10)
    table.history.answer(11, epoch=epoch)
    assert table.lost == 1
    assert table.local_channel.audience.readers is None


def test_a_page_that_cannot_be_encoded_is_not_asked_for_again():
    table = Table()
    table.add("a", 10)
    table.fails = True
    with pytest.raises(ValueError, match="no frame"):
        table.history.answer(11)
    assert table.lost == 1
    assert not table.history.waiting
