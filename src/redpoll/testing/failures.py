"""Requests to the HTTP API that a test wants to fail."""

from __future__ import annotations

from collections import deque
from http import HTTPStatus
from typing import Final

from redpoll.control.http.response import Response, header_line
from redpoll.protocol.errors import HTTP_STATUS, ApiError
from redpoll.testing.request import Request

__all__ = ["Failures"]

_STATUSES: Final = frozenset(status.value for status in HTTPStatus if status.value >= 400)
_MAX_WAITING: Final = 10_000
# What a proxy in front of a server that doesn't answer sends.
_PROXY_PAGE: Final = "<html><head><title>{status} {phrase}</title></head><body><h1>{status} {phrase}</h1></body></html>"


class Failures:
    """The statuses of the next requests, in order."""

    def __init__(self) -> None:
        self._waiting: deque[int] = deque()

    def add(self, status: int, times: int) -> None:
        """The next `times` requests get this status and do nothing. A status that the server never sends, such as 502,
        comes as a proxy's HTML page. Raises ValueError."""
        if status not in _STATUSES or not 1 <= times <= _MAX_WAITING:
            raise ValueError(f"fail takes a status of an error and how often, not {status} and {times}")
        self._waiting.extend([status] * times)

    def reset(self) -> None:
        self._waiting.clear()

    def answer(self, request: Request) -> Response | None:
        """The answer to this request if it is to fail."""
        if not self._waiting:
            return None
        status = self._waiting.popleft()
        code = next((code for code, known in HTTP_STATUS.items() if known == status), None)
        if code is None:
            page = _PROXY_PAGE.format(status=status, phrase=HTTPStatus(status).phrase)
            return Response(status, page.encode(), b"Content-Type: text/html\r\n", keep_alive=False)
        if status == 429:
            code = "rate_limited"
            request.more_headers += header_line("Retry-After", "1")
        return request.error(ApiError(code, f"the test asked for {status} (fail)"))
