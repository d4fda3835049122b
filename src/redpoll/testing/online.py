"""Which users of a fake server are signed in, and whom their watchers see as online."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from redpoll.protocol.users import OFFLINE_AFTER_S
from redpoll.testing.clock import Clock, Timer

__all__ = ["Group", "SignedInUsers"]


class Group(dict[Any, None]):
    """A set of connections in the order in which they came."""

    def add(self, connection: Any, /) -> bool:
        if connection in self:
            return False
        self[connection] = None
        return True

    def discard(self, connection: Any, /) -> bool:
        if connection not in self:
            return False
        del self[connection]
        return True


class SignedInUsers:
    """Connections by app and user. A user who goes offline is reported 3 s later, unless back by then. `report` gets
    each change of a watched user."""

    def __init__(self, clock: Clock, report: Callable[[str, str, bool], None]) -> None:
        self._clock = clock
        self._report = report
        self._connections: dict[tuple[str, str], Group] = {}
        self._watched: set[tuple[str, str]] = set()
        self._leaving: dict[tuple[str, str], Timer] = {}

    def add(self, app_id: str, user_id: str, connection: Any) -> None:
        key = (app_id, user_id)
        group = self._connections.setdefault(key, Group())
        is_first = not group
        group.add(connection)
        timer = self._leaving.pop(key, None)
        if timer is not None:
            timer.cancel()
        if is_first and key in self._watched:
            self._report(app_id, user_id, True)

    def discard(self, app_id: str, user_id: str, connection: Any) -> None:
        key = (app_id, user_id)
        group = self._connections.get(key)
        if group is None or not group.discard(connection) or group:
            return
        del self._connections[key]
        self._leaving[key] = self._clock.call_later(OFFLINE_AFTER_S, lambda: self._left(key))

    def of(self, app_id: str, user_id: str) -> list[Any]:
        """The connections that are signed in as this user."""
        return list(self._connections.get((app_id, user_id), ()))

    # -- worker.hub.watchlists.Online

    def watch(self, app_id: str, user_id: str) -> bool | None:
        self._watched.add((app_id, user_id))
        return (app_id, user_id) in self._connections

    def unwatch(self, app_id: str, user_id: str) -> None:
        self._watched.discard((app_id, user_id))

    def _left(self, key: tuple[str, str]) -> None:
        del self._leaving[key]
        if key in self._watched:
            self._report(*key, False)
