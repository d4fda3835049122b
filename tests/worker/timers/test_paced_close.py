"""Connections that are closed at a pace, by a clock of the test."""

import asyncio
from collections import Counter
from itertools import pairwise
from types import SimpleNamespace

import pytest

from redpoll import _engine
from redpoll.worker.timers.paced_close import PacedClose


class Connection:
    def __init__(self, closed):
        self.state = _engine.OPEN
        self._closed = closed

    def shut(self, code, message):
        self.state = _engine.CLOSING
        self._closed.append((self, code))


@pytest.fixture
def paced(monkeypatch):
    """A PacedClose whose clock and timers the test advances."""
    timers = []
    loop = SimpleNamespace(call_later=lambda delay_s, work: timers.append(work))
    monkeypatch.setattr(asyncio, "get_running_loop", lambda: loop)
    now = [100.0]
    paced = PacedClose()
    paced.clock = lambda: now[0]

    def advance(seconds):
        now[0] += seconds
        for work in timers[:]:
            timers.remove(work)
            work()

    paced.advance, paced.timers = advance, timers
    return paced


def test_many_are_spread_over_the_time(paced):
    closed = []
    connections = [Connection(closed) for _ in range(20_000)]
    paced.close(connections, len(connections), 4200, "bye", within_s=10.0)
    counts = [len(closed)]
    for _ in range(100):
        paced.advance(0.1)
        counts.append(len(closed))
    assert max(after - before for before, after in pairwise(counts)) == 200
    assert counts[50] == pytest.approx(10_000, abs=220)
    assert counts[-1] == 20_000
    assert not paced.timers


def test_few_are_closed_in_a_moment(paced):
    closed = []
    paced.close([Connection(closed) for _ in range(20)], 20, 4200, "bye", within_s=10.0)
    paced.advance(0.01)
    assert len(closed) == 20


def test_connection_that_closed_meanwhile_is_skipped(paced):
    closed = []
    first, second, third = (Connection(closed) for _ in range(3))
    paced.close([first, second], 2, 4001, "deleted", within_s=10.0)
    paced.close([second, third], 2, 4200, "bye", within_s=10.0)
    for _ in range(5):
        paced.advance(0.01)
    assert closed == [(first, 4001), (second, 4001), (third, 4200)]
    paced.close([], 0, 4200, "bye", within_s=10.0)
    paced.advance(0.01)
    assert not paced.timers


def test_batches_are_closed_beside_each_other_each_within_its_time(paced):
    closed = []
    for code in (4001, 4003, 4200):
        paced.close([Connection(closed) for _ in range(20_000)], 20_000, code, "bye", within_s=10.0)
    for _ in range(500):
        paced.advance(0.01)
    counts = Counter(code for _, code in closed)
    assert set(counts) == {4001, 4003, 4200}
    assert all(count == pytest.approx(10_000, abs=30) for count in counts.values())
    for _ in range(500):
        paced.advance(0.01)
    assert len(closed) == 60_000
    assert not paced.timers


def test_batches_share_a_slice(paced):
    """None of them waits until another one that is late has caught up."""
    closed = []
    now = [0.0]

    def clock():
        # Each look takes 0.1 ms.
        now[0] += 0.0001
        return now[0]

    paced.clock = clock
    for code in (4001, 4003):
        paced.close([Connection(closed) for _ in range(5_000)], 5_000, code, "bye", within_s=1.0)
    now[0] += 5.0
    before = len(closed)
    paced.advance(0)
    counts = Counter(code for _, code in closed[before:])
    assert counts[4001] == pytest.approx(counts[4003], abs=10)
    assert counts[4003] > 0


def test_cancelled_batch_leaves_its_connections_open_and_the_others_go_on(paced):
    closed, ended = [], []
    first = paced.close([Connection(closed) for _ in range(100)], 100, 4003, "", 10.0, ended=lambda: ended.append(4003))
    paced.close([Connection(closed) for _ in range(100)], 100, 4001, "", 10.0, ended=lambda: ended.append(4001))
    assert Counter(code for _, code in closed) == {4003: 10}
    first.cancel()
    paced.advance(1.0)
    assert Counter(code for _, code in closed) == {4003: 10, 4001: 100}
    assert ended == [4001]
    assert not paced.timers


def test_connection_that_is_not_wanted_in_its_turn_is_left_open(paced):
    closed, spared = [], set()
    connections = [Connection(closed) for _ in range(30)]
    paced.close(connections, 30, 4003, "bye", within_s=10.0, wanted=lambda connection: connection not in spared)
    spared.update(connections[15:])
    paced.advance(1.0)
    assert [connection for connection, _ in closed] == connections[:15]
    assert not paced.timers


def test_exception_does_not_stop_the_others(paced):
    closed = []
    connections = [Connection(closed) for _ in range(30)]

    def fail(code, message):
        raise RuntimeError("on purpose")

    connections[12].shut = fail
    paced.close(connections, 30, 4003, "bye", within_s=10.0)
    with pytest.raises(RuntimeError):
        paced.advance(1.0)
    paced.advance(0.01)
    assert len(closed) == 29
    assert not paced.timers


def test_late_pass_closes_for_a_slice_at_most(paced):
    closed = []
    now = [0.0]

    def clock():
        # Each look takes 1 ms.
        now[0] += 0.001
        return now[0]

    paced.clock = clock
    paced.close([Connection(closed) for _ in range(5_000)], 5_000, 4200, "bye", within_s=1.0)
    now[0] += 5.0
    before = len(closed)
    paced.advance(0)
    assert 0 < len(closed) - before <= 50
