"""What one request publishes, and whether it is allowed: `redpoll._publish` in plain Python, for systems on which the
engine isn't built (PEP 399). The server never uses it; `redpoll.testing` and the command line do, on macOS and Windows.

tests/protocol/test_plain_publish.py gives both modules random calls and compares what they say.
"""

import re
from collections.abc import Sequence
from enum import IntEnum
from typing import Final, NamedTuple

from redpoll.protocol.apps import App

__all__ = ["CACHED", "RULED", "Call", "Limits", "Refusal", "Rules"]

# What an event needs besides PUBLISH, as in _publish.pyx.
CACHED: Final = 1
RULED: Final = 2

_SOCKET_ID = re.compile(r"[0-9]+\.[0-9]+").fullmatch
# Ids that a worker may have given: two numbers below 10^18 without leading zeros. Other ids exclude nobody.
_OUR_SOCKET_ID = re.compile(r"(?:0|[1-9][0-9]{0,17})\.(?:0|[1-9][0-9]{0,17})").fullmatch


class Refusal(IntEnum):
    """Why a call is refused; 0 if it isn't."""

    TOO_MANY_CHANNELS = 1
    RESERVED_CHANNEL = 2
    INVALID_CHANNEL = 3
    ENCRYPTED_CHANNEL = 4
    NAME_MISSING = 5
    NAME_SIZE = 6
    NAME_RESERVED = 7
    DATA_MISSING = 8
    DATA_SIZE = 9
    SOCKET_ID = 10


class Rules:
    """What holds for the names of every app (`_publish.Rules`)."""

    def __init__(
        self,
        *,
        channel_chars: bytes,
        max_channel_chars: int,
        own_prefix: bytes,
        user_prefix: bytes,
        encrypted_prefix: bytes,
        cache_prefixes: tuple[bytes, ...],
        reserved_names: tuple[bytes, ...],
    ) -> None:
        self.channel_chars = frozenset(channel_chars.decode())
        self.max_channel_chars = max_channel_chars
        self.own_prefix = own_prefix.decode()
        self.user_prefix = user_prefix.decode()
        self.encrypted_prefix = encrypted_prefix.decode()
        self.cache_prefixes = tuple(prefix.decode() for prefix in cache_prefixes)
        self.reserved_names = tuple(prefix.decode() for prefix in reserved_names)


class Limits:
    """What an app's record says about publishes (`_publish.Limits`)."""

    def __init__(
        self,
        app: App,
        rules: Rules,
        *,
        max_channels: int,
        max_batch: int,
        max_name_chars: int,
        max_data_bytes: int,
        caches: bool,
        stored: tuple[bytes, ...] = (),
        stored_prefixes: tuple[bytes, ...] = (),
    ) -> None:
        self.app = app
        self.rules = rules
        self.max_channels = max_channels
        self.max_batch = max_batch
        self.max_name_chars = max_name_chars
        self.max_data_bytes = max_data_bytes
        self.caches = caches
        self.stored = tuple(name.decode() for name in stored)
        self.stored_prefixes = tuple(prefix.decode() for prefix in stored_prefixes)

    def check_channel(self, channel: str) -> int:
        rules = self.rules
        if channel.startswith(rules.own_prefix):
            return Refusal.RESERVED_CHANNEL
        name = channel.removeprefix(rules.user_prefix)
        if not name or len(channel) > rules.max_channel_chars or not rules.channel_chars.issuperset(name):
            return Refusal.INVALID_CHANNEL
        return 0

    def needs(self, channel: str) -> int:
        cached = self.caches and channel.startswith(self.rules.cache_prefixes)
        ruled = channel in self.stored or channel.startswith(self.stored_prefixes)
        return (CACHED if cached else 0) + (RULED if ruled else 0)


class _Event(NamedTuple):
    # None: it isn't there.
    name: str | None
    data: str | None
    channels: tuple[str, ...]
    socket_id: str | None


class Call:
    """The events of one request to publish (`_publish.Call`, without the commands for Redis)."""

    def __init__(self, limits: Limits, is_batch: bool = False) -> None:
        self.is_batch = is_batch
        self.infos: tuple[tuple[str, ...], ...] = ()
        self.correlation_id: str | None = None
        # The places of the events that end their channels.
        self.ends: tuple[int, ...] = ()
        self.refused_channel = ""
        self._limits = limits
        self._events: list[_Event] = []

    def add(self, names: Sequence[str], name: str | None, data: str | None, socket_id: str | None) -> None:
        """Add an event. All but the channels' `names` may be None: it wasn't given. Raises UnicodeEncodeError for
        lone surrogates."""
        for text in (*names, name or "", data or "", socket_id or ""):
            text.encode()
        self._events.append(_Event(name, data, tuple(names), socket_id))

    def refusal_of_channels(self) -> int:
        """Why the channels of the last event are refused, a Refusal; 0: they aren't, and each now occurs once."""
        event, limits = self._events[-1], self._limits
        if len(event.channels) > limits.max_channels:
            return Refusal.TOO_MANY_CHANNELS
        for channel in event.channels:
            if refusal := limits.check_channel(channel):
                self.refused_channel = channel
                return refusal
        distinct = tuple(dict.fromkeys(event.channels))
        self._events[-1] = event._replace(channels=distinct)
        if len(distinct) > 1:
            # Each encrypted channel has its own key, so its ciphertext is of use in no other channel.
            for channel in distinct:
                if channel.startswith(limits.rules.encrypted_prefix):
                    self.refused_channel = channel
                    return Refusal.ENCRYPTED_CHANNEL
        return 0

    def refusal_of_event(self) -> int:
        """Why the last event is refused besides its channels; 0: it isn't."""
        event, limits = self._events[-1], self._limits
        if event.name is None:
            return Refusal.NAME_MISSING
        if not 1 <= len(event.name) <= limits.max_name_chars:
            return Refusal.NAME_SIZE
        if event.name.startswith(limits.rules.reserved_names):
            return Refusal.NAME_RESERVED
        if event.data is None:
            return Refusal.DATA_MISSING
        if len(event.data.encode()) > limits.max_data_bytes:
            return Refusal.DATA_SIZE
        if event.socket_id is not None:
            if not _SOCKET_ID(event.socket_id):
                return Refusal.SOCKET_ID
            if not _OUR_SOCKET_ID(event.socket_id):
                self._events[-1] = event._replace(socket_id=None)
        return 0

    @property
    def app(self) -> App:
        return self._limits.app

    @property
    def count(self) -> int:
        """How many events are published: one for each channel."""
        return sum(len(event.channels) for event in self._events)

    @property
    def is_plain(self) -> bool:
        """Each event needs nothing but PUBLISH."""
        return not any(self.needs())

    def needs(self) -> list[int]:
        """For each channel of the call, what its event needs besides PUBLISH: CACHED and RULED, added."""
        return [self._limits.needs(channel) for event in self._events for channel in event.channels]

    def events_of(self) -> list[tuple[str, str, list[str], str | None]]:
        """`(name, data, channels, socket_id)` of each event; the last is None if no connection is excluded."""
        return [(event.name or "", event.data or "", list(event.channels), event.socket_id) for event in self._events]

    def describe(self) -> tuple[str, list[str], int]:
        """`(names, channels, bytes)` for the event log: all names as one text, the channels, each once, and the bytes
        of the events' data."""
        names = dict.fromkeys(event.name or "" for event in self._events)
        channels = dict.fromkeys(channel for event in self._events for channel in event.channels)
        return ", ".join(names), list(channels), sum(len((event.data or "").encode()) for event in self._events)
