"""Who this worker is in Redis: its name W, the connection that may speak for it, and its beats.

W is `<run>.<k>.<n>`: the supervisor's start, the process it started, and how often that process was fenced
(cluster.md rule 4). Knows nothing of channels.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import hiredis
import structlog

from redpoll.cluster.keys import SHARDS, Keys
from redpoll.cluster.link import Link, LinkDown
from redpoll.cluster.scripts import BEAT, BURY, REGISTER, Script

__all__ = ["Incarnation"]

log = structlog.get_logger(__name__)


class Incarnation:
    """`w` (`name` as bytes) and `gen` as the scripts want them. `rise` on every new connection, and after
    being fenced.

    `on_fenced()` is called when a beat finds that this W was given up; `on_beat(dirver)` with the directory's
    version as each beat found it. `heard_at` is when Redis last answered one.
    """

    def __init__(
        self,
        link: Link,
        keys: Keys,
        run: str,
        k: int,
        *,
        on_fenced: Callable[[], None],
        on_beat: Callable[[bytes | None], None],
        beat_s: float = 1.0,
        unanswered_s: float = 10.0,
    ) -> None:
        self.n = 0
        self.gen = 0
        self.heard_at = float("-inf")
        self.errors = 0
        self._link = link
        self._keys = keys
        self._run = run
        self._k = k
        self._on_fenced = on_fenced
        self._on_beat = on_beat
        self._beat_s = beat_s
        self._unanswered_s = unanswered_s
        self._asked_at: float | None = None
        self._connection = 0
        self._registered = False
        self._timer: asyncio.TimerHandle | None = None
        self._take_name()

    def _take_name(self) -> None:
        self.w = f"{self._run}.{self._k}.{self.n}"
        self.name = self.w.encode()

    def worker_keys(self) -> list[bytes]:
        """This W's hash in each shard."""
        w = self.w
        return [self._keys.worker(at, w) for at in range(SHARDS)]

    def fence(self) -> None:
        """Takes the next W; nothing was said in its name yet."""
        log.warning("fenced", w=self.w)
        self._registered = False
        self.n += 1
        self.gen = 0
        self._take_name()

    def down(self) -> None:
        """The connection is gone: no answer to a beat is awaited any more."""
        self._asked_at = None
        self._registered = False
        self._connection += 1

    async def rise(self) -> dict[str, str]:
        """Makes this connection the one that speaks for the worker, under the next W where the present one
        was given up. Returns what Redis says W holds: `A:C` to kind and count.

        Raises LinkDown when the connection breaks meanwhile, or doesn't answer.
        """
        self._registered = False
        while True:
            fresh = int(self.gen == 0)
            self.gen += 1
            (beat,) = await self._insist([(BEAT, self._beat_keys(), (self.w, fresh))])
            if beat[0] == b"OK":
                self._beaten(beat)
                answers = await self._insist([(REGISTER, (key,), (self.gen, fresh)) for key in self.worker_keys()])
                if all(answer[0] == b"OK" for answer in answers) and await self._still_listed(fresh):
                    self._registered = True
                    return {
                        field.decode(): value.decode()
                        for answer in answers
                        for field, value in zip(answer[1][::2], answer[1][1::2], strict=True)
                        if field != b"gen"
                    }
            self.fence()

    async def _still_listed(self, fresh: int) -> bool:
        # We may have been given up and reaped between the first beat and the registrations, by a control that
        # found nothing to fence. Nobody would ever look for what is held in such a name.
        if not fresh:
            return True
        (beat,) = await self._insist([(BEAT, self._beat_keys(), (self.w, 0))])
        if beat[0] == b"OK":
            return True
        await self._insist([(BURY, (key,), ()) for key in self.worker_keys()])
        return False

    async def bury(self) -> bool:
        """The clean end: takes W out of Redis where it holds nothing any more. False: left to the reaper."""
        if not self._registered:
            return False
        self._registered = False
        answers = await self._insist([(BURY, (key,), ()) for key in self.worker_keys()])
        if any(answer != 1 for answer in answers):
            return False
        await self._link.ask(b"HDEL", self._keys.beat, self.w)
        return True

    def start(self) -> None:
        """Begins to beat; a beat is sent when W is registered, and at most one is awaited."""
        if self._timer is None:
            self._tick()

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _tick(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(self._beat_s, self._tick)
        now = self._link.clock()
        if self._asked_at is not None:
            if now - self._asked_at > self._unanswered_s:
                self._link.drop(f"a beat was unanswered for {self._unanswered_s:g} s")
        elif self._registered and self._link.up:
            self._asked_at = now
            w, connection = self.w, self._connection

            def done(reply: Any) -> None:
                if connection == self._connection:
                    self._asked_at = None
                if isinstance(reply, hiredis.ReplyError):
                    self.errors += 1
                elif isinstance(reply, list):
                    if reply[0] == b"OK":
                        self._beaten(reply)
                    elif w == self.w and self._registered:
                        self._on_fenced()

            self._link.run(BEAT, self._beat_keys(), (w, 0), done)

    def _beat_keys(self) -> tuple[bytes, bytes]:
        return self._keys.beat, self._keys.directory_version

    def _beaten(self, reply: list[Any]) -> None:
        self.heard_at = self._link.clock()
        self._on_beat(reply[2])

    async def _insist(self, runs: Sequence[tuple[Script, Sequence[bytes], Sequence[Any]]]) -> list[Any]:
        # All scripts in one pipeline; those that fail for a reason of the server's again, until they don't.
        answers: list[Any] = [None] * len(runs)
        due = list(range(len(runs)))
        delay_s = 0.05
        while True:
            try:
                async with asyncio.timeout(self._unanswered_s):
                    found = await asyncio.gather(*(self._link.execute(*runs[at]) for at in due), return_exceptions=True)
            except TimeoutError:
                self._link.drop(f"no answer within {self._unanswered_s:g} s")
                raise LinkDown(sent=True) from None
            for at, answer in zip(due, found, strict=True):
                if isinstance(answer, BaseException) and not isinstance(answer, hiredis.ReplyError):
                    raise answer
                answers[at] = answer
            due = [at for at in due if isinstance(answers[at], hiredis.ReplyError)]
            if not due:
                return answers
            self.errors += 1
            await asyncio.sleep(delay_s)
            delay_s = min(2 * delay_s, 1.0)
