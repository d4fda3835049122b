"""What an installation without the engine can do: redpoll's wheel for macOS and Windows has none.

The compiled modules of ext/ need Linux (epoll). Without them there are the commands that reach a server by its address,
`redpoll doctor URL`, `redpoll fake` and `redpoll.testing`.
"""

from __future__ import annotations

import functools
import importlib.util
import sys
from collections.abc import Callable
from typing import Any, Final

import click

from redpoll.cli.common import fail

__all__ = ["EVERYWHERE", "has_engine", "need_engine", "without_engine"]

# Commands that run without the engine. What they do in the server's data folder needs it.
EVERYWHERE: Final = frozenset(
    {
        "channels",
        "check-config",
        "completion",
        "doctor",
        "fake",
        "openapi",
        "publish",
        "subscribe",
        "tail",
        "trace",
        "version",
    }
)
_SYSTEMS: Final = {"darwin": "macOS", "win32": "Windows"}
_IMAGE: Final = "docker run -p 6001:6001 -v redpoll:/data redpoll"


def has_engine() -> bool:
    return importlib.util.find_spec("redpoll._engine") is not None


def need_engine(what: str) -> None:
    """Exits with 1 and one sentence if this installation has no engine; `what` needs it."""
    if has_engine():
        return
    system = _SYSTEMS.get(sys.platform)
    if system is not None:
        fail(f"{what} needs Linux; on {system}, run the server's container image: {_IMAGE}")
    fail(f"{what} needs the engine, which this installation lacks: install redpoll's sdist or its Linux wheel")


def without_engine(command: click.Command) -> click.Command:
    """The command, which says so where it needs the engine. Its --help stays."""
    if command.name not in EVERYWHERE:
        _guard(command, f"redpoll {command.name}")
    return command


def _guard(command: click.Command, words: str) -> None:
    if isinstance(command, click.Group):
        for name, inner in command.commands.items():
            _guard(inner, f"{words} {name}")
    elif command.callback is not None:
        command.callback = _checking(command.callback, words)


def _checking(callback: Callable[..., Any], words: str) -> Callable[..., Any]:
    @functools.wraps(callback)
    def checked(*arguments: Any, **options: Any) -> Any:
        need_engine(words)
        return callback(*arguments, **options)

    return checked
