"""A small client of the Pusher protocol for tests: WebSocket, HTTP API and signatures.

Tests use it if they need many connections, every byte, or wrong behaviour; tests/clients uses real libraries. It shares
no code with src/redpoll, because a common error would not show.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import json
import os
import socket as sockets
import struct
import time
import urllib.parse
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import Any, Protocol, Self, cast

import aiohttp

TEXT, BINARY, CLOSE, PING, PONG = 1, 2, 8, 9, 10
# The server gives up a request that Redis or its control process doesn't answer within 1.25 s or more.
_GIVEN_UP_S = 1.2
# What is answered at once while control is late. Control hasn't seen the request.
NO_CONTROL = "the control plane isn't there; send the request again"

Frame = dict[str, Any]


class UpgradeRefused(ConnectionError):
    """The upgrade was answered with another status than 101."""

    def __init__(self, status: int) -> None:
        super().__init__(f"upgrade answered {status}")
        self.status = status


class Target(Protocol):
    """The server and the app to connect to. `server.Server` has these attributes."""

    port: int
    app_id: str
    app_key: str
    app_secret: str


class TargetWithWorkers(Target, Protocol):
    """A server whose workers can be told apart, such as `server.Server`."""

    def client_ports(self) -> dict[int, set[int]]: ...


def was_late(status: int, took_s: float, answer: Any) -> bool:
    """Whether the server gave a request up because Redis or its control process was late. `answer` is its body."""
    return status == 503 and (took_s >= _GIVEN_UP_S or answer.get("error") == NO_CONTROL)


async def tries() -> AsyncIterator[None]:
    """One turn every 50 ms, for requests that are sent again while the server is late. Raises TimeoutError after a
    minute."""
    until = time.monotonic() + 60
    while time.monotonic() < until:
        yield
        await asyncio.sleep(0.05)
    raise TimeoutError("the server was late for a minute")


def digest(secret: str, text: str) -> str:
    return hmac.new(secret.encode(), text.encode(), hashlib.sha256).hexdigest()


def channel_auth(target: Target, socket_id: str, channel: str, channel_data: str | None = None) -> str:
    """`KEY:DIGEST` of a subscription, as protocol/README.md "Authentication of channels" says."""
    signed = f"{socket_id}:{channel}" if channel_data is None else f"{socket_id}:{channel}:{channel_data}"
    return f"{target.app_key}:{digest(target.app_secret, signed)}"


def signed_path(
    target: Target,
    method: str,
    path: str,
    body: bytes = b"",
    params: Mapping[str, str] | None = None,
    at: int = 0,
) -> str:
    """The signed request target (protocol/README.md "Request signing"). `path` begins with /apps or /api."""
    query = {
        "auth_key": target.app_key,
        "auth_timestamp": str(at or int(time.time())),
        "auth_version": "1.0",
        **(params or {}),
    }
    if body:
        query["body_md5"] = hashlib.md5(body).hexdigest()
    text = "&".join(f"{name}={query[name]}" for name in sorted(query))
    query["auth_signature"] = digest(target.app_secret, f"{method}\n{path}\n{text}")
    return f"{path}?{urllib.parse.urlencode(query)}"


def frame(
    opcode: int,
    payload: bytes,
    *,
    fin: bool = True,
    rsv: int = 0,
    mask: bytes | None = b"\x37\xfa\x21\x3d",
    claimed_bytes: int | None = None,
) -> bytes:
    """A client frame. The keyword arguments make it invalid; `claimed_bytes` replaces the length in the header."""
    length = len(payload) if claimed_bytes is None else claimed_bytes
    masked = 0x80 if mask is not None else 0
    head = bytes([(0x80 if fin else 0) | rsv << 4 | opcode])
    if length < 126:
        head += bytes([masked | length])
    elif length < 1 << 16:
        head += bytes([masked | 126]) + length.to_bytes(2, "big")
    else:
        head += bytes([masked | 127]) + length.to_bytes(8, "big")
    if mask is None:
        return head + payload
    repeated = (mask * (len(payload) // 4 + 1))[: len(payload)]
    return (
        head + mask + (int.from_bytes(payload, "big") ^ int.from_bytes(repeated, "big")).to_bytes(len(payload), "big")
    )


def upgrade_request(target: Target, *, key: str | None = None, query: str = "protocol=7", extra: str = "") -> bytes:
    """The head of a WebSocket upgrade. `extra` has further header lines, each with CRLF at its end."""
    nonce = base64.b64encode(os.urandom(16)).decode()
    path = f"/app/{target.app_key if key is None else key}?{query}"
    return (
        f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1:{target.port}\r\n"
        f"Upgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Key: {nonce}\r\n"
        f"Sec-WebSocket-Version: 13\r\n{extra}\r\n"
    ).encode()


class Socket(asyncio.Protocol):
    """One client connection. `frames` has all text frames received so far, in order, as decoded JSON.

    `next(event, channel)` waits for the next frame that matches and skips the others.
    """

    def __init__(self) -> None:
        self.frames: list[Frame] = []
        self.control: list[tuple[int, bytes]] = []
        self.socket_id = ""
        self.status = 0
        self.close_code: int | None = None
        self.close_reason = ""
        self.lost = False
        self.port = 0
        self._target: Target | None = None
        self._transport: asyncio.Transport | None = None
        self._received = bytearray()
        self._cursor = 0
        self._changed = asyncio.Event()

    # -- connect and close

    @classmethod
    async def connect(
        cls,
        target: Target,
        *,
        key: str | None = None,
        query: str = "protocol=7&client=test&version=1",
        extra: str = "",
        receive_buffer_bytes: int | None = None,
        established: bool = True,
        timeout_s: float = 60.0,
    ) -> Self:
        """Connects, upgrades and, if `established`, waits for `pusher:connection_established`."""
        raw = sockets.socket()
        raw.setblocking(False)
        if receive_buffer_bytes is not None:
            raw.setsockopt(sockets.SOL_SOCKET, sockets.SO_RCVBUF, receive_buffer_bytes)
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(timeout_s):
                await loop.sock_connect(raw, ("127.0.0.1", target.port))
                _, self = await loop.create_connection(cls, sock=raw)
        except BaseException:
            raw.close()
            raise
        self._target = target
        self.write(upgrade_request(target, key=key, query=query, extra=extra))
        await self.until(lambda: self.status, timeout_s=timeout_s, what="an answer to the upgrade")
        if established:
            if self.status != 101:
                self.abort()
                raise UpgradeRefused(self.status)
            first = await self.next("pusher:connection_established", timeout_s=timeout_s)
            self.socket_id = json.loads(first["data"])["socket_id"]
        return self

    async def close(self) -> None:
        """Closes cleanly: sends a close frame, then waits for the server's and for the end of TCP."""
        if not self.lost:
            self.write(frame(CLOSE, (1000).to_bytes(2, "big")))
            await self.until(lambda: self.lost, what="the end of the connection")

    def reset(self) -> None:
        """Ends the connection with RST, as the kernel of a crashed machine does."""
        assert self._transport is not None
        if self.lost:
            return  # A lost connection has no socket.
        raw = self._transport.get_extra_info("socket")
        raw.setsockopt(sockets.SOL_SOCKET, sockets.SO_LINGER, struct.pack("ii", 1, 0))
        self._transport.abort()

    def abort(self) -> None:
        """Ends the TCP connection without a close frame."""
        assert self._transport is not None
        self._transport.abort()

    def pause(self) -> None:
        """Stops reading, so that the buffers of the kernel fill, then those of the server."""
        assert self._transport is not None
        self._transport.pause_reading()

    def resume(self) -> None:
        assert self._transport is not None
        self._transport.resume_reading()

    # -- called by asyncio

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self.port = transport.get_extra_info("sockname")[1]

    def connection_lost(self, error: Exception | None) -> None:
        self.lost = True
        self._changed.set()

    def data_received(self, data: bytes) -> None:
        self._received += data
        if self.status == 0:
            head, found, rest = bytes(self._received).partition(b"\r\n\r\n")
            if not found:
                return
            self.status = int(head.split(b" ", 2)[1])
            self._received = bytearray(rest)
        if self.status == 101:
            while self._take_frame():
                pass
        self._changed.set()

    def _take_frame(self) -> bool:
        received = self._received
        if len(received) < 2:
            return False
        assert received[0] & 0x80, "the server never fragments"
        assert not received[1] & 0x80, "the server never masks"
        opcode, length, at = received[0] & 0x0F, received[1] & 0x7F, 2
        if length == 126:
            if len(received) < 4:
                return False
            length, at = int.from_bytes(received[2:4], "big"), 4
        elif length == 127:
            if len(received) < 10:
                return False
            length, at = int.from_bytes(received[2:10], "big"), 10
        if len(received) < at + length:
            return False
        payload = bytes(received[at : at + length])
        del received[: at + length]
        if opcode == TEXT:
            self.frames.append(json.loads(payload))
        else:
            self.control.append((opcode, payload))
        if opcode == CLOSE:
            self.close_code = int.from_bytes(payload[:2], "big") if payload else 1005
            self.close_reason = payload[2:].decode()
            self.write(frame(CLOSE, payload[:2]))
        return True

    # -- called by tests

    def write(self, data: bytes) -> None:
        """Sends raw bytes."""
        assert self._transport is not None
        if not self.lost:
            self._transport.write(data)

    def send(self, message: object) -> None:
        """Sends a message as a JSON text frame."""
        self.write(frame(TEXT, json.dumps(message).encode()))

    async def until(self, predicate: Callable[[], object], timeout_s: float = 60.0, what: str = "it") -> None:
        """Waits until the predicate is true. Checks it after each arrival."""
        try:
            async with asyncio.timeout(timeout_s):
                while not predicate():
                    if self.lost:
                        how = f"{self.close_code} {self.close_reason}"
                        raise ConnectionError(f"connection ended ({how}) while waiting for {what}")
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            raise TimeoutError(f"not within {timeout_s} s: {what}; last frames: {self.frames[-3:]}") from None

    async def until_closed(self, timeout_s: float = 60.0) -> int | None:
        """Waits for the end of the connection. Returns the close code, or None without a close frame."""
        await self.until(lambda: self.lost, timeout_s, "the server to close")
        return self.close_code

    async def next(self, event: str | None = None, channel: str | None = None, timeout_s: float = 60.0) -> Frame:
        """Waits for the next frame with this event and channel. The frames before it are dropped."""

        def found() -> bool:
            while self._cursor < len(self.frames):
                candidate = self.frames[self._cursor]
                if event in (None, candidate["event"]) and channel in (None, candidate.get("channel")):
                    return True
                self._cursor += 1
            return False

        await self.until(found, timeout_s, f"{event or 'any event'} on {channel or 'any channel'}")
        self._cursor += 1
        return self.frames[self._cursor - 1]

    def all(self, event: str, channel: str | None = None) -> list[Frame]:
        """All frames so far with this event and channel."""
        return [seen for seen in self.frames if seen["event"] == event and channel in (None, seen.get("channel"))]

    def subscribe_request(self, channel: str, user_id: object = None, user_info: object = None) -> Frame:
        assert self._target is not None
        data: Frame = {"channel": channel}
        if channel.startswith("presence-"):
            member = {"user_id": user_id if user_id is not None else self.socket_id}
            if user_info is not None:
                member["user_info"] = user_info
            data["channel_data"] = json.dumps(member)
        if channel.startswith(("private-", "presence-")):
            data["auth"] = channel_auth(self._target, self.socket_id, channel, data.get("channel_data"))
        return {"event": "pusher:subscribe", "data": data}

    async def subscribe(
        self, channel: str, user_id: object = None, user_info: object = None, timeout_s: float = 30.0
    ) -> Frame:
        """Subscribes and returns the success frame."""
        self.send(self.subscribe_request(channel, user_id, user_info))
        return await self.next("pusher_internal:subscription_succeeded", channel, timeout_s)

    def unsubscribe(self, channel: str) -> None:
        self.send({"event": "pusher:unsubscribe", "data": {"channel": channel}})

    async def ping(self, timeout_s: float = 60.0) -> float:
        """Sends `pusher:ping` and returns the seconds until its pong. The server has then handled everything before it.

        The pong can overtake frames that are still queued; use `settle` if they matter.
        """
        pongs = len(self.all("pusher:pong"))
        began = time.perf_counter()
        self.send({"event": "pusher:ping", "data": {}})
        await self.until(lambda: len(self.all("pusher:pong")) > pongs, timeout_s, "pusher:pong")
        return time.perf_counter() - began

    async def settle(self) -> None:
        """Waits until `frames` has every response to what was sent so far.

        After the first pong, the server has handled everything. Frames of the same tick arrive before the second pong.
        """
        await self.ping()
        await self.ping()


async def connect_patiently(target: Target, within_s: float = 60.0) -> Socket:
    """Connects, and tries again if it fails: a worker may be dying or not ready yet."""
    deadline = time.monotonic() + within_s
    while True:
        try:
            return await Socket.connect(target)
        except ConnectionError:
            if time.monotonic() > deadline:
                raise
            await asyncio.sleep(0.01)


async def sockets_by_worker(server: TargetWithWorkers, want: int) -> dict[int, list[Socket]]:
    """Connections by the pid of the worker that holds them: one worker has `want` or more, others have some."""
    held: dict[int, list[Socket]] = {}
    while len(held) < 2 or max(map(len, held.values())) < want:
        for socket in [await connect_patiently(server) for _ in range(want)]:
            held.setdefault(0, []).append(socket)
        sockets = [socket for mine in held.values() for socket in mine]
        ports = server.client_ports()
        held = {
            pid: mine
            for pid, theirs in ports.items()
            if (mine := [socket for socket in sockets if socket.port in theirs])
        }
    return held


async def connect_many(target: Target, count: int, *, at_once: int = 100, **options: Any) -> list[Socket]:
    """Opens `count` connections and returns them."""
    limit = asyncio.Semaphore(at_once)

    async def connect() -> Socket:
        async with limit:
            return await Socket.connect(target, **options)

    return list(await asyncio.gather(*(connect() for _ in range(count))))


async def end_all(sockets_: Sequence[Socket]) -> None:
    """Aborts all connections, so that a server that stops next needn't wait for them."""
    for client in sockets_:
        if not client.lost:
            client.abort()
    for client in sockets_:
        await client.until(lambda: client.lost, what="the end of a connection")  # noqa: B023


async def subscribe_all(sockets_: Sequence[Socket], channel: str) -> None:
    """Subscribes all connections to a public or private channel and waits for their success frames."""
    for client in sockets_:
        client.send(client.subscribe_request(channel))
    for client in sockets_:
        await client.next("pusher_internal:subscription_succeeded", channel)


async def eventually(ask: Callable[[], Awaitable[object]], expected: object, within_s: float = 60.0) -> None:
    """Calls `ask` until it returns the expected value."""
    deadline = time.monotonic() + within_s
    while (seen := await ask()) != expected:
        assert time.monotonic() < deadline, f"after {within_s} s still {seen}, not {expected}"
        await asyncio.sleep(0.01)


class Api:
    """A client of the HTTP API: signed requests over keep-alive connections. `async with Api(server) as api:`."""

    def __init__(self, target: Target, *, prefix: str = "", connections: int = 20) -> None:
        self._target = target
        self._prefix = prefix
        self._connections = connections

    async def __aenter__(self) -> Self:
        connector = aiohttp.TCPConnector(limit=self._connections)
        timeout = aiohttp.ClientTimeout(total=60)
        self._session = aiohttp.ClientSession(connector=connector, timeout=timeout)
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._session.close()

    async def ask(
        self,
        method: str,
        path: str,
        body: object = None,
        params: Mapping[str, str] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> tuple[int, Any]:
        """Sends a request and returns (status, decoded body). `path` is relative to the app: `/events`."""
        path = f"{self._prefix}/apps/{self._target.app_id}{path}"
        payload = b"" if body is None else json.dumps(body).encode()
        target = signed_path(self._target, method, path, payload, params)
        url = f"http://127.0.0.1:{self._target.port}{target}"
        typed = {"Content-Type": "application/json"} if payload else {}
        headers = {**typed, **(headers or {})}
        async with self._session.request(method, url, data=payload or None, headers=headers) as response:
            text = await response.text()
            return response.status, json.loads(text)

    async def publish(self, channel: str | Sequence[str], name: str, data: str, **more: object) -> None:
        """Triggers an event and checks for 200."""
        channels = [channel] if isinstance(channel, str) else list(channel)
        await self._confirmed("POST", "/events", {"name": name, "channels": channels, "data": data, **more})

    async def get(self, path: str, **params: str) -> Any:
        """Sends a GET, checks for 200 and returns the body."""
        return await self._confirmed("GET", path, params=params)

    async def _confirmed(
        self, method: str, path: str, body: object = None, params: Mapping[str, str] | None = None
    ) -> Any:
        """The body of a 200. On a busy machine, Redis or the control process may be late; then this asks again, as back
        ends do, for a minute. Another refusal at once is wrong."""
        async for _ in tries():
            began = time.monotonic()
            status, answer = await self.ask(method, path, body, params)
            if not was_late(status, time.monotonic() - began, answer):
                assert status == 200, (status, answer)
                return answer

    async def users(self, channel: str) -> list[str]:
        return sorted(user["id"] for user in (await self.get(f"/channels/{channel}/users"))["users"])

    async def subscription_count(self, channel: str) -> int:
        count = (await self.get(f"/channels/{channel}"))["subscription_count"]
        assert isinstance(count, int)
        return count
