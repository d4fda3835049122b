"""The short form of `hold`, for channels of which Redis stores nothing but the counts (lua/hold_plain.lua).

Nearly all calls are of this kind, so they are packed into RESP here, with the parts that calls of one app and shard
share. hold_call.py has the long form.
"""

from functools import lru_cache
from typing import Any, Final

from redpoll.cluster.membership.hold_call import CHANNEL, Flag, HoldCall, HoldReply
from redpoll.cluster.redis.keys import Keys
from redpoll.cluster.redis.scripts import HOLD_PLAIN

__all__ = ["PlainHold", "is_plain_call", "plain_reply"]

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


_REPLIES: Final = {digit: HoldReply(0, b"%d" % digit, (), ()) for digit in (1, 2)}


def plain_reply(digit: int, joins: int) -> HoldReply:
    """What Redis answered to a call with so many joins. It has no stamp."""
    return _REPLIES[digit] if joins == 1 else HoldReply(0, b"%d" % digit * joins, (), ())
