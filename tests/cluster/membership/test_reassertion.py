"""What is held is told again once for each shard, whatever is lost meanwhile."""

import pytest

from redpoll.cluster.membership.hold_call import CHANNEL
from redpoll.cluster.membership.local_channel import LocalChannel
from redpoll.cluster.membership.reassertion import Reassertion
from redpoll.cluster.redis.keys import SHARDS

ALL = range(SHARDS)


def channels(count: int) -> list[LocalChannel]:
    return [LocalChannel("7", f"c{n}", CHANNEL, b"{%d}c%d" % (n, n)) for n in range(count)]


@pytest.fixture
def reassertion() -> Reassertion:
    return Reassertion()


def parts(reassertion):
    """All channels of the walk that is first, and the shards that it ended with."""
    told, ended = [], ()
    while not ended:
        part, ended = reassertion.next_part()
        told += part
    return told, set(ended)


def test_nothing_is_due_at_first(reassertion):
    assert reassertion.done
    assert not reassertion.subscribing
    assert not any(reassertion.takes_turn() for _ in range(4))


def test_all_that_is_held_is_told_once_in_parts(reassertion):
    held = channels(1_000)
    reassertion.begin(ALL, held)
    first, ended = reassertion.next_part()
    assert (first, ended) == (held[: len(first)], ())
    told, ended = parts(reassertion)
    assert (first + told, ended) == (held, set(ALL))
    assert reassertion.done


def test_it_takes_turns_with_the_joins(reassertion):
    reassertion.begin(ALL, channels(1))
    assert [reassertion.takes_turn() for _ in range(4)] == [True, False, True, False]


def test_it_is_not_done_before_everything_is_asserted(reassertion):
    (local_channel,) = held = channels(1)
    reassertion.begin(ALL, held)
    parts(reassertion)
    reassertion.unasserted.add(local_channel)
    assert not reassertion.done
    reassertion.unasserted.discard(local_channel)
    assert reassertion.done


def test_a_shard_that_is_lost_meanwhile_is_left_out_and_told_when_it_is_back(reassertion):
    held = channels(2_000)
    lost = {held[-1].shard}
    reassertion.begin(ALL, held)
    before, _ = reassertion.next_part()
    reassertion.lose(lost)
    told, ended = parts(reassertion)
    assert told == [one for one in held[len(before) :] if one.shard not in lost]
    assert ended == set(ALL) - lost
    reassertion.begin(lost, held)
    assert parts(reassertion) == ([one for one in held if one.shard in lost], lost)


@pytest.mark.parametrize("end", [Reassertion.stop, lambda reassertion: reassertion.lose(ALL)])
def test_with_all_shards_lost_there_is_nothing_to_tell(reassertion, end):
    reassertion.begin(ALL, channels(3))
    end(reassertion)
    assert reassertion.done
    assert not reassertion.subscribing
