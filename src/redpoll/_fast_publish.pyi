"""Shapes of ext/redpoll/_fast_publish.pyx."""

from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeVar

from redpoll._http import IncomingRequest
from redpoll._publish import Commands, Limits
from redpoll._replies import Taker
from redpoll._shards import Shards
from redpoll._text import Form
from redpoll.protocol.apps import App

R = TypeVar("R", bound=IncomingRequest)

class _Dateline(Protocol):
    @property
    def line(self) -> bytes: ...

class FastApp:
    def __init__(self, limits: Limits, keys: tuple[tuple[bytes, bytes], ...], slow_until: float) -> None: ...

class Published(Taker):
    @property
    def left(self) -> int: ...
    @property
    def events(self) -> int: ...
    @property
    def over(self) -> bool: ...
    def of_each(self) -> list[Callable[[Any], None]]: ...
    def expire(self, error: Exception) -> None: ...

class FastPublish:
    def __init__(
        self,
        apps: Mapping[str, App],
        fast_app: Callable[[App], FastApp | None],
        stand_in: bytes,
        command: bytes,
        shards: Shards,
        *,
        clock: Callable[[], float],
        timer: Callable[[], float],
        limit: Callable[[str], bytes | None] | None,
        caller: Callable[[str, bytes], bytes | None],
        dateline: _Dateline,
        ready: Callable[[], int],
        publish: Callable[[Commands, Published], None],
        soon: Callable[[Callable[[], None]], object],
        completed: Callable[..., None],
        failed: Callable[..., None],
        answers: tuple[tuple[int, Form], tuple[int, Form], tuple[int, Form]],
        row: Form | None,
        max_skew_s: int,
        api_prefix: bytes,
        is_checked: bool,
    ) -> None: ...
    def take(
        self, link: Any, kind: type[R], buffer: bytearray, size: int, names: tuple[str, ...]
    ) -> tuple[list[R], int, int]: ...
    def finish(self) -> None: ...
