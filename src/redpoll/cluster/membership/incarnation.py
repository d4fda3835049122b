"""This worker's name in Redis, the connection that may speak for it, and its heartbeats.

The name W is `<run>.<k>.<n>`: `run` is the supervisor's start, `k` the process that it started, `n` how often that
process was fenced (cluster/README.md "Worker names and fencing"). This module doesn't know channels.
"""

import asyncio
from collections.abc import Callable, Collection, Sequence
from typing import Any, Final

import hiredis
import structlog

from redpoll.cluster.directory import Directory
from redpoll.cluster.membership.timings import Timings
from redpoll.cluster.redis.keys import SHARDS, Keys, shard_of_name
from redpoll.cluster.redis.link import Link, LinkDown
from redpoll.cluster.redis.scripts import BEAT, BURY, OK, REGISTER, Script
from redpoll.cluster.redis.values import WorkerId

__all__ = ["Incarnation"]

log = structlog.get_logger(__name__)

_FIRST_RETRY_S: Final = 0.05
_MAX_RETRY_S: Final = 1.0


def _ignore() -> None:
    pass


def _ignore_id(last: bytes | None) -> None:
    pass


class Incarnation:
    """`worker_id` (`name` as bytes) and `generations`, by shard, are what the scripts need. Call `register` on every
    new connection and after `adopt_next_name`, and `register_in` when shards of a Cluster are back.

    `on_fenced()` is called when a beat finds that this W was given up. Every beat also brings the version of the
    directory, which goes to `directory`, and the id of the last entry of revoked grants, for `on_revoked_grant`.
    `answered_at` is when Redis last answered one.
    """

    def __init__(
        self,
        link: Link,
        keys: Keys,
        run: str,
        k: int,
        directory: Directory,
        timings: Timings,
        on_fenced: Callable[[], None] = _ignore,
        on_revoked_grant: Callable[[bytes | None], None] = _ignore_id,
    ) -> None:
        self.number = 0
        self.generations = [0] * SHARDS
        self.answered_at = float("-inf")
        self.errors = 0
        self._on_fenced = on_fenced
        self._on_revoked_grant = on_revoked_grant
        self._link = link
        self._keys = keys
        self._run = run
        self._k = k
        self._directory = directory
        self._beat_s = timings.beat_s
        self._unanswered_s = timings.unanswered_s
        # Ticks since the beat that is unanswered was sent; None if there is none. Ticks are counted, not seconds: after
        # a stall of this process the answer may be here, but not read yet.
        self._unanswered_ticks: int | None = None
        self._connection_number = 0
        self._registered = False
        self._timer: asyncio.TimerHandle | None = None
        self._set_name()

    def _set_name(self) -> None:
        self.worker_id = str(WorkerId(self._run, self._k, self.number))
        self.name = self.worker_id.encode()

    def worker_keys(self) -> list[bytes]:
        """This W's hash in each shard."""
        w = self.worker_id
        return [self._keys.worker(at, w) for at in range(SHARDS)]

    def last_topics(self, shards: Collection[int]) -> list[tuple[Collection[int], list[bytes]]]:
        """What is subscribed after all other topics of these shards: `sys`, and the topics by which control sees that
        this was done. Each part with the shards that it is for."""
        keys, process = self._keys, f"{self._run}.{self._k}"
        if not keys.sharded:
            return [(shards, [keys.sys, keys.here_of(0, process)])]
        return [((at,), [*([keys.sys] if at == 0 else ()), keys.here_of(at, process)]) for at in shards]

    @property
    def used(self) -> bool:
        """Redis may know this W."""
        return self.generations[0] > 0

    def adopt_next_name(self) -> None:
        """This W was given up: takes the next one, which is not registered yet."""
        log.warning("worker fenced", w=self.worker_id)
        self._registered = False
        self.number += 1
        self.generations = [0] * SHARDS
        self._set_name()

    def connection_lost(self) -> None:
        """Stop waiting for the answer to a beat."""
        self._unanswered_ticks = None
        self._registered = False
        self._connection_number += 1

    async def register(self) -> list[list[bytes]]:
        """Makes this connection the one that speaks for the worker, under the next W if Redis gave the present one up.
        Returns what Redis says that W holds, by shard: `A:C`, then its kind and count, and so on. `gen` is among them.

        Raises LinkDown when the connection breaks meanwhile, or doesn't answer.
        """
        self._registered = False
        while True:
            fresh = int(not self.used)
            self._advance_generations(range(SHARDS))
            (beat,) = await self._run_all([(BEAT, self._beat_keys(), (self.worker_id, fresh))])
            if beat[0] == OK:
                self._beat_answered(beat)
                held = await self._register_in(range(SHARDS), fresh)
                if held is not None and await self._still_listed(fresh):
                    self._registered = True
                    return held
            self.adopt_next_name()

    async def register_in(self, shards: Collection[int]) -> list[list[bytes]] | None:
        """As `register`, in the shards of a Cluster that were lost and are back. None: W was given up."""
        self._advance_generations(shards)
        (beat,) = await self._run_all([(BEAT, self._beat_keys(), (self.worker_id, 0))])
        if beat[0] != OK:
            return None
        self._beat_answered(beat)
        return await self._register_in(shards, 0)

    def _advance_generations(self, shards: Collection[int]) -> None:
        for at in shards:
            self.generations[at] += 1

    async def _register_in(self, shards: Collection[int], fresh: int) -> list[list[bytes]] | None:
        answers = await self._run_all(
            [(REGISTER, (self._keys.worker(at, self.worker_id),), (self.generations[at], fresh)) for at in shards]
        )
        return [answer[1] for answer in answers] if all(answer[0] == OK for answer in answers) else None

    async def _still_listed(self, fresh: int) -> bool:
        # Control may have reaped this W between the first beat and the registrations, when it found nothing to fence.
        # What is held under a name that is not in the beat table would never be reaped.
        if not fresh:
            return True
        (beat,) = await self._run_all([(BEAT, self._beat_keys(), (self.worker_id, 0))])
        if beat[0] == OK:
            return True
        await self._run_all([(BURY, (key,), ()) for key in self.worker_keys()])
        return False

    async def bury(self) -> bool:
        """The clean end: removes W from Redis if it holds nothing. False: the reaper will remove it."""
        if not self._registered:
            return False
        self._registered = False
        answers = await self._run_all([(BURY, (key,), ()) for key in self.worker_keys()])
        if any(answer != 1 for answer in answers):
            return False
        await self._link.ask(b"HDEL", self._keys.beat, self.worker_id)
        return True

    def start(self) -> None:
        """Starts the heartbeat. Beats are sent while W is registered, and at most one is awaited."""
        if self._timer is None:
            self._tick()

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _tick(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(self._beat_s, self._tick)
        if self._unanswered_ticks is not None:
            self._unanswered_ticks += 1
            if self._unanswered_ticks * self._beat_s > self._unanswered_s:
                self._link.drop_connection(0, f"a beat was unanswered for {self._unanswered_s:g} s")
        elif self._registered:
            self._unanswered_ticks = 0
            w, connection_number = self.worker_id, self._connection_number

            def done(reply: Any) -> None:
                if connection_number == self._connection_number:
                    self._unanswered_ticks = None
                if isinstance(reply, hiredis.ReplyError):
                    self.errors += 1
                elif isinstance(reply, list):
                    if reply[0] == OK:
                        self._beat_answered(reply)
                    elif w == self.worker_id and self._registered:
                        self._on_fenced()

            self._link.run(BEAT, self._beat_keys(), (w, 0), done)

    def _beat_keys(self) -> tuple[bytes, bytes, bytes]:
        return self._keys.beat, self._keys.directory_version, self._keys.revoked_grants

    def _beat_answered(self, reply: list[Any]) -> None:
        self.answered_at = self._link.clock()
        _, directory_version, last_revoked_grant = reply
        self._directory.check_version(directory_version)
        self._on_revoked_grant(last_revoked_grant)

    async def _run_all(self, calls: Sequence[tuple[Script, Sequence[bytes], Sequence[Any]]]) -> list[Any]:
        # All scripts in one pipeline. Those that Redis answers with an error are repeated until they succeed.
        answers: list[Any] = [None] * len(calls)
        due = list(range(len(calls)))
        delay_s = _FIRST_RETRY_S
        while True:
            try:
                async with asyncio.timeout(self._unanswered_s):
                    results = await asyncio.gather(
                        *(self._link.execute(*calls[at]) for at in due), return_exceptions=True
                    )
            except TimeoutError:
                for shard in {shard_of_name(calls[at][1][0]) for at in due}:
                    self._link.drop_connection(shard, f"no answer within {self._unanswered_s:g} s")
                raise LinkDown(sent=True) from None
            for at, answer in zip(due, results, strict=True):
                if isinstance(answer, BaseException) and not isinstance(answer, hiredis.ReplyError):
                    raise answer
                answers[at] = answer
            due = [at for at in due if isinstance(answers[at], hiredis.ReplyError)]
            if not due:
                return answers
            self.errors += 1
            await asyncio.sleep(delay_s)
            delay_s = min(2 * delay_s, _MAX_RETRY_S)
