"""What the tests of webhooks by pull ask for, of their module's `server`."""

import pytest

from helpers.pulled_server import occupying
from helpers.wire import Api


@pytest.fixture
async def api(server):
    async with Api(server, connections=100) as opened:
        yield opened


@pytest.fixture
async def occupy(server):
    """Makes a channel occupied, which is a delivery. Returns its name."""
    async with occupying(server) as occupied:
        yield occupied
