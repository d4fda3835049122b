"""Deliveries of webhooks in the store, and the attempts at each. When to try, and what becomes of it, is
control/webhooks' to say.

    waiting ──2xx──────────────────────────> delivered ┐
       ↑ │ └─the last failure──> failed ──discard──> discarded ┴─> forgotten when old
       └─┴──a failure; retry──────┘

Every change names the state that it starts from, so whoever comes late changes nothing. A failed one is a dead letter;
one that the operator has had tried anew is told by `cycle_from`.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final, NamedTuple

import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection

from redpoll.store.schema import attempts, deliveries, webhooks

__all__ = [
    "BATCH",
    "STATES",
    "AttemptRow",
    "Delivery",
    "Depth",
    "Result",
    "Waiting",
    "add",
    "attempts_at",
    "depths",
    "discard",
    "due",
    "endpoints_to_prune",
    "endpoints_with_waiting",
    "find",
    "forget_finished",
    "keep_pauses",
    "next_due",
    "numbers",
    "one",
    "put_results",
    "retry",
    "some",
]

STATES: Final = ("waiting", "delivered", "failed", "discarded")
# SQLite takes 32,766 values in one statement; that many rows are one piece of a longer work, too.
BATCH: Final = 5_000


class Waiting(NamedTuple):
    """What an attempt needs of a delivery. `attempts`: how many were made; `cycle_from` of them before this cycle."""

    number: int
    id: str
    endpoint_id: str
    event: str
    channel: str
    user: str | None
    body: bytes
    attempts: int
    cycle_from: int


class Delivery(NamedTuple):
    """A whole row (schema.py). `stamp` is the transition's number in its shard, `time_ms` its Unix time, `trace` the
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
        """What it is in the dead letter queue: pending, retrying, delivered or discarded; None: it never failed."""
        if self.state == "failed":
            return "pending"
        if not self.cycle_from and self.state != "discarded":
            return None
        return "retrying" if self.state == "waiting" else self.state


class AttemptRow(NamedTuple):
    """One attempt, numbered by `n` from 1. `at` is when it began. `status` None: no answer."""

    n: int
    at: float
    status: int | None
    duration_ms: int
    outcome: str
    reason: str
    response: bytes


class Result(NamedTuple):
    """What becomes of a waiting delivery by an attempt: `state`, and `at` of it. Holds only for the delivery whose
    next attempt this was."""

    number: int
    state: str
    at: float
    attempt: AttemptRow


class Depth(NamedTuple):
    """How many wait to be sent, and how many are dead letters. `oldest_at`: when the longest waiting one was made."""

    waiting: int
    failed: int
    oldest_at: float | None


_WAITING: Final = tuple(deliveries.c[name] for name in Waiting._fields)
_DELIVERY: Final = tuple(deliveries.c[name] for name in Delivery._fields)


# -- what intake does


async def add(connection: AsyncConnection, rows: Sequence[Mapping[str, Any]]) -> list[Waiting]:
    """Writes new deliveries, as waiting, those left out whose id is there already; returns what was written.

    `rows` have the columns of `Delivery` but `number`, `state`, `attempts` and `cycle_from`. One writer at a time: the
    numbers are counted here, since the database would tell them row by row.
    """
    known = await _known(connection, [row["id"] for row in rows])
    new: dict[str, Mapping[str, Any]] = {row["id"]: row for row in rows if row["id"] not in known}
    if not new:
        return []
    last = (await connection.execute(sa.select(sa.func.max(deliveries.c.number)))).scalar_one() or 0
    fresh = {"state": "waiting", "attempts": 0, "cycle_from": 0}
    written = [{**row, **fresh, "number": number} for number, row in enumerate(new.values(), last + 1)]
    await connection.execute(sa.insert(deliveries), written)
    return [Waiting(*(row[name] for name in Waiting._fields)) for row in written]


async def _known(connection: AsyncConnection, ids: Sequence[str]) -> set[str]:
    found: set[str] = set()
    for start in range(0, len(ids), BATCH):
        there = sa.select(deliveries.c.id).where(deliveries.c.id.in_(ids[start : start + BATCH]))
        found.update((await connection.execute(there)).scalars())
    return found


# -- what the schedule does


async def due(connection: AsyncConnection, endpoint_id: str, now_s: float, limit: int) -> list[Waiting]:
    """Deliveries to this endpoint whose time has come, the most overdue first."""
    which = (deliveries.c.endpoint_id == endpoint_id) & (deliveries.c.state == "waiting") & (deliveries.c.at <= now_s)
    query = sa.select(*_WAITING).where(which).order_by(deliveries.c.at, deliveries.c.number).limit(limit)
    return [Waiting(*row) for row in await connection.execute(query)]


async def next_due(connection: AsyncConnection, endpoint_id: str, after_s: float) -> float | None:
    """When the next delivery to this endpoint is due behind `after_s`; None: there is none."""
    which = (deliveries.c.endpoint_id == endpoint_id) & (deliveries.c.state == "waiting") & (deliveries.c.at > after_s)
    found: float | None = (await connection.execute(sa.select(sa.func.min(deliveries.c.at)).where(which))).scalar_one()
    return found


async def endpoints_with_waiting(connection: AsyncConnection) -> set[str]:
    """The ids of the endpoints to which some deliveries wait, due or not."""
    some = sa.exists().where(deliveries.c.endpoint_id == webhooks.c.id, deliveries.c.state == "waiting")
    return set((await connection.execute(sa.select(webhooks.c.id).where(some))).scalars())


async def keep_pauses(connection: AsyncConnection, *, before_s: float, now_s: float, longest_s: float) -> None:
    """The clock was set from `before_s` to `now_s`: a retry comes as much later as it would have without that, and
    `longest_s` later at most; what has not been tried is due. Both times alike: it may have been set while nobody was
    there."""
    here = deliveries.c.endpoint_id.in_(sa.select(webhooks.c.id)) & (deliveries.c.state == "waiting")
    tried = deliveries.c.attempts > deliveries.c.cycle_from
    change = sa.update(deliveries)
    if now_s != before_s:
        in_pause = here & tried & (deliveries.c.at > min(before_s, now_s))
        await connection.execute(change.where(in_pause).values(at=deliveries.c.at + (now_s - before_s)))
    await connection.execute(change.where(here, ~tried, deliveries.c.at > now_s).values(at=now_s))
    latest_s = now_s + longest_s
    await connection.execute(change.where(here, deliveries.c.at > latest_s).values(at=latest_s))


_PUT_RESULT: Final = (
    sa.update(deliveries)
    .where(
        deliveries.c.number == sa.bindparam("which"),
        deliveries.c.state == "waiting",
        deliveries.c.attempts == sa.bindparam("n") - 1,
    )
    .values(state=sa.bindparam("to_state"), at=sa.bindparam("to_at"), attempts=sa.bindparam("n"))
)


# A delivery may have been given up and forgotten while it was tried, where this process stood still meanwhile.
_PUT_ATTEMPT: Final = (
    sa.insert(attempts)
    .prefix_with("OR IGNORE", dialect="sqlite")
    .from_select(
        ["delivery", *AttemptRow._fields],
        sa.select(
            deliveries.c.number,
            *(sa.bindparam(name, type_=attempts.c[name].type) for name in AttemptRow._fields),
        ).where(deliveries.c.number == sa.bindparam("which")),
    )
)


async def put_results(connection: AsyncConnection, results: Sequence[Result]) -> None:
    """Writes what became of attempts. One at a delivery that somebody discarded meanwhile is kept, and changes
    nothing."""
    changed = [
        {"which": each.number, "to_state": each.state, "to_at": each.at, "n": each.attempt.n} for each in results
    ]
    await connection.execute(_PUT_RESULT, changed)
    rows = [{"which": each.number, **each.attempt._asdict()} for each in results]
    await connection.execute(_PUT_ATTEMPT, rows)


# -- what people ask for


async def find(
    connection: AsyncConnection,
    endpoint_ids: Collection[str],
    states: Collection[str],
    limit: int,
    before: tuple[float, int] | None = None,
) -> list[Delivery]:
    """Deliveries to these endpoints in these states, those first that came into theirs last (waiting: that are due
    last). `before`: `(at, number)` of the last one of an earlier answer, to go on behind it."""
    which = deliveries.c.endpoint_id.in_(endpoint_ids) & deliveries.c.state.in_(states)
    place = sa.tuple_(deliveries.c.at, deliveries.c.number)
    if before is not None:
        which &= place < sa.tuple_(*before)
    order = (deliveries.c.at.desc(), deliveries.c.number.desc())
    # By the index alone: what is sorted may be very much, and has bodies.
    chosen = sa.select(deliveries.c.number).where(which).order_by(*order).limit(limit).scalar_subquery()
    rows = await connection.execute(sa.select(*_DELIVERY).where(deliveries.c.number.in_(chosen)).order_by(*order))
    return [Delivery(*row) for row in rows]


async def one(connection: AsyncConnection, delivery_id: str) -> Delivery | None:
    """The delivery with this id, or None."""
    found = await some(connection, [delivery_id])
    return found[0] if found else None


async def some(connection: AsyncConnection, ids: Sequence[str]) -> list[Delivery]:
    """The deliveries with these ids; those that aren't there are left out."""
    found: list[Delivery] = []
    for start in range(0, len(ids), BATCH):
        which = deliveries.c.id.in_(ids[start : start + BATCH])
        found += [Delivery(*row) for row in await connection.execute(sa.select(*_DELIVERY).where(which))]
    return found


async def attempts_at(connection: AsyncConnection, number: int) -> list[AttemptRow]:
    """Every attempt at the delivery with this number, in order."""
    columns = tuple(attempts.c[name] for name in AttemptRow._fields)
    rows = await connection.execute(sa.select(*columns).where(attempts.c.delivery == number).order_by(attempts.c.n))
    return [AttemptRow(*row) for row in rows]


async def depths(connection: AsyncConnection, endpoint_ids: Collection[str]) -> dict[str, Depth]:
    """What waits at, and what failed for, each of these endpoints; those with neither are missing."""
    which = deliveries.c.endpoint_id.in_(endpoint_ids) & deliveries.c.state.in_(("waiting", "failed"))
    columns = (deliveries.c.endpoint_id, deliveries.c.state, sa.func.count(), sa.func.min(deliveries.c.number))
    grouped = sa.select(*columns).where(which).group_by(deliveries.c.endpoint_id, deliveries.c.state)
    found = {(row[0], row[1]): (row[2], row[3]) for row in await connection.execute(grouped)}
    first = [number for (_, state), (_, number) in found.items() if state == "waiting"]
    made_at = sa.select(deliveries.c.number, deliveries.c.created_at).where(deliveries.c.number.in_(first))
    created = {row.number: row.created_at for row in await connection.execute(made_at)}
    told: dict[str, Depth] = {}
    for endpoint_id in {endpoint_id for endpoint_id, _ in found}:
        waiting, number = found.get((endpoint_id, "waiting"), (0, 0))
        failed, _ = found.get((endpoint_id, "failed"), (0, 0))
        told[endpoint_id] = Depth(waiting, failed, created.get(number))
    return told


# -- what people have done


async def numbers(connection: AsyncConnection, endpoint_ids: Collection[str], states: Collection[str]) -> list[int]:
    """Of all deliveries to these endpoints that are in one of these states now."""
    which = deliveries.c.endpoint_id.in_(endpoint_ids) & deliveries.c.state.in_(states)
    return list((await connection.execute(sa.select(deliveries.c.number).where(which))).scalars())


async def retry(connection: AsyncConnection, which: Sequence[str] | Sequence[int], now_s: float) -> int:
    """Has failed deliveries tried anew from `now_s` on, with all their retries. `which` are ids or numbers. Returns how
    many."""
    values = {"state": "waiting", "at": now_s, "cycle_from": deliveries.c.attempts}
    return await _change(connection, which, deliveries.c.state == "failed", values)


async def discard(
    connection: AsyncConnection,
    which: Sequence[str] | Sequence[int],
    now_s: float,
    states: Collection[str] = ("failed", "waiting"),
) -> int:
    """Gives up deliveries that are in one of these states. `which` are ids or numbers. Returns how many."""
    values = {"state": "discarded", "at": now_s}
    return await _change(connection, which, deliveries.c.state.in_(states), values)


async def _change(
    connection: AsyncConnection, which: Sequence[str] | Sequence[int], start: Any, values: dict[str, Any]
) -> int:
    changed = 0
    for at in range(0, len(which), BATCH):
        some = which[at : at + BATCH]
        column = deliveries.c.id if isinstance(some[0], str) else deliveries.c.number
        changed += (
            await connection.execute(sa.update(deliveries).where(column.in_(some), start).values(values))
        ).rowcount
    return changed


async def endpoints_to_prune(connection: AsyncConnection, *, keep: int, older_than: float) -> list[str]:
    """The ids of the endpoints at which `forget_finished` may have something to do."""
    done = deliveries.c.state.in_(("delivered", "discarded"))
    too_much = (sa.func.count() > keep) | (sa.func.min(deliveries.c.at) <= older_than)
    grouped = sa.select(deliveries.c.endpoint_id).where(done).group_by(deliveries.c.endpoint_id, deliveries.c.state)
    return list(dict.fromkeys((await connection.execute(grouped.having(too_much))).scalars()))


async def forget_finished(
    connection: AsyncConnection, endpoint_id: str, *, keep: int, older_than: float, before: float
) -> int:
    """Removes deliveries that were delivered or discarded: those that came to that by `older_than`, and all but the
    newest `keep` of each kind; but none that came to it behind `before`. A few thousand a call; returns how many."""
    removed = 0
    for state in ("delivered", "discarded"):
        which = (deliveries.c.endpoint_id == endpoint_id) & (deliveries.c.state == state)
        newest = sa.select(deliveries.c.at).where(which).order_by(deliveries.c.at.desc()).offset(keep).limit(1)
        beyond: float | None = (await connection.execute(newest)).scalar_one_or_none()
        upto = min(before, older_than if beyond is None else max(older_than, beyond))
        old = sa.select(deliveries.c.number).where(which, deliveries.c.at <= upto).limit(BATCH)
        gone = sa.delete(deliveries).where(deliveries.c.number.in_(old.scalar_subquery()))
        removed += (await connection.execute(gone)).rowcount
    return removed
