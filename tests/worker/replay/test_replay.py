"""The bookkeeping of replays: which messages of a page a socket gets, and where unkept events come among them."""

from redpoll._fanout import Flusher
from redpoll.cluster.envelopes import event_envelope, event_tail
from redpoll.cluster.history import Page, Row
from redpoll.cluster.membership.local_channel import CHANNEL, HistoryPosition, LocalChannel
from redpoll.worker.replay.replay import NOWHERE, Past, Replay, Sheet


class Sink:
    """What a replay asks of a connection."""

    def __init__(self, sid: tuple[int, int] = (1, 2)) -> None:
        self.sid_hi, self.sid_lo = sid
        self.sent: list[bytes] = []

    def send(self, frame: bytes) -> bool:
        self.sent.append(frame)
        return True


def page_of(*offsets: int, more: bool = False, skip: str | None = None, event: str = "n") -> Page:
    rows = [
        Row(offset, prev, event_tail(event, str(offset), skip=skip))
        for offset, prev in zip(offsets, (9, *offsets), strict=False)
    ]
    return Page("e", offsets[-1] if offsets else 9, rows, more)


def replay_of(past: Past, sid: tuple[int, int] = (1, 2)) -> Replay:
    local_channel = LocalChannel("1", "c", CHANNEL, b"t")
    local_channel.history = HistoryPosition("e", 30, True)
    replay = Replay(local_channel, Sink(sid), 0.0)
    past.replays[replay.connection] = replay
    return replay


class TestSheet:
    def test_a_page_says_whether_something_is_missing_before_it(self):
        sheet = Sheet(page_of(10, 20, 30), b"c")
        assert [sheet.unbroken(at) for at in (8, 9, 15, 20, 30, 31)] == [False, True, False, True, True, False]

    def test_what_lies_behind_a_page_it_does_not_know(self):
        sheet = Sheet(page_of(10, 20, more=True), b"c")
        assert sheet.unbroken(10) is True
        assert sheet.unbroken(20) is None

    def test_frames_are_joined_and_made_once_for_all(self):
        sheet = Sheet(page_of(10, 20, 30), b"c")
        (plain,) = sheet.frames(Sink(), 1, 3, False)
        assert sheet.frames(Sink((3, 4)), 1, 3, False)[0] is plain
        assert plain.count(b'"channel":"c"') == 2
        (with_offsets,) = sheet.frames(Sink(), 1, 3, True)
        assert b'"offset":20' in with_offsets
        assert b'"offset":30' in with_offsets

    def test_the_socket_that_was_excluded_gets_the_others(self):
        page = page_of(10, 20)
        excluding = page._replace(rows=[page.rows[0], Row(20, 10, event_tail("n", "20", skip="1.2"))])
        sheet = Sheet(excluding, b"c")
        assert len(sheet.frames(Sink((1, 2)), 0, 2, False)) == 1
        assert b"".join(sheet.frames(Sink((3, 4)), 0, 2, False)).count(b'"event":"n"') == 2

    def test_client_events_are_told_from_the_servers(self):
        assert not Sheet(page_of(10, 20, event="client-n"), b"c").has_server_event(0, 2)
        assert Sheet(page_of(10, 20), b"c").has_server_event(1, 2)


class TestLateEvents:
    def test_they_come_behind_what_was_there_before_them(self):
        past = Past(Flusher(lambda: None))
        replay = replay_of(past)
        past.put_behind(event_envelope("late", "1"), b"c", 10)
        past.put_behind(event_envelope("late", "2"), b"c", 20)
        assert past.take_late(replay, 10) == []
        (first,) = past.take_late(replay, 20)
        assert b'"data":"1"' in first
        (second,) = past.take_late(replay, NOWHERE)
        assert b'"data":"2"' in second
        assert past.take_late(replay, NOWHERE) == []

    def test_nobody_hears_their_own(self):
        past = Past(Flusher(lambda: None))
        replay, other = replay_of(past, (1, 2)), replay_of(past, (3, 4))
        past.put_behind(event_envelope("late", "1", skip="1.2"), b"c", 10)
        assert past.take_late(replay, NOWHERE) == []
        assert len(past.take_late(other, NOWHERE)) == 1

    def test_too_many_go_out_at_once(self):
        past = Past(Flusher(lambda: None))
        told, waiting = replay_of(past), replay_of(past, (3, 4))
        told.told = True
        for n in range(30):
            past.put_behind(event_envelope("late", f"{n} " + "x" * 10_000), b"c", 10)
        assert b"".join(told.connection.sent).count(b'"event":"late"') >= 26
        assert waiting.connection.sent == []
        assert past.late_bytes < 60_000
