"""`AsyncPublisher`: `Publisher` for asyncio, over one pool of connections.

The pool, TLS and the parser of answers are aiohttp's. Small requests are written to the pool's connections directly:
aiohttp's session takes longer for one than TLS, signature and parser together (bench/python_client.py).
"""

from __future__ import annotations

import asyncio
import inspect
import ssl
from collections.abc import AsyncIterable, Callable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

import aiohttp
from aiohttp.client_proto import ResponseHandler
from aiohttp.http import HttpProcessingError
from yarl import URL

from redpoll_client.calls import MAX_ANSWER_BYTES, Answer, Attempts, Call, NotSent, Retry, target
from redpoll_client.errors import RedpollError
from redpoll_client.names import USER_CHANNEL, check_user_id
from redpoll_client.publisher import CUT_HANDSHAKE, IDLE_S, join_batch
from redpoll_client.publishing import History, PublisherBase, history_of
from redpoll_client.reading import AsyncReader
from redpoll_client.streams import publish_parts_async

__all__ = ["DIRECT", "AsyncPublisher"]

_HEADERS = {"Content-Type": "application/json", "User-Agent": "redpoll-client", "Accept-Encoding": "identity"}
# Larger requests go through the session, which waits while the server doesn't read.
_DIRECT_BYTES = 65_536


def _has_direct_calls() -> bool:
    """Whether this version of aiohttp has what `_exchange` calls. Its documentation names the pool's `connect`, and a
    connection's `transport`, `release` and `close`, but not how an answer is parsed."""
    connect = inspect.signature(aiohttp.TCPConnector.connect).parameters
    answer = inspect.signature(ResponseHandler.set_response_params).parameters
    return list(connect)[1:] == ["req", "traces", "timeout"] and {"read_until_eof", "auto_decompress"} <= set(answer)


DIRECT = _has_direct_calls()


class AsyncPublisher(PublisherBase):
    """Publishes events in asyncio. One publisher belongs to the event loop of its first request.

        async with AsyncPublisher(url="http://KEY:SECRET@127.0.0.1:6001/apps/ID") as publisher:
            await publisher.trigger("news", "hello", {"text": "Hello"})

    Its arguments and methods are those of `Publisher`, as coroutines, with the same errors. Use one publisher for many
    tasks: its connections are kept open between requests. A cancelled request may have been published.
    """

    def _prepare(self) -> None:
        self._session: aiohttp.ClientSession | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        end = self.endpoint
        self._origin = end.origin
        # A default port isn't in Host; the rest of the address is checked.
        host = self._origin.partition("://")[2]
        host = host.removesuffix(":443" if end.ssl else ":80")
        fields = "".join(f"{name}: {value}\r\n" for name, value in {"Host": host, **_HEADERS}.items())
        self._head = f" HTTP/1.1\r\n{fields}Content-Length: "
        # What aiohttp's pool wants to know of a request: the server's address.
        self._place: aiohttp.ClientRequest | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Closes all connections. Afterwards every request raises RuntimeError, also one that waits for a connection;
        one that was sent raises Unconfirmed."""
        self._closed = True
        self._place = None
        if self._session is not None:
            await self._session.close()

    # -- publishing

    async def trigger(
        self,
        channels: str | Sequence[str],
        event_name: str,
        data: Any,
        socket_id: str | None = None,
        *,
        info: Iterable[str] = (),
        correlation_id: str | None = None,
        already_encoded: bool = False,
        end: bool = False,
    ) -> Answer:
        """Publishes one event. See `Publisher.trigger`."""
        return await self.send(
            self._trigger(channels, event_name, data, socket_id, info, correlation_id, already_encoded, end)
        )

    async def trigger_batch(
        self,
        batch: Iterable[Mapping[str, Any]] = (),
        already_encoded: bool = False,
        *,
        correlation_id: str | None = None,
    ) -> Answer:
        """Publishes several events, in order. See `Publisher.trigger_batch`."""
        published = 0
        answer = Answer({})
        infos: list[Any] = []
        for size, call in self._batch_parts(batch, already_encoded, correlation_id):
            try:
                answer = await self.send(call)
            except RedpollError as error:
                error.published = published
                raise
            published += size
            infos += answer.get("batch") or [{}] * size
        return join_batch(answer, infos)

    async def send_to_user(
        self, user_id: str, event_name: str, data: Any, *, correlation_id: str | None = None
    ) -> Answer:
        """Publishes an event to all connections that are signed in as this user."""
        channel = USER_CHANNEL + check_user_id(user_id)
        return await self.trigger(channel, event_name, data, correlation_id=correlation_id)

    async def publish_stream(
        self,
        channel: str,
        event: str,
        parts: Iterable[str] | AsyncIterable[str],
        *,
        stream_id: str | None = None,
        per_second: float = 25,
        end: bool = False,
    ) -> int:
        """Publishes an iterator or async iterator of text as numbered events. See `Publisher.publish_stream`. If the
        caller is cancelled, subscribers get `cancelled`."""
        return await publish_parts_async(
            lambda data: self.trigger(channel, event, data, end=end and "state" in data),
            parts,
            self._texts,
            stream_id,
            per_second,
            self.max_data_bytes,
        )

    # -- asking

    async def channels_info(self, prefix_filter: str | None = None, attributes: Iterable[str] = ()) -> Answer:
        """The occupied channels. See `Publisher.channels_info`."""
        return await self.send(self._channels_info(prefix_filter, attributes))

    async def channel_info(self, channel: str, attributes: Iterable[str] = ()) -> Answer:
        """One channel. See `Publisher.channel_info`."""
        return await self.send(self._channel_info(channel, attributes))

    async def users_info(self, channel: str) -> Answer:
        """The members of a presence channel: `{"users": [{"id": "1"}]}`."""
        return await self.send(self._users_info(channel))

    async def terminate_user_connections(self, user_id: str) -> Answer:
        """Closes all connections that are signed in as this user."""
        return await self.send(self._terminate(user_id))

    async def history(
        self,
        channel: str,
        *,
        limit: int = 100,
        direction: str = "forwards",
        cursor: str | None = None,
        since: str | int | None = None,
        until: str | int | None = None,
    ) -> History:
        """A page of the messages that a channel stores (redpoll only). See `Publisher.history`."""
        return history_of(await self.send(self._history(channel, limit, direction, cursor, since, until)))

    async def trace(self, trace_id: str) -> Answer:
        """What happened to one request (redpoll only). See `Publisher.trace`."""
        return await self.send(self._trace(trace_id))

    async def usage(self, days: int = 30) -> Answer:
        """Messages and peaks by UTC day, of 1 to 400 days (redpoll only)."""
        return await self.send(self._usage(days))

    async def delete_history(self, channel: str) -> Answer:
        """Deletes what a channel stores (redpoll only). See `Publisher.delete_history`."""
        return await self.send(self._delete_history(channel))

    def read(self, channel: str, offset: str = "-1", *, live: bool = True) -> AsyncReader:
        """Reads a channel with history, in order and without gaps (redpoll only). See `Publisher.read`.

        async with publisher.read("news-sport") as reader:
            async for message in reader:
                print(message.event, message.data)
        """
        publisher, call = self._for_reading(channel, offset)
        return AsyncReader(publisher, call, offset, live)

    # -- taking back

    async def unsubscribe(self, channel: str, *, user_id: str | None = None, socket_id: str | None = None) -> Answer:
        """Ends a user's subscriptions to one channel, or one connection's (redpoll only). See
        `Publisher.unsubscribe`."""
        return await self.send(self._unsubscribe(channel, user_id, socket_id))

    async def revoke_grants(self, *, user_id: str | None = None, jti: str | None = None) -> Answer:
        """Revokes grants (redpoll only). See `Publisher.revoke_grants`."""
        return await self.send(self._revoke_grants(user_id, jti))

    # -- sending

    def _open_session(self) -> aiohttp.ClientSession:
        loop = asyncio.get_running_loop()
        if self._session is None:
            self._loop = loop
            connector = aiohttp.TCPConnector(
                limit=self._connections,
                keepalive_timeout=IDLE_S,
                ssl=self._ssl_context if self._ssl_context is not None else True,
            )
            self._session = aiohttp.ClientSession(
                connector=connector,
                headers=_HEADERS,
                cookie_jar=aiohttp.DummyCookieJar(),
                auto_decompress=False,
            )
            if DIRECT:
                self._place = aiohttp.ClientRequest("POST", URL(self._origin), loop=loop)
        elif self._loop is not loop:
            raise RuntimeError("this AsyncPublisher belongs to another event loop; make one for each loop")
        return self._session

    def _within(self, tries: Attempts) -> aiohttp.ClientTimeout:
        """The limits of an attempt. `connect` bounds the wait for a free connection too. It ends a little before
        `total`, so that a connection that doesn't open is never taken for an answer that doesn't come."""
        left_s = tries.left_s
        connect = min(self.timeout, 0.9 * left_s)
        return aiohttp.ClientTimeout(total=left_s, connect=connect, sock_connect=connect, sock_read=self._answer_s)

    async def send(self, call: Call) -> Answer:
        """Sends a request of `prepare`. Raises as `trigger`."""
        tries = self._tries(call)
        session = self._open_session()
        while True:
            if self._closed:
                tries.closed()
            try:
                try:
                    if self._place is not None and len(call.body) <= _DIRECT_BYTES:
                        status, headers, body = await self._exchange(session, self._place, call, tries)
                    else:
                        status, headers, body = await self._request(session, call, tries)
                except asyncio.CancelledError:
                    task = asyncio.current_task()
                    if self._closed and task is not None and not task.cancelling():
                        # aiohttp cancels what waits for a connection of a pool that closes.
                        tries.closed()
                    raise
                except NotSent as error:
                    tries.not_sent(error)
                except aiohttp.ClientConnectorError as error:
                    tries.not_sent(_not_sent(error))
                except aiohttp.ConnectionTimeoutError:
                    tries.not_sent(NotSent(f"no free connection within {self.timeout:g} s, or it didn't open"))
                except (aiohttp.ClientError, HttpProcessingError, TimeoutError, OSError) as error:
                    tries.no_answer(error)
                else:
                    return tries.answered(status, headers, body)
            except Retry as retry:
                await asyncio.sleep(retry.wait_s)

    async def _request(
        self, session: aiohttp.ClientSession, call: Call, tries: Attempts
    ) -> tuple[int, Mapping[str, str], bytes]:
        """One attempt through the session: the answer's status, headers and body."""
        url = URL(self._origin + target(self.endpoint, call), encoded=True)
        async with session.request(
            call.method, url, data=call.body or None, allow_redirects=False, timeout=self._within(tries)
        ) as response:
            return response.status, response.headers, await _read(response.content, None)

    async def _exchange(
        self, session: aiohttp.ClientSession, place: aiohttp.ClientRequest, call: Call, tries: Attempts
    ) -> tuple[int, Mapping[str, str], bytes]:
        """One attempt on a connection of the session's pool."""
        assert session.connector is not None
        try:
            connection = await session.connector.connect(place, [], self._within(tries))
        except TimeoutError as error:
            raise aiohttp.ConnectionTimeoutError from error
        try:
            protocol, transport = connection.protocol, connection.transport
            assert protocol is not None
            assert transport is not None
            if protocol.should_close:
                # Its bytes would count as this request's answer.
                raise NotSent("the server sent something that nothing had asked for")
            protocol.set_response_params(read_until_eof=True, auto_decompress=False)
            head = f"{call.method} {target(self.endpoint, call)}{self._head}{len(call.body)}\r\n\r\n"
            transport.write(head.encode("ascii") + call.body)
            async with asyncio.timeout(min(self._answer_s, tries.left_s)) as limit:
                while True:
                    message, content = await protocol.read()
                    # 1xx: the answer is still to come. 101 isn't, and nothing asked for it.
                    if message.code >= 200 or message.code == 101:
                        break
                if content.is_eof():
                    body = content.read_nowait(-1)
                else:

                    def came() -> None:
                        limit.reschedule(asyncio.get_running_loop().time() + min(self._answer_s, tries.left_s))

                    body = await _read(content, came)
        except BaseException as error:
            # Not to be used again: the rest of this answer may still come.
            connection.close()
            if isinstance(error, TimeoutError):
                raise TimeoutError("the answer didn't come in time") from error
            raise
        connection.release()
        return message.code, message.headers, body


def _not_sent(error: aiohttp.ClientConnectorError) -> NotSent:
    """Why a connection couldn't be opened. A TLS fault stays one at the next attempt, except for a cut."""
    tls = isinstance(error, aiohttp.ClientSSLError) or isinstance(error.__cause__, ssl.SSLError)
    return NotSent(f"no connection: {error}", permanent=tls and not isinstance(error.__cause__, CUT_HANDSHAKE))


async def _read(content: aiohttp.StreamReader, came: Callable[[], None] | None) -> bytes:
    """The whole body. Calls `came` for each piece. Raises ClientPayloadError for half a body, and for more than any
    answer of a Pusher server."""
    body = bytearray()
    async for piece in content.iter_any():
        body += piece
        if came is not None:
            came()
        if len(body) > MAX_ANSWER_BYTES:
            raise aiohttp.ClientPayloadError(f"the answer has more than {MAX_ANSWER_BYTES} bytes")
    return bytes(body)
