"""A tally by itself; test_counts.py tests it with workers."""

from redpoll.cluster.membership.tally import Tally


class Timers:
    def __init__(self) -> None:
        self.delays: list[float] = []
        self.cancelled = 0

    def __call__(self, delay_s: float) -> "Timers":
        self.delays.append(delay_s)
        return self

    def cancel(self) -> None:
        self.cancelled += 1


def test_same_count_is_sent_once():
    tally = Tally()
    assert tally.answered(3, 0, Timers())
    assert not tally.answered(3, 0, Timers())
    assert tally.announced_elsewhere(4)
    assert not tally.announced_elsewhere(4)


def test_count_that_may_not_be_announced_yet_starts_one_timer():
    tally, timers = Tally(), Timers()
    assert not tally.answered(3, 200, timers)
    assert not tally.answered(4, 150, timers)
    assert (timers.delays, tally.settled) == ([0.2], False)
    tally.make_due()
    assert (tally.due, timers.cancelled) == (True, 1)


def test_push_from_another_worker_includes_our_change():
    tally, timers = Tally(), Timers()
    tally.answered(3, 200, timers)
    assert tally.announced_elsewhere(3)
    assert (tally.settled, timers.cancelled) == (True, 1)


def test_joiner_who_got_a_temporary_count_gets_the_final_one():
    tally = Tally()
    tally.joined(5, alone=True)
    assert tally.sent == 5
    tally.answered(6, 200, Timers())
    tally.joined(6, alone=False)
    tally.make_due()
    assert tally.answered(5, 0, Timers())
