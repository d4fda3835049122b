import asyncio
from types import SimpleNamespace

import pytest

from redpoll.cluster.redis.calls import LinkDown, Refused, ShardCall, Topics, settle


def test_errors_say_whether_redis_may_have_carried_it_out():
    assert str(LinkDown(sent=False)) == "Redis is not connected"
    assert str(LinkDown(sent=True)) == "the connection to Redis broke before the answer"
    refused = Refused("Redis doesn't answer")
    assert (refused.sent, str(refused)) == (False, "Redis doesn't answer")


async def test_future_gets_the_reply_or_the_error_unless_nobody_waits_any_more():
    answered, failed, left = (asyncio.get_running_loop().create_future() for _ in range(3))
    left.cancel()
    settle(answered, 7)
    settle(failed, LinkDown(sent=True))
    settle(left, 7)
    assert answered.result() == 7
    assert isinstance(failed.exception(), LinkDown)
    assert left.cancelled()


@pytest.mark.parametrize("over", [False, True])
def test_call_of_a_shard_is_over_when_its_own_is(over):
    replies = []
    call = ShardCall(3, replies.append)
    call(1)
    assert (replies, call.shard, call.over) == ([1], 3, False)
    assert ShardCall(3, SimpleNamespace(over=over)).over == over


def test_topics_are_confirmed_by_pushes_of_their_kind():
    topics = Topics(b"subscribe", [b"t", b"u"], [].append)
    assert topics.left == 2
    assert topics.is_confirmed_by(b"subscribe", b"t")
    assert not topics.is_confirmed_by(b"unsubscribe", b"t")
    assert not topics.is_confirmed_by(b"subscribe", b"v")
