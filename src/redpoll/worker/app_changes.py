"""What a changed app record means for the connections that are open: it counts at once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from redpoll import _engine
from redpoll.loop.slices import walk
from redpoll.protocol.errors import CLOSE_TEXTS, ApiError, Code
from redpoll.worker.hub.removed import REMOVALS
from redpoll.worker.timers.paced_close import Batch, PacedClose

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


class _Closing(NamedTuple):
    """What closes the connections of an app. `deleted` is the record that the app had; None: it is disabled."""

    batch: Batch
    deleted: App | None

    def stops_with(self, new: App) -> bool:
        """Whether the connections stay with this record. A new app with a deleted one's id is the same app if it has a
        key and secret of it. Otherwise the clients of the old one must not read what the new one publishes."""
        return new.enabled and (self.deleted is None or _shares_key(self.deleted, new))


class AppChanges:
    """Call `changed` when the directory has another record of an app; None: there is none. `end_readers` as
    Streams.end_app."""

    def __init__(
        self,
        hub: Hub,
        registry: Registry,
        janitor: Janitor,
        end_readers: Callable[[str, ApiError], None],
        paced_close: PacedClose | None = None,
    ) -> None:
        self._hub = hub
        self._registry = registry
        self._janitor = janitor
        self._end_readers = end_readers
        self._paced_close = paced_close or PacedClose()
        # By app, while connections of it are closed: for each of its deletions, and because it is disabled. Those of a
        # deleted app are closed whatever becomes of another one with its id.
        self._closings: dict[str, list[_Closing]] = {}

    def changed(self, app_id: str, old: App | None, new: App | None) -> None:
        if old is not None and new is not None and _is_another(old, new):
            # The directory was read after a deletion of which this worker got no message.
            self.changed(app_id, old, None)
            old = None
        self._hub.debugging.app_changed(app_id, new)
        if new is not None:
            self._hub.open_connections.app_changed(new)
            old = self._stop_closing(app_id, new) or old
        self._registry.app_changed(old, new)
        if old is None:
            return
        if new is None:
            self._close_deleted(app_id, old)
            return
        self._hub.users.app_changed(old, new)
        if bool(new.user_resume_s) != bool(old.user_resume_s):
            self._each_of_app(app_id, self._hub.user_resume.switch)
        if new.user_authentication_timeout_s != old.user_authentication_timeout_s:
            self._each_of_app(app_id, self._janitor.sign_in_timeout_changed)
        if not new.enabled and all(closing.deleted for closing in self._closings.get(app_id, ())):
            self._close_disabled(app_id)

    def _each_of_app(self, app_id: str, work: Callable[[Connection], None]) -> None:
        """Calls `work` with each open connection of the app, a slice of them in each pass of the loop. It follows the
        record as it is then."""

        def follow(connection: Connection) -> None:
            if connection.state == _engine.OPEN:
                work(connection)

        self._janitor.spawn(walk(self._hub.open_connections.each_of_app(app_id), follow))

    def _stop_closing(self, app_id: str, new: App) -> App | None:
        """The app may have been enabled, or made again, while its connections are closed: the others stay, and so do
        those that come now. Returns the record of the app that was deleted, which they have followed until now."""
        return self._stop_those(app_id, lambda closing: closing.stops_with(new))

    def _stop_those(self, app_id: str, which: Callable[[_Closing], bool]) -> App | None:
        """Returns `deleted` of the last of them."""
        deleted = None
        for closing in filter(which, self._closings.get(app_id, ())):
            closing.batch.cancel()
            deleted = closing.deleted
        self._forget_over(app_id)
        return deleted

    def _close_deleted(self, app_id: str, deleted: App) -> None:
        # Orders the deletion and the connections as it does removals, whatever the clock does.
        number = REMOVALS.next()

        def wanted(connection: Connection) -> bool:
            # An app that was made with this id since, and other keys, has connections of its own.
            return connection.client_seen.removals < number

        text = "the app was deleted"
        self._stop_those(app_id, lambda closing: closing.deleted is None)
        self._close_app(app_id, deleted, Code.UNKNOWN_KEY, text, wanted)
        self._end_readers(app_id, ApiError("unauthorized", text))

    def _close_disabled(self, app_id: str) -> None:
        def wanted(connection: Connection) -> bool:
            return not connection.session.app.enabled

        text = CLOSE_TEXTS[Code.APP_DISABLED]
        self._close_app(app_id, None, Code.APP_DISABLED, text, wanted)
        self._end_readers(app_id, ApiError("app_disabled", text))

    def _close_app(
        self, app_id: str, deleted: App | None, code: int, message: str, wanted: Callable[[Connection], bool]
    ) -> None:
        open_connections = self._hub.open_connections
        batch = self._paced_close.close(
            open_connections.each_of_app(app_id),
            open_connections.count_of_app(app_id),
            code,
            message,
            _CLOSED_WITHIN_S,
            wanted=wanted,
            ended=lambda: self._forget_over(app_id),
        )
        if not batch.over:
            self._closings.setdefault(app_id, []).append(_Closing(batch, deleted))

    def _forget_over(self, app_id: str) -> None:
        left = [closing for closing in self._closings.pop(app_id, ()) if not closing.batch.over]
        if left:
            self._closings[app_id] = left


def _is_another(old: App, new: App) -> bool:
    # Without a word it is a record of an earlier redpoll. Who gets one has the keys that it had, or was made again.
    return new.made not in ("", old.made) and not _shares_key(old, new)


def _shares_key(old: App, new: App) -> bool:
    known = {(key.key, key.secret) for key in old.keys}
    return any(key.enabled and (key.key, key.secret) in known for key in new.keys)
