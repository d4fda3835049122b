"""The messages that workers and scripts publish on topics: a header line, then bytes.

    e <offset> <prev> <skip socket|-> <trace|-> <user bytes> <event bytes>\\n<user><event><data>   EVENT
    m <W> <stamp> <user bytes>\\n<user><user_info>                                                  MEMBER_ADDED
    r <W> <stamp>\\n<user>                                                                          MEMBER_REMOVED
    n <W> <stamp> <total>                                                                           COUNT
    o <W> <stamp>                                                                                   USER_ONLINE
    f <W> <stamp>                                                                                   USER_OFFLINE
    x <epoch>                                                                                       HISTORY_CLEARED
    z <offset>                                                                                      HISTORY_ENDED
    c <channel>\\n<envelope>                                                                        CONSOLE_COPY
    w                                                                                               WEBHOOKS_DUE
    a <id> <id> …                                                                                   WEBHOOKS_ENDED

The topic says the app and the channel. The extension (redpoll._frame) parses EVENT on its way to a WebSocket frame.
The scripts hold.lua, publish.lua and clear.lua write envelopes with the same letters.
"""

from collections.abc import Iterable
from typing import Final, NamedTuple

from redpoll import _frame

__all__ = [
    "Added",
    "Envelope",
    "Removed",
    "cached_envelope",
    "console_envelope",
    "event_envelope",
    "event_of_tail",
    "event_tail",
    "parse_added",
    "parse_cleared",
    "parse_count",
    "parse_ended",
    "parse_removed",
    "parse_webhooks_ended",
    "webhooks_ended_envelope",
    "worker_of",
]


class Envelope:
    """The first byte of an envelope says its type."""

    EVENT: Final = b"e"
    MEMBER_ADDED: Final = b"m"
    """A user was added, or its user_info changed."""
    MEMBER_REMOVED: Final = b"r"
    COUNT: Final = b"n"
    """subscription_count."""
    USER_ONLINE: Final = b"o"
    USER_OFFLINE: Final = b"f"
    HISTORY_CLEARED: Final = b"x"
    HISTORY_ENDED: Final = b"z"
    """The event before it, at this offset, is the channel's last."""
    CONSOLE_COPY: Final = b"c"
    """A copy of an event for the dashboard's console."""
    WEBHOOKS_DUE: Final = b"w"
    """Deliveries may be due that the app's back end pulls."""
    WEBHOOKS_ENDED: Final = b"a"
    """These were acknowledged."""


class Added(NamedTuple):
    """`w` is the worker that added the user. `info` is canonical JSON, or b""."""

    w: str
    stamp: int
    user: str
    info: bytes


class Removed(NamedTuple):
    w: str
    stamp: int
    user: str


def worker_of(payload: bytes) -> bytes:
    """The W of a MEMBER_ADDED, MEMBER_REMOVED or COUNT envelope."""
    return payload[2 : payload.index(b" ", 2)]


def event_tail(
    event: str, data: str, *, skip: str | None = None, trace: str | None = None, user: str | None = None
) -> bytes:
    """An EVENT envelope from the skipped socket on. Scripts store this part, and prepend offset and prev."""
    user_bytes = user.encode() if user else b""
    event_bytes = event.encode()
    head = f"{skip or '-'} {trace or '-'} {len(user_bytes)} {len(event_bytes)}\n"
    return b"".join((head.encode(), user_bytes, event_bytes, data.encode()))


def event_envelope(
    event: str,
    data: str,
    *,
    skip: str | None = None,
    trace: str | None = None,
    user: str | None = None,
    offset: int = 0,
    prev: int = 0,
) -> bytes:
    """An event. `skip` is the socket id that doesn't get it, `user` the sender's id on presence channels. `offset` and
    `prev` are 0 on channels without history."""
    if not offset and not prev:
        return _frame.pack_event(event, data, skip, trace, user)
    return b"e %d %d %b" % (offset, prev, event_tail(event, data, skip=skip, trace=trace, user=user))


def event_of_tail(offset: int, prev: int, tail: bytes, *, skip: bool = True) -> bytes:
    """A stored event as an EVENT envelope. Without `skip` every socket gets it, the sender's included: it is sent to
    sockets that missed it."""
    if not skip:
        return b"e %d %d - %b" % (offset, prev, tail.partition(b" ")[2])
    return b"e %d %d %b" % (offset, prev, tail)


def _head(payload: bytes, envelope: bytes) -> tuple[list[bytes], bytes]:
    # The words of the header line, and the bytes after it.
    if payload[:1] != envelope:
        raise ValueError(f"an envelope of type {payload[:1]!r}, not {envelope!r}")
    head, _, body = payload.partition(b"\n")
    return head.split(b" "), body


def parse_added(payload: bytes) -> Added:
    """A MEMBER_ADDED envelope. Raises ValueError for anything else."""
    (_, w, stamp, user_bytes), body = _head(payload, Envelope.MEMBER_ADDED)
    end = int(user_bytes)
    return Added(w.decode(), int(stamp), body[:end].decode(), body[end:])


def parse_removed(payload: bytes) -> Removed:
    """A MEMBER_REMOVED envelope. Raises ValueError for anything else."""
    (_, w, stamp), body = _head(payload, Envelope.MEMBER_REMOVED)
    return Removed(w.decode(), int(stamp), body.decode())


def parse_count(payload: bytes) -> int:
    """The total of a COUNT envelope. Raises ValueError for anything else."""
    (_, _, _, total), _ = _head(payload, Envelope.COUNT)
    return int(total)


def parse_cleared(payload: bytes) -> str:
    """The new epoch of a HISTORY_CLEARED envelope. Raises ValueError for anything else."""
    (_, epoch), _ = _head(payload, Envelope.HISTORY_CLEARED)
    return epoch.decode()


def parse_ended(payload: bytes) -> int:
    """The offset of a HISTORY_ENDED envelope. Raises ValueError for anything else."""
    (_, offset), _ = _head(payload, Envelope.HISTORY_ENDED)
    return int(offset)


def webhooks_ended_envelope(ids: Iterable[str]) -> bytes:
    """Deliveries with these ids were acknowledged."""
    return " ".join([Envelope.WEBHOOKS_ENDED.decode(), *ids]).encode()


def parse_webhooks_ended(payload: bytes) -> list[str]:
    """The ids of a WEBHOOKS_ENDED envelope. Raises ValueError for anything else."""
    (_, *ids), _ = _head(payload, Envelope.WEBHOOKS_ENDED)
    return [delivery_id.decode() for delivery_id in ids]


def console_envelope(channel: str, envelope: bytes) -> bytes:
    """A copy of an EVENT envelope for the console, which gets the events of all channels on one topic."""
    return b"c %b\n%b" % (channel.encode(), envelope)


def cached_envelope(tail: bytes) -> bytes:
    """A cached event as an EVENT envelope. Every socket gets it, the sender's included."""
    return event_of_tail(0, 0, tail, skip=False)
