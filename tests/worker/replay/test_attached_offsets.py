"""Offsets are remembered for their app's time, and no longer than the connection is in the channel."""

import pytest

from redpoll.worker.replay.attached_offsets import AttachedOffsets


class Connection:
    """Anything that can be a key."""


@pytest.fixture
def attached() -> AttachedOffsets:
    return AttachedOffsets()


@pytest.fixture
def one() -> Connection:
    return Connection()


def test_an_offset_is_forgotten_when_its_time_is_over(attached, one):
    attached.note(one, "a", 10, 5, now=100.0)
    attached.note(one, "b", 20, 5, now=101.0)
    attached.expire(104.9, 10)
    assert attached.of(one) == {"a": 10, "b": 20}
    attached.expire(105.0, 10)
    assert attached.of(one) == {"b": 20}
    attached.expire(106.0, 10)
    assert not attached
    assert len(attached) == 0


def test_a_long_time_of_one_app_does_not_hold_those_of_others(attached, one):
    attached.note(Connection(), "a", 10, 600, now=100.0)
    attached.note(one, "b", 20, 5, now=100.0)
    attached.expire(105.0, 10)
    assert len(attached) == 1
    assert attached.of(one) == {}


def test_at_most_so_many_are_forgotten_at_once(attached, one):
    for n in range(10):
        attached.note(one, str(n), n, 5, now=0.0)
    attached.expire(100.0, 4)
    assert list(attached.of(one).values()) == [4, 5, 6, 7, 8, 9]


def test_repeated_subscribes_take_one_place(attached, one):
    for n in range(100):
        attached.note(one, "a", n, 5, now=float(n))
    assert attached.of(one) == {"a": 99}
    assert len(attached) == 1
    # Each begins the time again.
    attached.expire(103.0, 10)
    assert len(attached) == 1
    attached.expire(104.0, 10)
    assert not attached


def test_another_time_of_the_app_counts_from_the_next_subscribe(attached, one):
    attached.note(one, "a", 1, 600, now=0.0)
    attached.note(one, "a", 2, 5, now=0.0)
    attached.expire(5.0, 10)
    assert len(attached) == 0


def test_nothing_is_left_of_a_channel_or_a_connection_that_is_left(attached, one):
    other = Connection()
    for connection in (one, other):
        for channel in ("a", "b"):
            attached.note(connection, channel, 10, 5, now=0.0)
    attached.leave(one, "a")
    attached.leave(one, "a")
    attached.leave(one, "never")
    assert attached.of(one) == {"b": 10}
    attached.close(other)
    attached.close(other)
    assert len(attached) == 1
    attached.close(one)
    assert not attached
    assert len(attached) == 0
