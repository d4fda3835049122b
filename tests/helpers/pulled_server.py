"""A server whose webhook is pulled, and a back end that pulls it. Not a test."""

import itertools
import json
from contextlib import asynccontextmanager, contextmanager

import aiohttp
from click.testing import CliRunner

from helpers.reading import EVENTS, Stream, read_token
from helpers.server import Server
from helpers.wire import NO_CONTROL, Socket, tries
from redpoll.cli import main

_channels = itertools.count()


@contextmanager
def pulled_server(workers=1, lease_s=1):
    """The app's webhook has no URL, and what isn't acknowledged within the lease comes again."""
    settings = {"webhook_acknowledge_within_s": lease_s, "webhook_retry_after_s": ",".join(["0.5"] * 20)}
    with Server(workers=workers, webhook_debounce_s=0, **settings) as running:
        words = ["webhook", "create", running.app_id, "--pull", "--events", "channel.occupied", "--json"]
        made = CliRunner().invoke(main, [*words, "--data-dir", str(running.folder / "data")])
        assert made.exit_code == 0, made.output
        running.webhook = json.loads(made.stdout)
        running.token = read_token(running, "webhooks")
        yield running


@asynccontextmanager
async def occupying(server):
    """A function that occupies another channel, and returns its name."""
    socket = await Socket.connect(server)

    async def subscribe() -> str:
        channel = f"pulled-{next(_channels)}"
        await socket.subscribe(channel)
        return channel

    yield subscribe
    await socket.close()


async def acknowledge(api, deliveries) -> int:
    async for _ in tries():
        status, body = await api.ask("POST", "/webhooks/ack", {"ids": [one["id"] for one in deliveries]})
        if status == 200:
            return body["acknowledged"]
        assert (status, body["error"]) == (503, NO_CONTROL)


async def pull(api, **params) -> list:
    async for _ in tries():
        status, body = await api.ask("GET", "/webhooks/stream", params=params)
        if status == 200:
            return body["deliveries"]
        assert status == 429 or body["error"] == NO_CONTROL, body


@asynccontextmanager
async def delivery_stream(server, headers=EVENTS, **params):
    """A stream of deliveries, on a connection of its own."""
    url = f"http://127.0.0.1:{server.port}/apps/{server.app_id}/webhooks/stream"
    shown = {"Authorization": f"Bearer {server.token}", **headers}
    timeout = aiohttp.ClientTimeout(total=300)
    async with (
        aiohttp.ClientSession(timeout=timeout) as session,
        session.get(url, params=params, headers=shown) as response,
    ):
        assert (response.status, response.content_type) == (200, "text/event-stream"), await response.text()
        yield Stream(response)
