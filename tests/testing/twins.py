"""One random history of messages, sent to the real server and to a fake one.

After each step every client of both must have the same frames. What two servers can't share is replaced: socket ids by
the client's number, epochs by their order, offsets by their rank in the channel.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import re
import time
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from helpers.wire import Api, Socket, Target, digest
from redpoll.testing import FakeServer

CHANNELS = ("news", "private-a", "presence-a", "presence-b", "cache-a", "private-cache-a", "kept-a", "kept-b")
USERS = ("1", "2", "3")
CLIENTS = 4
WITHIN_S = 60.0

# What clients and back ends do, and how often.
KINDS = {
    "subscribe": 30,
    "publish": 24,
    "client event": 14,
    "unsubscribe": 10,
    "ask": 8,
    "history": 6,
    "connect": 6,
    "sign in": 4,
    "batch": 4,
    "resume": 4,
    "close": 3,
    "refused": 3,
    "odd name": 2,
    "terminate": 1,
    "clear": 1,
}
QUERIES: tuple[tuple[str, dict[str, str]], ...] = (
    ("/channels", {"info": "subscription_count,user_count"}),
    ("/channels", {"filter_by_prefix": "presence-", "info": "user_count"}),
    ("/channels", {"info": "nothing"}),
    ("/channels/{}", {}),
    ("/channels/{}", {"info": "user_count"}),
    ("/channels/{}/users", {}),
    ("/channels/{}/history", {"limit": "3"}),
    ("/channels/{}/history", {"direction": "backwards", "limit": "2"}),
)


class Step(NamedTuple):
    """`chance` is a number from 0 to 1 that decides the details."""

    number: int
    kind: str
    who: int
    channel: str
    chance: float

    @property
    def user(self) -> str:
        return USERS[int(self.chance * len(USERS))]


class Positions:
    """The epochs and offsets of one channel, as far as clients have seen them."""

    def __init__(self) -> None:
        self.epochs: list[str] = []
        self.offsets: set[int] = set()
        self.places: list[tuple[int, int]] = []

    def note(self, value: Mapping[str, Any]) -> None:
        epoch, offset = value.get("epoch"), value.get("offset")
        if epoch and epoch not in self.epochs:
            self.epochs.append(epoch)
        if isinstance(offset, int):
            self.offsets.add(offset)


class Side:
    """One of the two servers, its clients, and what came since the last step."""

    def __init__(self, target: Target, api: Api) -> None:
        self.target = target
        self.api = api
        self.clients: list[Socket | None] = [None] * CLIENTS
        self.answer: Any = None
        self.positions = {channel: Positions() for channel in CHANNELS}
        self._known = [0] * CLIENTS
        self._names: dict[str, str] = {}

    async def connect(self, who: int, *, recovers: bool) -> None:
        client = self.clients[who]
        if client is not None and not client.lost:
            await client.close()
        query = "protocol=7&client=test&version=1" + ("&recover=1" if recovers else "")
        self.clients[who] = client = await Socket.connect(self.target, query=query)
        self._known[who] = 0
        self._names[client.socket_id] = f"<client {who}>"

    async def settle(self) -> None:
        for client in self.clients:
            if client is not None and not client.lost:
                with contextlib.suppress(ConnectionError):
                    await client.settle()

    def news(self, who: int) -> list[Any]:
        """What the client got since the last `agreed`, in order for each channel."""
        client = self.clients[who]
        if client is None:
            return []
        frames = [frame for frame in client.frames[self._known[who] :] if frame["event"] != "pusher:pong"]
        frames.sort(key=lambda frame: frame.get("channel", ""))
        news: list[Any] = [self._plain(frame) for frame in frames]
        if client.lost:
            news.append(("closed", client.close_code, client.close_reason))
        return news

    def agreed(self) -> None:
        for who, client in enumerate(self.clients):
            if client is not None:
                self._known[who] = len(client.frames)

    # -- what differs between any two servers

    def note_positions(self) -> None:
        for who, client in enumerate(self.clients):
            for frame in client.frames[self._known[who] :] if client is not None else ():
                for value in _objects(frame.get("channel", ""), frame):
                    self._note(*value)
        for value in _objects(*self.answer) if self.answer is not None else ():
            self._note(*value)

    def _note(self, channel: str, value: Mapping[str, Any]) -> None:
        if channel in self.positions:
            self.positions[channel].note(value)

    def _plain(self, frame: Mapping[str, Any]) -> Any:
        return self.plain(frame.get("channel", ""), "", {**frame, "data": _decoded(frame["data"])})

    def plain(self, channel: str, name: str, value: Any) -> Any:
        if isinstance(value, dict):
            return {key: self.plain(channel, key, inner) for key, inner in value.items()}
        if isinstance(value, list | tuple):
            return [self.plain(channel, name, inner) for inner in value]
        if name in ("time_ms", "trace_id"):
            return name
        if name == "offset" and channel in self.positions:
            return f"<offset {sorted(self.positions[channel].offsets).index(value)}>"
        if not isinstance(value, str):
            return value
        if name == "next":
            epoch, _, offset = value.partition(":")
            return [self.plain(channel, "epoch", epoch), self.plain(channel, "offset", int(offset.partition(":")[0]))]
        text = re.sub(r"[0-9a-f]{64}", "<digest>", value)
        for known in self._names:
            text = text.replace(known, self._names[known])
        for number, epoch in enumerate(self.positions[channel].epochs if channel in self.positions else ()):
            text = text.replace(epoch, f"<epoch {number}>")
        return text


def _decoded(data: Any) -> Any:
    if isinstance(data, str):
        try:
            return json.loads(data)
        except ValueError:
            pass
    return data


def _objects(channel: str, value: Any) -> Iterator[tuple[str, Mapping[str, Any]]]:
    if isinstance(value, dict):
        yield channel, value
        for inner in value.values():
            yield from _objects(channel, _decoded(inner))
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _objects(channel, inner)


class Twins:
    """`run` sends a history of `length` messages. Everything is drawn from `seed`."""

    def __init__(self, fake: Side, server: FakeServer, real: Side, seed: int) -> None:
        self.sides = (fake, real)
        self._server = server
        self._random = random.Random(seed)
        # The fake's clients.
        self._refused: set[Socket] = set()

    async def run(self, length: int) -> None:
        for number in range(length):
            await self.take(self._draw(number))

    def _draw(self, number: int) -> Step:
        chance = self._random
        (kind,) = chance.choices(list(KINDS), list(KINDS.values()))
        return Step(number, kind, chance.randrange(CLIENTS), chance.choice(CHANNELS), chance.random())

    async def take(self, step: Step) -> None:
        fake = self.sides[0]
        client = fake.clients[step.who]
        if client is None or client.lost:
            step = step._replace(kind="connect")
        elif step.kind == "client event" and not self._is_answered_by_both(step, client):
            return
        elif step.kind == "ask":
            await self._agree(step, asks=True)
            return
        for side in self.sides:
            side.answer = None
            await _carry_out(side, step)
        # Now the fake's answers are complete; the other server's are waited for.
        await fake.settle()
        await self._agree(step)

    def _is_answered_by_both(self, step: Step, client: Socket) -> bool:
        """Refusals of a connection are answered once a second, which each side measures by its own clock: only the
        first one is sent."""
        if client.socket_id not in self._server.subscribers(step.channel):
            return False
        if step.channel.startswith(("private-", "presence-")):
            return True
        is_first = client not in self._refused
        self._refused.add(client)
        return is_first

    async def _agree(self, step: Step, asks: bool = False) -> None:
        """Waits until both sides have the same: Redis takes a moment."""
        deadline = time.monotonic() + WITHIN_S
        while True:
            for side in self.sides:
                if asks:
                    await _ask(side, step)
                side.note_positions()
            fake, real = ([self._seen(side, who) for who in range(-1, CLIENTS)] for side in self.sides)
            if fake == real:
                break
            if time.monotonic() > deadline:
                differing = next(pair for pair in zip(fake, real, strict=True) if pair[0] != pair[1])
                raise AssertionError(f"{step}\nfake: {differing[0]}\nreal: {differing[1]}")
            await asyncio.sleep(0.001)
        for side in self.sides:
            side.agreed()

    @staticmethod
    def _seen(side: Side, who: int) -> Any:
        try:
            if who < 0:
                return None if side.answer is None else side.plain(*side.answer[:1], "", side.answer[1])
            return side.news(who)
        except (KeyError, ValueError) as missing:
            return f"not yet: {missing}"


async def _carry_out(side: Side, step: Step) -> None:
    """What is sent is the same on both sides, apart from signatures and positions."""
    client, channel, chance = side.clients[step.who], step.channel, step.chance
    if step.kind == "connect":
        await side.connect(step.who, recovers=chance < 0.4)
        return
    assert client is not None
    if step.kind == "close":
        await client.close()
    elif step.kind == "subscribe":
        request = client.subscribe_request(channel, step.user, {"n": step.number} if chance < 0.5 else None)
        if chance < 0.5:
            request["data"]["rewind"] = {"count": 1 + step.number % 5}
        client.send(request)
    elif step.kind == "unsubscribe":
        client.unsubscribe(channel)
        # It has no answer: the next subscribe must find it done.
        await client.settle()
    elif step.kind == "client event":
        client.send({"event": "client-x", "channel": channel, "data": {"n": step.number} if chance < 0.5 else "text"})
    elif step.kind == "history":
        client.send({"event": "pusher:history", "data": {"channel": channel, "limit": 1 + int(chance * 6)}})
    elif step.kind == "resume":
        _resume(side, client, step)
    elif step.kind == "sign in":
        user_data = json.dumps({"id": step.user})
        auth = digest(side.target.app_secret, f"{client.socket_id}::user::{user_data}")
        data = {"auth": f"{side.target.app_key}:{auth}", "user_data": user_data}
        client.send({"event": "pusher:signin", "data": data})
        client.send({"event": "pusher:subscribe", "data": {"channel": f"#server-to-user-{step.user}"}})
    elif step.kind == "refused":
        request = client.subscribe_request("private-refused" if chance < 0.5 else "presence-refused", step.user)
        request["data"]["auth"] = side.target.app_key + ":" + "0" * 64 if chance < 0.3 else ""
        client.send(request)
    elif step.kind == "odd name":
        name = "not a name" if chance < 0.5 else "x" * 201
        client.send({"event": "pusher:subscribe", "data": {"channel": name}})
    else:
        side.answer = channel, await _over_http(side, client, step)


def _resume(side: Side, client: Socket, step: Step) -> None:
    """Subscribes since a position that somebody has seen, of whichever epoch."""
    positions = side.positions[step.channel]
    offsets = sorted(positions.offsets)
    if offsets and positions.epochs:
        request = client.subscribe_request(step.channel)
        epoch = positions.epochs[int(step.chance * len(positions.epochs))]
        request["data"]["since"] = {"epoch": epoch, "offset": offsets[int(step.chance * len(offsets))]}
        client.send(request)


async def _over_http(side: Side, client: Socket, step: Step) -> Any:
    chance, channel, number = step.chance, step.channel, step.number
    body: dict[str, Any] = {"name": "event", "data": json.dumps({"n": number})}
    if step.kind == "batch":
        items = [{**body, "channel": channel}] * (1 + int(chance * 11))
        return await side.api.ask("POST", "/batch_events", {"batch": items})
    if step.kind == "terminate":
        return await side.api.ask("POST", f"/users/{step.user}/terminate_connections", {})
    if step.kind == "clear":
        return await side.api.ask("DELETE", f"/channels/{channel}/history")
    body["channels"] = list(dict.fromkeys((channel, *CHANNELS[: int(chance * 3)]))) if chance < 0.5 else [channel]
    if chance < 0.2:
        body["socket_id"] = client.socket_id
    elif chance < 0.25:
        body["name"] = "pusher:reserved"
    elif chance > 0.9:
        body["channels"] = [f"#server-to-user-{USERS[number % 3]}"]
    return await side.api.ask("POST", "/events", body)


async def _ask(side: Side, step: Step) -> None:
    path, params = QUERIES[int(step.chance * len(QUERIES))]
    side.answer = step.channel, await side.api.ask("GET", path.format(step.channel), params=params)
