"""Asks Redis Sentinels which server is the master.

All Sentinels of the URL are asked at the same time, and the answer with the highest configuration epoch counts. Each
fail-over raises the epoch, so a Sentinel that hasn't heard of the last one can't lead us to the old master. Sentinels
that were set up again begin at epoch 0: a lower epoch counts when a majority of the URL's Sentinels has agreed on it
for longer than news of a fail-over takes among them.

During a fail-over, the Sentinel that carries it out marks the replica that it promotes. It names that replica as the
master only when it has seen its INFO, which it reads once a second. So the marked replica is taken for the master
already; the link checks with ROLE that it is one.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from time import monotonic
from typing import TYPE_CHECKING, Final

import structlog

from redpoll.cluster.redis.asking import connection_to
from redpoll.config.redis_url import RedisUrl

if TYPE_CHECKING:
    from redis.asyncio import Redis

__all__ = ["Sentinels"]

log = structlog.get_logger(__name__)

_ANSWER_WITHIN_S: Final = 1.0
# A Sentinel announces its epoch to the others every 2 s.
_AGREED_FOR_S: Final = 5.0


def _connect(url: RedisUrl) -> list[Redis]:
    return [connection_to(host, port, url, url.sentinel_username, url.sentinel_password) for host, port in url.hosts]


class Sentinels:
    """The Sentinels of a URL with a `service`. Keeps a connection to each until `close`. `connect(url)` makes the
    connections."""

    def __init__(
        self,
        url: RedisUrl,
        *,
        clock: Callable[[], float] = monotonic,
        connect: Callable[[RedisUrl], list[Redis]] = _connect,
        answer_within_s: float = _ANSWER_WITHIN_S,
        agreed_for_s: float = _AGREED_FOR_S,
    ) -> None:
        self._url = url
        self._clock = clock
        self._connect = connect
        self._answer_within_s = answer_within_s
        self._agreed_for_s = agreed_for_s
        self._epoch = -1
        # Epoch and address on which a majority agrees, although the epoch is lower than one before, and since when.
        self._lower: tuple[int, str, int] | None = None
        self._lower_since = 0.0
        self._clients: list[Redis] = []

    async def master(self) -> tuple[str, int]:
        """Host and port of the service's master. Raises OSError if no Sentinel says who it is within 1 s, or if those
        that do know less than what was answered here before."""
        from redis.exceptions import RedisError

        if not self._clients:
            self._clients = self._connect(self._url)
        service = self._url.service
        answers = await asyncio.gather(*(self._ask(client) for client in self._clients), return_exceptions=True)
        faults = [answer for answer in answers if isinstance(answer, BaseException)]
        for fault in faults:
            if not isinstance(fault, RedisError | OSError | TimeoutError):
                raise fault
        known = [answer for answer in answers if not isinstance(answer, BaseException)]
        if not known:
            # What they agree on begins again.
            self._lower = None
            reasons = "; ".join(sorted({str(fault) or "no answer" for fault in faults}))
            raise OSError(f"no Sentinel knows the master of {service}: {reasons}")
        epoch, _, host, port = max(known)
        if epoch < self._epoch:
            epoch, host, port = self._agreed((epoch, host, port) for epoch, _, host, port in known)
        self._epoch, self._lower = epoch, None
        return host, port

    def _agreed(self, answers: Iterable[tuple[int, str, int]]) -> tuple[int, str, int]:
        """What a majority has answered for long enough. Raises OSError if there is nothing like that."""
        (answer, count), *_ = Counter(answers).most_common(1)
        if 2 * count <= len(self._url.hosts):
            self._lower = None
        elif answer != self._lower:
            self._lower, self._lower_since = answer, self._clock()
        elif self._clock() - self._lower_since >= self._agreed_for_s:
            log.warning("sentinels were set up again", epoch=answer[0], before=self._epoch)
            return answer
        raise OSError(f"no Sentinel that answers knows of the last fail-over of {self._url.service}")

    async def close(self) -> None:
        clients, self._clients = self._clients, []
        await asyncio.gather(*(client.aclose() for client in clients), return_exceptions=True)

    async def _ask(self, client: Redis) -> tuple[int, bool, str, int]:
        # The epoch, whether the server is only being promoted, and its address.
        service = self._url.service
        async with asyncio.timeout(self._answer_within_s):
            pipeline = client.pipeline(transaction=False)
            pipeline.execute_command("SENTINEL", "MASTER", service)
            # During a fail-over this names the new master earlier than the state does.
            pipeline.execute_command("SENTINEL", "GET-MASTER-ADDR-BY-NAME", service)
            master, (host, port) = await pipeline.execute()
            state = _fields(master)
            epoch = int(state["config-epoch"])
            # If the master is back, it serves, and the promotion may never end.
            if {"s_down", "failover_in_progress"} <= set(state["flags"].split(",")):
                pipeline.execute_command("SENTINEL", "REPLICAS", service)
                # The Sentinel's ACL may forbid it. Then the replica is found when the Sentinel names it.
                (replicas,) = await pipeline.execute(raise_on_error=False)
                for words in replicas if isinstance(replicas, list) else ():
                    replica = _fields(words)
                    if "promoted" in replica["flags"].split(","):
                        return epoch, True, replica["ip"], int(replica["port"])
        return epoch, False, host, int(port)


def _fields(words: Sequence[str]) -> dict[str, str]:
    return dict(zip(words[::2], words[1::2], strict=True))
