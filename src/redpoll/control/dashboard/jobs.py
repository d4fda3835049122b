"""Background jobs: work that takes longer than a request, with a page that shows the progress.

Jobs are in memory and end with the control plane. What a job has done by then stays done.
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
from redpoll.control.http.response import Response, header_line
from redpoll.control.http.router import Route
from redpoll.control.records.records import RecordError
from redpoll.protocol.errors import ApiError

__all__ = ["File", "Job", "Jobs", "Progress"]

log = structlog.get_logger(__name__)

_MAX_JOBS: Final = 50
_MAX_PARALLEL: Final = 3
_EXPIRES_AFTER_S: Final = 600.0


class Progress:
    """The progress of a job. `total` is 0 while it is not known."""

    def __init__(self, total: int = 0) -> None:
        self.total = total
        self.done = 0


class File:
    """A file that a job created, for download."""

    def __init__(self, name: str, type: str, body: bytes) -> None:
        self.name = name
        self.type = type
        self.body = body


class Job:
    """`state` is running, done or failed; `result` is a sentence about the result. `back` is the page that started
    it."""

    def __init__(self, title: str, user: str, back: str, progress: Progress) -> None:
        self.id = secrets.token_hex(8)
        self.title = title
        self.user = user
        self.back = back
        self.progress = progress
        self.state = "running"
        self.result = ""
        self.file: File | None = None
        self.ended_at: float | None = None
        self.task: asyncio.Task[None] | None = None


# Does the work and returns a sentence about the result, or a file.
Work = Callable[[Progress], Awaitable[str | File]]


class Jobs:
    """Runs jobs and shows each to the user who started it."""

    def __init__(self, access: AccessControl) -> None:
        self._access = access
        self._jobs: dict[str, Job] = {}
        self._slots = asyncio.Semaphore(_MAX_PARALLEL)

    def routes(self) -> list[Route]:
        access = self._access
        return [
            access.route("GET", "/jobs/{job_id}", "job", self.show),
            access.route("GET", "/jobs/{job_id}/file", "job_file", self.file),
        ]

    def begin(self, visit: Visit, title: str, back: str, work: Work, total: int = 0) -> Response:
        """Starts a job and redirects to its page. Raises ApiError if there are too many jobs."""
        now = time.monotonic()
        for old in list(self._jobs.values()):
            if old.ended_at is not None and now - old.ended_at > _EXPIRES_AFTER_S:
                del self._jobs[old.id]
        if len(self._jobs) >= _MAX_JOBS:
            raise ApiError("rate_limited", "There are too many jobs. Wait until some have ended.")
        job = Job(title, visit.session.user.name, back, Progress(total))
        self._jobs[job.id] = job
        job.task = asyncio.get_running_loop().create_task(self._run(job, work), name="dashboard job")
        return visit.redirect(f"/dashboard/jobs/{job.id}")

    async def finish(self) -> None:
        tasks = [job.task for job in self._jobs.values() if job.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _run(self, job: Job, work: Work) -> None:
        try:
            async with self._slots:
                result = await work(job.progress)
            job.state = "done"
            if isinstance(result, File):
                job.file = result
            else:
                job.result = result
        except (RecordError, Unavailable, ApiError) as error:
            job.state, job.result = "failed", str(error)
        except Exception:
            log.exception("dashboard job failed", title=job.title)
            job.state, job.result = "failed", "An internal error occurred. The server's log has the details."
        finally:
            job.ended_at = time.monotonic()

    def _of(self, visit: Visit) -> Job:
        job = self._jobs.get(visit.request.parameters[0])
        if job is None or job.user != visit.session.user.name:
            raise ApiError("not_found", "This job doesn't exist. Jobs are deleted ten minutes after they end.")
        return job

    async def show(self, visit: Visit) -> Response:
        """GET /dashboard/jobs/{job_id}."""
        return visit.page("job.html", job=self._of(visit))

    async def file(self, visit: Visit) -> Response:
        """GET /dashboard/jobs/{job_id}/file."""
        file = self._of(visit).file
        if file is None:
            raise ApiError("not_found", "The file is not ready yet.")
        headers = header_line("Content-Type", file.type)
        headers += header_line("Content-Disposition", f'attachment; filename="{file.name}"')
        return Response(200, file.body, headers + b"Cache-Control: no-store\r\n" + SECURITY)
