"""One request on its way through the control plane, and the answers that carry its trace id.

aiohttp's server makes one for each head it has parsed, in place of its own request class: that one gathers what
few handlers ask for. Reads and judges nothing; the front does.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from typing import Any, Final, Protocol

import msgspec
from aiohttp.abc import AbstractStreamWriter
from aiohttp.helpers import set_exception
from aiohttp.http import RawRequestMessage
from aiohttp.streams import StreamReader

from redpoll.cluster.traces import new_trace_id
from redpoll.control.response import JSON, Outlet, Response
from redpoll.protocol import auth
from redpoll.protocol.apps import App
from redpoll.protocol.errors import ApiError
from redpoll.protocol.messages import Event
from redpoll.protocol.tokens import Token
from redpoll.proxies import TrustedProxies

__all__ = ["Carrier", "Request", "error_answer"]

_RETRY_AFTER: Final = b"Retry-After: 1\r\n"
# RFC 9110 15.5.2 wants a challenge on every 401; this is the one scheme of ours that has a name (RFC 6750).
_CHALLENGES: Final = {
    "token_expired": b'WWW-Authenticate: Bearer error="invalid_token", error_description="expired"\r\n',
    "token_revoked": b'WWW-Authenticate: Bearer error="invalid_token", error_description="revoked"\r\n',
    "insufficient_scope": b'WWW-Authenticate: Bearer error="insufficient_scope"\r\n',
}
_CHALLENGE: Final = b"WWW-Authenticate: Bearer\r\n"
_TRACE_HEAD: Final = JSON + b"X-Service-Trace-Id: "
# W3C trace context: version, trace id, parent, flags; the trace id must not be all zeros.
_TRACEPARENT: Final = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-[0-9a-f]{16}-[0-9a-f]{2}(-.*)?")
_encode: Final = msgspec.json.Encoder().encode


class Carrier(Outlet, Protocol):
    """What is known of the connection that a request came by. `hand_back` is None where it didn't come from a worker;
    `trusted` are the proxies whose word is taken."""

    @property
    def peername(self) -> Any: ...
    @property
    def trusted(self) -> TrustedProxies: ...
    @property
    def hand_back(self) -> object: ...
    async def leave(self, upgrade: RawRequestMessage) -> bool:
        """Hands it, with the Upgrade that was its last request, to a worker; False: nobody took it."""


class Request:
    """A request. `path` and `query` are as requested, since they are signed; `body` is set once it is read.

    Where the route wants a credential, `app` and `params` (the query's) are set before its handler is called;
    `caller_known`: they are, whatever was refused behind that. `token`: the caller showed one; None where it showed a
    key. `parameters` are the decoded segments of the path; `more_headers` are header lines that go with any answer.
    `said`: the events that a trigger call brought, once they are decoded; `sampled`: its spans are wanted.
    """

    __slots__ = (
        "_payload",
        "_task",
        "_trace_id",
        "app",
        "body",
        "caller_known",
        "headers",
        "message",
        "method",
        "more_headers",
        "parameters",
        "params",
        "path",
        "protocol",
        "query",
        "said",
        "sampled",
        "token",
        "writer",
    )

    app: App
    params: auth.Params
    parameters: tuple[str, ...]

    def __init__(
        self,
        message: RawRequestMessage,
        payload: StreamReader,
        protocol: Carrier,
        writer: AbstractStreamWriter,
        task: asyncio.Task[None],
    ) -> None:
        self.message = message
        self.method = message.method
        self.headers = message.headers
        self.protocol = protocol
        self.writer = writer
        self.path, _, self.query = message.path.partition("?")
        self.body = b""
        self.more_headers = b""
        self.token: Token | None = None
        self.said: Event | Sequence[Event] | None = None
        self.sampled = False
        self.caller_known = False
        self._payload = payload
        self._task = task
        self._trace_id: str | None = None

    # -- what aiohttp's server asks of a request -----------------------------------------------------------

    def _cancel(self, reason: BaseException) -> None:
        """The client is gone: whoever waits for the rest of the body is told."""
        set_exception(self._payload, reason)

    def _finish(self) -> None:
        """The handler is done; there is nothing to put away."""

    # -- what ours ask ------------------------------------------------------------------------------------

    @property
    def content(self) -> StreamReader:
        return self._payload

    @property
    def remote(self) -> str:
        """The client's address, as the worker knows it where the connection came from one, or as a trusted proxy
        names it: many clients may share one connection there."""
        peer = self.protocol.peername
        host: str = (peer[0] if isinstance(peer, tuple) else peer) or ""
        trusted = self.protocol.trusted
        return trusted.client_of(host, self.headers.getall("X-Forwarded-For", ())) if trusted else host

    @property
    def trace_id(self) -> str:
        """32 hex digits: the caller's, from `traceparent`, or a new one."""
        if self._trace_id is None:
            parent = self.headers.get("traceparent")
            known = None if parent is None else _TRACEPARENT.fullmatch(parent)
            self._trace_id = known[1] if known else new_trace_id()
        return self._trace_id

    @property
    def key(self) -> str:
        """The app's key that the caller showed, by header or in the signed query; for one with a token the key that
        the server signs with. Empty where the app has none."""
        if self.token is not None:
            signing = self.app.signing_key()
            return "" if signing is None else signing.key
        key = self.headers.get("X-Service-Key")
        return (self.param("auth_key") or "") if key is None else key

    def param(self, name: str) -> str | None:
        """The value of a query parameter; of a repeated one the last."""
        for each, value in reversed(self.params):
            if each == name:
                return value
        return None

    def answer(self, body: bytes, more_headers: bytes = b"") -> Response:
        """The 200 of the API: JSON, the trace id, and `more_headers` as whole lines."""
        return Response(
            200,
            body,
            b"%b%b\r\n%b%b" % (_TRACE_HEAD, self.trace_id.encode(), self.more_headers, more_headers),
        )

    def error(self, error: ApiError, status: int = 0) -> Response:
        """The error shape, with this call's trace id and headers. `status`: as in `error_answer`."""
        answer = error_answer(error, self.trace_id, status)
        answer.headers += self.more_headers
        return answer


def error_answer(error: ApiError, trace_id: str, status: int = 0) -> Response:
    """The one error shape (protocol.md 14.11): `{"error", "code", "status", "trace_id"}`.

    503 tells when to try again, 401 how to show a credential. `status` is for what HTTP has a status for and the list
    of codes has no code.
    """
    told: dict[str, Any] = error.body(trace_id)
    told["status"] = status = status or error.status
    more = _RETRY_AFTER if status == 503 else _CHALLENGES.get(error.code, _CHALLENGE if status == 401 else b"")
    return Response(status, _encode(told), b"%b%b\r\n%b" % (_TRACE_HEAD, trace_id.encode(), more))
