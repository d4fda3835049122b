"""`Publisher`: publishes and asks, blocking, from any number of threads over one pool of connections."""

from __future__ import annotations

import functools
import http.client
import io
import os
import socket
import ssl
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

import urllib3
from urllib3.connection import HTTPConnection, HTTPSConnection
from urllib3.exceptions import ClosedPoolError, HTTPError, NewConnectionError

from redpoll_client.calls import MAX_ANSWER_BYTES, Answer, Attempts, Call, NotSent, Retry, target
from redpoll_client.errors import RedpollError
from redpoll_client.names import USER_CHANNEL, check_user_id
from redpoll_client.publishing import History, PublisherBase, history_of
from redpoll_client.reading import Reader
from redpoll_client.streams import publish_parts

__all__ = ["CUT_HANDSHAKE", "IDLE_S", "Publisher"]

# Connections that were idle for longer aren't used again. Servers and proxies close idle ones, commonly after 5 s or
# more, and a request that meets such a close can't know whether it was read.
IDLE_S = 4.0
# Answers up to this length are read at once. Usual ones have two bytes.
_SMALL_BYTES = 4096
# Larger requests are sent in pieces of this size.
_PIECE_BYTES = 65_536
# A server that is restarted ends handshakes so.
CUT_HANDSHAKE = (ssl.SSLEOFError, ssl.SSLZeroReturnError)
_HEADERS = {"Content-Type": "application/json", "User-Agent": "redpoll-client"}


def _not_sent(error: Exception) -> NotSent:
    """Why a connection couldn't be opened. A TLS fault stays one at the next attempt, except for a cut."""
    cause = error.args[0] if error.args and isinstance(error.args[0], ssl.SSLError) else error
    # urllib3 begins its text with the connection as Python shows it.
    text = str(error).removeprefix(f"{error.conn}: ") if isinstance(error, NewConnectionError) else str(error)
    permanent = isinstance(cause, ssl.SSLError) and not isinstance(cause, CUT_HANDSHAKE)
    return NotSent(f"no connection: {text}", permanent=permanent)


class _Incoming(io.RawIOBase):
    """What comes on a socket, until a deadline: `until`, by the monotonic clock. Each read waits up to `each_s`.

    A timeout of the socket alone begins again with every byte, so a server that sends one now and then would hold the
    caller for as long as it likes.
    """

    def __init__(self, sock: socket.socket, until: float, each_s: float) -> None:
        self._socket = sock
        self._raw = sock.makefile("rb", buffering=0)
        self._until = until
        self._each_s = each_s

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        left_s = self._until - time.monotonic()
        if left_s <= 0:
            raise TimeoutError("the answer didn't end in time")
        self._socket.settimeout(min(left_s, self._each_s))
        return self._raw.readinto(buffer)

    def close(self) -> None:
        self._raw.close()
        super().close()


class _Bounded:
    """A socket for http.client, which only asks it for a file to read from. The other arguments are `_Incoming`'s."""

    def __init__(self, sock: socket.socket, until: float, each_s: float) -> None:
        self.incoming = _Incoming(sock, until, each_s)

    def makefile(self, mode: str) -> io.BufferedReader:
        return io.BufferedReader(self.incoming)


def _response(until: float, each_s: float, sock: socket.socket, **options: Any) -> http.client.HTTPResponse:
    return http.client.HTTPResponse(_Bounded(sock, until, each_s), **options)  # type: ignore[arg-type]


class _PlainConnection(HTTPConnection):
    """Tells a fault of opening a connection from one of using it: only after the latter may the server have seen the
    request. Beside that, treats a connection that was idle for `IDLE_S` as closed, and bounds sending and receiving."""

    used_at = 0.0

    def __init__(self, *args: Any, each_s: float, **options: Any) -> None:
        super().__init__(*args, **options)
        # For the next bytes of an answer. `timeout` is set for each request: while it is sent, the limit of that, and
        # then that of the whole answer.
        self._each_s = each_s

    def _limit_s(self) -> float:
        assert self.timeout is not None
        return self.timeout

    def connect(self) -> None:
        try:
            super().connect()
        except Exception as error:
            raise _not_sent(error) from error

    def send(self, data: Any) -> None:
        """In pieces: over TLS, a socket's timeout holds for each record, not for all of them."""
        if not isinstance(data, bytes) or len(data) <= _PIECE_BYTES:
            super().send(data)
            return
        until = time.monotonic() + self._limit_s()
        for start in range(0, len(data), _PIECE_BYTES):
            super().send(data[start : start + _PIECE_BYTES])
            if (left_s := until - time.monotonic()) <= 0:
                raise TimeoutError("the request couldn't be sent in time")
            self.sock.settimeout(left_s)

    def getresponse(self) -> Any:
        until = time.monotonic() + self._limit_s()
        # Called like a class.
        self.response_class = functools.partial(_response, until, self._each_s)  # type: ignore[assignment]
        response = super().getresponse()
        self.used_at = time.monotonic()
        return response

    @property
    def is_connected(self) -> bool:
        fresh = not self.used_at or time.monotonic() - self.used_at < IDLE_S
        return fresh and super().is_connected


class _TLSConnection(_PlainConnection, HTTPSConnection):
    """The same over TLS."""


class _PlainPool(urllib3.HTTPConnectionPool):
    ConnectionCls = _PlainConnection


class _TLSPool(urllib3.HTTPSConnectionPool):
    ConnectionCls = _TLSConnection


class Publisher(PublisherBase):
    """Publishes events, blocking. Threads may share one; so may a process and its forks.

        with Publisher(url="http://KEY:SECRET@127.0.0.1:6001/apps/ID") as publisher:
            publisher.trigger("news", "hello", {"text": "Hello"})

    Methods have the names and the arguments of `pusher.Pusher`. Each raises a class of `redpoll_client.errors`, and
    ValueError, before anything is sent, for what the server's rules forbid.
    """

    def _prepare(self) -> None:
        self._lock = threading.Lock()
        self._pool: urllib3.HTTPConnectionPool | None = None
        # One for each connection of the pool.
        self._free = threading.BoundedSemaphore(self._connections)
        self._pool_pid = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Closes the pool's idle connections. Requests of other threads still end. Afterwards every request raises
        RuntimeError."""
        with self._lock:
            self._closed = True
            if self._pool is not None and self._pool_pid == os.getpid():
                self._pool.close()

    # -- publishing

    def trigger(
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
        """Publishes one event to one channel, or up to 100.

        `data` is sent as JSON; a string is sent as it is. The connection `socket_id` doesn't get the event. `info` asks
        for counts, `user_count` and `subscription_count`, in the answer's `channels`. `correlation_id` (1 to 128
        printable ASCII characters) is chosen at random unless given: give one to repeat the same publish later.
        `already_encoded`: `data` is a string that `encoded` returned. `end`: it is the channel's last event (redpoll
        only, on channels with history); later ones are refused with 409 `channel_ended`. Raises Unconfirmed if the
        event may have been published, Unreachable if it surely wasn't, and Refused.
        """
        return self.send(
            self._trigger(channels, event_name, data, socket_id, info, correlation_id, already_encoded, end)
        )

    def trigger_batch(
        self,
        batch: Iterable[Mapping[str, Any]] = (),
        already_encoded: bool = False,
        *,
        correlation_id: str | None = None,
    ) -> Answer:
        """Publishes several events, each with `channel`, `name`, `data` and optionally `socket_id`, `info` and
        `end`.

        More than ten are sent in parts, one after the other, so their order stays. Each part is published whole or not
        at all, except for channels that are ended (BadRequest). An error's `published` is the number of events in the
        parts before it. The parts' correlation ids are `correlation_id` with `-1`, `-2`, …, so a repeat of the call
        with the same one repeats no part where the server compares ids. The answer has `batch`, a list by index, if an
        event asked for `info`. An empty batch sends nothing.
        """
        parts = self._batch_parts(batch, already_encoded, correlation_id)
        return _run_parts(self.send, parts)

    def send_to_user(self, user_id: str, event_name: str, data: Any, *, correlation_id: str | None = None) -> Answer:
        """Publishes an event to all connections that are signed in as this user."""
        return self.trigger(USER_CHANNEL + check_user_id(user_id), event_name, data, correlation_id=correlation_id)

    def publish_stream(
        self,
        channel: str,
        event: str,
        parts: Iterable[str],
        *,
        stream_id: str | None = None,
        per_second: float = 25,
        end: bool = False,
    ) -> int:
        """Publishes an iterator of text, such as a model's answer, as numbered events; returns their number.

        Each event's data is `{"stream", "n", "length", "delta"}`; the last one has a `state` instead of a delta:
        `done`, `failed` or `cancelled`. `n` counts from 0 without gaps. At most `per_second` events are sent; text
        that comes faster is joined. Once less than half of the server's rate limit is left, the streams of this
        publisher spread the rest over the time until its window ends: fewer events, with more text in each. While the
        server answers RateLimited, text waits and is joined, for up to 60 s at a time. If the iterator raises,
        subscribers get `failed` and the caller gets its exception.
        `end`: the event with the state is the channel's last, as in `trigger`.
        """
        return publish_parts(
            lambda data: self.trigger(channel, event, data, end=end and "state" in data),
            parts,
            self._texts,
            stream_id,
            per_second,
            self.max_data_bytes,
        )

    # -- asking

    def channels_info(self, prefix_filter: str | None = None, attributes: Iterable[str] = ()) -> Answer:
        """The occupied channels: `{"channels": {name: {attribute: number}}}`. Attributes: `user_count`,
        `subscription_count`."""
        return self.send(self._channels_info(prefix_filter, attributes))

    def channel_info(self, channel: str, attributes: Iterable[str] = ()) -> Answer:
        """One channel: `occupied` and what `attributes` name: `user_count` (presence channels), `subscription_count`,
        `cache` (cache channels)."""
        return self.send(self._channel_info(channel, attributes))

    def users_info(self, channel: str) -> Answer:
        """The members of a presence channel: `{"users": [{"id": "1"}]}`."""
        return self.send(self._users_info(channel))

    def terminate_user_connections(self, user_id: str) -> Answer:
        """Closes all connections that are signed in as this user."""
        return self.send(self._terminate(user_id))

    def history(
        self,
        channel: str,
        *,
        limit: int = 100,
        direction: str = "forwards",
        cursor: str | None = None,
        since: str | int | None = None,
        until: str | int | None = None,
    ) -> History:
        """A page of the messages that a channel stores (redpoll only). `limit` is 1 to 1,000; `cursor` the `next` of
        the page before; `since` and `until` are `EPOCH:OFFSET` or Unix milliseconds. Without `since` the first page has
        the newest messages, and `next` leads to older ones; `since=0` begins with the oldest. `direction` sorts the
        messages of a page: `forwards`, or `backwards`, with which the first page is always the newest. Raises
        BadRequest with code `unknown_epoch` after the history was cleared."""
        return history_of(self.send(self._history(channel, limit, direction, cursor, since, until)))

    def trace(self, trace_id: str) -> Answer:
        """What happened to one request: accepted, received by workers, written to sockets (redpoll only). The id is an
        answer's `trace_id`."""
        return self.send(self._trace(trace_id))

    def usage(self, days: int = 30) -> Answer:
        """Messages and peaks by UTC day, of 1 to 400 days (redpoll only)."""
        return self.send(self._usage(days))

    def delete_history(self, channel: str) -> Answer:
        """Deletes what a channel stores, and returns the new `epoch` (redpoll only). A channel that had its last event
        can be published to again."""
        return self.send(self._delete_history(channel))

    def read(self, channel: str, offset: str = "-1", *, live: bool = True) -> Reader:
        """Reads a channel with history, in order and without gaps: what is stored, and with `live` what comes (redpoll
        only). `offset` is `-1` for the beginning, `now`, or the `position` of an earlier reader.

            with publisher.read("news-sport") as reader:
                for message in reader:
                    print(message.event, message.data)

        A reader has a connection of its own, and counts as one of the app's. Encrypted channels give ciphertext. Raises
        BadRequest with code `no_history` at the first message for a channel that stores none.
        """
        publisher, call = self._for_reading(channel, offset)
        return Reader(publisher, call, offset, live)

    # -- taking back

    def unsubscribe(self, channel: str, *, user_id: str | None = None, socket_id: str | None = None) -> Answer:
        """Ends a user's subscriptions to a private or presence channel, or one connection's (redpoll only). The
        connections stay. `unsubscribed` in the answer is how many subscriptions ended, on all nodes."""
        return self.send(self._unsubscribe(channel, user_id, socket_id))

    def revoke_grants(self, *, user_id: str | None = None, jti: str | None = None) -> Answer:
        """Revokes the grant with this id, or all of a user that were issued until now (redpoll only). The answer has
        `unsubscribed`, how many subscriptions ended, and `revoked_at`, in Unix seconds: a grant with a later `iat`
        counts again."""
        return self.send(self._revoke_grants(user_id, jti))

    # -- sending

    def _connections_of_process(self) -> urllib3.HTTPConnectionPool:
        """The pool. A fork gets its own: two processes on one socket would read each other's answers."""
        if self._pool is None or self._pool_pid != os.getpid():
            with self._lock:
                if self._pool is None or self._pool_pid != os.getpid():
                    self._free = threading.BoundedSemaphore(self._connections)
                    self._pool, self._pool_pid = self._new_pool(), os.getpid()
        return self._pool

    def _new_pool(self) -> urllib3.HTTPConnectionPool:
        # `_free` keeps more requests than `maxsize` away from it.
        options: dict[str, Any] = {"timeout": urllib3.Timeout(connect=self.timeout), "maxsize": self._connections}
        options["each_s"] = self._answer_s
        end = self.endpoint
        if not end.ssl:
            return _PlainPool(end.host, end.port, **options)
        return _TLSPool(end.host, end.port, **options, ssl_context=self._ssl_context)

    def send(self, call: Call) -> Answer:
        """Sends a request of `prepare`. Raises as `trigger`."""
        tries = self._tries(call)
        while True:
            if self._closed:
                tries.closed()
            try:
                try:
                    status, headers, body = self._request(call, tries)
                except NotSent as error:
                    tries.not_sent(error)
                except ClosedPoolError:
                    tries.closed()
                except (HTTPError, http.client.HTTPException, OSError) as error:
                    tries.no_answer(error)
                else:
                    return tries.answered(status, headers, body)
            except Retry as retry:
                time.sleep(retry.wait_s)

    def _request(self, call: Call, tries: Attempts) -> tuple[int, Mapping[str, str], bytes]:
        """One attempt: the answer's status, headers and body."""
        pool, free, wait_s = self._connections_of_process(), self._free, min(self.timeout, tries.left_s)
        if not free.acquire(timeout=wait_s):
            raise NotSent(f"all {self._connections} connections were busy for {wait_s:.3g} s")
        try:
            left_s = tries.left_s
            response = pool.urlopen(
                call.method,
                target(self.endpoint, call),
                body=call.body or None,
                headers=_HEADERS,
                retries=False,
                redirect=False,
                timeout=urllib3.Timeout(connect=min(self.timeout, left_s), total=left_s),
                decode_content=False,
                preload_content=False,
            )
            try:
                return response.status, response.headers, _read(response)
            except BaseException:
                # Not to be used again: the rest of this answer may still come.
                response.close()
                raise
            finally:
                response.release_conn()
        finally:
            free.release()


def _read(response: urllib3.BaseHTTPResponse) -> bytes:
    """The whole body. Raises HTTPError for half a body, and for one that is larger than any answer of a Pusher
    server."""
    if response.length_remaining is not None and response.length_remaining <= _SMALL_BYTES:
        return response.read()
    body = bytearray()
    while piece := response.read1(65536):
        body += piece
        if len(body) > MAX_ANSWER_BYTES:
            raise HTTPError(f"the answer has more than {MAX_ANSWER_BYTES} bytes")
    return bytes(body)


def _run_parts(send: Any, parts: list[tuple[int, Call]]) -> Answer:
    published = 0
    answer = Answer({})
    infos: list[Any] = []
    for size, call in parts:
        try:
            answer = send(call)
        except RedpollError as error:
            error.published = published
            raise
        published += size
        infos += answer.get("batch") or [{}] * size
    return join_batch(answer, infos)


def join_batch(last: Answer, infos: list[Any]) -> Answer:
    """The answer of a batch that was sent in parts: the batch's id, the last part's `trace_id`, and all attributes
    by index."""
    fields: dict[str, Any] = {"batch": infos} if any(infos) else {}
    return Answer(fields, last.trace_id, last.correlation_id)
