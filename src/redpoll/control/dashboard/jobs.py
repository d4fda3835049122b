"""Work that takes longer than a click: it goes on by itself, and a page shows how far it is.

In memory: a control plane that ends takes its jobs with it, and what they had done stays done.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Awaitable, Callable
from typing import Final

import structlog

from redpoll.cluster.bus import Unavailable
from redpoll.control.dashboard.access import AccessControl, Visit
from redpoll.control.dashboard.pages import SECURITY
from redpoll.control.records import RecordError
from redpoll.control.response import Response, header_line
from redpoll.control.router import Route
from redpoll.protocol.errors import ApiError

__all__ = ["File", "Job", "Jobs", "Progress"]

log = structlog.get_logger(__name__)

_MOST: Final = 50
_AT_A_TIME: Final = 3
_KEPT_S: Final = 600.0


class Progress:
    """How far it is. `total` 0: not known yet."""

    def __init__(self, total: int = 0) -> None:
        self.total = total
        self.done = 0


class File:
    """What a job made, to be taken home."""

    def __init__(self, name: str, type: str, body: bytes) -> None:
        self.name = name
        self.type = type
        self.body = body


class Job:
    """`state`: running, done or failed, with a sentence in `told`. `back` is the page that it was begun on."""

    def __init__(self, title: str, user: str, back: str, progress: Progress) -> None:
        self.id = secrets.token_hex(8)
        self.title = title
        self.user = user
        self.back = back
        self.progress = progress
        self.state = "running"
        self.told = ""
        self.file: File | None = None
        self.ended_at: float | None = None
        self.task: asyncio.Task[None] | None = None


# Does the work; what it returns is a sentence about what was done, or a file.
Work = Callable[[Progress], Awaitable[str | File]]


class Jobs:
    """Runs jobs and shows them, each to who began it."""

    def __init__(self, door: AccessControl) -> None:
        self._door = door
        self._jobs: dict[str, Job] = {}
        self._slots = asyncio.Semaphore(_AT_A_TIME)

    def routes(self) -> list[Route]:
        door = self._door
        return [
            door.route("GET", "/jobs/{job_id}", "job", self.show),
            door.route("GET", "/jobs/{job_id}/file", "job_file", self.file),
        ]

    def begin(self, visit: Visit, title: str, back: str, work: Work, total: int = 0) -> Response:
        """Begins, and goes on to the page that shows it. Raises ApiError where too many are there."""
        now = time.monotonic()
        for each in list(self._jobs.values()):
            if each.ended_at is not None and now - each.ended_at > _KEPT_S:
                del self._jobs[each.id]
        if len(self._jobs) >= _MOST:
            raise ApiError("rate_limited", "Too much is being worked on. Wait for some of it to end.")
        job = Job(title, visit.session.user.name, back, Progress(total))
        self._jobs[job.id] = job
        job.task = asyncio.get_running_loop().create_task(self._run(job, work), name="dashboard job")
        return visit.redirect(f"/dashboard/jobs/{job.id}")

    async def finish(self) -> None:
        tasks = [each.task for each in self._jobs.values() if each.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _run(self, job: Job, work: Work) -> None:
        try:
            async with self._slots:
                made = await work(job.progress)
            job.state = "done"
            if isinstance(made, File):
                job.file = made
            else:
                job.told = made
        except (RecordError, Unavailable, ApiError) as error:
            job.state, job.told = "failed", str(error)
        except Exception:
            log.exception("dashboard job failed", title=job.title)
            job.state, job.told = "failed", "The server failed; its log says why."
        finally:
            job.ended_at = time.monotonic()

    def _of(self, visit: Visit) -> Job:
        job = self._jobs.get(visit.call.parameters[0])
        if job is None or job.user != visit.session.user.name:
            raise ApiError("not_found", "There is no such work; what it made is kept for ten minutes.")
        return job

    async def show(self, visit: Visit) -> Response:
        """GET /dashboard/jobs/{job_id}."""
        return visit.page("job.html", job=self._of(visit))

    async def file(self, visit: Visit) -> Response:
        """GET /dashboard/jobs/{job_id}/file."""
        file = self._of(visit).file
        if file is None:
            raise ApiError("not_found", "It isn't made yet.")
        headers = header_line("Content-Type", file.type)
        headers += header_line("Content-Disposition", f'attachment; filename="{file.name}"')
        return Response(200, file.body, headers + b"Cache-Control: no-store\r\n" + SECURITY)
