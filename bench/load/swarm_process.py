"""One process of `bench/load/swarm.py` and `bench/load/storm.py`: many Pusher clients on picows, or the publisher.

Started by `swarm.py`, which writes one JSON line with the plan to stdin, and later commands: `{"do": "begin"}`, `cut`
and `end`. Prints a JSON line with its counters at once, and from the beginning on four times a second. Times are
CLOCK_MONOTONIC, which all processes of a machine share: every published event carries the moment it was due, and
latency is counted from there.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import random
import resource
import socket
import ssl
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import uvloop
from picows import WSFrame, WSListener, WSMsgType, WSTransport, ws_connect

from bench.driver import Address, socket_from
from helpers.wire import digest, signed_path

EVENT = "swarm-event"
ROOM_SIZE = 20
# Connections in the handshake at a time, in one process.
MAX_UNDER_WAY = 200
HANDSHAKE_TIMEOUT_S = 30.0
REPORT_EVERY_S = 0.25
# pusher-js waits a second after a lost connection, and tries again at once after a failed attempt (its
# connection_manager.ts); a floor keeps that from being a busy loop.
RECONNECT_S = 1.0
RETRY_S = 0.1
_PONG = b'{"event":"pusher:pong","data":{}}'
_PING = b'{"event":"pusher:ping","data":{}}'

logger = logging.getLogger("swarm")


def bucket(seconds: float) -> int:
    """The histogram's bucket of a duration: 5 % wide, from a microsecond up."""
    return int(math.log(max(seconds * 1e6, 1.0)) * 20)


def bucket_ms(index: int) -> float:
    """The middle of a bucket."""
    return math.exp((index + 0.5) / 20) / 1000


class Profile:
    """Which channels connection `number` of `total` subscribes to, and which channel the next event goes to.

    `ticker`: one public channel for all. `notifications`: a private channel each. `chat`: all three, a public lobby, a
    presence room of 20 and a private channel each; 90 % of the events go to rooms, 9 % to single users, 1 % to all.
    """

    def __init__(self, name: str, total: int) -> None:
        if name not in ("ticker", "notifications", "chat"):
            raise SystemExit(f"no profile {name}: chat, ticker or notifications")
        self.name = name
        self.total = total

    def channels(self, number: int) -> list[str]:
        if self.name == "ticker":
            return ["ticker"]
        if self.name == "notifications":
            return [f"private-user-{number}"]
        return ["lobby", f"presence-room-{number // ROOM_SIZE}", f"private-user-{number}"]

    def target(self, choose: random.Random) -> tuple[str, int]:
        """A channel and how many connections are subscribed to it."""
        if self.name == "ticker":
            return "ticker", self.total
        user = choose.randrange(self.total)
        dice = choose.random()
        if self.name == "notifications" or dice < 0.09:
            return f"private-user-{user}", 1
        if dice < 0.1:
            return "lobby", self.total
        room = user // ROOM_SIZE
        return f"presence-room-{room}", min(ROOM_SIZE, self.total - room * ROOM_SIZE)


class Client(WSListener):
    """One connection. Subscribes when it is established, answers pings, checks each event's order."""

    def __init__(self, swarm: Swarm, number: int) -> None:
        self.swarm = swarm
        self.number = number
        self.transport: WSTransport | None = None
        self.began = 0.0
        self.pending = 0
        self.last: dict[bytes, int] = {}

    def on_ws_frame(self, transport: WSTransport, frame: WSFrame) -> None:
        if frame.msg_type is WSMsgType.TEXT:
            payload = frame.get_payload_as_bytes()
            at = payload.find(b'"#')
            if at < 0:
                self.heard(transport, payload)
                return
            channel, number, due, _ = payload[at + 2 :].split(b"|", 3)
            swarm = self.swarm
            swarm.messages += 1
            swarm.latency[bucket(time.monotonic() - float(due))] += 1
            sequence = int(number)
            before = self.last.get(channel)
            if before is not None and sequence != before + 1:
                if sequence <= before:
                    swarm.overtaken += 1
                    return
                swarm.missed += sequence - before - 1
            self.last[channel] = sequence
        elif frame.msg_type is WSMsgType.CLOSE:
            self.swarm.closes[str(int(getattr(frame.get_close_code(), "value", frame.get_close_code())))] += 1
            transport.send_close(frame.get_close_code())
            transport.disconnect()

    def heard(self, transport: WSTransport, payload: bytes) -> None:
        """A message of the protocol."""
        message = msgspec.json.decode(payload)
        event = message.get("event")
        swarm = self.swarm
        if event == "pusher:connection_established":
            data = message["data"]
            data = msgspec.json.decode(data) if isinstance(data, str) else data
            swarm.activity_s = min(swarm.activity_s, float(data.get("activity_timeout", 120)))
            channels = swarm.profile.channels(self.number)
            self.pending = len(channels)
            for channel in channels:
                transport.send(WSMsgType.TEXT, swarm.subscribe(channel, data["socket_id"], self.number))
        elif event == "pusher_internal:subscription_succeeded":
            self.pending -= 1
            if self.pending == 0:
                swarm.subscribed(self)
        elif event == "pusher:ping":
            transport.send(WSMsgType.TEXT, _PONG)
        elif event == "pusher:error" or event == "pusher:subscription_error":
            swarm.errors[str(message.get("data"))[:200]] += 1
        else:
            swarm.others += 1

    def on_ws_disconnected(self, transport: WSTransport) -> None:
        self.swarm.lost(self)


class Swarm:
    """The clients of one process. Counters only grow; `report` gives them with what was added to the histograms."""

    def __init__(self, plan: dict[str, Any]) -> None:
        self.address = Address.parse(plan["url"])
        self.plan = plan
        self.profile = Profile(plan["profile"], plan["total"])
        self.reconnects: bool = plan["reconnects"]
        self.clients: list[Client | None] = [None] * plan["count"]
        self.open = self.ready = self.failed = self.losses = 0
        self.messages = self.missed = self.overtaken = self.others = 0
        self.latency: Counter[int] = Counter()
        self.connect: Counter[int] = Counter()
        self.back: Counter[int] = Counter()
        self.closes: Counter[str] = Counter()
        self.errors: Counter[str] = Counter()
        self.activity_s = 120.0
        self.cut_at = self.ready_at = 0.0
        self.ending = False
        self.tasks: set[asyncio.Task[None]] = set()
        self.under_way = asyncio.Semaphore(MAX_UNDER_WAY)
        self.tls = None
        if plan["tls_port"]:
            # Benches make their own certificate.
            self.tls = ssl.create_default_context()
            self.tls.check_hostname, self.tls.verify_mode = False, ssl.CERT_NONE
        base = f"{'wss' if self.tls else 'ws'}://{self.address.host}:{plan['tls_port'] or self.address.port}"
        self.url = f"{base}/app/{self.address.app_key}?protocol=7&client=swarm&version=1"

    def subscribe(self, channel: str, socket_id: str, number: int) -> bytes:
        data: dict[str, str] = {"channel": channel}
        signed = f"{socket_id}:{channel}"
        if channel.startswith("presence-"):
            member = {"user_id": str(number), "user_info": {"name": f"user {number}"}}
            data["channel_data"] = msgspec.json.encode(member).decode()
            signed += f":{data['channel_data']}"
        if channel.startswith(("presence-", "private-")):
            data["auth"] = f"{self.address.app_key}:{digest(self.address.app_secret, signed)}"
        return msgspec.json.encode({"event": "pusher:subscribe", "data": data})

    def subscribed(self, client: Client) -> None:
        self.ready += 1
        self.ready_at = time.monotonic()
        self.connect[bucket(time.monotonic() - client.began)] += 1
        if self.cut_at:
            self.back[bucket(time.monotonic() - self.cut_at)] += 1

    def lost(self, client: Client) -> None:
        place = client.number - self.plan["first"]
        if self.clients[place] is not client:
            return
        self.clients[place] = None
        self.open -= 1
        if client.pending == 0:
            self.ready -= 1
        if self.ending:
            return
        self.losses += 1
        if self.reconnects:
            asyncio.get_running_loop().call_later(RECONNECT_S, self.spawn, client.number)

    def spawn(self, number: int) -> None:
        task = asyncio.get_running_loop().create_task(self.enter(number))
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def enter(self, number: int) -> None:
        """Opens a connection. Failed attempts are counted, and repeated where clients reconnect."""
        while not self.ending:
            async with self.under_way:
                client = Client(self, number)
                client.began = time.monotonic()
                try:
                    client.transport, _ = await ws_connect(
                        lambda client=client: client,
                        self.url,
                        ssl_context=self.tls,
                        websocket_handshake_timeout=HANDSHAKE_TIMEOUT_S,
                        logger_name=logger,
                        # The smallest that picows takes: 20,000 clients of 16 kB would be 300 MB.
                        read_buffer_init_size=2048,
                        use_aiofastnet=False,
                        socket_factory=lambda _: self.source(number),
                    )
                except Exception as error:  # each library and each state of the server has its own
                    self.failed += 1
                    self.errors[f"{type(error).__name__}: {error}"[:200]] += 1
                else:
                    # It may have been lost already.
                    if not client.transport.is_disconnected:
                        self.clients[number - self.plan["first"]] = client
                        self.open += 1
                    return
            if not self.reconnects:
                return
            await asyncio.sleep(RETRY_S)

    def source(self, number: int) -> socket.socket | None:
        """A socket bound to one of the given source addresses; None lets the kernel choose."""
        addresses = self.plan["addresses"]
        return socket_from(addresses[number % len(addresses)]) if addresses else None

    async def ramp(self) -> None:
        """Begins connection i at i / rate seconds."""
        began = time.monotonic()
        first, rate = self.plan["first"], self.plan["rate"]
        for index in range(self.plan["count"]):
            wait_s = began + index / rate - time.monotonic()
            if wait_s > 0:
                await asyncio.sleep(wait_s)
            elif index % 20 == 0:
                await asyncio.sleep(0)
            self.spawn(first + index)

    async def keep_alive(self) -> None:
        """A ping for every connection within each activity timeout, as idle clients send it."""
        place = 0
        while True:
            await asyncio.sleep(1)
            share = math.ceil(len(self.clients) / max(1.0, self.activity_s * 0.8))
            for _ in range(share):
                place = (place + 1) % len(self.clients)
                client = self.clients[place]
                if client is not None and client.transport is not None and not client.transport.is_disconnected:
                    client.transport.send(WSMsgType.TEXT, _PING)

    def cut(self) -> None:
        """Aborts every connection, as a network that breaks or a server that dies would."""
        self.cut_at = time.monotonic()
        for client in self.clients:
            if client is not None and client.transport is not None:
                client.transport.underlying_transport.abort()

    def report(self) -> dict[str, Any]:
        figures = {
            "open": self.open,
            "ready": self.ready,
            "ready_at": self.ready_at,
            "failed": self.failed,
            "lost": self.losses,
            "messages": self.messages,
            "missed": self.missed,
            "overtaken": self.overtaken,
            "others": self.others,
            "latency": dict(self.latency),
            "connect": dict(self.connect),
            "back": dict(self.back),
            "closes": dict(self.closes),
            "errors": dict(self.errors.most_common(5)),
            "cpu_s": time.process_time(),
            "rss": rss_bytes(),
        }
        for histogram in (self.latency, self.connect, self.back):
            histogram.clear()
        return figures


def rss_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


class Publisher:
    """Publishes over HTTP at a fixed rate, each event with its channel, its number there, and when it was due."""

    def __init__(self, plan: dict[str, Any]) -> None:
        self.address = Address.parse(plan["url"])
        self.plan = plan
        self.profile = Profile(plan["profile"], plan["total"])
        self.choose = random.Random(1)
        self.numbers: Counter[str] = Counter()
        self.accepted = self.refused = self.expected = self.late = 0
        self.errors: Counter[str] = Counter()
        self.answer: Counter[int] = Counter()
        self.turns: dict[str, asyncio.Lock] = {}

    async def publish(self, session: aiohttp.ClientSession, channel: str, subscribers: int, due: float) -> None:
        """One event. Events of one channel are sent one after another: otherwise no order would be guaranteed."""
        turn = self.turns.setdefault(channel, asyncio.Lock())
        async with turn:
            self.numbers[channel] += 1
            data = f"#{channel}|{self.numbers[channel]}|{due:.6f}|".ljust(self.plan["data_bytes"], "x")
            body = msgspec.json.encode({"name": EVENT, "channels": [channel], "data": data})
            path = signed_path(self.address, "POST", f"/apps/{self.address.app_id}/events", body)
            sent = time.monotonic()
            try:
                url = f"http://{self.address.host}:{self.address.port}{path}"
                headers = {"Content-Type": "application/json"}
                async with session.post(url, data=body, headers=headers) as response:
                    text = await response.text()
                    if response.status == 200:
                        self.accepted += 1
                        self.expected += subscribers
                        self.answer[bucket(time.monotonic() - sent)] += 1
                    else:
                        self.refused += 1
                        self.errors[f"{response.status} {text}"[:200]] += 1
            except (OSError, TimeoutError, aiohttp.ClientError) as error:
                self.refused += 1
                self.errors[f"{type(error).__name__}: {error}"[:200]] += 1
        if len(self.turns) > 100_000:
            self.turns = {name: lock for name, lock in self.turns.items() if lock.locked()}

    async def run(self) -> None:
        tasks: set[asyncio.Task[None]] = set()
        rate, seconds = self.plan["publish"], self.plan["seconds"]
        connector = aiohttp.TCPConnector(limit=self.plan["http_connections"])
        async with aiohttp.ClientSession(connector=connector) as session:
            began = time.monotonic()
            for index in range(int(rate * seconds)):
                due = began + index / rate
                wait_s = due - time.monotonic()
                if wait_s > 0:
                    await asyncio.sleep(wait_s)
                elif wait_s < -0.1:
                    self.late += 1
                task = asyncio.create_task(self.publish(session, *self.profile.target(self.choose), due))
                tasks.add(task)
                task.add_done_callback(tasks.discard)
            if tasks:
                await asyncio.wait(tasks, timeout=30)

    def report(self) -> dict[str, Any]:
        figures = {
            "accepted": self.accepted,
            "refused": self.refused,
            "expected": self.expected,
            "late": self.late,
            "answer": dict(self.answer),
            "errors": dict(self.errors.most_common(5)),
            "cpu_s": time.process_time(),
            "rss": rss_bytes(),
        }
        self.answer.clear()
        return figures


async def run() -> None:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    logging.disable(logging.CRITICAL)
    loop = asyncio.get_running_loop()
    commands = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(commands), sys.stdin)
    plan = msgspec.json.decode(await commands.readline())
    side = Publisher(plan) if plan["role"] == "publisher" else Swarm(plan)

    def say(**more: object) -> None:
        sys.stdout.buffer.write(msgspec.json.encode({**side.report(), **more}) + b"\n")
        sys.stdout.buffer.flush()

    async def report() -> None:
        while True:
            await asyncio.sleep(REPORT_EVERY_S)
            say()

    # Imports cost a second of processor time, which isn't the connections'.
    say()
    await commands.readline()
    running = [asyncio.create_task(report())]
    if isinstance(side, Swarm):
        running += [asyncio.create_task(side.ramp()), asyncio.create_task(side.keep_alive())]
    else:
        await side.run()
        say(done=True)
    while line := await commands.readline():
        command = msgspec.json.decode(line)["do"]
        if command == "cut" and isinstance(side, Swarm):
            side.cut()
        elif command == "end":
            break
    if isinstance(side, Swarm):
        side.ending = True
    for task in running:
        task.cancel()
    say(done=True)
    sys.stdout.flush()
    # Closing 20,000 transports one by one gains nothing.
    os._exit(0)


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt, BrokenPipeError):
        uvloop.run(run())
