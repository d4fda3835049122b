"""Which users are signed in on this worker, and that Redis knows it where somebody may ask.

A user's connections are held like a channel, `%u:U`, and only while the app has watchlists or lets users resume: else
a sign-in costs Redis nothing (cluster.md 7). Who watches is the business of watches.py.
"""

from collections.abc import Callable

from redpoll.cluster.membership.hold_call import SIGNED_IN
from redpoll.cluster.membership.local_channel import LocalChannel
from redpoll.protocol.apps import App

__all__ = ["SignedIn", "asked_for"]


def asked_for(app: App) -> bool:
    """Whether somebody wants to know on which workers a user of this app is signed in: those who watch the user, or
    the worker to which the user comes back."""
    return app.watchlist or app.user_resume_s > 0


class SignedIn:
    """Counts connections by user. `hold(app_id, pseudo, kind)` gives the Held of a pseudo-channel, `touch` has
    Redis told of its change."""

    def __init__(self, hold: Callable[[str, str, str], LocalChannel], touch: Callable[[LocalChannel], None]) -> None:
        self._hold = hold
        self._touch = touch
        self._connections: dict[str, dict[str, int]] = {}
        # Ids of the apps whose users Redis is told of.
        self._told: set[str] = set()

    def here(self, app_id: str, user_id: str) -> bool:
        """Whether the user is signed in on this worker and Redis knows, or is about to hear of it."""
        return app_id in self._told and user_id in self._connections.get(app_id, ())

    def sign_in(self, app: App, user_id: str) -> None:
        """One more connection of this user."""
        users = self._connections.setdefault(app.id, {})
        users[user_id] = users.get(user_id, 0) + 1
        if asked_for(app) and app.id not in self._told:
            self.switch(app.id, True)
        elif app.id in self._told:
            self._tell(app.id, user_id, users[user_id])

    def sign_out(self, app_id: str, user_id: str) -> None:
        """One connection less; every connection that signed in does this once, at its close."""
        users = self._connections[app_id]
        left = users[user_id] - 1
        if left:
            users[user_id] = left
        else:
            del users[user_id]
            if not users:
                del self._connections[app_id]
        if app_id in self._told:
            self._tell(app_id, user_id, left)

    def switch(self, app_id: str, on: bool) -> None:
        """The app's users are asked for from now on, or not any more: Redis is told of all of them, or that there are
        none."""
        if on == (app_id in self._told):
            return
        if on:
            self._told.add(app_id)
        else:
            self._told.discard(app_id)
        for user_id, count in self._connections.get(app_id, {}).items():
            self._tell(app_id, user_id, count if on else 0)

    def _tell(self, app_id: str, user_id: str, count: int) -> None:
        local_channel = self._hold(app_id, f"%u:{user_id}", SIGNED_IN)
        local_channel.attached = count
        self._touch(local_channel)
