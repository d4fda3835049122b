"""Webhook endpoints in the record store. control/webhooks/endpoints.py decides which changes are allowed."""

from collections.abc import Collection, Sequence
from typing import Any, Final

import msgspec
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection

from redpoll.store import dropped
from redpoll.store.schema import deliveries, webhooks
from redpoll.store.store import batched

__all__ = [
    "Endpoint",
    "add",
    "add_many",
    "all_by_id",
    "any_removable",
    "existing",
    "find_by_id",
    "put",
    "remove_deleted",
    "set_failing_since",
]


class Endpoint(msgspec.Struct, frozen=True, kw_only=True):
    """A receiver of an app's transitions. Times are Unix seconds.

    `url` is "" if the deliveries are pulled. `events` are event names, or "all" for the five standard ones. `channels`
    are prefixes; empty means every channel. `client_events` are names of client events; empty means each of them.
    `batch`: the events of a second are sent in one request (control/webhooks/batches.py). `pin` is the SHA-256 of the
    only accepted certificate in hex, or empty. `previous_secret` is valid until `previous_until`. Since `failing_since`
    every attempt has failed. A deleted endpoint is kept while it has deliveries.
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
    client_events: tuple[str, ...] = ()
    batch: bool = False

    @property
    def pulled(self) -> bool:
        """The back end asks for its deliveries; none is sent."""
        return not self.url

    @property
    def enabled(self) -> bool:
        return self.disabled_at is None

    def secrets(self, now_s: float) -> list[str]:
        """The secrets that sign its deliveries: the newest, then the previous one while it is valid."""
        return [self.secret, self.previous_secret] if now_s < self.previous_until else [self.secret]


_ENDPOINT: Final = tuple(webhooks.c[name] for name in Endpoint.__struct_fields__)


_LISTS: Final = ("events", "channels", "client_events")


async def all_by_id(connection: AsyncConnection, since: int | None = None) -> dict[str, Endpoint]:
    """All endpoints by id, oldest first, including deleted ones that still have deliveries; with `since` only those
    that changed after that version."""
    query = sa.select(*_ENDPOINT).order_by(webhooks.c.created_at, webhooks.c.id)
    rows = await connection.execute(query if since is None else query.where(webhooks.c.version > since))
    return {row.id: _endpoint(row) for row in rows}


async def existing(connection: AsyncConnection, ids: Collection[str]) -> set[str]:
    """Those of these ids that are in the store."""
    stored: set[str] = set()
    for some in batched(ids):
        stored.update((await connection.execute(sa.select(webhooks.c.id).where(webhooks.c.id.in_(some)))).scalars())
    return stored


async def find_by_id(connection: AsyncConnection, endpoint_id: str) -> Endpoint | None:
    """The endpoint with this id, also if it is deleted; None if there is none."""
    row = (await connection.execute(sa.select(*_ENDPOINT).where(webhooks.c.id == endpoint_id))).first()
    return None if row is None else _endpoint(row)


def _endpoint(row: Any) -> Endpoint:
    lists = {name: tuple(msgspec.json.decode(row._mapping[name])) for name in _LISTS}
    return Endpoint(**{**row._mapping, **lists})


def _values(endpoint: Endpoint) -> dict[str, Any]:
    values = msgspec.structs.asdict(endpoint)
    return values | {name: msgspec.json.encode(values[name]).decode() for name in _LISTS}


async def add(connection: AsyncConnection, endpoint: Endpoint) -> None:
    await connection.execute(sa.insert(webhooks).values(_values(endpoint)))


async def add_many(connection: AsyncConnection, endpoints: Sequence[Endpoint]) -> None:
    if endpoints:
        await connection.execute(sa.insert(webhooks), [_values(endpoint) for endpoint in endpoints])


async def put(connection: AsyncConnection, endpoint: Endpoint) -> None:
    """Writes all fields of an endpoint except `failing_since`, which `set_failing_since` writes."""
    values = _values(endpoint)
    del values["failing_since"]
    await connection.execute(sa.update(webhooks).where(webhooks.c.id == endpoint.id).values(values))


async def set_failing_since(connection: AsyncConnection, endpoint_id: str, since: float | None) -> None:
    await connection.execute(sa.update(webhooks).where(webhooks.c.id == endpoint_id).values(failing_since=since))


_REMOVABLE: Final = webhooks.c.deleted_at.is_not(None) & ~sa.exists().where(deliveries.c.endpoint_id == webhooks.c.id)


async def any_removable(connection: AsyncConnection) -> bool:
    """Whether `remove_deleted` would remove something."""
    return bool((await connection.execute(sa.select(sa.exists().where(_REMOVABLE)))).scalar_one())


async def remove_deleted(connection: AsyncConnection) -> list[str]:
    """Removes deleted endpoints that have no deliveries. Returns their ids."""
    statement = sa.delete(webhooks).where(_REMOVABLE).returning(webhooks.c.id)
    removed = list((await connection.execute(statement)).scalars())
    if removed:
        await dropped.forget(connection, removed)
    return removed
