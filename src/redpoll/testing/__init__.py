"""Test servers for Pusher clients and back ends: `FakeServer` in the test's own process, and `Server`, the real one."""

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from redpoll.testing.fake_server import FakeServer
    from redpoll.testing.recorder import ANYTHING, Published
    from redpoll.testing.server import Server
    from redpoll.testing.webhooks import Webhook

__all__ = ["ANYTHING", "FakeServer", "Published", "Server", "Webhook"]

_MODULES: Final = {
    "ANYTHING": "recorder",
    "FakeServer": "fake_server",
    "Published": "recorder",
    "Server": "server",
    "Webhook": "webhooks",
}
# What the extra `testing` installs.
_OF_THE_EXTRA: Final = ("h11", "websockets")


def __getattr__(name: str) -> Any:
    # Imported when they are used. pytest loads this package in every run where redpoll is installed, also without the
    # extra `testing`, for plugin.py. `Server` needs Unix.
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        module = import_module(f"redpoll.testing.{_MODULES[name]}")
    except ModuleNotFoundError as missing:
        if missing.name not in _OF_THE_EXTRA:
            raise
        text = f"redpoll.testing needs {missing.name}: pip install 'redpoll[testing]'"
        raise ModuleNotFoundError(text, name=missing.name) from None
    return getattr(module, name)
