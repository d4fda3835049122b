"""Bytes that no library sends (deploy/failures.md "Hostile input"): each gets its exact answer and ends at most its own
socket.

Afterwards the workers are the same processes, have hardly grown, and have logged no traceback (tests/helpers/server.py
fails on one).
"""

import asyncio
import contextlib
import json
import os
import time
from collections.abc import Iterator

import pytest

from helpers.server import Server, rss_bytes
from helpers.wire import BINARY, CLOSE, PING, TEXT, Api, Socket, connect_many, frame, signed_path, upgrade_request

MIB = 1 << 20
HEAD_TIMEOUT_S = 3


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """Two workers. Checked after the last test of the module."""
    # The test itself may be stopped for some seconds between a connection and its request.
    with Server(workers=2, head_timeout_s=30) as running:
        pids = running.worker_pids()
        before = {pid: rss_bytes(pid) for pid in [*pids, running.control_pid]}
        yield running
        assert running.worker_pids() == pids, "a worker was replaced"
        grown = {pid: rss_bytes(pid) - size for pid, size in before.items()}
        assert all(growth < 24 * MIB for growth in grown.values()), grown


@pytest.fixture(autouse=True)
def same_workers(server: Server) -> Iterator[None]:
    """No test may end a process."""
    pids = server.worker_pids()
    yield
    assert server.worker_pids() == pids


# -- invalid messages: an error in band, and the socket stays (protocol/README.md "Frames")

BAD_JSON = {
    "empty": b"",
    "null": b"null",
    "number": b"1",
    "true": b"true",
    "string": b'"pusher:ping"',
    "array": b"[]",
    "array of objects": b'[{"event":"pusher:ping"}]',
    "empty object": b"{}",
    "event null": b'{"event":null}',
    "event number": b'{"event":1}',
    "event object": b'{"event":{}}',
    "event array": b'{"event":["pusher:ping"]}',
    "event missing": b'{"data":{}}',
    "cut off": b'{"event":"pusher:subscribe","data":{',
    "single quotes": b"{'event':'pusher:ping'}",
    "trailing brace": b'{"event":"pusher:ping"}}',
    "two objects": b'{"event":"pusher:ping"}{"event":"pusher:ping"}',
    "NaN": b'{"event":"pusher:subscribe","data":NaN}',
    "byte order mark": b'\xef\xbb\xbf{"event":"pusher:ping"}',
    "control character in a string": b'{"event":"a\x01b"}',
    "bad escape": b'{"event":"\\x41"}',
    "lone surrogate": b'{"event":"\\ud800"}',
    "NUL": b"\x00",
    "deep arrays": b"[" * 60_000,
    "deep objects": b'{"a":' * 10_000,
    "deep arrays, closed": b"[" * 30_000 + b"]" * 30_000,
    "deep data": b'{"event":"pusher:subscribe","data":' + b"[" * 30_000 + b"]" * 30_000 + b"}",
    "endless number": b'{"event":' + b"9" * 60_000 + b"}",
    "many keys": b"{" + b",".join(b'"%d":0' % number for number in range(6000)) + b"}",
}

# Objects with an unknown event or one that only the server sends: refused in the same way, and never relayed.
BAD_EVENTS = {
    "unknown": {"event": "hello"},
    "empty": {"event": ""},
    "with NUL": {"event": "\x00"},
    "unknown of pusher's": {"event": "pusher:unheard-of"},
    "claims an error": {"event": "pusher:error", "data": {"code": 4001, "message": "x"}},
    "claims the greeting": {"event": "pusher:connection_established", "data": "{}"},
    "claims a success": {
        "event": "pusher_internal:subscription_succeeded",
        "channel": "private-known",
        "data": "{}",
    },
    "claims a member": {
        "event": "pusher_internal:member_added",
        "channel": "private-known",
        "data": '{"user_id":"1"}',
    },
    "an event of the application's": {"event": "order", "channel": "private-known", "data": "{}"},
}

# Known events with a wrong shape. The first of them ends a soketi process (soketi#1141).
BAD_SHAPES = [
    {"event": "pusher:subscribe", "data": data}
    for data in (
        {},
        None,
        1,
        True,
        "",
        "text",
        "{",
        "[]",
        "null",
        [],
        [{}],
        {"channel": None},
        {"channel": 1},
        {"channel": {}},
        {"channel": ["a"]},
        {"channel": ""},
        {"channel": "no spaces"},
        {"channel": "a/b"},
        {"channel": "#server-to-user-1"},
        {"channel": "c" * 5000},
        {"channel": "ünïcode"},
        {"channel": "private-a", "auth": 1},
        {"channel": "private-a", "auth": {}},
        {"channel": "private-a", "auth": ":"},
        {"channel": "private-a", "auth": "x" * 60_000},
        {"channel": "presence-a", "auth": "k:s", "channel_data": {}},
        {"channel": "presence-a", "auth": "k:s", "channel_data": 1},
        {"channel": "presence-a", "auth": "k:s", "channel_data": "["},
        {"channel": "presence-a"},
    )
] + [{"event": "pusher:subscribe"}]

QUIET_SHAPES = [
    {"event": "pusher:unsubscribe"},
    {"event": "pusher:unsubscribe", "data": None},
    {"event": "pusher:unsubscribe", "data": {"channel": 5}},
    {"event": "pusher:unsubscribe", "data": {"channel": "never-subscribed"}},
    {"event": "pusher:ping", "data": [[[]]]},
    {"event": "pusher:ping"},
    {"event": "pusher:pong", "data": 7},
]


async def test_json_scalars_and_wrong_types(server: Server) -> None:
    sockets = await connect_many(server, len(BAD_JSON))
    for socket, text in zip(sockets, BAD_JSON.values(), strict=True):
        socket.write(frame(TEXT, text))
    for socket, name in zip(sockets, BAD_JSON, strict=True):
        error = await socket.next("pusher:error")
        assert error["data"]["code"] is None, name
        assert "Traceback" not in error["data"]["message"], name
        await socket.ping()
        await socket.close()


async def test_events_that_only_a_server_may_send_are_refused_and_not_relayed(server: Server) -> None:
    sockets = await connect_many(server, len(BAD_EVENTS))
    witness = await Socket.connect(server)
    for one in [*sockets, witness]:
        await one.subscribe("private-known")
    for socket, message in zip(sockets, BAD_EVENTS.values(), strict=True):
        socket.send(message)
    for socket, name in zip(sockets, BAD_EVENTS, strict=True):
        error = await socket.next("pusher:error")
        assert error["data"]["code"] is None, name
        await socket.close()
    async with Api(server) as api:
        await api.publish("private-known", "end", "{}")
    await witness.next("end")
    known = {"pusher:connection_established", "pusher_internal:subscription_succeeded", "end"}
    assert {one["event"] for one in witness.frames} == known
    await witness.close()


async def test_subscribes_of_every_wrong_shape_are_answered(server: Server) -> None:
    sockets = await connect_many(server, len(BAD_SHAPES))
    for socket, message in zip(sockets, BAD_SHAPES, strict=True):
        socket.send(message)
        await socket.settle()
        answers = [one for one in socket.frames if one["event"] in ("pusher:error", "pusher:subscription_error")]
        assert answers, f"no answer to {str(message)[:100]}"
        for one in answers:
            if one["event"] == "pusher:error":
                assert one["data"]["code"] is None
            else:
                assert isinstance(one["data"], str)
                assert set(json.loads(one["data"])) >= {"type", "error", "status"}
        assert not socket.all("pusher_internal:subscription_succeeded")
        await socket.close()


async def test_harmless_requests_of_wrong_shape_leave_the_socket(server: Server) -> None:
    for message in QUIET_SHAPES:
        socket = await Socket.connect(server)
        socket.send(message)
        await socket.ping()
        await socket.close()


async def test_client_events_of_wrong_kind_are_refused_with_4301(server: Server) -> None:
    bad = [
        {"event": "client-x", "channel": "private-not-joined", "data": {}},
        {"event": "client-x", "channel": "open", "data": {}},
        {"event": "client-x", "channel": None, "data": {}},
        {"event": "client-x", "channel": 1},
        {"event": "client-x", "channel": [], "data": {}},
        {"event": "client-x"},
        {"event": "client-" + "x" * 300, "channel": "private-joined", "data": {}},
        {"event": "client-x", "channel": "private-joined", "data": "x" * 20_000},
    ]
    sockets = await connect_many(server, len(bad))
    for socket, message in zip(sockets, bad, strict=True):
        await socket.subscribe("private-joined")
        await socket.subscribe("open")
        socket.send(message)
        error = await socket.next("pusher:error")
        assert error["data"]["code"] == 4301, message
        await socket.ping()
    for socket in sockets:
        assert not [one for one in socket.frames if one["event"].startswith("client-")]
        await socket.close()


async def test_claimed_user_id_is_not_believed(server: Server) -> None:
    """The user id of a client event is the one that was signed (protocol/README.md "Client events")."""
    liar, listener = await connect_many(server, 2)
    for socket, user in ((liar, "liar"), (listener, "listener")):
        await socket.subscribe("presence-ids", user)
    liar.send({"event": "client-x", "channel": "presence-ids", "data": {}, "user_id": "president"})
    assert (await listener.next("client-x"))["user_id"] == "liar"
    await asyncio.gather(liar.close(), listener.close())


async def test_sustained_garbage_is_closed(server: Server) -> None:
    """A hundred bad frames within ten seconds: 4100, so that a faulty client returns later."""
    socket = await Socket.connect(server)
    for _ in range(150):
        socket.write(frame(TEXT, b"{"))
    assert await socket.until_closed() == 4100
    assert len(socket.all("pusher:error")) <= 3, "error frames are limited to one a second"


# -- violations of RFC 6455: a close code, at once

BAD_FRAMES = {
    "unmasked": (frame(TEXT, b"{}", mask=None), 1002),
    "RSV1": (frame(TEXT, b"{}", rsv=4), 1002),
    "RSV3": (frame(TEXT, b"{}", rsv=1), 1002),
    "reserved opcode": (frame(3, b""), 1002),
    "reserved control opcode": (frame(11, b""), 1002),
    "ping in two parts": (frame(PING, b"", fin=False), 1002),
    "ping of 126 bytes": (frame(PING, b"x" * 126), 1002),
    "continuation of nothing": (frame(0, b"x"), 1002),
    "text inside a fragmented text": (frame(TEXT, b"a", fin=False) + frame(TEXT, b"b"), 1002),
    "close of one byte": (frame(CLOSE, b"x"), 1002),
    "close code 999": (frame(CLOSE, (999).to_bytes(2, "big")), 1002),
    "close code 1005": (frame(CLOSE, (1005).to_bytes(2, "big")), 1002),
    "close reason not UTF-8": (frame(CLOSE, (1000).to_bytes(2, "big") + b"\xff"), 1007),
    "not UTF-8": (frame(TEXT, b"\xff\xfe"), 1007),
    "surrogate in UTF-8": (frame(TEXT, b"\xed\xa0\x80"), 1007),
    "overlong UTF-8": (frame(TEXT, b"\xc0\xaf"), 1007),
    "UTF-8 cut at the end": (frame(TEXT, b"\xe2\x82"), 1007),
    "not UTF-8 in the first fragment": (frame(TEXT, b"\xff", fin=False), 1007),
    "claims 2^62 bytes": (frame(TEXT, b"x" * 10, claimed_bytes=1 << 62), 1009),
    "claims 65,537 bytes": (frame(TEXT, b"", claimed_bytes=65_537), 1009),
    "binary, claims 2^40": (frame(BINARY, b"", claimed_bytes=1 << 40), 1009),
}


async def test_frames_that_violate_the_rfc_are_closed_with_its_codes(server: Server) -> None:
    sockets = await connect_many(server, len(BAD_FRAMES))
    for socket, (data, _) in zip(sockets, BAD_FRAMES.values(), strict=True):
        socket.write(data)
    for socket, (name, (_, code)) in zip(sockets, BAD_FRAMES.items(), strict=True):
        assert await socket.until_closed() == code, name


async def test_length_with_its_highest_bit_is_refused(server: Server) -> None:
    """RFC 6455 5.2: the most significant bit must be 0. Either complaint is right."""
    socket = await Socket.connect(server)
    socket.write(frame(TEXT, b"", claimed_bytes=(1 << 63) + 5))
    assert await socket.until_closed() in (1002, 1009)


async def test_binary_message_is_answered_like_bad_json(server: Server) -> None:
    socket = await Socket.connect(server)
    socket.write(frame(BINARY, b'{"event":"pusher:ping"}'))
    assert (await socket.next("pusher:error"))["data"]["code"] is None
    await socket.ping()
    await socket.close()


async def test_message_of_the_limit_is_taken_and_one_byte_more_is_not(server: Server) -> None:
    socket = await Socket.connect(server)
    text = b'{"event":"pusher:ping","data":""}'
    socket.write(frame(TEXT, text[:-2] + b"x" * (65_536 - len(text)) + text[-2:]))
    await socket.next("pusher:pong")
    socket.write(frame(TEXT, b"x" * 65_537))
    assert await socket.until_closed() == 1009


async def test_one_byte_fragments_with_pings_between_are_one_message(server: Server) -> None:
    socket = await Socket.connect(server)
    text = b'{"event":"pusher:ping"}'
    parts = [frame(TEXT, text[:1], fin=False)]
    for index in range(1, len(text)):
        parts.append(frame(PING, b"%d" % index))
        parts.append(frame(0, text[index : index + 1], fin=index == len(text) - 1))
    for byte in b"".join(parts):
        socket.write(bytes([byte]))
        await asyncio.sleep(0)
    await socket.next("pusher:pong")
    pongs = [payload for opcode, payload in socket.control if opcode == 10]
    assert pongs == [b"%d" % index for index in range(1, len(text))]
    await socket.close()


async def flood_until_closed(socket: Socket, data: bytes, limit_bytes: int) -> int:
    """Writes `data` again and again until the server has enough; returns at least how many bytes it took."""
    written = 0
    while not socket.lost and socket.close_code is None and written < limit_bytes:
        socket.write(data)
        written += len(data)
        await asyncio.sleep(0.001)  # lets the answer in between
    await socket.until_closed()
    return written


@pytest.mark.parametrize("kind", ["endless fragments", "empty fragments", "one frame of 32 MiB", "claims 2^62"])
async def test_endless_message_is_closed_before_it_is_buffered(server: Server, kind: str) -> None:
    """It is closed with 1009 at the limit and at most one read buffer more, and leaves nothing in memory."""
    socket = await Socket.connect(server)
    worker = server.worker_of(socket.port)
    before = rss_bytes(worker)
    if kind == "endless fragments":
        socket.write(frame(TEXT, b"x", fin=False))
        await flood_until_closed(socket, frame(0, b"x" * 4096, fin=False), 32 * MIB)
    elif kind == "empty fragments":
        # Empty fragments add nothing to the message, and must not add to memory either.
        socket.write(frame(TEXT, b"x", fin=False))
        for _ in range(200):
            socket.write(frame(0, b"", fin=False) * 1000)
            await asyncio.sleep(0)
        socket.write(frame(0, b"x" * 65_536, fin=True))
        await socket.until_closed()
    elif kind == "one frame of 32 MiB":
        socket.write(frame(TEXT, b"x" * 1024, claimed_bytes=32 * MIB))
        await flood_until_closed(socket, b"x" * 65_536, 32 * MIB)
    else:
        socket.write(frame(TEXT, b"x" * 1024, claimed_bytes=1 << 62))
        await flood_until_closed(socket, b"x" * 65_536, 32 * MIB)
    # While the client writes, an RST may overtake the close frame.
    assert socket.close_code in (1009, None)
    assert rss_bytes(worker) - before < 1 * MIB


# -- no HTTP, or no upgrade


async def exchange(server: Server, data: bytes, *, half_close: bool = False, timeout_s: float = 60.0) -> bytes:
    """Sends bytes to the public port and returns everything that comes back until the server closes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port, limit=1 << 22)
    try:
        with contextlib.suppress(ConnectionError):
            writer.write(data)
            await writer.drain()
            if half_close:
                writer.write_eof()
        async with asyncio.timeout(timeout_s):
            try:
                return await reader.read(-1)
            except ConnectionError:
                return b""
    finally:
        writer.close()


def status_of(answer: bytes) -> int | None:
    """The status of an HTTP answer; None if the server only closed."""
    return int(answer.split(b" ", 2)[1]) if answer.startswith(b"HTTP/1.") else None


def head(*lines: str, body: bytes = b"") -> bytes:
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + body


GARBAGE = {
    "random bytes": (os.urandom(2000) + b"\r\n\r\n", {400, None}),
    "TLS hello": (bytes.fromhex("16030100c8010000c40303") + os.urandom(200), {400, 408, None}),
    "HTTP/2 preface": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", {400, 404, 405, 505, None}),
    "no version": (b"GET /\r\n\r\n", {400, None}),
    "line of NULs": (b"\x00" * 300 + b"\r\n\r\n", {400, None}),
    "space in a header name": (head("GET / HTTP/1.1", "Host: x", "Bad Name: 1"), {400, None}),
    "header without a colon": (head("GET / HTTP/1.1", "Host: x", "nonsense"), {400, None}),
}

NOT_UPGRADES = {
    "key without an upgrade": (["GET /app/KEY HTTP/1.1", "Host: x"], {426}),
    "version 8": (
        [
            "GET /app/KEY HTTP/1.1",
            "Host: x",
            "Upgrade: websocket",
            "Connection: Upgrade",
            "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==",
            "Sec-WebSocket-Version: 8",
        ],
        {426},
    ),
    "no key header": (
        [
            "GET /app/KEY HTTP/1.1",
            "Host: x",
            "Upgrade: websocket",
            "Connection: Upgrade",
            "Sec-WebSocket-Version: 13",
        ],
        {400},
    ),
    "key header of the wrong length": (
        [
            "GET /app/KEY HTTP/1.1",
            "Host: x",
            "Upgrade: websocket",
            "Connection: Upgrade",
            "Sec-WebSocket-Key: c2hvcnQ=",
            "Sec-WebSocket-Version: 13",
        ],
        {400},
    ),
    "unknown path": (["GET /somewhere HTTP/1.1", "Host: x"], {404}),
    "unknown method": (["BREW /apps/1/events HTTP/1.1", "Host: x"], {400, 401, 404, 405, 501}),
}


async def test_garbage_on_the_public_port_is_refused_or_dropped(server: Server) -> None:
    for name, (data, statuses) in GARBAGE.items():
        answer = await exchange(server, data, half_close=True)
        assert status_of(answer) in statuses, (name, answer[:300])
        assert b"Traceback" not in answer, name


async def test_invalid_upgrades_get_their_status(server: Server) -> None:
    for name, (lines, statuses) in NOT_UPGRADES.items():
        request = head(*lines, "Connection: close" if "Connection: Upgrade" not in lines else "X-Nothing: 1")
        answer = await exchange(server, request.replace(b"KEY", server.app_key.encode()))
        assert status_of(answer) in statuses, (name, answer[:300])


@pytest.mark.parametrize(
    ("key", "query", "code"),
    [
        ("0" * 20, "protocol=7", 4001),
        ("", "protocol=7", 4005),
        (None, "protocol=seven", 4006),
        (None, "protocol=4", 4007),
        (None, "protocol=8", 4007),
    ],
)
async def test_refused_handshakes_get_an_error_frame_and_a_close(
    server: Server, key: str | None, query: str, code: int
) -> None:
    socket = await Socket.connect(server, key=key, query=query, established=False)
    assert socket.status == 101
    error = await socket.next()
    assert error["event"] == "pusher:error"
    assert error["data"]["code"] == code
    assert await socket.until_closed() == code
    assert socket.close_reason == error["data"]["message"]


async def test_half_a_request_affects_no_other_client(server: Server) -> None:
    whole = upgrade_request(server)
    for cut in (1, 10, len(whole) // 2, len(whole) - 1):
        assert status_of(await exchange(server, whole[:cut], half_close=True)) in (None, 400, 408)


async def test_megabyte_of_head_is_refused(server: Server) -> None:
    answer = await exchange(server, b"GET /app/x HTTP/1.1\r\nX-Long: " + b"x" * MIB)
    assert status_of(answer) in (431, 400, None)


@pytest.mark.parametrize("path", ["/apps/{id}/events", "/api/v1/apps/{id}/events"])
async def test_content_length_and_chunked_and_other_ways_to_smuggle(server: Server, path: str) -> None:
    """Refused with 400, or dropped; never read as two requests."""
    body = b'{"name":"e","channels":["smuggled"],"data":""}'
    target = signed_path(server, "POST", path.format(id=server.app_id), body)
    ways = {
        "both lengths": head(
            f"POST {target} HTTP/1.1",
            "Host: x",
            f"Content-Length: {len(body)}",
            "Transfer-Encoding: chunked",
            body=b"0\r\n\r\n" + body,
        ),
        "two different lengths": head(
            f"POST {target} HTTP/1.1",
            "Host: x",
            "Content-Length: 0",
            f"Content-Length: {len(body)}",
            body=body,
        ),
        "negative length": head(f"POST {target} HTTP/1.1", "Host: x", "Content-Length: -1", body=body),
        "length with a sign": head(f"POST {target} HTTP/1.1", "Host: x", f"Content-Length: +{len(body)}", body=body),
        "NUL in the target": head(f"POST {target}\x00 HTTP/1.1", "Host: x", f"Content-Length: {len(body)}", body=body),
        "chunk size nonsense": head(
            f"POST {target} HTTP/1.1",
            "Host: x",
            "Transfer-Encoding: chunked",
            body=b"zz\r\n" + body + b"\r\n0\r\n\r\n",
        ),
    }
    listener = await Socket.connect(server)
    await listener.subscribe("smuggled")
    for name, request in ways.items():
        answer = await exchange(server, request, half_close=True)
        assert status_of(answer) in (400, None), (name, answer[:300])
        assert answer.count(b"HTTP/1.1") <= 1, (name, "answered as two requests")
    await listener.settle()
    assert not listener.all("e")
    await listener.close()


async def test_announced_body_of_256_mib_is_refused_at_once(server: Server) -> None:
    target = signed_path(server, "POST", f"/apps/{server.app_id}/events", b"x")
    request = head(f"POST {target} HTTP/1.1", "Host: x", f"Content-Length: {256 * MIB}", body=b"x" * 1000)
    assert status_of(await exchange(server, request)) in (413, None)


async def test_bodies_of_strangers_are_refused_by_the_head_alone(server: Server) -> None:
    """The answer comes although no byte of the body was sent. Bodies of up to 16 KiB are read first."""
    body = b"x"
    signed = signed_path(server, "POST", f"/apps/{server.app_id}/events", body)
    targets = {f"/apps/{server.app_id}/events": 401, signed[:-1] + "~": 401, "/nothing": 404, "/healthz": 405}
    lengths = [
        "Content-Length: 16385",
        "Content-Length: 100000",
        f"Content-Length: {MIB}",
        "Transfer-Encoding: chunked",
    ]
    cases = {(target, length): status for target, status in targets.items() for length in lengths}
    cases |= {(signed, f"Content-Length: {MIB + 1}"): 413}
    answers = await asyncio.gather(
        *(exchange(server, head(f"POST {target} HTTP/1.1", "Host: x", length)) for target, length in cases)
    )
    assert dict(zip(cases, map(status_of, answers), strict=True)) == cases


async def test_bad_json_over_http_is_400_and_never_a_traceback(server: Server) -> None:
    async with Api(server) as api:
        bodies: list[object] = [
            None,
            [],
            "text",
            1,
            {},
            {"name": 1, "channels": ["a"], "data": ""},
            {"name": "e", "channels": "a", "data": ""},
            {"name": "e", "channels": [1], "data": ""},
            {"name": "e", "channels": [], "data": ""},
            {"name": "e", "channels": ["a"], "data": {}},
            {"name": "e", "channels": ["a"], "data": None},
            {"name": "e", "channels": ["a b"], "data": ""},
            {"name": "pusher:e", "channels": ["a"], "data": ""},
            {"name": "e" * 201, "channels": ["a"], "data": ""},
            {"name": "e", "channels": [f"c{number}" for number in range(101)], "data": ""},
            {"name": "e", "channels": ["a"], "data": "", "socket_id": "nonsense"},
        ]
        for body in bodies:
            status, answer = await api.ask("POST", "/events", body)
            assert status == 400, (body, answer)
            assert set(answer) >= {"error", "code", "status", "trace_id"}, answer
            assert answer["status"] == status
        for batch in ({}, {"batch": {}}, {"batch": [1]}, {"batch": [{}]}, {"batch": None}):
            status, answer = await api.ask("POST", "/batch_events", batch)
            assert status == 400, (batch, answer)


# -- slow and silent connections


async def test_silent_and_slow_connections_are_closed_in_time() -> None:
    """The deadline for a head is absolute: single bytes don't extend it."""
    with Server(workers=1, head_timeout_s=HEAD_TIMEOUT_S) as impatient:
        await _are_closed_in_time(impatient)


async def _are_closed_in_time(server: Server) -> None:
    silent_reader, silent_writer = await asyncio.open_connection("127.0.0.1", server.port)
    slow_reader, slow_writer = await asyncio.open_connection("127.0.0.1", server.port)
    began = time.monotonic()

    async def drip() -> None:
        for byte in upgrade_request(server):
            slow_writer.write(bytes([byte]))
            await asyncio.sleep(0.05)  # At twenty bytes a second the head would take ten seconds.

    dripping = asyncio.create_task(drip())
    async with asyncio.timeout(60):
        for reader in (silent_reader, slow_reader):
            with contextlib.suppress(ConnectionError):
                await reader.read(-1)
    # Timers run in ticks, so the connection may end a little early.
    assert time.monotonic() - began >= HEAD_TIMEOUT_S * 0.5
    dripping.cancel()
    silent_writer.close()
    slow_writer.close()


async def test_half_open_sockets_cost_little_and_delay_no_client(server: Server) -> None:
    """Hundreds of unfinished heads; a client is served meanwhile."""
    count = 500
    before = sum(rss_bytes(pid) for pid in server.worker_pids())
    opened = [await asyncio.open_connection("127.0.0.1", server.port) for _ in range(count)]
    # Each ends with the first byte of an answer, or with the connection.
    unanswered = [asyncio.create_task(reader.read(1)) for reader, _ in opened]
    for _, writer in opened:
        writer.write(upgrade_request(server)[:-10])
    client = await Socket.connect(server)
    await client.ping()
    assert sum(rss_bytes(pid) for pid in server.worker_pids()) - before < count / 2000 * 20 * MIB
    assert not any(task.done() for task in unanswered), "fewer were measured"
    for task, (_, writer) in zip(unanswered, opened, strict=True):
        task.cancel()
        writer.close()
    await client.ping()
    await client.close()


async def test_head_in_single_bytes_within_the_time_is_served(server: Server) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    for byte in upgrade_request(server):
        writer.write(bytes([byte]))
        await asyncio.sleep(0)
    async with asyncio.timeout(60):
        assert (await reader.readline()).startswith(b"HTTP/1.1 101")
    writer.close()
