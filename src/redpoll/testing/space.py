"""What a fake server holds of one app, in memory."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from redpoll.protocol.apps import App, CurrentApp
from redpoll.protocol.channels import Kind
from redpoll.testing.channel import Channel, Client
from redpoll.testing.clock import Timer
from redpoll.testing.histories import Histories
from redpoll.worker.hub.removed import Removed

__all__ = ["Cached", "Space"]


class Cached(NamedTuple):
    event: str
    data: str
    user_id: str | None
    until: float


@dataclass
class Space:
    """What the server holds of one app. `current` is the record that its sessions share."""

    current: CurrentApp
    histories: Histories
    clients: dict[str, Client] = field(default_factory=dict)
    channels: dict[str, Channel] = field(default_factory=dict)
    cache: dict[str, Cached] = field(default_factory=dict)
    # Connections by socket id, with their place in the order of connections and removals; removed users, likewise.
    since: dict[str, int] = field(default_factory=dict)
    removed: Removed = field(default_factory=Removed)
    # Connections that have yet to sign in or to enter a private or presence channel.
    sign_in_timers: dict[Client, Timer] = field(default_factory=dict)

    @property
    def app(self) -> App:
        return self.current.record

    def was_removed(self, client: Client, channel: str, user_id: str) -> bool:
        return self.since[client.session.socket_id] < self.removed.at(client.session, channel, user_id)

    @property
    def occupied(self) -> list[str]:
        """The channels with subscribers, sorted. A user's own channel is none: nobody may know it but the user."""
        return sorted(name for name, channel in self.channels.items() if channel.kind is not Kind.USER)
