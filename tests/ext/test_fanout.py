"""Audiences compared with sets, and the flusher on real sockets whose readers are slow, closed or hostile."""

import asyncio
import os
import socket
import subprocess
import sys
from typing import ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from redpoll._fanout import Audience, Flusher, Sink


class Named(Audience):
    __slots__ = ("name",)

    def __init__(self, flusher: Flusher, name: str) -> None:
        super().__init__(flusher)
        self.name = name


def sink_on(transport, flusher: Flusher) -> Sink:
    sink = Sink(flusher)
    transport.protocol = sink
    sink.attach_to(transport)
    return sink


@pytest.fixture
def sinks(fake_transport, flusher):
    """`[(sink, transport)] * n`, on fake transports."""

    def make(count: int, its_flusher: Flusher = flusher):
        pairs = []
        for _ in range(count):
            transport = fake_transport()
            pairs.append((sink_on(transport, its_flusher), transport))
        return pairs

    return make


# -- who is in an audience -----------------------------------------------------------------------------------


@given(
    st.lists(
        st.tuples(st.sampled_from(["add", "discard", "post", "drop"]), st.integers(0, 5), st.integers(0, 6)),
        max_size=120,
    )
)
def test_audiences_agree_with_sets(steps):
    flusher = Flusher(lambda: None)
    audiences = [Named(flusher, str(i)) for i in range(6)]
    members: list[set[Sink]] = [set() for _ in audiences]
    sinks = [Sink(flusher) for _ in range(7)]
    for what, a, s in steps:
        audience, sink = audiences[a], sinks[s]
        if what == "add":
            assert audience.add(sink) is (sink not in members[a])
            members[a].add(sink)
        elif what == "discard":
            assert audience.discard(sink) is (sink in members[a])
            members[a].discard(sink)
        elif what == "drop":
            # An audience that goes lets go of everybody.
            audiences[a] = Named(flusher, str(a))
            members[a] = set()
        else:
            # Without a transport nobody takes frames.
            assert audience.post(b"x") == 0
        for audience, expected in zip(audiences, members, strict=True):
            assert len(audience) == len(expected)
            assert set(audience) == expected
            assert all((sink in audience) is (sink in expected) for sink in sinks)


def test_a_sink_of_another_flusher_is_refused(flusher):
    with pytest.raises(ValueError, match="one flusher"):
        Audience(flusher).add(Sink(Flusher(lambda: None)))


def test_an_uninitialised_sink_is_refused(fake_transport, flusher):
    class Careless(Sink):
        def __init__(self) -> None:
            pass

    class Forgetful(Audience):
        def __init__(self) -> None:
            pass

    with pytest.raises(RuntimeError, match="__init__"):
        Careless().attach_to(fake_transport())
    assert Careless().send(b"x") is False
    assert Forgetful().post(b"x") == 0
    with pytest.raises(ValueError, match="one flusher"):
        Forgetful().add(Sink(flusher))


def test_an_audience_keeps_its_sinks_alive(flusher):
    audience = Audience(flusher)
    audience.add(Sink(flusher))
    assert len(list(audience)) == 1


# Sessions of the HTTP fallback: each writes, in the middle of a send or post, to an HTTP connection of its own. The
# allocator of debug builds notices a write past the end of the queue as soon as the queue grows.
SESSIONS = """
import asyncio
import socket
import sys

from redpoll._engine import WebSocket
from redpoll._fanout import Audience, Flusher
from redpoll._sockets import Poller


class Http(WebSocket):
    def head_received(self, head):
        self.serve_http()


class Transport:
    def __init__(self, http=None):
        self.http = http

    def get_extra_info(self, name, default=None):
        return default

    def write(self, data):
        if self.http is not None:
            self.http.write_http(data)


async def main(way):
    poller = Poller(asyncio.get_running_loop())
    flusher = Flusher(lambda: None, max_unsent_bytes=2000, poller=poller)
    peers, many, few = [], Audience(flusher), Audience(flusher)

    def connection(transport):
        ws = WebSocket(flusher, 1000)
        ws.open_on(transport)
        return ws

    def session():
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        http = Http(flusher, 1000)
        poller.adopt(ours.detach(), http)
        http.feed(b"GET / HTTP/1.1\\r\\n\\r\\n")
        peers.append(theirs)
        return connection(Transport(http))

    sessions = [session() for _ in range(32 if way == "post" else 1)]
    for each in sessions:
        many.add(each)
        few.add(each)
    # The sessions are in the bulk queue. With the next frame they have too much unsent, and are written before it.
    flusher.max_few = 0
    many.post(b"a" * 1500)
    flusher.max_few = 64
    if way == "post":
        for _ in range(32):
            few.add(connection(Transport()))
        few.post(b"b" * 900)
    else:
        others = [connection(Transport()) for _ in range(63)]
        for other in others:
            other.send(b"c")
        sessions[0].send(b"b" * 900)
    # The sessions are in both queues, 32 or 63 others in one, and the HTTP connections, too.
    assert flusher.waiting == {"post": 2 * 32 + 32 + 32, "send": 2 + 63 + 1}[way], flusher.waiting
    more = [connection(Transport()) for _ in range(64)]
    for other in more:
        other.send(b"c")
    while flusher.flush():
        pass
    while flusher.flush():
        pass
    assert [theirs.recv(10_000) for theirs in peers] == [b"a" * 1500 + b"b" * 900] * len(peers)


asyncio.run(main(sys.argv[1]))
"""


@pytest.mark.parametrize("way", ["send", "post"])
def test_a_transport_may_write_to_other_sinks(way):
    env = os.environ | {"PYTHONMALLOC": "debug"}
    subprocess.run([sys.executable, "-c", SESSIONS, way], env=env, check=True, timeout=60)


# -- posting -------------------------------------------------------------------------------------------------


def test_post_reaches_all_but_the_one_to_skip(sinks, flusher):
    audience = Audience(flusher)
    pairs = sinks(3)
    for number, (sink, _) in enumerate(pairs, 1):
        sink.set_sid(number, 7)
        audience.add(sink)
    assert audience.post(b"frame", 2, 7) == 2
    assert audience.post(b"other", 2, 8) == 3
    flusher.flush()
    assert [bytes(transport.written) for _, transport in pairs] == [b"frameother", b"other", b"frameother"]


def test_sinks_without_a_socket_id_are_not_skipped(sinks, flusher):
    audience = Audience(flusher)
    [(sink, transport)] = sinks(1)
    audience.add(sink)
    assert audience.post(b"frame", 0, 0) == 1
    flusher.flush()
    assert transport.take() == b"frame"


def test_schedule_is_called_once_until_the_flush(sinks):
    calls = []
    flusher = Flusher(lambda: calls.append(1))
    audience = Audience(flusher)
    for sink, _ in sinks(3, flusher):
        audience.add(sink)
    audience.post(b"a")
    audience.post(b"b")
    next(iter(audience)).send(b"c")
    assert len(calls) == 1
    assert flusher.flush() is False
    assert flusher.flush() is False
    audience.post(b"d")
    assert len(calls) == 2
    flusher.flush()


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["post", "send", "urgent", "fill", "drain", "flush"]),
            st.integers(0, 3),
            st.sampled_from([b"a", b"bb", b"ccc"]),
        ),
        max_size=60,
    ),
    st.sampled_from([2, 3]),
)
def test_every_sink_gets_its_frames_in_order(fake_transport, steps, max_few):
    flusher = Flusher(lambda: None)
    flusher.max_few = max_few
    audiences = [Audience(flusher) for _ in range(2)]
    transports = [fake_transport() for _ in range(4)]
    sinks = [sink_on(transport, flusher) for transport in transports]
    # 0 in the first, 1 and 2 in both, 3 in the second.
    seats = [[0, 1, 2], [1, 2, 3]]
    for audience, members in zip(audiences, seats, strict=True):
        for member in members:
            audience.add(sinks[member])
    ordinary: list[list[bytes]] = [[] for _ in sinks]
    urgent: list[list[bytes]] = [[] for _ in sinks]
    for number, (what, index, text) in enumerate(steps):
        # Numbered, so that order is seen; the same object twice would be a case of its own.
        frame = b"<%s %d>" % (text, number)
        if what == "post":
            for member in seats[index % 2]:
                ordinary[member].append(frame)
            assert audiences[index % 2].post(frame) == 3
        elif what == "send":
            ordinary[index].append(frame)
            assert sinks[index].send(frame)
        elif what == "urgent":
            urgent[index].append(frame)
            assert sinks[index].send_urgent(frame)
        elif what == "fill":
            transports[index].full = True
        elif what == "drain":
            transports[index].drain()
        else:
            flusher.flush()
    for transport in transports:
        transport.drain()
    flusher.flush()
    for index, transport in enumerate(transports):
        got = [part + b">" for part in bytes(transport.written).split(b">")[:-1]]
        assert [frame for frame in got if frame in ordinary[index]] == ordinary[index]
        assert [frame for frame in got if frame in urgent[index]] == urgent[index]
        assert len(got) == len(ordinary[index]) + len(urgent[index])
        assert sinks[index].unsent_bytes == 0


@given(
    st.lists(
        st.tuples(st.sampled_from(["add", "discard", "post", "post", "flush", "send"]), st.integers(0, 11)), max_size=80
    ),
    st.integers(1, 5),
)
def test_large_audience_gets_each_post_in_slices_in_order_and_as_it_was_when_it_was_posted(fake_transport, steps, part):
    flusher = Flusher(lambda: None, slice_s=0.0)
    flusher.post_at_once, flusher.post_part = 2, part
    audience = Audience(flusher)
    transports = [fake_transport() for _ in range(12)]
    sinks = [sink_on(transport, flusher) for transport in transports]
    for number, sink in enumerate(sinks):
        sink.set_sid(1, number + 1)
    # By sink: the posts that it must get because it was in from then on, and those that it may get.
    must: list[list[bytes]] = [[] for _ in sinks]
    may: list[set[bytes]] = [set() for _ in sinks]
    members: set[int] = set()
    for number, (what, index) in enumerate(steps):
        frame = b"<%d>" % number
        if what == "add":
            assert audience.add(sinks[index]) is (index not in members)
            members.add(index)
        elif what == "discard":
            assert audience.discard(sinks[index]) is (index in members)
            members.discard(index)
            # What wasn't noted on it yet may be missing, and what was noted is written.
            must[index] = []
        elif what == "post":
            # One of them is skipped, if it is in.
            heard = members - {index}
            assert len(heard) <= audience.post(frame, 1, index + 1) <= len(members)
            for member in heard:
                must[member].append(frame)
                may[member].add(frame)
        elif what == "send":
            assert sinks[index].send(frame)
            may[index].add(frame)
        else:
            flusher.flush()
        assert len(audience) == len(members)
        assert set(audience) == {sinks[member] for member in members}
    for _ in range(len(steps) * len(sinks) + 10):
        if not flusher.flush():
            break
    assert not flusher.flush()
    for index, transport in enumerate(transports):
        got = [part + b">" for part in bytes(transport.written).split(b">")[:-1]]
        assert len(set(got)) == len(got)
        assert set(got) <= may[index]
        posted = [frame for frame in got if frame in must[index]]
        assert posted == must[index]


def test_posts_to_a_large_audience_that_goes_are_let_go(sinks, flusher):
    flusher.post_at_once = 2
    frame = bytes([120] * 50)
    held = sys.getrefcount(frame)
    audience = Audience(flusher)
    pairs = sinks(5)
    for sink, _ in pairs:
        audience.add(sink)
    for _ in range(3):
        assert audience.post(frame) == 5
    for sink, _ in pairs:
        audience.discard(sink)
    del audience
    while flusher.flush():
        pass
    assert sys.getrefcount(frame) == held
    assert all(not transport.written for _, transport in pairs)


def test_so_many_posts_wait_and_no_more(sinks, flusher):
    flusher.post_at_once = 2
    audience = Audience(flusher)
    pairs = sinks(3)
    for sink, _ in pairs:
        audience.add(sink)
    for number in range(200):
        audience.post(b"%d," % number)
    audience.finish_posts()
    while flusher.flush():
        pass
    assert all(transport.written == b"".join(b"%d," % number for number in range(200)) for _, transport in pairs)


def test_a_post_too_many_finishes_the_oldest_and_no_other(sinks, flusher):
    flusher.post_at_once = flusher.post_part = 2
    audience = Audience(flusher)
    pairs = sinks(5)
    for sink, _ in pairs:
        audience.add(sink)
    for number in range(64):
        audience.post(b"%02d" % number)
    before = flusher.frames_posted
    audience.post(b"64")
    assert flusher.frames_posted - before == 5
    while flusher.flush():
        pass
    assert all(transport.written == b"".join(b"%02d" % number for number in range(65)) for _, transport in pairs)


def test_the_same_frame_posted_twice_comes_twice(sinks, flusher):
    audience = Audience(flusher)
    (first, first_transport), (second, second_transport) = sinks(2)
    audience.add(first)
    audience.add(second)
    frame = b"again"
    first.send(frame)
    audience.post(frame)
    audience.post(frame)
    flusher.flush()
    assert first_transport.take() == b"againagainagain"
    assert second_transport.take() == b"againagain"


def test_urgent_frames_pass_those_not_yet_started(sinks, flusher):
    [(sink, transport)] = sinks(1)
    sink.send(b"1")
    sink.send_urgent(b"!")
    sink.send(b"2")
    flusher.flush()
    assert transport.take() == b"!12"


def crowd_of(sinks):
    """A flusher whose slice is over at the first look at the clock, and the sinks of an audience of 300, with an event
    that none of them has yet."""
    flusher = Flusher(lambda: None, slice_s=0.0)
    audience = Audience(flusher)
    pairs = sinks(300, flusher)
    for sink, _ in pairs:
        audience.add(sink)
    audience.post(b"fat")
    return flusher, pairs


def test_a_frame_for_one_sink_does_not_wait_for_a_large_audience(sinks):
    flusher, pairs = crowd_of(sinks)
    [(outsider, outsider_transport)] = sinks(1, flusher)
    member, member_transport = pairs[-1]
    outsider.send(b"1")
    outsider.send_urgent(b"!")
    member.send(b"2")
    assert flusher.flush() is True
    assert outsider_transport.take() == b"!1"
    assert member_transport.take() == b"fat2"
    assert pairs[-2][1].take() == b""
    while flusher.flush():
        pass
    assert outsider_transport.take() == b""
    assert {transport.take() for _, transport in pairs[:-1]} == {b"fat"}
    assert member_transport.take() == b""


def test_an_event_for_a_few_does_not_wait_for_a_large_audience(sinks):
    flusher, pairs = crowd_of(sinks)
    few = Audience(flusher)
    for member, _ in pairs[-3:]:
        few.add(member)
    few.post(b"thin")
    assert flusher.flush() is True
    assert [transport.take() for _, transport in pairs[-4:]] == [b"", b"fatthin", b"fatthin", b"fatthin"]
    while flusher.flush():
        pass
    assert {transport.take() for _, transport in pairs[:-3]} == {b"fat"}


def test_a_large_audience_is_written_although_others_always_have_frames(sinks):
    flusher, pairs = crowd_of(sinks)
    others = sinks(200, flusher)
    flushes = 0
    while pairs[-1][0].unsent_bytes:
        for other, _ in others:
            other.send(b"x")
        flusher.flush()
        flushes += 1
        assert flushes <= 300
    assert {transport.take() for _, transport in pairs} == {b"fat"}
    while flusher.flush():
        pass
    assert {transport.take() for _, transport in others} == {b"x" * flushes}


def test_a_paused_sink_keeps_its_frames_until_there_is_room(sinks, flusher):
    [(sink, transport)] = sinks(1)
    transport.full = True
    sink.send(b"1")
    flusher.flush()
    sink.send(b"2")
    flusher.flush()
    assert transport.take() == b"1"
    assert sink.unsent_bytes == 2
    transport.drain()
    flusher.flush()
    assert transport.take() == b"2"
    assert sink.unsent_bytes == 0


# -- bounds --------------------------------------------------------------------------------------------------


def test_a_sink_above_the_limit_is_dropped_once(sinks):
    flusher = Flusher(lambda: None, max_unsent_bytes=1000)
    audience = Audience(flusher)
    (slow, slow_transport), (quick, quick_transport) = sinks(2, flusher)
    audience.add(slow)
    audience.add(quick)
    slow_transport.full = True
    posted = 0
    for number in range(20):
        audience.post(b"%03d" % number * 30)
        posted += 1
        flusher.flush()
        assert slow.unsent_bytes <= 1000
    assert slow_transport.aborted
    assert slow.unsent_bytes == 0
    assert flusher.overruns == 1
    assert len(quick_transport.take()) == 90 * posted
    assert slow.send(b"more") is False


def test_a_burst_in_one_tick_is_written_early_to_a_client_that_reads(sinks):
    """The limit is for what a client doesn't take; a larger burst isn't the client's fault."""
    flusher = Flusher(lambda: None, max_unsent_bytes=1000)
    audience = Audience(flusher)
    (quick, quick_transport), (slow, slow_transport) = sinks(2, flusher)
    audience.add(quick)
    audience.add(slow)
    slow_transport.full = True
    frames = [b"%03d" % number * 100 for number in range(20)]
    for frame in frames:
        audience.post(frame)
        assert quick.unsent_bytes <= 1000
    assert quick.send(b"x" * 5000)
    flusher.flush()
    assert quick_transport.take() == b"".join(frames) + b"x" * 5000
    assert quick.unsent_bytes == 0
    assert not quick_transport.aborted
    assert slow_transport.aborted
    assert flusher.overruns == 1


def test_tiny_frames_are_bounded_too(sinks):
    flusher = Flusher(lambda: None, max_unsent_bytes=10_000)
    [(sink, transport)] = sinks(1, flusher)
    transport.full = True
    sink.send(b"x")
    flusher.flush()
    sent = 0
    while sink.send(b"x"):
        sent += 1
        assert sent < 200
    flusher.flush()
    assert not sink.send(b"z")


def test_a_flush_ends_when_its_slice_does(sinks):
    calls = []
    flusher = Flusher(lambda: calls.append(1), slice_s=0.0)
    audience = Audience(flusher)
    pairs = sinks(100, flusher)
    for sink, _ in pairs:
        audience.add(sink)
    audience.post(b"x")
    rounds = 1
    while flusher.flush():
        rounds += 1
        assert len(calls) == rounds
    assert rounds > 2
    assert all(transport.take() == b"x" for _, transport in pairs)
    assert flusher.waiting == 0


def test_a_callback_that_always_sends_does_not_prolong_the_flush(fake_transport):
    flusher = Flusher(lambda: None)

    class Chatty(fake_transport):
        def write(self, data: bytes) -> None:
            super().write(data)
            if len(self.written) < 1000:
                self.protocol.send(b"and more")
                assert flusher.flush() is True

    transport = Chatty()
    sink = sink_on(transport, flusher)
    sink.send(b"hello")
    rounds = 0
    while flusher.flush():
        rounds += 1
    assert rounds > 20
    assert transport.take() == b"hello" + b"and more" * 125


# -- real sockets --------------------------------------------------------------------------------------------


async def test_one_send_carries_all_queued_frames(served):
    clients = [await served.client() for _ in range(3)]
    audience = Audience(served.flusher)
    for connection in served.connections:
        audience.add(connection)
    writes = served.flusher.writes
    for number in range(10):
        audience.post(b"%d" % number)
    for client in clients:
        assert await served.read(client, 10) == b"0123456789"
    assert served.flusher.writes - writes == 3
    for connection in served.connections:
        audience.discard(connection)


async def test_a_slow_reader_gets_every_byte_in_order(served, wait_until):
    client = await served.client(receive_buffer_bytes=4096)
    [connection] = served.connections
    audience = Audience(served.flusher)
    audience.add(connection)
    expected = bytearray()
    number = 0
    # Until the kernel is full and the rest is ours, then a little more, some of it urgent.
    while connection.unsent_bytes < 300_000:
        frame = b"<%06d>" % number * (1 + number % 700)
        expected += frame
        audience.post(frame)
        number += 1
        if number % 10 == 0:
            await asyncio.sleep(0)
    received = bytearray()
    while len(received) < len(expected):
        received += await served.read(client, min(20_000, len(expected) - len(received)))
        frame = b"<%06d>" % number
        expected += frame
        audience.post(frame)
        number += 1
        if number % 3 == 0:
            await asyncio.sleep(0)
        if len(expected) > 3_000_000:
            break
    received += await served.read(client, len(expected) - len(received))
    assert received == expected
    await wait_until(lambda: connection.unsent_bytes == 0)
    assert connection.heard == []
    audience.discard(connection)


async def test_a_reset_closes_only_its_connection(served, wait_until):
    lost, other = [await served.client() for _ in range(2)]
    audience = Audience(served.flusher)
    for connection in served.connections:
        audience.add(connection)
    served.reset(lost)
    for _ in range(20):
        audience.post(b"x" * 1000)
        await asyncio.sleep(0)
    assert await served.read(other, 20_000) == b"x" * 20_000
    await wait_until(lambda: served.lost == 1)
    assert served.connections[0].heard == [("closed", 1006, "")]
    assert served.connections[1].heard == []
    # Left behind on purpose: the engine takes a lost connection out of every audience.
    assert list(audience) == [served.connections[1]]
    audience.discard(served.connections[1])


async def test_a_broken_pipe_is_counted_and_affects_only_its_sink():
    loop = asyncio.get_running_loop()
    flusher = Flusher(lambda: None)
    near, far = socket.socketpair()
    near.setblocking(False)

    class Protocol(asyncio.Protocol):
        pass

    transport, _ = await loop.create_connection(Protocol, sock=near)
    sink = Sink(flusher)
    sink.attach_to(transport)
    far.close()
    sink.send(b"x")
    flusher.flush()
    assert flusher.sinks_closed_on_error == 1
    assert transport.is_closing()
    assert sink.send(b"y") is False
    await asyncio.sleep(0)
    await asyncio.sleep(0)


class TlsTransport:
    """A transport with a descriptor that only it may use, like uvloop's for TLS. It is full after `room` bytes."""

    made: ClassVar[list["TlsTransport"]] = []

    def __init__(self, room: int) -> None:
        self.made.append(self)
        self.writes = []
        self.room = room
        self.limits = None
        self.sink = None

    def get_extra_info(self, name, default=None):
        return {"sslcontext": self, "socket": self}.get(name, default)

    def set_write_buffer_limits(self, high, low) -> None:
        self.limits = (high, low)

    def write(self, data: bytes) -> None:
        self.writes.append(data)
        if sum(map(len, self.writes)) > self.room:
            self.sink.pause_writing()

    def abort(self) -> None:
        self.writes.clear()


@pytest.fixture(autouse=True)
def no_cycles(nothing_stays_alive):
    """The garbage collector doesn't visit sinks, so it can't break their cycles with transports."""
    yield
    for transport in TlsTransport.made:
        transport.sink = None
    TlsTransport.made.clear()


def tls_sink(flusher, room=1 << 30):
    sink, transport = Sink(flusher), TlsTransport(room)
    transport.sink = sink
    sink.attach_to(transport)
    return sink, transport


def test_a_transport_with_tls_is_written_through_in_order_and_in_pieces():
    flusher = Flusher(lambda: None)
    sink, transport = tls_sink(flusher)
    # Paused as soon as there is a byte that the socket didn't take.
    assert transport.limits == (1, 0)
    frames = [bytes([number]) * (1000 * number) for number in range(1, 30)]
    for frame in frames:
        sink.send(frame)
    while flusher.flush():
        pass
    assert b"".join(transport.writes) == b"".join(frames)
    assert max(map(len, transport.writes)) < 65_536 + 30_000
    assert len(transport.writes) < 12
    assert flusher.frames_written == len(frames)
    assert flusher.bytes_written == sum(map(len, frames))
    assert sink.unsent_bytes == 0


def test_what_a_full_tls_transport_has_not_taken_stays_queued_and_counts():
    flusher = Flusher(lambda: None, 1_000_000)
    sink, transport = tls_sink(flusher, room=0)
    for _ in range(50):
        sink.send(b"x" * 10_000)
    flusher.flush()
    (handed,) = transport.writes
    assert 65_536 <= len(handed) <= 75_536
    # What it was handed is unsent still: it has said that it is full.
    assert sink.unsent_bytes == 500_000
    while sink.send(b"x" * 10_000):
        assert sink.unsent_bytes <= 1_000_000
    assert flusher.overruns == 0
    flusher.flush()
    assert flusher.overruns == 1


def test_a_tls_transport_that_has_room_again_gets_the_rest():
    flusher = Flusher(lambda: None)
    sink, transport = tls_sink(flusher, room=100_000)
    frames = [bytes([number]) * 10_000 for number in range(30)]
    for frame in frames:
        sink.send(frame)
    sent = b""
    for _ in range(30):
        flusher.flush()
        sent += b"".join(transport.writes)
        transport.writes.clear()
        sink.resume_writing()
    assert sent == b"".join(frames)
    assert sink.unsent_bytes == 0


# -- drained -------------------------------------------------------------------------------------------------


def test_an_awaited_sink_is_reported_once_when_little_is_unsent():
    flusher = Flusher(lambda: None)
    reported: list[Sink] = []
    flusher.writable_below_bytes, flusher.on_writable = 100_000, reported.extend
    sink, transport = tls_sink(flusher, room=0)
    assert not sink.await_writable()
    for _ in range(30):
        sink.send(b"x" * 10_000)
    assert sink.await_writable()
    flusher.flush()
    assert sink.unsent_bytes == 300_000
    unsent = []
    while sink.unsent_bytes:
        transport.writes.clear()
        sink.resume_writing()
        flusher.flush()
        unsent.append((sink.unsent_bytes, len(reported)))
    assert [count for left, count in unsent if left >= 100_000] == [0] * sum(left >= 100_000 for left, _ in unsent)
    assert [count for left, count in unsent if left < 100_000] == [1] * sum(left < 100_000 for left, _ in unsent)
    assert reported == [sink]
    # The flusher refers to this list, and each sink to the flusher.
    reported.clear()


def test_drained_sinks_are_not_reported_while_an_audience_is_posted_to():
    scheduled: list[int] = []
    flusher = Flusher(lambda: scheduled.append(1), 300_000)
    reported: list[Sink] = []
    flusher.writable_below_bytes, flusher.on_writable = 100_000, reported.extend
    audience = Audience(flusher)
    sink, _ = tls_sink(flusher)
    audience.add(sink)
    for _ in range(28):
        audience.post(b"x" * 10_000)
    assert sink.await_writable()
    # Beyond the bound the burst is written early, from within post().
    for _ in range(30):
        audience.post(b"x" * 10_000)
    assert reported == []
    while flusher.flush():
        pass
    assert reported == [sink]
    assert scheduled
    # The flusher refers to this list, and each sink to the flusher.
    reported.clear()


def test_a_sink_that_is_lost_is_not_reported():
    flusher = Flusher(lambda: None)
    reported: list[Sink] = []
    flusher.writable_below_bytes, flusher.on_writable = 100, reported.extend
    sink, _ = tls_sink(flusher, room=0)
    for _ in range(30):
        sink.send(b"x" * 10_000)
    assert sink.await_writable()
    flusher.flush()
    flusher.max_unsent_bytes = 1000
    assert not sink.send(b"x" * 10_000)
    flusher.flush()
    assert flusher.overruns == 1
    assert reported == []


def test_a_sink_that_waits_until_it_is_drained_is_reported_when_nothing_is_unsent():
    flusher = Flusher(lambda: None)
    reported: list[Sink] = []
    flusher.writable_below_bytes, flusher.on_writable = 100_000, reported.extend
    sink, transport = tls_sink(flusher, room=0)
    assert not sink.await_drained()
    for _ in range(30):
        sink.send(b"x" * 10_000)
    assert sink.await_drained()
    flusher.flush()
    while sink.unsent_bytes:
        assert reported == []
        transport.writes.clear()
        sink.resume_writing()
        flusher.flush()
    assert reported == [sink]
    # The flusher refers to this list, and each sink to the flusher.
    reported.clear()


@pytest.mark.parametrize("full", [(), (0,), (4,), (1, 2), (0, 1, 2, 3, 4)])
def test_sinks_whose_kernel_is_full_are_taken_out_of_an_audience(full):
    flusher = Flusher(lambda: None)
    audience = Audience(flusher)
    sinks = [tls_sink(flusher)[0] for _ in range(5)]
    for at, sink in enumerate(sinks):
        audience.add(sink)
        if at in full:
            sink.pause_writing()
    assert set(audience.take_paused(0, 2)) == {sinks[at] for at in full if at < 2}
    taken = audience.take_paused(0, 100)
    assert {sinks.index(sink) for sink in taken} == {at for at in full if at >= 2}
    assert set(audience) == {sink for at, sink in enumerate(sinks) if at not in full}
    assert audience.take_paused(7, 100) == []
    audience.post(b"frame")
    flusher.flush()
    assert [sink.unsent_bytes for sink in sinks] == [0] * 5


def test_none_is_taken_while_a_post_is_under_way():
    flusher = Flusher(lambda: None)
    flusher.post_at_once, flusher.post_part = 2, 1
    audience = Audience(flusher)
    sinks = [tls_sink(flusher)[0] for _ in range(3)]
    for sink in sinks:
        audience.add(sink)
        sink.pause_writing()
    audience.post(b"frame")
    assert audience.take_paused(0, 3) == []
    audience.finish_posts()
    assert len(audience.take_paused(0, 3)) == 3


def test_a_sink_for_which_too_much_waits_elsewhere_is_closed_as_one_with_too_much_unsent():
    flusher = Flusher(lambda: None)
    sink, _ = tls_sink(flusher, room=0)
    sink.send(b"x" * 1000)
    flusher.flush()
    assert not sink.overrun
    sink.overrun_now()
    sink.overrun_now()
    assert sink.overrun
    assert not sink.send(b"y")
    flusher.flush()
    assert flusher.overruns == 1
    assert sink.overrun
    assert not sink.send(b"z")
