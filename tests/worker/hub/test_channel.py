"""A channel's readers exist only while there are any."""

from redpoll._fanout import Flusher, Sink
from redpoll.worker.hub.channel import Channel


def test_readers_are_made_once_and_dropped_when_none_is_left():
    flusher = Flusher(lambda: None)
    channel, sink = Channel(flusher, b"c"), Sink(flusher)
    assert channel.readers is None
    readers = channel.make_readers()
    assert channel.make_readers() is readers
    readers.recovering.add(sink)
    channel.drop_idle_readers()
    assert channel.readers is readers
    readers.recovering.discard(sink)
    readers.page_from = 5
    channel.drop_idle_readers()
    assert channel.readers is readers
    readers.page_from = None
    channel.drop_idle_readers()
    assert channel.readers is None
