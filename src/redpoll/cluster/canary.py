"""Finds out whether messages of Redis reach this worker: it publishes to itself and waits for what it published.

A connection over which Redis answers commands, but delivers no messages, looks healthy to every other check. Its
clients would miss events without notice. What counts is the order: Redis delivers a message next to the reply of its
PUBLISH, so a canary is missing if it hasn't arrived some time after that reply. A Redis that is merely slow loses none.
"""

import asyncio
from collections.abc import Callable, Collection
from typing import Any, Final

import hiredis
import structlog

from redpoll.cluster.redis.keys import SHARDS, Keys
from redpoll.cluster.redis.link import Link

__all__ = ["Canary"]

log = structlog.get_logger(__name__)

_MAX_MISSING: Final = 3


def _ignore(broken: bool) -> None:
    pass


class _Path:
    """The canaries of one connection: they are published on `topic`, which is in `shard`."""

    __slots__ = ("answered", "arrived", "lag_s", "missing", "number", "sent_at", "shard", "topic")

    def __init__(self, shard: int, topic: bytes) -> None:
        self.shard = shard
        self.topic = topic
        self.number = 0
        # When the present canary was sent, and whether its PUBLISH was answered. None: it has arrived.
        self.sent_at: float | None = None
        self.answered = False
        self.missing = 0
        self.lag_s = 0.0
        # Some canary of this path has arrived.
        self.arrived = False


class Canary:
    """One per worker. Call `connected` on each new connection, and `push` with what arrives on one of the `topics`.

    In a Redis Cluster a canary goes through each master. After three missing canaries of one connection that connection
    is replaced, and `broken` stays True until one has arrived over each; `on_change` is called with each new value.
    `missed` is how many are missing in total.
    """

    def __init__(
        self, link: Link, keys: Keys, run: str, k: int, every_s: float, on_change: Callable[[bool], None] = _ignore
    ) -> None:
        self.topics: dict[bytes, _Path] = {}
        self.broken = False
        self.missed = 0
        self._on_change = on_change
        self._link = link
        self._keys = keys
        self._run = run
        self._k = k
        self._every_s = every_s
        # Canaries so far, over all shards.
        self.sent = 0
        self._timer: asyncio.TimerHandle | None = None

    @property
    def lag_s(self) -> float:
        """How long the last canary took; in a Cluster, the slowest of them."""
        return max((path.lag_s for path in self.topics.values()), default=0.0)

    def connected(self) -> None:
        """Subscribes, and sends the first canary over each connection."""
        paths = [_Path(at, self._keys.canary(at, self._run, self._k)) for at in self._link.shard_of_each_connection()]
        self.topics = {path.topic: path for path in paths}
        self._link.subscribe(list(self.topics))
        for path in paths:
            self._send(path)
        self._wait()

    def connection_lost(self, shards: Collection[int] = range(SHARDS)) -> None:
        """The connections to the masters of these shards broke, or some of their shards are others' now."""
        for path in self.topics.values():
            if path.shard in shards:
                path.sent_at = None
        if len(shards) == SHARDS:
            self.close()

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def push(self, topic: bytes, payload: bytes) -> None:
        """Takes a message of one of the `topics`. Late canaries count as missing."""
        path = self.topics[topic]
        if path.sent_at is None or payload != b"%d" % path.number:
            return
        path.lag_s = self._link.clock() - path.sent_at
        path.sent_at = None
        path.missing = 0
        path.arrived = True
        if self.broken and all(path.arrived for path in self.topics.values()):
            self._set_broken(False)

    def _wait(self) -> None:
        self.close()
        self._timer = asyncio.get_running_loop().call_later(self._every_s, self._tick)

    def _tick(self) -> None:
        self._wait()
        for path in list(self.topics.values()):
            if path.sent_at is None:
                self._send(path)
            elif path.answered:
                self.missed += 1
                path.missing += 1
                if path.missing < _MAX_MISSING:
                    self._send(path)
                else:
                    self._set_broken(True)
                    self._link.drop_connection(path.shard, f"{_MAX_MISSING} messages to ourselves did not arrive")
                    return

    def _send(self, path: _Path) -> None:
        self.sent += 1
        number = path.number = self.sent
        path.sent_at = self._link.clock()
        path.answered = False

        def done(reply: Any) -> None:
            if number != path.number:
                return
            if isinstance(reply, hiredis.ReplyError):
                # Such as -BUSY: nothing was published, so nothing is missing. The next tick sends another one.
                path.sent_at = None
            elif not isinstance(reply, Exception):
                path.answered = True

        self._link.call(self._keys.publish, path.topic, b"%d" % number, done=done)

    def _set_broken(self, broken: bool) -> None:
        if broken is not self.broken:
            self.broken = broken
            if broken:
                log.error("redis delivers no messages")
            else:
                log.info("redis delivers messages again")
            self._on_change(broken)
