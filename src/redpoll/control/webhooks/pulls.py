"""Webhooks that back ends pull: due deliveries are handed out on request, and acknowledgements end them.

A delivery that is handed out is leased: it stays in the outbox of all webhooks (store/pulled.py), and is due again when
the lease ends. Its attempts and pauses are those of the schedule, so after the usual attempts it is a dead letter. Any
control plane hands out, in a transaction of the store, so no delivery has two leases at a time.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, MutableMapping, Sequence
from typing import Final, NamedTuple

from redpoll.cluster.envelopes import Envelope, webhooks_ended_envelope
from redpoll.control.records.records import RecordError
from redpoll.control.tracing.spans import Spans
from redpoll.control.webhooks.endpoints import Endpoints
from redpoll.control.webhooks.outcomes import Outcome
from redpoll.control.webhooks.payloads import format_of, headers
from redpoll.loop.turns import Turns
from redpoll.protocol.apps import Key
from redpoll.store import pulled as pulled_rows
from redpoll.store.deliveries import BATCH, Waiting
from redpoll.store.leadership import Changes
from redpoll.store.pulled import Ended
from redpoll.store.store import Store
from redpoll.store.webhooks import Endpoint

__all__ = ["MAX_IDS", "MAX_LIMIT", "Handed", "Pulls"]

# Of one answer. A single delivery may be larger.
MAX_LIMIT: Final = 100
_MAX_BYTES: Final = 512 * 1024
# Of one acknowledgement.
MAX_IDS: Final = 1_000
# Requests of an app that wait to change something. All apps share the store's only writer.
_MAX_WAITING: Final = 256
# PostgreSQL refuses a statement with a NUL, so the store is asked only for what can be an id.
_DELIVERY_ID: Final = re.compile(r"[0-9a-f-]{36}").fullmatch


class Handed(NamedTuple):
    """A delivery that was handed out: `headers` and `body` are what a webhook with a URL would have got."""

    id: str
    endpoint_id: str
    event: str
    channel: str
    attempt: int
    headers: dict[str, str]
    body: bytes


def _ignore(*_: object) -> None:
    pass


class Pulls:
    """`retry_after_s` and `lease_s` are in seconds: a delivery is due again after the longer of its pause and the
    lease. `signing_key(app_id)` returns the app's key, `clock()` Unix seconds.

    `attempts` counts outcomes since the start: deliveries that were acknowledged, and leases that ended without.
    `by_app` gets both by app id, in this order; `failed_total` counts dead letters. `on_left(endpoint_id, size)`: a
    delivery with a body of this size no longer waits. plane.py sets `announce(app_id, envelope)`, which tells all
    workers of the app's deliveries, and `spans`, None unless OpenTelemetry is on.
    """

    def __init__(
        self,
        store: Store,
        endpoints: Endpoints,
        retry_after_s: Sequence[float],
        lease_s: float,
        signing_key: Callable[[str], Key | None],
        clock: Callable[[], float],
        on_left: Callable[[str, int], None],
        by_app: MutableMapping[str, tuple[int, int]],
    ) -> None:
        self.attempts: Counter[str] = Counter()
        self.failed_total = 0
        self.announce: Callable[[str, bytes], None] = _ignore
        self.spans: Spans | None = None
        self.lease_s = lease_s
        self._store = store
        self._endpoints = endpoints
        self._retry_after_s = tuple(retry_after_s)
        self._signing_key = signing_key
        self._clock = clock
        self._on_left = on_left
        self._by_app = by_app
        self._turns = Turns(_MAX_WAITING)

    @property
    def _max_attempts(self) -> int:
        return len(self._retry_after_s) + 1

    # -- what back ends ask for

    async def hand_out(self, app_id: str, endpoint_id: str | None, limit: int) -> tuple[list[Handed], float | None]:
        """At most `limit` due deliveries of the app, or of one endpoint, the longest due first, and in how many seconds
        the next one is due if there are none: None if none waits. A limit of 0 only asks whether there is such an
        endpoint. Raises RecordError if the app has none, and TooManyWaiting."""
        endpoints = {one.id: one for one in self._asked(app_id, endpoint_id) if one.enabled}
        if not limit:
            return [], None
        async with self._store.reading() as connection:
            next_at = await pulled_rows.next_due(connection, endpoints, self._max_attempts)
        if next_at is None:
            return [], None
        if (left_s := next_at - self._clock()) > 0:
            return [], left_s
        async with self._turns.of(app_id), self._store.change() as connection:
            now_s = self._clock()
            chosen = await pulled_rows.due(connection, endpoints, now_s, self._max_attempts, limit, _MAX_BYTES)
            await pulled_rows.hand_out(
                connection, chosen, now_s, [now_s + self._pause_s(one) for one in chosen], Outcome.UNACKED
            )
        # An earlier lease of these ended without an acknowledgement.
        self._count(app_id, Outcome.UNACKED, sum(one.attempts > one.cycle_from for one in chosen))
        handed = [self._handed(endpoints[one.endpoint_id], one, now_s) for one in chosen]
        return handed, None if handed else 0.0

    async def acknowledge(self, app_id: str, ids: Sequence[str]) -> int:
        """Ends these deliveries, and returns how many. Those that are unknown, ended, or were never handed out don't
        count. Raises TooManyWaiting."""
        endpoints = [one.id for one in self._endpoints.of_app(app_id) if one.pulled]
        ids = [one for one in ids if _DELIVERY_ID(one)]
        if not (endpoints and ids):
            return 0
        async with self._store.reading() as connection:
            ids = await pulled_rows.handed_out(connection, endpoints, ids)
        if not ids:
            return 0
        async with self._turns.of(app_id), self._store.change() as connection:
            ended = await pulled_rows.acknowledge(connection, endpoints, ids, self._clock(), Outcome.DELIVERED)
        self._count(app_id, Outcome.DELIVERED, len(ended))
        self._left(ended)
        if ended:
            # Streams have room for as many.
            self.announce(app_id, webhooks_ended_envelope(one.id for one in ended))
        return len(ended)

    # -- what the leader does

    async def run_out(self, store: Changes) -> int:
        """Makes dead letters of the deliveries whose last lease has ended. Returns how many."""
        if not any(one.pulled and one.enabled for one in self._endpoints.every()):
            return 0
        async with store.reading() as connection:
            if not await pulled_rows.has_run_out(connection, self._clock(), self._max_attempts):
                return 0
        total, is_whole = 0, False
        while not is_whole:
            # In batches, so that other writers get their turn.
            async with store.change() as connection:
                failed = await pulled_rows.run_out(connection, self._clock(), self._max_attempts)
            # Another node may have made an endpoint that isn't known here yet.
            endpoints = [self._endpoints.known(one.endpoint_id) for one in failed]
            for app_id, count in Counter(one.app_id for one in endpoints if one is not None).items():
                self._count(app_id, Outcome.UNACKED, count)
            self._left(failed)
            self.failed_total += len(failed)
            total += len(failed)
            is_whole = len(failed) < BATCH
        return total

    def may_be_due(self, endpoint_ids: Sequence[str]) -> None:
        """Deliveries of these endpoints were added, or are due again: those that are pulled are announced."""
        endpoints = [self._endpoints.known(endpoint_id) for endpoint_id in endpoint_ids]
        for app_id in {one.app_id for one in endpoints if one is not None and one.pulled and one.enabled}:
            self.announce(app_id, Envelope.WEBHOOKS_DUE)

    # -- internal

    def _count(self, app_id: str, outcome: Outcome, count: int) -> None:
        if count:
            self.attempts[outcome] += count
            delivered, failed = self._by_app.get(app_id, (0, 0))
            if outcome is Outcome.DELIVERED:
                delivered += count
            else:
                failed += count
            self._by_app[app_id] = delivered, failed

    def _left(self, ended: Sequence[Ended]) -> None:
        for one in ended:
            if one.waited:
                self._on_left(one.endpoint_id, one.size)

    def _asked(self, app_id: str, endpoint_id: str | None) -> list[Endpoint]:
        pulled = [one for one in self._endpoints.of_app(app_id) if one.pulled]
        if endpoint_id is not None:
            pulled = [one for one in pulled if one.id == endpoint_id]
        if not pulled:
            which = "that is pulled" if endpoint_id is None else f"with the id {endpoint_id} that is pulled"
            raise RecordError(
                f"app {app_id} has no webhook {which}; `redpoll webhook create {app_id} --pull` makes one"
            )
        return pulled

    def _pause_s(self, one: Waiting) -> float:
        tries = one.attempts - one.cycle_from
        return max(self.lease_s, self._retry_after_s[tries] if tries < len(self._retry_after_s) else 0.0)

    def _handed(self, endpoint: Endpoint, one: Waiting, now_s: float) -> Handed:
        signed = headers(
            format_of(one.body),
            one.event,
            one.body,
            delivery_id=one.id,
            attempt=one.attempts + 1,
            now_s=now_s,
            secret=endpoint.secret,
            previous_secret=endpoint.previous_secret if now_s < endpoint.previous_until else "",
            key=self._signing_key(endpoint.app_id),
        )
        if self.spans is not None:
            signed["traceparent"] = self.spans.handed_out(
                one.trace,
                int(now_s * 1_000_000),
                app=endpoint.app_id,
                event=one.event,
                channel=one.channel,
                endpoint=endpoint.id,
                delivery=one.id,
                attempt=one.attempts + 1,
            )
        return Handed(one.id, one.endpoint_id, one.event, one.channel, one.attempts + 1, signed, one.body)
