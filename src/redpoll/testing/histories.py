"""The stored messages of an app's channels, in memory.

The same positions, epochs and bounds as the scripts `publish.lua`, `hold.lua`, `history.lua` and `clear.lua` keep in
Redis (cluster/README.md "History").
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass, field

from redpoll.protocol.apps import App, HistoryRule
from redpoll.protocol.history import MAX_OFFSET, Position, StoredMessage, check_position

__all__ = ["ChannelHistory", "Histories", "Page", "Stored"]


@dataclass(frozen=True, slots=True)
class Stored:
    """A message. `before` is the offset of the message before it. `skip` is the socket id that didn't get it.
    `by_client`: it is a client event."""

    offset: int
    before: int
    event: str
    data: str
    user_id: str | None
    skip: str | None
    by_client: bool

    @property
    def message(self) -> StoredMessage:
        return StoredMessage(self.offset, self.event, self.data, self.offset // 1000)


@dataclass(slots=True)
class ChannelHistory:
    """The history of one channel. `top` is the last offset."""

    epoch: str
    era: str
    top: int = 0
    rows: list[Stored] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Page:
    """Messages, oldest first; `more`: others in the range were left out. `epoch` is "" if there is no history."""

    epoch: str
    top: int
    rows: list[Stored]
    more: bool


class Histories:
    """`time_s` returns Unix time."""

    def __init__(self, time_s: Callable[[], float]) -> None:
        self._time_s = time_s
        self._channels: dict[str, ChannelHistory] = {}
        # Channels that an event has ended (protocol/README.md "Streams").
        self._ended: set[str] = set()

    def end(self, channel: str) -> None:
        """The last event of the channel was published: no more, until its history is cleared."""
        self._ended.add(channel)

    def has_ended(self, channel: str) -> bool:
        return channel in self._ended

    def find(self, app: App, channel: str) -> ChannelHistory | None:
        """The present history of the channel; None if no rule stores it, or nothing began one."""
        rule = app.history_rule(channel)
        history = self._channels.get(channel)
        return history if rule is not None and history is not None and history.era == rule.era else None

    def begin(self, app: App, channel: str) -> ChannelHistory | None:
        """The channel's history for a new subscriber, begun if there is none. Subscribes alone may begin half of those
        that the app may have."""
        rule = app.history_rule(channel)
        if rule is None:
            return None
        history = self.find(app, channel)
        if history is None and (channel in self._channels or len(self._channels) < -(-app.max_history_channels // 2)):
            before = self._channels.get(channel)
            # Two epochs of a channel have no offset in common.
            top = max(before.top + 1 if before is not None else 0, self._now_us())
            history = self._channels[channel] = ChannelHistory(secrets.token_hex(8), rule.era, top)
        return history

    def store(
        self,
        app: App,
        channel: str,
        event: str,
        data: str,
        user_id: str | None = None,
        skip: str | None = None,
        *,
        by_client: bool = False,
    ) -> Stored | None:
        """Stores a published event. None: no rule stores it, or the app has as many histories as it may have."""
        rule = app.history_rule(channel)
        if rule is None or (by_client and not rule.client_events):
            return None
        known = self._channels.get(channel)
        if known is None and len(self._channels) >= app.max_history_channels:
            return None
        history = self.find(app, channel)
        offset = max((known.top if known is not None else 0) + 1, self._now_us())
        if history is None:
            # The first message of an epoch follows an offset that no message has.
            history = self._channels[channel] = ChannelHistory(secrets.token_hex(8), rule.era, offset - 1)
        stored = Stored(offset, history.top, event, data, user_id, skip, by_client)
        history.top = offset
        history.rows = [*self._fresh(history, rule), stored][-rule.keep :]
        return stored

    def clear(self, app: App, channel: str) -> ChannelHistory | None:
        """Deletes the messages; a new epoch begins. None if the channel has no history."""
        self._ended.discard(channel)
        history = self.find(app, channel)
        if history is not None:
            history.rows = []
            history.epoch = secrets.token_hex(8)
        return history

    def read(
        self,
        app: App,
        channel: str,
        *,
        limit: int,
        since: int | None = None,
        until: int | None = None,
        before: int | None = None,
        epoch: str | None = None,
        newest: bool | None = None,
    ) -> Page:
        """As `cluster.history.History.read`: at most `limit` messages after `since`, up to `until`, before `before`. If
        there are more, the oldest are returned when `since` is given, else the newest; `newest` overrides this."""
        history, rule = self.find(app, channel), app.history_rule(channel)
        if history is None or rule is None:
            if epoch is not None:
                check_position("", 0, epoch)
            return Page("", 0, [], False)
        if epoch is not None:
            check_position(history.epoch, history.top, epoch, max(since or 0, before or 0))
        low, high = (
            since or 0,
            min(MAX_OFFSET if until is None else until, MAX_OFFSET if before is None else before - 1),
        )
        rows = [row for row in self._fresh(history, rule) if low < row.offset <= high]
        takes_newest = newest if newest is not None else since is None
        taken = rows[-limit:] if takes_newest else rows[:limit]
        return Page(history.epoch, history.top, taken, len(taken) < len(rows))

    def check(self, app: App, channel: str, position: Position) -> None:
        """Raises UnknownEpoch or InvalidOffset if this is no position in the channel's history."""
        history = self.find(app, channel)
        epoch, top = (history.epoch, history.top) if history is not None else ("", 0)
        check_position(epoch, top, position.epoch or "", position.offset)

    def stored(self, app: App, channel: str) -> list[Stored]:
        """All messages that haven't expired."""
        history, rule = self.find(app, channel), app.history_rule(channel)
        return [] if history is None or rule is None else self._fresh(history, rule)

    def last(self, app: App, channel: str, count: int, seconds: int) -> list[Stored]:
        """The last `count` messages, or those of the last `seconds`."""
        rows = self.stored(app, channel)
        if count:
            return rows[-count:]
        since = self._now_us() - seconds * 1_000_000
        return [row for row in rows if row.offset > since] if seconds else []

    def missed(self, app: App, channel: str, epoch: str, offset: int) -> list[Stored] | None:
        """All messages after this position; None if it isn't one, or messages after it are missing."""
        history, rule = self.find(app, channel), app.history_rule(channel)
        if history is None or rule is None or epoch != history.epoch or offset > history.top:
            return None
        rows = [row for row in self._fresh(history, rule) if row.offset > offset]
        return rows if offset == (rows[0].before if rows else history.top) else None

    def _fresh(self, history: ChannelHistory, rule: HistoryRule) -> list[Stored]:
        oldest = self._now_us() - rule.seconds * 1_000_000
        return [row for row in history.rows if row.offset > oldest]

    def _now_us(self) -> int:
        return int(self._time_s() * 1_000_000)
