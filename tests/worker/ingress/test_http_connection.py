"""HTTP on the public port, with a fake control plane."""

import asyncio
import contextlib
import json

import pytest

from redpoll.http import head as http_head
from redpoll.http.connection import State
from redpoll.http.messages import CLOSES, HEAD_ONLY, HTTP_1_0
from redpoll.worker.ingress.control_link import ControlLink
from redpoll.worker.ingress.http_requests import PublicConnection
from worker.ingress.edge import reset

KEY = "278d425bdf160c739803"
GET = b"GET /%d HTTP/1.1\r\nHost: h\r\n\r\n"
UPGRADE = (
    f"GET /app/{KEY}?protocol=7 HTTP/1.1\r\nHost: x\r\nConnection: keep-alive, Upgrade\r\nUpgrade: websocket\r\n"
    "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n"
).encode()


class Wire:
    """A client's connection: bytes as the test wants them."""

    def __init__(self, reader, writer):
        self.reader = reader
        self.writer = writer

    def send(self, data):
        self.writer.write(data)

    async def next(self, *, bodiless=False):
        """The next response: status, head, body."""
        async with asyncio.timeout(60):
            head = await self.reader.readuntil(b"\r\n\r\n")
            size = 0
            for line in head.split(b"\r\n"):
                if line.lower().startswith(b"content-length:"):
                    size = int(line.partition(b":")[2])
            status = int(head.split(b" ")[1])
            return status, head, b"" if bodiless or status == 100 else await self.reader.readexactly(size)

    async def rest(self):
        async with asyncio.timeout(60):
            try:
                return await self.reader.read()
            except ConnectionError:
                return b""


@pytest.fixture
async def open_wire(bench):
    """`await open_wire(**settings)`: a Wire to a worker of these settings; the worker is `wire.worker`."""
    wires = []

    async def make(worker=None, **settings):
        worker = worker or await bench.start(**settings)
        wire = Wire(*await asyncio.open_connection("127.0.0.1", worker.port))
        wire.worker = worker
        wires.append(wire)
        return wire

    yield make
    for wire in wires:
        wire.writer.close()


async def test_requests_of_one_connection_are_answered_in_order(open_wire, control):
    wire = await open_wire()
    wire.send(b"".join(GET % n for n in range(300)))
    for n in range(300):
        status, _, body = await wire.next()
        assert (status, body) == (200, b"GET /%d 0 127.0.0.1" % n)
    assert len(control.requests) == 300
    # They are no messages.
    assert wire.worker.gate.flusher.frames_posted == 0


async def test_a_request_is_sent_only_after_the_answer_to_the_one_before(open_wire, control, wait_until):
    control.answer = lambda request: None
    wire = await open_wire()
    wire.send(GET % 1 + GET % 2)
    await wait_until(lambda: control.requests)
    wire.send(GET % 3)
    await asyncio.sleep(0.05)
    assert [request.target for request in control.requests] == ["/1"]
    control.answer = control.echo
    control.send(control.requests[0], control.echo(control.requests[0]))
    assert [(await wire.next())[2][:6] for _ in range(3)] == [b"GET /1", b"GET /2", b"GET /3"]


BODIES = {
    "none": b"GET /a?b=%41 HTTP/1.1\r\nHost: h\r\n\r\n",
    "counted": b"POST /a HTTP/1.1\r\nHost: h\r\nContent-Length: 4\r\n\r\nabcd",
    "in chunks": (
        b"POST /a HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n"
        b"3\r\nabc\r\n1;x=y\r\nd\r\n0\r\nX-T: 1\r\n\r\n"
    ),
    "absolute form": b"POST http://h/a HTTP/1.1\r\nHost: h\r\nContent-Length: 4\r\n\r\nabcd",
}


@pytest.mark.parametrize("request_bytes", BODIES.values(), ids=BODIES)
async def test_a_request_split_at_every_byte_is_the_same_request(open_wire, control, request_bytes):
    wire = await open_wire()
    wire.send(request_bytes)
    await wire.next()
    whole = control.requests.pop()
    for at in range(1, len(request_bytes)):
        wire.send(request_bytes[:at])
        await asyncio.sleep(0.002)
        wire.send(request_bytes[at:])
        status, _, _ = await wire.next()
        assert status == 200
    received = [request for request in control.requests if not request.flags & HEAD_ONLY]
    assert len(received) == len(request_bytes) - 1
    assert {request._replace(number=0) for request in map(freeze, received)} == {freeze(whole)._replace(number=0)}


def freeze(request):
    return request._replace(fields=tuple(request.fields.items()))


async def test_only_fields_that_control_reads_are_sent(open_wire, control):
    wire = await open_wire()
    wire.send(
        b"POST /a HTTP/1.1\r\nHost: h\r\nUser-Agent: x\r\nx-service-KEY: k\xff\r\nX-Service-Key: other\r\n"
        b"Content-Type: application/json\r\nContent-Length: 0\r\n\r\n"
    )
    await wire.next()
    assert control.requests[0].fields == {"X-Service-Key": "k\udcff"}


async def test_http_1_0_closes_unless_it_asks_to_stay(open_wire, control):
    wire = await open_wire()
    wire.send(b"GET /a HTTP/1.0\r\nConnection: keep-alive\r\n\r\n")
    await wire.next()
    wire.send(b"GET /b HTTP/1.0\r\n\r\n")
    await wire.next()
    assert await wire.rest() == b""
    assert [request.flags for request in control.requests] == [HTTP_1_0, HTTP_1_0 | CLOSES]


async def test_connection_close_closes_the_connection_after_the_answer(open_wire, control):
    wire = await open_wire()
    wire.send(b"GET /a HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\nGET /b HTTP/1.1\r\nHost: h\r\n\r\n")
    assert (await wire.next())[0] == 200
    assert await wire.rest() == b""
    assert len(control.requests) == 1


# Each of these makes two readers disagree about where a request ends, or is no HTTP at all.
REFUSED = {
    "length and chunked": (
        b"POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"
    ),
    "chunked and length": (
        b"POST / HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\nContent-Length: 4\r\n\r\n0\r\n\r\n"
    ),
    "two lengths": b"POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nab",
    "the same length twice": b"POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 1\r\nContent-Length: 1\r\n\r\na",
    "lengths in a list": b"POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 1, 1\r\n\r\na",
    "negative length": b"POST / HTTP/1.1\r\nHost: h\r\nContent-Length: -1\r\n\r\n",
    "signed length": b"POST / HTTP/1.1\r\nHost: h\r\nContent-Length: +1\r\n\r\na",
    "length of words": b"POST / HTTP/1.1\r\nHost: h\r\nContent-Length: one\r\n\r\n",
    "hexadecimal length": b"POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 0x1\r\n\r\na",
    "empty length": b"POST / HTTP/1.1\r\nHost: h\r\nContent-Length: \r\n\r\n",
    "endless length": b"POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 99999999999999999999999\r\n\r\n",
    "chunked twice": b"POST / HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked, chunked\r\n\r\n0\r\n\r\n",
    "two codings": (
        b"POST / HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"
    ),
    "chunked, identity": b"POST / HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked, identity\r\n\r\n0\r\n\r\n",
    "gzip, chunked": b"POST / HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
    "identity": b"POST / HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: identity\r\n\r\n",
    "xchunked": b"POST / HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: xchunked\r\n\r\n0\r\n\r\n",
    "tab before chunked": b"POST / HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: \x0bchunked\r\n\r\n0\r\n\r\n",
    "chunked in 1.0": b"POST / HTTP/1.0\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "NUL in the target": b"GET /\0 HTTP/1.1\r\nHost: h\r\n\r\n",
    "NUL in a header": b"GET / HTTP/1.1\r\nHost: h\r\nX-A: a\0b\r\n\r\n",
    "NUL in a name": b"GET / HTTP/1.1\r\nHost: h\r\nX\0A: a\r\n\r\n",
    "space before the colon": b"GET / HTTP/1.1\r\nHost: h\r\nX-A : a\r\n\r\n",
    "folded header": b"GET / HTTP/1.1\r\nHost: h\r\nX-A: a\r\n b\r\n\r\n",
    "line without a colon": b"GET / HTTP/1.1\r\nHost: h\r\nX-A\r\n\r\n",
    "header without a name": b"GET / HTTP/1.1\r\nHost: h\r\n: a\r\n\r\n",
    "bare line feed": b"GET / HTTP/1.1\nHost: h\n\n",
    "bare line feed in a header": b"GET / HTTP/1.1\r\nHost: h\r\nX-A: a\nX-B: b\r\n\r\n",
    "bare carriage return": b"GET / HTTP/1.1\r\nHost: h\r\nX-A: a\rX-B: b\r\n\r\n",
    "no host": b"GET / HTTP/1.1\r\n\r\n",
    "two hosts": b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
    "no HTTP": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
    "version 2": b"GET / HTTP/2.0\r\nHost: h\r\n\r\n",
    "version 1.2": b"GET / HTTP/1.2\r\nHost: h\r\n\r\n",
    "no version": b"GET /\r\n\r\n",
    "HTTP/2's preface": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "unknown method": b"FETCH / HTTP/1.1\r\nHost: h\r\n\r\n",
    "space in the target": b"GET /a b HTTP/1.1\r\nHost: h\r\n\r\n",
    "chunk size of words": b"POST / HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\nxyz\r\nabc\r\n0\r\n\r\n",
    "chunk beyond its size": b"PUT / HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nabc\r\n0\r\n\r\n",
    "chunk ends in a line feed": b"POST / HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n1\na\n0\n\n",
    "space after a chunk size": b"POST / HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n1 \r\na\r\n0\r\n\r\n",
    "endless chunk size": b"POST / HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\nfffffffffffffffff\r\n",
}


@pytest.mark.parametrize("request_bytes", REFUSED.values(), ids=REFUSED)
async def test_an_ambiguous_request_is_refused_and_what_follows_is_never_read(open_wire, control, request_bytes):
    wire = await open_wire()
    for before in (b"", GET % 1):
        del control.requests[:]
        wire = await open_wire(wire.worker)
        wire.send(before + request_bytes + b"GET /smuggled HTTP/1.1\r\nHost: h\r\n\r\n")
        if before:
            assert (await wire.next())[0] == 200
        status, head, body = await wire.next()
        assert status == 400
        assert json.loads(body)["code"] == "bad_request"
        assert b"\r\nConnection: close\r\n" in head
        assert await wire.rest() == b""
        targets = [request.target for request in control.requests if not request.flags & HEAD_ONLY]
        assert targets == (["/1"] if before else [])


async def test_limits_of_a_head(open_wire, control):
    exact = b"GET / HTTP/1.1\r\nHost: h\r\nX-A: "
    room = http_head.MAX_HEAD_BYTES - len(exact) - 4
    wire = await open_wire()
    wire.send(exact + b"a" * (room - 100) + b"\r\n\r\n")
    assert (await wire.next())[0] == 200
    wire.send(exact + b"a" * (room + 200) + b"\r\n\r\n")
    assert (await wire.next())[0] == 431
    assert await wire.rest() == b""
    for field in (b"X-A: " + b"a" * 20_000, b"X-%d: a\r\n" % 1 * 101):
        wire = await open_wire(wire.worker)
        wire.send(GET % 1)
        await wire.next()
        wire.send(b"GET / HTTP/1.1\r\nHost: h\r\n" + field + b"\r\n\r\n")
        assert (await wire.next())[0] == 431
        assert await wire.rest() == b""
    # In pieces, and without an end.
    wire = await open_wire(wire.worker)
    wire.send(GET % 1)
    await wire.next()
    wire.send(b"GET / HTTP/1.1\r\nHost: h\r\nX-A: ")
    with contextlib.suppress(ConnectionError):
        for _ in range(40):
            wire.send(b"a" * 1000)
            await asyncio.sleep(0.001)
    assert (await wire.next())[0] == 431


async def test_a_large_body_is_read_only_after_control_allows_it(open_wire, control):
    wire = await open_wire()
    wire.send(b"POST /a HTTP/1.1\r\nHost: h\r\nContent-Length: 1048576\r\n\r\n" + b"x" * 1_048_576)
    assert (await wire.next())[2] == b"POST /a 1048576 127.0.0.1"
    asked, request = control.requests
    assert (asked.flags, asked.announced, asked.body) == (HEAD_ONLY, 1_048_576, b"")
    assert request.flags == 0
    assert wire.worker.gate.http.reading_bytes == 0
    control.on_head = lambda request: b"HTTP/1.1 401 Unauthorized\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"
    wire.send(b"POST /a HTTP/1.1\r\nHost: h\r\nContent-Length: 100000\r\n\r\n")
    assert (await wire.next())[0] == 401
    assert len(control.requests) == 3


async def test_100_continue_is_sent_at_once_for_a_small_body_and_when_control_allows_a_large_one(open_wire, control):
    wire = await open_wire()
    for text in (b"abcd", b"a" * 20_000, b"abcd"):
        size = len(text)
        wire.send(b"POST /a HTTP/1.1\r\nHost: h\r\nExpect: 100-continue\r\nContent-Length: %d\r\n\r\n" % size)
        assert (await wire.next())[1] == b"HTTP/1.1 100 Continue\r\n\r\n"
        wire.send(text[:2])
        wire.send(text[2:])
        assert (await wire.next())[2] == b"POST /a %d 127.0.0.1" % size
    assert [bool(request.flags & HEAD_ONLY) for request in control.requests] == [False, True, False, False]
    # Not where the body came with the head.
    wire.send(b"POST /a HTTP/1.1\r\nHost: h\r\nExpect: 100-continue\r\nContent-Length: 4\r\n\r\nabcd")
    assert (await wire.next())[0] == 200
    control.on_head = lambda request: (
        b"HTTP/1.1 413 Payload Too Large\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"
    )
    wire.send(b"POST /a HTTP/1.1\r\nHost: h\r\nExpect: 100-continue\r\nContent-Length: 4000000\r\n\r\n")
    assert (await wire.next())[0] == 413
    assert await wire.rest() == b""


async def test_a_body_without_end_is_refused_by_control_at_the_limit(open_wire, control):
    control.answer = lambda request: (
        b"HTTP/1.1 %d X\r\nContent-Length: 0\r\nConnection: close\r\n\r\n" % request.refusal
    )
    wire = await open_wire()
    wire.send(b"POST /a HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n")
    with contextlib.suppress(ConnectionError):
        for _ in range(40):
            wire.send(b"10000\r\n" + b"x" * 0x10000 + b"\r\n")
            await asyncio.sleep(0)
    assert (await wire.next())[0] == 413
    assert control.requests[-1].flags & HEAD_ONLY
    assert wire.worker.gate.http.reading_bytes == 0


async def test_a_million_tiny_chunks_are_refused_early(open_wire, control):
    wire = await open_wire()
    wire.send(b"POST /a HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n")
    with contextlib.suppress(ConnectionError):
        for _ in range(100):
            wire.send(b"1\r\nx\r\n" * 100)
            await asyncio.sleep(0)
    status, _, body = await wire.next()
    assert status == 400
    assert "too many small chunks" in json.loads(body)["error"]


@pytest.mark.parametrize("extra", [b"0\r\nX: " + b"a" * 50, b"0\r\n" + b"X: y\r\n" * 9, b"1;" + b"a" * 50])
async def test_what_a_body_has_besides_its_content_is_bounded_and_counted(open_wire, control, wait_until, extra):
    """Trailers and extensions of chunks without an end."""
    wire = await open_wire()
    http = wire.worker.gate.http
    wire.send(b"POST /a HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n")
    await wait_until(lambda: control.requests)
    wire.send(extra)
    await wait_until(lambda: http.reading_bytes)
    with contextlib.suppress(ConnectionError):
        for _ in range(1000):
            wire.send(extra[3:] if extra.startswith(b"0") and b"y" in extra else b"a" * 50)
            await asyncio.sleep(0)
    status, head, body = await wire.next()
    assert (status, json.loads(body)["error"]) == (400, "the body has too many bytes besides its content")
    assert b"\r\nConnection: close\r\n" in head
    assert http.reading_bytes == 0


async def test_the_body_of_a_request_that_has_none_is_not_read(open_wire, control):
    """Control answers such a request at the head; a complete one is answered as before."""
    control.on_head = lambda request: b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"
    wire = await open_wire()
    wire.send(b"GET /a HTTP/1.1\r\nHost: h\r\nContent-Length: 4\r\n\r\nabcd")
    assert (await wire.next())[2] == b"GET /a 4 127.0.0.1"
    wire.send(b"GET /a HTTP/1.1\r\nHost: h\r\nContent-Length: 4\r\n\r\nabc")
    assert (await wire.next())[0] == 200
    assert await wire.rest() == b""
    assert control.requests[-1].flags & HEAD_ONLY


async def test_an_expectation_other_than_100_continue_is_refused_with_417(open_wire, control):
    wire = await open_wire()
    wire.send(b"POST /a HTTP/1.1\r\nHost: h\r\nExpect: a-miracle\r\nContent-Length: 4\r\n\r\nabcd")
    assert (await wire.next())[0] == 417
    assert await wire.rest() == b""
    assert control.requests == []


async def test_bytes_of_unfinished_bodies_are_bounded(open_wire, control, wait_until):
    first = await open_wire()
    http = first.worker.gate.http
    http.max_reading_bytes = 100_000
    second = await open_wire(first.worker)
    for wire in (first, second):
        wire.send(b"POST /a HTTP/1.1\r\nHost: h\r\nContent-Length: 1000000\r\n\r\n")
        wire.send(b"x" * 60_000)
    await wait_until(lambda: http.refused["bodies"])
    reading = [asyncio.create_task(wire.reader.read(12)) for wire in (first, second)]
    done, waiting = await asyncio.wait(reading, return_when=asyncio.FIRST_COMPLETED, timeout=60)
    assert [task.result() for task in done] == [b"HTTP/1.1 503"]
    for task in waiting:
        task.cancel()


async def test_requests_under_way_are_bounded(open_wire, control, wait_until):
    control.answer = lambda request: None
    first = await open_wire()
    first.worker.gate.http.max_requests = 2
    first.send(GET % 1)
    await wait_until(lambda: control.requests)
    second = await open_wire(first.worker)
    second.send(GET % 2)
    status, head, _ = await second.next()
    assert status == 503
    assert b"Retry-After: 1\r\n" in head
    assert first.worker.gate.http.refused["requests"] == 1
    control.answer = control.echo
    control.send(control.requests[0], control.echo(control.requests[0]))
    assert (await first.next())[0] == 200
    second.send(GET % 3)
    assert (await second.next())[0] == 200


async def test_idle_connections_make_room_and_busy_ones_do_not(open_wire, control, wait_until):
    idle = await open_wire()
    http = idle.worker.gate.http
    http.max_connections = 2
    idle.send(GET % 1)
    await idle.next()
    control.answer = lambda request: None
    busy = [await open_wire(idle.worker) for _ in range(3)]
    for n, wire in enumerate(busy[:2]):
        wire.send(GET % n)
        await wait_until(lambda n=n: len(control.requests) == 2 + n)
    assert await idle.rest() == b""
    busy[2].send(GET % 3)
    assert (await busy[2].next())[0] == 503
    assert http.refused["connections"] == 1
    for request in control.requests[1:]:
        control.send(request, control.echo(request))
    assert [(await wire.next())[0] for wire in busy[:2]] == [200, 200]


async def test_an_incomplete_later_head_or_body_times_out(open_wire, control):
    control.answer = lambda request: (
        b"HTTP/1.1 %d X\r\nContent-Length: 0\r\n\r\n" % request.refusal if request.refusal else control.echo(request)
    )
    head = await open_wire()
    body = await open_wire(head.worker)
    for wire in (head, body):
        wire.send(GET % 1)
        assert (await wire.next())[0] == 200
    # Only now: the first heads may take long.
    head.worker.janitor.head_timeout_s = head.worker.gate.http.body_timeout_s = 0.5
    head.send(b"GET /2 HTTP/1.1\r\nHo")
    body.send(b"POST /2 HTTP/1.1\r\nHost: h\r\nContent-Length: 10\r\n\r\nabc")
    assert (await head.next())[0] == 408
    assert (await body.next())[0] == 408
    assert await head.rest() == b""
    assert control.requests[-1].refusal == 408


async def test_a_later_head_or_body_that_comes_in_small_pieces_has_no_more_time(open_wire, control, monkeypatch):
    head = await open_wire()
    deadlines = []
    http_waits = head.worker.janitor.http_waits
    monkeypatch.setattr(head.worker.janitor, "http_waits", lambda *given: deadlines.append(given) or http_waits(*given))
    for start in (b"GET /2 HTTP/1.1\r\nX: ", b"POST /2 HTTP/1.1\r\nHost: h\r\nContent-Length: 1000\r\n\r\n"):
        wire = await open_wire(head.worker)
        wire.send(GET % 1)
        await wire.next()
        deadlines.clear()
        wire.send(start)
        for _ in range(20):
            wire.send(b"x")
            await asyncio.sleep(0.01)
        assert len(deadlines) == 1


async def test_a_head_or_body_that_began_in_the_packet_of_the_request_before_times_out(open_wire, control):
    control.answer = lambda request: (
        b"HTTP/1.1 %d X\r\nContent-Length: 0\r\n\r\n" % request.refusal if request.refusal else control.echo(request)
    )
    for part in (b"GET /2 HT", b"POST /2 HTTP/1.1\r\nHost: h\r\nContent-Length: 10\r\n\r\nabc"):
        wire = await open_wire()
        wire.worker.janitor.head_timeout_s = wire.worker.gate.http.body_timeout_s = 0.5
        wire.send(GET % 1 + part)
        assert [(await wire.next())[0] for _ in range(2)] == [200, 408]


async def test_a_body_announced_in_the_packet_of_the_request_before_is_asked_for(open_wire, control):
    wire = await open_wire()
    wire.send(GET % 1 + b"POST /2 HTTP/1.1\r\nHost: h\r\nExpect: 100-continue\r\nContent-Length: 2\r\n\r\n")
    assert [(await wire.next())[0] for _ in range(2)] == [200, 100]
    wire.send(b"ab")
    assert (await wire.next())[2] == b"POST /2 2 127.0.0.1"


async def test_an_idle_connection_is_closed_after_the_idle_timeout(open_wire, control):
    wire = await open_wire()
    http = wire.worker.gate.http
    http.idle_timeout_s = 30.0
    wire.send(GET % 1)
    await wire.next()
    # 25 seconds, and no more than 35.
    for _ in range(100):
        wire.worker.janitor.advance()
    assert http.connections
    for _ in range(40):
        wire.worker.janitor.advance()
    assert await wire.rest() == b""


async def test_a_client_that_closes_its_side_gets_the_answers_to_what_it_sent(open_wire, control, wait_until):
    control.answer = lambda request: None
    wire = await open_wire()
    wire.send(GET % 1 + GET % 2)
    wire.writer.write_eof()
    await wait_until(lambda: control.requests)
    await asyncio.sleep(0.05)
    control.answer = control.echo
    control.send(control.requests[0], control.echo(control.requests[0]))
    assert [(await wire.next())[2][:6] for _ in range(2)] == [b"GET /1", b"GET /2"]
    assert await wire.rest() == b""


@pytest.mark.parametrize("part", [b"GET / HT", b"POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 4\r\n\r\nab"])
async def test_a_client_that_closes_within_a_request_is_closed(open_wire, control, part, wait_until):
    wire = await open_wire()
    wire.send(GET % 1)
    await wire.next()
    wire.send(part)
    wire.writer.write_eof()
    assert await wire.rest() == b""
    await wait_until(lambda: not wire.worker.gate.http.connections)
    assert wire.worker.gate.http.reading_bytes == 0


async def test_a_client_that_left_gets_no_answer_and_leaves_nothing_behind(open_wire, control, wait_until):
    control.answer = lambda request: None
    wire = await open_wire()
    wire.send(GET % 1)
    await wait_until(lambda: control.requests)
    reset(wire.writer)
    http = wire.worker.gate.http
    await wait_until(lambda: not http.connections)
    assert not http.link.awaited
    control.send(control.requests[0], b"late")
    other = await open_wire(wire.worker)
    control.answer = control.echo
    other.send(GET % 2)
    assert (await other.next())[0] == 200


async def test_answers_to_a_client_that_does_not_read_are_bounded(open_wire, control, wait_until):
    control.answer = lambda request: b"HTTP/1.1 200 OK\r\nContent-Length: 500000\r\n\r\n" + b"x" * 500_000
    wire = await open_wire()
    wire.writer.transport.pause_reading()
    wire.send(GET % 1 * 80)
    http = wire.worker.gate.http
    await wait_until(lambda: any(each.state is State.UNREAD for each in http.connections.values()))
    asked = len(control.requests)
    assert asked < 60
    wire.writer.transport.resume_reading()
    for _ in range(80):
        assert len((await wire.next())[2]) == 500_000


async def test_answers_to_requests_that_come_one_by_one_are_bounded_too(open_wire, control, wait_until):
    control.answer = lambda request: b"HTTP/1.1 200 OK\r\nContent-Length: 500000\r\n\r\n" + b"x" * 500_000
    wire = await open_wire()
    wire.writer.transport.pause_reading()
    states = []

    def is_done():
        states[:] = [each.state for each in wire.worker.gate.http.connections.values()]
        return State.UNREAD in states or (len(control.requests) == sent and State.IDLE in states)

    sent = 0
    while State.UNREAD not in states:
        assert sent < 60
        wire.send(GET % sent)
        sent += 1
        await wait_until(is_done)
    assert len(control.requests) == sent - 1
    wire.writer.transport.resume_reading()
    for _ in range(sent):
        assert len((await wire.next())[2]) == 500_000
    wire.send(GET % sent)
    assert (await wire.next())[0] == 200


async def test_while_requests_wait_for_their_turn_hardly_more_is_read(open_wire, control):
    wire = await open_wire()
    http = wire.worker.gate.http
    waiting = []

    def answer(request):
        waiting.append(max(len(each._backlog) for each in http.connections.values()))
        return control.echo(request)

    control.answer = answer
    wire.send((b"GET /1 HTTP/1.1\r\nHost: h\r\nX: " + b"x" * 7000 + b"\r\n\r\n") * 400)
    for _ in range(400):
        assert (await wire.next())[0] == 200
    # One read, and what the parser takes at once.
    assert max(waiting) <= 65536 + 8192
    # Reading goes on after a body of which more than that waited.
    wire.send(b"GET /1 HTTP/1.1\r\nHost: h\r\nX: " + b"x" * 8000 + b"\r\n\r\n")
    wire.send(b"POST /2 HTTP/1.1\r\nHost: h\r\nContent-Length: 15000\r\n\r\n" + b"x" * 15000)
    for _ in range(2):
        assert (await wire.next())[0] == 200
    wire.send(GET % 3)
    assert (await wire.next())[2] == b"GET /3 0 127.0.0.1"


async def test_what_follows_an_answer_waits_until_other_answers_are_taken(open_wire, control, monkeypatch):
    taking, parsed = [], []
    readable, read = ControlLink._readable, PublicConnection._read

    def take(link):
        taking.append(link)
        readable(link)
        taking.pop()

    def note(http, data):
        parsed.append(bool(taking))
        read(http, data)

    monkeypatch.setattr(ControlLink, "_readable", take)
    monkeypatch.setattr(PublicConnection, "_read", note)
    wire = await open_wire()
    # More than the parser takes at once.
    wire.send(b"".join(GET % n for n in range(900)))
    for _ in range(900):
        assert (await wire.next())[0] == 200
    assert len(parsed) > 3
    assert not any(parsed)


async def test_a_client_that_closes_its_side_gets_the_answers_to_what_is_not_parsed_yet(open_wire, control):
    wire = await open_wire()
    wire.send(b"".join(GET % n for n in range(900)))
    wire.writer.write_eof()
    for n in range(900):
        assert (await wire.next())[2] == b"GET /%d 0 127.0.0.1" % n
    assert await wire.rest() == b""


async def test_a_later_upgrade_becomes_a_websocket_in_place(open_wire, control, wait_until):
    wire = await open_wire()
    wire.send(GET % 1 + UPGRADE)
    assert (await wire.next())[0] == 200
    async with asyncio.timeout(60):
        assert (await wire.reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 101 ")
        assert b"pusher:connection_established" in await wire.reader.read(300)
    assert not wire.worker.gate.http.connections
    other = await open_wire(wire.worker)
    other.send(GET % 1)
    await other.next()
    other.send(UPGRADE.replace(b"Version: 13", b"Version: 8"))
    assert (await other.next())[0] == 426


async def test_a_websocket_after_a_request_reads_on_though_bytes_came_before_its_answer(open_wire, control, wait_until):
    control.answer = lambda request: None
    wire = await open_wire()
    wire.send(GET % 1 + UPGRADE)
    await wait_until(lambda: control.requests)
    # A ping, masked with zeros. It comes while the request isn't answered.
    wire.send(b"\x89\x82\0\0\0\0hi")
    # Whoever comes later is answered later.
    other = await open_wire(wire.worker)
    other.send(b"GET / HTTP/1.1\r\nHost: h\r\n\r\n")
    assert (await other.next())[0] == 200
    control.send(control.requests[0], control.echo(control.requests[0]))
    async with asyncio.timeout(60):
        assert (await wire.reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200 ")
        assert await wire.reader.readexactly(18) == b"GET /1 0 127.0.0.1"
        assert (await wire.reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 101 ")
        await wire.reader.readuntil(b"\x8a\x02hi")
        wire.send(b"\x89\x82\0\0\0\0ho")
        await wire.reader.readuntil(b"\x8a\x02ho")


async def test_an_upgrade_to_another_protocol_is_answered_in_http_1_1(open_wire, control):
    wire = await open_wire()
    h2c = b"POST /h2c HTTP/1.1\r\nHost: h\r\nConnection: Upgrade\r\nUpgrade: h2c\r\nContent-Length: 4\r\n\r\n"
    for before in (b"", GET % 0):
        wire.send(before + h2c + b"GET " + GET % 1)
        if before:
            await wire.next()
        assert (await wire.next())[2] == b"POST /h2c 4 127.0.0.1"
        assert (await wire.next())[2] == b"GET /1 0 127.0.0.1"


async def test_an_upgrade_in_http_1_0_is_answered_as_http_1_0(open_wire, control):
    """It needs no Host, and closes unless it asks to stay."""
    wire = await open_wire()
    h2c = b"GET /h2c HTTP/1.0\r\nConnection: %bUpgrade\r\nUpgrade: h2c\r\n\r\n"
    wire.send(h2c % b"keep-alive, " + h2c % b"")
    for _ in range(2):
        assert (await wire.next())[2] == b"GET /h2c 0 127.0.0.1"
    assert await wire.rest() == b""
    assert [request.flags for request in control.requests] == [HTTP_1_0, HTTP_1_0 | CLOSES]


async def test_a_thousand_upgrades_to_another_protocol_in_one_packet_are_answered_in_turn(open_wire, control):
    wire = await open_wire()
    h2c = b"GET /%d HTTP/1.1\r\nHost: a\r\nConnection: upgrade\r\nUpgrade: a\r\n\r\n"
    wire.send(b"".join(h2c % n for n in range(900)))
    for n in range(900):
        assert (await wire.next())[2] == b"GET /%d 0 127.0.0.1" % n


async def test_connect_is_refused_with_405(open_wire, control):
    wire = await open_wire()
    wire.send(b"CONNECT example.com:443 HTTP/1.1\r\nHost: example.com:443\r\n\r\nGET / HTTP/1.1\r\nHost: h\r\n\r\n")
    assert (await wire.next())[0] == 405
    assert await wire.rest() == b""
    assert control.requests == []


async def test_when_control_dies_each_request_is_answered_once(open_wire, control, wait_until):
    control.answer = lambda request: None
    wires = [await open_wire()]
    wires += [await open_wire(wires[0].worker) for _ in range(3)]
    for n, wire in enumerate(wires):
        wire.send(GET % n)
    await wait_until(lambda: len(control.requests) == 4)
    control.kill()
    for wire in wires:
        status, head, body = await wire.next()
        assert status == 503
        assert b"Retry-After: 1\r\n" in head
        assert json.loads(body)["error"].startswith("not confirmed: ")
        # The connection lives on, and control is away.
        wire.send(GET % 9)
        status, _, body = await wire.next()
        assert (status, json.loads(body)["error"]) == (503, "the control plane isn't there; send the request again")
    wires[0].send(b"HEAD /healthz HTTP/1.1\r\nHost: h\r\n\r\n")
    assert (await wires[0].next(bodiless=True))[0] == 200
    wires[1].send(b"GET /healthz HTTP/1.1\r\nHost: h\r\n\r\n")
    assert (await wires[1].next())[2] == b'{"status":"ok"}'


async def test_when_control_dies_an_event_source_is_asked_to_come_again(open_wire, control, wait_until):
    """Whether control had its request or not. Any other status would end it for good."""
    control.answer = lambda request: None
    under_way = await open_wire()
    ask = b"GET /apps/1/channels/news/stream HTTP/1.1\r\nHost: h\r\nAccept: text/event-stream\r\n\r\n"
    under_way.send(ask)
    await wait_until(lambda: control.requests)
    control.kill()
    later = await open_wire(under_way.worker)
    later.send(ask)
    for wire in (under_way, later):
        status, head, body = await wire.next()
        assert (status, body.partition(b" ")[0]) == (200, b"retry:")
        assert b"\r\nContent-Type: text/event-stream\r\n" in head
        assert await wire.rest() == b""


@pytest.mark.parametrize("methods", [("HEAD", "GET"), ("GET", "HEAD")])
async def test_when_control_dies_an_answer_fits_its_own_request(open_wire, control, wait_until, methods):
    """A later, pipelined request with another method was read meanwhile."""
    control.answer = lambda request: None
    wire = await open_wire()
    wire.send("".join(f"{method} /a HTTP/1.1\r\nHost: h\r\n\r\n" for method in methods).encode())
    await wait_until(lambda: control.requests)
    control.kill()
    for method in methods:
        status, _, body = await wire.next(bodiless=method == "HEAD")
        assert status == 503
        assert bool(body) is (method == "GET")
    wire.send(b"GET /app/x HTTP/1.1\r\nHost: h\r\n\r\n")
    assert (await wire.next())[0] == 426
    assert await wire.rest() == b""


async def test_a_drain_closes_idle_connections_and_answers_the_others_first(open_wire, control, wait_until):
    idle = await open_wire()
    idle.send(GET % 1)
    await idle.next()
    control.answer = lambda request: None
    busy = await open_wire(idle.worker)
    busy.send(GET % 2)
    await wait_until(lambda: len(control.requests) == 2)
    idle.worker.drain()
    assert await idle.rest() == b""
    control.send(control.requests[1], control.echo(control.requests[1]))
    status, head, _ = await busy.next()
    assert status == 200
    assert b"\r\nConnection: close\r\n" in head
    assert await busy.rest() == b""
