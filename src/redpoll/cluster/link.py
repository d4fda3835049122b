"""One pipelined RESP3 connection to Redis that comes back by itself.

Everything a process says to Redis goes through one of these: commands are queued and written once per loop
tick, replies and pushes are handed out in the order in which Redis made them (cluster.md rule 1). Knows
nothing of what the commands mean, and repeats none of them: after a break every call that may have been
carried out ends with `LinkDown`, and it is the caller who makes it again.
"""

import asyncio
import random
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final, cast

import hiredis
import structlog

from redpoll.cluster.endpoint import Endpoint
from redpoll.cluster.scripts import ALL, Script

__all__ = ["Clock", "Done", "Link", "LinkDown"]

log = structlog.get_logger(__name__)

Clock = Callable[[], float]
# Takes a reply, a hiredis.ReplyError or a LinkDown; never raises for a reason of Redis'.
Done = Callable[[Any], None]

# hiredis moves the rest of its buffer for each KiB that it has parsed, so more at once gains nothing: 16 to
# 256 KiB were within a tenth of each other, the smaller the better (bench/bus.py).
_READ_BYTES: Final = 32 * 1024
_KEPT_PARSER_BYTES: Final = 1024 * 1024

_MAX_UNANSWERED: Final = 50_000
_MAX_UNANSWERED_BYTES: Final = 64 * 1024 * 1024

# Answers of a server that can't serve us now: as good as a broken connection (cluster.md rule 10).
_AWAY: Final = ("LOADING", "READONLY", "MASTERDOWN", "CLUSTERDOWN")

_NOTHING: Final = object()


class LinkDown(Exception):
    """A call ended without an answer. `sent` False: Redis did not carry it out; True: nobody knows."""

    def __init__(self, sent: bool) -> None:
        super().__init__(sent)
        self.sent = sent

    def __str__(self) -> str:
        return "Redis went away before it answered" if self.sent else "Redis is not there"


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
    """The place of a SUBSCRIBE or UNSUBSCRIBE among the awaited answers: ended by `left` pushes, or by one
    error, which is a reply (cluster.md rule 9)."""

    __slots__ = ("done", "left")

    def __init__(self, left: int, done: Done) -> None:
        self.left = left
        self.done = done

    def __call__(self, reply: Any) -> None:
        self.done(reply)


class _Run:
    """The place of a script's answer. NOSCRIPT: loads it and repeats the call once."""

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
    """One TCP or Unix connection: bytes to replies and pushes, commands to bytes."""

    def __init__(self, link: "Link") -> None:
        self.pending: deque[Done] = deque()
        self.lost = False
        self.queued = 0
        self.queued_bytes = 0
        self.answered_bytes = 0
        self._link = link
        self._loop = asyncio.get_running_loop()
        self._out: list[bytes] = []
        # (commands queued, bytes queued) as of each write: how far the answers have come, in bytes.
        self._marks: deque[tuple[int, int]] = deque()
        self._buffer = bytearray(_READ_BYTES)
        reader = hiredis.Reader(notEnoughData=_NOTHING)
        reader.setmaxbuf(_KEPT_PARSER_BYTES)
        self._feed = reader.feed
        self._gets = reader.gets
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are no subclass of asyncio's.
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self.lose(str(exc) if exc else "closed by Redis")

    def send(self, command: tuple[Any, ...], done: Done) -> None:
        if not self._out:
            self._loop.call_soon(self.flush)
        self._out.append(hiredis.pack_command(command))
        self.pending.append(done)

    def flush(self) -> None:
        if self._out and not self.lost:
            assert self._transport is not None
            data = b"".join(self._out)
            self.queued += len(self._out)
            self.queued_bytes += len(data)
            self._marks.append((self.queued, self.queued_bytes))
            self._transport.write(data)
        self._out.clear()

    def get_buffer(self, sizehint: int) -> bytearray:
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        if self.lost:
            return
        # hiredis' stubs say bytes; it takes any buffer.
        self._feed(cast(bytes, self._buffer), 0, nbytes)
        while True:
            try:
                self._take()
                return
            except hiredis.ProtocolError as error:
                self.lose(f"not RESP: {error}")
                return
            except Exception as error:
                # A handler's mistake must not cost the others their answers.
                self._link.report(error)

    def _take(self) -> None:
        gets = self._gets
        on_push = self._link.on_push
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
            else:
                self._replied(item)
            if self.lost:
                return
        answered = self.queued - len(self.pending)
        while self._marks and self._marks[0][0] <= answered:
            self.answered_bytes = self._marks.popleft()[1]

    def _replied(self, reply: Any) -> None:
        if not self.pending:
            self.lose("an answer that nobody awaits")
            return
        done = self.pending.popleft()
        if type(reply) is hiredis.ReplyError:
            self._link.errors += 1
            if str(reply).startswith(_AWAY):
                done(LinkDown(sent=False))
                self.lose(str(reply))
                return
        done(reply)

    def _confirmed(self, kind: bytes) -> None:
        if not kind.endswith(b"subscribe"):
            return
        entry = self.pending[0] if self.pending else None
        if type(entry) is not _Topics:
            self.lose("a subscription changed that we didn't change")
            return
        entry.left -= 1
        if entry.left == 0:
            self.pending.popleft()
            entry.done(None)

    def lose(self, reason: str) -> None:
        """Ends the connection, whatever its state; every awaited call ends with LinkDown. Idempotent."""
        if self.lost:
            return
        self.lost = True
        if self._transport is not None:
            self._transport.abort()
        self._link._lost(self, reason)
        waiting, self.pending = self.pending, deque()
        sent = len(waiting) - len(self._out)
        for place, done in enumerate(waiting):
            try:
                done(LinkDown(sent=place < sent))
            except Exception as error:
                self._link.report(error)


class Link:
    """The connection as its users see it: up or not, and what to call when that changes.

    `on_push(topic, payload)` is the hot callback, once per message. `on_up()` is called when scripts are
    loaded and calls are taken; nothing is subscribed then. `on_down(reason)` is called before the calls that
    were awaited end with `LinkDown`.
    """

    def __init__(
        self,
        url: str,
        *,
        on_push: Callable[[bytes, bytes], None] = _ignore_push,
        on_up: Callable[[], None] = _nothing,
        on_down: Callable[[str], None] = _ignore,
        clock: Clock = time.monotonic,
        sharded: bool = False,
        first_delay_s: float = 0.05,
        greatest_delay_s: float = 1.0,
        handshake_s: float = 5.0,
    ) -> None:
        self.endpoint = Endpoint.parse(url)
        self.on_push = on_push
        self.on_up = on_up
        self.on_down = on_down
        self.clock = clock
        self.connects = 0
        self.commands = 0
        self.errors = 0
        self.handler_errors = 0
        self._subscribe = b"SSUBSCRIBE" if sharded else b"SUBSCRIBE"
        self._unsubscribe = b"SUNSUBSCRIBE" if sharded else b"UNSUBSCRIBE"
        self._first_delay_s = first_delay_s
        self._greatest_delay_s = greatest_delay_s
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
        """How often the connection was made anew, for /metrics."""
        return max(0, self.connects - 1)

    @property
    def unanswered(self) -> int:
        return len(self._connection.pending) if self._connection else 0

    @property
    def congested(self) -> bool:
        """More is awaited than a healthy Redis leaves open: stop reading clients until it is over."""
        connection = self._connection
        if connection is None:
            return False
        owed = connection.queued_bytes - connection.answered_bytes
        return len(connection.pending) > _MAX_UNANSWERED or owed > _MAX_UNANSWERED_BYTES

    def start(self) -> None:
        """Begins to connect, and never gives up. Needs a running loop."""
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._run(), name="redis link")

    async def wait_up(self) -> None:
        await self._is_up.wait()

    async def close(self) -> None:
        """Ends the link for good; what was queued in this tick is still written."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None
        if self._connection is not None:
            self._connection.flush()
            self._connection.lose("closed by us")

    def report(self, error: Exception) -> None:
        """A handler raised: counted and told to the loop, and everything goes on."""
        self.handler_errors += 1
        context = {"message": "a handler of redis' answers failed", "exception": error}
        asyncio.get_running_loop().call_exception_handler(context)

    def let_go(self) -> None:
        """Nobody hears of pushes, ups and downs any more."""
        self.on_push, self.on_up, self.on_down = _ignore_push, _nothing, _ignore

    def drop(self, reason: str) -> None:
        """Gives the connection up as broken; a new one is made at once."""
        if self._connection is not None:
            self._connection.lose(reason)

    def call(self, *command: Any, done: Done = _ignore) -> None:
        """Queues a command for this tick's write. `done` gets the reply, a ReplyError or a LinkDown,
        later."""
        connection = self._connection
        if connection is None:
            asyncio.get_running_loop().call_soon(done, LinkDown(sent=False))
            return
        self.commands += 1
        connection.send(command, done)

    def run(
        self, script: Script, keys: Sequence[bytes], args: Sequence[bytes | str | int], done: Done = _ignore
    ) -> None:
        """Queues a script, as `call` does a command."""
        command = script.command(keys, args)
        self.call(*command, done=_Run(self, script, command, done))

    def subscribe(self, topics: Sequence[bytes], done: Done = _ignore) -> None:
        """Queues one SUBSCRIBE; `done` gets None when Redis has confirmed all of them, or an error."""
        self.call(self._subscribe, *topics, done=_Topics(len(topics), done))

    def unsubscribe(self, topics: Sequence[bytes], done: Done = _ignore) -> None:
        self.call(self._unsubscribe, *topics, done=_Topics(len(topics), done))

    def flush(self) -> None:
        """Writes what is queued now, where waiting for the end of the tick gains nothing."""
        if self._connection is not None:
            self._connection.flush()

    async def ask(self, *command: Any) -> Any:
        """The reply to a command. Raises hiredis.ReplyError or LinkDown."""
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.call(*command, done=partial(_settle, future))
        return await future

    async def execute(self, script: Script, keys: Sequence[bytes], args: Sequence[bytes | str | int] = ()) -> Any:
        """The reply of a script. Raises hiredis.ReplyError or LinkDown."""
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
            # A server that takes connections and cuts them again must not be stormed, so only one that
            # lasted starts the delays anew.
            if self.clock() - began > 5 * self._greatest_delay_s:
                delay_s = self._first_delay_s
            await asyncio.sleep(delay_s * random.uniform(0.5, 1.0))
            delay_s = min(2 * delay_s, self._greatest_delay_s)

    async def _connect(self) -> _Connection:
        loop = asyncio.get_running_loop()
        to = self.endpoint
        if to.path is not None:
            _, connection = await loop.create_unix_connection(lambda: _Connection(self), to.path)
        else:
            _, connection = await loop.create_connection(lambda: _Connection(self), to.host, to.port)
        return connection

    async def _greet(self, connection: _Connection) -> None:
        to = self.endpoint
        hello: list[Any] = [b"HELLO", 3]
        if to.password is not None:
            hello += [b"AUTH", to.username or "default", to.password]
        commands = [hello]
        if to.database:
            commands.append([b"SELECT", to.database])
        commands += [[b"SCRIPT", b"LOAD", script.source] for script in ALL]
        loop = asyncio.get_running_loop()
        answers: list[asyncio.Future[Any]] = []
        for command in commands:
            future = loop.create_future()
            answers.append(future)
            connection.send(tuple(command), partial(_settle, future))
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
