"""How many deliveries of an endpoint were never stored, because too many waited."""

from collections.abc import Collection, Mapping
from typing import Any, Final

import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection

from redpoll.store.schema import meta
from redpoll.store.store import batched

__all__ = ["counts", "forget", "note"]

# Rows of `meta` by endpoint: NUMBER TIME.
_NAME: Final = "dropped:"


async def note(connection: AsyncConnection, dropped: Mapping[str, int], now_s: float) -> None:
    """Adds to the numbers of deliveries that were dropped, by endpoint id."""
    before = await counts(connection, dropped)
    for endpoint_id, count in dropped.items():
        value = f"{before.get(endpoint_id, (0, 0.0))[0] + count} {now_s}"
        if endpoint_id in before:
            change: Any = sa.update(meta).where(meta.c.name == _NAME + endpoint_id).values(value=value)
        else:
            change = sa.insert(meta).values(name=_NAME + endpoint_id, value=value)
        await connection.execute(change)


async def counts(connection: AsyncConnection, endpoint_ids: Collection[str] | None) -> dict[str, tuple[int, float]]:
    """By endpoint id, of these endpoints or, with None, of all: how many were dropped, and when the last one. Endpoints
    without any are missing."""
    if endpoint_ids is None:
        chosen = [meta.c.name.startswith(_NAME)]
    else:
        chosen = [meta.c.name.in_([_NAME + one for one in some]) for some in batched(endpoint_ids)]
    entries: dict[str, tuple[int, float]] = {}
    for which in chosen:
        for row in await connection.execute(sa.select(meta).where(which)):
            count, at = row.value.split()
            entries[row.name.removeprefix(_NAME)] = int(count), float(at)
    return entries


async def forget(connection: AsyncConnection, endpoint_ids: Collection[str]) -> None:
    """Removes these numbers, for endpoints that were removed."""
    for some in batched(endpoint_ids):
        await connection.execute(sa.delete(meta).where(meta.c.name.in_([_NAME + one for one in some])))
