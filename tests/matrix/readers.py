"""Clients of channels over HTTP, and redpoll-js. tests/matrix/test_matrix.py runs these as it runs the rules.

More of them: tests/clients, test_durable_streams and test_redpoll_js.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable

import httpx
from durable_streams import astream

from clients.durable_readers import javascript
from matrix.features import Cell
from matrix.libraries import WITHIN_S
from matrix.rules import Rule
from redpoll_client import AsyncPublisher

READERS: list[Rule] = []

NPM, PYPI = "`@durable-streams/client`, npm", "`durable-streams`, PyPI"
HOOK = "redpoll-js, React, Chromium"
LIVE = {"sse": "server-sent events", "long-poll": "long poll"}


def reader(id: str, library: str, title: str) -> Callable[[Callable[[Cell], Awaitable[None]]], None]:
    def register(run: Callable[[Cell], Awaitable[None]]) -> None:
        READERS.append(Rule(id, library, title, run))

    return register


async def _token(cell: Cell) -> str:
    app = cell.app("keeps")
    made = await cell.world.command("token", "create", app.app_id, "--name", cell.row, "--scope", "read")
    return str(made["token"])


def _address(cell: Cell, channel: str) -> str:
    app = cell.app("keeps")
    return f"http://127.0.0.1:{app.port}/apps/{app.app_id}/channels/{channel}/stream"


for live, words in LIVE.items():

    @reader(f"read-npm-{live}", NPM, f"Channel by {words}: what is stored, what comes, resumed, the end")
    async def _(cell: Cell, live: str = live) -> None:
        api, token, channel = await cell.api(cell.app("keeps")), await _token(cell), cell.named("read-")
        await api.publish(channel, "n", "1")
        first = javascript(_address(cell, channel), token, "-1", live)
        stored = await anext(first)
        assert stored["item"]["data"] == "1"
        await api.publish(channel, "n", "2")
        assert (await anext(first))["item"]["data"] == "2"
        await first.aclose()  # type: ignore[attr-defined]
        await api.publish(channel, "n", "3", end=True)
        again = javascript(_address(cell, channel), token, stored["offset"], live)
        assert [(await anext(again))["item"]["data"] for _ in range(2)] == ["2", "3"]
        assert await anext(again) == {"closed": True}

    @reader(f"read-pypi-{live}", PYPI, f"Channel by {words}: what is stored, what comes, resumed")
    async def _(cell: Cell, live: str = live) -> None:
        api, channel = await cell.api(cell.app("keeps")), cell.named("read-")
        url, headers = _address(cell, channel), {"Authorization": f"Bearer {await _token(cell)}"}
        await api.publish(channel, "n", "1")
        async with httpx.AsyncClient(verify=False, timeout=WITHIN_S) as client:
            async with astream(url, client=client, headers=headers, offset="-1", live=False) as found:
                assert [message["data"] for message in await found.read_json()] == ["1"]
                position = found.offset
            await api.publish(channel, "n", "2")
            async with astream(url, client=client, headers=headers, offset=position, live=live) as found:
                items = aiter(found.iter_json())
                assert (await asyncio.wait_for(anext(items), WITHIN_S))["data"] == "2"
                await api.publish(channel, "n", "3")
                assert (await asyncio.wait_for(anext(items), WITHIN_S))["data"] == "3"


@reader("read-event-source", "EventSource, Chromium", "Channel by EventSource: what is stored, what comes, the end")
async def _(cell: Cell) -> None:
    api, node, channel = await cell.api(cell.app("keeps")), cell.world.node, cell.named("read-")
    await api.publish(channel, "news", "1")
    url = f"{_address(cell, channel)}?token={await _token(cell)}"
    await node.call("read_events", in_browser=True, client=cell.row, url=url, events=["news", "pusher:end"])
    await node.seen(client=cell.row, event="news", data="1")
    await api.publish(channel, "news", "2")
    await node.seen(client=cell.row, event="news", data="2")
    await api.publish(channel, "news", "3", end=True)
    await node.seen(client=cell.row, event="pusher:end")
    assert [news["data"] for news in node.matching(client=cell.row, event="news")] == ["1", "2", "3"]


async def _text_is_shown(cell: Cell, **source: object) -> None:
    """A component that is there before a text, and one that comes in the middle, show every character of it."""
    app, node, channel = cell.app("keeps"), cell.world.node, cell.named("text-")
    parts = ["one \N{BIRD} ", 'two "\\ ', "\N{LATIN SMALL LETTER U WITH DIAERESIS}\n"] * 20
    url = f"http://{app.app_key}:{app.app_secret}@127.0.0.1:{app.port}/apps/{app.app_id}"
    early, late = f"{cell.row} early", f"{cell.row} late"
    going = asyncio.Event()

    async def model():
        for part in parts:
            yield part
        await going.wait()
        yield "the end"

    async def show(client: str) -> None:
        await node.call("show_text", in_browser=True, client=client, channel=channel, **source)

    async def shows(client: str, text: str, state: str) -> None:
        await node.seen(client=client, event="shown", data={"text": text, "state": state})

    await show(early)
    await shows(early, "", "none")
    async with AsyncPublisher(url=url) as publisher:
        publishing = asyncio.create_task(publisher.publish_stream(channel, "answer", model()))
        sent = "".join(parts)
        await shows(early, sent, "streaming")
        await show(late)
        await shows(late, sent, "streaming")
        going.set()
        await publishing
    for client in (early, late):
        await shows(client, f"{sent}the end", "done")
        await node.call("hide_text", in_browser=True, client=client)
        for news in node.matching(client=client, event="shown"):
            assert f"{sent}the end".startswith(news["data"]["text"]), json.dumps(news)


@reader("use-text", HOOK, "`useText` over pusher-js: a text that grows, seen from its middle")
async def _(cell: Cell) -> None:
    app = cell.app("keeps")
    options = {"cluster": "any", "wsHost": "127.0.0.1", "wsPort": app.port, "forceTLS": False}
    await _text_is_shown(cell, key=app.app_key, options={**options, "enabledTransports": ["ws"]})


@reader("use-text-http", HOOK, "`useText` over HTTP: the same")
async def _(cell: Cell) -> None:
    app = cell.app("keeps")
    server = f"http://127.0.0.1:{app.port}"
    await _text_is_shown(cell, stream={"server": server, "app": app.app_id, "token": await _token(cell)})
