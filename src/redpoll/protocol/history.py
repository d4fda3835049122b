"""Requests for a channel's history: missed messages at a subscribe, or a page of it.

A position in a history is an offset and an epoch. Offsets rise from message to message, with gaps. The epoch changes
when the history was lost or cleared, and an offset means nothing without it. The app's rules say what is stored; the
cluster stores it. What clients may send: protocol/README.md "History and recovery".
"""

import re
from collections.abc import Sequence
from typing import Any

import msgspec

__all__ = [
    "DEFAULT_LIMIT",
    "MAX_ANSWER_BYTES",
    "MAX_LIMIT",
    "MAX_OFFSET",
    "MAX_REWIND_S",
    "MAX_STORED_MESSAGES",
    "MAX_STORED_S",
    "InvalidOffset",
    "Position",
    "Rewind",
    "StoredMessage",
    "UnknownEpoch",
    "bounded",
    "check_position",
    "parse_page",
    "parse_position",
    "parse_rewind",
]

# What a history rule may store of one channel: messages, and seconds (30 days).
MAX_STORED_MESSAGES = 10_000
MAX_STORED_S = 2_592_000
# What one request, replay or page may ask for.
DEFAULT_LIMIT, MAX_LIMIT = 100, 1_000
MAX_REWIND_S = MAX_STORED_S
# Offsets are microseconds and must fit a JavaScript number.
MAX_OFFSET = 2**53 - 1

# Of one answer to `pusher:history` as it is sent; a single message may be larger.
MAX_ANSWER_BYTES = 256 * 1024

_encode = msgspec.json.Encoder().encode
# Only bounds the input; Redis knows which epoch is current.
_MAX_EPOCH_CHARS = 100
_POSITION = re.compile(r"([^:]{1,100}):([0-9]{1,16})").fullmatch


class Position(msgspec.Struct, frozen=True, gc=False):
    """A position in a channel's history. `epoch` None stands for the current one."""

    epoch: str | None
    offset: int

    def __str__(self) -> str:
        """`EPOCH:OFFSET`, as in `next`; `parse_position` reads it."""
        return f"{self.epoch}:{self.offset}"


class Rewind(msgspec.Struct, frozen=True, gc=False):
    """Which past messages a subscriber wants: the last `count`, those of the last `seconds`, or, if `epoch` is set, all
    after `offset`."""

    count: int = 0
    seconds: int = 0
    epoch: str | None = None
    offset: int = 0


class StoredMessage(msgspec.Struct, frozen=True, gc=False):
    """A message of a history, as HTTP and `pusher:history` show it. `time_ms` is Unix time."""

    offset: int
    event: str
    data: str
    time_ms: int


class UnknownEpoch(Exception):
    """The channel's history doesn't have this epoch, or no longer has it. `epoch` is its present one, "" for none."""

    def __init__(self, epoch: str) -> None:
        super().__init__(epoch)
        self.epoch = epoch

    def __str__(self) -> str:
        return f"the history is of epoch {self.epoch!r}" if self.epoch else "the channel has no history"


class InvalidOffset(Exception):
    """The offset is greater than `top`, the last offset of this epoch."""

    def __init__(self, top: int) -> None:
        super().__init__(top)
        self.top = top

    def __str__(self) -> str:
        return f"the last offset is {self.top}"


def check_position(epoch: str, top: int, asked_epoch: str, offset: int = 0) -> None:
    """Raises UnknownEpoch or InvalidOffset if `asked_epoch` and `offset` are no position in the history of this `epoch`
    ("" for none), whose last offset is `top`."""
    if asked_epoch != epoch or not epoch:
        raise UnknownEpoch(epoch)
    if offset > top:
        raise InvalidOffset(top)


def bounded(messages: Sequence[StoredMessage], newest: bool) -> tuple[list[StoredMessage], bool]:
    """As many messages from the newer or older end as one `pusher:history` may have, and whether others are left."""
    taken: list[StoredMessage] = []
    size = 0
    for message in reversed(messages) if newest else messages:
        # The answer's `data` is JSON within JSON, so escaped characters are escaped twice.
        size += len(_encode(_encode(message).decode()))
        if taken and size > MAX_ANSWER_BYTES:
            break
        taken.append(message)
    if newest:
        taken.reverse()
    return taken, len(taken) < len(messages)


def parse_position(value: Any) -> Position:
    """Reads `{"epoch", "offset"}`, `"EPOCH:OFFSET"`, or an offset alone. Raises ValueError with a sentence."""
    if isinstance(value, str):
        match = _POSITION(value)
        if match is None:
            raise ValueError("must be like EPOCH:OFFSET")
        return Position(match[1], _integer(int(match[2]), 0, MAX_OFFSET, "offset"))
    if isinstance(value, dict):
        epoch = value.get("epoch")
        if not isinstance(epoch, str) or not 0 < len(epoch) <= _MAX_EPOCH_CHARS:
            raise ValueError(f"epoch must be a string of 1 to {_MAX_EPOCH_CHARS} characters")
        return Position(epoch, _integer(value.get("offset"), 0, MAX_OFFSET, "offset"))
    return Position(None, _integer(value, 0, MAX_OFFSET, "offset"))


def parse_rewind(rewind: Any, since: Any) -> Rewind | None:
    """Checks the members `rewind` and `since` of a subscribe; None if both are absent. Raises ValueError with a
    sentence if one is malformed or out of range, or if both are given."""
    if rewind is None and since is None:
        return None
    if since is not None:
        if rewind is not None:
            raise ValueError("give either rewind or since")
        if not isinstance(since, dict):
            raise ValueError("since must be an object with epoch and offset")
        try:
            position = parse_position(since)
        except ValueError as fault:
            raise ValueError(f"since: {fault}") from None
        return Rewind(epoch=position.epoch, offset=position.offset)
    if not isinstance(rewind, dict):
        raise ValueError("rewind must be an object with count or seconds")
    count, seconds = rewind.get("count"), rewind.get("seconds")
    if (count is None) == (seconds is None):
        raise ValueError("rewind: give either count or seconds")
    if count is not None:
        return Rewind(count=_integer(count, 1, MAX_LIMIT, "rewind: count"))
    return Rewind(seconds=_integer(seconds, 1, MAX_REWIND_S, "rewind: seconds"))


def parse_page(limit: Any, before: Any, since: Any) -> tuple[int, Position | None, Position | None]:
    """Checks the members `limit`, `before` and `since` of a `pusher:history`; None for each that is absent. Raises
    ValueError with a sentence."""
    if before is not None and since is not None:
        raise ValueError("give either before or since")
    return (
        DEFAULT_LIMIT if limit is None else _integer(limit, 1, MAX_LIMIT, "limit"),
        None if before is None else _place(before, "before"),
        None if since is None else _place(since, "since"),
    )


def _place(value: Any, name: str) -> Position:
    try:
        return parse_position(value)
    except ValueError as fault:
        raise ValueError(f"{name}: {fault}") from None


def _integer(value: Any, minimum: int, maximum: int, name: str) -> int:
    # `type(…) is` and not isinstance: a bool is an int too.
    if type(value) is not int:
        raise ValueError(f"{name} must be a whole number")
    if not minimum <= value <= maximum:
        raise ValueError(f"{name} must be between {minimum} and {maximum}")
    return value
