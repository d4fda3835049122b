"""Webhook deliveries and their attempts in the record store. control/webhooks decides when to attempt one.

    waiting ──2xx, or acknowledged──────────────┬──> delivered ─┐
       ↑ │ └─the last failure──> failed ──late──┘               ├─> removed when old
       │ │                       │ │ └──discard────> discarded ─┘
       └─┴──a failure; retry─────┘ └──one too many──> removed

Every update checks the state that it starts from, so a late update changes nothing. A failed delivery is a dead letter.
Of those that back ends pull (pulled.py), a late acknowledgement ends dead letters too.
If the operator retries it, it waits again, and `cycle_from` counts the attempts before.
"""

from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from functools import cache
from typing import Any, Final, NamedTuple

import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection

from redpoll.store.dropped import counts
from redpoll.store.schema import attempts, deliveries, insert_of, webhooks
from redpoll.store.store import batched

__all__ = [
    "BATCH",
    "STATES",
    "Announcement",
    "AttemptRow",
    "Delivery",
    "Depth",
    "Result",
    "Waiting",
    "add",
    "attempts_at",
    "depths",
    "discard",
    "find",
    "find_by_id",
    "find_by_ids",
    "known",
    "numbers",
    "put_results",
    "retry",
    "since",
]

STATES: Final = ("waiting", "delivered", "failed", "discarded")
# The number of rows per statement, and per transaction of a long operation. SQLite allows 32,766 values in a statement.
BATCH: Final = 5_000
# What was announced is read in pages of this size, because publishes wait while one is taken in.
_PAGE: Final = 1_000


class Waiting(NamedTuple):
    """The fields of a delivery that an attempt needs. `attempts` counts all attempts so far, `cycle_from` those before
    the operator's last retry; `trace` is as in Delivery."""

    number: int
    id: str
    endpoint_id: str
    event: str
    channel: str
    user: str | None
    body: bytes
    attempts: int
    cycle_from: int
    trace: str | None = None


class Delivery(NamedTuple):
    """A whole row (schema.py). `stamp` is the transition's number in its shard, `time_ms` its Unix time. `trace` is the
    trace id of a client event."""

    number: int
    id: str
    endpoint_id: str
    event: str
    channel: str
    user: str | None
    stamp: int
    time_ms: int
    trace: str | None
    body: bytes
    state: str
    at: float
    attempts: int
    cycle_from: int
    created_at: float

    @property
    def dead_letter(self) -> str | None:
        """Its state as a dead letter: pending, retrying, delivered or discarded; None if it never failed."""
        if self.state == "failed":
            return "pending"
        if not self.cycle_from and self.state != "discarded":
            return None
        return "retrying" if self.state == "waiting" else self.state


class AttemptRow(NamedTuple):
    """One attempt; `n` counts from 1. `at` is the time when it began. `status` is None without an answer."""

    n: int
    at: float
    status: int | None
    duration_ms: int
    outcome: str
    reason: str
    response: bytes


class Result(NamedTuple):
    """The new `state` and `at` of a waiting delivery after an attempt. It is written only if that was the delivery's
    next attempt. If the delivery was removed during it, another one may have its number, so the `id` is compared."""

    number: int
    id: str
    state: str
    at: float
    attempt: AttemptRow


class Announcement(NamedTuple):
    """What a delivery announces to its endpoint."""

    endpoint_id: str
    event: str
    channel: str
    user: str | None


class Depth(NamedTuple):
    """The number of waiting deliveries and of dead letters. `oldest_at`: when the oldest waiting one was created.
    `waiting_bytes`: the size of their bodies, if `depths` was asked for it. `dropped`: how many were never stored
    because too many waited, the last of them at `dropped_at`."""

    waiting: int
    failed: int
    oldest_at: float | None
    waiting_bytes: int = 0
    dropped: int = 0
    dropped_at: float | None = None


_DELIVERY: Final = tuple(deliveries.c[name] for name in Delivery._fields)


# -- used by intake


async def add(connection: AsyncConnection, rows: Sequence[Mapping[str, Any]]) -> list[Waiting]:
    """Adds new waiting deliveries, without those whose id exists already. Returns the added ones.

    `rows` have the columns of `Delivery` except `number`, `state`, `attempts` and `cycle_from`. The numbers are
    assigned here, which needs a single writer; the database would return them row by row.
    """
    present = await known(connection, [row["id"] for row in rows])
    new: dict[str, Mapping[str, Any]] = {row["id"]: row for row in rows if row["id"] not in present}
    if not new:
        return []
    last = (await connection.execute(sa.select(sa.func.max(deliveries.c.number)))).scalar_one() or 0
    initial = {"state": "waiting", "attempts": 0, "cycle_from": 0}
    written = [{**row, **initial, "number": number} for number, row in enumerate(new.values(), last + 1)]
    await connection.execute(sa.insert(deliveries), written)
    return [Waiting(*(row[name] for name in Waiting._fields)) for row in written]


async def known(connection: AsyncConnection, ids: Sequence[str]) -> set[str]:
    """Those of the ids that a delivery has."""
    known_ids: set[str] = set()
    for start in range(0, len(ids), BATCH):
        statement = sa.select(deliveries.c.id).where(deliveries.c.id.in_(ids[start : start + BATCH]))
        known_ids.update((await connection.execute(statement)).scalars())
    return known_ids


async def since(
    connection: AsyncConnection, created_at: float | None, seconds: float, events: Collection[str]
) -> AsyncIterator[list[Announcement]]:
    """What was announced of these events since `seconds` before this Unix time, newest first, in pages. None: the time
    of the last delivery.

    Deliveries of all events are read, because an older one of any of them is the end: no index has the event, and
    millions of others may wait.
    """
    columns = (*(deliveries.c[name] for name in Announcement._fields), deliveries.c.number, deliveries.c.created_at)
    query = sa.select(*columns).order_by(deliveries.c.number.desc()).limit(_PAGE)
    page = query
    while True:
        rows = (await connection.execute(page)).all()
        if created_at is None and rows:
            created_at = rows[0].created_at
        recent = [row for row in rows if created_at is not None and row.created_at >= created_at - seconds]
        yield [Announcement(row.endpoint_id, row.event, row.channel, row.user) for row in recent if row.event in events]
        if len(recent) < _PAGE:
            return
        page = query.where(deliveries.c.number < rows[-1].number)


# -- used by the schedule

_PUT_RESULT: Final = (
    sa.update(deliveries)
    .where(
        deliveries.c.number == sa.bindparam("which"),
        deliveries.c.id == sa.bindparam("which_id"),
        deliveries.c.state == "waiting",
        deliveries.c.attempts == sa.bindparam("n") - 1,
    )
    .values(state=sa.bindparam("to_state"), at=sa.bindparam("to_at"), attempts=sa.bindparam("n"))
)


@cache
def _put_attempt(dialect: str) -> sa.Insert:
    """The delivery may have been discarded and removed during the attempt."""
    values = (sa.bindparam(name, type_=attempts.c[name].type) for name in AttemptRow._fields)
    is_it = (deliveries.c.number == sa.bindparam("which")) & (deliveries.c.id == sa.bindparam("which_id"))
    still_there = sa.select(deliveries.c.number, *values).where(is_it)
    statement = insert_of(dialect)(attempts).from_select(["delivery", *AttemptRow._fields], still_there)
    return statement.on_conflict_do_nothing()


async def put_results(connection: AsyncConnection, results: Sequence[Result]) -> None:
    """Writes the results of attempts. If a delivery was discarded during the attempt, the attempt is added and the
    delivery stays discarded."""
    changed = [
        {
            "which": result.number,
            "which_id": result.id,
            "to_state": result.state,
            "to_at": result.at,
            "n": result.attempt.n,
        }
        for result in results
    ]
    await connection.execute(_PUT_RESULT, changed)
    rows = [{"which": result.number, "which_id": result.id, **result.attempt._asdict()} for result in results]
    await connection.execute(_put_attempt(connection.dialect.name), rows)


# -- used by the dashboard and by commands that show


async def find(
    connection: AsyncConnection,
    endpoint_ids: Collection[str],
    states: Collection[str],
    limit: int,
    before: tuple[float, int] | None = None,
) -> list[Delivery]:
    """Deliveries of these endpoints in these states, sorted by `at`, the latest first: the time of their last change of
    state, or of a waiting one its due time. `before` is `(at, number)` of the last one of the previous page."""
    among: sa.ColumnElement[bool] = deliveries.c.state.in_(states)
    if before is not None:
        among &= sa.tuple_(deliveries.c.at, deliveries.c.number) < sa.tuple_(
            sa.literal(before[0], deliveries.c.at.type), sa.literal(before[1], deliveries.c.number.type)
        )
    latest: list[Delivery] = []
    for some in batched(endpoint_ids):
        which = among & deliveries.c.endpoint_id.in_(some)
        # Sort numbers with the index alone: there may be very many rows, and rows have bodies.
        order = (deliveries.c.at.desc(), deliveries.c.number.desc())
        chosen = sa.select(deliveries.c.number).where(which).order_by(*order).limit(limit).scalar_subquery()
        rows = await connection.execute(sa.select(*_DELIVERY).where(deliveries.c.number.in_(chosen)))
        latest += [Delivery(*row) for row in rows]
        latest = sorted(latest, key=lambda one: (one.at, one.number), reverse=True)[:limit]
    return latest


async def find_added(
    connection: AsyncConnection, endpoint_id: str, states: Collection[str], limit: int, before: int | None = None
) -> list[Delivery]:
    """Deliveries of an endpoint in these states, the last that was added first. `before` is the number of the last one
    of the previous page. Numbers never change, so the pages lack none that is delivered meanwhile."""
    which = (deliveries.c.endpoint_id == endpoint_id) & deliveries.c.state.in_(states)
    if before is not None:
        which &= deliveries.c.number < before
    # As in `find`.
    order = deliveries.c.number.desc()
    chosen = sa.select(deliveries.c.number).where(which).order_by(order).limit(limit).scalar_subquery()
    rows = await connection.execute(sa.select(*_DELIVERY).where(deliveries.c.number.in_(chosen)).order_by(order))
    return [Delivery(*row) for row in rows]


async def find_by_id(connection: AsyncConnection, delivery_id: str) -> Delivery | None:
    """The delivery with this id, or None."""
    matches = await find_by_ids(connection, [delivery_id])
    return matches[0] if matches else None


async def find_by_ids(connection: AsyncConnection, ids: Sequence[str]) -> list[Delivery]:
    """The deliveries with these ids, in no particular order; unknown ids are left out."""
    matches: list[Delivery] = []
    for start in range(0, len(ids), BATCH):
        which = deliveries.c.id.in_(ids[start : start + BATCH])
        matches += [Delivery(*row) for row in await connection.execute(sa.select(*_DELIVERY).where(which))]
    return matches


async def attempts_at(connection: AsyncConnection, number: int) -> list[AttemptRow]:
    """All attempts of the delivery with this number, in order."""
    columns = tuple(attempts.c[name] for name in AttemptRow._fields)
    rows = await connection.execute(sa.select(*columns).where(attempts.c.delivery == number).order_by(attempts.c.n))
    return [AttemptRow(*row) for row in rows]


async def depths(
    connection: AsyncConnection, endpoint_ids: Collection[str] | None, sum_from: int | None = None
) -> dict[str, Depth]:
    """By endpoint id, of these endpoints or, with None, of all: how many deliveries wait, failed or were dropped.
    Endpoints without any are missing.

    The sizes of bodies are summed up for endpoints of which at least `sum_from` wait: it means to read each row.
    """
    groups: dict[tuple[str, str], tuple[int, float]] = {}
    # All by a query of their ids: with it, the index finds the few waiting and failed ones among many others.
    for some in (sa.select(webhooks.c.id),) if endpoint_ids is None else batched(endpoint_ids):
        which = deliveries.c.endpoint_id.in_(some) & deliveries.c.state.in_(("waiting", "failed"))
        group = (deliveries.c.endpoint_id, deliveries.c.state)
        columns = (*group, sa.func.count(), sa.func.min(deliveries.c.number).label("oldest"))
        grouped = sa.select(*columns).where(which).group_by(*group).subquery()
        query = sa.select(grouped, deliveries.c.created_at).where(deliveries.c.number == grouped.c.oldest)
        groups |= {(row[0], row[1]): (row[2], row.created_at) for row in await connection.execute(query)}
    many = [
        which
        for (which, state), (count, _) in groups.items()
        if sum_from is not None and state == "waiting" and count >= sum_from
    ]
    sizes = await _waiting_bytes(connection, many) if many else {}
    dropped = await counts(connection, endpoint_ids)
    result: dict[str, Depth] = {}
    for endpoint_id in {endpoint_id for endpoint_id, _ in groups} | dropped.keys():
        waiting, oldest_at = groups.get((endpoint_id, "waiting"), (0, None))
        failed, _ = groups.get((endpoint_id, "failed"), (0, None))
        lost, lost_at = dropped.get(endpoint_id, (0, None))
        result[endpoint_id] = Depth(waiting, failed, oldest_at, sizes.get(endpoint_id, 0), lost, lost_at)
    return result


async def _waiting_bytes(connection: AsyncConnection, endpoint_ids: Sequence[str]) -> dict[str, int]:
    """By endpoint id, the bytes of the bodies of its waiting deliveries."""
    columns = (deliveries.c.endpoint_id, sa.func.sum(sa.func.length(deliveries.c.body)))
    sizes: dict[str, int] = {}
    for some in batched(endpoint_ids):
        which = deliveries.c.endpoint_id.in_(some) & (deliveries.c.state == "waiting")
        grouped = sa.select(*columns).where(which).group_by(deliveries.c.endpoint_id)
        sizes |= {row[0]: int(row[1]) for row in await connection.execute(grouped)}
    return sizes


# -- used by commands that change


async def numbers(connection: AsyncConnection, endpoint_ids: Collection[str], states: Collection[str]) -> list[int]:
    """The numbers of all deliveries of these endpoints that are in one of these states."""
    which = deliveries.c.endpoint_id.in_(endpoint_ids) & deliveries.c.state.in_(states)
    return list((await connection.execute(sa.select(deliveries.c.number).where(which))).scalars())


async def retry(connection: AsyncConnection, which: Sequence[str] | Sequence[int], now_s: float) -> int:
    """Makes failed deliveries wait again, due at `now_s`, with the full number of attempts. `which` are ids or numbers.
    Returns the number changed."""
    values = {"state": "waiting", "at": now_s, "cycle_from": deliveries.c.attempts}
    return await _change(connection, which, deliveries.c.state == "failed", values)


async def discard(
    connection: AsyncConnection,
    which: Sequence[str] | Sequence[int],
    now_s: float,
    states: Collection[str] = ("failed", "waiting"),
) -> int:
    """Discards those of the deliveries that are in one of these states. `which` are ids or numbers. Returns the number
    changed."""
    values = {"state": "discarded", "at": now_s}
    return await _change(connection, which, deliveries.c.state.in_(states), values)


async def _change(
    connection: AsyncConnection, which: Sequence[str] | Sequence[int], start: Any, values: dict[str, Any]
) -> int:
    changed = 0
    for at in range(0, len(which), BATCH):
        batch = which[at : at + BATCH]
        column = deliveries.c.id if isinstance(batch[0], str) else deliveries.c.number
        statement = sa.update(deliveries).where(column.in_(batch), start).values(values)
        changed += (await connection.execute(statement)).rowcount
    return changed
