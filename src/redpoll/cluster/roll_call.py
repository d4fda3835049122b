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
# A worker is called again after so many looks without its answer.
_LOOKS_BETWEEN_CALLS: Final = 10
# A subscribed worker that leaves so many calls unanswered is busy or hangs: its subscription counts. Its supervisor
# replaces it if it hangs, and until then all nodes would refuse publishes.
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


class _Called:
    """A worker that was called: how often, how many looks ago, and which connections haven't answered."""

    __slots__ = ("calls", "looks", "silent")

    def __init__(self) -> None:
        self.calls = 0
        self.looks = 0
        self.silent: set[int] = set()


class RollCall:
    """One for each break of control's connection; `present` has the workers that hear what is published."""

    def __init__(self, link: Link, keys: Keys) -> None:
        self.present: set[str] = set()
        self._link = link
        self._keys = keys
        self._id = secrets.token_hex(8)
        self._called: dict[str, _Called] = {}

    async def absent(self, processes: Collection[str]) -> set[str]:
        """Those of these worker processes, `RUN.K`, that haven't subscribed all their topics, or haven't answered. Call
        it every few milliseconds: it doesn't wait for the workers. If Redis doesn't answer, nothing is learned."""
        asked = [process for process in processes if process not in self.present]
        if asked:
            with contextlib.suppress(TimeoutError, LinkDown, hiredis.ReplyError):
                async with asyncio.timeout(_ANSWERED_WITHIN_S):
                    commands = self._call(await self._subscribed(asked))
                    *_, answers = await self._link.ask_all(
                        [*commands, (b"LRANGE", self._keys.answers(self._id), 0, -1)]
                    )
                    self._hear(answers)
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
            called = self._called.setdefault(process, _Called())
            if called.calls and called.looks < _LOOKS_BETWEEN_CALLS:
                called.looks += 1
            elif called.calls == _MAX_CALLS:
                self.present.add(process)
            else:
                called.calls += 1
                called.looks = 0
                # In a Cluster, one topic on each master: the worker has a connection to each.
                called.silent = set(self._link.shard_of_each_connection())
                publish, call = self._keys.publish, self._id
                commands += [(publish, self._keys.here_of(at, process), call) for at in sorted(called.silent)]
        return commands

    def _hear(self, answers: Sequence[bytes]) -> None:
        for answer in answers:
            process, at = answer.decode().split(" ")
            called = self._called.get(process)
            if called is not None:
                called.silent.discard(int(at))
                if not called.silent:
                    self.present.add(process)
