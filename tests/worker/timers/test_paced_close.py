"""Connections that are closed at a pace, by a clock of the test."""

import asyncio
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


def test_connection_that_closed_meanwhile_is_skipped_and_batches_follow_each_other(paced):
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
