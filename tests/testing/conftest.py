"""A fake server for each test, and a client of the HTTP API."""

import time
from collections.abc import AsyncIterator, Iterator
from types import SimpleNamespace

import pytest

from helpers.wire import Api
from redpoll.testing import FakeServer


@pytest.fixture
def still_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fake's clock is moved by `advance` alone: however slow the machine is, no timer is due before."""
    # A whole number, so that sums of such steps are exact.
    began = float(int(time.monotonic()))
    monkeypatch.setattr("redpoll.testing.clock.time", SimpleNamespace(monotonic=lambda: began, time=time.time))


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with FakeServer() as running:
        yield running


@pytest.fixture
async def api(server: FakeServer) -> AsyncIterator[Api]:
    async with Api(server) as client:
        yield client
