"""The history is read backwards until enough events are found; equal questions share a reading."""

import json
from types import SimpleNamespace

from redpoll.cluster.envelopes import event_tail
from redpoll.cluster.history import Page, Row
from redpoll.protocol.joining import Pace
from redpoll.worker.replay.gathering import Located
from redpoll.worker.replay.locating import Locating

PACE = Pace(5, join=("delta",), by=("id",))


class History:
    """Answers with pages of two rows when the test lets it."""

    def __init__(self, rows: list[Row]) -> None:
        self.rows = rows
        self.asked: list = []
        self.times = 0
        self.located: list[tuple[int, int]] = []

    def page_before(self, app_id, channel, before, done) -> None:
        self.times += 1
        self.asked.append((before, done))

    def locate(self, app_id, channel, done, *, count, seconds) -> None:
        self.located.append((count, seconds))

    def answer_all(self) -> None:
        while self.asked:
            before, done = self.asked.pop(0)
            earlier = [row for row in self.rows if before is None or row.offset < before]
            done(Page("epoch", self.rows[-1].offset, earlier[-2:], len(earlier) > 2))


def rows(*texts: str) -> list[Row]:
    return [
        Row(at, at - 1, event_tail("text", json.dumps({"id": of, "delta": "x"}) if of else "{}"))
        for at, of in enumerate(texts, 1)
    ]


class LocalChannel:
    app_id = "1"
    channel = "a"

    def __init__(self, audience) -> None:
        self.audience = audience


class Replay:
    """What Locating needs of one."""

    def __init__(self, pace: Pace | None, count: int, recovers: bool = False) -> None:
        readers = SimpleNamespace(pacing=SimpleNamespace(pace=pace) if pace is not None else None)
        self.local_channel = LocalChannel(SimpleNamespace(readers=readers))
        self.look_back = count, 0 if count else 60
        self.recovers = recovers
        self.located: Located | None = None
        self.since: object = None

    def locate(self, located: Located, pacing) -> None:
        self.located = located

    def done(self, since: object) -> None:
        self.since = since


def test_pages_are_read_until_the_events_are_complete():
    history = History(rows("", *"aaaaa", "", *"bbbbb"))
    locating, replay = Locating(history), Replay(PACE, 2)
    locating.locate(replay, replay.done)
    assert replay.since is None
    history.answer_all()
    assert replay.since == 6
    assert replay.located == Located(6, frozenset(), 0)
    assert history.times == 4


def test_equal_questions_share_a_reading():
    history = History(rows(*"aabb"))
    locating = Locating(history)
    replays = [Replay(PACE, 1) for _ in range(3)] + [Replay(PACE, 1, recovers=True)]
    for replay in replays:
        # The same channel.
        replay.local_channel = replays[0].local_channel
        locating.locate(replay, replay.done)
    assert history.times == 2
    history.answer_all()
    assert [replay.since for replay in replays] == [2, 2, 2, 2]
    locating.locate(replays[0], replays[0].done)
    assert len(history.asked) == 1


def test_an_error_reaches_all_who_asked():
    history = History(rows("a"))
    locating, replay = Locating(history), Replay(PACE, 1)
    locating.locate(replay, replay.done)
    fault = OSError("Redis is away")
    history.asked.pop()[1](fault)
    assert replay.since is fault


def test_channels_without_a_rate_and_periods_are_located_by_redis():
    history = History(rows("a"))
    for replay in (Replay(None, 3), Replay(PACE, 0)):
        Locating(history).locate(replay, replay.done)
    assert history.located == [(3, 0), (0, 60)]
