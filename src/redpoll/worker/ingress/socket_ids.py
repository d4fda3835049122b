"""Makes socket ids (protocol/README.md "Connecting")."""

from __future__ import annotations

import secrets
from typing import Final

__all__ = ["SocketIds"]

_BYTES: Final = 10
_AT_ONCE: Final = 64


class SocketIds:
    """Random ids, which nobody can guess."""

    def __init__(self) -> None:
        self._random = b""
        self._at = 0

    def next(self) -> tuple[int, int]:
        """The two halves of a socket id, 40 bits each. Neither is 0."""
        at = self._at
        if at == len(self._random):
            # A system call for each connection would take longer than all else that its greeting needs.
            self._random, at = secrets.token_bytes(_BYTES * _AT_ONCE), 0
        self._at = end = at + _BYTES
        middle = at + _BYTES // 2
        return int.from_bytes(self._random[at:middle]) + 1, int.from_bytes(self._random[middle:end]) + 1
