"""Deliveries that back ends pull (store/deliveries.py has the table, and the states).

A delivery that is handed out stays `waiting`: it is due again when its lease ends. Handing out adds the row of the
attempt, as unacknowledged; the acknowledgement completes it. So a lease needs no process that remembers it.
"""

from collections.abc import Collection, Sequence
from typing import Final, NamedTuple

import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection

from redpoll.store.deliveries import BATCH, AttemptRow, Result, Waiting, put_results
from redpoll.store.due_deliveries import read_due
from redpoll.store.schema import attempts, deliveries, webhooks

__all__ = ["Ended", "acknowledge", "due", "hand_out", "handed_out", "has_run_out", "next_due", "run_out"]

_TRIES: Final = deliveries.c.attempts - deliveries.c.cycle_from
# An acknowledgement ends these, also dead letters.
_HANDED_OUT: Final = deliveries.c.state.in_(("waiting", "failed")) & (deliveries.c.attempts > 0)
# The enabled endpoints of all apps that are pulled. A list of their ids may be longer than a statement can be.
_PULLED: Final = sa.select(webhooks.c.id).where(webhooks.c.url == "", webhooks.c.disabled_at.is_(None))
# PostgreSQL's integers have 32 bits. It is 24 days: so late may an acknowledgement of a dead letter come.
_MAX_MS: Final = 2**31 - 1


class Ended(NamedTuple):
    """A delivery that was acknowledged, or became a dead letter. `waited`: until now. `size` is that of its body."""

    number: int
    id: str
    endpoint_id: str
    waited: bool
    size: int


_ENDED: Final = (
    deliveries.c.number,
    deliveries.c.id,
    deliveries.c.endpoint_id,
    (deliveries.c.state == "waiting").label("waited"),
    sa.func.length(deliveries.c.body),
)


async def due(
    connection: AsyncConnection,
    endpoint_ids: Collection[str],
    now_s: float,
    max_attempts: int,
    limit: int,
    max_bytes: int,
) -> list[Waiting]:
    """The due deliveries of these endpoints that have attempts left, as `read_due` reads them."""
    which = deliveries.c.endpoint_id.in_(endpoint_ids) & (deliveries.c.state == "waiting") & (deliveries.c.at <= now_s)
    return (await read_due(connection, which & (max_attempts > _TRIES), limit, max_bytes)).waiting


async def next_due(connection: AsyncConnection, endpoint_ids: Collection[str], max_attempts: int) -> float | None:
    """When the next delivery of these endpoints is due; None if none waits."""
    which = deliveries.c.endpoint_id.in_(endpoint_ids) & (deliveries.c.state == "waiting")
    query = sa.select(sa.func.min(deliveries.c.at)).where(which, max_attempts > _TRIES)
    next_at: float | None = (await connection.execute(query)).scalar_one()
    return next_at


async def hand_out(
    connection: AsyncConnection, chosen: Sequence[Waiting], now_s: float, until_s: Sequence[float], outcome: str
) -> None:
    """Notes that these due deliveries are handed out now, each to come again at its time of `until_s`."""
    reason = "handed out, and not acknowledged"
    results = [
        Result(one.number, one.id, "waiting", at, AttemptRow(one.attempts + 1, now_s, None, 0, outcome, reason, b""))
        for one, at in zip(chosen, until_s, strict=True)
    ]
    if results:
        await put_results(connection, results)


async def handed_out(connection: AsyncConnection, endpoint_ids: Collection[str], ids: Sequence[str]) -> list[str]:
    """The ids of those of these deliveries that `acknowledge` would end."""
    query = sa.select(deliveries.c.id).where(_acknowledged(endpoint_ids, ids))
    return list((await connection.execute(query)).scalars())


async def acknowledge(
    connection: AsyncConnection, endpoint_ids: Collection[str], ids: Sequence[str], now_s: float, outcome: str
) -> list[Ended]:
    """Ends those of these deliveries that were handed out, also after their lease, or as dead letters. Returns them."""
    query = sa.select(*_ENDED).where(_acknowledged(endpoint_ids, ids))
    ended = [Ended(*row) for row in await connection.execute(query)]
    if not ended:
        return []
    numbers = [one.number for one in ended]
    end = sa.update(deliveries).where(deliveries.c.number.in_(numbers), _HANDED_OUT)
    await connection.execute(end.values(state="delivered", at=now_s))
    last = sa.select(deliveries.c.attempts).where(deliveries.c.number == attempts.c.delivery).scalar_subquery()
    took_ms = (now_s - attempts.c.at) * 1_000
    duration_ms = sa.case((took_ms <= 0, 0), (took_ms >= _MAX_MS, _MAX_MS), else_=sa.cast(took_ms, sa.Integer))
    completed = (
        sa.update(attempts)
        .where(attempts.c.delivery.in_(numbers), attempts.c.n == last)
        .values(outcome=outcome, reason="acknowledged", duration_ms=duration_ms)
    )
    await connection.execute(completed)
    return ended


def _acknowledged(endpoint_ids: Collection[str], ids: Sequence[str]) -> sa.ColumnElement[bool]:
    return deliveries.c.id.in_(ids) & deliveries.c.endpoint_id.in_(endpoint_ids) & _HANDED_OUT


async def has_run_out(connection: AsyncConnection, now_s: float, max_attempts: int) -> bool:
    """Whether `run_out` would find something."""
    query = sa.select(sa.exists().where(*_run_out(now_s, max_attempts)))
    return bool((await connection.execute(query)).scalar_one())


async def run_out(connection: AsyncConnection, now_s: float, max_attempts: int) -> list[Ended]:
    """Makes dead letters of the deliveries of enabled endpoints whose last lease has ended, of at most BATCH, and
    returns them."""
    which = _run_out(now_s, max_attempts)
    rows = await connection.execute(sa.select(*_ENDED).where(*which).order_by(deliveries.c.number).limit(BATCH))
    ended = [Ended(*row) for row in rows]
    if ended:
        numbers = [one.number for one in ended]
        change = sa.update(deliveries).where(deliveries.c.number.in_(numbers), *which)
        await connection.execute(change.values(state="failed", at=now_s))
    return ended


def _run_out(now_s: float, max_attempts: int) -> tuple[sa.ColumnElement[bool], ...]:
    waits = deliveries.c.state == "waiting"
    return deliveries.c.endpoint_id.in_(_PULLED), waits, deliveries.c.at <= now_s, max_attempts <= _TRIES
