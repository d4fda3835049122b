"""The longest passes of the event loops of a server's processes, by processor time. Not a bench by itself.

`ProfiledServer` is tests/helpers/server.py's Server with `loop_profile/sitecustomize.py` in its processes; `Passes`
reads what they write.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

# load.py puts the folder of the tests on the path.
from helpers.server import Server

__all__ = ["Passes", "ProfiledServer"]

_HOOK = Path(__file__).parent / "loop_profile"


class ProfiledServer(Server):
    """A Server whose processes measure the passes of their loops. It costs them a few per cent of processor time."""

    def environment(self) -> dict[str, str]:
        environment = super().environment()
        folder = self.folder / "passes"
        folder.mkdir(exist_ok=True)
        environment["LOOP_PROFILE"] = str(folder)
        environment["PYTHONPATH"] = os.pathsep.join([str(_HOOK), environment["PYTHONPATH"]])
        return environment


class Passes:
    """What the processes of a ProfiledServer have written."""

    def __init__(self, server: ProfiledServer) -> None:
        self._folder = server.folder / "passes"

    def longest(self, pid: int, since: float, until: float) -> dict[str, Any]:
        """The line of the longest pass of a process between two moments of `time.monotonic`, with `over_20_ms` summed
        up. Lines are written four times a second, so wait for 0.3 s after `until`."""
        longest: dict[str, Any] = {"ms": 0.0, "wall_ms": 0.0, "parts": {}}
        over = 0
        try:
            lines = (self._folder / str(pid)).read_text().splitlines()
        except FileNotFoundError:
            return {**longest, "over_20_ms": 0}
        for line in lines:
            entry = json.loads(line)
            if entry["at"] < since or entry["from"] > until:
                continue
            over += entry["over_20_ms"]
            wall_ms = max(longest["wall_ms"], entry["wall_ms"])
            if entry["ms"] > longest["ms"]:
                longest = entry
            longest = {**longest, "wall_ms": wall_ms}
        return {**longest, "over_20_ms": over}
