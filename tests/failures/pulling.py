"""A back end that pulls webhooks, as a process that may be killed: writes what it got and what the server confirmed.

    python -m failures.pulling poll|stream PORT APP KEY SECRET FILE       in tests/

It asks repeatedly, or reads a stream of events. FILE gets a line `got ID CHANNEL` before a delivery is acknowledged,
and `done ID` once that is confirmed.
"""

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import NamedTuple

import aiohttp

from helpers.wire import Api, signed_path

# So few at once that some are confirmed before a test kills for the first time.
_POLL = {"wait": "10", "limit": "20"}


class App(NamedTuple):
    """What `Api` needs of a server."""

    port: int
    app_id: str
    app_key: str
    app_secret: str


async def poll(api: Api) -> AsyncIterator[list[dict[str, str]]]:
    status, body = await api.ask("GET", "/webhooks/stream", params=_POLL)
    if status == 200 and body["deliveries"]:
        yield body["deliveries"]


async def stream(app: App) -> AsyncIterator[list[dict[str, str]]]:
    """The deliveries of one stream, as far as they have come."""
    target = signed_path(app, "GET", f"/apps/{app.app_id}/webhooks/stream", params={"limit": _POLL["limit"]})
    url, events = f"http://127.0.0.1:{app.port}{target}", {"Accept": "text/event-stream"}
    async with aiohttp.ClientSession() as session, session.get(url, headers=events) as response:
        rest = b""
        async for data in response.content.iter_any():
            *lines, rest = (rest + data).split(b"\n")
            found = [json.loads(line.removeprefix(b"data: ")) for line in lines if line.startswith(b"data: ")]
            if found and response.status == 200:
                yield found


async def pull(kind: str, app: App, path: Path) -> None:
    with path.open("a", buffering=1) as lines:
        async with Api(app) as api:
            while True:
                try:
                    async for deliveries in stream(app) if kind == "stream" else poll(api):
                        ids = [one["id"] for one in deliveries]
                        lines.write("".join(f"got {one['id']} {one['channel']}\n" for one in deliveries))
                        status, _ = await api.ask("POST", "/webhooks/ack", {"ids": ids})
                        if status == 200:
                            lines.write("".join(f"done {delivery_id}\n" for delivery_id in ids))
                except (OSError, aiohttp.ClientError, json.JSONDecodeError):
                    pass
                await asyncio.sleep(0.05)  # Clients wait before they ask again.


if __name__ == "__main__":
    _, how, port, *names, target = sys.argv
    asyncio.run(pull(how, App(int(port), *names), Path(target)))
