"""Test servers for Pusher clients and back ends: `FakeServer` in the test's own process, and `Server`, the real one."""

from typing import TYPE_CHECKING, Any

from redpoll.testing.fake_server import FakeServer
from redpoll.testing.recorder import ANYTHING, Published
from redpoll.testing.webhooks import Webhook

if TYPE_CHECKING:
    from redpoll.testing.server import Server

__all__ = ["ANYTHING", "FakeServer", "Published", "Server", "Webhook"]


def __getattr__(name: str) -> Any:
    # Imported when it is used: it needs Unix.
    if name == "Server":
        from redpoll.testing.server import Server

        return Server
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
