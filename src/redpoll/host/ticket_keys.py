"""The keys of TLS session tickets: all workers of all nodes have the same, so a client's ticket is accepted by each.

They are random and lie in Redis, one for each period of twelve hours, which the first node that needs it writes.
Workers encrypt with the present period's key and accept tickets of the one before, too. Redis forgets a key when its
tickets aren't accepted any more. Without Redis, a node goes on with keys of its own, and a ticket from another node
costs a full handshake.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Iterable
from typing import Final

import hiredis
import structlog

from redpoll.cluster.redis.cluster_link import open_link
from redpoll.cluster.redis.keys import Keys
from redpoll.cluster.redis.link import LinkDown
from redpoll.host.child import Child
from redpoll.ipc.messages import TicketKeys

__all__ = ["TicketKeyring"]

log = structlog.get_logger()

PERIOD_S: Final = 12 * 3600
# A name, an encryption key and a key for the HMAC (`_openssl.KEY_BYTES`).
KEY_BYTES: Final = 80
# Clocks of nodes differ, and a key is needed until the end of the next period.
_KEPT_PERIODS: Final = 3
_ANSWER_WITHIN_S: Final = 5.0
_AGAIN_S: Final = 1.0


class TicketKeyring:
    """Tells `workers` the keys when they change. Create it inside the running loop; call `start`, `tell` for a process
    that starts, and `close`. `settled` is called once, when Redis has answered or can't be reached."""

    def __init__(
        self,
        redis_url: str,
        prefix: str,
        workers: Iterable[Child],
        settled: Callable[[], None] = lambda: None,
        *,
        clock: Callable[[], float] = time.time,
        answer_within_s: float = _ANSWER_WITHIN_S,
    ) -> None:
        self._workers = list(workers)
        self._settled = settled
        self.is_settled = False
        self._clock = clock
        self._answer_within_s = answer_within_s
        self._link = open_link(redis_url)
        self._keys = Keys(prefix, sharded=self._link.sharded)
        self._period = self._present()
        self.message = TicketKeys([secrets.token_hex(KEY_BYTES)])
        self._task: asyncio.Task[None] | None = None
        self._warned: str | None = None

    def start(self) -> None:
        """Starts to connect to Redis."""
        self._link.start()
        self._task = asyncio.get_running_loop().create_task(self._run(), name="ticket keys")

    def tell(self, worker: Child) -> None:
        """Sends the keys to a process that starts."""
        worker.send(self.message)

    async def close(self) -> None:
        """Ends."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await self._link.close()

    def _present(self) -> int:
        return int(self._clock() // PERIOD_S)

    async def _run(self) -> None:
        while True:
            is_read = await self._read()
            if not is_read:
                self._go_on_alone()
            if not self.is_settled:
                self.is_settled = True
                self._settled()
            if not is_read:
                await asyncio.sleep(_AGAIN_S)
                continue
            await asyncio.sleep(max(0.0, (self._period + 1) * PERIOD_S - self._clock()) + 0.001)

    async def _read(self) -> bool:
        """Gets the keys of the present period and of the one before. False if Redis can't be asked."""
        period = self._present()
        made = secrets.token_hex(KEY_BYTES)
        name = self._keys.ticket_key(period)
        try:
            async with asyncio.timeout(self._answer_within_s):
                await self._link.wait_up()
                # GET beside NX needs Redis 7, as all of redpoll does.
                stored = await self._link.ask(b"SET", name, made, b"NX", b"GET", b"EX", _KEPT_PERIODS * PERIOD_S)
                before = await self._link.ask(b"GET", self._keys.ticket_key(period - 1))
        except (TimeoutError, LinkDown):
            return False
        except hiredis.ReplyError as error:
            self._warn(str(error))
            return False
        keys = [made if stored is None else _checked(stored), *([] if before is None else [_checked(before)])]
        if None in keys:
            # Someone else wrote it: workers can't use it.
            self._warn("redis has something else in their place")
            return False
        self._warned = None
        self._period = period
        self._set([key for key in keys if key is not None])
        return True

    def _warn(self, reason: str) -> None:
        """Once for each reason, because Redis is asked every second."""
        if reason != self._warned:
            self._warned = reason
            log.warning("keys of TLS session tickets not shared", reason=reason)

    def _go_on_alone(self) -> None:
        period = self._present()
        if period != self._period:
            self._period = period
            self._set([secrets.token_hex(KEY_BYTES), self.message.keys[0]])

    def _set(self, keys: list[str]) -> None:
        message = TicketKeys(keys)
        if message != self.message:
            self.message = message
            for worker in self._workers:
                self.tell(worker)


def _checked(stored: bytes) -> str | None:
    """A key as nodes write it; None for anything else."""
    try:
        text = stored.decode("ascii")
        return text if len(bytes.fromhex(text)) == KEY_BYTES else None
    except ValueError:
        return None
