"""What goes over a topic: a header line, then bytes (cluster.md 3).

    e <offset> <prev> <skip socket|-> <trace|-> <user bytes> <event bytes>\\n<user><event><data>
    m <W> <stamp> <user bytes>\\n<user><info>     a user was added, or its info changed
    r <W> <stamp>\\n<user>                        a user was removed
    c <channel>\\n<envelope>                     a copy for the console
    x <epoch>                                     the channel's history was cleared

App and channel are the topic's. Events are parsed by the extension (redpoll._frame), on the way to a frame.
"""

from typing import NamedTuple

__all__ = [
    "Added",
    "Removed",
    "cached_envelope",
    "console_envelope",
    "event_envelope",
    "event_of_tail",
    "event_tail",
    "parse_added",
    "parse_cleared",
    "parse_count",
    "parse_removed",
]


class Added(NamedTuple):
    """`info` is canonical JSON, b"" for none; `w` is the worker in whose name it was written."""

    w: str
    stamp: int
    user: str
    info: bytes


class Removed(NamedTuple):
    w: str
    stamp: int
    user: str


def event_tail(
    event: str, data: str, *, skip: str | None = None, trace: str | None = None, user: str | None = None
) -> bytes:
    """The envelope from `<skip` on: what a script keeps, and puts its own beginning before."""
    who = user.encode() if user else b""
    name = event.encode()
    head = f"{skip or '-'} {trace or '-'} {len(who)} {len(name)}\n"
    return b"".join((head.encode(), who, name, data.encode()))


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
    """An event. `skip` is the socket id that is not to get it, `user` the sender's id on presence channels;
    `offset` and `prev` are 0 on channels without history."""
    return b"e %d %d %b" % (offset, prev, event_tail(event, data, skip=skip, trace=trace, user=user))


def event_of_tail(offset: int, prev: int, tail: bytes, *, skip: bool = True) -> bytes:
    """A kept event as it was published. Without `skip` nobody is left out of it, whoever sent it: it is told to those
    who missed it."""
    if not skip:
        return b"e %d %d - %b" % (offset, prev, tail.partition(b" ")[2])
    return b"e %d %d %b" % (offset, prev, tail)


def parse_added(payload: bytes) -> Added:
    """Of an `m` envelope. ValueError when it is none."""
    head, _, body = payload.partition(b"\n")
    letter, w, stamp, user_bytes = head.split(b" ")
    if letter != b"m":
        raise ValueError("not a member's envelope")
    end = int(user_bytes)
    return Added(w.decode(), int(stamp), body[:end].decode(), body[end:])


def parse_removed(payload: bytes) -> Removed:
    """Of an `r` envelope. ValueError when it is none."""
    head, _, body = payload.partition(b"\n")
    letter, w, stamp = head.split(b" ")
    if letter != b"r":
        raise ValueError("not a removal's envelope")
    return Removed(w.decode(), int(stamp), body.decode())


def parse_count(payload: bytes) -> int:
    """The total of an `n` envelope. ValueError when it is none."""
    letter, _, _, total = payload.split(b" ")
    if letter != b"n":
        raise ValueError("not a count's envelope")
    return int(total)


def parse_cleared(payload: bytes) -> str:
    """The new epoch, of an `x` envelope. ValueError when it is none."""
    letter, epoch = payload.split(b" ")
    if letter != b"x":
        raise ValueError("not an envelope of a cleared history")
    return epoch.decode()


def console_envelope(channel: str, envelope: bytes) -> bytes:
    """A copy of an `e` envelope for the console, which hears all channels on one topic."""
    return b"c %b\n%b" % (channel.encode(), envelope)


def cached_envelope(tail: bytes) -> bytes:
    """A cached event as an `e` envelope. Whoever sent it: nobody is left out of a cached one."""
    return event_of_tail(0, 0, tail, skip=False)
