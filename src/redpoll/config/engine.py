"""Whether this installation has the engine: redpoll's wheel for macOS and Windows has none.

The compiled modules of ext/ need Linux (epoll). Without them there are the commands that reach a server by its address,
`redpoll doctor URL`, `redpoll fake` and `redpoll.testing`.
"""

import importlib.util
import sys
from typing import Final

__all__ = ["has_engine", "lack_of_engine"]

_SYSTEMS: Final = {"darwin": "macOS", "win32": "Windows"}
_IMAGE: Final = "docker run -p 6001:6001 -v redpoll:/data redpoll"


def has_engine() -> bool:
    return importlib.util.find_spec("redpoll._engine") is not None


def lack_of_engine(what: str) -> str:
    """The sentence for somebody who wants `what`, which needs the engine."""
    system = _SYSTEMS.get(sys.platform)
    if system is not None:
        return f"{what} needs Linux; on {system}, run the server's container image: {_IMAGE}"
    return f"{what} needs the engine, which this installation lacks: install redpoll's sdist or its Linux wheel"
