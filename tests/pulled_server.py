"""A server whose webhook is pulled, and a back end that pulls it. Not a test."""

import itertools
import json
from contextlib import asynccontextmanager, contextmanager

from click.testing import CliRunner

from reading import read_token
from redpoll.cli import main
from server import Server
from wire import Socket

_channels = itertools.count()


@contextmanager
def pulled_server():
    """One worker; the app's webhook has no URL, and what isn't acknowledged within a second comes again."""
    settings = {"webhook_acknowledge_within_s": 1, "webhook_retry_after_s": ",".join(["0.5"] * 20)}
    with Server(workers=1, webhook_debounce_s=0, **settings) as running:
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
    status, body = await api.ask("POST", "/webhooks/ack", {"ids": [one["id"] for one in deliveries]})
    assert status == 200, body
    return body["acknowledged"]


async def pull(api, **params) -> list:
    status = 429
    while status == 429:
        status, body = await api.ask("GET", "/webhooks/stream", params=params)
    assert status == 200, body
    return body["deliveries"]
