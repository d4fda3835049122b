"""The operations whose cost is watched: each a small loop over one part of redpoll's hot path.

A `Case` has `run(n)`, which does the operation n times, and `reset()`, which is called between runs and isn't
measured (it empties sockets). The same cases are timed by pytest-benchmark (`test_times.py`) and counted in
instructions (`test_instructions.py`). `CALIBRATION` is code that redpoll has no part in: Python and C from the standard
library. Its figures change with the machine and the interpreter and with nothing in this repository.

Each case uses the interface that the rest of redpoll uses, so a rename inside a module needs no change here.
When a case itself must change, record the baseline again: `pytest bench/regression --record`.
"""

from __future__ import annotations

import array
import hashlib
import hmac
import json
import socket
from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["CALIBRATION", "CASES", "Case"]

KEY, SECRET = "278d425bdf160c739803", "7ad3773142a6692b25b8"
SOCKET_ID = "1234.5678"
DATA = json.dumps({"message": "hello there", "from": "anna", "tags": ["a", "b"], "pad": "x" * 110})
HEAD = (
    b"GET /app/278d425bdf160c739803?protocol=7&client=js&version=8.4.0&flash=false HTTP/1.1\r\n"
    b"Host: ws.example.com:6001\r\nConnection: Upgrade\r\nPragma: no-cache\r\nCache-Control: no-cache\r\n"
    b"User-Agent: Mozilla/5.0 (X11; Linux x86_64) AppleWebKit/537.36 (KHTML, like Gecko) Chrome/142.0 Safari/537.36\r\n"
    b"Upgrade: websocket\r\nOrigin: https://www.example.com\r\nSec-WebSocket-Version: 13\r\n"
    b"Accept-Encoding: gzip, deflate, br, zstd\r\nAccept-Language: en-GB,en;q=0.9\r\n"
    b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
    b"Sec-WebSocket-Extensions: permessage-deflate; client_max_window_bits\r\n\r\n"
)


def _nothing() -> None:
    pass


@dataclass(frozen=True)
class Case:
    """`operations` is how many `run` does when instructions are counted; about ten million instructions."""

    name: str
    operations: int
    run: Callable[[int], None]
    reset: Callable[[], None] = _nothing


def calibration() -> Case:
    """A loop of the interpreter, dictionaries, JSON, and a hash: some of all that the cases are made of."""
    document = {"name": "x" * 40, "numbers": list(range(20)), "text": "é" * 20}

    def run(n: int) -> None:
        for number in range(n):
            words: dict[str, int] = {}
            for word in ("a", "b", "c", "d", "a", "b"):
                words[word] = words.get(word, 0) + number
            text = json.dumps(document)
            hashlib.sha256(text.encode()).hexdigest()
            array.array("i", range(20)).tobytes()

    return Case("calibration", 300, run)


def encode() -> Case:
    """An event to its WebSocket frame, JSON string included."""
    from redpoll._frame import event_frame

    data = DATA.encode()

    def run(n: int) -> None:
        for _ in range(n):
            event_frame(b"new-message", b"presence-room-17", data, b"user-4711")

    return Case("encode", 5000, run)


def envelope_to_frame() -> Case:
    """What a worker does with one message from Redis: envelope in, frame out."""
    from redpoll._frame import frame_of
    from redpoll.cluster.envelopes import event_envelope

    payload = event_envelope("new-message", DATA, trace="0123456789abcdef" * 2)

    def run(n: int) -> None:
        for _ in range(n):
            frame_of(payload, b"presence-room-17")

    return Case("envelope to frame", 5000, run)


class _Transport:
    """A transport over one end of a pair of sockets, as uvloop's looks to the engine."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock

    def get_extra_info(self, name: str, default: object = None) -> object:
        return self.sock if name == "socket" else default

    def set_write_buffer_limits(self, high: int, low: int) -> None:
        pass

    def get_write_buffer_size(self) -> int:
        return 0

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass

    def abort(self) -> None:
        pass

    def close(self) -> None:
        pass


def _connections(count: int) -> tuple[list, list[socket.socket], object]:
    """Open WebSockets of the engine over pairs of sockets; the clients' ends; their flusher."""
    from redpoll import _engine
    from redpoll._fanout import Flusher

    class Connection(_engine.WebSocket):
        __slots__ = ()

        def connected(self) -> None:
            pass

        def head_received(self, head: bytes) -> None:
            self.accept(b"dGhlIHNhbXBsZSBub25jZQ==")

        def message_received(self, message: bytes) -> None:
            pass

    flusher = Flusher(_nothing)
    # One send in a flush: the flusher's clock must not end it early on a slow machine.
    flusher.slice_s = 1000.0
    connections, clients = [], []
    for _ in range(count):
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        theirs.setblocking(False)
        connection = Connection(flusher, 65536)
        connection.connection_made(_Transport(ours))
        _hear(connection, HEAD)
        connections.append(connection)
        clients.append(theirs)
    flusher.flush()
    _drain(clients)
    return connections, clients, flusher


def _hear(connection, data: bytes) -> None:
    """What the loop does when bytes come."""
    buffer = connection.get_buffer(65536)
    buffer[: len(data)] = data
    connection.buffer_updated(len(data))


def _drain(clients: list[socket.socket]) -> None:
    for client in clients:
        try:
            while client.recv(1 << 18):
                pass
        except BlockingIOError:
            pass


def parse_and_unmask() -> Case:
    """Sixteen masked text messages of 180 bytes in one read."""
    (connection,), _, _ = _connections(1)
    mask = b"\x37\xfa\x21\x3d"
    payload = DATA.encode().ljust(180)
    masked = bytes(byte ^ mask[place % 4] for place, byte in enumerate(payload))
    batch = (b"\x81\xfe" + len(payload).to_bytes(2, "big") + mask + masked) * 16

    def run(n: int) -> None:
        for _ in range(n):
            _hear(connection, batch)

    return Case("parse and unmask", 1000, run)


def fan_out_tick() -> Case:
    """One tick: three frames to 100 connections, joined into one send each. Sockets are real."""
    from redpoll._fanout import Audience
    from redpoll._frame import event_frame

    connections, clients, flusher = _connections(100)
    audience = Audience(flusher)
    for connection in connections:
        audience.add(connection)
    frames = [event_frame(b"new-message", b"news", DATA.encode()) for _ in range(3)]

    def run(n: int) -> None:
        post, flush = audience.post, flusher.flush
        for _ in range(n):
            for frame in frames:
                post(frame)
            while flush():
                pass

    return Case("fan-out tick", 50, run, lambda: _drain(clients))


def _app():
    from redpoll.protocol.apps import App, Key

    return App(id="1", name="measured", keys=(Key(key=KEY, secret=SECRET),))


def _signed_publish() -> tuple[str, bytes]:
    """The query and the body of a publish over HTTP."""
    body = json.dumps({"name": "new-message", "channels": ["news"], "data": DATA}).encode()
    query = f"auth_key={KEY}&auth_timestamp=1700000000&auth_version=1.0&body_md5={hashlib.md5(body).hexdigest()}"
    signed = hmac.new(SECRET.encode(), f"POST\n/apps/1/events\n{query}".encode(), hashlib.sha256).hexdigest()
    return f"{query}&auth_signature={signed}", body


def signature_check() -> Case:
    """The signature of a publish over HTTP, whatever its layout."""
    from redpoll.protocol.auth import check_query

    app = _app()
    query, body = _signed_publish()

    def run(n: int) -> None:
        for _ in range(n):
            check_query(app, "POST", "/apps/1/events", query, body, 1700000001.0)

    return Case("signature check", 500, run)


def fast_publish() -> Case:
    """A publish in the control plane: from a worker's message to the command, and from Redis' reply to the answer."""
    from redpoll._fast_publish import FastApp, FastPublish, Published
    from redpoll._http import IncomingRequest, pack_request
    from redpoll._text import Form
    from redpoll.cluster.redis.keys import Keys
    from redpoll.control.http.response import Dateline
    from redpoll.http.messages import FIELDS
    from redpoll.protocol import auth
    from redpoll.protocol.messages import limits_of

    app, keys = _app(), Keys("rp")
    fast_app = FastApp(limits_of(app), ((KEY.encode(), SECRET.encode()),), 0.0)
    # As control/publish/forms.py makes them. Its imports would add work for the garbage collector to all cases.
    answer = Form(
        b"HTTP/1.1 200 OK\r\n<d>Content-Type: application/json\r\nX-Service-Trace-Id: <t>\r\n<l>Content-Length: 2"
        b"\r\n\r\n{}",
        (b"<t>", b"<l>", b"<d>"),
    )
    row = Form(
        b'["<t>","<a>",null,<ms>,"<n>",["<c>"],<b>,"<k> from <x>",200,false,<us>],',
        (b"<t>", b"<a>", b"<us>", b"<ms>", b"<n>", b"<c>", b"<b>", b"<k>", b"<x>"),
    )
    sent: list[Published] = []
    answered = [0]

    def completed(link: object, answers: bytes, count: int, *_: object) -> None:
        answered[0] += count

    fast = FastPublish(
        {"1": app},
        lambda _: fast_app,
        SECRET.encode(),
        keys.publish,
        keys.shards,
        clock=lambda: 1700000001.0,
        timer=lambda: 0.0,
        limit=None,
        caller=lambda app_id, fields: None,
        dateline=Dateline(),
        ready=lambda: 0,
        publish=lambda commands, published: sent.append(published),
        soon=lambda finish: None,
        completed=completed,
        failed=completed,
        answers=((4, answer), (4, answer), (4, answer)),
        row=row,
        max_skew_s=auth.MAX_SKEW_S,
        api_prefix=b"/api/v1",
        is_checked=False,
    )
    query, body = _signed_publish()
    target = f"/apps/1/events?{query}".encode()
    # As many as a busy worker sends at once.
    count = 20
    buffer = bytearray(
        b"".join(pack_request(n, 0, b"POST", b"127.0.0.1", target, b"", body) for n in range(1, count + 1))
    )

    message_size = len(buffer) // count

    def run(n: int) -> None:
        for start in range(0, n, count):
            part = min(count, n - start)
            fast.take(None, IncomingRequest, buffer, part * message_size, FIELDS)
            published = sent.pop()
            for _ in range(part):
                published(1)
            fast.finish()
        if answered[0] < n:
            raise AssertionError("a publish was not answered")

    return Case("fast publish", 500, run)


def request_head() -> Case:
    """The head of a browser's upgrade, parsed and checked."""
    from redpoll._http import parse_head, upgrade_fault

    def run(n: int) -> None:
        for _ in range(n):
            if upgrade_fault(parse_head(HEAD)) is not None:
                raise AssertionError("the head of a correct upgrade was refused")

    return Case("request head", 1000, run)


def hold_call() -> Case:
    """A presence channel's bookkeeping for one member that joins, is accepted and leaves: two `hold` calls."""
    from redpoll.cluster.membership.join import Join
    from redpoll.cluster.membership.local_channel import LocalChannel
    from redpoll.protocol.apps import App

    channel = LocalChannel("1", "presence-room", "p", b"topic")
    app = App(id="1", name="bench", keys=())

    def settle() -> None:
        while (call := channel.plan()) is not None:
            channel.accept(call, b"1" * call.joining)

    channel.queue(Join(None, app, "presence-room", "anna", b"{}"))
    settle()

    def run(n: int) -> None:
        for _ in range(n):
            channel.queue(Join(None, app, "presence-room", "bert", b'{"name":"Bert"}'))
            settle()
            channel.detach("bert")
            settle()

    return Case("hold call", 500, run)


def session_subscribe() -> Case:
    """A private channel: subscribe with its signature, accepted, unsubscribe; one a second, within the limits."""
    from redpoll.protocol.apps import CurrentApp
    from redpoll.protocol.limits import Limits
    from redpoll.protocol.session import Session

    limits = Limits()
    session = Session((1234, 5678), CurrentApp(_app()), limits)
    now = 0.0
    channel = "private-room-17"
    digest = hmac.new(SECRET.encode(), f"{SOCKET_ID}:{channel}".encode(), hashlib.sha256).hexdigest()
    subscribe = json.dumps({"event": "pusher:subscribe", "data": {"channel": channel, "auth": f"{KEY}:{digest}"}})
    unsubscribe = json.dumps({"event": "pusher:unsubscribe", "data": {"channel": channel}})
    messages = subscribe.encode(), unsubscribe.encode()

    def run(n: int) -> None:
        nonlocal now
        for _ in range(n):
            now += 1.0
            session.receive(messages[0], now)
            session.joined(channel)
            session.receive(messages[1], now)
        if session.channels or limits.refusals.subscribes or not session.authorised:
            raise AssertionError("the subscribe was not accepted")

    return Case("session subscribe", 500, run)


CALIBRATION: Callable[[], Case] = calibration
CASES: dict[str, Callable[[], Case]] = {
    "encode": encode,
    "envelope to frame": envelope_to_frame,
    "parse and unmask": parse_and_unmask,
    "fan-out tick": fan_out_tick,
    "signature check": signature_check,
    "fast publish": fast_publish,
    "request head": request_head,
    "hold call": hold_call,
    "session subscribe": session_subscribe,
}
