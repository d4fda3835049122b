"""A client's WebSocket: frames by `websockets`, messages by `redpoll.protocol.session`."""

from __future__ import annotations

import asyncio
import base64
import binascii
import codecs
import logging
import secrets
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final, Protocol

from websockets.frames import CloseCode, Frame, Opcode
from websockets.http11 import Request
from websockets.protocol import State
from websockets.server import ServerProtocol

from redpoll.protocol import frames, handshake
from redpoll.protocol.errors import CLOSE_TEXTS, Code, close_reason
from redpoll.protocol.limits import Limits
from redpoll.protocol.session import Session

if TYPE_CHECKING:
    from redpoll.protocol.apps import App
    from redpoll.testing.clock import Clock, Timer
    from redpoll.testing.hub import Hub

__all__ = ["House", "Socket", "upgrade_fault"]

# How long a client may take to answer our close frame (RFC 6455 section 7.1.1).
_CLOSE_TIMEOUT_S: Final = 5.0
# The default of the setting max_unsent_bytes.
_MAX_UNSENT_BYTES: Final = 1024 * 1024

# What clients do wrong is for them to see, not for the log of the test.
_log: Final = logging.getLogger("redpoll.testing.socket")
_log.addHandler(logging.NullHandler())
_log.propagate = False


class House(Protocol):
    """What a connection belongs to: the server's parts and settings."""

    @property
    def hub(self) -> Hub: ...
    @property
    def clock(self) -> Clock: ...
    @property
    def limits(self) -> Limits: ...

    max_message_bytes: int
    activity_timeout_s: float
    pong_timeout_s: float

    def app_of_key(self, key: str) -> App | None: ...


class Socket:
    """`received` gets the client's bytes, from the request's head on. `session` is set once the client is greeted."""

    session: Session

    def __init__(self, house: House, transport: asyncio.Transport) -> None:
        self._house = house
        self._transport = transport
        self._wire = ServerProtocol(max_size=house.max_message_bytes, logger=_log)
        self._parts: list[bytes] = []
        # A text that isn't UTF-8 is refused with the fragment that shows it, not at its end.
        self._decoder = codecs.getincrementaldecoder("utf-8")()
        self._opcode = Opcode.TEXT
        self._is_greeted = False
        self._heard_at = house.clock.now()
        self._silence: Timer | None = None
        self._late: asyncio.TimerHandle | None = None

    @property
    def socket_id(self) -> str | None:
        """None before the client is greeted, and if it was refused."""
        return self.session.socket_id if self._is_greeted else None

    # -- called by the port

    def received(self, data: bytes) -> None:
        self._heard_at = self._house.clock.now()
        self._wire.receive_data(data)
        for event in self._wire.events_received():
            if isinstance(event, Request):
                self._open(event)
            elif self._is_greeted:
                self._frame(event)
        self._flush()
        if self._is_greeted and self._wire.state is not State.OPEN:
            self._leave()

    def lost(self) -> None:
        """The TCP connection has ended."""
        if self._late is not None:
            self._late.cancel()
        self._leave()

    # -- called by the hub

    def send(self, payload: bytes) -> None:
        if self._wire.state is not State.OPEN:
            return
        self._wire.send_text(payload)
        self._flush()
        if self._transport.get_write_buffer_size() > _MAX_UNSENT_BYTES:
            self._transport.abort()

    def shut(self, code: int, message: str) -> None:
        """Sends an error frame, then a close frame with the same words (protocol/README.md "Close codes")."""
        if self._wire.state is not State.OPEN:
            return
        self.send(frames.error(code, message))
        self._wire.send_close(code, close_reason(message))
        self._flush()
        self._leave()
        self._late = asyncio.get_running_loop().call_later(_CLOSE_TIMEOUT_S, self._transport.abort)

    def cut(self) -> None:
        """Ends the TCP connection without a close frame, as a network does that fails."""
        self._transport.abort()

    # -- within

    def _open(self, request: Request) -> None:
        response = self._wire.accept(request)
        self._wire.send_response(response)
        if response.status_code != 101:
            return
        house, (path, query) = self._house, handshake.split_target(request.path)
        outcome = handshake.check(path, query, request.headers.get("Origin"), house.app_of_key, secure=False)
        if not isinstance(outcome, handshake.Refusal):
            space = house.hub.spaces[outcome.id]
            if outcome.max_connections and len(space.clients) >= outcome.max_connections:
                outcome = handshake.Refusal(int(Code.OVER_QUOTA), CLOSE_TEXTS[Code.OVER_QUOTA])
        if isinstance(outcome, handshake.Refusal):
            self.send(frames.error(outcome.code, outcome.message))
            self._wire.send_close(outcome.code, outcome.message)
            self._late = asyncio.get_running_loop().call_later(_CLOSE_TIMEOUT_S, self._transport.abort)
            return
        recovers = handshake.recovers(query)
        sid = secrets.randbelow(1 << 40) + 1, secrets.randbelow(1 << 40) + 1
        self.session = Session(sid, space.current, house.limits, recovers, decrypts_all=handshake.decrypts_all(query))
        self._is_greeted = True
        house.hub.opened(self)
        self.send(frames.connection_established(self.session.socket_id, house.activity_timeout_s, recovers))
        self._silence = house.clock.call_later(house.activity_timeout_s, self._check_silence)

    def _frame(self, frame: object) -> None:
        if not isinstance(frame, Frame) or frame.opcode not in (Opcode.TEXT, Opcode.BINARY, Opcode.CONT):
            return
        if frame.opcode != Opcode.CONT:
            self._opcode = frame.opcode
        self._parts.append(bytes(frame.data))
        if self._opcode == Opcode.TEXT:
            try:
                self._decoder.decode(bytes(frame.data), frame.fin)
            except UnicodeDecodeError:
                self._wire.fail(CloseCode.INVALID_DATA)
                return
        if not frame.fin or self._wire.state is not State.OPEN:
            return
        message, self._parts = b"".join(self._parts), []
        now = self._house.clock.now()
        if self._opcode == Opcode.BINARY:
            self._house.hub.perform(self, self.session.receive_binary(now))
            return
        self._house.hub.perform(self, self.session.receive(message, now))

    def _check_silence(self) -> None:
        """Pings after `activity_timeout_s` without bytes, closes after `pong_timeout_s` more."""
        house = self._house
        silent_s = house.clock.now() - self._heard_at
        if silent_s < house.activity_timeout_s:
            self._silence = house.clock.call_later(house.activity_timeout_s - silent_s, self._check_silence)
        elif silent_s < house.activity_timeout_s + house.pong_timeout_s:
            # Browsers answer the WebSocket's ping without their page, old clients only the protocol's.
            self.send(frames.PING)
            self._wire.send_ping(b"")
            self._flush()
            self._silence = house.clock.call_later(house.pong_timeout_s, self._check_silence)
        else:
            self.shut(Code.PONG_NOT_RECEIVED, CLOSE_TEXTS[Code.PONG_NOT_RECEIVED])

    def _leave(self) -> None:
        if self._silence is not None:
            self._silence.cancel()
            self._silence = None
        if self._is_greeted:
            self._house.hub.closed(self)

    def _flush(self) -> None:
        for data in self._wire.data_to_send():
            if data:
                self._transport.write(data)
            else:
                # What `websockets` calls the end of the stream: everything is written.
                self._transport.close()


def upgrade_fault(method: bytes, version: bytes, headers: Mapping[bytes, bytes]) -> tuple[int, str] | None:
    """As `_http.upgrade_fault`, which is compiled: None if this head opens a WebSocket, else status and text. `version`
    is like `1.1`, names of headers are in lower case."""

    def has(name: bytes, token: bytes) -> bool:
        return token in [part.strip(b" \t") for part in headers.get(name, b"").lower().split(b",")]

    if method != b"GET":
        return 405, "a WebSocket is opened by GET"
    if version < b"1.1":
        return 400, "a WebSocket needs HTTP/1.1"
    if not headers.get(b"host") or b"," in headers[b"host"]:
        return 400, "one Host header is required"
    if not has(b"upgrade", b"websocket"):
        return 400, "the Upgrade header does not name websocket"
    if not has(b"connection", b"upgrade"):
        return 400, "the Connection header does not name upgrade"
    if headers.get(b"sec-websocket-version") != b"13":
        return 426, "WebSocket version 13 is spoken here"
    try:
        key = base64.b64decode(headers.get(b"sec-websocket-key", b""), validate=True)
    except binascii.Error:
        key = b""
    if len(key) != 16:
        return 400, "Sec-WebSocket-Key is not 16 bytes in base64"
    if b"transfer-encoding" in headers or headers.get(b"content-length", b"0") != b"0":
        return 400, "an upgrade has no body"
    return None
