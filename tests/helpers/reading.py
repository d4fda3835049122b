"""A client that reads channels over HTTP, for tests: catch-up, long poll, the protocol's stream, and EventSource.

It shares no code with src/redpoll. tests/clients uses the protocol's own clients.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, NamedTuple, Self

import aiohttp
from click.testing import CliRunner

from helpers.server import Server
from helpers.wire import NO_CONTROL, tries
from redpoll.cli import main

EVENTS = {"Accept": "text/event-stream"}


class Answer(NamedTuple):
    """A whole response; `body` is decoded JSON, None if there is none."""

    status: int
    headers: Mapping[str, str]
    body: Any

    @property
    def next(self) -> str:
        return self.headers["Stream-Next-Offset"]

    @property
    def data(self) -> list[str]:
        return [message["data"] for message in self.body]


class Event(NamedTuple):
    """One event of a stream."""

    name: str
    data: str
    id: str = ""

    @property
    def json(self) -> Any:
        return json.loads(self.data)


def keep(server: Server, prefix: str, keep: int = 1_000, seconds: int = 600) -> None:
    """The server stores the messages of channels with this prefix."""
    words = [
        "history",
        "rule",
        "add",
        server.app_id,
        "--prefix",
        prefix,
        "--keep",
        str(keep),
        "--seconds",
        str(seconds),
    ]
    made = CliRunner().invoke(main, [*words, "--data-dir", str(server.folder / "data")])
    assert made.exit_code == 0, made.output


def read_token(server: Server, scope: str = "read") -> str:
    words = ["token", "create", server.app_id, "--name", "reader", "--scope", scope, "--json"]
    made = CliRunner().invoke(main, [*words, "--data-dir", str(server.folder / "data")])
    assert made.exit_code == 0, made.output
    token: str = json.loads(made.output)["token"]
    return token


class Stream:
    """A stream of events that is open."""

    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self.response = response
        self.is_over = False

    async def next(self) -> Event:
        """The next event. Raises EOFError at the end."""
        fields: dict[str, list[str]] = {}
        while True:
            line = (await asyncio.wait_for(self.response.content.readline(), 60)).decode()
            if not line.endswith("\n"):
                self.is_over = True
                raise EOFError
            line = line[:-1]
            if line:
                name, _, value = line.partition(":")
                fields.setdefault(name, []).append(value.removeprefix(" "))
            elif "data" in fields:
                return Event(fields["event"][-1], "\n".join(fields["data"]), fields.get("id", [""])[-1])
            else:
                fields = {}

    async def messages(self, count: int) -> list[Any]:
        """The next messages of the protocol's stream; checks that each `data` is followed by its `control`."""
        found: list[Any] = []
        while len(found) < count:
            event = await self.next()
            if event.name == "data":
                found += event.json
                assert (await self.next()).name == "control"
        assert len(found) == count, found
        return found

    async def rest(self) -> list[Event]:
        """All events until the end."""
        events: list[Event] = []
        try:
            while True:
                events.append(await self.next())
        except EOFError:
            return events


class Reading:
    """`async with Reading(server, token) as reading`. `path` replaces the one of the API, `/apps/ID`."""

    def __init__(self, server: Server, token: str, path: str = "", port: int = 0) -> None:
        self.url = f"http://127.0.0.1:{port or server.port}{path or f'/apps/{server.app_id}'}"
        self.headers = {"Authorization": f"Bearer {token}"} if token else {}

    async def __aenter__(self) -> Self:
        self.session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=120)
        )
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.session.close()

    def request(
        self, channel: str, method: str = "GET", headers: Mapping[str, str] | None = None, **query: str
    ) -> AbstractAsyncContextManager[aiohttp.ClientResponse]:
        """A request whose response is yet to be read."""
        url = f"{self.url}/channels/{channel}/stream"
        return self.session.request(method, url, params=query, headers={**self.headers, **(headers or {})})

    async def ask(
        self, channel: str, method: str = "GET", headers: Mapping[str, str] | None = None, **query: str
    ) -> Answer:
        """One request, and its whole answer. While control is late, it is sent again."""
        async for _ in tries():
            async with self.request(channel, method, headers, **query) as response:
                text = await response.text()
            if response.status != 503 or NO_CONTROL not in text:
                return Answer(response.status, response.headers, json.loads(text) if text else None)

    @asynccontextmanager
    async def stream(
        self, channel: str, headers: Mapping[str, str] | None = None, **query: str
    ) -> AsyncIterator[Stream]:
        """A stream of events: with `offset` the protocol's, else one for EventSource."""
        query = {"live": "sse", **query} if "offset" in query and headers is None else query
        async for _ in tries():
            async with self.request(channel, "GET", headers, **query) as response:
                if response.status == 503 and NO_CONTROL in await response.text():
                    continue
                assert response.status == 200, await response.text()
                yield Stream(response)
                return
