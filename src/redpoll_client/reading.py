"""Reading a channel with history over HTTP: `read` of both publishers (redpoll only).

The requests are long polls of the Durable Streams protocol: protocol/README.md "Streams". Each reader has a connection
of its own, so that waiting ones don't keep publishes from the pool.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import Protocol, Self

from redpoll_client.calls import Answer, Call
from redpoll_client.errors import Unavailable
from redpoll_client.publishing import Message

__all__ = ["AsyncReader", "Reader"]


class _Sender(Protocol):
    """A Publisher of the reader's own."""

    def send(self, call: Call) -> Answer: ...
    def close(self) -> None: ...


class _AsyncSender(Protocol):
    """An AsyncPublisher of the reader's own."""

    async def send(self, call: Call) -> Answer: ...
    async def close(self) -> None: ...


class _Reading:
    """The position, and the messages that came and weren't handed out yet."""

    def __init__(self, call: Callable[[str, bool, str], Call], offset: str, live: bool) -> None:
        self.position = offset
        """The token after the last message that was handed out; `offset` of a later `read`."""
        self._call = call
        self._live = live
        self._next = offset
        self._cursor = ""
        self._closed = False
        self._last = False
        self._waiting: deque[Message] = deque()

    @property
    def ended(self) -> bool:
        """Whether the channel's last event was handed out: one that was published with `end`."""
        return self._closed and not self._waiting

    def _request(self) -> Call | None:
        """What to ask for now. None: nothing more comes."""
        if self._last:
            return None
        # A long poll that breaks is asked again, and `now` is later then: ask for the position first, without waiting.
        return self._call(self._next, self._live and self._next != "now", self._cursor)

    def _add(self, answer: Answer) -> None:
        try:
            self._waiting += [Message(m["offset"], m["event"], m["data"], m["time_ms"]) for m in answer["messages"]]
            self._next, self._cursor, self._closed = answer["next"], answer["cursor"], answer["closed"]
            self._last = self._closed or (not self._live and answer["up_to_date"])
        except (KeyError, TypeError):
            raise Unavailable("the server's answer is no page of a stream; only redpoll has them") from None
        if not self._waiting:
            self.position = self._next

    def _take(self) -> Message:
        message = self._waiting.popleft()
        if self._waiting:
            epoch, _, offset = self._next.rpartition("_")
            self.position = f"{epoch}_{message.offset:0{len(offset)}d}"
        else:
            self.position = self._next
        return message


class Reader(_Reading):
    """Iterates over the messages of a channel, as `redpoll_client.Message`: first what is stored, then what comes.

    The iterator ends after the channel's last event, and without `live` after what is stored. It raises Gone if
    messages after its position are lost, and Unavailable if the server is away for longer than a long poll (20 s) and
    `total_timeout`; a new `read` may go on at `position`.
    """

    def __init__(self, publisher: _Sender, call: Callable[[str, bool, str], Call], offset: str, live: bool) -> None:
        super().__init__(call, offset, live)
        self._publisher = publisher

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Closes the reader's connection."""
        self._publisher.close()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Message:
        while not self._waiting:
            call = self._request()
            if call is None:
                raise StopIteration
            self._add(self._publisher.send(call))
        return self._take()


class AsyncReader(_Reading):
    """`Reader` for asyncio."""

    def __init__(
        self, publisher: _AsyncSender, call: Callable[[str, bool, str], Call], offset: str, live: bool
    ) -> None:
        super().__init__(call, offset, live)
        self._publisher = publisher

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Closes the reader's connection."""
        await self._publisher.close()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Message:
        while not self._waiting:
            call = self._request()
            if call is None:
                raise StopAsyncIteration
            self._add(await self._publisher.send(call))
        return self._take()
