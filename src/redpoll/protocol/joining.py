"""Events of one channel that wait and become fewer: only the newest of each name, or texts joined to one.

A history rule with `max_rate` says how many frames a second each subscriber gets of a channel. What comes faster waits:
with `latest` a newer event replaces the one that waits, with `join` the strings at a path are put together
(protocol/README.md "Rates"). Pure: no clock, no sockets. Times are seconds of any clock that doesn't go back.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Final, TypeAlias

import msgspec

__all__ = [
    "MAX_PATH_CHARS",
    "MAX_RATE",
    "Joined",
    "Joiner",
    "LastJoined",
    "Pace",
    "Pacer",
    "Part",
    "path_of",
]

# Frames a second that a rule may allow: faster than any screen.
MAX_RATE: Final = 1_000
MAX_PATH_CHARS: Final = 100
_MAX_STEPS: Final = 8
_STEPS = re.compile(r"[^.\s\"\\\x00-\x1f\x7f]+(?:\.[^.\s\"\\\x00-\x1f\x7f]+)*").fullmatch
# What waits in one joiner, whatever the names: beyond it, everything is sent.
_MAX_WAITING_BYTES: Final = 256 * 1024
# What a frame has besides its event's name and data, about.
_FRAME_BYTES: Final = 200
# Texts of one event that are kept apart; each takes more memory than its bytes.
_MAX_TEXTS: Final = 1_000
# Trace ids that one joined event carries.
_MAX_TRACES: Final = 100

Key: TypeAlias = tuple[object, ...]

_members: Final = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_items: Final = msgspec.json.Decoder(list[msgspec.Raw]).decode
_encode: Final = msgspec.json.Encoder().encode


def path_of(text: str) -> tuple[str, ...]:
    """The steps of a dotted path such as `delta` or `choices.0.delta.content`. A number is a place in a list. Raises
    ValueError with a sentence."""
    steps = tuple(text.split("."))
    if _STEPS(text) is None or len(text) > MAX_PATH_CHARS or len(steps) > _MAX_STEPS:
        raise ValueError(
            f"{text!r} is no path: it must be names with dots between them, as in delta or message.text, "
            f"at most {_MAX_STEPS} names and {MAX_PATH_CHARS} characters"
        )
    return steps


class Pace(msgspec.Struct, frozen=True):
    """What a rule says of a channel's rate. `join` and `by` are paths; without `join` the newest event of each name is
    sent. `never_joins`: the data is encrypted. `max_data_bytes` is that of the app."""

    max_rate: int
    join: tuple[str, ...] = ()
    by: tuple[str, ...] = ()
    max_data_bytes: int = 10_240
    never_joins: bool = False

    @property
    def interval_s(self) -> float:
        return 1 / self.max_rate

    @property
    def latest(self) -> bool:
        return not self.join


class Part:
    """One published event. All texts are UTF-8, unescaped.

    `skip` are the two numbers of the socket id that doesn't get it; 0, 0 for none. `offset` and `prev` are 0 if it
    isn't stored. Events with the same `key` can become one; one without passes unchanged. `text` is the inside
    of the JSON string at the path, still escaped. `frame`, if set, is sent as it is.
    """

    __slots__ = ("data", "event", "frame", "key", "offset", "prev", "skip", "text", "trace", "user")

    def __init__(
        self,
        pace: Pace,
        event: bytes,
        data: bytes,
        *,
        user: bytes | None = None,
        skip: tuple[int, int] = (0, 0),
        offset: int = 0,
        prev: int = 0,
        trace: bytes | None = None,
        frame: bytes | None = None,
    ) -> None:
        self.event = event
        self.data = data
        self.user = user
        self.skip = skip
        self.offset = offset
        self.prev = prev
        self.trace = trace
        self.frame = frame
        self.text = b""
        self.key: Key | None = None
        if frame is not None:
            self.data = frame
            return
        if not pace.join:
            # The newest of each sender: on presence channels it has a name, elsewhere it is the socket that is skipped.
            self.key = (event, user, skip)
        elif not pace.never_joins:
            strings = _strings(data, pace)
            if strings is not None:
                self.text, by = strings
                self.key = (event, user, skip, by)


def _strings(data: bytes, pace: Pace) -> tuple[bytes, bytes] | None:
    """The inside of the string at `join`, and the JSON at `by`. None if data isn't JSON or lacks one of them.

    A string stays escaped, so two halves of a character that were sent apart stay what they are.
    """
    try:
        text = _at(data, pace.join)
        if text is None or text[:1] != b'"':
            return None
        by = _at(data, pace.by) if pace.by else b""
        return None if by is None else (text[1:-1], by)
    except (msgspec.DecodeError, RecursionError):
        return None


def _at(data: bytes, path: Sequence[str]) -> bytes | None:
    for step in path:
        value = _step(data, step)
        if value is None:
            return None
        data = bytes(value)
    return data


def _step(data: bytes, step: str) -> msgspec.Raw | None:
    if data.lstrip()[:1] != b"[":
        return _members(data).get(step)
    items = _items(data)
    return items[int(step)] if step.isdecimal() and int(step) < len(items) else None


def _replaced(data: bytes, path: Sequence[str], value: bytes) -> bytes:
    """`data` with `value` at `path`, which is there. Everything else keeps its bytes."""
    if not path:
        return value
    step, rest = path[0], path[1:]
    if data.lstrip()[:1] == b"[":
        items = _items(data)
        items[int(step)] = msgspec.Raw(_replaced(bytes(items[int(step)]), rest, value))
        return _encode(items)
    members = _members(data)
    members[step] = msgspec.Raw(_replaced(bytes(members[step]), rest, value))
    return _encode(members)


class Joined:
    """One event that is sent: a part alone, several that were joined, or the newest of several.

    `last` is the last part; the others differ from it in their texts only. `parts` is how many became this one. `prev`
    is the offset before the first one, `offset` that of the last stored one. `size` is the most bytes that its data may
    have. `traces` are those of its parts, and `replaced` those of events that weren't sent because a newer one came.
    """

    __slots__ = ("_texts", "last", "offset", "parts", "prev", "replaced", "size", "traces")

    def __init__(self, part: Part) -> None:
        self._texts = [part.text]
        self.last = part
        self.parts = 1
        self.prev = part.prev
        self.offset = part.offset
        self.size = len(part.data)
        self.traces = [part.trace] if part.trace is not None else []
        self.replaced: list[bytes] = []

    @property
    def key(self) -> Key | None:
        return self.last.key

    @property
    def weight(self) -> int:
        """The bytes that it counts for while it waits. Data may be empty, so it isn't all that counts."""
        return self.size + len(self.last.event) + _FRAME_BYTES

    @property
    def text(self) -> bytes:
        """The text of all parts, escaped."""
        if len(self._texts) > 1:
            self._texts = [b"".join(self._texts)]
        return self._texts[0]

    def add(self, part: Part, text: bytes, parts: int, offset: int, traces: Sequence[bytes], size: int) -> None:
        """Adds parts with this text, of which `part` is the last one. `size` is the new size."""
        if len(self._texts) == _MAX_TEXTS:
            self._texts = [self.text]
        self._texts.append(text)
        self.size = size
        self.last = part
        self.parts += parts
        self.offset = offset or self.offset
        if traces:
            self.traces = [*self.traces, *traces][:_MAX_TRACES]

    def data(self, pace: Pace) -> bytes:
        """The event's data. That of a part alone has the bytes in which it was published."""
        if self.parts == 1:
            return self.last.data
        return _replaced(self.last.data, pace.join, b'"%b"' % self.text)

    def copy(self) -> Joined:
        made = Joined(self.last)
        made._texts = [self.text]
        made.size, made.parts, made.prev, made.offset = self.size, self.parts, self.prev, self.offset
        made.traces, made.replaced = self.traces, self.replaced
        return made


class Joiner:
    """Events that wait, in the order of their last parts.

    With `neighbours` only parts that follow each other are joined: for clients that recover, because the offset of a
    frame says that they have everything up to it.
    """

    __slots__ = ("_last", "_neighbours", "_open", "_pace", "_waiting", "size")

    def __init__(self, pace: Pace, neighbours: bool = False) -> None:
        self._pace = pace
        self._neighbours = neighbours and not pace.latest
        self._waiting: dict[Joined, None] = {}
        # Those that may still grow or be replaced.
        self._open: dict[Key, Joined] = {}
        self._last: Joined | None = None
        # Bytes that wait, about: the sum of the weights.
        self.size = 0

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def beyond_bound(self) -> bool:
        return self.size > _MAX_WAITING_BYTES

    def add(self, part: Part) -> None:
        key = part.key
        earlier = self._open.get(key) if key is not None else None
        if earlier is None:
            self._append(Joined(part))
        elif self._pace.latest:
            self._replace(earlier, Joined(part))
        else:
            traces = () if part.trace is None else (part.trace,)
            if not self._grow(earlier, part, part.text, 1, part.offset, traces):
                self._append(Joined(part))

    def add_joined(self, joined: Joined, parts: Sequence[Part] = ()) -> None:
        """As `add`, for what another joiner sent. `joined` doesn't change. If it has no room as a whole, its `parts`
        are added, if they are given."""
        key = joined.key
        earlier = self._open.get(key) if key is not None else None
        if earlier is None:
            self._append(joined.copy())
        elif self._pace.latest:
            self._replace(earlier, joined.copy())
        elif not self._grow(earlier, joined.last, joined.text, joined.parts, joined.offset, joined.traces):
            if len(parts) > 1:
                for part in parts:
                    self.add(part)
            else:
                self._append(joined.copy())

    def _append(self, joined: Joined) -> None:
        key = joined.key
        if key is None or self._neighbours:
            # What comes later can't go into what waits before this one.
            self._open.clear()
        if key is not None:
            self._open[key] = joined
        self._waiting[joined] = None
        self._last = joined
        self.size += joined.weight

    def _replace(self, earlier: Joined, joined: Joined) -> None:
        del self._waiting[earlier]
        self.size -= earlier.weight
        joined.replaced = [*earlier.replaced, *earlier.traces, *joined.replaced][-_MAX_TRACES:]
        self._append(joined)

    def _grow(self, earlier: Joined, part: Part, text: bytes, parts: int, offset: int, traces: Sequence[bytes]) -> bool:
        """Adds to an event that waits. False if it has no room."""
        size = (
            earlier.size + len(text) + len(part.data) - len(part.text) - len(earlier.last.data) + len(earlier.last.text)
        )
        if size > self._pace.max_data_bytes:
            return False
        self.size += size - earlier.size
        earlier.add(part, text, parts, offset, traces, size)
        if earlier is not self._last:
            del self._waiting[earlier]
            self._waiting[earlier] = None
            self._last = earlier
        return True

    def take(self) -> list[Joined]:
        """All that waits."""
        taken = list(self._waiting)
        self._waiting.clear()
        self._open.clear()
        self._last = None
        self.size = 0
        return taken

    def take_finished(self) -> list[Joined]:
        """All up to the last one that can't grow, or everything if more waits than may."""
        if self.beyond_bound:
            return self.take()
        waiting = list(self._waiting)
        count = next((at + 1 for at in range(len(waiting) - 1, -1, -1) if self._is_finished(waiting[at])), 0)
        for joined in waiting[:count]:
            del self._waiting[joined]
            self.size -= joined.weight
            if joined.key is not None and self._open.get(joined.key) is joined:
                del self._open[joined.key]
        if not self._waiting:
            self._last = None
        return waiting[:count]

    def _is_finished(self, joined: Joined) -> bool:
        return joined.key is None or self._open.get(joined.key) is not joined


class Pacer:
    """Says when the waiting events of one audience are sent: the first at once, further ones `1 / max_rate` seconds
    after it, together. After several at once the next ones wait longer. From `free_at` on an event is sent at once.
    `due` is the time of the next sending, None if nothing waits."""

    __slots__ = ("_pace", "free_at", "joiner")

    def __init__(self, pace: Pace, neighbours: bool = False) -> None:
        self._pace = pace
        self.free_at = float("-inf")
        self.joiner = Joiner(pace, neighbours)

    @property
    def due(self) -> float | None:
        return self.free_at if len(self.joiner) else None

    def add(self, part: Part, now: float) -> list[Joined]:
        """Take an event. Returns what is to be sent now, in order; often nothing."""
        self.joiner.add(part)
        if part.key is None or now >= self.free_at or self.joiner.beyond_bound:
            return self.take(now)
        return []

    def take(self, now: float) -> list[Joined]:
        """All that waits; it is sent now."""
        taken = self.joiner.take()
        if taken:
            # Several of one key are neighbours of others', or full ones: they count as one, or they would never end.
            self.free_at = now + len({joined.key for joined in taken}) * self._pace.interval_s
        return taken


class LastJoined:
    """Finds where the last `count` events of a history begin, as they are after joining. Feed it the stored messages,
    the newest first, until `found`.

    `since` is the offset after which they begin. Messages up to `mixed_until` whose key isn't in `keys` belong to other
    events: texts that were written at the same time.
    """

    __slots__ = ("_count", "_latest", "_neighbours", "_selected", "complete", "keys", "mixed_until", "since")

    def __init__(self, pace: Pace, count: int, neighbours: bool) -> None:
        self._count = count
        self._latest = pace.latest
        self._neighbours = neighbours and not pace.latest
        self._selected = 0
        self.complete = False
        self.since = 0
        self.keys: set[Key] = set()
        self.mixed_until = 0

    def add(self, parts: Iterable[Part]) -> None:
        for part in parts:
            if self.complete:
                return
            self._add(part)

    def _add(self, part: Part) -> None:
        key = part.key
        if key is not None and key in self.keys:
            if not self._latest:
                self.since = part.prev
        elif self._selected == self._count:
            # A text that was counted may have begun before this one, unless something separates them.
            if self._neighbours or self._latest or key is None or not self.keys:
                self.complete = True
            elif not self.mixed_until:
                self.mixed_until = part.offset
        else:
            if key is None or self._neighbours:
                self.keys.clear()
            if key is not None:
                self.keys.add(key)
            self._selected += 1
            self.since = part.prev
