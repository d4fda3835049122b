"""The sender of the outbox, which `manage.py redpoll_outbox` runs. Several may run, on several machines.

Order: a sender takes the first rows of channels, and with them the channels' further rows. On databases with SKIP
LOCKED it holds a lock on each first row until the channel's rows are sent and deleted; a second sender skips such a
channel, because only a first row can be taken. On other databases one sender works at a time, as long as it renews its
lease; when it dies, another one takes over after `LEASE_S`.

Once: every attempt carries the row's correlation id, and the server publishes it once, if the app compares ids and the
repeat comes within its 120 s. On servers without that, a sender that dies between publish and delete causes a repeat.
"""

from __future__ import annotations

import contextlib
import logging
import random
import time
import uuid
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from queue import Empty, SimpleQueue
from typing import Any

from django.db import Error, connections, transaction
from django.db.models import Exists, OuterRef, Q
from django.utils import timezone
from django.utils.version import get_version_tuple

from redpoll_client.django.models import OutboxEvent, OutboxLease
from redpoll_client.django.publishing import NOTIFICATION
from redpoll_client.errors import BadRequest, RateLimited, RedpollError, TooLarge
from redpoll_client.publisher import Publisher

__all__ = ["LEASE_S", "Sender"]

_log = logging.getLogger("redpoll_client")
LEASE_S = 10.0
# What one pass takes: channels, and rows of them.
_CHANNELS = 64
_ROWS = 512
# Publishes at a time, each for another channel.
_AT_ONCE = 8
# Seconds between looks at the table, without and with notifications of the database.
_POLL_S, _POLL_WITH_LISTEN_S = 0.5, 5.0
_LONGEST_WAIT_S = 15.0
# The longest Retry-After that is waited for. With a daily limit it is the time until midnight, but an operator may
# raise the limit before.
_LONGEST_RETRY_AFTER_S = 60.0


class Sender:
    """Sends the rows of one database. `stop` may be called from a signal handler or another thread."""

    def __init__(self, publisher: Publisher, alias: str = "default", say: Callable[[str], Any] = _log.warning) -> None:
        self._publisher = publisher
        self._alias = alias
        self._say = say
        self._stopped = False
        # Ends a pause. A signal handler may call `put` during `get`; with an Event this could deadlock.
        self._stops: SimpleQueue[None] = SimpleQueue()
        self._holder = uuid.uuid4().hex
        self._away = False
        self._database_away = False
        self._waits = 0
        self._retry_after_s = 0.0
        self._listener: Any = None

    def stop(self) -> None:
        """Ends `run` after the rows that are being sent."""
        self._stopped = True
        self._stops.put(None)

    def run(self) -> None:
        """Sends rows until `stop`. Waits, and says so once, while the server or the database is away."""
        while not self._stopped:
            try:
                sent = self.pass_once()
                if self._database_away:
                    self._say("the database answers again")
                self._database_away = False
                if not sent and not self._away:
                    self._wait_for_rows()
            except Error as error:
                if not self._database_away:
                    self._say(f"the database doesn't answer: {error}; trying again")
                self._database_away = True
                connections[self._alias].close()
                self._close_listener()
                self._pause(random.uniform(1, 2))
                continue
            if self._away:
                self._waits += 1
                wait_s = min(_LONGEST_WAIT_S, 0.25 * 2 ** min(self._waits, 8))
                self._pause(max(self._retry_after_s, random.uniform(wait_s / 2, wait_s)))
        self._release()
        self._close_listener()

    def run_once(self) -> int:
        """Sends what is there, and returns the number of rows that are dealt with. Rows that another sender has, and
        those that the server doesn't take at the moment, stay."""
        total = 0
        while (done := self.pass_once()) and not self._stopped:
            total += done
        self._release()
        return total

    def pass_once(self) -> int:
        """Sends what is there, up to a bound; returns the number of rows that are dealt with."""
        connection = connections[self._alias]
        if _skips_locked(connection):
            with transaction.atomic(using=self._alias):
                heads = list(self._heads().select_for_update(skip_locked=True)[:_CHANNELS])
                return self._send_channels({head.channel for head in heads})
        if not self._lease():
            return 0
        return self._send_channels({head.channel for head in self._heads()[:_CHANNELS]})

    def _heads(self) -> Any:
        """The first waiting row of each channel."""
        rows = OutboxEvent.objects.using(self._alias).filter(failed_at=None)
        before = rows.filter(channel=OuterRef("channel"), id__lt=OuterRef("id"))
        return rows.filter(~Exists(before)).order_by("id")

    def _send_channels(self, channels: set[str]) -> int:
        if not channels:
            self._away = False
            return 0
        by_channel = self._rows_of(channels)
        until = time.monotonic() + LEASE_S / 2
        done: list[int] = []
        failed: list[tuple[OutboxEvent, str]] = []
        errors: list[RedpollError] = []
        with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="redpoll-outbox") as pool:
            sending = [pool.submit(self._send_rows, rows, until) for rows in by_channel.values()]
            # One publish may take longer than a lease.
            while wait(sending, timeout=LEASE_S / 4).not_done:
                if not _skips_locked(connections[self._alias]):
                    with contextlib.suppress(Error):
                        self._lease()
            for sent, refused, error in (one.result() for one in sending):
                done += sent
                failed += refused
                if error is not None:
                    errors.append(error)
        OutboxEvent.objects.using(self._alias).filter(id__in=done).delete()
        for row, reason in failed:
            self._say(f"{row} was refused and is set aside: {reason}")
            OutboxEvent.objects.using(self._alias).filter(id=row.id).update(failed_at=timezone.now(), reason=reason)
        self._note(errors)
        return len(done) + len(failed)

    def _rows_of(self, channels: set[str]) -> dict[str, list[OutboxEvent]]:
        """The waiting rows of these channels, in order: of each as many as no other sender has."""
        rows = (
            OutboxEvent.objects.using(self._alias).filter(failed_at=None, channel__in=channels).order_by("id")[:_ROWS]
        )
        candidates = list(rows)
        free = {row.id for row in candidates}
        if _skips_locked(connections[self._alias]):
            ids = OutboxEvent.objects.using(self._alias).filter(id__in=free).select_for_update(skip_locked=True)
            free = set(ids.values_list("id", flat=True))
        by_channel: defaultdict[str, list[OutboxEvent]] = defaultdict(list)
        held: set[str] = set()
        for row in candidates:
            if row.id not in free:
                held.add(row.channel)
            elif row.channel not in held:
                by_channel[row.channel].append(row)
        return by_channel

    def _send_rows(
        self, rows: list[OutboxEvent], until: float
    ) -> tuple[list[int], list[tuple[OutboxEvent, str]], RedpollError | None]:
        """Publishes the rows of one channel in order, until the time is over or the server is away."""
        sent: list[int] = []
        refused: list[tuple[OutboxEvent, str]] = []
        for row in rows:
            if time.monotonic() > until or self._stopped:
                break
            try:
                self._publisher.trigger(
                    row.channel,
                    row.name,
                    row.data,
                    row.socket_id or None,
                    correlation_id=row.correlation_id,
                    already_encoded=True,
                )
            except (BadRequest, TooLarge, ValueError) as error:
                refused.append((row, str(error)))
            except RedpollError as error:
                # A wrong secret or address concerns every row: none is set aside for it.
                return sent, refused, error
            else:
                sent.append(row.id)
        return sent, refused, None

    def _note(self, errors: list[RedpollError]) -> None:
        """Says once that the server is away, and once that it is back."""
        asked_s = max((e.retry_after or 0 for e in errors if isinstance(e, RateLimited)), default=0.0)
        self._retry_after_s = min(asked_s, _LONGEST_RETRY_AFTER_S)
        if errors and not self._away:
            self._say(f"the server doesn't take events; they wait: {errors[0]}")
        elif not errors and self._away:
            self._say("the server takes events again")
            self._waits = 0
        self._away = bool(errors)

    def _lease(self) -> bool:
        """Takes or renews the right to send. A holder that stops renewing loses it."""
        now = time.time()
        leases = OutboxLease.objects.using(self._alias)
        mine = Q(holder=self._holder) | Q(until__lt=now) | Q(until__gt=now + 2 * LEASE_S)
        if leases.filter(mine, id=1).update(holder=self._holder, until=now + LEASE_S):
            return True
        _, made = leases.get_or_create(id=1, defaults={"holder": self._holder, "until": now + LEASE_S})
        return bool(made)

    def _release(self) -> None:
        """Gives the lease back, so that another sender needn't wait for its end."""
        try:
            OutboxLease.objects.using(self._alias).filter(holder=self._holder).update(until=0)
        except Error as error:
            _log.info("the lease ends by itself: %s", error)

    def _pause(self, wait_s: float) -> None:
        """Waits, at most until `stop`."""
        with contextlib.suppress(Empty):
            self._stops.get(timeout=wait_s)

    def _wait_for_rows(self) -> None:
        """Until the database says that there are rows, or it is time to look."""
        connection = connections[self._alias]
        if not _hears_notifications(connection):
            self._pause(_POLL_S)
            return
        if self._listener is None:
            self._listener = connection.copy()
            self._listener.ensure_connection()
            self._listener.set_autocommit(True)
            with self._listener.cursor() as cursor:
                cursor.execute(f"LISTEN {NOTIFICATION}")
            # Rows that came before it listened are seen by the next pass.
            return
        deadline = time.monotonic() + _POLL_WITH_LISTEN_S
        while not self._stopped and time.monotonic() < deadline:
            # Short waits, so that a stop doesn't wait long.
            # The driver's own errors become Django's.
            with self._listener.wrap_database_errors:
                if list(self._listener.connection.notifies(timeout=0.5, stop_after=1)):
                    return

    def _close_listener(self) -> None:
        if self._listener is not None:
            self._listener.close()
            self._listener = None


def _hears_notifications(connection: Any) -> bool:
    """Whether the driver can wait for notifications for a given time: psycopg since 3.2."""
    driver = connection.Database
    return bool(
        connection.vendor == "postgresql"
        and driver.__name__ == "psycopg"
        and get_version_tuple(driver.__version__) >= (3, 2)
    )


def _skips_locked(connection: Any) -> bool:
    """Whether several senders can take different rows. Oracle can, but not the first so many."""
    features = connection.features
    return bool(features.has_select_for_update_skip_locked and features.supports_select_for_update_with_limit)
