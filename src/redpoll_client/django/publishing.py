"""Publishes if and only if the transaction commits: at once after it, or by the outbox."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from django.db import connections, router, transaction

from redpoll_client.django.configuration import get_publisher
from redpoll_client.django.models import OutboxEvent
from redpoll_client.names import check_socket_id

__all__ = ["NOTIFICATION", "publish_on_commit", "store"]

# The PostgreSQL notification that wakes senders.
NOTIFICATION = "redpoll_outbox"


def publish_on_commit(
    channels: str | Sequence[str], event: str, data: Any, socket_id: str | None = None, *, using: str | None = None
) -> None:
    """Publishes an event once the transaction has committed; at once outside of one.

    The data are encoded now: later changes of an object don't show. Raises ValueError for what the server would refuse.
    An error of the publish itself is logged by Django and not raised, because the transaction is over; an event is lost
    if the process dies before it is sent. `store` loses none.
    """
    publisher = get_publisher()
    call = publisher.prepare(channels, event, data, socket_id)
    transaction.on_commit(lambda: publisher.send(call), using=using, robust=True)


def store(
    channel: str, event: str, data: Any, socket_id: str | None = None, *, using: str | None = None
) -> OutboxEvent:
    """Stores an event in the outbox, in the transaction that is open. `manage.py redpoll_outbox` publishes it after the
    commit, however often processes die.

    Events of one channel are published in the order of their rows. Transactions that run at the same time may commit in
    another order. Raises ValueError for what the server would refuse, and TransactionManagementError outside of a
    transaction.
    """
    alias = using or router.db_for_write(OutboxEvent)
    connection = connections[alias]
    if not connection.in_atomic_block:
        raise transaction.TransactionManagementError(
            "store() belongs into transaction.atomic(), beside what the event tells"
        )
    row = OutboxEvent(
        channel=channel,
        name=event,
        data=get_publisher().encoded(channel, event, data),
        socket_id="" if socket_id is None else check_socket_id(socket_id),
    )
    row.save(using=alias, force_insert=True)
    if connection.vendor == "postgresql":
        # Delivered at the commit, once for a transaction.
        with connection.cursor() as cursor:
            cursor.execute("SELECT pg_notify(%s, '')", [NOTIFICATION])
    return row
