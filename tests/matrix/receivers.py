"""Receivers of webhooks that get several events in one request, and check it with a library.

tests/matrix/test_matrix.py runs these as it runs the rules. More of them: tests/control/webhooks/test_batches.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

from pusher import Pusher

from clients.durable_readers import CLIENTS, NODE
from helpers.receiver import Receiver, Request
from matrix.features import Cell
from matrix.libraries import WITHIN_S
from matrix.rules import Rule
from matrix.world import App
from redpoll_client import verify_webhook

RECEIVERS: list[Rule] = []

_VALIDATE = """
import Pusher from "pusher";
const [appId, key, secret] = process.argv.slice(1);
const pusher = new Pusher({ appId, key, secret, host: "unused", useTLS: false });
const requests = JSON.parse(await new Response(process.stdin).text());
console.log(JSON.stringify(requests.map(([headers, rawBody]) => {
  const hook = pusher.webhook({ headers, rawBody });
  return hook.isValid() ? hook.getEvents().map((event) => event.channel) : null;
})));
"""

# Checks all requests with a library. Returns the channels of the events of each, None if it finds it invalid.
Check = Callable[[App, list[Request]], Awaitable[list[Any]]]


def receiver(id: str, clients: str, title: str) -> Callable[[Check], None]:
    """The decorated function checks what a webhook's receiver got while channels were occupied."""

    def register(check: Check) -> None:
        async def run(cell: Cell) -> None:
            app, channels = cell.app(), [cell.named(f"batched-{number}-") for number in range(20)]
            async with Receiver() as got:
                words = [got.url, "--format", "pusher", "--batch", "--events", "channel.occupied"]
                webhook = await cell.world.command("webhook", "create", app.app_id, *words, "--channels", "batched-")
                try:
                    socket = await cell.socket(app)
                    # All at once: the first of them goes alone, and the others within the second after it.
                    for channel in channels:
                        socket.send({"event": "pusher:subscribe", "data": {"channel": channel}})
                    async with asyncio.timeout(WITHIN_S):
                        while sum(len(request.json()["events"]) for request in got.requests) < len(channels):
                            await asyncio.sleep(0.02)
                finally:
                    await cell.world.command("webhook", "delete", webhook["id"])
            checked = await check(app, got.requests)
            assert sorted(channel for of_request in checked for channel in of_request) == sorted(channels)
            assert len(checked) < len(channels)

        RECEIVERS.append(Rule(id, clients, title, run))

    return register


@receiver("batched-npm", "`pusher`, npm", "Several events in one request: `webhook` finds the signature valid")
async def _(app: App, requests: list[Request]) -> list[Any]:
    words = [NODE, "--input-type=module", "-e", _VALIDATE, "--", app.app_id, app.app_key, app.app_secret]
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*words, stdin=pipe, stdout=pipe, cwd=CLIENTS)
    sent = json.dumps([(request.headers, request.body.decode()) for request in requests]).encode()
    output, _ = await asyncio.wait_for(process.communicate(sent), WITHIN_S)
    assert process.returncode == 0, output
    answers: list[Any] = json.loads(output)
    return answers


@receiver(
    "batched-pypi", "`pusher`, PyPI", "Several events in one request: `validate_webhook` finds the signature valid"
)
async def _(app: App, requests: list[Request]) -> list[Any]:
    library = Pusher(app_id=app.app_id, key=app.app_key, secret=app.app_secret)
    answers = []
    for request in requests:
        signed = request.headers["x-pusher-key"], request.headers["x-pusher-signature"]
        valid = library.validate_webhook(*signed, request.body.decode())
        answers.append(valid and [event["channel"] for event in valid["events"]])
    return answers


@receiver("batched-redpoll-client", "redpoll-client", "Several events in one request: `verify_webhook` reads them all")
async def _(app: App, requests: list[Request]) -> list[Any]:
    deliveries = [
        verify_webhook(request.body, request.headers, key=app.app_key, secret=app.app_secret) for request in requests
    ]
    return [[event.channel for event in delivery.events] for delivery in deliveries]
