"""Removal of deliveries that are finished, and of dead letters beyond the bound (deliveries.py has the table, and the
states). Both are kept for people to look at. control/webhooks/tidying.py decides how many, and how long."""

import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection

from redpoll.store.deliveries import BATCH
from redpoll.store.schema import deliveries, webhooks

__all__ = ["endpoints_to_limit", "endpoints_to_prune", "remove_dead_letters", "remove_finished"]


async def endpoints_to_prune(connection: AsyncConnection, *, keep: int, older_than: float) -> list[str]:
    """The ids of the endpoints for which `remove_finished` may find something to remove."""
    wanted = (
        condition
        for state in ("delivered", "discarded")
        for condition in (_has_more(state, keep), _of(state).where(deliveries.c.at <= older_than).exists())
    )
    return list((await connection.execute(sa.select(webhooks.c.id).where(sa.or_(*wanted)))).scalars())


def _of(state: str) -> sa.Select[tuple[int]]:
    """The endpoint's deliveries in this state, in a query of endpoints."""
    which = (deliveries.c.endpoint_id == webhooks.c.id) & (deliveries.c.state == state)
    return sa.select(deliveries.c.at).where(which).correlate(webhooks)


def _has_more(state: str, keep: int) -> sa.ColumnElement[bool]:
    """Whether there are more than `keep`: reads no more than these in the index. To count millions takes longer than a
    statement may."""
    return _of(state).order_by(deliveries.c.at).offset(keep).limit(1).scalar_subquery().is_not(None)


async def remove_finished(
    connection: AsyncConnection, endpoint_id: str, *, keep: int, older_than: float, before: float
) -> int:
    """Removes delivered and discarded deliveries that were finished by `older_than`, and all but the newest `keep` in
    each state, but none that were finished after `before`. One call removes at most BATCH per state; returns the
    number."""
    removed = 0
    for state in ("delivered", "discarded"):
        which = (deliveries.c.endpoint_id == endpoint_id) & (deliveries.c.state == state)
        is_old = deliveries.c.at <= older_than
        is_excess = await _excess(connection, which, keep)
        if is_excess is not None:
            is_old |= is_excess
        old = sa.select(deliveries.c.number).where(which, deliveries.c.at <= before, is_old).limit(BATCH)
        statement = sa.delete(deliveries).where(deliveries.c.number.in_(old.scalar_subquery()))
        removed += (await connection.execute(statement)).rowcount
    return removed


async def _excess(
    connection: AsyncConnection, which: sa.ColumnElement[bool], keep: int
) -> sa.ColumnElement[bool] | None:
    """All of these but the newest `keep`; None if there are no more."""
    newest = sa.select(deliveries.c.at, deliveries.c.number).where(which)
    newest = newest.order_by(deliveries.c.at.desc(), deliveries.c.number.desc())
    first = (await connection.execute(newest.offset(keep).limit(1))).first()
    if first is None:
        return None
    at, number = first
    # Many may have ended at the same time.
    return sa.or_(deliveries.c.at < at, (deliveries.c.at == at) & (deliveries.c.number <= number))


async def endpoints_to_limit(connection: AsyncConnection, *, keep: int) -> list[str]:
    """The ids of the endpoints with more than `keep` dead letters."""
    return list((await connection.execute(sa.select(webhooks.c.id).where(_has_more("failed", keep)))).scalars())


async def remove_dead_letters(connection: AsyncConnection, endpoint_id: str, *, keep: int, before: float) -> int:
    """Removes all but the endpoint's newest `keep` dead letters, but none that failed after `before`, and at most
    BATCH. Returns the number. The operator may handle some at any time, so this looks again which are too many."""
    failed = (deliveries.c.endpoint_id == endpoint_id) & (deliveries.c.state == "failed")
    is_excess = await _excess(connection, failed, keep)
    if is_excess is None:
        return 0
    old = sa.select(deliveries.c.number).where(failed, deliveries.c.at <= before, is_excess)
    oldest = old.order_by(deliveries.c.at).limit(BATCH)
    statement = sa.delete(deliveries).where(deliveries.c.number.in_(oldest.scalar_subquery()))
    return (await connection.execute(statement)).rowcount
