"""A fake server for each test, and a client of the HTTP API."""

from collections.abc import AsyncIterator, Iterator

import pytest

from helpers.wire import Api
from redpoll.testing import FakeServer


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with FakeServer() as running:
        yield running


@pytest.fixture
async def api(server: FakeServer) -> AsyncIterator[Api]:
    async with Api(server) as client:
        yield client
