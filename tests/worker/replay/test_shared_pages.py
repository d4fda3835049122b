"""Which page is read next, and for whom: replays of one channel, a history that the test answers for."""

import pytest

from redpoll._fanout import Flusher, Sink
from redpoll.cluster.envelopes import event_tail
from redpoll.cluster.history import Page, Row
from redpoll.cluster.link import LinkDown
from redpoll.cluster.membership.local_channel import CHANNEL, HistoryPosition, LocalChannel
from redpoll.worker.hub import Channel
from redpoll.worker.replay.replay import PARKED, READY, Past, Replay
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
    """One channel, and who is told what of it."""

    def __init__(self) -> None:
        self.history = History()
        self.served: list[tuple[str, int]] = []
        self.lost = 0
        self.parked: list[Replay] = []
        self.local_channel = LocalChannel("1", "c", CHANNEL, b"t")
        self.local_channel.history = HistoryPosition("e", 100, True)
        self.local_channel.audience = Channel(Flusher(lambda: None), b"c")
        self.past = self.local_channel.audience.past = Past(self.local_channel.audience.flusher)
        self.readings = SharedPages(self, self.on_page, self.on_lost)
        self.readings.history = self.history
        self.fails = False

    def put(self, replay: Replay, wait_s: float) -> None:
        replay.state = PARKED
        self.parked.append(replay)

    def add(self, name: str, at: int) -> Replay:
        client = Client(name, self.past.replaying.flusher)
        replay = Replay(self.local_channel, client, 0.0)
        replay.at, replay.state = at, READY
        self.past.replays[client] = replay
        self.readings.go_on(self.local_channel)
        return replay

    def on_page(self, replay, past, sheet) -> None:
        if self.fails:
            raise ValueError("no frame")
        self.served.append((replay.connection.name, len(sheet.offsets) - sheet.start(replay.at)))
        replay.at = max(replay.at, sheet.offsets[-1])
        if replay.at >= 100:
            past.finish(replay)

    def on_lost(self, past) -> None:
        self.lost += 1
        for replay in list(past.replays.values()):
            past.finish(replay)


def test_those_who_wait_share_one_reading_from_the_lowest_place():
    table = Table()
    table.add("a", 50)
    table.add("b", 20)
    table.add("c", 40)
    assert table.history.asked == [50]
    table.history.answer(51, 52, more=True)
    # The round that began at 50 goes on; the others have to wait for it.
    assert table.served == [("a", 2)]
    assert table.history.asked == [50, 52]
    table.history.answer(100)
    assert table.history.asked == [50, 52, 20]
    table.history.answer(*range(21, 45), more=True)
    assert table.served[2:] == [("b", 24), ("c", 4)]
    assert table.history.asked[-1] == 44


def test_who_comes_later_joins_where_the_reading_has_got_to():
    table = Table()
    table.add("a", 10)
    table.add("b", 30)
    table.history.answer(11, 12, more=True)
    assert table.served == [("a", 2)]
    assert [each.connection.name for each in table.past.round] == ["a", "b"]


def test_who_left_is_not_waited_for():
    table = Table()
    leaving = table.add("a", 10)
    table.add("b", 30)
    table.past.discard(leaving.connection)
    table.history.answer(11, 12, more=True)
    assert table.served == []
    assert table.history.asked == [10, 30]


def test_a_page_that_did_not_come_is_asked_for_again_later():
    table = Table()
    replay = table.add("a", 10)
    table.history.waiting.pop()(LinkDown(sent=True))
    assert table.parked == [replay]
    assert not table.history.waiting


@pytest.mark.parametrize("epoch", ["another", ""])
def test_another_history_is_nobody_s(epoch):
    table = Table()
    table.add("a", 10)
    table.history.answer(11, epoch=epoch)
    assert table.lost == 1
    assert table.local_channel.audience.past is None


def test_a_page_without_frames_is_not_asked_for_for_ever():
    table = Table()
    table.add("a", 10)
    table.fails = True
    with pytest.raises(ValueError, match="no frame"):
        table.history.answer(11)
    assert table.lost == 1
    assert not table.history.waiting
