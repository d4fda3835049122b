"""A session of the HTTP fallback, and its connection.

The connection is a WebSocket like any other, but its socket is in memory: the session is its transport. What the page
sends is fed to it as frames; the frames that it writes become lines for the stream or poll that waits. So the hub, the
limits, the janitor and the traces know no difference. While neither a stream nor a poll waits, the connection is one
whose client doesn't read: what it may have unsent is bounded in the same way.
"""

from __future__ import annotations

import asyncio
import struct
from enum import Enum
from typing import TYPE_CHECKING, Any, Final, Protocol

import msgspec

from redpoll._engine import OPEN as CONNECTION_OPEN
from redpoll.protocol.errors import Code
from redpoll.worker.fallback.claims import SessionName
from redpoll.worker.fallback.lines import OPEN, PRELUDE, STILL_THERE, LineMaker, Lines, lines_of
from redpoll.worker.fallback.outlets import Outlet
from redpoll.worker.fallback.send_order import Messages, SendOrder
from redpoll.worker.ingress.client_connection import ClientConnection

if TYPE_CHECKING:
    from redpoll.worker.ingress.gate import Gate

__all__ = ["REOPENED_AFTER_UNITS", "FallbackConnection", "Session", "SessionState"]

# pusher-js opens a stream again once it has read more than this (MAX_BUFFER_LENGTH in src/core/http/http_request.ts).
# What is written after that may be lost with the old stream, so nothing is.
REOPENED_AFTER_UNITS: Final = 256 * 1024
# How long the messages of a request wait for those of an earlier one.
_GAP_S: Final = 1.0
_MAX_MESSAGES: Final = 100
# Frames of a client (RFC 6455 5.2), masked with zeros.
_MASK: Final = bytes(4)
_PONG: Final = b"\x8a\x80" + _MASK
# SockJS' code for it. pusher-js never does this, and takes the code for an interruption.
_REPLACED: Final = lines_of(b'c[2010,"Another connection still open"]\n')
_MESSAGE_LOST: Final = "a message was lost: its xhr_send was answered with %d; connect again"
_decode_messages: Final = msgspec.json.Decoder(list[str]).decode


class SessionState(Enum):
    """ASKING: Redis is asked for a place. OPEN. CLOSED: its last lines wait for a poll. ENDED."""

    ASKING = "asking"
    OPEN = "open"
    CLOSED = "closed"
    ENDED = "ended"


class Owner(Protocol):
    """The sessions of the worker (sessions.py), as one of them sees it."""

    @property
    def gate(self) -> Gate: ...
    @property
    def maker(self) -> LineMaker: ...
    def attached(self, session: Session) -> None:
        """It has a stream or poll."""

    def waits(self, session: Session) -> None:
        """It has neither."""

    def ended(self, session: Session) -> None:
        """It can't be asked for any more."""


class FallbackConnection(ClientConnection):
    """The connection of a session."""

    __slots__ = ("of_session",)

    def __init__(self, gate: Gate, session: Session) -> None:
        super().__init__(gate)
        self.of_session: Session | None = session

    @property
    def transport_name(self) -> str:
        return self.of_session.kind if self.of_session is not None else "xhr"

    def closing(self) -> None:
        super().closing()
        if self.of_session is not None:
            self.of_session.closing()

    def released(self) -> None:
        # It has no descriptor, so the gate doesn't count it.
        if self.of_session is not None:
            self.of_session = None
            self.gate.janitor.departed(self)
            self.gate.addresses.leave(self.address_slot)


class Session(asyncio.Transport):
    """`name` and `address` (the client's) don't change. `outlet`: the stream or poll that waits; None while the
    connection is paused. `kind` is xhr_streaming or xhr_polling."""

    __slots__ = (
        "_ending",
        "_full",
        "_has_refused",
        "_held",
        "_order",
        "_reading",
        "_unanswered_beat",
        "_units",
        "address",
        "connection",
        "kind",
        "name",
        "outlet",
        "owner",
        "renewed_at",
        "state",
        "tail",
    )

    def __init__(self, owner: Owner, name: SessionName, address: str) -> None:
        self.owner = owner
        self.name = name
        self.address = address
        self.state = SessionState.ASKING
        self.connection = FallbackConnection(owner.gate, self)
        self.kind = "xhr"
        self.outlet: Outlet | None = None
        self.renewed_at = 0.0
        # What a closed session has for the next poll.
        self.tail: list[Lines] = []
        # A stream that got as much as its client reads from one.
        self._full: Outlet | None = None
        self._units = 0
        # A poll that is answered at the end of this pass of the loop.
        self._ending: Outlet | None = None
        # Of the requests since the one that opened it.
        self._order: SendOrder | None = None
        # While no client is read (timers/backpressure.py), messages wait here.
        self._reading = True
        self._held: list[Messages] = []
        # A message found no room there.
        self._has_refused = False
        self._unanswered_beat = False

    # -- what clients ask ----------------------------------------------------------------------------------

    def opened(self, outlet: Outlet, number: int | None) -> None:
        """It is a connection from now on, and this is its first stream or poll."""
        self.state = SessionState.OPEN
        self.connection.open_on(self)
        self._order = SendOrder(number or 0)
        self._take(outlet, number)
        # Not by `_write`: the greeting comes next, and a poll gets both.
        outlet.write(OPEN)
        self._units += OPEN.units

    def attach(self, outlet: Outlet, number: int | None) -> None:
        """A stream or poll waits. It takes the place of one that is there."""
        for old in (self.outlet, self._full):
            if old is not None:
                if old is self.outlet:
                    old.write(_REPLACED)
                old.end()
        self._full = None
        self._take(outlet, number)
        if self.state is SessionState.CLOSED:
            self._end_with(outlet)
            return
        self._heard()
        # The client takes a stream's prelude for a heartbeat, which it answers.
        self._unanswered_beat = not outlet.polls
        self.connection.resume_writing()

    def _take(self, outlet: Outlet, number: int | None) -> None:
        self.outlet = outlet
        self.kind = "xhr_polling" if outlet.polls else "xhr_streaming"
        self._units = PRELUDE.units
        self.owner.attached(self)
        outlet.begin()
        self._put_in_order(number, None)

    def left(self, outlet: Outlet) -> None:
        """The client of a stream or poll has gone. pusher-js doesn't come back, unless it was to open the stream
        again."""
        if outlet is self.outlet:
            self.outlet = None
            self.drop()

    def bring(self, number: int | None, body: bytes) -> int:
        """Take an xhr_send. Returns the status of its answer."""
        if self.state is not SessionState.OPEN:
            return 404
        messages = _messages_of(body)
        if not messages:
            self._put_in_order(number, None)
        if messages is None:
            # As a message that is no JSON: pusher-js doesn't look at the status.
            if self.connection.state == CONNECTION_OPEN:
                self.connection.feed(_client_head(0))
            return 400
        if not messages:
            self._beat_received()
            return 204
        if len(self._held) >= _MAX_MESSAGES:
            self._has_refused = True
            return 503
        self._put_in_order(number, messages)
        return 204

    def _put_in_order(self, number: int | None, messages: Messages | None) -> None:
        """A request came, perhaps with messages. They are delivered after those of earlier requests, which are waited
        for if they haven't come."""
        order = self._order
        if order is None:
            return
        ready = order.take(number, messages) if messages else order.note(number)
        if number is not None and order.waits(number):
            asyncio.get_running_loop().call_later(_GAP_S, self._gap_over, number)
        self._deliver(ready)

    def _gap_over(self, number: int) -> None:
        """Requests before this number have been waited for long enough."""
        if self._order is not None and self.state is SessionState.OPEN:
            self._deliver(self._order.give_up(number))

    def _deliver(self, ready: list[Messages]) -> None:
        connection = self.connection
        if not self._reading:
            self._held += ready
            return
        for messages in ready:
            for message in messages:
                if connection.state == CONNECTION_OPEN:
                    text = message.encode()
                    connection.feed(_client_head(len(text)) + text)

    def _beat_received(self) -> None:
        """An empty xhr_send: the answer to a heartbeat, or a ping, which any line answers."""
        self._heard()
        if not self._unanswered_beat and self.outlet is not None:
            self._write(STILL_THERE)
        self._unanswered_beat = False

    def _heard(self) -> None:
        if self.connection.state == CONNECTION_OPEN:
            self.connection.feed(_PONG)

    # -- lines ---------------------------------------------------------------------------------------------

    def beat(self, lines: Lines) -> None:
        """Send a heartbeat, if somebody reads."""
        if self.outlet is not None and self.state is SessionState.OPEN:
            self._unanswered_beat = not self.outlet.polls
            self._write(lines)

    def _write(self, lines: Lines) -> None:
        outlet = self.outlet
        if outlet is None or self.tail:
            # Not before what came earlier, which a poll gets when all is here.
            self.tail.append(lines)
            return
        outlet.write(lines)
        if outlet.polls:
            if outlet is not self._ending:
                self._ending = outlet
                asyncio.get_running_loop().call_soon(self._poll_full, outlet)
            return
        self._units += lines.units
        if self._units > REOPENED_AFTER_UNITS and self.state is SessionState.OPEN:
            self.outlet, self._full = None, outlet
            self._pause()

    def _poll_full(self, outlet: Outlet) -> None:
        self._ending = None
        if outlet is self.outlet:
            self.outlet = None
            outlet.end()
            if self.state is SessionState.OPEN:
                self._pause()

    def _pause(self) -> None:
        self.connection.pause_writing()
        self.owner.waits(self)

    # -- the end -------------------------------------------------------------------------------------------

    def closing(self) -> None:
        """A Close is queued. What waits comes here now, for the next poll if none is there."""
        if self.state is SessionState.OPEN and self.outlet is None:
            self.connection.resume_writing()

    def _closed(self, code: int) -> None:
        """Everything is written, the Close last: answer it as a client does."""
        self.state = SessionState.CLOSED
        if self.outlet is not None:
            self._end_with(self.outlet)
        elif self.tail:
            self.owner.waits(self)
        else:
            # A poll has got it all.
            self.ended()
        if self.connection.state != CONNECTION_OPEN:
            self.connection.feed(b"\x88\x82" + _MASK + struct.pack(">H", code))

    def _end_with(self, outlet: Outlet) -> None:
        for lines in self.tail:
            outlet.write(lines)
        self.outlet = None
        outlet.end()
        self.ended()

    def message_lost(self, status: int) -> None:
        """An xhr_send was answered with this status, which pusher-js doesn't look at. So the session is closed: as a
        WebSocket is after a message that is too large (413), or so that its client connects again."""
        if self.connection.state != CONNECTION_OPEN:
            return
        if status == 413:
            self.connection.feed(_client_head(self.connection.max_message_bytes + 1))
        else:
            self.connection.shut(Code.OVER_CAPACITY, _MESSAGE_LOST % status)

    def drop(self) -> None:
        """The client has gone, or lines for it may be lost."""
        self.connection.abort()
        self.ended()

    def ended(self) -> None:
        """Forget the session. Idempotent."""
        if self.state is SessionState.ENDED:
            return
        self.state = SessionState.ENDED
        self.tail.clear()
        self._held.clear()
        self._order = None
        for outlet in (self.outlet, self._full):
            if outlet is not None:
                outlet.end()
        self.outlet = self._full = None
        self.owner.ended(self)

    # -- what the connection calls: asyncio's transport ----------------------------------------------------

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return (self.address, 0) if name == "peername" and self.address else default

    def write(self, data: Any) -> None:
        lines = self.owner.maker.of(data)
        self._write(lines)
        if lines.closing is not None:
            asyncio.get_running_loop().call_soon(self._closed, lines.closing[0])

    def can_write_eof(self) -> bool:
        return False

    def pause_reading(self) -> None:
        self._reading = False

    def resume_reading(self) -> None:
        self._reading = True
        held, self._held = self._held, []
        self._deliver(held)
        if self._has_refused:
            self._has_refused = False
            self.message_lost(503)

    def close(self) -> None:
        asyncio.get_running_loop().call_soon(self.connection.connection_lost, None)

    def abort(self) -> None:
        self.close()
        if self.state is not SessionState.CLOSED:
            self.ended()


def _messages_of(body: bytes) -> Messages | None:
    try:
        messages = _decode_messages(body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    return messages if len(messages) <= _MAX_MESSAGES else None


def _client_head(size: int) -> bytes:
    """The head of a text frame, with its mask."""
    if size < 126:
        head = struct.pack(">BB", 0x81, 0x80 | size)
    elif size < 65536:
        head = struct.pack(">BBH", 0x81, 0xFE, size)
    else:
        head = struct.pack(">BBQ", 0x81, 0xFF, size)
    return head + _MASK
