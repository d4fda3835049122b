"""Counts the signed-in users of this worker, and tells Redis about them in apps that need it.

A user's connections are held like a channel, `%u:U`, only while the app has watchlists or user resume. In other apps a
sign-in costs Redis nothing. online.py is the reading side.
"""

from redpoll.cluster.membership.hold_call import SIGNED_IN
from redpoll.cluster.membership.local_channels import LocalChannels
from redpoll.cluster.redis.keys import user_pseudo
from redpoll.loop.slices import Slices
from redpoll.protocol.apps import App

__all__ = ["SignedInUsers", "needs_sign_ins"]


def needs_sign_ins(app: App) -> bool:
    """Whether Redis must know on which workers the app's users are signed in: for watchers, or for the worker to which
    a user returns."""
    return app.watchlist or app.user_resume_s > 0


class SignedInUsers:
    """Counts connections by user. After a switch, a slice of the app's users is told to Redis in each pass of the loop.
    A user who signs in or out meanwhile doesn't wait for that."""

    def __init__(self, channels: LocalChannels) -> None:
        self._channels = channels
        self._connections: dict[str, dict[str, int]] = {}
        # Ids of the apps whose users Redis knows.
        self._app_ids: set[str] = set()
        # Users of apps that were switched, as long as Redis knows of them what it knew before. They are in one of the
        # two dicts, so that a switch copies nothing.
        self._unswitched: dict[str, dict[str, int]] = {}
        self._slices = Slices(self._switch_one)

    def here(self, app_id: str, user_id: str) -> bool:
        """Whether the user is signed in on this worker. Redis may not know it: yet, or while the app has watchlists and
        user resume turned off."""
        return user_id in self._connections.get(app_id, ()) or user_id in self._unswitched.get(app_id, ())

    def sign_in(self, app: App, user_id: str) -> None:
        """One more connection of this user."""
        if needs_sign_ins(app):
            self.switch(app.id, True)
        self._switch_user(app.id, user_id)
        users = self._connections.setdefault(app.id, {})
        users[user_id] = users.get(user_id, 0) + 1
        if app.id in self._app_ids:
            self._update(app.id, user_id, users[user_id])

    def sign_out(self, app_id: str, user_id: str) -> None:
        """One connection less. Every connection that signed in calls this once, when it closes."""
        self._switch_user(app_id, user_id)
        users = self._connections[app_id]
        left = users[user_id] - 1
        if left:
            users[user_id] = left
        else:
            del users[user_id]
            if not users:
                del self._connections[app_id]
        if app_id in self._app_ids:
            self._update(app_id, user_id, left)

    def switch(self, app_id: str, on: bool) -> None:
        """Redis gets the app's users from now on, or removes them."""
        if on == (app_id in self._app_ids):
            return
        if on:
            self._app_ids.add(app_id)
        else:
            self._app_ids.discard(app_id)
        switched, unswitched = self._connections.pop(app_id, None), self._unswitched.pop(app_id, None)
        # Switched back before it was their turn: Redis knows what it shall know of these.
        if unswitched:
            self._connections[app_id] = unswitched
        if switched:
            self._unswitched[app_id] = switched
            self._slices.start()

    def _switch_one(self) -> bool:
        # Empty if the app was switched back meanwhile.
        if self._unswitched:
            app_id, users = next(iter(self._unswitched.items()))
            self._switched(app_id, *users.popitem())
        return bool(self._unswitched)

    def _switch_user(self, app_id: str, user_id: str) -> None:
        users = self._unswitched.get(app_id)
        if users is not None and user_id in users:
            self._switched(app_id, user_id, users.pop(user_id))

    def _switched(self, app_id: str, user_id: str, count: int) -> None:
        if not self._unswitched[app_id]:
            del self._unswitched[app_id]
        self._connections.setdefault(app_id, {})[user_id] = count
        self._update(app_id, user_id, count if app_id in self._app_ids else 0)

    def _update(self, app_id: str, user_id: str, count: int) -> None:
        local_channel = self._channels.hold(app_id, user_pseudo(user_id), SIGNED_IN)
        local_channel.attached = count
        self._channels.mark_dirty(local_channel)
