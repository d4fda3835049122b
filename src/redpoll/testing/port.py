"""One TCP connection to a fake server: HTTP/1.1 by `h11`, and its upgrade to a WebSocket."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final, cast

import h11

from redpoll.control.http.response import Response, dateline, error_response
from redpoll.http.errors import upgrade_wanted
from redpoll.http.head import MAX_HEAD_BYTES, FieldTable, HeadFault, read_head, size_of_head
from redpoll.http.messages import FIELDS, MAX_BODY_BYTES
from redpoll.protocol.errors import ApiError
from redpoll.testing.request import Request
from redpoll.testing.socket import House, Socket, upgrade_fault

__all__ = ["Port", "request_of"]

_TABLE: Final = FieldTable(FIELDS)
_FIELDS: Final = {name.lower().encode(): name for name in FIELDS}


class Port(asyncio.Protocol):
    """`answer` answers a request. `ports` has all connections that are open; `none_left` is called when the last one
    of them has ended."""

    def __init__(
        self, house: House, answer: Callable[[Request], Response], ports: set[Port], none_left: Callable[[], None]
    ) -> None:
        self._house = house
        self._answer = answer
        self._ports = ports
        self._none_left = none_left
        self._parser = h11.Connection(h11.SERVER, max_incomplete_event_size=MAX_HEAD_BYTES)
        self._head: h11.Request | None = None
        self._body = bytearray()
        self._has_continued = False
        self.socket: Socket | None = None
        self.transport: asyncio.Transport

    # -- called by asyncio

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self._ports.add(self)

    def connection_lost(self, error: Exception | None) -> None:
        self._ports.discard(self)
        if self.socket is not None:
            self.socket.lost()
        if not self._ports:
            self._none_left()

    def data_received(self, data: bytes) -> None:
        if self.socket is not None:
            self.socket.received(data)
            return
        if self.transport.is_closing():
            return
        try:
            self._parser.receive_data(data)
            while self.socket is None and not self.transport.is_closing() and self._advance():
                pass
        except h11.RemoteProtocolError as error:
            # Without what was sent, which may be anything.
            text = str(error).partition(":")[0]
            self._refuse(error.error_status_hint, "bad_request", f"not an HTTP request: {text}")

    # -- HTTP

    def _advance(self) -> bool:
        """Takes the next part of a request. False: more bytes have to come."""
        event = self._parser.next_event()
        if event is h11.NEED_DATA:
            if self._parser.they_are_waiting_for_100_continue and not self._has_continued:
                self._has_continued = True
                self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            return False
        if isinstance(event, h11.Request):
            self._head = event
            self._body.clear()
            self._has_continued = False
            self._take_head(event)
        elif isinstance(event, h11.Data):
            self._body += event.data
            if len(self._body) > MAX_BODY_BYTES:
                self._refuse_body()
        elif isinstance(event, h11.EndOfMessage):
            self._respond()
        else:
            self.transport.close()
            return False
        return True

    def _take_head(self, head: h11.Request) -> None:
        headers = list(head.headers)
        try:
            fields = read_head(head.http_version.decode(), headers, _TABLE)
        except HeadFault as fault:
            self._refuse(fault.status, "bad_request", fault.text)
            return
        has_both_lengths = {b"content-length", b"transfer-encoding"} <= dict(headers).keys()
        if size_of_head(head.target, headers) > MAX_HEAD_BYTES:
            self._refuse(431, "bad_request", "the request head is larger than 16 KiB")
        elif has_both_lengths:
            self._refuse(400, "bad_request", "not an HTTP request: it has a length and a transfer coding")
        elif (fields.announced or 0) > MAX_BODY_BYTES:
            self._refuse_body()
        elif not fields.websocket:
            return
        elif (refusal := upgrade_fault(head.method, head.http_version, dict(headers))) is not None:
            status, text = refusal
            more = b"Sec-WebSocket-Version: 13\r\n" if status == 426 else b""
            self._refuse(status, "bad_request", text, more)
        else:
            self._upgrade(head)

    def _respond(self) -> None:
        head = self._head
        assert head is not None
        if head.target.startswith(b"/app/"):
            self.transport.write(upgrade_wanted())
            self.transport.close()
            return
        request = request_of(head, bytes(self._body))
        response = self._answer(request)
        names = dict(head.headers)
        is_1_0 = head.http_version == b"1.0"
        connection = names.get(b"connection", b"").lower()
        if b"close" in connection or (is_1_0 and b"keep-alive" not in connection):
            response.keep_alive = False
        self._write(response, request.method, is_1_0)
        rest, _ = self._parser.trailing_data
        self._parser = h11.Connection(h11.SERVER, max_incomplete_event_size=MAX_HEAD_BYTES)
        if rest:
            self._parser.receive_data(rest)

    def _write(self, response: Response, method: str, is_1_0: bool = False) -> None:
        dateline.tick()
        self.transport.write(response.render(method, http_1_0=is_1_0))
        if not response.keep_alive:
            self.transport.close()

    def _refuse_body(self) -> None:
        self._refuse(413, "payload_too_large", f"the body is larger than {MAX_BODY_BYTES} bytes")

    def _refuse(self, status: int, code: str, text: str, more_headers: bytes = b"") -> None:
        response = error_response(ApiError(code, text), Request.new_trace_id(), status)
        response.headers += more_headers
        response.keep_alive = False
        self._write(response, "GET")

    def _upgrade(self, head: h11.Request) -> None:
        """Hands the connection over, with its head as `websockets` reads it."""
        while not isinstance(self._parser.next_event(), h11.EndOfMessage | type(h11.NEED_DATA)):
            pass
        rest, _ = self._parser.trailing_data
        lines = [b"%b %b HTTP/%b" % (head.method, head.target, head.http_version)]
        lines += [b"%b: %b" % (name, value) for name, value in head.headers]
        self.socket = Socket(self._house, self.transport)
        self.socket.received(b"\r\n".join(lines) + b"\r\n\r\n" + rest)


def request_of(head: h11.Request, body: bytes) -> Request:
    headers = {_FIELDS[name]: value.decode("latin-1") for name, value in head.headers if name in _FIELDS}
    return Request(head.method.decode(), head.target.decode("latin-1"), headers, body)
