"""Which workers hear what is published: control calls each by its topic `here:RUN.K`, and each that hears it answers.

A worker subscribes that topic last, so whoever is called there has all its topics. The subscription alone doesn't say
it: Redis keeps a connection that broke until it notices, and the old connection of a worker would stand in for the one
that it has yet to make. An answer shows that the connection works.

Calls and answers are published and nothing is written, so this works with a Redis that refuses writes.
"""

import asyncio
import contextlib
import secrets
from collections.abc import Callable, Collection, Iterable
from functools import partial
from typing import Any, Final

import hiredis

from redpoll.cluster.redis.keys import SHARDS, Keys, shard_of_name
from redpoll.cluster.redis.link import Link, LinkDown

__all__ = ["RollCall", "answerers"]

_REDIS_ANSWERS_S: Final = 1.9
_LOOKS_BETWEEN_CALLS: Final = 10


def answerers(link: Link, keys: Keys, process: str) -> dict[bytes, Callable[[bytes], None]]:
    """Who reads the messages on the topics `here:RUN.K` of a worker, by topic. A message is the topic of the answer."""

    def answer(at: int, answers: bytes) -> None:
        # An empty one only tries whether the topic may be used (redis/check.py).
        if answers:
            link.call(keys.publish, answers, f"{process} {at}")

    return {keys.here_of(at, process): partial(answer, at) for at in range(SHARDS if keys.sharded else 1)}


class RollCall:
    """One for each break of control's connection: `begin` it, call `absent` until it is empty, and `end` it. It needs
    the messages of the topic `answers`.

    A call of `absent` is a look. A subscribed worker is called again after `looks_between_calls` looks without its
    answer; `calls` says how often each was called. Redis has `redis_answers_s` seconds to answer a look.
    """

    def __init__(
        self,
        link: Link,
        keys: Keys,
        *,
        looks_between_calls: int = _LOOKS_BETWEEN_CALLS,
        redis_answers_s: float = _REDIS_ANSWERS_S,
    ) -> None:
        self.answers = keys.roll_call(secrets.token_hex(8))
        self.calls: dict[str, int] = {}
        self._link = link
        self._keys = keys
        self._looks_between_calls = looks_between_calls
        self._redis_answers_s = redis_answers_s
        self._refused = False
        self._present: set[str] = set()
        # How many looks ago each was called, and which of its connections, by a shard, haven't answered.
        self._looks: dict[str, int] = {}
        self._silent: dict[str, set[int]] = {}

    def begin(self) -> None:
        self._link.subscribe([self.answers], self._begun)

    def _begun(self, outcome: Any) -> None:
        # If an ACL refuses it, redis/check.py says so.
        self._refused = isinstance(outcome, hiredis.ReplyError)

    def end(self) -> None:
        if self._link.is_usable(shard_of_name(self.answers)):
            self._link.unsubscribe([self.answers])

    def received(self, answer: bytes) -> None:
        """Takes a message of the topic `answers`."""
        process, _, at = answer.partition(b" ")
        silent = self._silent.get(process.decode(errors="replace"))
        if silent is not None and at.isdigit():
            silent.discard(int(at))
            if not silent:
                self._present.add(process.decode())

    async def absent(self, processes: Collection[str]) -> set[str]:
        """Those of these worker processes, `RUN.K`, that haven't subscribed all their topics, or haven't answered. Call
        it every few milliseconds: it doesn't wait for the workers. If Redis doesn't answer, nothing is learned."""
        missing = {process for process in processes if process not in self._present}
        with contextlib.suppress(TimeoutError, LinkDown, hiredis.ReplyError):
            async with asyncio.timeout(self._redis_answers_s):
                subscribed = await self._subscribed(missing or processes)
                if missing:
                    self._call(subscribed)
                    return missing
                # The connection of the first may have broken while others were waited for.
                missing = set(processes).difference(subscribed)
                for process in missing:
                    self._present.remove(process)
                    del self.calls[process], self._looks[process], self._silent[process]
                return missing
        return missing or set(processes)

    async def _subscribed(self, processes: Collection[str]) -> list[str]:
        keys = self._keys
        shards = range(SHARDS if keys.sharded else 1)
        topics = [keys.here_of(at, process) for process in processes for at in shards]
        counts = dict(zip(topics, await self._link.subscribers(topics), strict=True))
        return [process for process in processes if all(counts[keys.here_of(at, process)] for at in shards)]

    def _call(self, processes: Iterable[str]) -> None:
        if self._refused:
            self._refused = False
            self.begin()
        for process in processes:
            calls, looks = self.calls.get(process, 0), self._looks.get(process, 0)
            if calls and looks < self._looks_between_calls:
                self._looks[process] = looks + 1
                continue
            self.calls[process], self._looks[process] = calls + 1, 0
            # In a Cluster, one topic on each master: the worker has a connection to each.
            shards = self._link.shard_of_each_connection()
            self._silent[process] = set(shards)
            for at in shards:
                self._link.call(self._keys.publish, self._keys.here_of(at, process), self.answers)
