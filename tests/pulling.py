"""A back end that pulls webhooks, as a process that may be killed: writes what it got and what the server confirmed.

    python tests/pulling.py PORT APP KEY SECRET FILE

FILE gets a line `got ID CHANNEL` before a delivery is acknowledged, and `done ID` once that is confirmed.
"""

import asyncio
import json
import sys
from pathlib import Path
from typing import NamedTuple

import aiohttp

from wire import Api

_POLL = {"wait": "10", "limit": "50"}


class App(NamedTuple):
    """What `Api` needs of a server."""

    port: int
    app_id: str
    app_key: str
    app_secret: str


async def pull(app: App, path: Path) -> None:
    with path.open("a", buffering=1) as lines:
        async with Api(app) as api:
            while True:
                try:
                    status, body = await api.ask("GET", "/webhooks/stream", params=_POLL)
                    if status != 200 or not body["deliveries"]:
                        await asyncio.sleep(0.05)  # Clients wait before they ask again.
                        continue
                    ids = [one["id"] for one in body["deliveries"]]
                    lines.write("".join(f"got {one['id']} {one['channel']}\n" for one in body["deliveries"]))
                    status, _ = await api.ask("POST", "/webhooks/ack", {"ids": ids})
                    if status == 200:
                        lines.write("".join(f"done {delivery_id}\n" for delivery_id in ids))
                except (OSError, aiohttp.ClientError, json.JSONDecodeError):
                    await asyncio.sleep(0.05)


if __name__ == "__main__":
    _, port, *names, target = sys.argv
    asyncio.run(pull(App(int(port), *names), Path(target)))
