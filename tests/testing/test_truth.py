"""The fake tells the truth: a random history of messages gives each client the same frames from both servers.

`pytest --long` takes longer ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from helpers.lengths import amount, seeds
from helpers.server import Server
from helpers.wire import Api, Socket, eventually
from redpoll.ipc.command_socket import ask, socket_path
from redpoll.protocol.limits import Limits
from redpoll.testing import FakeServer
from testing.twins import Side, Twins

LENGTH = amount(100, 1000)


@pytest.fixture(scope="module")
def real() -> Iterator[Server]:
    with Server(workers=1, client_events_per_second=10_000) as running:
        yield running


@dataclass
class NewApp:
    """An app of its own on the real server."""

    port: int
    app_id: str
    app_key: str
    app_secret: str

    async def is_known(self) -> bool:
        """Whether the worker has heard of it."""
        client = await Socket.connect(self, established=False)
        event = (await client.next())["event"]
        await client.close()
        return event == "pusher:connection_established"


def new_app(server: Server) -> NewApp:
    commands = socket_path(server.folder / "data")
    made = ask(commands, "app create", {"name": "truth"})
    rule = {"app": made["id"], "name": "kept-", "prefix": True, "keep": 5, "seconds": 3600, "replay": 2}
    ask(commands, "history rule add", rule)
    return NewApp(server.port, str(made["id"]), made["key"], made["secret"])


@pytest.mark.parametrize("seed", seeds(3))
async def test_a_random_history_gives_each_client_the_same_frames(real: Server, seed: int) -> None:
    app = new_app(real)
    await eventually(app.is_known, True)
    credentials = {"app_id": app.app_id, "app_key": app.app_key, "app_secret": app.app_secret}
    fake = FakeServer(**credentials, limits=Limits(client_events_per_s=10_000))
    fake.keep_history("kept-", keep=5, replay=2)
    with fake:
        async with Api(fake) as fake_api, Api(app) as real_api:
            twins = Twins(Side(fake, fake_api), fake, Side(app, real_api), seed)
            await twins.run(LENGTH)
