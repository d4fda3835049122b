"""`Subscriber`: receives events in asyncio, over one connection that comes back by itself."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

import aiohttp

from redpoll_client.channel import Channel, Event, Position
from redpoll_client.connection import ClosedEarly, Connection, reconnect_delay_s
from redpoll_client.encryption import secret_box
from redpoll_client.errors import (
    ConnectionRefused,
    ProtocolError,
    RedpollError,
    Unavailable,
    Unreachable,
)
from redpoll_client.names import check_target, is_encrypted
from redpoll_client.signatures import to_json
from redpoll_client.subscribing import State, SubscriberBase
from redpoll_client.users import SignedIn
from redpoll_client.version import __version__

__all__ = ["Subscriber"]

_log = logging.getLogger("redpoll_client")
# A connection that lasted this long ends a row of failed attempts.
_LASTED_S = 10.0
# How the names of the server's own frames begin; beside them redpoll sends `auth_required`.
_INTERNAL = ("pusher:", "pusher_internal:")


class Subscriber(SubscriberBase):
    """Subscribes to channels.

        async with Subscriber(url="http://KEY:SECRET@127.0.0.1:6001/apps/ID") as subscriber:
            async with subscriber.subscribe("news") as channel:
                async for event in channel:
                    print(event.name, event.json())

    After a lost connection it connects, signs in and subscribes again by itself. Where the server has recovery
    (redpoll, for channels with history), each channel continues without a gap; elsewhere `channel.recovered` is False
    from then on. Entering raises ConnectionRefused, ProtocolError, or Unreachable after `timeout` seconds of attempts.
    """

    @property
    def socket_id(self) -> str | None:
        """This connection's id, to be excluded from a publish; None while it is away."""
        return None if self._connection is None else self._connection.socket_id

    async def __aenter__(self) -> Self:
        if self._runner is not None:
            raise RuntimeError("a Subscriber can be entered once")
        self._session = aiohttp.ClientSession(cookie_jar=aiohttp.DummyCookieJar())
        self._first = asyncio.get_running_loop().create_future()
        self._runner = asyncio.create_task(self._run(), name="redpoll-subscriber")
        try:
            async with asyncio.timeout(self._timeout):
                await asyncio.shield(self._first)
        except BaseException as error:
            failure = self._failure
            await self.close()
            if isinstance(error, TimeoutError):
                raise failure or Unreachable(f"{self.endpoint.origin}: no connection in {self._timeout:g} s") from None
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Closes the connection and ends all channels."""
        tasks = [task for task in (self._runner, *self._tasks) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._end(RedpollError("the subscriber is closed"))
        if self._connection is not None:
            await self._connection.close()
            self._connection = None
        if self._session is not None:
            await self._session.close()

    def subscribe(
        self,
        channel: str,
        *,
        since: Position | None = None,
        rewind: Mapping[str, int] | None = None,
        queue: int | None = None,
        lifecycle: bool = False,
    ) -> Channel:
        """A subscription, to be entered with `async with`.

        `since` continues at another subscription's `position`; `rewind` begins with the last messages, `{"count": 20}`
        or `{"seconds": 60}` (both redpoll only). `lifecycle`: the server's own events are handed out as well, as
        `pusher:subscription_succeeded` (also after each reconnect), `pusher:member_added`, `pusher:member_removed`,
        `pusher:subscription_count` and `pusher:cache_miss`. Raises ValueError for a name that isn't allowed,
        and ImportError for an encrypted channel without PyNaCl.
        """
        if is_encrypted(check_target(channel)):
            # Now, and not at its first event.
            secret_box()
        return Channel(
            channel,
            self._size if queue is None else queue,
            self._join,
            self._leave,
            self._send,
            lifecycle=lifecycle,
            since=since,
            rewind=rewind,
        )

    async def sign_in(self, user: Mapping[str, Any] | None = None) -> SignedIn:
        """Signs this connection in, now and after each reconnect.

        `user` has `id`, and optionally `user_info` and `watchlist`, where the secret signs; an endpoint or a function
        knows the user itself. Raises SignInRefused, Unavailable without an answer in time, or ValueError while it is
        signed in already: a connection can't become another user.
        """
        if self.user is not None and not self.user.ended:
            raise ValueError("this subscriber is signed in already; another user needs a Subscriber of its own")
        signed_in = SignedIn(user, self._size)
        signed_in.answered = asyncio.get_running_loop().create_future()
        if self.state is State.ENDED:
            raise self._failure or RedpollError("the subscriber is closed")
        self.user = signed_in
        if self._connection is not None:
            self._signing_in = self._start(self._sign_in(signed_in, self._connection))
        try:
            async with asyncio.timeout(self._timeout):
                await asyncio.shield(signed_in.answered)
        except BaseException as error:
            if self.user is signed_in:
                self.user = None
            if isinstance(error, TimeoutError):
                raise Unavailable(f"no answer to the sign-in in {self._timeout:g} s{self._said}") from None
            raise
        return signed_in

    # -- the connection

    async def _run(self) -> None:
        try:
            await self._stay_connected()
        except Exception as error:
            self._failure = error
            self._end(error)
            if not isinstance(error, RedpollError):
                _log.exception("the subscriber failed")

    async def _stay_connected(self) -> None:
        loop = asyncio.get_running_loop()
        scheme = "wss" if self.endpoint.ssl else "ws"
        url = (
            f"{scheme}{self.endpoint.origin.removeprefix('https').removeprefix('http')}{self.endpoint.prefix}"
            f"/app/{self.endpoint.key}?protocol=7&client=redpoll-client&version={__version__}&recover=1"
        )
        attempt = 0
        assert self._session is not None
        while True:
            self.state = State.CONNECTING
            code = opened_at = None
            try:
                connection = await Connection.open(
                    self._session, url, self._timeout, self._max_message_bytes, self._ssl_context
                )
            except (Unreachable, ProtocolError) as error:
                if isinstance(error, ProtocolError):
                    if self._first is None or not self._first.done():
                        raise
                    # It has been the right address: a proxy answers while the server is away.
                    if str(error) != str(self._failure):
                        _log.warning("%s; trying again", error)
                self._failure = error
                code = error.code if isinstance(error, ClosedEarly) else None
            else:
                opened_at = loop.time()
                try:
                    await self._serve(connection)
                finally:
                    self._connection = None
                    await connection.close()
                code = connection.close_code
                self._refused(connection)
            lasted = opened_at is not None and loop.time() - opened_at > _LASTED_S
            attempt = 0 if lasted else attempt + 1
            self.state = State.WAITING
            await asyncio.sleep(reconnect_delay_s(code, max(attempt - 1, 0)))

    def _refused(self, connection: Connection) -> None:
        try:
            connection.check_close()
        except ConnectionRefused as error:
            raise ConnectionRefused(error.code, self._said.removeprefix(": ") or str(error)) from None

    async def _serve(self, connection: Connection) -> None:
        self._connection, self.state, self._said = connection, State.CONNECTED, ""
        self._failure = None
        if self._first is not None and not self._first.done():
            self._first.set_result(None)
        self._signing_in = None
        if self.user is not None:
            self._signing_in = self._start(self._sign_in(self.user, connection))
        for subscribed in self._channels.values():
            self._start(self._ask(subscribed, connection))
        async for frame in connection.frames():
            name = frame["event"]
            if name == "auth_required" or name.startswith(_INTERNAL):
                self._internal(name, frame)
                continue
            channel = self._channels.get(frame.get("channel", ""))
            if channel is None:
                continue
            data = frame.get("data", "{}")
            text = data if isinstance(data, str) else to_json(data)
            item: Event | RedpollError
            if channel.key is None:
                item = Event(channel.name, name, text, frame.get("user_id"), frame.get("offset"))
            else:
                item = await self._decrypted(channel, name, text, frame.get("offset"))
            if not channel.put(item, frame.get("offset")):
                self._start(self._leave(channel))
