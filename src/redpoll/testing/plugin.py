"""The pytest plugin: the fixtures `redpoll` and `redpoll_app`. pytest loads it where redpoll is installed.

`redpoll` is a server of the test's own, so tests of several processes (pytest-xdist) don't meet. The fake one, unless
the run has `--redpoll-real`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from redpoll.testing import FakeServer
    from redpoll.testing.server import Server

__all__ = ["RedpollApp", "pytest_addoption", "redpoll", "redpoll_app"]


@dataclass(frozen=True)
class RedpollApp:
    """What an application is configured with. `pusher_url` has all of it."""

    id: str
    key: str
    secret: str
    host: str
    port: int
    pusher_url: str


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("redpoll", "a Pusher server for tests")
    group.addoption(
        "--redpoll-real",
        action="store_true",
        help="The fixture `redpoll` is a real `redpoll serve` (Linux) instead of the fake in this process.",
    )


@pytest.fixture(scope="session")
def _redpoll_server() -> Iterator[Server]:
    """The real server of this process, which all its tests share: each has an app of its own."""
    from redpoll.testing.server import Server

    with Server() as server:
        yield server


@pytest.fixture
def redpoll(request: pytest.FixtureRequest) -> Iterator[FakeServer | Server]:
    """A running server with one app. `@pytest.mark.redpoll(watchlist=True)` sets the app."""
    # Imported here: pytest loads this module in every run.
    from redpoll.testing import FakeServer

    marker = request.node.get_closest_marker("redpoll")
    settings = marker.kwargs if marker is not None else {}
    if request.config.getoption("--redpoll-real"):
        server: Server = request.getfixturevalue("_redpoll_server")
        server.new_app(**settings)
        yield server
        server.disconnect(None)
    else:
        with FakeServer(**settings) as fake:
            yield fake


@pytest.fixture
def redpoll_app(redpoll: FakeServer | Server) -> RedpollApp:
    """The app of the fixture `redpoll`."""
    return RedpollApp(
        redpoll.app_id, redpoll.app_key, redpoll.app_secret, redpoll.host, redpoll.port, redpoll.pusher_url
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "redpoll(**settings): how the server of the fixture `redpoll` is set.")
