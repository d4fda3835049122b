"""One replay: which messages of a page a connection gets, and where unstored events come among them."""

import json
from types import SimpleNamespace

from redpoll._fanout import Flusher
from redpoll.cluster.envelopes import event_envelope, event_tail
from redpoll.cluster.history import HistoryPosition, Page, Row
from redpoll.cluster.membership.hold_call import CHANNEL
from redpoll.cluster.membership.local_channel import LocalChannel
from redpoll.protocol.joining import Pace
from redpoll.worker.replay.page_frames import PageFrames
from redpoll.worker.replay.replay import MAX_OFFSET, Answer, HistoryReaders, Kind, Replay, State
from worker.replay.replay_pages import Sink


def replay_of(readers: HistoryReaders, sid: tuple[int, int] = (1, 2)) -> Replay:
    local_channel = LocalChannel("1", "c", CHANNEL, b"t")
    local_channel.history = HistoryPosition("e", 30, True)
    replay = Replay(local_channel, Sink(sid), 0.0, answer=Answer(b"", None))
    readers.replays[replay.connection] = replay
    return replay


class TestUnstoredEvents:
    def test_they_come_after_earlier_stored_messages(self):
        readers = HistoryReaders(Flusher(lambda: None))
        replay = replay_of(readers)
        readers.queue_unstored(event_envelope("unstored", "1"), b"c", 10)
        readers.queue_unstored(event_envelope("unstored", "2"), b"c", 20)
        assert readers.take_unstored(replay, 10) == []
        (first,) = readers.take_unstored(replay, 20)
        assert b'"data":"1"' in first
        (second,) = readers.take_unstored(replay, MAX_OFFSET)
        assert b'"data":"2"' in second
        assert readers.take_unstored(replay, MAX_OFFSET) == []

    def test_a_client_does_not_get_its_own(self):
        readers = HistoryReaders(Flusher(lambda: None))
        replay, other = replay_of(readers, (1, 2)), replay_of(readers, (3, 4))
        readers.queue_unstored(event_envelope("unstored", "1", skip="1.2"), b"c", 10)
        assert readers.take_unstored(replay, MAX_OFFSET) == []
        assert len(readers.take_unstored(other, MAX_OFFSET)) == 1

    def test_too_many_are_sent_at_once(self):
        readers = HistoryReaders(Flusher(lambda: None))
        answered, waiting = replay_of(readers), replay_of(readers, (3, 4))
        answered.answer = None
        for n in range(30):
            readers.queue_unstored(event_envelope("unstored", f"{n} " + "x" * 10_000), b"c", 10)
        assert b"".join(answered.connection.sent).count(b'"event":"unstored"') >= 26
        assert waiting.connection.sent == []
        assert readers.unstored_bytes < 60_000


class TestState:
    def test_a_replay_can_be_printed(self):
        replay = replay_of(HistoryReaders(Flusher(lambda: None)))
        assert repr(replay) == "<Replay of c to 1.2: stock, locating its first offset, at ≤ 30>"
        replay.state, replay.kind, replay.at, replay.exact = State.WAITING_FOR_DRAIN, Kind.CONTINUING, 20, True
        assert repr(replay) == "<Replay of c to 1.2: continuing, waiting for the client to read, at 20>"

    def test_a_replay_is_over_when_it_is_live_or_left(self):
        readers = HistoryReaders(Flusher(lambda: None))
        finished, left = replay_of(readers), replay_of(readers, (3, 4))
        assert not finished.over
        readers.replaying = readers.recovering = set()
        readers.finish(finished)
        assert readers.discard(left.connection)
        assert (finished.state, left.state) == (State.LIVE, State.LEFT)
        assert finished.over
        assert left.over
        assert not readers.replays


def test_a_rule_that_changes_between_two_pages_spoils_no_text():
    readers = HistoryReaders(Flusher(lambda: None))
    replay = replay_of(readers)
    rows = [Row(at, at - 1, event_tail("text", f'{{"delta":"{at}"}}')) for at in range(1, 5)]
    readers.pacing = SimpleNamespace(pace=Pace(5, join=("delta",)), name=b"c")
    assert readers.frames_of(replay, PageFrames(Page("e", 4, rows[:2], True), b"c"), 0, 2) == []
    # From now on, the newest event of each name.
    readers.pacing = SimpleNamespace(pace=Pace(5), name=b"c")
    readers.frames_of(replay, PageFrames(Page("e", 4, rows[2:], False), b"c"), 0, 2)
    replay.send_gathered()
    first, last = (json.loads(json.loads(frame[frame.index(b"{") :])["data"]) for frame in replay.connection.sent)
    assert (first, last) == ({"delta": "12"}, {"delta": "4"})
