"""Keeps webhooks right when Redis lost writes whose rows are announced already: a fail-over to a replica that lagged.

Endpoints are promised that `channel.occupied` and `channel.vacated` alternate, and `member.added` and `member.removed`,
and that the last one is right. A Redis with older data makes the same transition again, or knows of none that would
correct what was announced. So for a time after each connection to Redis, and at a leader's start, this module knows
the last announcement to each endpoint. Repeats get no delivery, and where Redis disagrees, `Outbox.restate` writes
another row.

The announcements are read from the last deliveries before Redis was lost, however long it was away. The store keeps all
of that last minute; a replica that lags by more is broken.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, Final

import structlog

from redpoll.cluster.outbox import Outbox, Subject
from redpoll.cluster.transition import Transition
from redpoll.control.webhooks.wanted import wants
from redpoll.store.deliveries import Announcement
from redpoll.store.webhooks import Endpoint

__all__ = ["EVENTS", "READ_BACK_S", "Announced", "States"]

log = structlog.get_logger(__name__)

# How long before the last complete answer of Redis deliveries may have been added that are read at the beginning.
READ_BACK_S: Final = 90.0
# When Redis is compared after a connection: when the workers have asserted everything again, and when dead ones and
# those that a lost beat table didn't name are removed.
_COMPARE_AFTER_S: Final = (10.0, 30.0)
_LASTS_S: Final = 60.0
_MAX_COMPARED: Final = 1_000

_PAIRS: Final = (("channel.occupied", "channel.vacated"), ("member.added", "member.removed"))
# By event: its pair, and whether it says that the channel is occupied, or the user a member.
_STATES: Final = {event: (pair, event == pair[0]) for pair in _PAIRS for event in pair}

EVENTS: Final = frozenset(_STATES)

_Target = tuple[str, Subject]
# By endpoint id and subject, as last announced: whether the channel is occupied, or the user a member.
States = dict[_Target, bool]


class Announced:
    """`endpoint(id)` returns an endpoint, None if there is none. In this order: `is_due`, `take` and `begin` before new
    rows are looked at, `without_repeats` and `stored` for each transaction, `compare` whenever there is time.

    `active`: Redis may still repeat transitions.
    """

    def __init__(
        self,
        redis: Outbox,
        endpoint: Callable[[str], Endpoint | None],
        compare_after_s: Sequence[float] = _COMPARE_AFTER_S,
        lasts_s: float = _LASTS_S,
    ) -> None:
        self.active = False
        self._redis = redis
        self._endpoint = endpoint
        self._compare_after_s = compare_after_s
        self._lasts_s = lasts_s
        self._connects: int | None = None
        self._states: States = {}
        # On the loop's clock: when to compare, and when to forget.
        self._compare_at: list[float] = []
        self._ends_at = 0.0

    def is_due(self) -> bool:
        """Redis was connected since the last `begin`."""
        return self._redis.connects != self._connects

    def begin_again(self) -> None:
        """A transaction failed, and may have been committed: `begin` is due, because its states aren't known."""
        if self.active:
            self._connects = None

    def take(self, newest_first: Iterable[Announcement], states: States) -> None:
        """Adds what these deliveries announced to `states`, which are those of newer ones."""
        for announcement in newest_first:
            endpoint = self._endpoint(announcement.endpoint_id)
            if endpoint is not None and self._gets_both(endpoint, announcement.event, announcement.channel):
                subject = Subject(endpoint.app_id, announcement.channel, announcement.user)
                states.setdefault((endpoint.id, subject), _STATES[announcement.event][1])

    def begin(self, connects: int, states: States) -> None:
        """`states` are those of the deliveries since READ_BACK_S before the last answer, read after the connection
        number `connects`."""
        now_s = asyncio.get_running_loop().time()
        self._connects = connects
        # Those known from an earlier beginning may be of deliveries that are too old to be read again. Once they were
        # compared, they aren't needed: in a Redis that comes and goes, all that ever were would stay.
        self._states = self._states | states if self._compare_at else states
        self._compare_at = [now_s + after_s for after_s in self._compare_after_s]
        self._ends_at = now_s + self._lasts_s + self._redis.debounce_s
        self.active = True

    def without_repeats(
        self, new: Sequence[tuple[Transition, dict[str, Any]]], known: Collection[str]
    ) -> tuple[list[tuple[Transition, dict[str, Any]]], States]:
        """The deliveries that repeat nothing, and the states that they announce, for `stored`. `known`: the ids of
        those that are in the store already."""
        announced: list[tuple[Transition, dict[str, Any]]] = []
        states: States = {}
        for row, delivery in new:
            if delivery["id"] in known:
                continue
            endpoint = self._endpoint(delivery["endpoint_id"])
            if endpoint is not None and self._gets_both(endpoint, row.event, row.channel):
                key = endpoint.id, Subject(row.app_id, row.channel, row.user)
                _, state = _STATES[row.event]
                if states.get(key, self._states.get(key)) is state:
                    continue
                states[key] = state
            announced.append((row, delivery))
        return announced, states

    def stored(self, states: States) -> None:
        """The deliveries with these states are in the store now."""
        self._states |= states

    async def compare(self) -> None:
        """Restates what Redis has otherwise than it was announced, if the time has come. Raises LinkDown or
        hiredis.ReplyError; then the next call tries again."""
        now_s = asyncio.get_running_loop().time()
        if self.active and self._compare_at and now_s >= self._compare_at[0]:
            # What is announced meanwhile is newer than the answers, and its rows are right.
            states = list(self._states.items())
            for start in range(0, len(states), _MAX_COMPARED):
                await self._compare(states[start : start + _MAX_COMPARED])
            del self._compare_at[0]
        if self.active and now_s >= self._ends_at:
            self.active = False
            self._states = {}

    async def _compare(self, states: Sequence[tuple[_Target, bool]]) -> None:
        present = await self._redis.present([subject for (_, subject), _ in states])
        wrong = {
            subject: None
            for ((_, subject), state), is_present in zip(states, present, strict=True)
            if state is not is_present
        }
        # Leaves that are held back aren't announced yet, and nothing is lost.
        if wrong and (restated := await self._redis.restate(wrong)):
            log.warning("webhooks announced what redis lost", subjects=restated)

    def _gets_both(self, endpoint: Endpoint, event: str, channel: str) -> bool:
        return endpoint.enabled and event in _STATES and all(wants(endpoint, one, channel) for one in _STATES[event][0])
