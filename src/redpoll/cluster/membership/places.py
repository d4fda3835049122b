"""Decides whether further channels of an app may become occupied, by the app's total.

`hold` lets channels become occupied while their shard has fewer than its share of the app's limit (`share_of_limit`).
Beyond it, and always where the limit is small, the app's channels in all shards count. A worker reserves places in one
key of the app first, then counts the occupied channels of each shard, and then calls `hold` without a cap. So two
workers never take the same place: of two reservations, the later one sees the earlier one until its channel is
occupied and counted (cluster/membership/README.md "Occupied channels").
"""

import asyncio
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Final

from redpoll.cluster.membership.join import Stage
from redpoll.cluster.membership.local_channel import LocalChannel
from redpoll.cluster.membership.local_channels import Agenda
from redpoll.cluster.membership.timings import Timings
from redpoll.cluster.redis.keys import SHARDS, Keys
from redpoll.cluster.redis.link import Link
from redpoll.cluster.redis.scripts import OCCUPIED, RESERVE
from redpoll.loop.slices import Queue
from redpoll.protocol.apps import has_place
from redpoll.protocol.channels import needs_auth

__all__ = ["Outcome", "Places", "with_place"]

# Channels of one look. All workers' reservations together are read by each.
_MAX_CHANNELS: Final = 128
_MS: Final = 1_000

Outcome = bool | Exception
"""Whether the channel may become occupied, or the error that kept Redis from answering."""


def with_place(reserved: Iterable[str], occupied: Mapping[str, bool], total: int, limit: int) -> set[str]:
    """Which of the `reserved` channels, in their order, have a place, if `total` channels are occupied. Each worker
    comes to the same result."""
    places = set()
    for channel in reserved:
        if not occupied[channel]:
            if not has_place(channel, total, limit):
                continue
            total += 1
        places.add(channel)
    return places


class _Look:
    """One look at the app's total, for some channels: what is reserved, what is occupied, and the shards that are yet
    to answer. `since` is the link's clock before the reservation."""

    __slots__ = ("app_id", "channels", "occupied", "over", "reserved", "shards_left", "since", "total")

    def __init__(self, app_id: str, channels: Sequence[LocalChannel], since: float) -> None:
        self.app_id = app_id
        self.channels = channels
        self.since = since
        self.reserved: dict[str, None] = {}
        self.occupied: dict[str, bool] = {}
        self.total = 0
        self.shards_left = SHARDS
        self.over = False


class Places:
    """`ask` for a channel that found its shard at its share; `decided(local_channel, outcome)` follows. If it may
    become occupied, `has_place` is set; `release` when its call is answered.

    There is at most one look per app at a time, and one in `timings.look_s`; it serves all channels that asked before
    it. A refusal is remembered for `timings.full_s`, for public and signed channels apart: until then a stranger who
    keeps subscribing causes no looks."""

    def __init__(
        self,
        link: Link,
        keys: Keys,
        timings: Timings,
        agenda: Agenda,
        decided: Callable[[LocalChannel, Outcome], None],
    ) -> None:
        self.looks = 0
        self._agenda = agenda
        self._link = link
        self._keys = keys
        self._reserved_s = timings.reserved_s
        self._full_s = timings.full_s
        self._look_s = timings.look_s
        self._decided = decided
        # Two workers may reserve the same channel, and each gives up its own reservation only.
        self._worker = secrets.token_hex(6).encode()
        # By app: the channels that ask, while a look is under way or another may not begin yet.
        self._asking: dict[str, Queue[LocalChannel]] = {}
        # By app, and whether channels are signed: when the last refusal is forgotten.
        self._full_until: dict[tuple[str, bool], float] = {}
        self._released: dict[str, list[str]] = {}

    def ask(self, local_channel: LocalChannel) -> None:
        self._agenda.move(local_channel, Stage.PLACE)
        app_id = local_channel.app_id
        queue = self._asking.get(app_id)
        if queue is None:
            queue = self._asking[app_id] = Queue()
            asyncio.get_running_loop().call_soon(self._begin, app_id)
        queue.add(local_channel)

    def release(self, local_channel: LocalChannel) -> None:
        """The channel is occupied, or isn't going to be: it needs no reserved place any more."""
        local_channel.has_place = False
        self._give_back(local_channel.app_id, local_channel.channel)

    def _give_back(self, app_id: str, channel: str) -> None:
        if not self._released:
            asyncio.get_running_loop().call_soon(self._send_released)
        self._released.setdefault(app_id, []).append(channel)

    def _send_released(self) -> None:
        released, self._released = self._released, {}
        for app_id, channels in released.items():
            self._link.call(b"ZREM", self._keys.places(app_id), *map(self._reservation, channels))

    def _reservation(self, channel: str) -> bytes:
        return b"%b %b" % (self._worker, channel.encode())

    def _is_full(self, local_channel: LocalChannel) -> bool:
        until = self._full_until.get((local_channel.app_id, needs_auth(local_channel.channel)))
        return until is not None and self._link.clock() < until

    def _begin(self, app_id: str) -> None:
        queue, channels = self._asking[app_id], list[LocalChannel]()
        while queue and len(channels) < _MAX_CHANNELS:
            local_channel = queue.pop()
            # Without a queued join no place is needed any more.
            if local_channel.queued and not self._is_full(local_channel):
                channels.append(local_channel)
            else:
                self._end(local_channel, False)
        if channels:
            self._look(_Look(app_id, channels, self._link.clock()))
        else:
            del self._asking[app_id]

    def _look(self, look: _Look) -> None:
        self.looks += 1
        reservations = [self._reservation(local_channel.channel) for local_channel in look.channels]
        ends_ms = round(self._reserved_s * _MS)
        self._link.run(
            RESERVE, [self._keys.places(look.app_id)], [ends_ms, *reservations], partial(self._reserved, look)
        )

    def _reserved(self, look: _Look, outcome: Any) -> None:
        if isinstance(outcome, Exception):
            self._fail(look, outcome)
            return
        look.reserved = dict.fromkeys(reservation.partition(b" ")[2].decode() for reservation in outcome)
        parts: list[list[str]] = [[] for _ in range(SHARDS)]
        for channel in look.reserved:
            parts[self._keys.shard(look.app_id, channel)].append(channel)
        for at, part in enumerate(parts):
            self._link.run(OCCUPIED, [self._keys.occupied(at, look.app_id)], part, partial(self._counted, look, part))

    def _counted(self, look: _Look, part: Sequence[str], outcome: Any) -> None:
        if look.over:
            return
        if isinstance(outcome, Exception):
            self._fail(look, outcome)
            return
        total, *occupied = outcome
        look.total += total
        look.occupied.update(zip(part, map(bool, occupied), strict=True))
        look.shards_left -= 1
        if look.shards_left == 0:
            self._decide(look)

    def _decide(self, look: _Look) -> None:
        now = self._link.clock()
        if now - look.since > self._reserved_s / 2:
            # The reservations may end before the channels are occupied.
            self._look(_Look(look.app_id, look.channels, now))
            return
        app = look.channels[-1].app
        limit = app.max_occupied_channels if app is not None else 0
        places = with_place(look.reserved, look.occupied, look.total, limit)
        for local_channel in look.channels:
            local_channel.has_place = local_channel.channel in places and bool(local_channel.queued)
            if local_channel.channel not in places:
                self._full_until[look.app_id, needs_auth(local_channel.channel)] = now + self._full_s
            if not local_channel.has_place:
                self._give_back(look.app_id, local_channel.channel)
            self._end(local_channel, local_channel.has_place)
        self._begin_next(look)

    def _fail(self, look: _Look, error: Exception) -> None:
        look.over = True
        for local_channel in look.channels:
            self._end(local_channel, error)
        self._begin_next(look)

    def _begin_next(self, look: _Look) -> None:
        # Each look is 65 calls of Redis, so a stranger who comes and goes must not cause one after another.
        passed_s = self._link.clock() - look.since
        asyncio.get_running_loop().call_later(max(0.0, self._look_s - passed_s), self._begin, look.app_id)

    def _end(self, local_channel: LocalChannel, outcome: Outcome) -> None:
        self._agenda.move(local_channel, Stage.CLEAN)
        self._decided(local_channel, outcome)
