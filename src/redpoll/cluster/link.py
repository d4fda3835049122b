"""One pipelined RESP3 connection to Redis that reconnects by itself.

Each process sends everything through one link. Commands are queued and written once per loop tick; replies and pushes
are handed out in the order in which Redis made them (cluster/README.md "Ground rules"). The link doesn't know what
commands mean, and repeats none of them: when the connection breaks, every unanswered call ends with `LinkDown`, and the
caller decides.
"""

import asyncio
import random
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from itertools import repeat
from time import monotonic
from typing import Any, Final, cast

import hiredis
import structlog

from redpoll.cluster.endpoint import Endpoint
from redpoll.cluster.scripts import ALL, Script

__all__ = ["Clock", "Done", "Link", "LinkDown"]

log = structlog.get_logger(__name__)

Clock = Callable[[], float]
# Takes a reply, a hiredis.ReplyError or a LinkDown.
Done = Callable[[Any], None]

# hiredis moves the rest of its buffer for each KiB that it has parsed, so bigger reads gain nothing: between 16 and
# 256 KiB, smaller was faster, by at most a tenth (bench/bus.py).
_READ_BYTES: Final = 32 * 1024
_MAX_PARSER_BYTES: Final = 1024 * 1024

# How long one pass of the loop may hand out replies and pushes; clients are served before the rest. The clock is read
# once in so many of them.
_SLICE_S: Final = 0.002
_ITEMS_PER_LOOK: Final = 16

_MAX_UNANSWERED: Final = 50_000
_MAX_UNANSWERED_BYTES: Final = 64 * 1024 * 1024

# Answers of a server that can't serve us now. They count as a broken connection.
_UNAVAILABLE: Final = ("LOADING", "READONLY", "MASTERDOWN", "CLUSTERDOWN")

_NOTHING: Final = object()


class LinkDown(Exception):
    """A call ended without an answer. `sent` False: Redis did not carry it out. True: it may have."""

    def __init__(self, sent: bool) -> None:
        super().__init__(sent)
        self.sent = sent

    def __str__(self) -> str:
        return "the connection to Redis broke before the answer" if self.sent else "Redis is not connected"


def _ignore(reply: Any) -> None:
    pass


def _ignore_push(topic: bytes, payload: bytes) -> None:
    pass


def _nothing() -> None:
    pass


def _settle(future: "asyncio.Future[Any]", reply: Any) -> None:
    if future.done():
        return
    if isinstance(reply, Exception):
        future.set_exception(reply)
    else:
        future.set_result(reply)


class _Topics:
    """The entry of a SUBSCRIBE or UNSUBSCRIBE among the awaited answers. It ends with the last of `left` pushes, or
    with one error, which is a reply."""

    __slots__ = ("done", "left")

    def __init__(self, left: int, done: Done) -> None:
        self.left = left
        self.done = done

    def __call__(self, reply: Any) -> None:
        self.done(reply)


class _Run:
    """The entry of a script among the awaited answers. On NOSCRIPT it loads the script and repeats the call once."""

    __slots__ = ("command", "done", "link", "script")

    def __init__(self, link: "Link", script: Script, command: tuple[bytes | str | int, ...], done: Done):
        self.link = link
        self.script = script
        self.command = command
        self.done = done

    def __call__(self, reply: Any) -> None:
        if type(reply) is hiredis.ReplyError and str(reply).startswith("NOSCRIPT"):
            self.link.call(b"SCRIPT", b"LOAD", self.script.source)
            self.link.call(*self.command, done=self.done)
        else:
            self.done(reply)


class _Connection(asyncio.BufferedProtocol):
    """One TCP or Unix connection: parses bytes into replies and pushes, packs commands into bytes."""

    def __init__(self, link: "Link") -> None:
        self.pending: deque[Done] = deque()
        self.lost = False
        self.queued = 0
        self.queued_bytes = 0
        self.answered_bytes = 0
        self._link = link
        self._loop = asyncio.get_running_loop()
        self._out: list[bytes] = []
        # (commands queued, bytes queued) at each write; they tell how many of the bytes are answered.
        self._marks: deque[tuple[int, int]] = deque()
        self._buffer = bytearray(_READ_BYTES)
        reader = hiredis.Reader(notEnoughData=_NOTHING)
        reader.setmaxbuf(_MAX_PARSER_BYTES)
        self._feed = reader.feed
        self._gets = reader.gets
        self._transport: asyncio.Transport | None = None
        # More was read than one slice could hand out, and nothing is read meanwhile.
        self._behind = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are not subclasses of asyncio's.
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self.lose(str(exc) if exc else "closed by Redis")

    def send(self, command: bytes, done: Done) -> None:
        if not self._out:
            self._loop.call_soon(self.flush)
        self._out.append(command)
        self.pending.append(done)

    def flush(self) -> None:
        if self._out and not self.lost:
            self._write(b"".join(self._out), len(self._out))
        self._out.clear()

    def send_many(self, commands: bytes, count: int, done: Done) -> None:
        """Writes `count` commands at once, after those that wait."""
        self.flush()
        self.pending.extend(repeat(done, count))
        self._write(commands, count)

    def _write(self, commands: bytes, count: int) -> None:
        assert self._transport is not None
        self.queued += count
        self.queued_bytes += len(commands)
        self._marks.append((self.queued, self.queued_bytes))
        self._transport.write(commands)

    def get_buffer(self, sizehint: int) -> bytearray:
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        if self.lost:
            return
        # hiredis' stubs say bytes; it takes any buffer.
        self._feed(cast(bytes, self._buffer), 0, nbytes)
        if not self._behind:
            self._hand_out()

    def _hand_out(self) -> None:
        # Everything that was read, or a slice of it.
        if self.lost:
            return
        try:
            self._hand_out_slice()
        finally:
            self._link.on_handed_out()

    def _hand_out_slice(self) -> None:
        until = monotonic() + _SLICE_S
        while True:
            try:
                behind = self._take(until)
                break
            except hiredis.ProtocolError as error:
                self.lose(f"not RESP: {error}")
                return
            except Exception as error:
                # An exception in one handler must not stop the others.
                self._link.report(error)
        if self.lost or self._transport is None:
            return
        if behind:
            self._transport.pause_reading()
            self._loop.call_soon(self._hand_out)
        elif self._behind:
            self._transport.resume_reading()
        self._behind = behind

    def _take(self, until: float) -> bool:
        # True: the time was over before the items were.
        gets = self._gets
        on_push = self._link.on_push
        pending = self.pending
        left = _ITEMS_PER_LOOK
        behind = False
        while True:
            item = gets()
            if type(item) is hiredis.PushNotification:
                kind = item[0]
                if kind == b"message" or kind == b"smessage":
                    on_push(item[1], item[2])
                else:
                    self._confirmed(kind)
            elif item is _NOTHING:
                break
            elif type(item) is hiredis.ReplyError or not pending:
                self._failed(item)
            else:
                pending.popleft()(item)
            if self.lost:
                return False
            left -= 1
            if left == 0:
                left = _ITEMS_PER_LOOK
                if monotonic() > until:
                    behind = True
                    break
        answered = self.queued - len(self.pending)
        while self._marks and self._marks[0][0] <= answered:
            self.answered_bytes = self._marks.popleft()[1]
        return behind

    def _failed(self, reply: Any) -> None:
        """An error reply, or a reply without a command."""
        if not self.pending:
            self.lose("an answer without a command")
            return
        done = self.pending.popleft()
        self._link.errors += 1
        if str(reply).startswith(_UNAVAILABLE):
            done(LinkDown(sent=False))
            self.lose(str(reply))
        else:
            done(reply)

    def _confirmed(self, kind: bytes) -> None:
        if not kind.endswith(b"subscribe"):
            return
        entry = self.pending[0] if self.pending else None
        if type(entry) is not _Topics:
            self.lose("an unexpected change of a subscription")
            return
        entry.left -= 1
        if entry.left == 0:
            self.pending.popleft()
            entry.done(None)

    def lose(self, reason: str) -> None:
        """Ends the connection, whatever its state. Every awaited call ends with LinkDown. Idempotent."""
        if self.lost:
            return
        self.lost = True
        if self._transport is not None:
            self._transport.abort()
        self._link._lost(self, reason)
        waiting, self.pending = self.pending, deque()
        sent = len(waiting) - len(self._out)
        for at, done in enumerate(waiting):
            try:
                done(LinkDown(sent=at < sent))
            except Exception as error:
                self._link.report(error)


class Link:
    """The connection and its callbacks.

    `on_push(topic, payload)` is called for each message; it is the hot path. `on_up()` is called when the scripts are
    loaded and calls can be made; nothing is subscribed then. `on_down(reason)` is called before the unanswered calls
    end with `LinkDown`. `on_handed_out()` is called after each run of replies and messages.

    `connects`, `commands`, `errors` (error replies) and `handler_errors` are counters.
    """

    def __init__(
        self,
        url: str,
        *,
        on_push: Callable[[bytes, bytes], None] = _ignore_push,
        on_up: Callable[[], None] = _nothing,
        on_down: Callable[[str], None] = _ignore,
        clock: Clock = monotonic,
        sharded: bool = False,
        first_delay_s: float = 0.05,
        max_delay_s: float = 1.0,
        handshake_s: float = 5.0,
    ) -> None:
        self.endpoint = Endpoint.parse(url)
        self.on_push = on_push
        self.on_up = on_up
        self.on_down = on_down
        self.on_handed_out: Callable[[], None] = _nothing
        self.clock = clock
        self.connects = 0
        self.commands = 0
        self.errors = 0
        self.handler_errors = 0
        self._subscribe = b"SSUBSCRIBE" if sharded else b"SUBSCRIBE"
        self._unsubscribe = b"SUNSUBSCRIBE" if sharded else b"UNSUBSCRIBE"
        self._first_delay_s = first_delay_s
        self._max_delay_s = max_delay_s
        self._handshake_s = handshake_s
        self._connection: _Connection | None = None
        self._is_up = asyncio.Event()
        self._is_down = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    @property
    def up(self) -> bool:
        return self._connection is not None

    @property
    def reconnects(self) -> int:
        """Connections after the first one. For /metrics."""
        return max(0, self.connects - 1)

    @property
    def unanswered(self) -> int:
        return len(self._connection.pending) if self._connection else 0

    @property
    def congested(self) -> bool:
        """More is unanswered than a healthy Redis leaves: stop reading clients until this is False."""
        connection = self._connection
        if connection is None:
            return False
        unanswered_bytes = connection.queued_bytes - connection.answered_bytes
        return len(connection.pending) > _MAX_UNANSWERED or unanswered_bytes > _MAX_UNANSWERED_BYTES

    def start(self) -> None:
        """Starts to connect, and never gives up. Needs a running loop."""
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._run(), name="redis link")

    async def wait_up(self) -> None:
        await self._is_up.wait()

    async def close(self) -> None:
        """Closes the link. Commands queued in this tick are still written."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None
        if self._connection is not None:
            self._connection.flush()
            self._connection.lose("closed by us")

    def report(self, error: Exception) -> None:
        """A handler raised: counts it and reports it to the loop."""
        self.handler_errors += 1
        context = {"message": "exception in a handler of a redis reply", "exception": error}
        asyncio.get_running_loop().call_exception_handler(context)

    def release(self) -> None:
        """Never calls its callbacks again."""
        self.on_push, self.on_up, self.on_down, self.on_handed_out = _ignore_push, _nothing, _ignore, _nothing

    def drop(self, reason: str) -> None:
        """Closes the connection as broken. The link reconnects."""
        if self._connection is not None:
            self._connection.lose(reason)

    def call(self, *command: Any, done: Done = _ignore) -> None:
        """Queues a command for this tick's write. `done` gets the reply, a ReplyError or a LinkDown, never from within
        this call."""
        connection = self._connection
        if connection is None:
            asyncio.get_running_loop().call_soon(done, LinkDown(sent=False))
            return
        self.commands += 1
        connection.send(hiredis.pack_command(command), done)

    def call_packed(self, command: bytes, done: Done) -> None:
        """As `call`, with a command in RESP."""
        connection = self._connection
        if connection is None:
            asyncio.get_running_loop().call_soon(done, LinkDown(sent=False))
            return
        self.commands += 1
        # connection.send, without calling it.
        if not connection._out:
            connection._loop.call_soon(connection.flush)
        connection._out.append(command)
        connection.pending.append(done)

    def call_many(self, commands: bytes, count: int, done: Done) -> None:
        """Writes `count` commands in RESP now. `done` gets the reply of each, or a LinkDown for each."""
        connection = self._connection
        if connection is None:
            for _ in range(count):
                asyncio.get_running_loop().call_soon(done, LinkDown(sent=False))
            return
        self.commands += count
        connection.send_many(commands, count, done)

    def run(
        self, script: Script, keys: Sequence[bytes], args: Sequence[bytes | str | int], done: Done = _ignore
    ) -> None:
        """Queues a call of a script; `done` as in `call`."""
        command = script.command(keys, args)
        self.call(*command, done=_Run(self, script, command, done))

    def subscribe(self, topics: Sequence[bytes], done: Done = _ignore) -> None:
        """Queues one SUBSCRIBE. `done` gets None when Redis has confirmed all topics, or an error."""
        self.call(self._subscribe, *topics, done=_Topics(len(topics), done))

    def unsubscribe(self, topics: Sequence[bytes], done: Done = _ignore) -> None:
        self.call(self._unsubscribe, *topics, done=_Topics(len(topics), done))

    def flush(self) -> None:
        """Writes the queued commands now, where waiting for the end of the tick gains nothing."""
        if self._connection is not None:
            self._connection.flush()

    async def ask(self, *command: Any) -> Any:
        """The reply to a command. Raises hiredis.ReplyError or LinkDown."""
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.call(*command, done=partial(_settle, future))
        return await future

    async def execute(self, script: Script, keys: Sequence[bytes], args: Sequence[bytes | str | int] = ()) -> Any:
        """The reply to a script. Raises hiredis.ReplyError or LinkDown."""
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.run(script, keys, args, partial(_settle, future))
        return await future

    async def _run(self) -> None:
        delay_s = self._first_delay_s
        while True:
            connection: _Connection | None = None
            began = self.clock()
            try:
                async with asyncio.timeout(self._handshake_s):
                    connection = await self._connect()
                    await self._greet(connection)
            except (OSError, TimeoutError, LinkDown, hiredis.ReplyError) as error:
                if connection is not None:
                    connection.lose("the handshake failed")
                log.warning("redis unreachable", reason=str(error) or type(error).__name__)
            else:
                self.connects += 1
                self._connection = connection
                self._is_down.clear()
                self._is_up.set()
                log.info("redis connected", connects=self.connects)
                try:
                    self.on_up()
                except Exception as error:
                    self.report(error)
                await self._is_down.wait()
            # Only a connection that lasted resets the delay, so that a server that accepts and closes connections isn't
            # flooded.
            if self.clock() - began > 5 * self._max_delay_s:
                delay_s = self._first_delay_s
            await asyncio.sleep(delay_s * random.uniform(0.5, 1.0))
            delay_s = min(2 * delay_s, self._max_delay_s)

    async def _connect(self) -> _Connection:
        loop = asyncio.get_running_loop()
        endpoint = self.endpoint
        if endpoint.path is not None:
            _, connection = await loop.create_unix_connection(lambda: _Connection(self), endpoint.path)
        else:
            _, connection = await loop.create_connection(lambda: _Connection(self), endpoint.host, endpoint.port)
        return connection

    async def _greet(self, connection: _Connection) -> None:
        endpoint = self.endpoint
        hello: list[Any] = [b"HELLO", 3]
        if endpoint.password is not None:
            hello += [b"AUTH", endpoint.username or "default", endpoint.password]
        commands = [hello]
        if endpoint.database:
            commands.append([b"SELECT", endpoint.database])
        commands += [[b"SCRIPT", b"LOAD", script.source] for script in ALL]
        loop = asyncio.get_running_loop()
        answers: list[asyncio.Future[Any]] = []
        for command in commands:
            future = loop.create_future()
            answers.append(future)
            connection.send(hiredis.pack_command(tuple(command)), partial(_settle, future))
        for outcome in await asyncio.gather(*answers, return_exceptions=True):
            if isinstance(outcome, BaseException):
                raise outcome

    def _lost(self, connection: _Connection, reason: str) -> None:
        if connection is not self._connection:
            return
        self._connection = None
        self._is_up.clear()
        self._is_down.set()
        if self._task is not None:
            log.warning("redis connection lost", reason=reason)
        try:
            self.on_down(reason)
        except Exception as error:
            self.report(error)
