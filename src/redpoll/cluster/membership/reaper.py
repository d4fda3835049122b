"""Takes dead workers out of Redis: their counts, members, signed-in users and connections, and at last their
names.

Control runs the only one. Who is dead the supervisor's list says at once, and the beats say after four looks
that found the same; a live worker reaped by mistake costs its members one removal and one return (cluster.md
rule 5). Every step can be repeated, so a reap that broke off is begun again.
"""

import asyncio
from collections.abc import Callable
from typing import Any, Final

import hiredis
import structlog

from redpoll.cluster.directory import read_app
from redpoll.cluster.keys import SHARDS, Keys
from redpoll.cluster.link import Clock, Link, LinkDown
from redpoll.cluster.membership.hold_call import CHANNEL, PRESENCE, hook_flags
from redpoll.cluster.scripts import BURY, FENCE, HOLD

__all__ = ["Beats", "Reaper"]

log = structlog.get_logger(__name__)

_FENCED_BEAT: Final = b"-1"
_SCAN_COUNT: Final = 200
# What another client of Redis may have to wait behind: 20 calls of at most 100 users are about 10 ms.
_MAX_GONE: Final = 100
_MAX_IN_FLIGHT: Final = 20


def _no_hooks(app_id: str) -> str:
    return ""


class Beats:
    """What the looks at the beat table say about who is dead. Arithmetic only; `now` is control's clock.

    A beat that stayed the same over `looks` further looks is a dead worker's. After a pause of more than
    `gap_s` the count begins anew: what stalled us may have stalled them.
    """

    def __init__(self, run: str, *, looks: int = 4, gap_s: float = 2.0) -> None:
        self.table: dict[str, bytes] = {}
        self._run = run
        self._looks = looks
        self._gap_s = gap_s
        self._same: dict[str, int] = {}
        self._looked_at: float | None = None
        self._alive: set[int] = set()
        self._greatest = -1

    def set_alive(self, ks: set[int], greatest: int) -> None:
        """The supervisor's word: `k` of its living workers, and the greatest it ever gave."""
        self._alive = set(ks)
        self._greatest = greatest

    def look(self, table: dict[str, bytes], now: float) -> None:
        """Takes what the table held when it was looked at, `now` being the time of the reply."""
        gap = self._looked_at is None or now - self._looked_at > self._gap_s
        self._same = {
            w: self._same.get(w, 0) + 1 if not gap and self.table.get(w) == beat else 0 for w, beat in table.items()
        }
        self.table = table
        self._looked_at = now

    def dead(self) -> list[str]:
        """Those of the last look that are to be reaped."""
        return [w for w, beat in self.table.items() if self._is_dead(w, beat)]

    def _is_dead(self, w: str, beat: bytes) -> bool:
        return beat == _FENCED_BEAT or self._same.get(w, 0) >= self._looks or self.is_struck(w)

    def is_struck(self, w: str) -> bool:
        """Whether the supervisor's list alone says that this worker ended."""
        run, k, _ = w.split(".")
        return run == self._run and int(k) not in self._alive and int(k) <= self._greatest


class Reaper:
    """`run` looks once a second and reaps; `set_alive` has it act at once. `reaped` counts workers.

    A look that is unanswered for `unanswered_s` has the link drop its connection, as a worker's beat does.
    `hooks_of(app_id)` is `App.hooks` as it is now, "" where there is no such app: webhooks are told what a dead
    worker's members and channels came to, by the reaper alone. `debounced` as in Commits.
    """

    def __init__(
        self,
        link: Link,
        keys: Keys,
        run: str,
        *,
        hooks_of: Callable[[str], str] = _no_hooks,
        debounced: bool = True,
        look_s: float = 1.0,
        looks: int = 4,
        gap_s: float = 2.0,
        unanswered_s: float = 10.0,
    ) -> None:
        self.reaped = 0
        self._link = link
        self._keys = keys
        self._hooks_of = hooks_of
        self._debounced = debounced
        self._look_s = look_s
        self._unanswered_s = unanswered_s
        self._clock: Clock = link.clock
        self._beats = Beats(run, looks=looks, gap_s=gap_s)
        self._reaping: dict[str, asyncio.Task[None]] = {}
        self._struck = asyncio.Event()
        self._in_flight = asyncio.Semaphore(_MAX_IN_FLIGHT)
        # Whether an app's subscribers are told how many they are; asked once per reap.
        self._counting: dict[str, bool] = {}

    def set_alive(self, ks: set[int], greatest: int) -> None:
        """The supervisor's list, at control's start and at every change."""
        self._beats.set_alive(ks, greatest)
        self._struck.set()

    def workers(self) -> list[str]:
        """Every W that beat at the last look and isn't given up."""
        dead = set(self._beats.dead())
        return [w for w in self._beats.table if w not in dead]

    async def run(self) -> None:
        """Looks and reaps until cancelled; without Redis it waits for it."""
        try:
            while True:
                await self._link.wait_up()
                try:
                    self._struck.clear()
                    table = await self._table()
                    self._beats.look(table, self._clock())
                    for w in self._beats.dead():
                        self._begin(w)
                    await self._wait_for_next_look()
                except (LinkDown, hiredis.ReplyError) as error:
                    log.warning("could not look at the beats", reason=str(error))
                    await asyncio.sleep(self._look_s / 4)
        finally:
            for task in self._reaping.values():
                task.cancel()

    async def _wait_for_next_look(self) -> None:
        # Between two looks the supervisor's word is acted on, without counting as one.
        loop = asyncio.get_running_loop()
        until = loop.time() + self._look_s
        while (left := until - loop.time()) > 0:
            try:
                async with asyncio.timeout(left):
                    await self._struck.wait()
            except TimeoutError:
                return
            self._struck.clear()
            for w in await self._table():
                if self._beats.is_struck(w):
                    self._begin(w)

    async def _table(self) -> dict[str, bytes]:
        # Control sends no beats; that its connection still leads to somebody shows here.
        try:
            async with asyncio.timeout(self._unanswered_s):
                found = await self._link.ask(b"HGETALL", self._keys.beat)
        except TimeoutError:
            self._link.drop(f"a look at the beats was unanswered for {self._unanswered_s:g} s")
            raise LinkDown(sent=True) from None
        return {w.decode(): beat for w, beat in found.items()}

    def _begin(self, w: str) -> None:
        if w not in self._reaping:
            task = asyncio.get_running_loop().create_task(self._reap(w), name=f"reap {w}")
            self._reaping[w] = task

    async def _reap(self, w: str) -> None:
        try:
            await self.reap(w)
        except (LinkDown, hiredis.ReplyError) as error:
            # Its beat stands at -1, or will be found unchanged: the next look begins again.
            log.warning("reap broke off", w=w, reason=str(error))
        finally:
            del self._reaping[w]

    async def reap(self, w: str) -> None:
        """Takes one worker out of Redis, whole. Raises LinkDown or hiredis.ReplyError, and can be
        repeated."""
        began = self._clock()
        self._counting.clear()
        await self._link.ask(b"HSET", self._keys.beat, w, _FENCED_BEAT)
        fenced = await asyncio.gather(*(self._link.execute(FENCE, (self._keys.worker(at, w),)) for at in range(SHARDS)))
        await asyncio.gather(*(self._empty(at, w) for at, left in enumerate(fenced) if left))
        await asyncio.gather(*(self._bury(at, w) for at in range(SHARDS)))
        await self._link.ask(b"HDEL", self._keys.beat, w)
        self.reaped += 1
        log.info("reaped", w=w, channels=sum(fenced), took_s=round(self._clock() - began, 3))

    async def _bury(self, at: int, w: str) -> None:
        while not await self._link.execute(BURY, (self._keys.worker(at, w),)):
            await self._empty(at, w)

    async def _empty(self, at: int, w: str) -> None:
        # Takes away all that the worker holds in one shard.
        key = self._keys.worker(at, w)
        cursor: bytes | int = 0
        while True:
            cursor, flat = await self._link.ask(b"HSCAN", key, cursor, b"COUNT", _SCAN_COUNT)
            fields = [
                (field.decode(), value[:1].decode())
                for field, value in zip(flat[::2], flat[1::2], strict=True)
                if field != b"gen"
            ]
            await asyncio.gather(*(self._let_go(w, field, kind) for field, kind in fields))
            if int(cursor) == 0:
                return

    async def _let_go(self, w: str, field: str, kind: str) -> None:
        app_id, _, channel = field.partition(":")
        users = await self._users(w, app_id, channel) if kind == PRESENCE else []
        counts = kind == CHANNEL and await self._counts(app_id)
        hooks = hook_flags(self._hooks_of(app_id), channel, kind)
        if hooks and self._debounced:
            hooks += "d"
        # Removals first, all but the last call with a floor under the count: a reaper that comes after us
        # finds the users by way of it.
        while len(users) > _MAX_GONE:
            await self._hold(w, app_id, channel, kind, "u" + hooks, users[:_MAX_GONE])
            users = users[_MAX_GONE:]
        await self._hold(w, app_id, channel, kind, ("s" if counts else "") + hooks, users)

    async def _counts(self, app_id: str) -> bool:
        if app_id not in self._counting:
            app = await read_app(self._link, self._keys, app_id)
            self._counting[app_id] = app is not None and app.subscription_count
        return self._counting[app_id]

    async def _users(self, w: str, app_id: str, channel: str) -> list[str]:
        key, name = self._keys.members(app_id, channel), w.encode()
        users: dict[str, None] = {}
        cursor: bytes | int = 0
        while True:
            async with self._in_flight:
                cursor, flat = await self._link.ask(b"HSCAN", key, cursor, b"COUNT", _SCAN_COUNT)
            for user, entry in zip(flat[::2], flat[1::2], strict=True):
                if name in entry.partition(b"\n")[0].split(b" "):
                    users[user.decode()] = None
            if int(cursor) == 0:
                return list(users)

    async def _hold(self, w: str, app_id: str, channel: str, kind: str, flags: str, gone: list[str]) -> None:
        keys = self._keys
        names = keys.hold(w, app_id, channel, kind, flags)
        topic = keys.topic(app_id, channel)
        told: list[Any] = [w, -1, kind, flags, app_id, channel, 0, 0, topic, keys.publish]
        async with self._in_flight:
            reply = await self._link.execute(HOLD, names, [*told, len(gone), 0, *gone])
        # FENCED: there is no such worker any more (Redis was emptied, or somebody buried it).
        if reply[0] == b"STALE":
            raise hiredis.ReplyError(f"{w} is not fenced in the shard of {channel}")
