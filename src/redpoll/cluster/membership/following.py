"""Lets channels take over what their app's record says while they are held."""

from typing import Final

from redpoll.cluster.directory import Directory
from redpoll.cluster.membership.counts import Counts
from redpoll.cluster.membership.local_channel import LocalChannel
from redpoll.cluster.membership.local_channels import LocalChannels
from redpoll.cluster.membership.membership_events import MembershipEvents, report
from redpoll.loop.slices import Cursor, Slices
from redpoll.protocol.apps import App

__all__ = ["Following"]

# The parts of a record that channels follow. Other parts change often (console_until).
_FOLLOWED: Final = (
    "history",
    "hooks",
    "max_data_bytes",
    "max_history_channels",
    "max_presence_members",
    "subscription_count",
)
# Channels that follow a changed record in one step.
_MAX_FOLLOWING: Final = 100


class Following:
    """Channels that are opened meanwhile follow the new record at their first join."""

    def __init__(self, channels: LocalChannels, counts: Counts, directory: Directory, events: MembershipEvents) -> None:
        self.slices = Slices(self._step)
        self._channels = channels
        self._counts = counts
        self._directory = directory
        self._events = events
        # The changed records that channels take over in the present walk, and in the next one, by app. One walk serves
        # all apps, because `redpoll apply` may change thousands at once.
        self._present: dict[str, App] = {}
        self._next: dict[str, App] = {}
        self._cursor: Cursor[LocalChannel] = Cursor(())

    def changed(self, old: App, new: App) -> None:
        """An app's record changed: its channels follow, slice by slice."""
        if any(getattr(old, name) != getattr(new, name) for name in _FOLLOWED):
            self._present.pop(new.id, None)
            self._next[new.id] = new
            self.slices.start()

    def stop(self, app_id: str) -> None:
        """The app is gone."""
        self._present.pop(app_id, None)
        self._next.pop(app_id, None)

    def close(self) -> None:
        self._present.clear()
        self._next.clear()

    def apply_record(self, local_channel: LocalChannel) -> None:
        """Applies the present record to a channel, if it is known."""
        app = self._directory.by_id.get(local_channel.app_id)
        if app is not None:
            local_channel.apply_settings(app)

    def _step(self) -> bool:
        # False: all channels follow the records of their apps.
        if not self._present:
            if not self._next:
                return False
            self._present, self._next = self._next, {}
            self._cursor = Cursor(self._channels.slice_by_slice())
        for local_channel in self._cursor.next(_MAX_FOLLOWING):
            app = self._present.get(local_channel.app_id)
            if app is not None and not local_channel.dropped:
                if local_channel.apply_settings(app):
                    self._counts.make_due(local_channel)
                elif local_channel.needs_position:
                    self._channels.mark_dirty(local_channel)
                report(self._events.settings_changed, local_channel)
        if self._cursor.done:
            self._present.clear()
        return bool(self._present or self._next)
