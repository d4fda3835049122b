"""The settings as they are now: `redpoll reload` asks the supervisor to read them again, which says what changed."""

import asyncio
from collections.abc import Callable
from typing import Any

from redpoll.config.settings import Settings
from redpoll.ipc.messages import FromChild, Reload
from redpoll.text import logs

__all__ = ["LiveSettings"]


class LiveSettings:
    """`now` are the present settings. `tell` sends to the supervisor."""

    def __init__(self, settings: Settings, tell: Callable[[FromChild], None]) -> None:
        self.now = settings
        self._tell = tell
        self._waiting: list[asyncio.Future[dict[str, Any]]] = []

    async def reload(self) -> dict[str, Any]:
        """Makes the supervisor read the settings and the certificate again. Returns `Reloaded.answer`."""
        waiting: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._waiting.append(waiting)
        self._tell(Reload())
        return await waiting

    def reloaded(self, answer: dict[str, Any]) -> None:
        """The supervisor's answer."""
        for waiting in self._waiting:
            if not waiting.done():
                waiting.set_result(answer)
        self._waiting.clear()

    def changed(self, changes: dict[str, Any]) -> None:
        """A reload changed these settings (Setting.is_live)."""
        self.now = self.now.changed_by(changes)
        if "log_level" in changes:
            logs.configure(self.now, "control")
