"""The timer wheel against a dict."""

import gc
import sys
import weakref

import pytest
from hypothesis import given
from hypothesis import strategies as st

from redpoll._wheel import Timed, Wheel


class Thing(Timed):
    __slots__ = ("__weakref__", "name")


def test_returns_each_entry_at_its_tick():
    wheel, first, second = Wheel(8), Timed(), Timed()
    wheel.put(first, 3)
    wheel.put(second, 4)
    assert wheel.advance(2) == []
    assert wheel.advance(3) == [first]
    assert wheel.advance(4) == [second]
    assert len(wheel) == 0


def test_keeps_deadlines_beyond_one_turn():
    wheel, far = Wheel(4), Timed()
    wheel.put(far, 11)
    assert wheel.advance(10) == []
    assert wheel.advance(11) == [far]


def test_a_deadline_that_has_passed_is_due_at_the_next_tick():
    wheel, late = Wheel(4), Timed()
    wheel.advance(100)
    wheel.put(late, 7)
    assert late.due_tick == 101
    assert wheel.advance(101) == [late]


def test_a_second_put_moves_the_deadline():
    wheel, thing = Wheel(4), Timed()
    wheel.put(thing, 2)
    wheel.put(thing, 5)
    assert len(wheel) == 1
    assert wheel.advance(4) == []
    assert wheel.advance(5) == [thing]


def test_a_late_call_misses_nothing():
    wheel = Wheel(4)
    things = [Timed() for _ in range(20)]
    for i, thing in enumerate(things):
        wheel.put(thing, i + 1)
    assert set(wheel.advance(1_000_000)) == set(things)


def test_owns_only_what_is_in_it():
    wheel, thing = Wheel(4), Thing()
    gone = weakref.ref(thing)
    wheel.put(thing, 3)
    del thing
    gc.collect()
    assert gone() is not None
    wheel.drop(gone())
    gc.collect()
    assert gone() is None


def test_a_freed_wheel_releases_its_entries():
    wheel, thing = Wheel(4), Thing()
    before = sys.getrefcount(thing)
    wheel.put(thing, 3)
    del wheel
    gc.collect()
    assert sys.getrefcount(thing) == before
    assert thing.due_tick is None


def test_a_wheel_without_slots_is_refused():
    with pytest.raises(ValueError, match="at least one slot"):
        Wheel(0)


@given(
    slots=st.integers(1, 9),
    steps=st.lists(
        st.tuples(st.sampled_from(["put", "drop", "advance"]), st.integers(0, 7), st.integers(0, 40)),
        max_size=80,
    ),
)
def test_agrees_with_a_dict(slots, steps):
    wheel = Wheel(slots)
    things = [Timed() for _ in range(8)]
    due: dict[Timed, int] = {}
    now = 0
    for what, index, number in steps:
        thing = things[index]
        if what == "put":
            wheel.put(thing, number)
            due[thing] = max(number, now + 1)
        elif what == "drop":
            wheel.drop(thing)
            due.pop(thing, None)
        else:
            now = max(now, number)
            expected = {thing for thing, tick in due.items() if tick <= now}
            given_back = wheel.advance(number)
            assert len(given_back) == len(set(given_back))
            assert set(given_back) == expected
            due = {thing: tick for thing, tick in due.items() if thing not in expected}
        assert len(wheel) == len(due)
        assert {thing: thing.due_tick for thing in due} == due
