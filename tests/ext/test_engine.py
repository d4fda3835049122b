"""The engine against RFC 6455: a slow parser, random chunks, hostile bytes, faults in every callback."""

import asyncio
import gc
import struct
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from redpoll import _engine, _frame
from redpoll._engine import CLOSED, CLOSING, HEAD, HTTP, OPEN
from redpoll._fanout import Audience, Flusher
from redpoll._http import parse_head, upgrade_fault

TEXT, BINARY, CONTINUATION, CLOSE, PING, PONG = 1, 2, 0, 8, 9, 10


def close_payload(code: int, reason: str = "") -> bytes:
    return struct.pack(">H", code) + reason.encode()


# -- the head ------------------------------------------------------------------------------------------------


def test_answers_the_upgrade_of_the_rfc(recorder, fake_transport, flusher, head):
    ws, transport = recorder(flusher), fake_transport()
    ws.connection_made(transport)
    assert ws.state == HEAD
    ws.hear(head)
    assert ws.state == OPEN
    flusher.flush()
    answer = transport.take()
    assert answer.startswith(b"HTTP/1.1 101 ")
    assert b"\r\nSec-WebSocket-Accept: s3pPLMBiTxaQ9kYGzzhZRbK+xOo=\r\n" in answer
    ws.connection_lost(None)


def test_a_head_in_single_bytes_is_one_head(recorder, fake_transport, flusher, head):
    heads = []
    ws, transport = recorder(flusher), fake_transport()
    ws.on["head"] = heads.append
    ws.connection_made(transport)
    for i in range(len(head)):
        assert heads == []
        ws.hear(head[i : i + 1])
    assert heads == [head]
    ws.connection_lost(None)


def test_frames_after_the_head_wait_until_the_callback_returns(recorder, fake_transport, flusher, head, reference):
    ws, transport = recorder(flusher), fake_transport()

    def accept(_head):
        ws.accept(b"dGhlIHNhbXBsZSBub25jZQ==")
        assert ws.heard == []

    ws.on["head"] = accept
    ws.connection_made(transport)
    ws.hear(head + reference.client_frame(TEXT, b"early") + reference.client_frame(TEXT, b"half")[:-1])
    assert ws.heard == [("text", b"early")]
    ws.hear(reference.client_frame(TEXT, b"half")[-1:])
    assert ws.heard == [("text", b"early"), ("text", b"half")]
    ws.connection_lost(None)


def test_nothing_comes_before_the_answer_to_the_upgrade(recorder, fake_transport, flusher, head, reference):
    ws, transport = recorder(flusher), fake_transport()
    ws.connection_made(transport)
    ws.hear(head + reference.client_frame(PING, b"early"))
    flusher.flush()
    assert transport.take().startswith(b"HTTP/1.1 101 ")
    ws.connection_lost(None)


def test_the_first_frame_leaves_with_the_answer_and_before_an_early_pong(
    recorder, fake_transport, flusher, head, reference
):
    ws, transport = recorder(flusher), fake_transport()

    def welcome(_head):
        ws.accept(b"dGhlIHNhbXBsZSBub25jZQ==")
        assert ws.send_first(_frame.text(b"welcome"))

    ws.on["head"] = welcome
    ws.connection_made(transport)
    ws.hear(head + reference.client_frame(PING, b"early"))
    before = flusher.writes
    flusher.flush()
    assert flusher.writes - before == 1
    answer, _, frames = transport.take().partition(b"\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 101 ")
    assert reference.server_frames(frames) == [(TEXT, b"welcome"), (PONG, b"early")]
    ws.connection_lost(None)


async def test_a_head_may_be_accepted_later(recorder, fake_transport, flusher, head, reference):
    ws, transport = recorder(flusher), fake_transport()
    ws.on["head"] = lambda _head: None
    ws.connection_made(transport)
    ws.hear(head + reference.client_frame(TEXT, b"early"))
    # While the head isn't answered, further bytes stay in the kernel.
    assert not transport.reading
    ws.accept(b"dGhlIHNhbXBsZSBub25jZQ==")
    assert ws.heard == []
    await asyncio.sleep(0)
    assert transport.reading
    assert ws.heard == [("text", b"early")]
    ws.connection_lost(None)


def test_a_close_right_after_the_accept_is_answered(recorder, fake_transport, flusher, head, reference):
    ws, transport = recorder(flusher), fake_transport()

    def refuse(_head):
        ws.accept(b"dGhlIHNhbXBsZSBub25jZQ==")
        ws.close(4001, "unknown key")

    ws.on["head"] = refuse
    ws.connection_made(transport)
    ws.hear(head + reference.client_frame(TEXT, b"early"))
    flusher.flush()
    _, _, frames = transport.take().partition(b"\r\n\r\n")
    assert reference.server_frames(frames) == [(CLOSE, close_payload(4001, "unknown key"))]
    ws.hear(reference.client_frame(CLOSE, close_payload(4001)))
    assert ws.heard == [("closed", 4001, "")]
    ws.connection_lost(None)


@pytest.mark.parametrize("size", [16_385, 1_000_000])
def test_a_head_above_16_kib_is_too_large(recorder, fake_transport, flusher, size):
    ws, transport = recorder(flusher), fake_transport()
    ws.on["head_too_large"] = lambda: ws.answer(b"HTTP/1.1 431 Too Large\r\n\r\n")
    ws.connection_made(transport)
    ws.hear(b"GET / HTTP/1.1\r\nX: " + b"x" * size)
    flusher.flush()
    assert transport.take() == b"HTTP/1.1 431 Too Large\r\n\r\n"
    assert transport.eof_written
    assert ws.buffered == 0
    ws.connection_lost(None)
    assert ws.heard == [("gone",)]


def test_a_head_of_just_16_kib_is_not(recorder, fake_transport, flusher, head):
    heads = []
    ws, transport = recorder(flusher), fake_transport()
    ws.on["head"] = heads.append
    ws.connection_made(transport)
    start, end = head[:-2] + b"X: ", b"\r\n\r\n"
    largest = start + b"x" * (16_384 - len(start) - len(end)) + end
    ws.hear(largest)
    assert heads == [largest]
    ws.connection_lost(None)


def test_a_connection_lost_before_its_upgrade_is_reported_as_gone_not_closed(recorder, fake_transport, flusher):
    ws, transport = recorder(flusher), fake_transport()
    ws.connection_made(transport)
    ws.hear(b"GET / HT")
    assert ws.buffered == 8
    ws.connection_lost(None)
    assert ws.heard == [("gone",)]
    assert ws.state == CLOSED
    assert ws.buffered == 0


def test_nothing_is_written_after_an_answer(recorder, fake_transport, flusher, head, reference):
    ws, transport = recorder(flusher), fake_transport()
    ws.on["head"] = lambda _head: ws.answer(b"HTTP/1.1 404 Not Found\r\n\r\n")
    ws.connection_made(transport)
    ws.hear(head + reference.client_frame(TEXT, b"x"))
    assert ws.state == CLOSING
    assert ws.send(b"more") is False
    flusher.flush()
    assert transport.take() == b"HTTP/1.1 404 Not Found\r\n\r\n"
    assert transport.eof_written
    # Bytes are read and dropped, so that no reset overtakes the answer, but only up to a limit.
    ws.hear(b"x" * 65536)
    assert not transport.aborted
    ws.hear(b"x" * 3_000_000)
    assert transport.aborted
    ws.connection_lost(None)
    assert ws.heard == [("gone",)]


def test_a_request_that_came_with_the_end_of_the_stream_is_answered(recorder, fake_transport, flusher, head):
    ws, transport = recorder(flusher), fake_transport()
    ws.on["head"] = lambda _head: ws.answer(b"HTTP/1.1 404 Not Found\r\n\r\n")
    ws.connection_made(transport)
    ws.hear(head)
    # uvloop closes the transport right after this, before any flush.
    assert ws.eof_received() is False
    assert transport.take() == b"HTTP/1.1 404 Not Found\r\n\r\n"
    ws.connection_lost(None)


def test_a_connection_aborted_on_arrival_parses_no_head(recorder, fake_transport, flusher, head):
    ws, transport = recorder(flusher), fake_transport()
    heads = []
    ws.on["head"] = heads.append
    ws.on["connected"] = ws.abort
    ws.feed(head)
    ws.connection_made(transport)
    assert transport.aborted
    assert heads == []
    ws.connection_lost(None)
    ws.on.clear()
    assert ws.heard == [("gone",)]


def test_an_http_connection_answers_again_and_again_and_may_become_a_websocket(
    recorder, fake_transport, flusher, head, reference
):
    ws, transport = recorder(flusher), fake_transport()
    received = []
    ws.on["head"] = lambda _head: received.append(ws.serve_http())
    ws.on["data"] = received.append
    ws.connection_made(transport)
    ws.hear(b"GET / HTTP/1.1\r\n\r\nGET /more")
    assert ws.state == HTTP
    ws.hear(b" HTTP/1.1\r\n\r\n")
    assert received == [b"GET / HTTP/1.1\r\n\r\nGET /more", b" HTTP/1.1\r\n\r\n"]
    ws.write_http(b"first")
    ws.write_http(b"x" * (flusher.max_unsent_bytes + 1))
    flusher.flush()
    assert transport.take() == b"first" + b"x" * (flusher.max_unsent_bytes + 1)
    del ws.on["head"]
    ws.upgrade(head + reference.client_frame(TEXT, b"hello"))
    flusher.flush()
    assert transport.take().startswith(b"HTTP/1.1 101 ")
    assert ws.state == OPEN
    assert ws.heard == [("text", b"hello")]
    with pytest.raises(RuntimeError):
        ws.upgrade(head)
    ws.write_http(b"nothing")
    flusher.flush()
    assert transport.take() == b""
    ws.connection_lost(None)


def test_an_upgrade_of_a_client_that_has_gone_does_nothing(recorder, fake_transport, flusher, head):
    """It was pipelined after a request whose answer came after the reset."""
    ws, transport = recorder(flusher), fake_transport()
    ws.on["head"] = lambda _head: ws.serve_http()
    ws.connection_made(transport)
    ws.hear(b"GET / HTTP/1.1\r\n\r\n")
    ws.connection_lost(None)
    heard = [*ws.heard]
    ws.upgrade(head)
    assert (ws.heard, transport.take()) == (heard, b"")


def test_an_http_connection_ends_after_its_last_answer(recorder, fake_transport, flusher):
    ws, transport = recorder(flusher), fake_transport()
    ws.on["head"] = lambda _head: ws.serve_http()
    ws.connection_made(transport)
    ws.hear(b"GET / HTTP/1.1\r\n\r\n")
    ws.end_http(b"last")
    assert ws.state == CLOSING
    flusher.flush()
    assert transport.take() == b"last"
    ws.end_http(b"again")
    flusher.flush()
    assert transport.take() == b""
    ws.connection_lost(None)
    assert ("gone",) in ws.heard


POST = b"POST /a HTTP/1.1\r\nHost: h\r\nContent-Length: 4\r\n\r\nab"


def test_a_connection_that_begins_with_a_post_may_be_taken_at_once(recorder, fake_transport, flusher):
    ws, transport = recorder(flusher), fake_transport()
    received = []
    ws.on["post"] = lambda data: received.append(data) or True
    ws.on["data"] = received.append
    ws.connection_made(transport)
    ws.hear(POST)
    assert (ws.state, received, ws.buffered) == (HTTP, [POST], 0)
    ws.hear(b"cd")
    ws.end_http(b"answer")
    flusher.flush()
    assert (received, transport.take()) == ([POST, b"cd"], b"answer")
    ws.connection_lost(None)


def test_any_other_beginning_and_a_post_that_is_not_taken_are_heads(recorder, fake_transport, flusher):
    for pieces, taken in (
        ([POST], False),
        ([POST[:30], POST[30:]], True),
        ([b"GET / HTTP/1.1\r\n\r\n"], True),
        ([b"PO", b"ST / HTTP/1.1\r\n\r\n"], True),
    ):
        ws, transport = recorder(flusher), fake_transport()
        heads = []
        ws.on["post"] = lambda data, taken=taken: taken
        ws.on["head"] = heads.append
        ws.connection_made(transport)
        for piece in pieces:
            ws.hear(piece)
        assert heads == [b"".join(pieces).removesuffix(b"ab")]
        ws.answer(b"answer")
        ws.connection_lost(None)


async def test_a_post_whose_callback_raises_closes_its_connection(recorder, fake_transport, flusher):
    ws, transport = recorder(flusher), fake_transport()
    reported = []
    asyncio.get_running_loop().set_exception_handler(lambda _loop, context: reported.append(context))
    ws.on["post"] = lambda data: 1 / 0
    ws.connection_made(transport)
    before = _engine.counters()["callback_errors"]
    ws.hear(POST)
    flusher.flush()
    assert _engine.counters()["callback_errors"] == before + 1
    assert transport.aborted
    assert len(reported) == 1
    ws.connection_lost(None)


def test_bytes_fed_before_the_transport_are_parsed_first(recorder, fake_transport, flusher, head, reference):
    ws, transport = recorder(flusher), fake_transport()
    ws.feed(head[:50])
    ws.feed(head[50:] + reference.client_frame(TEXT, b"fed"))
    ws.connection_made(transport)
    assert ws.heard == [("text", b"fed")]
    ws.connection_lost(None)


async def test_reading_from_a_client_can_be_paused(served, reference, wait_until):
    loop = asyncio.get_running_loop()
    client = await served.client()
    [connection] = served.connections
    connection.pause_reading()
    await loop.sock_sendall(client, reference.client_frame(TEXT, b"x"))
    # After another client's round trip, it would have been read.
    other = await served.client()
    await loop.sock_sendall(other, reference.client_frame(PING))
    await served.read(other, 2)
    assert connection.heard == []
    connection.resume_reading()
    await wait_until(lambda: connection.heard == [("text", b"x")])


async def test_peer_address(served):
    client = await served.client()
    assert served.connections[0].peer == client.getsockname()


# -- frames, against the slow parser -------------------------------------------------------------------------

PAYLOADS = st.one_of(
    st.binary(max_size=40),
    st.text(max_size=20).map(str.encode),
    st.text(max_size=3).map(lambda text: text.encode() * 70),
    st.sampled_from(
        [b"\xed\xa0\x80", b"\xf4\x90\x80\x80", b"\xc0\xaf", b"\xe2\x82", b"x" * 125, b"y" * 126, b"z" * 400]
    ),
    st.builds(
        close_payload,
        st.sampled_from([0, 999, 1000, 1004, 1005, 1015, 2999, 3000, 4999, 5000]),
        st.text(max_size=4),
    ),
)


@st.composite
def streams(draw) -> bytes:
    """Lists of frames: most are valid, some are wrong in one way, and sometimes a few bytes are damaged."""
    from_reference = streams.reference
    parts = []
    for _ in range(draw(st.integers(1, 7))):
        opcode = draw(st.sampled_from([TEXT, TEXT, TEXT, CONTINUATION, CONTINUATION, BINARY, PING, PONG, CLOSE, 3, 11]))
        payload = draw(PAYLOADS)
        odd = draw(st.integers(0, 30))
        parts.append(
            from_reference.client_frame(
                opcode,
                payload,
                fin=draw(st.booleans()) if opcode < 8 else odd != 1,
                rsv=4 if odd == 2 else 0,
                mask=None if odd == 3 else draw(st.binary(min_size=4, max_size=4)),
                length_bytes=8 if odd == 4 else None,
                claim=1 << 62 if odd == 5 else None,
            )
            if odd != 5
            else from_reference.client_frame(opcode, payload, length_bytes=8, claim=1 << 62)
        )
    stream = bytearray(b"".join(parts))
    if draw(st.integers(0, 4)) == 0:
        stream[draw(st.integers(0, len(stream) - 1))] = draw(st.integers(0, 255))
    return bytes(stream[: draw(st.integers(1, len(stream)))]) if draw(st.booleans()) else bytes(stream)


@pytest.fixture(scope="session", autouse=True)
def _streams_know_the_reference(reference):
    streams.reference = reference


def outcome(ws, transport, flusher, reference) -> list[tuple]:
    """What the engine received in a stream, in the form of reference.parse."""
    flusher.flush()
    events = [event for event in ws.heard if event[0] != "closed"]
    frames = reference.server_frames(transport.take())
    pongs = [("ping", payload) for opcode, payload in frames if opcode == PONG]
    ends = [event for event in ws.heard if event[0] == "closed"]
    closes = [payload for opcode, payload in frames if opcode == CLOSE]
    assert len(ends) <= 1
    assert len(closes) == len(ends)
    assert transport.eof_written == bool(ends)
    if ends:
        [(_, code, reason)] = ends
        assert [frame[0] for frame in frames][-1] == CLOSE
        if code in (1002, 1007, 1009) and reason in ("protocol error", "invalid UTF-8", "message too big"):
            ends = [("fail", code)]
            assert closes == [close_payload(code, reason)]
        else:
            ends = [("close", code, reason)]
            assert closes == [b"" if code == 1005 else close_payload(code)]
    return events + pongs + ends


def expected_outcome(reference, stream: bytes, limit: int) -> list[tuple]:
    events = reference.parse(stream, limit)
    messages = [event for event in events if event[0] in ("text", "binary")]
    return messages + [e for e in events if e[0] == "ping"] + [e for e in events if e[0] in ("close", "fail")]


@settings(max_examples=600, deadline=None)
@given(data=st.data())
def test_agrees_with_the_slow_parser_in_any_chunks(recorder, fake_transport, reference, head, data):
    stream = data.draw(streams())
    limit = data.draw(st.sampled_from([100, 300, 65536]))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=8)))
    flusher = Flusher(lambda: None)
    ws, transport = recorder(flusher, limit), fake_transport()
    transport.protocol = ws
    ws.connection_made(transport)
    ws.hear(head)
    flusher.flush()
    transport.take()
    for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        if end > start:
            ws.hear(stream[start:end])
    assert outcome(ws, transport, flusher, reference) == expected_outcome(reference, stream, limit)
    assert ws.buffered <= limit + 14
    ws.connection_lost(None)
    assert sum(event[0] == "closed" for event in ws.heard) == 1


@settings(max_examples=150, deadline=None)
@given(
    messages=st.lists(st.tuples(st.text(max_size=80), st.integers(1, 4)), min_size=1, max_size=8),
    chunk=st.integers(1, 40),
    pings=st.booleans(),
)
def test_valid_messages_arrive_whole_however_they_are_cut(
    recorder, fake_transport, reference, head, messages, chunk, pings
):
    flusher = Flusher(lambda: None)
    ws, transport = recorder(flusher), fake_transport()
    transport.protocol = ws
    ws.connection_made(transport)
    ws.hear(head)
    stream = b""
    for text, parts in messages:
        payload = text.encode()
        step = len(payload) // parts + 1
        pieces = [payload[i : i + step] for i in range(0, len(payload), step)] or [b""]
        for i, piece in enumerate(pieces):
            stream += reference.client_frame(TEXT if i == 0 else CONTINUATION, piece, fin=i == len(pieces) - 1)
            if pings:
                stream += reference.client_frame(PING, b"p")
    for start in range(0, len(stream), chunk):
        ws.hear(stream[start : start + chunk])
    assert ws.heard == [("text", text.encode()) for text, _ in messages]
    assert ws.buffered == 0
    ws.connection_lost(None)
    flusher.flush()


def test_utf8_is_checked_as_python_does(connect, reference):
    """Each lead byte with each second byte, and the edges of the longer forms, whole and cut in two."""
    tails = [b"", b"\x80", b"\x80\x80", b"\xbf\xbf", b"\x7f\x80", b"\x80\xc0"]
    samples = [bytes([a, b]) + tail for a in range(0xC0, 0x100) for b in range(0x70, 0x100, 5) for tail in tails]
    samples += [bytes([a, b]) + b"\x80\x80" for a in (0xE0, 0xED, 0xF0, 0xF4) for b in range(256)]
    accepted = 0
    ws, transport = connect()
    for sample in samples:
        ws.hear(reference.client_frame(TEXT, sample[:1], fin=False) + reference.client_frame(CONTINUATION, sample[1:]))
        if reference.is_utf8(sample):
            assert ws.heard == [("text", sample)], sample
            accepted += 1
            ws.heard.clear()
        else:
            assert ws.heard == [("closed", 1007, "invalid UTF-8")], sample
            ws.connection_lost(None)
            ws, transport = connect()
    assert accepted > 500
    assert not transport.aborted


@pytest.mark.parametrize("payload", [b"\xce\xba\xe1\xbd\xb9\xf4\x90", b"ascii only, then \xff", b"\xed\xaa"])
def test_a_text_that_cannot_become_valid_fails_at_once(connect, reference, payload):
    ws, _ = connect()
    frame = reference.client_frame(TEXT, payload + b"x" * 100)
    ws.hear(frame[: 6 + len(payload)])
    assert ws.heard == [("closed", 1007, "invalid UTF-8")]


def test_a_message_of_the_limit_is_taken_and_one_more_byte_is_not(connect, reference):
    ws, _ = connect(1000)
    ws.hear(reference.client_frame(TEXT, b"x" * 1000))
    assert ws.heard == [("text", b"x" * 1000)]
    ws.hear(reference.client_frame(TEXT, b"x" * 1001)[:8])
    assert ws.heard[1:] == [("closed", 1009, "message too big")]


# -- hostile input (deploy/failures.md "Hostile input") ------------------------------------------------------


@pytest.mark.parametrize(
    ("what", "code"),
    [
        ({"opcode": TEXT, "rsv": 1}, 1002),
        ({"opcode": TEXT, "rsv": 4}, 1002),
        ({"opcode": 3}, 1002),
        ({"opcode": 15}, 1002),
        ({"opcode": TEXT, "payload": b"x", "mask": None}, 1002),
        ({"opcode": PING, "payload": b"x" * 126}, 1002),
        ({"opcode": PING, "fin": False}, 1002),
        ({"opcode": CONTINUATION}, 1002),
        ({"opcode": TEXT, "payload": b"x", "length_bytes": 2}, 1002),
        ({"opcode": TEXT, "payload": b"x" * 126, "length_bytes": 8}, 1002),
        ({"opcode": TEXT, "length_bytes": 8, "claim": 1 << 63}, 1002),
        ({"opcode": TEXT, "length_bytes": 8, "claim": 1 << 62}, 1009),
        ({"opcode": TEXT, "length_bytes": 8, "claim": 1 << 32}, 1009),
        ({"opcode": BINARY, "payload": b"x" * 65537}, 1009),
        ({"opcode": TEXT, "payload": b"\xff"}, 1007),
        ({"opcode": CLOSE, "payload": b"x"}, 1002),
        ({"opcode": CLOSE, "payload": close_payload(1005)}, 1002),
        ({"opcode": CLOSE, "payload": close_payload(1000) + b"\xff"}, 1007),
    ],
    ids=lambda value: str(value)[:60],
)
def test_violations_get_their_close_code_and_the_connection_ends(connect, reference, flusher, what, code):
    ws, transport = connect()
    opcode = what.pop("opcode")
    ws.hear(reference.client_frame(opcode, what.pop("payload", b""), **what))
    flusher.flush()
    [(opcode, payload)] = reference.server_frames(transport.take())
    assert opcode == CLOSE
    assert payload[:2] == struct.pack(">H", code)
    assert transport.eof_written
    assert ws.heard[0][:2] == ("closed", code)
    assert ws.buffered == 0
    # Nothing that follows is parsed.
    ws.hear(reference.client_frame(TEXT, b"more"))
    assert len(ws.heard) == 1


def test_a_claimed_size_allocates_nothing(connect, reference):
    ws, _ = connect(1 << 30)
    ws.hear(reference.client_frame(TEXT, b"x" * 10, length_bytes=8, claim=1 << 29))
    assert ws.buffered < 100


def test_endless_fragments_are_limited_by_their_sum(connect, reference):
    ws, _ = connect(10_000)
    ws.hear(reference.client_frame(TEXT, b"x" * 100, fin=False))
    sent = 100
    while not ws.heard:
        ws.hear(reference.client_frame(CONTINUATION, b"x" * 100, fin=False))
        sent += 100
        assert ws.buffered <= 10_000
    assert sent == 10_100
    assert ws.heard == [("closed", 1009, "message too big")]


def test_empty_fragments_cost_nothing(connect, reference):
    ws, _ = connect()
    ws.hear(reference.client_frame(TEXT, b"x", fin=False))
    ws.hear(reference.client_frame(CONTINUATION, b"", fin=False) * 50_000)
    assert ws.buffered == 1
    ws.hear(reference.client_frame(CONTINUATION, b"y"))
    assert ws.heard == [("text", b"xy")]


async def test_one_frame_of_32_mib_is_refused_at_its_header(served, reference):
    client = await served.client()
    frame = reference.client_frame(TEXT, b"", length_bytes=8, claim=32 << 20) + b"x" * (1 << 20)
    sending = asyncio.ensure_future(asyncio.get_running_loop().sock_sendall(client, frame))
    answer = await served.read_to_end(client)
    await asyncio.wait([sending])
    assert reference.server_frames(answer) == [(CLOSE, close_payload(1009, "message too big"))]
    assert served.connections[0].heard == [("closed", 1009, "message too big")]


async def test_a_flood_of_pings_is_answered_in_full_to_a_client_that_reads(served, reference):
    client = await served.client()
    pings = reference.client_frame(PING, b"p") * 100_000
    sending = asyncio.ensure_future(asyncio.get_running_loop().sock_sendall(client, pings))
    pongs = await served.read(client, 100_000 * 3)
    await sending
    assert pongs == _frame.pong(b"p") * 100_000
    assert served.flusher.overruns == 0


async def test_a_flood_of_messages_does_not_starve_other_clients(served, reference):
    loop = asyncio.get_running_loop()
    client = await served.client()
    [connection] = served.connections
    heard, most_in_a_turn, turns = 0, 0, 0

    def count(_message):
        nonlocal heard
        heard += 1

    def turn():
        nonlocal most_in_a_turn, turns, before
        most_in_a_turn = max(most_in_a_turn, heard - before)
        before = heard
        turns += 1
        if heard < 200_000:
            loop.call_soon(turn)

    before = 0
    connection.on["text"] = count
    frame = reference.client_frame(TEXT, b"x" * 10)
    loop.call_soon(turn)
    await loop.sock_sendall(client, frame * 200_000)
    while heard < 200_000:
        await asyncio.sleep(0)
    # One read of 64 KiB a turn, not the 32 that libuv would make of it.
    assert most_in_a_turn <= 65_536 // len(frame) + 1
    assert turns >= 48


async def test_a_flood_of_pings_from_a_client_that_does_not_read_is_bounded(served, reference, wait_until):
    client = await served.client(receive_buffer_bytes=4096)
    served.flusher.max_unsent_bytes = 200_000
    [connection] = served.connections
    pings = reference.client_frame(PING, b"x" * 125) * 5000

    async def flood():
        while True:
            await asyncio.get_running_loop().sock_sendall(client, pings)

    most = 0

    def is_closed() -> bool:
        nonlocal most
        most = max(most, connection.unsent_bytes)
        return bool(connection.heard)

    flooding = asyncio.ensure_future(flood())
    await wait_until(is_closed)
    flooding.cancel()
    await asyncio.wait([flooding])
    assert connection.heard == [("closed", 4100, "slow consumer")]
    assert most <= 200_000
    assert served.flusher.overruns == 1


# -- pings and closes ----------------------------------------------------------------------------------------


def test_a_pong_is_sent_before_queued_frames(connect, reference, flusher):
    ws, transport = connect()
    ws.send(_frame.text(b"later"))
    ws.hear(reference.client_frame(PING, b"now"))
    flusher.flush()
    assert reference.server_frames(transport.take()) == [(PONG, b"now"), (TEXT, b"later")]


def test_a_pong_only_updates_the_tick_of_the_last_bytes(connect, reference, flusher):
    ws, transport = connect()
    _engine.set_tick(77)
    ws.hear(reference.client_frame(PONG, b"unasked"))
    assert ws.heard_tick == 77
    assert ws.heard == []
    assert not flusher.flush()
    assert transport.take() == b""
    _engine.set_tick(0)


@pytest.mark.parametrize("code", [1000, 1001, 1003, 1007, 1011, 1014, 3000, 4999])
def test_the_peers_close_is_echoed_and_the_stream_ends(connect, reference, flusher, code):
    ws, transport = connect()
    closings = []
    ws.on["closing"] = lambda: closings.append(ws.state)
    ws.hear(reference.client_frame(CLOSE, close_payload(code, "bye")) + reference.client_frame(TEXT, b"more"))
    assert ws.heard == [("closed", code, "bye")]
    assert closings == [CLOSING]
    flusher.flush()
    assert reference.server_frames(transport.take()) == [(CLOSE, close_payload(code))]
    assert transport.eof_written
    ws.connection_lost(None)
    assert ws.state == CLOSED
    assert len(ws.heard) == 1


def test_our_close_follows_queued_frames_and_waits_for_the_peers(connect, reference, flusher):
    ws, transport = connect()
    ws.send(_frame.text(b"last"))
    ws.close(4200, "going")
    ws.close(4100, "again")
    assert ws.send(_frame.text(b"late")) is False
    assert ws.send_urgent(_frame.pong(b"")) is False
    flusher.flush()
    assert reference.server_frames(transport.take()) == [
        (TEXT, b"last"),
        (CLOSE, close_payload(4200, "going")),
    ]
    assert ws.heard == []
    assert not transport.eof_written
    # Frames that were under way are ignored; the Close is handled.
    ws.hear(reference.client_frame(TEXT, b"crossed") + reference.client_frame(PING, b"x"))
    ws.hear(reference.client_frame(TEXT, b"half", fin=False) + reference.client_frame(CLOSE, close_payload(4200)))
    assert ws.heard == [("closed", 4200, "")]
    flusher.flush()
    assert transport.take() == b""
    assert transport.eof_written


def test_a_message_cut_by_our_close_is_freed(connect, reference):
    ws, _ = connect()
    ws.hear(reference.client_frame(TEXT, b"x" * 50, fin=False))
    ws.close()
    ws.hear(reference.client_frame(CONTINUATION, b"x" * 500, fin=False) * 20)
    assert ws.buffered < 100
    ws.hear(reference.client_frame(CLOSE, close_payload(1000)))
    assert ws.buffered == 0


@given(st.lists(st.sampled_from(["peer", "close", "abort", "fault", "eof", "lost", "slow", "flush"]), max_size=8))
def test_closed_is_called_once_in_any_case(recorder, fake_transport, reference, head, steps):
    flusher = Flusher(lambda: None, max_unsent_bytes=5000)
    ws, transport = recorder(flusher), fake_transport()
    transport.protocol = ws
    ws.connection_made(transport)
    ws.hear(head)
    flusher.flush()
    lost = False
    for step in steps:
        if lost:
            break
        if step == "peer":
            ws.hear(reference.client_frame(CLOSE, close_payload(1001)))
        elif step == "close":
            ws.close(4200)
        elif step == "abort":
            ws.abort()
        elif step == "fault":
            ws.hear(b"\xff\xff\xff")
        elif step == "eof":
            assert ws.eof_received() is False
        elif step == "slow":
            transport.full = True
            ws.send(b"x")
            flusher.flush()
            ws.send(b"x" * 6000)
        elif step == "flush":
            flusher.flush()
        else:
            ws.connection_lost(None)
            lost = True
    if not lost:
        ws.connection_lost(None)
    flusher.flush()
    assert [event[0] for event in ws.heard] == ["closed"]
    assert ws.state == CLOSED
    assert ws.unsent_bytes == 0
    assert ws.buffered == 0


# -- slow consumers (deploy/failures.md "Slow clients") ------------------------------------------------------


async def test_a_client_that_does_not_read_is_closed_with_4100_and_no_other_is_affected(served, reference, wait_until):
    slow = await served.client(receive_buffer_bytes=4096)
    quick = await served.client()
    audience = Audience(served.flusher)
    for connection in served.connections:
        audience.add(connection)
    frame = _frame.text(b"x" * 10_000)
    received, most, posted = 0, 0, 0
    while not served.connections[0].heard:
        audience.post(frame)
        posted += 1
        assert posted < 5000
        most = max(most, served.connections[0].unsent_bytes)
        received += len(await served.read(quick, len(frame)))
    assert served.connections[0].heard == [("closed", 4100, "slow consumer")]
    assert most <= served.flusher.max_unsent_bytes
    assert served.flusher.overruns == 1
    assert received == posted * len(frame)
    assert served.connections[1].heard == []
    # When it reads after all: whole frames, then the reason, then the end.
    frames = reference.server_frames(await served.read_to_end(slow))
    assert frames[-1] == (CLOSE, close_payload(4100, "slow consumer"))
    assert all(frame == (TEXT, b"x" * 10_000) for frame in frames[:-1])
    assert 0 < len(frames) < posted
    for connection in list(audience):
        audience.discard(connection)


# -- faults of ours ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["connected", "head", "text", "binary", "closing", "closed"])
async def test_a_fault_in_a_callback_closes_that_one_socket_and_is_counted(served, reference, wait_until, head, where):
    loop = asyncio.get_running_loop()
    reported = []
    loop.set_exception_handler(lambda _loop, context: reported.append(context))
    other = await served.client()
    before = _engine.counters()["callback_errors"]

    def fault(*_arguments):
        raise RuntimeError(f"injected into {where}")

    served.prepare = lambda connection: connection.on.update({where: fault})
    client = await served.client(upgrade=False)
    await wait_until(lambda: len(served.connections) == 2)
    connection = served.connections[1]
    if where != "connected":
        await loop.sock_sendall(client, head)
    if where not in ("connected", "head"):
        await loop.sock_sendall(client, reference.client_frame(BINARY if where == "binary" else TEXT, b"x"))
        await loop.sock_sendall(client, reference.client_frame(CLOSE, close_payload(1000)))
    answer = await served.read_to_end(client)
    client.close()
    await wait_until(lambda: served.lost == 1)
    if where in ("text", "binary"):
        _, _, frames = answer.partition(b"\r\n\r\n")
        assert reference.server_frames(frames) == [(CLOSE, close_payload(1011, "internal error"))]
        assert connection.heard[-1] == ("closed", 1011, "internal error")
    assert _engine.counters()["callback_errors"] == before + 1
    assert [str(context["exception"]) for context in reported] == [f"injected into {where}"]
    assert reported[0]["protocol"] is connection
    reported.clear()
    # The other one is served as before.
    await loop.sock_sendall(other, reference.client_frame(TEXT, b"still here") + reference.client_frame(PING, b"p"))
    assert await served.read(other, 3) == _frame.pong(b"p")
    assert served.connections[0].heard == [("text", b"still here")]


def test_a_fault_in_gone_is_counted_and_the_descriptor_is_reported_closed(recorder, fake_transport, flusher):
    before = _engine.counters()["callback_errors"]
    released = []

    async def lose():
        ws = recorder(flusher)
        ws.on["gone"] = lambda: 1 / 0
        ws.on["released"] = lambda: released.append(True)
        ws.connection_made(fake_transport())
        asyncio.get_running_loop().set_exception_handler(lambda _loop, _context: None)
        ws.connection_lost(None)
        ws.on.clear()

    asyncio.run(lose())
    assert _engine.counters()["callback_errors"] == before + 1
    assert len(released) == 1


# -- callbacks that do something -----------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["close", "abort"])
def test_a_callback_may_end_the_connection_it_is_called_for(connect, reference, flusher, what):
    ws, _ = connect()
    heard = []

    def end(message):
        heard.append(message)
        getattr(ws, what)()

    ws.on["text"] = end
    ws.hear(
        reference.client_frame(TEXT, b"1") + reference.client_frame(TEXT, b"2") + reference.client_frame(TEXT, b"3")
    )
    ws.hear(reference.client_frame(TEXT, b"4", fin=False))
    flusher.flush()
    assert heard == [b"1"]


def test_callbacks_may_change_audiences_and_other_connections_while_a_flush_runs(connect, flusher):
    pairs = [connect() for _ in range(6)]
    audience = Audience(flusher)
    everyone = [ws for ws, _ in pairs]
    for ws in everyone:
        audience.add(ws)
    flusher.max_unsent_bytes = 500

    def let_go(code, reason):
        for ws in everyone[1:4]:
            audience.discard(ws)
            ws.abort()
        audience.post(_frame.text(b"from a callback"))

    everyone[0].on["closed"] = let_go
    pairs[0][1].full = True
    everyone[0].send(b"x")
    flusher.flush()
    everyone[0].send(b"x" * 600)
    audience.post(_frame.text(b"first"))
    flusher.flush()
    flusher.flush()
    assert set(audience) == {everyone[0], everyone[4], everyone[5]}
    assert all(transport.aborted for _, transport in pairs[1:4])
    for _, transport in pairs[4:]:
        assert transport.take() == _frame.text(b"first") + _frame.text(b"from a callback")
    for ws in everyone:
        audience.discard(ws)


def test_a_lost_connection_leaves_every_audience(connect, flusher):
    ws, _ = connect()
    audiences = [Audience(flusher) for _ in range(7)]
    for audience in audiences:
        audience.add(ws)
    ws.connection_lost(None)
    assert [len(audience) for audience in audiences] == [0] * 7


def test_an_idle_connection_is_small(connect, flusher):
    # Everything that the engine stores of an idle connection (ext/README.md "Ownership").
    ws, _ = connect()
    idle = _engine.WebSocket(flusher, 1)
    assert sys.getsizeof(idle) <= 192
    assert not gc.is_tracked(idle)
    assert ws.buffered == 0


def test_counts_what_it_receives(connect, reference):
    before = _engine.counters()
    ws, _ = connect()
    ws.hear(
        reference.client_frame(TEXT, b"a", fin=False)
        + reference.client_frame(CONTINUATION, b"b")
        + reference.client_frame(PING)
    )
    ws.hear(b"\xff")
    after = _engine.counters()
    assert after["frames_received"] - before["frames_received"] == 3
    assert after["messages_received"] - before["messages_received"] == 1
    assert after["protocol_faults"] - before["protocol_faults"] == 1
    assert after["bytes_received"] > before["bytes_received"]


# -- HTTP heads ----------------------------------------------------------------------------------------------


def test_parses_a_head(head):
    request = parse_head(head)
    assert (request.method, request.target, request.version) == (b"GET", b"/app/key", (1, 1))
    assert request.headers[b"connection"] == b"keep-alive, Upgrade"
    assert upgrade_fault(request) is None


def test_repeated_headers_are_joined():
    request = parse_head(b"GET /?a=b HTTP/1.1\r\nAccept: a\r\nX-y:\t b \r\naccept: c\r\n\r\n")
    assert request.headers == {b"accept": b"a, c", b"x-y": b"b"}


@pytest.mark.parametrize(
    "bad",
    [
        b"\r\n\r\n",
        b"GET\r\n\r\n",
        b"GET / HTTP/1.1 x\r\n\r\n",
        b"GET  / HTTP/1.1\r\n\r\n",
        b"G\x00T / HTTP/1.1\r\n\r\n",
        b"GET /\x00 HTTP/1.1\r\n\r\n",
        b"GET / HTTP/11\r\n\r\n",
        b"GET / HTTP/1.1\r\nno colon\r\n\r\n",
        b"GET / HTTP/1.1\r\nspace : x\r\n\r\n",
        b"GET / HTTP/1.1\r\n folded: x\r\n\r\n",
        b"GET / HTTP/1.1\r\nA: x\r\n folded\r\n\r\n",
        b"GET / HTTP/1.1\r\nA: x\x00y\r\n\r\n",
        b"GET / HTTP/1.1\r\nA: x\ny\r\n\r\n",
        b"GET / HTTP/1.1\r\n: x\r\n\r\n",
        b"GET / HTTP/1.1\r\nA: b",
        b"\x16\x03\x01\x02\x00\x01\r\n\r\n",
    ],
)
def test_ambiguous_heads_are_refused(bad):
    with pytest.raises(ValueError, match=r"."):
        parse_head(bad)


@pytest.mark.parametrize(
    ("old", "new", "status"),
    [
        (b"GET", b"POST", 405),
        (b"HTTP/1.1", b"HTTP/1.0", 400),
        (b"Host: h\r\n", b"", 400),
        (b"Host: h\r\n", b"Host: h\r\nHost: i\r\n", 400),
        (b"Upgrade: websocket", b"Upgrade: h2c", 400),
        (b"keep-alive, Upgrade", b"keep-alive", 400),
        (b"Version: 13", b"Version: 8", 426),
        (b"dGhlIHNhbXBsZSBub25jZQ==", b"dGhlIHNhbXBsZQ==", 400),
        (b"dGhlIHNhbXBsZSBub25jZQ==", b"not base64", 400),
        (b"Host: h\r\n", b"Host: h\r\nContent-Length: 5\r\n", 400),
        (b"Host: h\r\n", b"Host: h\r\nTransfer-Encoding: chunked\r\n", 400),
    ],
)
def test_upgrades_that_are_refused(head, old, new, status):
    assert old in head
    assert upgrade_fault(parse_head(head.replace(old, new)))[0] == status


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b"Upgrade: websocket", b"upgrade: WebSocket"),
        (b"keep-alive, Upgrade", b"UPGRADE"),
        (b"keep-alive, Upgrade", b"close ,\tupgrade"),
        (b"Host: h\r\n", b"Host: h\r\nContent-Length: 0\r\n"),
    ],
)
def test_upgrades_that_are_accepted(head, old, new):
    assert upgrade_fault(parse_head(head.replace(old, new))) is None


HEAD_PARTS = [
    *(
        b"GET",
        b"/",
        b"/app/k?a=b",
        b" ",
        b"HTTP/1.1",
        b"HTTP/1.",
        b"0",
        b"GET / HTTP/1.1\r\n",
        b"a: b\r\n",
        b"A:c \r\n",
    ),
    *(b"\r\n", b"\r\n\r\n", b":", b": ", b"Host", b"X-y", b"\t", b"\r", b"\n", b"\x00", b"\x7f", b"\x80", b"\xff"),
]


@given(st.one_of(st.binary(max_size=300), st.lists(st.sampled_from(HEAD_PARTS), max_size=20).map(b"".join)))
def test_any_bytes_are_parsed_as_by_the_reference_or_refused(reference, data):
    try:
        expected = reference.parse_head(data)
    except ValueError:
        with pytest.raises(ValueError, match=r"."):
            parse_head(data)
        return
    head = parse_head(data)
    assert (head.method, head.target, head.version, head.headers) == expected
