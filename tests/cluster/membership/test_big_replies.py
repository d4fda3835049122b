from redpoll.cluster.membership.big_replies import BigReplies
from redpoll.cluster.membership.hold_call import PRESENCE
from redpoll.cluster.membership.local_channel import LocalChannel, Ticket


def local_channel(name: str) -> LocalChannel:
    return LocalChannel("7", name, PRESENCE, name.encode())


def test_channels_wait_for_their_turn_those_with_subscribes_first():
    big_replies = BigReplies(1)
    big_replies.awaited = 1
    held, joined = local_channel("held"), local_channel("joined")
    joined.wait(Ticket(None, "u"))
    for one in (held, joined):
        big_replies.wait(one)
    assert big_replies.full
    assert big_replies.next() is None
    big_replies.awaited = 0
    assert [big_replies.next() for _ in range(3)] == [joined, held, None]


def test_channel_whose_shard_is_lost_has_no_turn():
    big_replies = BigReplies(1)
    lost, other = local_channel("lost"), local_channel("other")
    for one in (lost, other):
        big_replies.wait(one)
    big_replies.discard(lost)
    assert big_replies.next() is other
    big_replies.wait(lost)
    big_replies.clear()
    assert big_replies.next() is None
