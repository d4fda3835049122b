"""Which deliveries are due, and when (store/deliveries.py has the table, and the states).

Bodies are the largest part of a row, so sizes are read first, and then only the rows that the caller has room for.
"""

from collections.abc import Container, Sequence
from typing import Final, NamedTuple

import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection

from redpoll.store.deliveries import Waiting
from redpoll.store.schema import deliveries, webhooks

__all__ = ["Due", "due", "endpoints_with_waiting", "move_due_times", "next_due", "read_due"]

_WAITING: Final = tuple(deliveries.c[name] for name in Waiting._fields)
# The longest due first.
_ORDER: Final = (deliveries.c.at, deliveries.c.number)


class Due(NamedTuple):
    """`more`: there may be other due deliveries."""

    waiting: list[Waiting]
    more: bool


async def read_due(
    connection: AsyncConnection, which: sa.ColumnElement[bool], limit: int, max_bytes: int, without: Container[int] = ()
) -> Due:
    """The first `limit` of these deliveries, the longest due first, of which those `without` are left out. The others
    have bodies of at most `max_bytes` together, but one is read whatever its size."""
    sizes = sa.select(deliveries.c.number, sa.func.length(deliveries.c.body)).where(which)
    found = (await connection.execute(sizes.order_by(*_ORDER).limit(limit))).all()
    chosen: list[int] = []
    more, size = len(found) == limit, 0
    for number, length in found:
        if number in without:
            continue
        size += length
        if chosen and size > max_bytes:
            more = True
            break
        chosen.append(number)
    if not chosen:
        return Due([], more)
    rows = await connection.execute(sa.select(*_WAITING).where(deliveries.c.number.in_(chosen)).order_by(*_ORDER))
    return Due([Waiting(*row) for row in rows], more)


async def due(
    connection: AsyncConnection,
    endpoint_id: str,
    now_s: float,
    limit: int,
    max_bytes: int,
    without: Container[int] = (),
) -> Due:
    """The due deliveries of this endpoint, as `read_due` reads them."""
    which = (deliveries.c.endpoint_id == endpoint_id) & (deliveries.c.state == "waiting") & (deliveries.c.at <= now_s)
    return await read_due(connection, which, limit, max_bytes, without)


async def next_due(connection: AsyncConnection, endpoint_id: str, after_s: float) -> float | None:
    """When the next delivery of this endpoint is due after `after_s`; None if there is none."""
    which = (deliveries.c.endpoint_id == endpoint_id) & (deliveries.c.state == "waiting") & (deliveries.c.at > after_s)
    next_at: float | None = (
        await connection.execute(sa.select(sa.func.min(deliveries.c.at)).where(which))
    ).scalar_one()
    return next_at


async def endpoints_with_waiting(connection: AsyncConnection) -> set[str]:
    """The ids of the endpoints with waiting deliveries, due or not."""
    has_waiting = sa.exists().where(deliveries.c.endpoint_id == webhooks.c.id, deliveries.c.state == "waiting")
    return set((await connection.execute(sa.select(webhooks.c.id).where(has_waiting))).scalars())


async def move_due_times(
    connection: AsyncConnection, *, before_s: float, now_s: float, pauses_s: Sequence[float], lease_s: float = 0.0
) -> None:
    """Moves due times after the clock was set from `before_s` to `now_s`.

    A pending retry keeps its remaining pause. Deliveries without an attempt are due now. No retry is due later than the
    pause after its attempt (`pauses_s`) from now, of pulled deliveries `lease_s` if that is longer. The last two also
    hold if both times are equal, because the clock may have been set while no server ran, or be behind that of the node
    that led before.
    """
    here = deliveries.c.endpoint_id.in_(sa.select(webhooks.c.id)) & (deliveries.c.state == "waiting")
    tried = deliveries.c.attempts > deliveries.c.cycle_from
    change = sa.update(deliveries)
    if now_s != before_s:
        in_pause = here & tried & (deliveries.c.at > min(before_s, now_s))
        await connection.execute(change.where(in_pause).values(at=deliveries.c.at + (now_s - before_s)))
    await connection.execute(change.where(here, ~tried, deliveries.c.at > now_s).values(at=now_s))
    tries = deliveries.c.attempts - deliveries.c.cycle_from
    for number, pause_s in enumerate(pauses_s, 1):
        # The setting may have become shorter: then the last pause is that of all further attempts.
        which = tries >= number if number == len(pauses_s) else tries == number
        await _bring_forward(connection, here & which, now_s, pause_s, lease_s)
    if not pauses_s:
        await _bring_forward(connection, here, now_s, 0.0, lease_s)


async def _bring_forward(
    connection: AsyncConnection, which: sa.ColumnElement[bool], now_s: float, pause_s: float, lease_s: float
) -> None:
    """No delivery is due later than a pause from now, or if it is pulled, a lease."""
    pulled = deliveries.c.endpoint_id.in_(sa.select(webhooks.c.id).where(webhooks.c.url == ""))
    for kind, longest_s in ((~pulled, pause_s), (pulled, max(pause_s, lease_s))):
        latest_s = now_s + longest_s
        change = sa.update(deliveries).where(which, kind, deliveries.c.at > latest_s)
        await connection.execute(change.values(at=latest_s))
