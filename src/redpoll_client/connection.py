"""One WebSocket connection: opened, greeted, kept alive, and closed; and how long to wait before the next one.

Close codes, the greeting and silence: protocol/README.md "Connecting" and "Close codes".
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
from yarl import URL

from redpoll_client.errors import ConnectionRefused, ProtocolError, Unreachable
from redpoll_client.signatures import from_json

__all__ = ["ClosedEarly", "Connection", "data_of", "reconnect_delay_s"]

_LONGEST_DELAY_S = 30.0
_PONG_WITHIN_S = 30.0
# A server's activity_timeout is believed within these bounds.
_SHORTEST_ACTIVITY_S, _LONGEST_ACTIVITY_S = 1.0, 300.0
# Frames after which the readers of channels get a turn.
_FRAMES_AT_ONCE = 64


def reconnect_delay_s(code: int | None, attempt: int) -> float:
    """Seconds to wait before the next connection. `attempt` is 0 after a connection that lasted.

    4100 to 4199 mean: not before a second. 4200 to 4299 mean: at once; a random part of a second is added all the same,
    because the server closes all of its connections with such a code when it stops. The rest doubles up to 30 s.
    """
    spread_s = min(_LONGEST_DELAY_S, 2.0**attempt)
    if code is not None and 4100 <= code < 4200:
        return 1 + random.uniform(0, spread_s)
    return random.uniform(0, spread_s)


class ClosedEarly(Unreachable):
    """The server closed the connection instead of greeting, with `code`: a close code, None if there was none."""

    def __init__(self, text: str, code: int | None) -> None:
        super().__init__(text)
        self.code = code


class Connection:
    """An open connection, after the greeting. `socket_id` is its id."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse, timeout_s: float) -> None:
        self._socket = socket
        self._timeout_s = timeout_s
        self._activity_s = 120.0
        self._received_at = asyncio.get_running_loop().time()
        self._watch: asyncio.Task[None] | None = None
        self.silent = False
        self.socket_id = ""

    @classmethod
    async def open(
        cls, session: aiohttp.ClientSession, url: str, timeout_s: float, max_message_bytes: int, ssl_context: Any
    ) -> Connection:
        """Connects and takes the greeting. Raises ConnectionRefused, ProtocolError, or Unreachable where another
        attempt may succeed."""
        try:
            async with asyncio.timeout(timeout_s):
                socket = await session.ws_connect(
                    URL(url, encoded=True),
                    max_msg_size=max_message_bytes,
                    ssl=ssl_context if ssl_context is not None else True,
                    timeout=aiohttp.ClientWSTimeout(ws_close=timeout_s),
                )
                connection = cls(socket, timeout_s)
                try:
                    await connection._greeting()
                except BaseException:
                    await socket.close()
                    raise
        except aiohttp.ClientConnectorCertificateError as error:
            raise ProtocolError(f"{_without_query(url)}: {error}") from error
        except aiohttp.WSServerHandshakeError as error:
            text = f"{_without_query(url)}: the upgrade was answered with {error.status}"
            if error.status >= 500 or error.status == 429:
                raise Unreachable(text) from error
            raise ProtocolError(f"{text}: is this the address of a Pusher-compatible server?") from error
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise Unreachable(f"{_without_query(url)}: {error or 'no greeting in time'}") from error
        connection._watch = asyncio.create_task(connection._keep_alive(), name="redpoll-keep-alive")
        return connection

    async def _greeting(self) -> None:
        message = await self._socket.receive()
        if message.type is not aiohttp.WSMsgType.TEXT:
            self.check_close()
            closed_with = self._socket.close_code
            raise ClosedEarly(f"the connection was closed with {closed_with} before the greeting", closed_with)
        frame = _decoded(message.data)
        fields = data_of(frame)
        if frame["event"] == "pusher:error":
            code, text = fields.get("code"), str(fields.get("message", ""))
            number = code if isinstance(code, int) else None
            refused(number or 0, text)
            raise ClosedEarly(f"the server refused the connection: {code}: {text}", number)
        socket_id = fields.get("socket_id")
        if frame["event"] != "pusher:connection_established" or not isinstance(socket_id, str):
            raise ProtocolError(f"the first frame is {frame['event']!r:.80}, not a Pusher server's greeting")
        self.socket_id = socket_id
        activity = fields.get("activity_timeout")
        if isinstance(activity, int | float) and not isinstance(activity, bool):
            self._activity_s = min(max(float(activity), _SHORTEST_ACTIVITY_S), _LONGEST_ACTIVITY_S)

    @property
    def close_code(self) -> int | None:
        """The server's close code; None if the connection was lost without one."""
        return self._socket.close_code

    def check_close(self) -> None:
        """Raises ConnectionRefused if the connection was closed with a code that forbids another one."""
        refused(self._socket.close_code or 0, "the server closed the connection")

    async def send(self, frame: dict[str, Any]) -> None:
        """Sends a frame. Raises Unreachable if the connection is closed, or takes no bytes in time."""
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._socket.send_str(json.dumps(frame, separators=(",", ":")))
        except (aiohttp.ClientError, TimeoutError, OSError, RuntimeError) as error:
            raise Unreachable(f"the connection is closed: {error}") from error

    async def frames(self) -> AsyncIterator[dict[str, Any]]:
        """The frames, until the connection ends. Raises ProtocolError for one that no Pusher server sends."""
        loop = asyncio.get_running_loop()
        count = 0
        async for message in self._socket:
            self._received_at = loop.time()
            if message.type is not aiohttp.WSMsgType.TEXT:
                if message.type is aiohttp.WSMsgType.ERROR:
                    return
                raise ProtocolError("the server sent a binary message")
            yield _decoded(message.data)
            count += 1
            if count % _FRAMES_AT_ONCE == 0:
                await asyncio.sleep(0)

    async def close(self) -> None:
        """Closes the connection and ends its task."""
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.gather(self._watch, return_exceptions=True)
        await self._socket.close()

    async def _keep_alive(self) -> None:
        """Pings after silence, and closes after more of it."""
        loop = asyncio.get_running_loop()
        while not self._socket.closed:
            silent_s = loop.time() - self._received_at
            if silent_s < self._activity_s:
                await asyncio.sleep(self._activity_s - silent_s)
                continue
            before = self._received_at
            try:
                await self.send({"event": "pusher:ping", "data": {}})
                await asyncio.sleep(_PONG_WITHIN_S)
            except Unreachable:
                return
            if self._received_at == before:
                self.silent = True
                await self._socket.close()
                return


def refused(code: int, text: str) -> None:
    """Raises ConnectionRefused for a code that forbids to reconnect."""
    if 4000 <= code < 4100:
        raise ConnectionRefused(code, text)


def _decoded(text: str) -> dict[str, Any]:
    try:
        frame = from_json(text)
    except (ValueError, RecursionError):
        frame = None
    if not isinstance(frame, dict) or not isinstance(frame.get("event"), str):
        raise ProtocolError(f"the server sent a frame that isn't Pusher's: {text:.80}")
    return frame


def data_of(frame: dict[str, Any]) -> dict[str, Any]:
    """The decoded data of a frame of the server's own, which may be an object or a string. Raises ProtocolError."""
    data = frame.get("data", {})
    if isinstance(data, str):
        try:
            data = json.loads(data or "{}")
        except (ValueError, RecursionError):
            data = None
    if not isinstance(data, dict):
        raise ProtocolError(f"the data of {frame['event']:.80} is no JSON object")
    return data


def _without_query(url: str) -> str:
    return url.partition("?")[0]
