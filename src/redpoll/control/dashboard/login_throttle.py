"""How often logins may fail: counted by address and by name, in memory.

Both, since one address may try many names, and many addresses one name. A name that is locked for a while is a nuisance
to its owner, so names have the larger number.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

__all__ = ["WINDOW_S", "LoginThrottle"]

WINDOW_S: Final = 300.0
OF_ADDRESS: Final = 10
OF_NAME: Final = 30
_MOST_KNOWN: Final = 10_000


class LoginThrottle:
    """Failed logins of the last five minutes. `clock` rises steadily."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        # (kind, who) -> when the window ends, failures in it.
        self._windows: dict[tuple[str, str], tuple[float, int]] = {}

    def wait_s(self, address: str, name: str) -> float:
        """How long there is nothing more to try from this address or for this name; 0: there is."""
        now = self._clock()
        waits = [0.0]
        for key, most in ((("address", address), OF_ADDRESS), (("name", name), OF_NAME)):
            ends, failures = self._windows.get(key, (0.0, 0))
            if failures >= most:
                waits.append(ends - now)
        return max(waits)

    def begun(self, address: str, name: str) -> None:
        """Counts a try before its outcome is known, so that many at once find the bound."""
        now = self._clock()
        if len(self._windows) >= _MOST_KNOWN:
            self._windows = {key: window for key, window in self._windows.items() if window[0] > now}
            if len(self._windows) >= _MOST_KNOWN:
                self._windows.clear()
        for key in (("address", address), ("name", name)):
            ends, failures = self._windows.get(key, (0.0, 0))
            self._windows[key] = (now + WINDOW_S, 1) if ends <= now else (ends, failures + 1)

    def succeeded(self, address: str, name: str) -> None:
        """The tries of this address and name are forgiven."""
        self._windows.pop(("address", address), None)
        self._windows.pop(("name", name), None)
