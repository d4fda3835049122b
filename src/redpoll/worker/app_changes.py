"""What a changed app record means for the connections that are open: it counts at once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from redpoll import _engine
from redpoll.loop.slices import walk
from redpoll.protocol.errors import CLOSE_TEXTS, ApiError, Code
from redpoll.worker.timers.paced_close import PacedClose

if TYPE_CHECKING:
    from collections.abc import Callable

    from redpoll.cluster.membership.registry import Registry
    from redpoll.protocol.apps import App
    from redpoll.worker.hub.connection import Connection
    from redpoll.worker.hub.hub import Hub
    from redpoll.worker.timers.janitor import Janitor

__all__ = ["AppChanges"]

# Over how long the connections of an app that was disabled or deleted are closed.
_CLOSED_WITHIN_S: Final = 10.0


class AppChanges:
    """Call `changed` when the directory has another record of an app; None: there is none. `end_readers` as
    Streams.end_app."""

    def __init__(
        self, hub: Hub, registry: Registry, janitor: Janitor, end_readers: Callable[[str, ApiError], None]
    ) -> None:
        self._hub = hub
        self._registry = registry
        self._janitor = janitor
        self._end_readers = end_readers
        self._paced_close = PacedClose()

    def changed(self, app_id: str, old: App | None, new: App | None) -> None:
        self._hub.debugging.app_changed(app_id, new)
        if new is not None:
            self._hub.open_connections.app_changed(new)
        self._registry.app_changed(old, new)
        if old is None:
            return
        if new is None:
            text = "the app was deleted"
            self._close_app(app_id, Code.UNKNOWN_KEY, text, ApiError("unauthorized", text))
            return
        self._hub.users.app_changed(old, new)
        if bool(new.user_resume_s) != bool(old.user_resume_s):
            self._each_of_app(app_id, self._hub.user_resume.switch)
        if new.user_authentication_timeout_s != old.user_authentication_timeout_s:
            self._each_of_app(app_id, self._janitor.sign_in_timeout_changed)
        if not new.enabled:
            text = CLOSE_TEXTS[Code.APP_DISABLED]
            self._close_app(app_id, Code.APP_DISABLED, text, ApiError("app_disabled", text))

    def _each_of_app(self, app_id: str, work: Callable[[Connection], None]) -> None:
        """Calls `work` with each open connection of the app, a slice of them in each pass of the loop. It follows the
        record as it is then."""

        def follow(connection: Connection) -> None:
            if connection.state == _engine.OPEN:
                work(connection)

        self._janitor.spawn(walk(self._hub.open_connections.each_of_app(app_id), follow))

    def _close_app(self, app_id: str, code: int, message: str, error: ApiError) -> None:
        open_connections = self._hub.open_connections
        count = open_connections.count_of_app(app_id)
        self._paced_close.close(open_connections.each_of_app(app_id), count, code, message, _CLOSED_WITHIN_S)
        self._end_readers(app_id, error)
