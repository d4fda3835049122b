"""One HTTP request to a fake server, and what was found out about it."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import TYPE_CHECKING

from redpoll.control.http.response import JSON, TRACE_HEAD, Response, error_response
from redpoll.protocol import auth
from redpoll.protocol.credentials import key_of

if TYPE_CHECKING:
    from redpoll.protocol.apps import App
    from redpoll.protocol.errors import ApiError
    from redpoll.protocol.tokens import Token
    from redpoll.testing.space import Space

__all__ = ["Request"]


class Request:
    """`path` and `query` are not decoded, because they are signed. `headers` has the names of http/messages.FIELDS.
    `parameters`, `space`, `token` and `params` are set by the API before the handler runs."""

    def __init__(self, method: str, target: str, headers: Mapping[str, str], body: bytes) -> None:
        self.method = method
        self.path, _, self.query = target.partition("?")
        self.headers = headers
        self.body = body
        self.parameters: tuple[str, ...] = ()
        self.params: auth.Params = []
        self.token: Token | None = None
        self.space: Space
        self.more_headers = b""
        self._trace_id = self.new_trace_id()

    @staticmethod
    def new_trace_id() -> str:
        return secrets.token_hex(16)

    @property
    def app(self) -> App:
        return self.space.app

    @property
    def key(self) -> str:
        """The app key of the credential, or the one that the server signs with."""
        return key_of(self.app, self.token, self.headers, self.params)

    def param(self, name: str) -> str | None:
        """The value of a query parameter; the last one if it is repeated."""
        return dict(self.params).get(name)

    def ok(self, body: bytes) -> Response:
        trace = b"%b%b\r\n" % (TRACE_HEAD, self._trace_id.encode())
        return Response(200, body, trace + self.more_headers)

    def error(self, error: ApiError) -> Response:
        response = error_response(error, self._trace_id)
        response.headers += self.more_headers
        return response

    @staticmethod
    def plain(body: bytes, content_type: bytes = JSON) -> Response:
        """An answer without a trace id, of routes that aren't an app's."""
        return Response(200, body, content_type)
