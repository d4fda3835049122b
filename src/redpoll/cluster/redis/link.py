"""One pipelined RESP3 connection to Redis that reconnects by itself.

Each process sends everything through one link. Commands are queued and written once per loop tick; replies and pushes
are handed out in the order in which Redis made them (cluster/README.md "Ground rules"). The link doesn't know what
commands mean, and repeats none of them: when the connection breaks, every unanswered call ends with `LinkDown`, and the
caller decides.

A link connects only to a primary, and asks once a second whether it still is one and takes writes (primary.py). With
Sentinels, each attempt to connect asks them for the master. A connected link goes on asking, because a master that hung
or was cut off may come back and accept writes that its successor doesn't have.
"""

import asyncio
import contextlib
import random
from collections.abc import Callable, Collection, Sequence
from functools import partial
from time import monotonic
from typing import Any, Final

import hiredis
import structlog

from redpoll._publish import Commands
from redpoll.cluster.redis.calls import Done, LinkDown, Publishes, Replies, Topics, settle
from redpoll.cluster.redis.connection import RedisConnection
from redpoll.cluster.redis.primary import ServerWatch
from redpoll.cluster.redis.scripts import ALL, Script
from redpoll.cluster.redis.sentinels import Sentinels
from redpoll.config.redis_url import RedisUrl

__all__ = ["MAX_UNANSWERED_LOOKS", "Clock", "Done", "Link", "LinkDown"]

log = structlog.get_logger(__name__)

Clock = Callable[[], float]

# What Redis answers to a command that its ACL or its provider forbids.
_FORBIDDEN: Final = ("NOPERM", "ERR unknown command", "ERR unknown subcommand")

_LOOK_EVERY_S: Final = 1.0
MAX_UNANSWERED_LOOKS: Final = 10
_MAX_DELAY_WITH_SENTINELS_S: Final = 0.2

_SCAN_COUNT: Final = 1000


def _ignore(reply: Any) -> None:
    pass


def _ignore_push(topic: bytes, payload: bytes) -> None:
    pass


def _nothing() -> None:
    pass


class _Run:
    """The entry of a script among the awaited answers. On NOSCRIPT it repeats the call once with the script's source,
    which also loads it."""

    __slots__ = ("command", "done", "link", "script")

    def __init__(self, link: "Link", script: Script, command: tuple[bytes | str | int, ...], done: Done):
        self.link = link
        self.script = script
        self.command = command
        self.done = done

    @property
    def over(self) -> bool:
        return getattr(self.done, "over", False)

    def __call__(self, reply: Any) -> None:
        if type(reply) is hiredis.ReplyError and str(reply).startswith("NOSCRIPT"):
            self.link.call(b"EVAL", self.script.source, *self.command[2:], done=self.done)
        else:
            self.done(reply)


class Link:
    """The connection and its callbacks.

    Its callbacks are passed to `start`, because those who have them are made with the link. `on_push(topic, payload)`
    is called for each message; it is the hot path. `on_up()` is called when the scripts are loaded and calls can be
    made; nothing is subscribed then. `on_down(reason)` is called before the unanswered calls end with `LinkDown`.
    `on_moved(shard)` is called of a link to a master of a cluster that no longer has the slot of this shard.

    In a Redis Cluster, `kept_shards` says in both what doesn't concern: calls for these shards go on while the link is
    down, and their subscriptions stay. `on_down` is called again when some of them are lost before the link is up.

    `max_unanswered_looks`: the connection is replaced after as many looks at its server without an answer, because the
    link's owner may ask nothing for long. Looks are counted, not seconds: a stall of this process is one look.

    `is_answered_last` is for links whose publishes are confirmed to others (RedisConnection.be_answered_last).

    `connection` is the present one. `connects`, `commands`, `errors` (error replies) and `handler_errors` are counters.
    """

    def __init__(
        self,
        url: str,
        *,
        clock: Clock = monotonic,
        sharded: bool = False,
        first_delay_s: float = 0.05,
        max_delay_s: float = 1.0,
        handshake_s: float = 5.0,
        look_every_s: float = _LOOK_EVERY_S,
        max_unanswered_looks: int = MAX_UNANSWERED_LOOKS,
        is_answered_last: bool = False,
    ) -> None:
        self._server = RedisUrl.parse(url)
        self._sentinels = Sentinels(self._server) if self._server.service else None
        self._address = ("", 0)
        self.on_push: Callable[[bytes, bytes], None] = _ignore_push
        self.on_up: Callable[[], None] = _nothing
        self.on_down: Callable[[str], None] = _ignore
        self.on_moved: Callable[[int], None] = _ignore
        self.clock = clock
        self.sharded = sharded
        self.connects = 0
        self.commands = 0
        self.errors = 0
        self.handler_errors = 0
        self._first_delay_s = first_delay_s
        # During a fail-over, what is refused is the old master: the new one must not wait for us.
        self._max_delay_s = min(max_delay_s, _MAX_DELAY_WITH_SENTINELS_S) if self._sentinels else max_delay_s
        self._handshake_s = handshake_s
        self._look_every_s = look_every_s
        self._max_unanswered_looks = max_unanswered_looks
        self._is_answered_last = is_answered_last
        self.connection: RedisConnection | None = None
        self._server_watch = ServerWatch()
        self._is_up = asyncio.Event()
        self._is_down = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    @property
    def up(self) -> bool:
        return self.connection is not None

    @property
    def kept_shards(self) -> frozenset[int]:
        """While the link is down and until it goes down again: the shards that weren't lost. None without a Cluster."""
        return frozenset()

    def is_usable(self, shard: int) -> bool:
        """Calls for this shard are made."""
        return self.up or shard in self.kept_shards

    @property
    def reconnects(self) -> int:
        """Connections after the first one. For /metrics."""
        return max(0, self.connects - 1)

    @property
    def unanswered(self) -> int:
        return self.connection.unanswered if self.connection else 0

    @property
    def congested(self) -> bool:
        """More is unanswered than a healthy Redis leaves: stop reading clients until this is False."""
        return self.connection is not None and self.connection.congested

    @property
    def refusal(self) -> str:
        """Why publishes are to be refused at once, because they would not be confirmed; "" if nothing is known against
        them. A ClusterLink refuses those to each master by itself."""
        return self._server_watch.refusal or ("too much is unanswered by Redis" if self.congested else "")

    def refusal_of(self, name: bytes) -> str:
        """As `refusal`, for publishes to the shard of this key or topic."""
        return self.refusal

    def start(
        self,
        *,
        on_push: Callable[[bytes, bytes], None] | None = None,
        on_up: Callable[[], None] | None = None,
        on_down: Callable[[str], None] | None = None,
        on_moved: Callable[[int], None] | None = None,
    ) -> None:
        """Starts to connect, and never gives up. Needs a running loop."""
        self.on_push = on_push or self.on_push
        self.on_up = on_up or self.on_up
        self.on_down = on_down or self.on_down
        self.on_moved = on_moved or self.on_moved
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
        if self.connection is not None:
            self.connection.flush()
            self.connection.lose("closed by us")
        if self._sentinels is not None:
            await self._sentinels.close()

    def report(self, error: Exception) -> None:
        """A handler raised: counts it and reports it to the loop."""
        self.handler_errors += 1
        context = {"message": "exception in a handler of a redis reply", "exception": error}
        asyncio.get_running_loop().call_exception_handler(context)

    def release(self) -> None:
        """Never calls its callbacks again."""
        self.on_push, self.on_up, self.on_down = _ignore_push, _nothing, _ignore
        self.on_moved = _ignore

    def abandon(self, shards: Collection[int]) -> None:
        """In a Cluster: ends the awaited calls for these shards with LinkDown, and keeps the connections."""
        if self.connection is not None:
            self.connection.abandon(shards)

    def drop(self, reason: str) -> None:
        """Closes the connection as broken. The link reconnects."""
        if self.connection is not None:
            self.connection.lose(reason)

    def shard_of_each_connection(self) -> list[int]:
        """For each connection, the least shard that uses it. Call it while the link is up."""
        return [0]

    def drop_connection(self, shard: int, reason: str) -> None:
        """As `drop`, but only the connection that serves this shard."""
        self.drop(reason)

    def call(self, *command: Any, done: Done = _ignore) -> None:
        """Queues a command for this tick's write. `done` gets the reply, a ReplyError or a LinkDown, never from within
        this call."""
        connection = self.connection
        if connection is None:
            asyncio.get_running_loop().call_soon(done, LinkDown(sent=False))
            return
        self.commands += 1
        connection.send(hiredis.pack_command(command), done)

    def call_packed(self, command: bytes, done: Done) -> None:
        """As `call`, with a command in RESP."""
        connection = self.connection
        if connection is None:
            asyncio.get_running_loop().call_soon(done, LinkDown(sent=False))
            return
        self.commands += 1
        connection.send(command, done)

    def publish(self, commands: Commands, done: Publishes) -> None:
        """As `call`, with commands in RESP. `done` gets the reply of each, or a LinkDown for each."""
        connection = self.connection
        if connection is None:
            for _ in range(commands.count):
                asyncio.get_running_loop().call_soon(done, LinkDown(sent=False))
            return
        self.commands += commands.count
        connection.send(commands.data, done, commands.count)

    def publish_now(self, commands: Commands, done: Publishes, question: bytes, done_of_question: Done) -> None:
        """As `publish` and then `call_packed`, written at once, not at the end of this pass of the loop."""
        connection = self.connection
        if connection is None:
            self.publish(commands, done)
            self.call_packed(question, done_of_question)
            return
        self.commands += commands.count + 1
        connection.send_now(commands.data, commands.count, done, question, done_of_question)

    def run(
        self, script: Script, keys: Sequence[bytes], args: Sequence[bytes | str | int], done: Done = _ignore
    ) -> None:
        """Queues a call of a script; `done` as in `call`."""
        command = script.command(keys, args)
        self.call(*command, done=_Run(self, script, command, done))

    def subscribe(self, topics: Sequence[bytes], done: Done = _ignore) -> None:
        """Queues one SUBSCRIBE. `done` gets None when Redis has confirmed all topics, or an error."""
        self._change_topics(b"SSUBSCRIBE" if self.sharded else b"SUBSCRIBE", topics, done)

    async def subscribers(self, topics: Sequence[bytes]) -> list[int]:
        """How many connections subscribed each topic. Raises hiredis.ReplyError or LinkDown."""
        counts = await self.ask(b"PUBSUB", b"SHARDNUMSUB" if self.sharded else b"NUMSUB", *topics)
        return [int(count) for count in counts[1::2]]

    def unsubscribe(self, topics: Sequence[bytes], done: Done = _ignore) -> None:
        self._change_topics(b"SUNSUBSCRIBE" if self.sharded else b"UNSUBSCRIBE", topics, done)

    def _change_topics(self, command: bytes, topics: Sequence[bytes], done: Done) -> None:
        self.call(command, *topics, done=Topics(command.lower(), topics, done))

    def flush(self) -> None:
        """Writes the queued commands now, where waiting for the end of the tick gains nothing."""
        if self.connection is not None:
            self.connection.flush()

    async def scan(self, pattern: bytes) -> list[bytes]:
        """The names of all keys that match. Raises hiredis.ReplyError or LinkDown."""
        matching: list[bytes] = []
        cursor: bytes | int = 0
        while True:
            cursor, names = await self.ask(b"SCAN", cursor, b"MATCH", pattern, b"COUNT", _SCAN_COUNT)
            matching += names
            if int(cursor) == 0:
                return matching

    async def ask(self, *command: Any) -> Any:
        """The reply to a command. Raises hiredis.ReplyError or LinkDown."""
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.call(*command, done=partial(settle, future))
        return await future

    async def ask_all(self, commands: Sequence[tuple[Any, ...]]) -> list[Any]:
        """The replies to commands, which leave in one write. Raises as `ask`. Much cheaper than a task for each."""
        if not commands:
            return []
        whole: asyncio.Future[list[Any]] = asyncio.get_running_loop().create_future()
        done = Replies(len(commands), whole)
        for command in commands:
            self.call(*command, done=done)
        return await whole

    async def execute(self, script: Script, keys: Sequence[bytes], args: Sequence[bytes | str | int] = ()) -> Any:
        """The reply to a script. Raises hiredis.ReplyError or LinkDown."""
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.run(script, keys, args, partial(settle, future))
        return await future

    async def _run(self) -> None:
        delay_s = self._first_delay_s
        while True:
            connection: RedisConnection | None = None
            began = self.clock()
            try:
                async with asyncio.timeout(self._handshake_s):
                    connection = await self._connect()
                    await self._greet(connection)
                if connection.lost:
                    # Between its last answer and now. It isn't ours yet, so `connection_lost` did nothing.
                    raise OSError("closed after the greeting")
                if self._is_answered_last:
                    connection.be_answered_last()
            except (OSError, TimeoutError, LinkDown, hiredis.ReplyError, asyncio.CancelledError) as error:
                reason = str(error) or type(error).__name__
                if connection is not None:
                    reason = connection.lost_reason or reason
                    connection.lose("the handshake failed")
                if isinstance(error, asyncio.CancelledError):
                    raise
                log.warning("redis unreachable", reason=reason)
            else:
                self.connects += 1
                self.connection = connection
                self._is_down.clear()
                self._is_up.set()
                log.info("redis connected", connects=self.connects)
                try:
                    self.on_up()
                except Exception as error:
                    self.report(error)
                watched = [self._watch_server()]
                if self._sentinels is not None:
                    watched.append(self._watch_master(self._sentinels))
                await asyncio.gather(*watched)
            # Only a connection that lasted resets the delay, so that a server that accepts and closes connections isn't
            # flooded.
            if self.clock() - began > 5 * self._max_delay_s:
                delay_s = self._first_delay_s
            await asyncio.sleep(delay_s * random.uniform(0.5, 1.0))
            delay_s = min(2 * delay_s, self._max_delay_s)

    async def _next_look(self) -> bool:
        """Waits for the next look. Returns False when the connection is down."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._look_every_s):
                await self._is_down.wait()
        return not self._is_down.is_set()

    async def _watch_server(self) -> None:
        """Returns when the connection is down. A server that has become a replica answers READONLY, which ends it."""
        while await self._next_look():
            self._server_watch.look(self.call_packed)
            most = self._max_unanswered_looks
            if self._server_watch.unanswered_looks >= most:
                self.drop(f"no answer within {most * self._look_every_s:g} s")

    async def _watch_master(self, sentinels: Sentinels) -> None:
        """Returns when the connection is down. Drops it when the Sentinels name another master."""
        while await self._next_look():
            with contextlib.suppress(OSError):
                master = await sentinels.master()
                if master != self._address:
                    self.drop("the Sentinels name another master")

    async def _connect(self) -> RedisConnection:
        loop = asyncio.get_running_loop()
        server = self._server
        if server.path is not None:
            return (await loop.create_unix_connection(lambda: RedisConnection(self), server.path))[1]
        host, port = self._address = await self._sentinels.master() if self._sentinels else server.hosts[0]
        # The files may have been replaced since the last connection.
        context = server.tls_context()
        return (await loop.create_connection(lambda: RedisConnection(self), host, port, ssl=context))[1]

    async def _greet(self, connection: RedisConnection) -> None:
        server = self._server
        hello: list[Any] = [b"HELLO", 3]
        if server.password is not None:
            hello += [b"AUTH", server.username or "default", server.password]
        commands = [hello]
        if server.database:
            commands.append([b"SELECT", server.database])
        required = len(commands)
        commands += [[b"SCRIPT", b"LOAD", script.source] for script in ALL]
        loop = asyncio.get_running_loop()
        answers: list[asyncio.Future[Any]] = []
        for command in commands:
            future = loop.create_future()
            answers.append(future)
            connection.send(hiredis.pack_command(tuple(command)), partial(settle, future))
        outcomes = await asyncio.gather(*answers, return_exceptions=True)
        for number, outcome in enumerate(outcomes):
            # Without SCRIPT LOAD, the first call brings the script.
            may_fail = number >= required and str(outcome).startswith(_FORBIDDEN)
            if isinstance(outcome, BaseException) and not may_fail:
                raise outcome
        properties = outcomes[0]
        if isinstance(properties, dict) and properties.get(b"role") == b"replica":
            raise OSError("the server is a replica")

    def connection_lost(self, connection: RedisConnection, reason: str) -> None:
        if connection is not self.connection:
            return
        self.connection = None
        self._server_watch.reset()
        self._is_up.clear()
        self._is_down.set()
        if self._task is not None:
            log.warning("redis connection lost", reason=reason)
        try:
            self.on_down(reason)
        except Exception as error:
            self.report(error)
