"""One call of the script `publish`: its letters, its arguments and its reply.

Only events that are cached, stored, sent to webhooks or idempotent need the script; every other event is a plain
PUBLISH (bus.py). `encode` builds KEYS and ARGV, `decode` turns the reply into a `PublishReply`. lua/publish.lua is the
other side and uses the same names.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from redpoll.cluster.redis.keys import Keys
from redpoll.cluster.redis.scripts import ENDED, UNKEPT

__all__ = [
    "CacheTerms",
    "ChannelEnded",
    "Flag",
    "HistoriesFull",
    "PublishRefused",
    "PublishReply",
    "RowTerms",
    "StoreTerms",
    "decode",
    "encode",
]


class PublishRefused(Exception):
    """Redis published nothing on a channel, and won't: a repetition has the same outcome. `code` is a key of
    `protocol.errors.HTTP_STATUS`."""

    code = ""
    text = ""

    def __str__(self) -> str:
        return self.text


class ChannelEnded(PublishRefused):
    """An earlier event ended the channel."""

    code = "channel_ended"
    text = "the channel has ended: nothing is published on it until its history is cleared"


class HistoriesFull(PublishRefused):
    """The event was to end the channel and can't be stored."""

    code = "too_many_histories"
    text = (
        "the app has as many channels with history as it may (max_history_channels), so this event can't be stored "
        "and can't end its channel"
    )


class Flag:
    """The flags of a call; ARGV 3 is a string of them."""

    CACHE: Final = "c"
    """The event becomes the channel's cached event."""
    HISTORY: Final = "h"
    """The event is stored in the channel's history."""
    ROW: Final = "r"
    """A webhook row is written (client_event)."""
    ONCE: Final = "i"
    """The event is published once, even if the call is repeated."""
    END: Final = "e"
    """The event is the channel's last, until its history is cleared. Only with HISTORY."""


class CacheTerms(NamedTuple):
    """For Flag.CACHE: how long the event is cached, and the cap on the app's channels with a cached event in this
    shard."""

    seconds: int
    max_cached: int


class StoreTerms(NamedTuple):
    """For Flag.HISTORY: how many messages the channel keeps and for how long, the cap on the app's channels with
    history in this shard, and the epoch to begin if the channel has none of this era."""

    keep: int
    seconds: int
    max_histories: int
    epoch: str
    era: str


class RowTerms(NamedTuple):
    """For Flag.ROW: the sender's user id or "", the trace id or "", and the row's detail as JSON."""

    user: str
    trace: str
    detail: bytes


_NO_CACHE: Final = CacheTerms(0, 0)
_NO_STORE: Final = StoreTerms(0, 0, 0, "", "")


class PublishReply(NamedTuple):
    """`receivers` counts the workers that got the event. `offset` is 0 if it isn't stored. `over_cap`: it isn't stored
    because the app has as many channels with history as it may. `dropped`: no webhook row was written because too many
    are unread. `uncached`: the event isn't cached because the app has as many channels with a cached event as it may.
    Of an event that was published before, only `receivers` is known."""

    receivers: int
    offset: int = 0
    epoch: str = ""
    over_cap: bool = False
    dropped: bool = False
    uncached: bool = False


def _keys(head: bytes, app: bytes, tail: bytes, flags: str, once: str, index: int) -> list[bytes]:
    names: list[bytes] = []
    if Flag.CACHE in flags:
        names += (b"%bk:%b" % (head, tail), b"%bkm:%b" % (head, tail), b"%bka:%b" % (head, app))
    if Flag.HISTORY in flags or Flag.ROW in flags:
        names.append(head + b"clock")
    if Flag.HISTORY in flags:
        names += (
            b"%bh:%b" % (head, tail),
            b"%bhm:%b" % (head, tail),
            b"%bha:%b" % (head, app),
            b"%bc:%b" % (head, tail),
        )
    if Flag.ROW in flags:
        names.append(head + b"out")
    if Flag.ONCE in flags:
        names.append(b"%bi:%b:%b.%d" % (head, tail, once.encode(), index))
    return names


def encode(
    keys: Keys,
    app_id: str,
    channel: str,
    flags: str,
    tail: bytes,
    cache: CacheTerms | None,
    once_s: int,
    store: StoreTerms | None = None,
    row: RowTerms | None = None,
    once: str = "",
    index: int = 0,
) -> tuple[list[bytes], list[bytes | str | int]]:
    """KEYS and ARGV of a call. `tail` is the event's envelope from the skipped socket on (envelopes.py). `once` and
    `index` name the event among those of one request, and are remembered for `once_s`."""
    head, app = keys.shards.head(app_id, channel), app_id.encode()
    name = b"%b:%b" % (app, channel.encode())
    args: list[bytes | str | int] = [
        keys.publish,
        b"%bt:%b" % (head, name),
        flags,
        tail,
        *(cache or _NO_CACHE),
        once_s,
        app_id,
        channel,
    ]
    if store is not None:
        args += store
    elif row is not None:
        args += _NO_STORE
    if row is not None:
        args += row
    return _keys(head, app, name, flags, once, index), args


def decode(reply: Sequence[Any]) -> PublishReply:
    """The reply of the script. Raises ChannelEnded or HistoriesFull: nothing was published."""
    if reply[0] == ENDED:
        raise ChannelEnded
    if reply[0] == UNKEPT:
        raise HistoriesFull
    if len(reply) == 2:
        return PublishReply(reply[1])
    _, receivers, offset, epoch, over_cap, dropped, uncached = reply
    return PublishReply(receivers, int(offset), epoch.decode(), bool(over_cap), bool(dropped), bool(uncached))
