import pytest

from redpoll.protocol.apps import App, HistoryRule
from redpoll.protocol.history import InvalidOffset, Position, UnknownEpoch
from redpoll.testing.histories import Histories


class Time:
    def __init__(self) -> None:
        self.now = 1_000.0

    def __call__(self) -> float:
        return self.now


def app(keep=3, seconds=60, **more) -> App:
    rule = HistoryRule(id="000001", name="a", prefix=True, keep=keep, seconds=seconds, era=more.pop("era", "1"))
    return App(id="1", name="", keys=(), history=(rule,), **more)


@pytest.fixture
def time():
    return Time()


@pytest.fixture
def histories(time):
    return Histories(time)


def store(histories, count, record=None, channel="a"):
    return [histories.store(record or app(), channel, "e", str(number)) for number in range(count)]


def data(rows):
    return [row.data for row in rows]


def test_offsets_rise_and_the_oldest_messages_go(histories):
    rows = store(histories, 5)
    assert [row.before for row in rows[1:]] == [row.offset for row in rows[:-1]]
    assert data(histories.last(app(), "a", 10, 0)) == ["2", "3", "4"]
    assert data(histories.last(app(), "a", 2, 0)) == ["3", "4"]


def test_a_position_continues_only_without_a_gap(histories, time):
    epoch = histories.begin(app(), "a").epoch
    begun = histories.find(app(), "a").top
    rows = store(histories, 2)
    assert data(histories.missed(app(), "a", epoch, begun)) == ["0", "1"]
    assert data(histories.missed(app(), "a", epoch, rows[1].offset)) == []
    assert histories.missed(app(), "a", "other", begun) is None
    assert histories.missed(app(), "a", epoch, rows[1].offset + 1) is None
    store(histories, 3)
    assert histories.missed(app(), "a", epoch, rows[0].offset) is None
    time.now += 61
    assert histories.missed(app(), "a", epoch, rows[1].offset) is None


def test_pages_begin_at_either_end(histories):
    rows = store(histories, 3)
    read = histories.read
    assert (data(read(app(), "a", limit=2).rows), read(app(), "a", limit=2).more) == (["1", "2"], True)
    assert data(read(app(), "a", limit=2, since=0).rows) == ["0", "1"]
    assert data(read(app(), "a", limit=2, before=rows[2].offset).rows) == ["0", "1"]
    assert data(read(app(), "a", limit=2, until=rows[0].offset).rows) == ["0"]
    assert read(app(), "b", limit=2).epoch == ""


def test_wrong_positions_are_refused(histories):
    top = store(histories, 1)[0].offset
    with pytest.raises(UnknownEpoch):
        histories.check(app(), "a", Position("x", 0))
    epoch = histories.find(app(), "a").epoch
    histories.check(app(), "a", Position(epoch, top))
    with pytest.raises(InvalidOffset):
        histories.check(app(), "a", Position(epoch, top + 1))


def test_clearing_and_a_new_era_begin_a_new_epoch(histories):
    top = store(histories, 1)[0].offset
    first = histories.find(app(), "a").epoch
    second = histories.clear(app(), "a").epoch
    assert histories.last(app(), "a", 9, 0) == []
    assert store(histories, 1)[0].before == top
    assert histories.find(app(era="2"), "a") is None
    third = histories.begin(app(era="2"), "a")
    assert len({first, second, third.epoch}) == 3
    assert third.top > top


def test_channels_with_history_are_limited(histories):
    small = app(max_history_channels=2)
    assert histories.begin(small, "a1") is not None
    assert histories.begin(small, "a2") is None
    assert histories.store(small, "a2", "e", "") is not None
    assert histories.store(small, "a3", "e", "") is None


def test_client_events_are_stored_only_by_a_rule_that_says_so(histories):
    assert histories.store(app(), "a", "client-x", "", by_client=True) is None
    # A server may publish an event with such a name.
    assert histories.store(app(), "a", "client-x", "") is not None
    assert histories.store(app(), "other", "e", "") is None


def test_channel_ends_until_its_history_is_cleared(histories):
    store(histories, 1)
    assert not histories.has_ended("a")
    histories.end("a")
    assert histories.has_ended("a")
    histories.clear(app(), "a")
    assert not histories.has_ended("a")
