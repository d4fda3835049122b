"""Test servers for Pusher clients and back ends: `FakeServer` in the test's own process."""

from redpoll.testing.fake_server import FakeServer
from redpoll.testing.recorder import ANYTHING, Published
from redpoll.testing.webhooks import Webhook

__all__ = ["ANYTHING", "FakeServer", "Published", "Webhook"]
