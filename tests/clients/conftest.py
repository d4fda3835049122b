"""One running redpoll per module, and the official JavaScript libraries."""

from collections.abc import AsyncIterator, Iterator

import pytest

from clients.node import Node, auth_endpoint, local_signer
from helpers.server import Server


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """Two workers on an embedded Redis. Tests of one module use channels of their own."""
    with Server(workers=2) as running:
        yield running


@pytest.fixture
async def node(server: Server) -> AsyncIterator[Node]:
    async with Node(server) as running:
        yield running


@pytest.fixture
async def auth_url(server: Server) -> AsyncIterator[str]:
    """An application's auth endpoint that signs with the app's secret; append `?user=ID` for presence."""
    async with auth_endpoint(local_signer(server)) as url:
        yield url
