"""One HTTP request on its way through the control plane, and the responses that carry its trace id.

A worker's message (worker_requests.py) and a request to the control port (connections.py) both become one of these, so
that one table of handlers serves both. It holds what was received and what the front found out; it judges nothing.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from redpoll.cluster.traces import new_trace_id
from redpoll.control.response import JSON, Response
from redpoll.http_messages import MAX_BODY_BYTES
from redpoll.protocol import auth
from redpoll.protocol.apps import App
from redpoll.protocol.errors import ApiError
from redpoll.protocol.messages import Event
from redpoll.protocol.tokens import Token

__all__ = ["CutOff", "Request", "error_answer", "too_large"]

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


class CutOff(Exception):
    """A refusal after which the connection closes: what follows can't be told from what was refused."""

    def __init__(self, status: int, code: str, text: str) -> None:
        super().__init__(status, code, text)
        self.status = status
        self.code = code
        self.text = text

    def __str__(self) -> str:
        return self.text


def too_large() -> CutOff:
    return CutOff(413, "payload_too_large", f"the body is larger than {MAX_BODY_BYTES} bytes")


class Request:
    """A request. `path` and `query` are as received, since they are signed; `body` is empty until it is read.

    `headers` are looked up by the names in http_messages.FIELDS; on the control port by any name. `remote` is the
    client's address, as a trusted proxy names it where there is one; `secure`: the client came by TLS; `from_worker`:
    it came to the public port.

    Where the route wants a credential, `app` and `params` (the query's) are set before its handler is called;
    `caller_known`: they are, whatever was refused after that. `token`: the caller showed one; None where it showed a
    key. `parameters` are the decoded segments of the path; `more_headers` are header lines that go with any answer.
    `said`: the events that a trigger call brought, once they are decoded; `sampled`: its spans are wanted. `began`:
    when the front received it (time.perf_counter).
    """

    __slots__ = (
        "_trace_id",
        "app",
        "began",
        "body",
        "caller_known",
        "from_worker",
        "headers",
        "method",
        "more_headers",
        "parameters",
        "params",
        "path",
        "query",
        "remote",
        "route",
        "said",
        "sampled",
        "secure",
        "token",
    )

    app: App
    params: auth.Params
    parameters: tuple[str, ...]
    # The router.Route, which names this class and so can't be named here.
    route: Any
    began: float

    def __init__(self, method: str, target: str, headers: Mapping[str, str], body: bytes) -> None:
        self.method = method
        self.path, _, self.query = target.partition("?")
        self.headers = headers
        self.body = body
        self.remote = ""
        self.secure = False
        self.from_worker = False
        self.more_headers = b""
        self.token: Token | None = None
        self.said: Event | Sequence[Event] | None = None
        self.sampled = False
        self.caller_known = False
        self._trace_id: str | None = None

    def respond(self, response: Response) -> None:
        """Send the response to the client. The front calls this once for each request."""
        raise NotImplementedError

    @property
    def target(self) -> str:
        """Path and query, as received."""
        return f"{self.path}?{self.query}" if self.query else self.path

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
    if not told["error"].isascii():
        # A text may quote the caller, whose bytes need not be UTF-8.
        told["error"] = told["error"].encode("utf-8", "replace").decode()
    more = _RETRY_AFTER if status == 503 else _CHALLENGES.get(error.code, _CHALLENGE if status == 401 else b"")
    return Response(status, _encode(told), b"%b%b\r\n%b" % (_TRACE_HEAD, trace_id.encode(), more))
