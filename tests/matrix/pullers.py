"""Clients that pull webhooks: programs that ask over HTTP, and libraries that check what they got.

tests/matrix/test_matrix.py runs these as it runs the rules. More of them: tests/worker/streams, test_pulls and
test_pull_stream.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import httpx
from pusher import Pusher

from clients.durable_readers import CLIENTS, NODE
from matrix.features import Cell
from matrix.libraries import WITHIN_S
from matrix.rules import Rule
from redpoll_client import verify_webhook

PULLERS: list[Rule] = []

CURL, FETCH, HTTPX = "curl", "`fetch`, Node; `pusher`, npm", "httpx; `pusher`, PyPI"
CLIENT = "httpx; redpoll-client"

_FETCH = """
import Pusher from "pusher";
const [url, token, appId, key, secret] = process.argv.slice(1);
const headers = { Authorization: `Bearer ${token}`, Accept: "text/event-stream" };
const response = await fetch(`${url}/stream?limit=1`, { headers });
const pusher = new Pusher({ appId, key, secret, host: "unused", useTLS: false });
let rest = "";
for await (const text of response.body.pipeThrough(new TextDecoderStream())) {
  const lines = (rest + text).split("\\n");
  rest = lines.pop();
  for (const line of lines.filter((line) => line.startsWith("data: "))) {
    const { id, headers: sent, body } = JSON.parse(line.slice(6));
    const named = Object.fromEntries(Object.entries(sent).map(([name, value]) => [name.toLowerCase(), value]));
    const hook = pusher.webhook({ headers: named, rawBody: body });
    console.log(JSON.stringify({ id, valid: hook.isValid(), events: hook.getEvents() }));
    await fetch(`${url}/ack`, {
      method: "POST",
      headers: { Authorization: headers.Authorization, "Content-Type": "application/json" },
      body: JSON.stringify({ ids: [id] }),
    });
  }
}
"""


class Pulled(NamedTuple):
    """The webhook of a cell: where it is asked for, with which token, and a function that occupies a channel."""

    url: str
    token: str
    occupy: Callable[[str], Awaitable[None]]

    @property
    def bearer(self) -> str:
        return f"Authorization: Bearer {self.token}"


def puller(id: str, clients: str, title: str) -> Callable[[Callable[[Cell], Awaitable[None]]], None]:
    def register(run: Callable[[Cell], Awaitable[None]]) -> None:
        PULLERS.append(Rule(id, clients, title, run))

    return register


@asynccontextmanager
async def _webhook(cell: Cell) -> AsyncIterator[Pulled]:
    app, command = cell.app("pulling"), cell.world.command
    words = ["--pull", "--format", "pusher", "--events", "channel.occupied"]
    webhook = await command("webhook", "create", app.app_id, *words)
    made = await command("token", "create", app.app_id, "--name", cell.row, "--scope", "webhooks")
    socket = await cell.socket(app)
    try:
        url = f"http://127.0.0.1:{app.port}/apps/{app.app_id}/webhooks"
        yield Pulled(url, made["token"], socket.subscribe)
    finally:
        await command("webhook", "delete", webhook["id"])


async def _run(*words: str) -> Any:
    process = await asyncio.create_subprocess_exec(*words, stdout=asyncio.subprocess.PIPE)
    output, _ = await asyncio.wait_for(process.communicate(), WITHIN_S)
    assert process.returncode == 0, output
    return json.loads(output)


@asynccontextmanager
async def _lines(words: Sequence[str]) -> AsyncIterator[AsyncIterator[str]]:
    """What a program writes, while it runs in the folder of the clients."""
    process = await asyncio.create_subprocess_exec(*words, stdout=asyncio.subprocess.PIPE, cwd=CLIENTS)
    stdout = process.stdout
    assert stdout is not None

    async def lines() -> AsyncIterator[str]:
        while line := await asyncio.wait_for(stdout.readline(), WITHIN_S):
            yield line.decode().rstrip("\n")

    try:
        yield lines()
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def _acknowledge_by_curl(pulled: Pulled, delivery_id: str) -> None:
    body = json.dumps({"ids": [delivery_id]})
    answer = await _run("curl", "-sS", "-H", pulled.bearer, "--json", body, f"{pulled.url}/ack")
    assert answer == {"acknowledged": 1}


@puller("pull-curl", CURL, "Webhooks by long poll: a request waits for a delivery, which is acknowledged")
async def _(cell: Cell) -> None:
    channel = cell.named("pulled-")
    async with _webhook(cell) as pulled:
        waiting = asyncio.create_task(_run("curl", "-sS", "-H", pulled.bearer, f"{pulled.url}/stream?wait=60"))
        await pulled.occupy(channel)
        (delivery,) = (await waiting)["deliveries"]
        assert delivery["channel"] == channel
        await _acknowledge_by_curl(pulled, delivery["id"])


@puller("pull-curl-stream", CURL, "Webhooks by server-sent events: each acknowledgement makes room for the next")
async def _(cell: Cell) -> None:
    channels = {cell.named(f"pulled-{number}-") for number in range(3)}
    async with _webhook(cell) as pulled:
        events = ["-H", "Accept: text/event-stream", f"{pulled.url}/stream?limit=1"]
        async with _lines(["curl", "-sSN", "-H", pulled.bearer, *events]) as lines:
            for channel in channels:
                await pulled.occupy(channel)
            came = set()
            async for line in lines:
                if line.startswith("data: "):
                    delivery = json.loads(line.removeprefix("data: "))
                    came.add(delivery["channel"])
                    await _acknowledge_by_curl(pulled, delivery["id"])
                if came == channels:
                    break
            assert came == channels


@puller("pull-fetch", FETCH, "Webhooks by server-sent events: the library's `webhook` finds the signature valid")
async def _(cell: Cell) -> None:
    app, channels = cell.app("pulling"), [cell.named(f"pulled-{number}-") for number in range(2)]
    async with _webhook(cell) as pulled:
        words = [NODE, "--input-type=module", "-e", _FETCH, "--", pulled.url, pulled.token]
        async with _lines([*words, app.app_id, app.app_key, app.app_secret]) as lines:
            for channel in channels:
                await pulled.occupy(channel)
            shown = [json.loads(await anext(lines)) for _ in channels]
            assert all(one["valid"] for one in shown)
            events = [event for one in shown for event in one["events"]]
            assert {(event["name"], event["channel"]) for event in events} == {
                ("channel_occupied", channel) for channel in channels
            }


async def _one(cell: Cell, check: Callable[[dict[str, Any], str], None]) -> None:
    """A delivery by long poll, checked and acknowledged."""
    channel = cell.named("pulled-")
    async with _webhook(cell) as pulled:
        headers = {"Authorization": f"Bearer {pulled.token}"}
        async with httpx.AsyncClient(verify=False, timeout=WITHIN_S, headers=headers) as client:
            waiting = asyncio.create_task(client.get(f"{pulled.url}/stream", params={"wait": "60"}))
            await pulled.occupy(channel)
            (delivery,) = (await waiting).json()["deliveries"]
            check(delivery, channel)
            done = await client.post(f"{pulled.url}/ack", json={"ids": [delivery["id"]]})
            assert done.json() == {"acknowledged": 1}


@puller("pull-pypi", HTTPX, "Webhooks by long poll: the library's `validate_webhook` finds the signature valid")
async def _(cell: Cell) -> None:
    app = cell.app("pulling")

    def check(delivery: dict[str, Any], channel: str) -> None:
        library = Pusher(app_id=app.app_id, key=app.app_key, secret=app.app_secret)
        headers = delivery["headers"]
        found = library.validate_webhook(headers["X-Pusher-Key"], headers["X-Pusher-Signature"], delivery["body"])
        assert [event["channel"] for event in found["events"]] == [channel]

    await _one(cell, check)


@puller("pull-redpoll-client", CLIENT, "Webhooks by long poll: `verify_webhook` reads the delivery")
async def _(cell: Cell) -> None:
    app = cell.app("pulling")

    def check(delivery: dict[str, Any], channel: str) -> None:
        found = verify_webhook(delivery["body"].encode(), delivery["headers"], key=app.app_key, secret=app.app_secret)
        assert (found.id, found.attempt) == (delivery["id"], delivery["attempt"])
        assert [(event.name, event.channel) for event in found.events] == [("channel.occupied", channel)]

    await _one(cell, check)
