"""`AsyncPublisher`: `Publisher` for asyncio, over one pool of connections."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

import aiohttp
from yarl import URL

from redpoll_client.calls import MAX_ANSWER_BYTES, Answer, Attempts, Call, NotSent, Retry, target
from redpoll_client.errors import RedpollError
from redpoll_client.names import USER_CHANNEL, check_user_id
from redpoll_client.publisher import IDLE_S, join_batch
from redpoll_client.publishing import History, PublisherBase, history_of
from redpoll_client.reading import AsyncReader
from redpoll_client.streams import publish_parts_async

__all__ = ["AsyncPublisher"]

_HEADERS = {"Content-Type": "application/json", "User-Agent": "redpoll-client"}


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
        self._origin = self.endpoint.origin

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Closes all connections. Afterwards every request raises RuntimeError."""
        self._closed = True
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
            try:
                try:
                    url = URL(self._origin + target(self.endpoint, call), encoded=True)
                    async with session.request(
                        call.method, url, data=call.body or None, allow_redirects=False, timeout=self._within(tries)
                    ) as response:
                        body = await _read(response)
                except aiohttp.ClientConnectorError as error:
                    tries.not_sent(_not_sent(error))
                except aiohttp.ConnectionTimeoutError:
                    tries.not_sent(NotSent(f"no free connection within {self.timeout:g} s, or it didn't open"))
                except (aiohttp.ClientError, TimeoutError, OSError) as error:
                    tries.no_answer(error)
                else:
                    return tries.answered(response.status, response.headers, body)
            except Retry as retry:
                await asyncio.sleep(retry.wait_s)


def _not_sent(error: aiohttp.ClientConnectorError) -> NotSent:
    """Why a connection couldn't be opened. A TLS fault stays one at the next attempt."""
    tls = isinstance(error, aiohttp.ClientSSLError) or isinstance(error.__cause__, ssl.SSLError)
    return NotSent(f"no connection: {error}", permanent=tls)


async def _read(response: aiohttp.ClientResponse) -> bytes:
    """The whole body. Raises ClientPayloadError for half a body, and for more than any answer of a Pusher server."""
    if response.content_length is not None and response.content_length <= MAX_ANSWER_BYTES:
        return await response.read()
    body = bytearray()
    async for piece in response.content.iter_any():
        body += piece
        if len(body) > MAX_ANSWER_BYTES:
            raise aiohttp.ClientPayloadError(f"the answer has more than {MAX_ANSWER_BYTES} bytes")
    return bytes(body)
