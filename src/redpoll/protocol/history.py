"""What a client may ask of a channel's history: to be told what it missed when it subscribes, or a page of it
(protocol.md 13, decisions.md "History"). What is kept, and where, is the cluster's; by which rule, the app's.

A place in a channel is an offset, which rises from message to message and is not contiguous, and an epoch, which
changes when the history was lost: an offset means nothing without it.
"""

import re
from typing import Any

import msgspec

__all__ = [
    "DEFAULT_LIMIT",
    "MAX_LIMIT",
    "MAX_OFFSET",
    "MAX_REWIND_S",
    "MAX_STORED_MESSAGES",
    "MAX_STORED_S",
    "Position",
    "Rewind",
    "Told",
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
# Offsets are stamps, microseconds that fit a JavaScript number (cluster.md 1, rule 6).
MAX_OFFSET = 2**53 - 1

# Whether there ever was such an epoch, Redis knows.
_MAX_EPOCH_CHARS = 100
_POSITION = re.compile(r"([^:]{1,100}):([0-9]{1,16})").fullmatch


class Position(msgspec.Struct, frozen=True, gc=False):
    """A place in a channel's history; `epoch` None: whichever it has now."""

    epoch: str | None
    offset: int

    def __str__(self) -> str:
        """How it is written in one word: `EPOCH:OFFSET`, what `next` is and `parse_position` reads."""
        return f"{self.epoch}:{self.offset}"


class Rewind(msgspec.Struct, frozen=True, gc=False):
    """From where on a subscriber wants to be told what came before it: the last `count` messages, those of the last
    `seconds`, or, where `epoch` is there, all behind `offset`."""

    count: int = 0
    seconds: int = 0
    epoch: str | None = None
    offset: int = 0


class Told(msgspec.Struct, frozen=True, gc=False):
    """A kept message as it is told: over HTTP, in `pusher:history` (decisions.md "History")."""

    offset: int
    event: str
    data: str
    time_ms: int


def parse_position(given: Any) -> Position:
    """`{"epoch", "offset"}`, `"EPOCH:OFFSET"`, or an offset alone. Raises ValueError with a sentence."""
    if isinstance(given, str):
        match = _POSITION(given)
        if match is None:
            raise ValueError("must be like EPOCH:OFFSET")
        return Position(match[1], _whole(int(match[2]), 0, MAX_OFFSET, "offset"))
    if isinstance(given, dict):
        epoch = given.get("epoch")
        if not isinstance(epoch, str) or not 0 < len(epoch) <= _MAX_EPOCH_CHARS:
            raise ValueError(f"epoch must be a string of 1 to {_MAX_EPOCH_CHARS} characters")
        return Position(epoch, _whole(given.get("offset"), 0, MAX_OFFSET, "offset"))
    return Position(None, _whole(given, 0, MAX_OFFSET, "offset"))


def parse_rewind(rewind: Any, since: Any) -> Rewind | None:
    """The members `rewind` and `since` of a subscribe, as decoded; None where neither is there. Raises ValueError with
    a sentence for what is malformed, negative, too much, or both."""
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
        return Rewind(count=_whole(count, 1, MAX_LIMIT, "rewind: count"))
    return Rewind(seconds=_whole(seconds, 1, MAX_REWIND_S, "rewind: seconds"))


def parse_page(limit: Any, before: Any, since: Any) -> tuple[int, Position | None, Position | None]:
    """The members of a `pusher:history`, as decoded, None for those that aren't there: the same, judged. Raises
    ValueError with a sentence."""
    if before is not None and since is not None:
        raise ValueError("give either before or since")
    return (
        DEFAULT_LIMIT if limit is None else _whole(limit, 1, MAX_LIMIT, "limit"),
        None if before is None else _place(before, "before"),
        None if since is None else _place(since, "since"),
    )


def _place(given: Any, name: str) -> Position:
    try:
        return parse_position(given)
    except ValueError as fault:
        raise ValueError(f"{name}: {fault}") from None


def _whole(given: Any, least: int, most: int, name: str) -> int:
    # JSON's true is an int here too, and 5.0 isn't one.
    if type(given) is not int:
        raise ValueError(f"{name} must be a whole number")
    if not least <= given <= most:
        raise ValueError(f"{name} must be between {least} and {most}")
    return given
