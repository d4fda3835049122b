"""Webhooks as the rest of the control plane knows them: endpoints, deliveries, dead letters, and what moves them.

    outbox ─ intake ─> store ─ schedule ─ sender ─> receiver
                         └─ results <─┘

The store alone says what is still to be done, so this process may be killed at any moment. Without `start` nothing
moves, and everything else can be done: that is how commands work where no server runs.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Final
from uuid import uuid4

import structlog
from sqlalchemy.exc import SQLAlchemyError

from redpoll.cluster.outbox import Transition
from redpoll.control.records import RecordError, Records
from redpoll.control.webhooks.deadletters import DeadLetters
from redpoll.control.webhooks.endpoints import ALL, Endpoints
from redpoll.control.webhooks.intake import Intake, Rows
from redpoll.control.webhooks.outcomes import Attempt, Outcome
from redpoll.control.webhooks.payloads import STANDARD, headers, render
from redpoll.control.webhooks.schedule import Schedule
from redpoll.control.webhooks.sender import Sender, Target
from redpoll.protocol.apps import Key
from redpoll.settings import Settings
from redpoll.store import deliveries as delivery_rows
from redpoll.store.deliveries import STATES, AttemptRow, Delivery, Depth
from redpoll.store.sqlite import reason_of
from redpoll.store.store import Store
from redpoll.store.webhooks import Endpoint

__all__ = ["FAILING_AFTER_S", "Webhooks"]

log = structlog.get_logger(__name__)

# An endpoint that has failed for so long is shown as failing; one that fails now and then is not.
FAILING_AFTER_S: Final = 300.0
# Of each endpoint, delivered and discarded deliveries are kept so long and so many, for people to look at.
_KEEP_S: Final = 7 * 86_400.0
_KEEP: Final = 1_000
# But the last minute's in any case: a power loss may bring back rows that Redis had forgotten, and they are known by
# what is here.
_KEEP_ALL_S: Final = 60.0
_TIDY_EVERY_S: Final = 5.0
_FINISH_WITHIN_S: Final = 3.0
_MOST_SHOWN: Final = 10_000


class Webhooks:
    """`load()`, then everything but sending; `start()` and `finish()` where a server runs. `clock` tells Unix seconds,
    `steady` seconds that nobody sets.

    What can't be done raises RecordError with a sentence. Times are Unix seconds.
    """

    def __init__(
        self,
        store: Store,
        records: Records,
        settings: Settings,
        *,
        clock: Callable[[], float] = time.time,
        steady: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._records = records
        self._settings = settings
        self._clock = clock
        self._steady = steady
        self._endpoints = Endpoints(store, records, self._get_sender, clock)
        self._endpoints.on_change = self._endpoint_changed
        self._dead_letters = DeadLetters(store, self._endpoints, clock, self._due_at, self._given_up)
        self._sender: Sender | None = None
        self._intake: Intake | None = None
        self._schedule: Schedule | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._depths: Mapping[str, Depth] = {}

    async def load(self) -> None:
        """Reads the endpoints, behind the records, and tells those what workers are to write rows of."""
        await self._endpoints.load()

    def start(self, outbox: Rows, on_traced: Callable[[Transition, str, str], None]) -> None:
        """Begins to take rows out of the outbox and to send; `on_traced` as in Intake. Raises RecordError where the
        settings don't let it."""
        sender = self._get_sender()
        self._schedule = Schedule(
            self._store,
            self._endpoints,
            sender,
            self._settings.webhook_retry_after_s,
            self._signing_key,
            self._clock,
            self._steady,
        )
        self._intake = Intake(
            outbox,
            self._store,
            self._endpoints.of_app,
            self._endpoints.any_enabled,
            self._schedule.add,
            on_traced,
            self._clock,
        )
        loop = asyncio.get_running_loop()
        self._tasks = [
            loop.create_task(self._schedule.run(), name="webhook schedule"),
            loop.create_task(self._intake.run(), name="webhook intake"),
            loop.create_task(self._tidy_for_ever(), name="webhook tidying"),
        ]

    async def finish(self) -> None:
        """Ends in order: attempts under way get 3 s; those not ended by then are made again by the next process."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._schedule is not None:
            await self._schedule.finish(_FINISH_WITHIN_S)
        if self._sender is not None:
            await self._sender.close()
            self._sender = None

    def counters(self) -> Mapping[str, float]:
        """For metrics.FAMILIES; what is waiting is up to 5 s old."""
        if self._schedule is None or self._intake is None:
            return {}
        depths = self._depths.values()
        oldest = [depth.oldest_at for depth in depths if depth.oldest_at is not None]
        told: dict[str, float] = {
            "webhook_transitions_total": self._intake.taken_total,
            "webhook_rows_unreadable_total": self._intake.unreadable_total,
            "webhook_deliveries_waiting": sum(depth.waiting for depth in depths),
            "webhook_oldest_seconds": max(0.0, self._clock() - min(oldest)) if oldest else 0.0,
            "webhook_dead_letters": sum(depth.failed for depth in depths),
            "webhook_failed_total": self._schedule.failed_total,
            "webhook_attempts_running": self._schedule.running,
            "webhook_endpoints_failing": sum(1 for each in self._endpoints.every() if self.failing_since(each)),
        }
        told |= {f"webhook_attempts_{outcome}_total": self._schedule.attempts[outcome] for outcome in Outcome}
        return told

    def attempts_by_app(self) -> Mapping[str, tuple[int, int]]:
        """By app id: attempts that delivered, and that failed, since the start."""
        return {} if self._schedule is None else self._schedule.by_app

    # -- endpoints

    def endpoints_of(self, app_id: str) -> list[Endpoint]:
        """Oldest first, without deleted ones."""
        self._check_app(app_id)
        return list(self._endpoints.of_app(app_id))

    def endpoint(self, endpoint_id: str) -> Endpoint:
        """One that isn't deleted."""
        return self._endpoints.one(endpoint_id)

    def failing_since(self, endpoint: Endpoint) -> float | None:
        """Since when every attempt has failed, where that is long enough to be told; None otherwise."""
        since = endpoint.failing_since
        if since is None or endpoint.deleted_at is not None or self._clock() - since < FAILING_AFTER_S:
            return None
        return since

    async def create(
        self,
        app_id: str,
        url: str,
        *,
        events: Sequence[str] = (ALL,),
        format: str = "service",
        channels: Sequence[str] = (),
        pin: bool = False,
    ) -> Endpoint:
        """A new endpoint, enabled, with a secret of its own. `events` are names, and "all" for the spec's five;
        `channels` are prefixes, none for every channel; `pin`: only the certificate that is shown now is taken."""
        return await self._endpoints.create(app_id, url, events, format, channels, pin)

    async def change(
        self,
        endpoint_id: str,
        *,
        url: str | None = None,
        events: Sequence[str] | None = None,
        channels: Sequence[str] | None = None,
        format: str | None = None,
    ) -> Endpoint:
        """None: as it is. Deliveries that wait go to the new URL, in the format in which they were written."""
        return await self._endpoints.change(endpoint_id, url, events, channels, format)

    async def set_enabled(self, endpoint_id: str, enabled: bool) -> Endpoint:
        """Disabled, it is told of nothing that happens from now on; what waits for it is tried when it is enabled."""
        return await self._endpoints.set_enabled(endpoint_id, enabled)

    async def rotate(self, endpoint_id: str) -> Endpoint:
        """A new secret. Deliveries are signed with `previous_secret`, too, until `previous_until`, a day from now."""
        return await self._endpoints.rotate(endpoint_id)

    async def pin(self, endpoint_id: str) -> Endpoint:
        """Takes only the certificate that is shown now, from now on; again: pins anew."""
        return await self._endpoints.pin(endpoint_id)

    async def unpin(self, endpoint_id: str) -> Endpoint:
        """Takes any valid certificate again."""
        return await self._endpoints.unpin(endpoint_id)

    async def delete(self, endpoint_id: str) -> Endpoint:
        """What waits for it is discarded, and seen as such; its dead letters stay until they are discarded."""
        endpoint = await self._endpoints.delete(endpoint_id)
        await self._endpoints.discard_waiting(endpoint_id)
        return endpoint

    async def test(self, endpoint_id: str) -> Attempt:
        """One attempt at an example of what it is sent, now, enabled or not. Nothing of it is kept."""
        endpoint = self._endpoints.one(endpoint_id)
        now_s = self._clock()
        example = _example(endpoint, now_s)
        body = render(endpoint.format, example)
        told = headers(
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
        return await self._get_sender().attempt(Target(endpoint.url, endpoint.pin), body, told)

    async def secrets_of(self, app_id: str) -> dict[str, list[str]]:
        """What deliveries of an app may be signed with now, by the endpoint's id."""
        now_s = self._clock()
        return {each.id: each.secrets(now_s) for each in self._endpoints.of_app(app_id)}

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
        """Those of an app or one of its endpoints, deleted ones' too, that came last into their state first. `before`:
        `(at, number)` of the last one of the page before."""
        chosen = self._endpoints_in(app_id, endpoint_id)
        async with self._store.reading() as connection:
            return await delivery_rows.find(connection, chosen, states, min(limit, _MOST_SHOWN), before)

    async def delivery(self, delivery_id: str) -> tuple[Delivery, Endpoint, list[AttemptRow]]:
        """One, with its endpoint, which may be deleted, and every attempt in order."""
        async with self._store.reading() as connection:
            found = await delivery_rows.one(connection, delivery_id)
            made = [] if found is None else await delivery_rows.attempts_at(connection, found.number)
        endpoint = None if found is None else self._endpoints.known(found.endpoint_id)
        if found is None or endpoint is None:
            raise RecordError(f"there is no delivery with the id {delivery_id}")
        return found, endpoint, made

    async def depths(self, app_id: str) -> dict[str, Depth]:
        """What waits and what failed, by the id of the endpoint; those with neither are missing."""
        chosen = self._endpoints_in(app_id, None)
        async with self._store.reading() as connection:
            return await delivery_rows.depths(connection, chosen)

    # -- dead letters

    async def retry(self, ids: Sequence[str]) -> list[Delivery]:
        """Has dead letters tried anew, at once and with all their retries; all of them or none. Where no server runs,
        the next one tries them."""
        return await self._dead_letters.retry(ids)

    async def discard(self, ids: Sequence[str]) -> list[Delivery]:
        """Gives dead letters up, those that are being tried anew too; all of them or none."""
        return await self._dead_letters.discard(ids)

    async def retry_all(self, app_id: str, endpoint_id: str | None = None) -> int:
        """`retry` of every dead letter of an app, or of one of its endpoints. Returns how many."""
        return await self._dead_letters.retry_all(self._endpoints_in(app_id, endpoint_id))

    async def discard_all(self, app_id: str, endpoint_id: str | None = None) -> int:
        """`discard` of every dead letter of an app, or of one of its endpoints, that isn't being tried anew."""
        return await self._dead_letters.discard_all(self._endpoints_in(app_id, endpoint_id))

    # -- within

    def _check_app(self, app_id: str) -> None:
        if app_id not in self._records.apps:
            raise RecordError(f"there is no app with the id {app_id}")

    def _endpoints_in(self, app_id: str, endpoint_id: str | None) -> list[str]:
        """Deleted ones too."""
        self._check_app(app_id)
        ids = self._endpoints.ids_of(app_id)
        if endpoint_id is None:
            return ids
        if endpoint_id not in ids:
            raise RecordError(f"app {app_id} has no webhook with the id {endpoint_id}")
        return [endpoint_id]

    def _get_sender(self) -> Sender:
        """Made when it is first needed: most commands need none."""
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
        self._due_at(endpoint.id)

    def _due_at(self, endpoint_id: str) -> None:
        if self._schedule is not None:
            self._schedule.look_at(endpoint_id)

    def _given_up(self, deliveries: Sequence[Delivery]) -> None:
        if self._schedule is not None:
            for each in deliveries:
                self._schedule.withdraw(each.endpoint_id, (each.number,))

    async def _tidy_for_ever(self) -> None:
        while True:
            try:
                await self._tidy()
            except SQLAlchemyError as error:
                log.warning("webhooks not tidied", reason=reason_of(error))
            except Exception:
                # A fault of ours, by which nothing would ever be tidied again.
                log.exception("tidying of webhooks failed")
            await asyncio.sleep(_TIDY_EVERY_S)

    async def _tidy(self) -> None:
        """Counts what waits, ends deletions that a kill interrupted, and forgets what is old."""
        assert self._schedule is not None
        assert self._intake is not None
        endpoints = self._endpoints.every()
        async with self._store.reading() as connection:
            self._depths = await delivery_rows.depths(connection, [each.id for each in endpoints])
        for each in endpoints:
            if each.deleted_at is not None and each.id in self._depths and self._depths[each.id].waiting:
                await self._endpoints.discard_waiting(each.id)
        now_s = self._clock()
        before = min(now_s - _KEEP_ALL_S, self._intake.forgotten_before())
        await self._prune(now_s - _KEEP_S, before)
        await self._endpoints.forget_deleted()
        self._schedule.forget(self._endpoints.known)

    async def _prune(self, older_than: float, before: float) -> None:
        async with self._store.reading() as connection:
            overfull = await delivery_rows.overfull(connection, keep=_KEEP, older_than=older_than)
        for endpoint_id in overfull:
            removed = 1
            while removed:
                async with self._store.change() as connection:
                    removed = await delivery_rows.forget_finished(
                        connection, endpoint_id, keep=_KEEP, older_than=older_than, before=before
                    )


def _example(endpoint: Endpoint, now_s: float) -> Transition:
    """What is sent as a test: the first of the endpoint's events, on a channel that says what this is."""
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
