"""Which workers hear what is published: control calls each by its topic `here:RUN.K`, and each that hears it answers.

A worker subscribes that topic last, so whoever is called there has all its topics. The subscription alone doesn't say
it: Redis keeps a connection that broke until it notices, and the old connection of a worker would stand in for the one
that it has yet to make. An answer shows that the connection works.
"""

import asyncio
import contextlib
import secrets
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any, Final

import hiredis

from redpoll.cluster.redis.keys import SHARDS, Keys
from redpoll.cluster.redis.link import Link, LinkDown
from redpoll.cluster.redis.scripts import WRITE

__all__ = ["RollCall", "answerers"]

_LIFETIME_S: Final = 10
_ANSWERED_WITHIN_S: Final = 1.9
_LOOKS_BETWEEN_CALLS: Final = 10
_MAX_CALLS: Final = 50


def answerers(link: Link, keys: Keys, process: str) -> dict[bytes, Callable[[bytes], None]]:
    """Who reads the messages on the topics `here:RUN.K` of a worker, by topic."""

    def answer(at: int, call: bytes) -> None:
        # An empty one only tries whether the topic may be used (redis/check.py).
        if call:
            key = keys.answers(call.decode())
            link.run(WRITE, (key,), (b"RPUSH", f"{process} {at}"))
            link.call(b"EXPIRE", key, _LIFETIME_S)

    return {keys.here_of(at, process): partial(answer, at) for at in range(SHARDS if keys.sharded else 1)}


class RollCall:
    """One for each break of control's connection. `present` has the workers that hear what is published, and `calls`
    says how often each subscribed worker was called.

    A worker is called again after `looks_between_calls` without its answer. One that leaves `max_calls` unanswered is
    busy or hangs: its subscription counts. Its supervisor replaces one that hangs, and all nodes would refuse publishes
    until then.
    """

    def __init__(
        self,
        link: Link,
        keys: Keys,
        *,
        looks_between_calls: int = _LOOKS_BETWEEN_CALLS,
        max_calls: int = _MAX_CALLS,
    ) -> None:
        self.present: set[str] = set()
        self.calls: dict[str, int] = {}
        self._link = link
        self._keys = keys
        self._id = secrets.token_hex(8)
        self._looks_between_calls = looks_between_calls
        self._max_calls = max_calls
        # How many looks ago each was called, and which of its connections, by a shard, haven't answered.
        self._looks: dict[str, int] = {}
        self._silent: dict[str, set[int]] = {}

    async def absent(self, processes: Collection[str]) -> set[str]:
        """Those of these worker processes, `RUN.K`, that haven't subscribed all their topics, or haven't answered. Call
        it every few milliseconds: it doesn't wait for the workers. If Redis doesn't answer, nothing is learned."""
        asked = [process for process in processes if process not in self.present]
        if asked:
            with contextlib.suppress(TimeoutError, LinkDown, hiredis.ReplyError):
                async with asyncio.timeout(_ANSWERED_WITHIN_S):
                    calls = self._call(await self._subscribed(asked))
                    answered = (b"LRANGE", self._keys.answers(self._id), 0, -1)
                    self._hear((await self._link.ask_all([*calls, answered]))[-1])
        return {process for process in asked if process not in self.present}

    async def _subscribed(self, processes: Sequence[str]) -> list[str]:
        keys = self._keys
        shards = range(SHARDS if keys.sharded else 1)
        topics = [keys.here_of(at, process) for process in processes for at in shards]
        counts = dict(zip(topics, await self._link.subscribers(topics), strict=True))
        return [process for process in processes if all(counts[keys.here_of(at, process)] for at in shards)]

    def _call(self, processes: Sequence[str]) -> list[tuple[Any, ...]]:
        commands: list[tuple[Any, ...]] = []
        for process in processes:
            calls, looks = self.calls.get(process, 0), self._looks.get(process, 0)
            if calls and looks < self._looks_between_calls:
                self._looks[process] = looks + 1
            elif calls == self._max_calls:
                self.present.add(process)
            else:
                self.calls[process], self._looks[process] = calls + 1, 0
                # In a Cluster, one topic on each master: the worker has a connection to each.
                shards = self._link.shard_of_each_connection()
                self._silent[process] = set(shards)
                commands += [(self._keys.publish, self._keys.here_of(at, process), self._id) for at in shards]
        return commands

    def _hear(self, answers: Sequence[bytes]) -> None:
        for answer in answers:
            process, at = answer.decode().split(" ")
            silent = self._silent.get(process)
            if silent is not None:
                silent.discard(int(at))
                if not silent:
                    self.present.add(process)
