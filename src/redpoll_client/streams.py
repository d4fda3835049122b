"""Publishes a stream of text as numbered events: `publish_stream` of both publishers.

Each event's data is JSON: `{"stream": ID, "n": 0, "length": 4, "delta": "text"}`, `n` counting from 0, and at the end
`{"stream": ID, "n": 7, "length": 52, "state": "done"}`, where the state is `done`, `failed` or `cancelled`. A
subscriber joins the deltas; a gap in `n` is a delta that it didn't get. `length` is that of the text so far in UTF-16
units, as JavaScript counts: where the server joins deltas, it shows whether the joined ones have the whole text.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import threading
import time
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Iterable
from typing import Any

from redpoll_client.calls import Answer
from redpoll_client.errors import RateLimited, RedpollError
from redpoll_client.signatures import to_json

__all__ = ["Text", "publish_parts", "publish_parts_async"]

# The producer waits while this many characters wait to be sent.
_MAX_PENDING_CHARS = 1024 * 1024
# The longest wait for a rate limit; a longer one fails the stream.
_LONGEST_WAIT_S = 60.0
# Where the server doesn't say how long to wait.
_DEFAULT_WAIT_S = 1.0
# Between two events, while what is left of a rate limit is spread. Pages take 30 s of silence for a failure.
_LONGEST_PAUSE_S = 20.0
# Bytes of an event's data beside the delta: braces, names, a stream id of 64 characters, numbers.
_ENVELOPE_BYTES = 192


class Text:
    """The text that waits, and the numbers of the events that carry it. `together`: the texts that the publisher has
    under way."""

    def __init__(self, together: set[Text], stream_id: str | None, per_second: float, max_bytes: int) -> None:
        self._id = secrets.token_hex(8) if stream_id is None else stream_id
        if not per_second > 0 or not isinstance(self._id, str) or len(self._id) > 64:
            raise ValueError("per_second must be positive, and stream_id a string of at most 64 characters")
        # Encrypted data is a third longer, in base64.
        self._budget = max_bytes * 3 // 4 - _ENVELOPE_BYTES
        if self._budget < 16:
            raise ValueError(f"max_data_bytes {max_bytes} is too small for a stream")
        self._together = together
        self._interval_s = 1 / per_second
        self._pending = ""
        self.number = 0
        # Of what was taken, in UTF-16 units.
        self._length = 0

    @property
    def full(self) -> bool:
        return len(self._pending) > _MAX_PENDING_CHARS

    def __bool__(self) -> bool:
        return bool(self._pending)

    def interval_s(self, answer: Answer) -> float:
        """From the event that got this answer to the next one. A rate limit that is used up would be a silence until
        its window ends, so the texts share what is left of it evenly."""
        return max(self._interval_s, min(answer.spacing_s * len(self._together), _LONGEST_PAUSE_S))

    def add(self, part: str) -> None:
        if not isinstance(part, str):
            raise TypeError(f"a stream's parts must be strings, not {type(part).__name__}")
        self._pending += part

    def clear(self) -> None:
        self._pending = ""

    def take(self) -> dict[str, Any]:
        """The data of the next event: all text that waits, or as much as one event holds."""
        count = min(len(self._pending), self._budget)
        while count > 1 and len(to_json(self._pending[:count]).encode()) > self._budget:
            count //= 2
        delta, self._pending = self._pending[:count], self._pending[count:]
        self._length += len(delta.encode("utf-16-le", "surrogatepass")) // 2
        return self._numbered({"delta": delta})

    def end(self, state: str) -> dict[str, Any]:
        return self._numbered({"state": state})

    def _numbered(self, fields: dict[str, Any]) -> dict[str, Any]:
        data = {"stream": self._id, "n": self.number, "length": self._length, **fields}
        self.number += 1
        return data


def _wait_s(error: RateLimited) -> float:
    """How long to wait for the limit. Raises the error if that is too long."""
    wait_s = _DEFAULT_WAIT_S if error.retry_after is None else error.retry_after
    if wait_s > _LONGEST_WAIT_S:
        raise error
    return max(wait_s, 0.05)


# -- blocking


class _Sender:
    """A thread that sends text while the caller's thread waits for the next part."""

    def __init__(self, send: Callable[[dict[str, Any]], Answer], text: Text) -> None:
        self._send = send
        self._text = text
        self._changed = threading.Condition()
        self._ending = False
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="redpoll-stream", daemon=True)
        self._thread.start()

    def add(self, part: str) -> None:
        with self._changed:
            self._text.add(part)
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._error is not None or not self._text.full)
            if self._error is not None:
                raise self._error

    def finish(self, *, flush: bool) -> Exception | None:
        """Ends the thread, after it has sent what waits if `flush`. Returns why sending failed."""
        with self._changed:
            self._ending = True
            if not flush:
                self._text.clear()
            self._changed.notify_all()
        self._thread.join()
        return self._error

    def patiently(self, data: dict[str, Any]) -> Answer:
        while True:
            try:
                return self._send(data)
            except RateLimited as error:
                time.sleep(_wait_s(error))

    def _run(self) -> None:
        try:
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: self._ending or bool(self._text))
                    if not self._text:
                        return
                    data = self._text.take()
                    self._changed.notify_all()
                began = time.monotonic()
                answer = self.patiently(data)
                with self._changed:
                    rest_s = began + self._text.interval_s(answer) - time.monotonic()
                    # The end doesn't wait: what is left is one more event, and the end mark.
                    self._changed.wait_for(lambda: self._ending, timeout=max(rest_s, 0))
        except Exception as error:
            with self._changed:
                self._error = error
                self._text.clear()
                self._changed.notify_all()


def publish_parts(
    send: Callable[[dict[str, Any]], Answer],
    parts: Iterable[str],
    together: set[Text],
    stream_id: str | None,
    per_second: float,
    max_bytes: int,
) -> int:
    """Sends the parts of an iterator by `send`, which publishes one event. Returns the number of events. `together`:
    the texts that the publisher has under way."""
    text = Text(together, stream_id, per_second, max_bytes)
    sender = _Sender(send, text)
    state, failure = "cancelled", None
    together.add(text)
    try:
        for part in parts:
            sender.add(part)
        state = "done"
    except Exception:
        state = "failed"
        raise
    finally:
        together.discard(text)
        failure = sender.finish(flush=state != "cancelled")
        if failure is not None or state != "done":
            with contextlib.suppress(RedpollError):
                sender.patiently(text.end(state if failure is None else "failed"))
    if failure is not None:
        raise failure
    sender.patiently(text.end("done"))
    return text.number


# -- asyncio


async def _patiently(send: Callable[[dict[str, Any]], Awaitable[Answer]], data: dict[str, Any]) -> Answer:
    while True:
        try:
            return await send(data)
        except RateLimited as error:
            await asyncio.sleep(_wait_s(error))


class _AsyncSender:
    """A task that sends text while the caller waits for the next part."""

    def __init__(self, send: Callable[[dict[str, Any]], Awaitable[Answer]], text: Text) -> None:
        self._send = send
        self._text = text
        self._added = asyncio.Event()
        self._room = asyncio.Event()
        self._ending = asyncio.Event()
        self._task = asyncio.create_task(self._run(), name="redpoll-stream")

    async def add(self, part: str) -> None:
        self._text.add(part)
        self._added.set()
        while self._text.full and not self._task.done():
            self._room.clear()
            await self._room.wait()
        if self._task.done():
            await self._task

    async def finish(self, state: str) -> None:
        """Sends what waits, unless cancelled, and the end mark. Raises why sending failed."""
        if state == "cancelled":
            self._text.clear()
        self._ending.set()
        self._added.set()
        try:
            # One that is under way ends first: whether it was published must be known for the end's number.
            await self._task
        except BaseException:
            with contextlib.suppress(RedpollError):
                await _patiently(self._send, self._text.end("failed"))
            raise
        await _patiently(self._send, self._text.end(state))

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            while True:
                await self._added.wait()
                if not self._text:
                    if self._ending.is_set():
                        return
                    self._added.clear()
                    continue
                began = loop.time()
                data = self._text.take()
                self._room.set()
                answer = await _patiently(self._send, data)
                rest_s = began + self._text.interval_s(answer) - loop.time()
                if rest_s > 0 and not self._ending.is_set():
                    with contextlib.suppress(TimeoutError):
                        await asyncio.wait_for(self._ending.wait(), rest_s)
        finally:
            self._room.set()


async def _async_parts(parts: Iterable[str] | AsyncIterable[str]) -> AsyncIterator[str]:
    if isinstance(parts, AsyncIterable):
        async for part in parts:
            yield part
    else:
        for part in parts:
            yield part
            # A plain iterator never waits; others must run meanwhile.
            await asyncio.sleep(0)


async def publish_parts_async(
    send: Callable[[dict[str, Any]], Awaitable[Answer]],
    parts: Iterable[str] | AsyncIterable[str],
    together: set[Text],
    stream_id: str | None,
    per_second: float,
    max_bytes: int,
) -> int:
    """As `publish_parts`, for an async iterator or a plain one that doesn't block."""
    text = Text(together, stream_id, per_second, max_bytes)
    sender = _AsyncSender(send, text)
    state = "cancelled"
    together.add(text)
    try:
        async for part in _async_parts(parts):
            await sender.add(part)
        state = "done"
    except Exception:
        state = "failed"
        raise
    finally:
        together.discard(text)
        # In a task of its own, so that a second cancellation doesn't leave subscribers without an end.
        ending = asyncio.create_task(sender.finish(state))
        if state == "done":
            await asyncio.shield(ending)
        else:
            with contextlib.suppress(RedpollError):
                await asyncio.shield(ending)
    return text.number
