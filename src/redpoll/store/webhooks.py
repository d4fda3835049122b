"""Webhook endpoints in the store: rows in, `Endpoint` out. Who may make or change one is control/webhooks' business."""

from typing import Any

import msgspec
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection

from redpoll.store.schema import deliveries, webhooks

__all__ = ["Endpoint", "add", "every", "forget_deleted", "one", "put", "set_failing_since"]


class Endpoint(msgspec.Struct, frozen=True, kw_only=True):
    """Where an app's transitions are told. Times are Unix seconds.

    `events` are names, "all" among them for the spec's five (6.2); `channels` are prefixes, none for every channel.
    `pin` is the SHA-256 of the certificate in hex, empty for none. `previous_secret` is good until `previous_until`.
    `failing_since`: since then each attempt has failed. `deleted_at`: it is kept for the sake of its deliveries alone.
    """

    id: str
    app_id: str
    url: str
    secret: str
    events: tuple[str, ...]
    channels: tuple[str, ...]
    format: str
    created_at: float
    pin: str = ""
    previous_secret: str = ""
    previous_until: float = 0.0
    disabled_at: float | None = None
    failing_since: float | None = None
    deleted_at: float | None = None

    @property
    def enabled(self) -> bool:
        return self.disabled_at is None

    def secrets(self, now_s: float) -> list[str]:
        """What its deliveries may be signed with: the newest first, the one before while it is still good."""
        return [self.secret, self.previous_secret] if now_s < self.previous_until else [self.secret]


async def every(connection: AsyncConnection) -> dict[str, Endpoint]:
    """All endpoints by id, oldest first; the deleted ones too, while there are deliveries to them."""
    rows = await connection.execute(sa.select(webhooks).order_by(webhooks.c.created_at, webhooks.c.id))
    return {row.id: _endpoint(row) for row in rows}


async def one(connection: AsyncConnection, endpoint_id: str) -> Endpoint | None:
    """The endpoint with this id, a deleted one too, or None."""
    row = (await connection.execute(sa.select(webhooks).where(webhooks.c.id == endpoint_id))).first()
    return None if row is None else _endpoint(row)


def _endpoint(row: Any) -> Endpoint:
    lists = {name: tuple(msgspec.json.decode(row._mapping[name])) for name in ("events", "channels")}
    return Endpoint(**{**row._mapping, **lists})


def _values(endpoint: Endpoint) -> dict[str, Any]:
    values = msgspec.structs.asdict(endpoint)
    return values | {name: msgspec.json.encode(values[name]).decode() for name in ("events", "channels")}


async def add(connection: AsyncConnection, endpoint: Endpoint) -> None:
    await connection.execute(sa.insert(webhooks).values(_values(endpoint)))


async def put(connection: AsyncConnection, endpoint: Endpoint) -> None:
    """Writes everything of an endpoint anew but `failing_since`, which is the deliveries' to know."""
    values = _values(endpoint)
    del values["failing_since"]
    await connection.execute(sa.update(webhooks).where(webhooks.c.id == endpoint.id).values(values))


async def set_failing_since(connection: AsyncConnection, endpoint_id: str, since: float | None) -> None:
    await connection.execute(sa.update(webhooks).where(webhooks.c.id == endpoint_id).values(failing_since=since))


async def forget_deleted(connection: AsyncConnection) -> list[str]:
    """Removes the deleted endpoints that no delivery is left to. Returns their ids."""
    told = sa.exists().where(deliveries.c.endpoint_id == webhooks.c.id)
    gone = sa.delete(webhooks).where(webhooks.c.deleted_at.is_not(None), ~told).returning(webhooks.c.id)
    return list((await connection.execute(gone)).scalars())
