"""`redpoll subscribe`: follows channels as a client does, on any Pusher server, and prints a line of JSON per event.

`Follower` holds the connection. It connects again when the connection is lost, and continues on servers with recovery
(protocol/README.md "History and recovery") after the last event that it printed.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import AsyncIterator, Callable, Collection
from typing import TYPE_CHECKING, Any, Final

import click

from redpoll.cli.common import refuse, safe
from redpoll.cli.remote import TIMEOUT_S, RemoteError, app_command, execute, session, with_secret
from redpoll.protocol.auth import sign_channel
from redpoll.text import json_text

if TYPE_CHECKING:
    import aiohttp

    from redpoll.doctor.target import Target

__all__ = ["Follower", "subscribe"]

_SUCCEEDED: Final = "pusher_internal:subscription_succeeded"
_MAX_RETRY_AFTER_S: Final = 30.0
# What Pusher's servers announce, for those that announce nothing.
_ACTIVITY_TIMEOUT_S: Final = 120.0
_PONG_TIMEOUT_S: Final = 30.0


@click.command()
@click.argument("channels", metavar="CHANNEL…", nargs=-1, required=True)
@click.option("--event", "names", metavar="NAME", multiple=True, help="Only events with this name. May be repeated.")
@click.option("--history", type=click.IntRange(1, 1000), metavar="N", help="Begin with the last N stored messages.")
@click.option(
    "--user-id", default="redpoll-cli", show_default=True, metavar="ID", help="The member on presence channels."
)
@click.option("--user-info", metavar="JSON", help="What the other members see of this member.")
@click.option("--count", type=click.IntRange(1), metavar="N", help="End after N lines.")
@click.option(
    "--seconds",
    type=click.FloatRange(0, min_open=True),
    metavar="S",
    help="End S seconds after the first subscription.",
)
@app_command
def subscribe(
    channels: tuple[str, ...],
    names: tuple[str, ...],
    history: int | None,
    user_id: str,
    user_info: str | None,
    count: int | None,
    seconds: float | None,
    target: Target,
    as_json: bool,
) -> None:
    """Follow channels on any Pusher server and print each event as a line of JSON.

    A line has time_ms, channel, event and data; user_id for client events on presence channels, offset with a history.
    data is decoded if it holds a JSON object or array. The first line of each channel is
    pusher_internal:subscription_succeeded, on presence channels with the members. Subscriptions to private and
    presence channels are signed with the secret of the address. Without a secret, ws[s]://HOST[:PORT]/app/KEY follows
    public channels. A lost connection is opened again. --history needs a history rule on a redpoll server; other
    servers ignore it. --json changes nothing: the output is JSON.

    \b
    Examples:
      redpoll subscribe news
      redpoll subscribe news --history 10 --event headline
      redpoll subscribe presence-room --user-id 7 --user-info '{"name":"Ann"}'
      redpoll subscribe news --count 2 --seconds 60 --url wss://ws.example.com/app/KEY
    """
    if any(channel.startswith(("private-", "presence-")) for channel in channels):
        with_secret(target)
    member: dict[str, Any] = {"user_id": user_id}
    if user_info is not None:
        try:
            member["user_info"] = json.loads(user_info)
        except ValueError as error:
            refuse([f"--user-info: not JSON: {error}"])
    follower = Follower(target, channels, member, history)

    async def follow() -> None:
        printed = 0
        ends_at_s = None if seconds is None else asyncio.get_running_loop().time() + TIMEOUT_S + seconds
        is_first = True
        try:
            async with asyncio.timeout_at(ends_at_s) as end:
                async for line in follower.lines():
                    if is_first and seconds is not None:
                        end.reschedule(asyncio.get_running_loop().time() + seconds)
                    is_first = False
                    if names and line["event"] not in names:
                        continue
                    click.echo(json_text.compact(line))
                    printed += 1
                    if printed == count:
                        return
        except TimeoutError:
            pass

    execute(follow())


class _ConnectionLost(Exception):
    """The connection ended and may be opened again. The text says why."""

    def __init__(self, why: str, at_once: bool = False) -> None:
        super().__init__(why)
        self.at_once = at_once


class Follower:
    """One connection at a time to `target`, subscribed to `channels`.

    `member` is the `channel_data` of presence channels. `history`: how many stored messages to begin with. `note` gets
    sentences about lost connections.
    """

    def __init__(
        self,
        target: Target,
        channels: tuple[str, ...],
        member: dict[str, Any],
        history: int | None = None,
        note: Callable[[str], None] = lambda text: click.echo(f"redpoll: {text}", err=True),
    ) -> None:
        self._target = target
        self._channels = channels
        self._member = json.dumps(member)
        self._history = history
        self._note = note
        # Channel -> the position in its history after which to continue.
        self._places: dict[str, dict[str, Any]] = {}
        self._was_connected = False

    async def lines(self) -> AsyncIterator[dict[str, Any]]:
        """Yields each event of the channels, without end. Raises RemoteError when the server refuses."""
        retry_after_s = 0.0
        async with session() as http:
            while True:
                try:
                    async for line in self._connection(http):
                        retry_after_s = 0.0
                        yield line
                except _ConnectionLost as lost:
                    if not self._was_connected:
                        raise RemoteError(f"{lost}; `redpoll doctor URL` finds the cause") from lost
                    self._note(f"{lost}; connecting again")
                    await asyncio.sleep(0 if lost.at_once and not retry_after_s else retry_after_s)
                    retry_after_s = min(max(1.0, retry_after_s * 2), _MAX_RETRY_AFTER_S)

    async def _connection(self, http: aiohttp.ClientSession) -> AsyncIterator[dict[str, Any]]:
        """Yields the events of one connection. Raises _ConnectionLost at its end."""
        import aiohttp

        target = self._target
        address = f"{target.origin}{target.prefix}/app/{target.key}?protocol=7&client=redpoll-cli&version=1&recover=1"
        try:
            websocket = await http.ws_connect(address, max_msg_size=0, timeout=aiohttp.ClientWSTimeout(ws_close=1.0))
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            reason = str(error) or f"no answer within {TIMEOUT_S:g} s"
            raise _ConnectionLost(f"{target.origin} can't be reached: {reason}") from error
        async with websocket:
            socket_id = ""
            activity_timeout_s = _ACTIVITY_TIMEOUT_S
            # Channels whose subscription isn't confirmed.
            pending = set(self._channels)
            while True:
                frame = await self._next_frame(websocket, activity_timeout_s)
                event, data = frame.get("event"), _decoded(frame.get("data"))
                if event == "pusher:connection_established" and isinstance(data, dict):
                    socket_id = str(data.get("socket_id"))
                    activity_timeout_s = float(data.get("activity_timeout") or _ACTIVITY_TIMEOUT_S)
                    self._was_connected = True
                    for channel in self._channels:
                        await websocket.send_str(json.dumps(self._subscribe_frame(socket_id, channel)))
                elif event == "pusher:ping":
                    await websocket.send_str('{"event":"pusher:pong","data":{}}')
                elif event in ("pusher:subscription_error", "pusher:error"):
                    self._refused(frame, data, pending)
                elif "channel" in frame and event != "auth_required":
                    if event == _SUCCEEDED:
                        pending.discard(frame["channel"])
                    self._keep_place(frame, data)
                    yield _line(frame, data)

    async def _next_frame(
        self, websocket: aiohttp.ClientWebSocketResponse, activity_timeout_s: float
    ) -> dict[str, Any]:
        """The next frame. After a silence of the activity timeout it pings the server."""
        import aiohttp

        has_pinged = False
        while True:
            try:
                message = await websocket.receive(timeout=_PONG_TIMEOUT_S if has_pinged else activity_timeout_s)
                break
            except TimeoutError:
                if has_pinged:
                    raise _ConnectionLost(f"{self._target.origin} doesn't answer a ping") from None
                await websocket.send_str('{"event":"pusher:ping","data":{}}')
                has_pinged = True
        if message.type is not aiohttp.WSMsgType.TEXT:
            code = websocket.close_code
            if code is not None and 4000 <= code < 4100:
                raise RemoteError(f"{self._target.origin} closed the connection with {code}: {_reason(message)}")
            at_once = code is not None and 4200 <= code < 4300
            raise _ConnectionLost(f"{self._target.origin} closed the connection ({code})", at_once)
        frame = json.loads(message.data)
        return frame if isinstance(frame, dict) else {}

    def _subscribe_frame(self, socket_id: str, channel: str) -> dict[str, Any]:
        target = self._target
        data: dict[str, Any] = {"channel": channel}
        if channel.startswith("presence-"):
            data["channel_data"] = self._member
        if channel.startswith(("private-", "presence-")):
            digest = sign_channel(target.secret, socket_id, channel, data.get("channel_data"))
            data["auth"] = f"{target.key}:{digest}"
        if channel in self._places:
            data["since"] = self._places[channel]
        elif self._history is not None:
            data["rewind"] = {"count": self._history}
        return {"event": "pusher:subscribe", "data": data}

    def _refused(self, frame: dict[str, Any], data: Any, pending: Collection[str]) -> None:
        """Raises RemoteError if a subscription was refused, or _ConnectionLost if the error's code (4100 to 4299) asks
        the client to connect again.

        After `pusher:error` with a code, most servers close the connection with that code. Reverb leaves it open after
        a wrong signature, so the client doesn't wait for the close while subscriptions are `pending`.
        """
        said = data if isinstance(data, dict) else {}
        text = safe(str(said.get("error") or said.get("message") or json.dumps(data)), 500)
        code = said.get("code")
        if frame["event"] == "pusher:error" and code is not None:
            if not pending:
                return
            sentence = f"{self._target.origin} answered with the error {safe(str(code))}: {text}"
            if isinstance(code, int) and 4100 <= code < 4300:
                raise _ConnectionLost(sentence, at_once=code >= 4200)
            raise RemoteError(sentence)
        channel = f" {frame['channel']}" if "channel" in frame else ""
        raise RemoteError(f"{self._target.origin} refused the subscription{channel}: {text}")

    def _keep_place(self, frame: dict[str, Any], data: Any) -> None:
        """Remembers the position in the channel's history, if the server sends one."""
        channel = frame["channel"]
        if frame["event"] in (_SUCCEEDED, "pusher:position") and isinstance(data, dict) and "epoch" in data:
            self._places[channel] = {"epoch": data["epoch"], "offset": data["offset"]}
        elif "offset" in frame and channel in self._places:
            self._places[channel]["offset"] = frame["offset"]


def _line(frame: dict[str, Any], data: Any) -> dict[str, Any]:
    line = {"time_ms": int(time.time() * 1000), "channel": frame["channel"], "event": frame["event"], "data": data}
    return line | {name: frame[name] for name in ("user_id", "offset") if name in frame}


_CONTAINER: Final = re.compile(r"\s*[\[{]").match


def _decoded(data: Any) -> Any:
    """The data as a value, if it is a string that holds a JSON object or array; else as it is."""
    if isinstance(data, str) and _CONTAINER(data):
        try:
            return json.loads(data)
        except (ValueError, RecursionError):
            pass
    return data


def _reason(message: aiohttp.WSMessage) -> str:
    return safe(str(message.extra or "no reason given"))
