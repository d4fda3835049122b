import pytest
from hypothesis import given
from hypothesis import strategies as st

from redpoll.protocol.limits import BoundedTable, TokenBucket, Window


@pytest.mark.parametrize("now", [0.0, -5.0, 12.5, 1e9 / 3])
def test_a_burst_passes_whole_and_the_next_waits(now: float):
    bucket = TokenBucket(10, 10)
    assert [bucket.take(now) for _ in range(11)] == [True] * 10 + [False]


def test_one_token_returns_per_interval():
    bucket = TokenBucket(10, 10)
    for _ in range(10):
        bucket.take(0.0)
    assert not bucket.take(0.09)
    assert bucket.take(0.1)
    assert not bucket.take(0.1)
    assert [bucket.take(5.0) for _ in range(11)].count(True) == 10


def test_refusals_take_no_token():
    bucket = TokenBucket(1, 1)
    bucket.take(0.0)
    for _ in range(1000):
        bucket.take(0.5)
    assert bucket.take(1.0)


@given(st.lists(st.floats(0, 1, allow_subnormal=False), max_size=200), st.integers(1, 20), st.integers(1, 20))
def test_never_more_than_burst_and_rate_allow(pauses: list[float], rate: int, burst: int):
    bucket = TokenBucket(rate, burst)
    now, taken = 0.0, []
    for pause in pauses:
        now += pause
        if bucket.take(now):
            taken.append(now)
    for first, began in enumerate(taken):
        for last in range(first, len(taken)):
            assert last - first + 1 <= burst + rate * (taken[last] - began) + 1e-3


def test_a_window_fills_and_starts_again():
    window = Window(3, 10.0)
    assert [window.add(1, now) for now in (0.0, 1.0, 9.9)] == [False, False, True]
    assert window.add(1, 9.95)
    assert not window.add(1, 10.0)
    assert window.add(2, 11.0)


def test_limits_take_few_bytes():
    """A million connections may have sent a client event."""
    assert TokenBucket(10, 10).__sizeof__() <= 48
    assert Window(100, 10).__sizeof__() <= 56


def test_bounded_table_removes_what_is_over_and_beyond_its_size_the_oldest():
    table: BoundedTable[str, int] = BoundedTable(3)
    for key, until in (("a", 1), ("b", 9), ("c", 2), ("d", 9)):
        table.put(key, until, lambda until: until <= 0)
    assert list(table) == ["b", "c", "d"]
    table.put("b", 9, lambda until: until <= 5)
    assert list(table) == ["d", "b"]
