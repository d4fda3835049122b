"""Limits failed logins, by client address and by user name. Counts are in memory.

Both are counted because one address may try many names, and many addresses may try one name. The limit for names is
larger, because it also locks out the owner of the name.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

__all__ = ["WINDOW_S", "LoginThrottle"]

WINDOW_S: Final = 300.0
MAX_PER_ADDRESS: Final = 10
MAX_PER_NAME: Final = 30
_MAX_WINDOWS: Final = 10_000


class LoginThrottle:
    """Counts failed logins in windows of five minutes. `clock` is monotonic, in seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        # (kind, address or name) -> (end of the window, failures in it)
        self._windows: dict[tuple[str, str], tuple[float, int]] = {}

    def wait_s(self, address: str, name: str) -> float:
        """How long this address or name must wait before the next attempt; 0 if it may try now."""
        now = self._clock()
        waits = [0.0]
        for key, limit in ((("address", address), MAX_PER_ADDRESS), (("name", name), MAX_PER_NAME)):
            ends, failures = self._windows.get(key, (0.0, 0))
            if failures >= limit:
                waits.append(ends - now)
        return max(waits)

    def attempt(self, address: str, name: str) -> None:
        """Counts an attempt before its outcome is known, so that parallel attempts are limited too."""
        now = self._clock()
        if len(self._windows) >= _MAX_WINDOWS:
            self._windows = {key: window for key, window in self._windows.items() if window[0] > now}
            if len(self._windows) >= _MAX_WINDOWS:
                self._windows.clear()
        for key in (("address", address), ("name", name)):
            ends, failures = self._windows.get(key, (0.0, 0))
            self._windows[key] = (now + WINDOW_S, 1) if ends <= now else (ends, failures + 1)

    def succeeded(self, address: str, name: str) -> None:
        """Resets the counts of this address and name."""
        self._windows.pop(("address", address), None)
        self._windows.pop(("name", name), None)
