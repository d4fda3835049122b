"""One HTTP request to the control plane, and the responses that carry its trace id.

Requests that a worker forwards (worker_requests.py) and requests to the control port (control_port.py) are subclasses
of Request, so one table of handlers serves both. A Request holds what was received and what the front found out about
it: its route, its app and its credential.
"""

from __future__ import annotations

import re
from typing import Any, Final, NamedTuple

from redpoll._http import IncomingRequest
from redpoll._publish import Call
from redpoll.cluster.traces import new_trace_id
from redpoll.control.http.response import TRACE_HEAD, Response, error_response
from redpoll.http.messages import AUTHENTICATED, CLOSES, CONTINUE, HEAD_ONLY, HTTP_1_0, LAST
from redpoll.protocol import auth
from redpoll.protocol.credentials import key_of
from redpoll.protocol.errors import ApiError
from redpoll.protocol.tokens import Token

__all__ = ["Parent", "Request"]

# W3C Trace Context: version, trace id, parent id, flags. The trace id must not be all zeros.
_TRACEPARENT: Final = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_SAMPLED: Final = 1


class Parent(NamedTuple):
    """The caller's span, from `traceparent`. `is_recorded`: the caller records this trace."""

    span_id: str
    is_recorded: bool


class Request(IncomingRequest):
    """A request, as it was received.

    `path` and `query` are not decoded, because they are signed. `body` is empty until it has been read. `headers` of a
    request from a worker have only the names in http/messages.FIELDS. `remote` is the client's address, or the one
    that a trusted proxy reports. `secure`: the client used TLS. `from_worker`: the request came to the public port.
    `flags`, `announced` and `refusal`: as of http/reader.ParsedRequest.

    The front sets the rest. `route` (a router.Route) and `parameters`: the decoded segments of the path. `app` is set
    before the handler runs, if the route needs a credential; `caller_known`: it is set, even if the request was refused
    later. `token` is None if the client authenticated with a key. `more_headers` are added to every response.
    `decoded`: what a trigger publishes, once its body is decoded. `sampled`: the events are traced. `began`: when the
    front received the request (time.perf_counter). Read these only if `sampled`: `began_us`, the Unix time of `began`
    in µs, and `call`, what control/tracing/spans.py remembers of the request.
    """

    __slots__ = ("began_us", "call")

    from_worker = False
    token: Token | None
    decoded: Call | None
    began_us: int
    call: Any

    def answer(self, flags: int, response: bytes) -> None:
        """Send a whole response, or CONTINUE, to the reader of the connection; `flags` as in http/messages.py."""
        raise NotImplementedError

    def respond(self, response: Response) -> None:
        """Send the response to the client. The front calls this once per request."""
        flags = AUTHENTICATED if self.caller_known else 0
        if self.flags & (CLOSES | HEAD_ONLY):
            # After a head alone, what comes next is a body that nobody reads.
            response.keep_alive = False
        if not response.keep_alive:
            flags |= LAST
        self.answer(flags, response.render(self.method, http_1_0=self.flags & HTTP_1_0 != 0))

    def let_body_in(self) -> None:
        """The head is good: the body may be read, and the request comes again as a whole."""
        self.answer(CONTINUE | (AUTHENTICATED if self.route.wants_credential else 0), b"")

    @property
    def target(self) -> str:
        """Path and query, as received."""
        return f"{self.path}?{self.query}" if self.query else self.path

    @property
    def trace_id(self) -> str:
        """32 hex digits: the client's, from its `traceparent` header, or new ones."""
        if self.found_trace_id is None:
            parent = self.headers.get("traceparent")
            known = None if parent is None else _TRACEPARENT.fullmatch(parent)
            self.found_trace_id = known[1] if known else new_trace_id()
        return self.found_trace_id

    @property
    def parent(self) -> Parent | None:
        """The caller's span; None without a valid `traceparent`."""
        header = self.headers.get("traceparent")
        known = None if header is None else _TRACEPARENT.fullmatch(header)
        if known is None or not known[2].strip("0"):
            return None
        return Parent(known[2], bool(int(known[3], 16) & _SAMPLED))

    @property
    def params(self) -> auth.Params:
        """The parameters of the query, the signature's own too."""
        if self.found_params is None:
            self.found_params = auth.parse_query(self.query)
        return self.found_params

    @params.setter
    def params(self, params: auth.Params) -> None:
        self.found_params = params

    @property
    def key(self) -> str:
        """The app key of the request, from its headers or its signed query.

        For a request with a token, the key that the server signs with; empty if the app has no enabled key.
        """
        if self.found_key is not None:
            return self.found_key
        return key_of(self.app, self.token, self.headers, self.params)

    def param(self, name: str) -> str | None:
        """The value of a query parameter; the last one if it is repeated."""
        for param, value in reversed(self.params):
            if param == name:
                return value
        return None

    def ok(self, body: bytes, more_headers: bytes = b"") -> Response:
        """A 200 response of the API, with JSON, the trace id and `more_headers` (complete lines)."""
        return Response(
            200,
            body,
            b"%b%b\r\n%b%b" % (TRACE_HEAD, self.trace_id.encode(), self.more_headers, more_headers),
        )

    def error(self, error: ApiError, status: int = 0) -> Response:
        """An error response with this request's trace id and headers. `status`: as in `error_response`."""
        response = error_response(error, self.trace_id, status)
        response.headers += self.more_headers
        return response
