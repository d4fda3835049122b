"""Health checks: `/healthz` (alive), `/readyz` (ready) and `/`.

The server is ready if Redis answers and delivers messages, every worker of this machine has reported ready once (so it
has the app records), and the server isn't stopping or drained. Other modules set these facts.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Final

from redpoll.cluster.lifecycle import Life
from redpoll.control.http.request import Request
from redpoll.control.http.response import Response, header_line
from redpoll.protocol.errors import ApiError

__all__ = ["Health"]

_TEXT: Final = header_line("Content-Type", "text/plain; charset=utf-8")


class Health:
    """`life` is control's. `redis_answers()` is called at every request; the attributes are set when their fact
    changes. `enter` answers `/` on the control port, where it leads to the dashboard."""

    def __init__(
        self,
        life: Life,
        redis_answers: Callable[[], bool],
        enter: Callable[[Request], Awaitable[Response]] | None = None,
    ) -> None:
        self.directory_written = False
        self.workers_ready = False
        # Workers that get no messages from Redis.
        self.deaf: Sequence[int] = ()
        # Workers that can't reach Redis and admit no clients.
        self.cut_off: Sequence[int] = ()
        self._life = life
        self._redis_answers = redis_answers
        self._enter = enter

    def obstacle(self) -> str | None:
        """Why this server isn't ready, in one sentence; None if it is ready."""
        if self._life.ends:
            return "this server is stopping"
        if not self._life.admits:
            return "an operator drains this server"
        if not self._redis_answers():
            return "Redis doesn't answer"
        if not self.workers_ready:
            # Once they are ready, workers keep their records when Redis loses the directory.
            return (
                "not every worker is ready yet" if self.directory_written else "the directory of apps isn't written yet"
            )
        if self.deaf:
            return f"Redis delivers no messages to {_names(self.deaf)}"
        if self.cut_off:
            return f"{_names(self.cut_off)} can't reach Redis"
        return None

    async def live(self, request: Request) -> Response:
        """GET /healthz: always 200."""
        return Response(200, b'{"status":"ok"}')

    async def ready(self, request: Request) -> Response:
        """GET /readyz: 200, or 503 `unavailable` with the reason."""
        obstacle = self.obstacle()
        if obstacle is not None:
            raise ApiError("unavailable", obstacle)
        return Response(200, b'{"status":"ready"}')

    async def root(self, request: Request) -> Response:
        """GET /: `OK`, for load balancers; on the control port, the dashboard."""
        if self._enter is not None and not request.from_worker:
            return await self._enter(request)
        return Response(200, b"OK", _TEXT)


def _names(numbers: Sequence[int]) -> str:
    return " and ".join(f"worker {number}" for number in numbers)
