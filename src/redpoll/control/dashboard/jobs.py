"""Background jobs: work that takes longer than a request, with a page that shows the progress.

Jobs are in memory and end with the control plane. What a job has done by then stays done.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Sequence
from enum import StrEnum
from typing import Final
from weakref import WeakValueDictionary

import structlog

from redpoll.cluster.bus import Unavailable
from redpoll.control.dashboard.access import AccessControl, Visit
from redpoll.control.dashboard.pages import SECURITY
from redpoll.control.http.response import Response, header_line
from redpoll.control.http.router import Route
from redpoll.control.records.records import RecordError
from redpoll.protocol.errors import ApiError
from redpoll.store.errors import StoreUnavailable, reason_of

__all__ = ["MAX_FILE_BYTES", "File", "Job", "JobState", "Jobs", "Progress"]

log = structlog.get_logger(__name__)

# Of one user. The oldest that has ended makes room for a new one.
_MAX_JOBS_EACH: Final = 5
# Of all users; one user's jobs run one after another.
_MAX_PARALLEL: Final = 3
_EXPIRES_AFTER_S: Final = 600.0
# Of one file. The files of one user have no more together, so that three users at least can have files.
MAX_FILE_BYTES: Final = 64 * 1024 * 1024
_MAX_BYTES: Final = 3 * MAX_FILE_BYTES
_NOT_CONFIRMED: Final = "Not confirmed: the record store is not available at present. Try again."
_DELETED: Final = "The file was deleted to make room for newer ones. Export it again."


class Progress:
    """The progress of a job. `total` is 0 while it is not known. `missing`: rows that an export can't get."""

    def __init__(self, total: int = 0) -> None:
        self.total = total
        self.done = 0
        self.missing = 0


class File:
    """A file that a job created, for download. `note`: sentences about what is in it."""

    def __init__(self, name: str, type: str, body: bytes, note: str = "") -> None:
        self.name = name
        self.type = type
        self.body = body
        self.note = note


class JobState(StrEnum):
    """`DELETED`: it was done, and its file had to make room."""

    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    DELETED = "deleted"


class Job:
    """`result` is a sentence about the result, or about what is in the file. `back` is the page that started it.
    `changes`: what it has done before a failure stays done."""

    def __init__(self, title: str, user: str, back: str, progress: Progress, *, changes: bool) -> None:
        self.id = secrets.token_hex(8)
        self.title = title
        self.user = user
        self.back = back
        self.progress = progress
        self.changes = changes
        self.state = JobState.RUNNING
        self.result = ""
        self.file: File | None = None
        self.task: asyncio.Task[None] | None = None
        # Set when it has ended.
        self.expiry: asyncio.TimerHandle | None = None

    def delete_file(self) -> None:
        self.file, self.state, self.result = None, JobState.DELETED, _DELETED


# Does the work and returns a sentence about the result, or a file.
Work = Callable[[Progress], Awaitable[str | File]]


class Jobs:
    """Runs jobs and shows each to the user who started it."""

    def __init__(self, access: AccessControl) -> None:
        self._access = access
        # Those that have ended are in the order in which they did.
        self._jobs: dict[str, Job] = {}
        self._slots = asyncio.Semaphore(_MAX_PARALLEL)
        # By user name, while the user has jobs.
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    def routes(self) -> list[Route]:
        access = self._access
        return [
            access.route("GET", "/jobs/{job_id}", "job", self.show),
            access.route("GET", "/jobs/{job_id}/file", "job_file", self.file),
        ]

    def begin(
        self, visit: Visit, title: str, back: str, work: Work, total: int = 0, *, changes: bool = True
    ) -> Response:
        """Starts a job and redirects to its page. Raises ApiError if too many jobs of this user are running."""
        user = visit.session.user.name
        own = [job for job in self._jobs.values() if job.user == user]
        if len(own) >= _MAX_JOBS_EACH:
            oldest = next((job for job in own if job.state is not JobState.RUNNING), None)
            if oldest is None:
                raise ApiError("rate_limited", "Too many of your jobs are running. Wait until one has ended.")
            self._forget(oldest)
        job = Job(title, user, back, Progress(total), changes=changes)
        self._jobs[job.id] = job
        job.task = asyncio.get_running_loop().create_task(self._run(job, work), name="dashboard job")
        return visit.redirect(f"/dashboard/jobs/{job.id}")

    async def finish(self) -> None:
        tasks = [job.task for job in self._jobs.values() if job.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for job in list(self._jobs.values()):
            self._forget(job)

    def _forget(self, job: Job) -> None:
        if job.expiry is not None:
            job.expiry.cancel()
        self._jobs.pop(job.id, None)

    async def _run(self, job: Job, work: Work) -> None:
        turn = self._turns.setdefault(job.user, asyncio.Lock())
        try:
            async with turn, self._slots:
                result = await work(job.progress)
            if isinstance(result, File):
                job.file, job.result = result, result.note
            else:
                job.result = result
            job.state = JobState.DONE
        except (RecordError, Unavailable, ApiError) as error:
            job.state, job.result = JobState.FAILED, str(error)
        except StoreUnavailable as error:
            log.warning("record store not available for a dashboard job", title=job.title, reason=reason_of(error))
            job.state, job.result = JobState.FAILED, _NOT_CONFIRMED
        except Exception:
            log.exception("dashboard job failed", title=job.title)
            job.state, job.result = JobState.FAILED, "An internal error occurred. The server's log has the details."
        finally:
            self._ended(job)

    def _ended(self, job: Job) -> None:
        job.expiry = asyncio.get_running_loop().call_later(_EXPIRES_AFTER_S, self._forget, job)
        self._jobs[job.id] = self._jobs.pop(job.id, job)
        if job.file is not None:
            self._delete_files([other for other in self._jobs.values() if other.user == job.user], MAX_FILE_BYTES)
            self._delete_files(list(self._jobs.values()), _MAX_BYTES)

    @staticmethod
    def _delete_files(jobs: Sequence[Job], max_bytes: int) -> None:
        """Deletes the oldest files of these jobs, until the others have at most `max_bytes` together."""
        size = sum(len(job.file.body) for job in jobs if job.file is not None)
        for job in jobs:
            if job.file is not None and size > max_bytes:
                size -= len(job.file.body)
                job.delete_file()

    def _of(self, visit: Visit) -> Job:
        job = self._jobs.get(visit.request.parameters[0])
        if job is None or job.user != visit.session.user.name:
            raise ApiError(
                "not_found", "This job doesn't exist. Jobs are deleted ten minutes after they end, or for newer ones."
            )
        return job

    async def show(self, visit: Visit) -> Response:
        """GET /dashboard/jobs/{job_id}."""
        return visit.page("job.html", job=self._of(visit))

    async def file(self, visit: Visit) -> Response:
        """GET /dashboard/jobs/{job_id}/file."""
        job = self._of(visit)
        file = job.file
        if file is None:
            missing = _DELETED if job.state is JobState.DELETED else "The file is not ready yet."
            raise ApiError("not_found", missing)
        headers = header_line("Content-Type", file.type)
        headers += header_line("Content-Disposition", f'attachment; filename="{file.name}"')
        return Response(200, file.body, headers + b"Cache-Control: no-store\r\n" + SECURITY)
