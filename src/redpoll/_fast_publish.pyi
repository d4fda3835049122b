"""Shapes of ext/redpoll/_fast_publish.pyx."""

from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeVar

from redpoll._http import IncomingRequest
from redpoll._shards import Shards
from redpoll.protocol.apps import App

R = TypeVar("R", bound=IncomingRequest)

class _Dateline(Protocol):
    @property
    def line(self) -> bytes: ...

class FastApp:
    @property
    def record(self) -> App: ...
    def __init__(
        self,
        record: App,
        keys: tuple[tuple[bytes, tuple[Any, Any]], ...],
        *,
        max_channels: int,
        max_batch: int,
        max_name_chars: int,
        max_data_bytes: int,
        caches: bool,
        slow_until: float,
        stored: tuple[bytes, ...] = (),
        stored_prefixes: tuple[bytes, ...] = (),
    ) -> None: ...

class Published:
    @property
    def left(self) -> int: ...
    @property
    def events(self) -> int: ...
    @property
    def over(self) -> bool: ...
    def __call__(self, reply: Any) -> None: ...
    def of_each(self) -> list[Callable[[Any], None]]: ...
    def expire(self, error: Exception) -> None: ...

class FastPublish:
    def __init__(
        self,
        apps: Mapping[str, App],
        fast_app: Callable[[App], FastApp | None],
        stand_in: tuple[Any, Any],
        command: bytes,
        shards: Shards,
        *,
        clock: Callable[[], float],
        timer: Callable[[], float],
        limit: Callable[[str], bytes | None] | None,
        dateline: _Dateline,
        ready: Callable[[], int],
        publish: Callable[[bytes, Published], None],
        completed: Callable[..., None],
        failed: Callable[..., None],
        reserved_events: tuple[bytes, ...],
        cache_channels: tuple[bytes, ...],
        own_prefix: bytes,
        encrypted_prefix: bytes,
        max_skew_s: int,
        max_channel_chars: int,
        api_prefix: bytes,
        logs: bool,
        check: bytes = b"",
        refusal: Callable[[Any], str] | None = None,
    ) -> None: ...
    def take(
        self, link: Any, kind: type[R], buffer: bytearray, size: int, names: tuple[str, ...]
    ) -> tuple[list[R], int, int]: ...
    def finish(self) -> None: ...
