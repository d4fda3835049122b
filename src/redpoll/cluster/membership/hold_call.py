"""One call of the script `hold`: its letters, its arguments and its reply.

`hold` tells Redis what one worker holds of one channel. This module is the only place in Python that knows how the call
looks on the wire: it names the letters, `encode` builds KEYS and ARGV, `decode` turns the reply into a `HoldReply`.
lua/hold.lua is the other side and uses the same names. What a call says is decided in local_channel.py; sync.py and
reaper.py send it.

Nearly all calls concern channels of which Redis stores nothing but the counts. For them there is a short form
(lua/hold_plain.lua), which `PlainHold` packs into RESP, with the parts that calls of one app and shard share.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Final, Generic, NamedTuple, TypeVar

import hiredis

from redpoll.cluster.hooks import Hook
from redpoll.cluster.redis.keys import Keys
from redpoll.cluster.redis.scripts import HOLD_PLAIN, OK
from redpoll.protocol.channels import OWN_PREFIX, is_cache

__all__ = [
    "BEYOND_SHARE",
    "CHANNEL",
    "CONNECTIONS",
    "PRESENCE",
    "REAPER_GEN",
    "SIGNED_IN",
    "TOPIC",
    "Flag",
    "HistoryTerms",
    "HoldCall",
    "HoldReply",
    "PlainHold",
    "decode",
    "encode",
    "hold_keys",
    "hook_flags",
    "is_plain_call",
    "plain_reply",
    "with_source",
]

# What is held.
CHANNEL: Final = "c"
"""A channel without members."""
PRESENCE: Final = "p"
"""A presence channel."""
SIGNED_IN: Final = "u"
"""A user's signed-in connections, under the pseudo-channel `%u:<user id>`."""
CONNECTIONS: Final = "q"
"""An app's connections, under the pseudo-channel `%conn`."""
TOPIC: Final = "t"
"""A channel that is only a subscribed topic, such as #server-to-user-…. `hold` is never called for it."""

# The digit of HoldReply.accepted for subscribes to a channel that needs a place (places.py).
BEYOND_SHARE: Final = b"2"

# The `gen` of the reaper, which speaks for a worker that is fenced.
REAPER_GEN: Final = -1


class Flag:
    """The flags of a call; ARGV 4 is a string of them."""

    ROSTER: Final = "r"
    """The reply carries the roster."""
    USERS_REMAIN: Final = "u"
    """More of this worker's users are removed in later calls, so its count stays at least 1."""
    KEEP_INFO: Final = "k"
    """The user_info of a known user doesn't change."""
    COUNT: Final = "s"
    """Announce subscription_count; the reply carries it."""
    WORKER_ENDS: Final = "e"
    """Announce the count now: this worker makes no later call."""
    CACHED: Final = "c"
    """The reply carries the cached event."""
    HISTORY: Final = "h"
    """The reply carries the position of the channel's history, which is created if it doesn't exist."""
    HISTORY_ENDS: Final = "z"
    """If nobody is left, a history in which nothing was published ends within minutes."""
    OCCUPIED_LIMIT: Final = "l"
    """An unoccupied channel is joined only if the app has fewer occupied ones in this shard than its share."""
    OCCUPANCY_ROWS: Final = "o"
    """Write webhook rows for channel.occupied and channel.vacated."""
    MEMBER_ROWS: Final = "m"
    """Write webhook rows for member.added and member.removed."""
    COUNT_ROWS: Final = "S"
    """Write webhook rows for subscription.count."""
    CACHE_MISS_ROWS: Final = "X"
    """Write webhook rows for cache.miss."""
    DEBOUNCE: Final = "d"
    """Hold back rows for channel.vacated and member.removed; a return within the debounce cancels them. Without this
    flag the debounce is 0."""


def hook_flags(hooks: str, channel: str, kind: str) -> str:
    """The flags that make `hold` write the webhook rows that the app wants (`App.hooks`) for this channel."""
    # The dashboard's console channel triggers no webhooks.
    if not hooks or kind not in (CHANNEL, PRESENCE) or channel.startswith(OWN_PREFIX):
        return ""
    flags = Flag.OCCUPANCY_ROWS if Hook.OCCUPANCY in hooks else ""
    if kind == PRESENCE:
        flags += Flag.MEMBER_ROWS if Hook.MEMBERS in hooks else ""
    elif Hook.COUNTS in hooks:
        flags += Flag.COUNT_ROWS
    return flags + Flag.CACHE_MISS_ROWS if Hook.CACHE_MISSES in hooks and is_cache(channel) else flags


T = TypeVar("T")


class HoldCall(NamedTuple, Generic[T]):
    """What one `hold` says about a channel.

    `base` is the number of attached sockets that stay. `cap` limits the users of a presence channel, or the sum of all
    workers' connections; 0 means no limit. `gone` are users to remove. `users` are (user, user_info) pairs to add, on
    presence channels only. `joins` are answered, in the order of the reply's digits; a re-assertion has none.
    `last`: after this call Redis knows everything about the channel. `final`: users who are missing from the roster of
    this reply are removed.
    """

    base: int
    cap: int
    flags: str
    gone: Sequence[str]
    users: Sequence[tuple[str, bytes]]
    joins: Sequence[T]
    last: bool
    final: bool

    @property
    def big_reply(self) -> str:
        """Which big thing the reply carries: Flag.ROSTER, Flag.CACHED, or "" for neither."""
        flags = self.flags
        return Flag.ROSTER if Flag.ROSTER in flags else Flag.CACHED if Flag.CACHED in flags else ""

    @property
    def joining(self) -> int:
        """How many subscriptions the call adds to `base`. In a re-assertion these belong to attached sockets."""
        return len(self.users) or len(self.joins)


class HistoryTerms(NamedTuple):
    """How the channel's history is created, for Flag.HISTORY. `epoch` is used if it has none of this `era`. It expires
    a day after `seconds`. `max_histories` caps the app's channels with history in this shard."""

    epoch: str
    seconds: int
    max_histories: int
    era: str


class HoldReply(NamedTuple):
    """What Redis answered. Fields that the call's flags didn't ask for keep their defaults.

    `accepted` has one digit for each subscription of the call: b"1"; b"0" beyond the cap; b"2" if the app has
    its share of occupied channels in this shard, so the channel needs a place (places.py). `added` indexes the call's
    `users`, `removed` its `gone`: the users whose arrival or departure this call announced.
    """

    stamp: int
    accepted: bytes
    added: Sequence[int]
    removed: Sequence[int]
    roster: Sequence[bytes] | None = None
    """Users and their entries, flat, as HGETALL returns them."""
    cached: bytes | None = None
    """The tail of the cached event's envelope (envelopes.py); None if nothing is cached."""
    epoch: str | None = None
    """The history's epoch; None if the app has no history left to give."""
    top: int = 0
    """The history's last offset."""
    total: int = 0
    """subscription_count, over all workers."""
    due_ms: int = 0
    """In how many ms the count may be announced; 0: it is announced, or unchanged."""
    dropped: int = 0
    """Webhook rows that were not written because too many are unread."""


def hold_keys(keys: Keys, w: str, app_id: str, channel: str, kind: str, flags: str) -> list[bytes]:
    """KEYS of a call, in the script's order."""
    # Builds the names itself: by way of the methods of Keys, each name would cost another hash of the channel.
    head, app = keys.shards.head(app_id, channel), app_id.encode()
    tail = b"%b:%b" % (app, channel.encode())
    names = [
        b"%bw:%b" % (head, w.encode()),
        b"%bc:%b" % (head, tail),
        b"%ba:%b" % (head, app),
        head + b"clock",
        head + b"out",
        head + b"left",
    ]
    if kind == PRESENCE:
        names.append(b"%bp:%b" % (head, tail))
    if not flags:
        return names
    if Flag.COUNT in flags:
        names.append(b"%bn:%b" % (head, tail))
    if Flag.CACHED in flags:
        names.append(b"%bk:%b" % (head, tail))
        if Flag.CACHE_MISS_ROWS in flags:
            names.append(b"%bkm:%b" % (head, tail))
    if Flag.HISTORY in flags or Flag.HISTORY_ENDS in flags:
        names += (b"%bhm:%b" % (head, tail), b"%bha:%b" % (head, app))
    return names


def encode(
    keys: Keys,
    w: str,
    gen: int,
    app_id: str,
    channel: str,
    kind: str,
    topic: bytes,
    call: HoldCall[Any],
    extra_flags: str = "",
    history: HistoryTerms | None = None,
    share: int | None = None,
    debounce_ms: int = 0,
) -> tuple[list[bytes], list[bytes | str | int]]:
    """KEYS and ARGV of a call that worker `w` makes. `extra_flags` are the sender's; `history` is required with
    Flag.HISTORY, `share` (ChannelSettings) with Flag.OCCUPIED_LIMIT. `debounce_ms` is for Flag.DEBOUNCE."""
    base, cap, flags, gone, users, joins, _, _ = call
    flags += extra_flags
    args: list[bytes | str | int] = [
        w,
        gen,
        kind,
        flags,
        app_id,
        channel,
        base,
        cap,
        topic,
        keys.publish,
        len(gone),
        len(users) or len(joins),
        *gone,
    ]
    for user in users:
        args += user
    if Flag.HISTORY in flags:
        assert history is not None
        args += history
    if Flag.OCCUPIED_LIMIT in flags:
        assert share is not None
        args.append(share)
    if Flag.DEBOUNCE in flags:
        args.append(debounce_ms)
    return hold_keys(keys, w, app_id, channel, kind, flags), args


def decode(flags: str, reply: Sequence[Any]) -> HoldReply | None:
    """The reply to a call with these flags. None: Redis refused the call, because the worker is fenced (FENCED) or
    another connection speaks for it (STALE)."""
    if reply[0] != OK:
        return None
    roster = cached = epoch = None
    top = total = due_ms = dropped = 0
    at = 5
    if Flag.ROSTER in flags:
        roster = reply[at]
        at += 1
    if Flag.CACHED in flags:
        cached = reply[at]
        at += 1
    if Flag.HISTORY in flags:
        epoch, top = reply[at], int(reply[at + 1])
        at += 2
    if Flag.COUNT in flags:
        total, due_ms = reply[at], reply[at + 1]
        at += 2
    if Flag.COUNT_ROWS in flags or Flag.CACHE_MISS_ROWS in flags:
        dropped = reply[at]
    return HoldReply(
        int(reply[1]),
        reply[2],
        reply[3],
        reply[4],
        roster,
        cached,
        None if epoch is None else epoch.decode(),
        top,
        total,
        due_ms,
        dropped,
    )


# The short form.

_PLAIN_FLAGS: Final = frozenset(("", Flag.OCCUPIED_LIMIT))
_KEY_COUNT: Final = 4
_ARG_COUNT: Final = 7
# Apps times shards. Beyond it all are made again.
_MAX_REMEMBERED: Final = 4096


def is_plain_call(kind: str, call: HoldCall[Any]) -> bool:
    """Whether the short form says all that the call says."""
    return kind == CHANNEL and call.flags in _PLAIN_FLAGS


def _bulk(value: bytes) -> bytes:
    return b"$%d\r\n%b\r\n" % (len(value), value)


# Most channels have few sockets and short names.
_NUMBERS: Final = tuple(_bulk(b"%d" % number) for number in range(512))
_NO_SHARE: Final = _bulk(b"")
_SIZES: Final = tuple(b"$%d\r\n" % size for size in range(512))


@lru_cache(maxsize=64)
def _long_number(value: int) -> bytes:
    return _bulk(b"%d" % value)


def _number(value: int) -> bytes:
    return _NUMBERS[value] if value < 512 else _long_number(value)


def _size(value: int) -> bytes:
    return _SIZES[value] if value < 512 else b"$%d\r\n" % value


class PlainHold:
    """Packs the calls of one worker."""

    def __init__(self, keys: Keys) -> None:
        self._keys = keys
        self._w = ""
        # By shard and app id: W's gen there; what comes before the channel's key, the start of that key, and what
        # follows it.
        self._parts: dict[tuple[int, str], tuple[int, bytes, bytes, bytes]] = {}

    def pack(self, w: str, gen: int, app_id: str, channel: str, base: int, joins: int, share: int | None) -> bytes:
        """The command of W `w` with its present `gen` in the channel's shard. `base`, `joins` and `share` as in
        `encode`."""
        if w != self._w:
            self._w = w
            self._parts.clear()
        at = self._keys.shard(app_id, channel)
        parts = self._parts.get((at, app_id))
        if parts is None or parts[0] != gen:
            parts = self._prepare(at, app_id, gen)
        _, head, key, middle = parts
        name = channel.encode()
        size = len(name)
        return b"".join(
            (
                head,
                _size(len(key) + size),
                key,
                name,
                middle,
                _size(size),
                name,
                b"\r\n",
                _number(base),
                _number(joins),
                _NO_SHARE if share is None else _number(share),
            )
        )

    def _prepare(self, at: int, app_id: str, gen: int) -> tuple[int, bytes, bytes, bytes]:
        keys, app, w = self._keys, app_id.encode(), self._w
        if len(self._parts) >= _MAX_REMEMBERED:
            self._parts.clear()
        words = (
            b"EVALSHA",
            HOLD_PLAIN.sha,
            b"%d" % _KEY_COUNT,
            keys.worker(at, w),
            keys.occupied(at, app_id),
            keys.left(at),
        )
        head = b"*%d\r\n" % (3 + _KEY_COUNT + _ARG_COUNT) + b"".join(map(_bulk, words))
        middle = b"\r\n" + b"".join(map(_bulk, (w.encode(), b"%d" % gen, app)))
        parts = self._parts[(at, app_id)] = (gen, head, b"%bc:%b:" % (keys.head(at), app), middle)
        return parts


def with_source(command: bytes) -> tuple[bytes, ...]:
    """The words of a command of PlainHold for a Redis that doesn't have the script: EVAL loads it."""
    reader = hiredis.Reader()
    reader.feed(command)
    return (b"EVAL", HOLD_PLAIN.source, *reader.gets()[2:])


_REPLIES: Final = {digit: HoldReply(0, b"%d" % digit, (), ()) for digit in (1, 2)}


def plain_reply(digit: int, joins: int) -> HoldReply:
    """What Redis answered to a call with so many joins. It has no stamp."""
    return _REPLIES[digit] if joins == 1 else HoldReply(0, b"%d" % digit * joins, (), ())
