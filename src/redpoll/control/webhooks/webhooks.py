"""Webhooks: the entry point for the rest of the control plane.

    outbox ─ intake ─> store ─ schedule ─ sender ─> receiver
                         └─ results <─┘

The record store holds all pending work, so this process may be killed at any moment without loss. Before `start()`
nothing is sent, but everything else works: commands use it like that when no server runs. The guarantees are described
in control/webhooks/README.md "Webhooks".
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Final
from uuid import uuid4

from redpoll.cluster.outbox import Outbox
from redpoll.cluster.transition import Transition
from redpoll.config.settings import Settings
from redpoll.control.records.records import RecordError, Records
from redpoll.control.tracing.spans import Spans
from redpoll.control.webhooks.announced import Announced
from redpoll.control.webhooks.deadletters import DeadLetters
from redpoll.control.webhooks.endpoints import Endpoints
from redpoll.control.webhooks.intake import Intake
from redpoll.control.webhooks.outcomes import Attempt, Outcome
from redpoll.control.webhooks.payloads import STANDARD, headers, render
from redpoll.control.webhooks.pulls import Pulls
from redpoll.control.webhooks.schedule import Schedule
from redpoll.control.webhooks.sender import Sender, Target
from redpoll.control.webhooks.tidying import MAX_FINISHED, TIDY_EVERY_S, Tidying
from redpoll.control.webhooks.waiting_bound import WaitingBound
from redpoll.control.webhooks.wanted import ALL, check_has_url
from redpoll.protocol.apps import Key
from redpoll.store import deliveries as delivery_rows
from redpoll.store.audit import Actor
from redpoll.store.deliveries import STATES, AttemptRow, Delivery, Depth, Waiting
from redpoll.store.leadership import Changes
from redpoll.store.store import Store
from redpoll.store.webhooks import Endpoint

__all__ = ["FAILING_AFTER_S", "Webhooks"]

# An endpoint is shown as failing only if every attempt has failed for this long.
FAILING_AFTER_S: Final = 300.0
_FINISH_WITHIN_S: Final = 3.0
_MAX_SHOWN: Final = 10_000


class Webhooks:
    """Call `load()` first. A running server also calls `prepare()`, and `finish()` at its end. While it leads, it reads
    the outbox and sends: from `start()` until `stop()`.

    `endpoints` and `dead_letters` are the parts that change records, `pulls` hands out what back ends pull, on every
    node, `tidying` counts and removes. While it leads, `intake` reads the outbox and `schedule` sends; otherwise both
    are None. `attempts_by_app` has, by app id, how many attempts succeeded and how many failed since the start, of
    those that are pulled on this node too; the dashboard's sampler removes deleted apps. `clock()` returns Unix
    seconds, `steady()` seconds of a clock that is never set. Methods raise RecordError, with a sentence for people, if
    something isn't possible. Times are Unix seconds.
    """

    def __init__(
        self,
        store: Store,
        records: Records,
        settings: Settings,
        *,
        clock: Callable[[], float] = time.time,
        steady: Callable[[], float] = time.monotonic,
        tidy_every_s: float = TIDY_EVERY_S,
        max_finished: int = MAX_FINISHED,
    ) -> None:
        self._store = store
        self._records = records
        self._settings = settings
        self._clock = clock
        self._steady = steady
        self.attempts_by_app: dict[str, tuple[int, int]] = {}
        self._bound = WaitingBound(settings.webhook_max_waiting, steady)
        self.endpoints = Endpoints(store, records, self._get_sender, clock, self._endpoint_changed)
        self.pulls = Pulls(
            store,
            self.endpoints,
            settings.webhook_retry_after_s,
            settings.webhook_acknowledge_within_s,
            self._signing_key,
            clock,
            self._bound.left,
            self.attempts_by_app,
        )
        self.dead_letters = DeadLetters(store, self.endpoints, clock, self._endpoint_has_due, self._discarded)
        self.tidying = Tidying(
            store,
            records,
            self.endpoints,
            self.pulls,
            self._bound,
            settings.webhook_max_dead_letters,
            clock,
            steady,
            tidy_every_s,
            max_finished,
        )
        self._sender: Sender | None = None
        self.intake: Intake | None = None
        self.schedule: Schedule | None = None
        # Of the schedules of earlier leads: a counter that falls to something else than 0 is counted again.
        self._attempts: Counter[str] = Counter()
        self._failed_total = 0
        self._tasks: list[asyncio.Task[None]] = []
        self._forgetting: asyncio.Task[None] | None = None

    async def load(self) -> None:
        """Reads the endpoints and sets the hook masks of the apps. Call it after `Records.load`."""
        await self.endpoints.load()

    def prepare(self) -> None:
        """Raises RecordError for unusable settings."""
        self._get_sender()
        self._forgetting = asyncio.get_running_loop().create_task(self.tidying.forget_repeatedly())

    def start(
        self,
        outbox: Outbox,
        on_traced: Callable[[Transition, str, str], None],
        store: Changes | None = None,
        spans: Spans | None = None,
    ) -> None:
        """Starts to read the outbox and to send. `on_traced`: see Intake, `spans`: see Schedule. `store` is used for
        what only the leader may change. Raises RecordError for unusable settings."""
        store = store or self._store
        sender = self._get_sender()
        self.schedule = Schedule(
            store,
            self.endpoints,
            sender,
            self._settings.webhook_retry_after_s,
            self._signing_key,
            self._clock,
            self._steady,
            spans,
            on_left=self._bound.left,
            lease_s=self.pulls.lease_s,
            by_app=self.attempts_by_app,
        )
        self.intake = Intake(
            outbox,
            store,
            self.endpoints.of_app,
            self.endpoints.any_enabled,
            self._added,
            self._found,
            on_traced,
            Announced(outbox, self.endpoints.known),
            self._bound,
            self._clock,
            (lambda: self._records.known) if self._store.shared else None,
        )
        loop = asyncio.get_running_loop()
        self._tasks = [
            loop.create_task(self.schedule.run(), name="webhook schedule"),
            loop.create_task(self.intake.run(), name="webhook intake"),
            loop.create_task(self.tidying.run(store, self.schedule, self.intake), name="webhook tidying"),
        ]

    async def stop(self, within_s: float) -> None:
        """Stops to read the outbox and to send. Running attempts get `within_s`; the next leader repeats those that
        took longer."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks = []
        if self.schedule is not None:
            await self.schedule.finish(within_s)
            self._attempts.update(self.schedule.attempts)
            self._failed_total += self.schedule.failed_total
            self.schedule = None
        self.intake = None

    async def finish(self, within_s: float = _FINISH_WITHIN_S) -> None:
        """Stops in order. The next process repeats attempts that take longer."""
        await self.stop(within_s)
        if self._forgetting is not None:
            self._forgetting.cancel()
            await asyncio.gather(self._forgetting, return_exceptions=True)
        if self._sender is not None:
            await self._sender.close()
            self._sender = None

    def counters(self) -> Mapping[str, float]:
        """The counters for metrics.FAMILIES; those of waiting and failed deliveries are as of the last count. A
        node that doesn't lead has those of what was pulled here, and sent while it led."""
        attempts = Counter(self.pulls.attempts)
        attempts.update(self._attempts)
        failed = self.pulls.failed_total + self._failed_total
        if self.schedule is None or self.intake is None:
            known = {f"webhook_attempts_{outcome}_total": count for outcome, count in attempts.items()}
            return {**known, "webhook_failed_total": failed}
        attempts.update(self.schedule.attempts)
        depths = self.tidying.depths.values()
        oldest = [depth.oldest_at for depth in depths if depth.oldest_at is not None]
        counters: dict[str, float] = {
            "webhook_transitions_total": self.intake.taken_total,
            "webhook_rows_unreadable_total": self.intake.unreadable_total,
            "webhook_deliveries_waiting": sum(depth.waiting for depth in depths),
            "webhook_oldest_seconds": max(0.0, self._clock() - min(oldest)) if oldest else 0.0,
            "webhook_dead_letters": sum(depth.failed for depth in depths),
            "webhook_dead_letters_removed_total": self.tidying.dead_letters_removed,
            "webhook_deliveries_dropped_total": self._bound.dropped_total,
            "webhook_failed_total": failed + self.schedule.failed_total,
            "webhook_attempts_running": self.schedule.running,
            "webhook_endpoints_failing": sum(1 for endpoint in self.endpoints.every() if self.failing_since(endpoint)),
        }
        counters |= {f"webhook_attempts_{outcome}_total": attempts[outcome] for outcome in Outcome}
        return counters

    # -- endpoints

    def failing_since(self, endpoint: Endpoint) -> float | None:
        """Since when every attempt has failed, if for at least FAILING_AFTER_S; None otherwise."""
        since = endpoint.failing_since
        if since is None or endpoint.deleted_at is not None or self._clock() - since < FAILING_AFTER_S:
            return None
        return since

    async def test(self, endpoint_id: str, *, by: Actor | None = None) -> Attempt:
        """Sends an example transition to the endpoint once, even if it is disabled. Only the audit log shows it."""
        endpoint = self.endpoints.get(endpoint_id)
        check_has_url(endpoint)
        now_s = self._clock()
        example = _example(endpoint, now_s)
        body = render(endpoint.format, example)
        signed = headers(
            endpoint.format,
            example.event,
            body,
            delivery_id=str(uuid4()),
            attempt=1,
            now_s=now_s,
            secret=endpoint.secret,
            previous_secret=endpoint.previous_secret if now_s < endpoint.previous_until else "",
            key=self._signing_key(endpoint.app_id),
        )
        attempt = await self._get_sender().attempt(Target(endpoint.url, endpoint.pin), body, signed)
        await self._store.note_done(by, "webhook test", endpoint.app_id, endpoint.url, attempt.reason)
        return attempt

    async def secrets_of(self, app_id: str) -> dict[str, list[str]]:
        """By endpoint id: the secrets that may have signed a delivery now."""
        now_s = self._clock()
        return {endpoint.id: endpoint.secrets(now_s) for endpoint in self.endpoints.of_app(app_id)}

    # -- deliveries

    async def deliveries(
        self,
        app_id: str,
        *,
        endpoint_id: str | None = None,
        states: Collection[str] = STATES,
        limit: int = 50,
        before: tuple[float, int] | None = None,
    ) -> list[Delivery]:
        """Deliveries of an app, or of one of its endpoints, sorted by their last change of state, newest first.

        Includes those of deleted endpoints. `before` is `(at, number)` of the last delivery of the previous page.
        """
        endpoint_ids = self._endpoint_ids(app_id, endpoint_id)
        async with self._store.reading() as connection:
            return await delivery_rows.find(connection, endpoint_ids, states, min(limit, _MAX_SHOWN), before)

    async def added(
        self, endpoint_id: str, *, states: Collection[str], limit: int, before: int | None = None
    ) -> list[Delivery]:
        """Deliveries of an endpoint, the last added first. Pages miss none that is delivered between them.

        `before` is the `number` of the last delivery of the previous page.
        """
        async with self._store.reading() as connection:
            return await delivery_rows.find_added(connection, endpoint_id, states, limit, before)

    async def delivery(self, delivery_id: str) -> tuple[Delivery, Endpoint, list[AttemptRow]]:
        """A delivery, its endpoint (which may be deleted) and all attempts in order."""
        async with self._store.reading() as connection:
            delivery = await delivery_rows.find_by_id(connection, delivery_id)
            attempts = [] if delivery is None else await delivery_rows.attempts_at(connection, delivery.number)
        endpoint = None if delivery is None else self.endpoints.known(delivery.endpoint_id)
        if delivery is None or endpoint is None:
            raise RecordError(f"there is no delivery with the id {delivery_id}")
        return delivery, endpoint, attempts

    async def depths(self, app_id: str) -> dict[str, Depth]:
        """By endpoint id: how many deliveries wait, failed or were dropped. Endpoints without any are missing."""
        endpoint_ids = self._endpoint_ids(app_id, None)
        async with self._store.reading() as connection:
            return await delivery_rows.depths(connection, endpoint_ids)

    # -- internal

    def _endpoint_ids(self, app_id: str, endpoint_id: str | None) -> list[str]:
        """The ids of an app's endpoints, including deleted ones, or the one that was asked for."""
        self.endpoints.check_app(app_id)
        ids = self.endpoints.ids_of(app_id)
        if endpoint_id is None:
            return ids
        if endpoint_id not in ids:
            raise RecordError(f"app {app_id} has no webhook with the id {endpoint_id}")
        return [endpoint_id]

    def _get_sender(self) -> Sender:
        """Creates the sender on first use, because most commands don't need one."""
        if self._sender is None:
            settings = self._settings
            try:
                self._sender = Sender(
                    allow_http=settings.webhook_allow_http,
                    allow_addresses=settings.webhook_allow_addresses,
                    ca_file=settings.webhook_ca_file,
                )
            except (OSError, ssl.SSLError) as error:
                raise RecordError(
                    f"webhook_ca_file {settings.webhook_ca_file} can't be used: {error.strerror or error}"
                ) from error
            except ValueError as error:
                raise RecordError(f"webhook_allow_addresses: {error}") from error
        return self._sender

    def _signing_key(self, app_id: str) -> Key | None:
        app = self._records.apps.get(app_id)
        return None if app is None else app.signing_key()

    def _endpoint_changed(self, endpoint: Endpoint) -> None:
        self._endpoint_has_due(endpoint.id)

    def _added(self, written: Sequence[Waiting]) -> None:
        assert self.schedule is not None
        self.schedule.add(written)
        self.pulls.may_be_due([delivery.endpoint_id for delivery in written])

    def _found(self, endpoint_ids: Collection[str]) -> None:
        for endpoint_id in endpoint_ids:
            self._endpoint_has_due(endpoint_id)

    def _endpoint_has_due(self, endpoint_id: str) -> None:
        self.pulls.may_be_due([endpoint_id])
        if self.schedule is not None:
            self.schedule.endpoint_changed(endpoint_id)

    def _discarded(self, deliveries: Sequence[Delivery]) -> None:
        if self.schedule is not None:
            for delivery in deliveries:
                self.schedule.withdraw(delivery.endpoint_id, (delivery.number,))


def _example(endpoint: Endpoint, now_s: float) -> Transition:
    """The transition of a test delivery: the first of the endpoint's events, on a channel named webhook-test."""
    event = STANDARD[0] if ALL in endpoint.events else endpoint.events[0]
    member = event.startswith("member.")
    details = {
        "channel.occupied": b"1",
        "subscription.count": b"1",
        "client_event": b'{"event":"client-test","data":"{}","socket_id":"1.1"}',
    }
    return Transition(
        shard=0,
        stamp=int(now_s * 1e6),
        event=event,
        app_id=endpoint.app_id,
        channel="presence-webhook-test" if member else "webhook-test",
        user="test" if member else None,
        time_ms=int(now_s * 1000),
        detail=details.get(event, b""),
        trace=None,
    )
