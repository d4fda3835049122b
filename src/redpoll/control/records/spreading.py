"""Commands and the management API answer a change when all workers use the changed record.

Otherwise a client that connects right after `app create` could meet a worker that doesn't know the app yet, and a join
right after `webhook create` could stay without a webhook.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import structlog

from redpoll.cluster.bus import Unavailable
from redpoll.cluster.questions import KnowDirectory

if TYPE_CHECKING:
    from redpoll.cluster.directory import DirectoryVersion
    from redpoll.cluster.survey import Survey
    from redpoll.control.records.loaded_records import LoadedRecords

__all__ = ["Spreading"]

log = structlog.get_logger(__name__)


class Spreading:
    """Asks the workers of all nodes for the version of their app directory."""

    def __init__(self, records: LoadedRecords, survey: Survey) -> None:
        self._records = records
        self._survey = survey
        self._asking = asyncio.Lock()
        self._asked: DirectoryVersion | None = None

    async def wait(self) -> None:
        """Returns when all living workers use the present records. If some don't answer within 2 s, or Redis is away,
        the log says so: the change is made, and they will get it."""
        # One question at a time answers all that wait for it.
        async with self._asking:
            version = self._records.directory
            if self._asked == version:
                return
            try:
                await self._survey.ask(KnowDirectory(version.number))
            except Unavailable as error:
                log.warning("not all workers have confirmed the changed records", reason=str(error))
            self._asked = version
