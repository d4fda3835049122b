"""Deliveries of two endpoints, e1 and e2, for the tests of their rows. Not a test."""

import sqlalchemy as sa

from redpoll.store import deliveries as rows
from redpoll.store import webhooks as endpoint_rows
from redpoll.store.deliveries import AttemptRow, Result
from redpoll.store.schema import apps
from redpoll.store.webhooks import Endpoint

PLAIN = {"app_id": "1", "url": "https://e.com", "secret": "s", "events": ("all",), "channels": (), "format": "service"}


async def add_endpoints(connection):
    await connection.execute(sa.insert(apps).values(id="1", name="a", settings="{}"))
    for name in ("e1", "e2"):
        await endpoint_rows.add(connection, Endpoint(id=name, created_at=0.0, **PLAIN))


def row(delivery_id, endpoint_id="e1", at=10.0, **more):
    columns = {"event": "member.added", "channel": "presence-c", "user": "u", "stamp": 17, "time_ms": 170, "trace": "t"}
    return {"id": delivery_id, "endpoint_id": endpoint_id, "body": b"{}", "at": at, "created_at": at, **columns, **more}


def result(numbers, name, state, at, n=1):
    """Of the delivery `name`, whose number is in `numbers`."""
    return Result(numbers[name], name, state, at, AttemptRow(n, at - 0.5, 500, 12, "status", "answered 500", b"\xff"))


async def put(connection, *added):
    return {delivery.id: delivery.number for delivery in await rows.add(connection, added)}


async def state(connection, delivery_id):
    found = await rows.find_by_id(connection, delivery_id)
    return found.state, found.at, found.attempts
