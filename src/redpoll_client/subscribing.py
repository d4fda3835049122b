"""What a `Subscriber` does with frames, and what it sends: subscriptions, sign-ins, answers."""

from __future__ import annotations

import asyncio
import base64
import binascii
import contextlib
import enum
import json
import logging
import random
import ssl as ssl_module
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

import aiohttp

from redpoll_client.authorizing import Authorizer, ChannelAuth, UserAuth
from redpoll_client.channel import Channel, Event
from redpoll_client.connection import Connection, data_of, reconnect_delay_s
from redpoll_client.encryption import decrypt, master_key
from redpoll_client.errors import (
    DecryptionFailed,
    ProtocolError,
    RedpollError,
    SignInRefused,
    SubscriptionRefused,
    Unavailable,
    Unreachable,
)
from redpoll_client.names import USER_CHANNEL, is_encrypted, needs_signature
from redpoll_client.settings import Endpoint, endpoint_of
from redpoll_client.signatures import to_json
from redpoll_client.users import SignedIn

__all__ = ["State", "SubscriberBase"]

_log = logging.getLogger("redpoll_client")
# The key of an encrypted channel isn't fetched again more often.
_KEY_LASTS_S = 5.0
_MAX_CHANNELS = 10_000


class State(enum.Enum):
    """Of a subscriber's connection."""

    NEW = "new"
    CONNECTING = "connecting"
    CONNECTED = "connected"
    WAITING = "waiting for the next attempt"
    ENDED = "ended"


class SubscriberBase:
    """The part of `Subscriber` that handles frames."""

    def __init__(
        self,
        key: str | None = None,
        *,
        url: str | None = None,
        host: str | None = None,
        port: int | None = None,
        ssl: bool = True,
        prefix: str = "",
        auth: ChannelAuth | None = None,
        user_auth: UserAuth | None = None,
        auth_headers: Mapping[str, str] | None = None,
        member: Mapping[str, Any] | None = None,
        encryption_master_key_base64: str | None = None,
        queue: int = 1000,
        timeout: float = 10,
        max_message_bytes: int = 4 * 1024 * 1024,
        ssl_context: ssl_module.SSLContext | None = None,
        on_error: Callable[[int | None, str], None] | None = None,
    ) -> None:
        """Takes the app's public key with `host`, or a `url` with the secret (`http://KEY:SECRET@HOST:PORT/apps/ID`),
        or neither: then REDPOLL_URL or PUSHER_URL.

        - `auth`: the URL of an auth endpoint, asked as pusher-js asks it, or a function of socket id and channel that
          returns what `sign_channel` returns. Without it, the secret signs; `member` is the member on presence
          channels.
        - `user_auth`: the same for sign-ins. `auth_headers` go with both, such as a cookie.
        - `queue`: events that wait for the reader of one channel; one more raises Overflow there.
        - `timeout`: seconds for connecting, for an answer, and for the server to take a frame.
        - `max_message_bytes`: a longer message closes the connection.
        - `on_error`: called with code and text of errors that the server sends in between, such as of a refused client
          event; without it they are logged as warnings of `redpoll_client`.
        """
        if queue < 1 or not timeout > 0:
            raise ValueError("queue and timeout must be positive")
        if key is None:
            endpoint = endpoint_of(ssl=ssl, host=host, port=port, url=url, prefix=prefix)
        else:
            if url is not None or host is None:
                raise ValueError("give the key with host and no url, or url alone")
            public = endpoint_of("0", key, "-", ssl, host, port, prefix=prefix)
            endpoint = Endpoint("", key, "", public.ssl, public.host, public.port, public.prefix)
        secret_key = None if encryption_master_key_base64 is None else master_key(encryption_master_key_base64)
        self.endpoint = endpoint
        self.state = State.NEW
        self.user: SignedIn | None = None
        self._authorizer = Authorizer(endpoint, auth, user_auth, auth_headers or {}, member, secret_key, timeout)
        self._size = queue
        self._timeout = timeout
        self._max_message_bytes = max_message_bytes
        self._ssl_context = ssl_context
        self._on_error = on_error
        self._channels: dict[str, Channel] = {}
        self._session: aiohttp.ClientSession | None = None
        self._connection: Connection | None = None
        self._runner: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        # The latest sign-in of this connection, until it is sent.
        self._signing_in: asyncio.Task[None] | None = None
        self._first: asyncio.Future[None] | None = None
        self._failure: Exception | None = None
        self._said = ""

    async def _decrypted(self, channel: Channel, name: str, text: str, offset: int | None) -> Event | RedpollError:
        """The event; or why it can't be read. The key is fetched again once: the master key may have changed."""
        loop = asyncio.get_running_loop()
        try:
            assert channel.key is not None
            return Event(channel.name, name, decrypt(text, channel.key), None, offset)
        except DecryptionFailed as error:
            if loop.time() - channel.key_fetched_at < _KEY_LASTS_S or self._connection is None:
                return error
        try:
            await self._authorize(channel, self._connection)
            assert channel.key is not None
            return Event(channel.name, name, decrypt(text, channel.key), None, offset)
        except RedpollError as error:
            return error if isinstance(error, DecryptionFailed) else DecryptionFailed(f"{channel.name}: {error}")

    def _internal(self, name: str, frame: dict[str, Any]) -> None:
        """A frame of the server's own."""
        if name == "pusher:ping":
            self._start(self._pong())
            return
        if name == "pusher:error":
            self._error(data_of(frame))
            return
        if self.user is not None and name == "pusher:signin_success":
            self.user.succeeded(data_of(frame))
            return
        if self.user is not None and name == "pusher_internal:watchlist_events":
            self.user.changed(data_of(frame))
            return
        channel = self._channels.get(frame.get("channel", ""))
        if channel is not None:
            self._of_channel(channel, name, frame)

    def _of_channel(self, channel: Channel, name: str, frame: dict[str, Any]) -> None:
        fields = data_of(frame)
        shown = name.replace("pusher_internal:", "pusher:")
        try:
            if name == "pusher_internal:subscription_succeeded":
                channel.succeeded(fields)
            elif name == "pusher_internal:member_added":
                channel.members.add(fields)
            elif name == "pusher_internal:member_removed":
                channel.members.remove(fields)
            elif name == "pusher_internal:subscription_count":
                count = fields.get("subscription_count")
                channel.subscription_count = count if isinstance(count, int) else None
            elif name == "pusher:position":
                channel.moved(fields)
            elif name == "pusher:subscription_error":
                self._subscription_refused(channel, fields)
                return
        except ValueError as error:
            raise ProtocolError(f"{channel.name}: {error}") from error
        if channel.lifecycle and not channel.put(Event(channel.name, shown, to_json(fields))):
            self._start(self._leave(channel))

    def _subscription_refused(self, channel: Channel, fields: Mapping[str, Any]) -> None:
        status = fields.get("status")
        number = status if isinstance(status, int) else 0
        if number == 429 and self._connection is not None:
            # Too many subscribes at once, such as after a reconnect with many channels.
            self._start(self._ask(channel, self._connection, random.uniform(1, 3)))
            return
        text, kind = str(fields.get("error", "refused")), str(fields.get("type", ""))
        self._channels.pop(channel.name, None)
        channel.end(SubscriptionRefused(channel.name, text, kind, number))

    def _error(self, fields: Mapping[str, Any]) -> None:
        code, text = fields.get("code"), str(fields.get("message", ""))
        number = code if isinstance(code, int) and not isinstance(code, bool) else None
        self._said = f": {text}"
        waits = self.user is not None and self.user.answered is not None and not self.user.answered.done()
        if number == 4009 and waits:
            assert self.user is not None
            self.user.end(SignInRefused(text))
            self.user = None
        elif self._on_error is not None:
            try:
                self._on_error(number, text)
            except Exception:
                _log.exception("on_error failed")
        else:
            _log.warning("the server says: %s (%s)", text, number)

    # -- what is sent

    async def _send(self, frame: dict[str, Any]) -> None:
        if self._connection is None:
            raise Unreachable("there is no connection at the moment")
        await self._connection.send(frame)

    async def _pong(self) -> None:
        await self._send({"event": "pusher:pong", "data": {}})

    async def _join(self, channel: Channel) -> None:
        if self.state is State.ENDED:
            raise self._failure or RedpollError("the subscriber is closed")
        if channel.name in self._channels or channel.joined is not None:
            raise ValueError(f"{channel.name} is subscribed to already; let one reader pass events on")
        if len(self._channels) >= _MAX_CHANNELS:
            raise ValueError(f"a subscriber has at most {_MAX_CHANNELS} channels")
        channel.joined = asyncio.get_running_loop().create_future()
        self._channels[channel.name] = channel
        if self._connection is not None:
            self._start(self._ask(channel, self._connection))
        try:
            async with asyncio.timeout(self._timeout):
                await asyncio.shield(channel.joined)
        except BaseException as error:
            await self._leave(channel)
            if isinstance(error, TimeoutError):
                text = f"{channel.name}: no answer to the subscription in {self._timeout:g} s{self._said}"
                raise Unavailable(text) from None
            raise

    async def _leave(self, channel: Channel) -> None:
        if self._channels.get(channel.name) is channel:
            del self._channels[channel.name]
            if self._connection is not None:
                # Without a connection, the next one doesn't subscribe to it.
                with contextlib.suppress(Unreachable):
                    await self._send({"event": "pusher:unsubscribe", "data": {"channel": channel.name}})
        channel.end(RedpollError(f"{channel.name} is left"))

    async def _ask(self, channel: Channel, connection: Connection, wait_s: float = 0.0) -> None:
        """Subscribes on this connection. While the auth endpoint is away, tries again."""
        attempt = 0
        channel.asked()
        await asyncio.sleep(wait_s)
        if channel.name.startswith(USER_CHANNEL) and self._signing_in is not None:
            # The server refuses it to a connection that isn't signed in.
            await asyncio.wait([self._signing_in])

        def is_wanted() -> bool:
            return self._connection is connection and self._channels.get(channel.name) is channel

        while is_wanted():
            try:
                data = await self._authorize(channel, connection)
                if not is_wanted():
                    return
                if channel.received is not None:
                    data["since"] = {"epoch": channel.received.epoch, "offset": channel.received.offset}
                elif channel.rewind is not None:
                    data["rewind"] = dict(channel.rewind)
                await connection.send({"event": "pusher:subscribe", "data": {"channel": channel.name, **data}})
                return
            except SubscriptionRefused as error:
                if self._channels.get(channel.name) is channel:
                    del self._channels[channel.name]
                channel.end(error)
            except Unreachable:
                return
            except Unavailable as error:
                _log.warning("%s: %s; trying again", channel.name, error)
                self._said = f": {error}"
                attempt += 1
                await asyncio.sleep(reconnect_delay_s(4100, min(attempt, 4)))

    async def _authorize(self, channel: Channel, connection: Connection) -> dict[str, Any]:
        if not needs_signature(channel.name) or channel.name.startswith(USER_CHANNEL):
            return {}
        assert self._session is not None
        answer = await self._authorizer.channel(self._session, connection.socket_id, channel.name)
        if is_encrypted(channel.name):
            try:
                channel.key = base64.b64decode(answer.pop("shared_secret"), validate=True)
            except (binascii.Error, ValueError):
                raise SubscriptionRefused(channel.name, "the auth endpoint's shared_secret is no base64") from None
            channel.key_fetched_at = asyncio.get_running_loop().time()
        if "channel_data" in answer:
            channel.members.me = _member_id(answer["channel_data"])
        return dict(answer)

    async def _sign_in(self, user: SignedIn, connection: Connection) -> None:
        assert self._session is not None
        attempt = 0
        while self._connection is connection and self.user is user:
            try:
                answer = await self._authorizer.user(self._session, connection.socket_id, user.asked)
                if self._connection is not connection or self.user is not user:
                    return
                user.asks()
                await connection.send({"event": "pusher:signin", "data": answer})
                return
            except (SignInRefused, TypeError, ValueError) as error:
                user.end(error)
                if self.user is user:
                    self.user = None
            except Unreachable:
                return
            except Unavailable as error:
                _log.warning("sign-in: %s; trying again", error)
                attempt += 1
                await asyncio.sleep(reconnect_delay_s(4100, min(attempt, 4)))

    def _start(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None and not isinstance(error, Unreachable):
            _log.error("a task of the subscriber failed", exc_info=error)

    def _end(self, error: Exception) -> None:
        self.state = State.ENDED
        for channel in list(self._channels.values()):
            channel.end(error)
        self._channels.clear()
        if self.user is not None:
            self.user.end(error)
        if self._first is not None and not self._first.done():
            self._first.set_exception(error)
            self._first.exception()


def _member_id(channel_data: str) -> str | None:
    try:
        return str(json.loads(channel_data)["user_id"])
    except (ValueError, TypeError, KeyError):
        return None
