"""Shapes of ext/redpoll/_replies.pyx."""

from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

class _Connection(Protocol):
    lost: bool
    def pushed(self, push: list[Any]) -> None: ...
    def failed(self, reply: Any) -> None: ...

class Taker:
    def __call__(self, reply: Any) -> None: ...

def hand_out(
    connection: _Connection,
    gets: Callable[[], Any],
    nothing: object,
    pending: deque[Callable[[Any], None]],
    on_message: Callable[[bytes, bytes], None],
    most: int,
) -> bool: ...
