"""Whether this server is alive, and whether it is ready: `/healthz`, `/readyz` and `/`.

Ready is only what can serve: Redis answers, the directory is written, each worker of this machine has been ready
once, and no stop has begun (decisions.md). The other pieces tell; nothing is looked up here.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Final

from redpoll.control.request import Request
from redpoll.control.response import Response, header_line
from redpoll.protocol.errors import ApiError

__all__ = ["Health"]

_TEXT: Final = header_line("Content-Type", "text/plain; charset=utf-8")


class Health:
    """`redis_answers()` is asked at every request; the rest is told once and kept. `enter` answers `/` on the control
    port, where people come to the dashboard."""

    def __init__(
        self, redis_answers: Callable[[], bool], enter: Callable[[Request], Awaitable[Response]] | None = None
    ) -> None:
        self.directory_written = False
        self.workers_ready = False
        self.draining = False
        self._redis_answers = redis_answers
        self._enter = enter

    def obstacle(self) -> str | None:
        """Why this server isn't ready, in one sentence; None when it is."""
        if self.draining:
            return "this server is being stopped"
        if not self._redis_answers():
            return "Redis doesn't answer"
        if not self.directory_written:
            return "the directory of apps isn't written yet"
        if not self.workers_ready:
            return "not every worker is ready yet"
        return None

    async def live(self, call: Request) -> Response:
        """GET /healthz: 200 as long as the process answers at all."""
        return Response(200, b'{"status":"ok"}')

    async def ready(self, call: Request) -> Response:
        """GET /readyz: 200, or 503 `unavailable` with the reason as its text."""
        obstacle = self.obstacle()
        if obstacle is not None:
            raise ApiError("unavailable", obstacle)
        return Response(200, b'{"status":"ready"}')

    async def root(self, call: Request) -> Response:
        """GET /: `OK`, for load balancers and for people with a browser; on the control port the way in for these."""
        if self._enter is not None and call.protocol.hand_back is None:
            return await self._enter(call)
        return Response(200, b"OK", _TEXT)
