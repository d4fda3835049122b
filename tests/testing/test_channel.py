from redpoll.protocol.presence import Member
from redpoll.testing.channel import Channel
from redpoll.testing.clock import Clock
from redpoll.testing.loop_thread import LoopThread

CLOCK = Clock(LoopThread())


def test_a_count_is_announced_once_and_after_its_time():
    channel = Channel("news", CLOCK)
    assert channel.count_due_s(0.0) is None
    channel.subscribers["a"] = False
    assert channel.count_due_s(0.0) == 0.0
    channel.count_announced(0.0)
    assert channel.count_due_s(0.1) is None
    channel.subscribers["b"] = False
    assert channel.count_due_s(0.125) == 0.125
    assert channel.count_due_s(0.25) == 0.0
    channel.subscribers.update(dict.fromkeys(range(100), False))
    assert channel.count_due_s(1.0) == 4.0
    assert channel.count_due_s(60.0) == 0.0


def test_a_member_is_there_from_the_first_connection_to_the_last():
    channel, anna = Channel("presence-a", CLOCK), Member("anna", b'{"n":1}')
    assert channel.member_joined(anna)
    assert not channel.member_joined(Member("anna", b""))
    assert channel.has_room(anna, 1)
    assert not channel.has_room(Member("ben", b""), 1)
    assert not channel.member_left("anna")
    assert channel.presence() == b'{"presence":{"count":1,"ids":["anna"],"hash":{"anna":{"n":1}}}}'
    assert channel.member_left("anna")
    assert Channel("news", CLOCK).presence() is None
