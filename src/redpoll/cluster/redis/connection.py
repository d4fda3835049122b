"""One TCP or Unix connection to Redis: turns bytes into replies and pushes, and commands into bytes.

Commands are queued and written once per loop tick. While the kernel takes no more, because Redis doesn't read, they
wait here, and publishes that nobody waits for any more are then left out. Replies and pushes are handed out in the
order in which Redis made them, in slices, so that the other work of the loop isn't delayed. A connection that has
broken is never used again; link.py opens the next one.
"""

import asyncio
import contextlib
import os
from collections import deque
from collections.abc import Callable, Collection
from itertools import chain, repeat
from time import monotonic
from typing import Any, Final, Protocol, cast

import hiredis

from redpoll._replies import hand_out
from redpoll.cluster.redis.calls import Done, LinkDown, ShardCall, Topics
from redpoll.cluster.redis.keys import shard_of_name, shard_of_slot

__all__ = ["Owner", "RedisConnection"]

# hiredis moves the rest of its buffer for each KiB that it has parsed, so bigger reads gain nothing: between 16 and
# 256 KiB, smaller was faster, by at most a tenth (bench/parts/bus.py).
_READ_BYTES: Final = 32 * 1024
_MAX_PARSER_BYTES: Final = 1024 * 1024
# More than a kernel holds for a connection, which is 6 MiB at most unless its settings were changed.
_MAX_REST_READS: Final = 256

# How long one pass of the loop may hand out replies and pushes; clients are served before the rest. The clock is read
# once in so many of them.
_SLICE_S: Final = 0.002
_ITEMS_PER_LOOK: Final = 16

# What waited for the kernel is written in pieces of about this size, of at most so many calls.
_WRITE_BYTES: Final = 64 * 1024
_WRITE_CALLS: Final = 256

_MAX_UNANSWERED: Final = 50_000
_MAX_UNANSWERED_BYTES: Final = 64 * 1024 * 1024

# Answers of a server that can't serve us now. They count as a broken connection.
_UNAVAILABLE: Final = ("LOADING", "READONLY", "MASTERDOWN", "CLUSTERDOWN")

_NOTHING: Final = object()
_PING: Final = b"*1\r\n$4\r\nPING\r\n"


def _ignore(reply: Any) -> None:
    pass


class Owner(Protocol):
    """What a connection needs of the link that it belongs to.

    `on_push(topic, payload)` is called for each message, `on_moved(shard)` when another master has the slot of a shard
    (`sharded` connections only). `errors` counts error replies.
    """

    on_push: Callable[[bytes, bytes], None]
    on_moved: Callable[[int], None]
    sharded: bool
    errors: int

    def report(self, error: Exception) -> None:
        """A handler raised."""

    def connection_lost(self, connection: "RedisConnection", reason: str) -> None:
        """Called once, before the unanswered calls end with LinkDown."""


class RedisConnection(asyncio.BufferedProtocol):
    """One TCP or Unix connection: parses bytes into replies and pushes, packs commands into bytes.

    `pending` are those who wait for the answers to what was written. `queued` counts the commands that were written,
    `queued_bytes` and `answered_bytes` their bytes. `blocked`: the kernel takes no more. `transport` is None before and
    after the connection.
    """

    def __init__(self, owner: Owner) -> None:
        self.pending: deque[Done] = deque()
        self.lost = False
        self.lost_reason = ""
        self.queued = 0
        self.queued_bytes = 0
        self.answered_bytes = 0
        self._owner = owner
        self._loop = asyncio.get_running_loop()
        self._out: list[bytes] = []
        # The commands in `_out`.
        self._out_count = 0
        # (commands queued, bytes queued) at each write; they tell how many of the bytes are answered.
        self._marks: deque[tuple[int, int]] = deque()
        self.blocked = False
        # What is to be written when the kernel takes more: commands, how many they are, and whose. They are not among
        # `pending` yet.
        self._held: deque[tuple[bytes, int, Done]] = deque()
        # The next slice of it is written in the next pass of the loop.
        self._continues = False
        self._held_count = 0
        self._held_bytes = 0
        self._is_answered_last = False
        # A view: of two TLS records, asyncio reads the second one into a slice of it.
        self._buffer = memoryview(bytearray(_READ_BYTES))
        reader = hiredis.Reader(notEnoughData=_NOTHING)
        reader.setmaxbuf(_MAX_PARSER_BYTES)
        self._feed = reader.feed
        self._gets = reader.gets
        self.transport: asyncio.Transport | None = None
        # By what the connection ended.
        self._ended_by = ""
        # The shard of the last SUNSUBSCRIBE that was confirmed, and how many commands were answered then.
        self._unsubscribed = (-1, 0)
        # More was read than one slice could hand out, and nothing is read meanwhile.
        self._behind = False

    @property
    def congested(self) -> bool:
        """More is unanswered than a healthy Redis leaves."""
        unanswered_bytes = self.queued_bytes - self.answered_bytes + self._held_bytes
        unanswered = len(self.pending) + self._held_count
        return unanswered > _MAX_UNANSWERED or unanswered_bytes > _MAX_UNANSWERED_BYTES

    @property
    def unanswered(self) -> int:
        """How many commands are not answered, or not written yet."""
        return len(self.pending) + self._held_count

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are not subclasses of asyncio's.
        self.transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        """Redis or the kernel ended the connection. What came before that is handed out first: after a write that
        failed, nobody has read it."""
        if self.lost:
            return
        self._ended_by = str(exc) if exc else "closed by Redis"
        self.blocked = True
        self._read_rest()
        self.transport = None
        if not self._behind:
            self._hand_out()

    def _read_rest(self) -> None:
        # During this call uvloop still has the socket. Over TLS the bytes mean nothing here, and are left.
        assert self.transport is not None
        if self.transport.get_extra_info("ssl_object") is not None:
            return
        descriptor = self.transport.get_extra_info("socket").fileno()
        with contextlib.suppress(OSError):
            for _ in range(_MAX_REST_READS):
                data = os.read(descriptor, _READ_BYTES)
                if not data:
                    return
                self._feed(data)

    def send(self, commands: bytes, done: Done, count: int = 1) -> None:
        """Queues commands for this tick's write. `done` gets the reply of each."""
        if self.blocked or self._held:
            self._hold(commands, count, done)
            return
        if not self._out:
            self._loop.call_soon(self.flush)
            self._begin_write()
        self._out.append(commands)
        self._out_count += count
        self.pending.extend(repeat(done, count))

    def send_now(self, commands: bytes, count: int, done: Done, last: bytes, done_of_last: Done) -> None:
        """As `send` of both, written at once."""
        if self.blocked or self._held:
            self._hold(commands, count, done)
            self._hold(last, 1, done_of_last)
            return
        if not self._out:
            self._begin_write()
        self._out += (commands, last)
        self._out_count += count + 1
        self.pending.extend(repeat(done, count))
        self.pending.append(done_of_last)
        self.flush()

    def be_answered_last(self) -> None:
        """From now on, Redis sends what it publishes for this connection before it sends the replies.

        Redis collects the output of one pass of its loop, and then writes to its clients in reverse order: to the one
        that got output last, first. A publisher gets its reply after its subscribers get the message. So each write
        begins with a command that publishes nothing: the publisher gets output first, and is written to last.
        """
        self._is_answered_last = True

    def _begin_write(self) -> None:
        if self._is_answered_last:
            self._out.append(_PING)
            self._out_count += 1
            self.pending.append(_ignore)

    def flush(self) -> None:
        if self.transport is None:
            # What is left counts as not sent.
            return
        if self._out and not self.lost:
            self._write(b"".join(self._out), self._out_count)
        self._out.clear()
        self._out_count = 0

    def _write(self, commands: bytes, count: int) -> None:
        assert self.transport is not None
        self.queued += count
        self.queued_bytes += len(commands)
        self._marks.append((self.queued, self.queued_bytes))
        self.transport.write(commands)

    def pause_writing(self) -> None:
        self.blocked = True

    def resume_writing(self) -> None:
        self.blocked = False
        if not self._continues:
            self._write_held()

    def _hold(self, commands: bytes, count: int, done: Done) -> None:
        self._held.append((commands, count, done))
        self._held_count += count
        self._held_bytes += len(commands)

    def _write_held(self) -> None:
        """Writes what waited, as far as the kernel takes it, a slice in each pass of the loop."""
        self._continues = False
        until = monotonic() + _SLICE_S
        # What was queued before the kernel took no more comes first.
        self.flush()
        while self._held and not self.blocked:
            self._write_piece()
            if self._held and monotonic() > until:
                self._continues = True
                self._loop.call_soon(self._write_held)
                return

    def _write_piece(self) -> None:
        size = 0
        for _ in range(min(len(self._held), _WRITE_CALLS)):
            commands, count, done = self._held.popleft()
            self._held_count -= count
            self._held_bytes -= len(commands)
            if not getattr(done, "over", False):
                if not self._out:
                    self._begin_write()
                self._out.append(commands)
                self._out_count += count
                self.pending.extend(repeat(done, count))
                size += len(commands)
                if size >= _WRITE_BYTES:
                    break
        self.flush()

    def get_buffer(self, sizehint: int) -> memoryview:
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
        until = monotonic() + _SLICE_S
        while True:
            try:
                behind = self._hand_out_until(until)
                break
            except hiredis.ProtocolError as error:
                self.lose(f"not RESP: {error}")
                return
            except Exception as error:
                # An exception in one handler must not stop the others.
                self._owner.report(error)
        if self.lost:
            return
        if behind:
            if self.transport is not None:
                self.transport.pause_reading()
            self._loop.call_soon(self._hand_out)
        elif self.transport is None:
            self.lose(self._ended_by)
        elif self._behind:
            self.transport.resume_reading()
        self._behind = behind

    def _hand_out_until(self, until: float) -> bool:
        # True: the time was over before the items were.
        on_push = self._owner.on_push
        behind = False
        while hand_out(self, self._gets, _NOTHING, self.pending, on_push, _ITEMS_PER_LOOK):
            if monotonic() > until:
                behind = True
                break
        if self.lost:
            return False
        answered = self._answered
        while self._marks and self._marks[0][0] <= answered:
            self.answered_bytes = self._marks.popleft()[1]
        return behind

    @property
    def _answered(self) -> int:
        """How many commands were answered."""
        return self.queued - (len(self.pending) - self._out_count)

    def failed(self, reply: Any) -> None:
        """Called by `hand_out`: an error reply, or a reply without a command."""
        if not self.pending:
            self.lose("an answer without a command")
            return
        is_moved = self._owner.sharded and str(reply).startswith("MOVED")
        # `MOVED <slot> <address>`
        shard = shard_of_slot(int(str(reply).split(" ")[1])) if is_moved else 0
        if is_moved and self._unsubscribed == (shard, self._answered):
            # What looked like the confirmation of our SUNSUBSCRIBE was Redis taking the subscription away, and this is
            # the answer to it; or it is that of the next command.
            self.lose("a slot moved while a topic of it was unsubscribed")
            return
        done = self.pending.popleft()
        self._owner.errors += 1
        if is_moved:
            done(LinkDown(sent=False))
            self._owner.on_moved(shard)
        elif str(reply).startswith(_UNAVAILABLE):
            done(LinkDown(sent=False))
            self.lose(str(reply))
        else:
            done(reply)

    def pushed(self, push: list[Any]) -> None:
        """Called by `hand_out`: a push that isn't a message, such as the confirmation of a SUBSCRIBE."""
        kind, topic = push[0], push[1]
        if not kind.endswith(b"subscribe"):
            return
        entry = self.pending[0] if self.pending else None
        if kind == b"sunsubscribe" and not (type(entry) is Topics and entry.is_confirmed_by(kind, topic)):
            # We didn't ask for it: the slot is another master's now.
            self._owner.on_moved(shard_of_name(topic))
            return
        if type(entry) is not Topics:
            self.lose("an unexpected change of a subscription")
            return
        entry.left -= 1
        if entry.left == 0:
            self.pending.popleft()
            if kind == b"sunsubscribe":
                self._unsubscribed = (shard_of_name(topic), self._answered)
            entry.done(None)

    def abandon(self, shards: Collection[int]) -> None:
        """Each awaited ShardCall of these shards ends with LinkDown now, and the connection goes on. What Redis answers
        to them later is ignored."""
        ended: list[Done] = []
        for entry in chain(self.pending, (done for _, _, done in self._held)):
            # Of a script or a SUBSCRIBE, the call is within the entry.
            call = entry if type(entry) is ShardCall else getattr(entry, "done", None)
            if type(call) is ShardCall and call.shard in shards:
                ended.append(call.done)
                call.done = _ignore
        for done in ended:
            try:
                done(LinkDown(sent=True))
            except Exception as error:
                self._owner.report(error)

    def lose(self, reason: str) -> None:
        """Ends the connection, whatever its state. Every awaited call ends with LinkDown. Idempotent."""
        if self.lost:
            return
        self.lost = True
        self.lost_reason = reason
        if self.transport is not None:
            self.transport.abort()
        self._owner.connection_lost(self, reason)
        waiting, self.pending = self.pending, deque()
        sent = len(waiting) - self._out_count
        for _, count, done in self._held:
            waiting.extend(repeat(done, count))
        self._held.clear()
        self._held_count = self._held_bytes = 0
        for at, done in enumerate(waiting):
            try:
                done(LinkDown(sent=at < sent))
            except Exception as error:
                self._owner.report(error)
