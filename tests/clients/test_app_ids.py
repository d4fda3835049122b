"""An app id as users of soketi and Reverb have it, and names of channels and events with every allowed character."""

from collections.abc import Iterator

import pytest

from clients.node import Node
from helpers.server import Server
from helpers.wire import Api, eventually

CHANNEL = "presence-a,b;c=1@x.y_Z-"
EVENT = "App\\Events\\Shipped, again; 100 % ä"


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    running = Server(workers=2)
    running.app_id, running.app_key, running.app_secret = "My_app.1-x", "my-key.1", "base64/+=="
    with running:
        yield running


async def test_libraries_work_with_an_app_id_of_all_characters(server: Server, node: Node, auth_url: str) -> None:
    await node.connect("page", f"{auth_url}?user=anna")
    await node.subscribe("page", CHANNEL, EVENT)
    options = {
        "appId": server.app_id,
        "key": server.app_key,
        "secret": server.app_secret,
        "host": "127.0.0.1",
        "port": server.port,
        "useTLS": False,
    }
    await node.call("server", client="back end", options=options)
    await node.call("server_call", client="back end", method="trigger", args=[CHANNEL, EVENT, {"n": 1}])
    assert (await node.seen(client="page", event=EVENT))["data"] == {"n": 1}
    async with Api(server) as api:

        async def occupied() -> list[str]:
            return list((await api.get("/channels", filter_by_prefix="presence-a,b;"))["channels"])

        await eventually(occupied, [CHANNEL])
        assert await api.users(CHANNEL) == ["anna"]
        assert await api.subscription_count(CHANNEL) == 1
