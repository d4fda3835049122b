"""Which deliveries are due, when, and how much of them is read."""

import pytest

from redpoll.store import deliveries as rows
from redpoll.store import due_deliveries
from store.written_deliveries import add_endpoints, put, result, row, state


@pytest.fixture
async def connection(connection):
    """One transaction, in a store that has the endpoints e1 and e2."""
    await add_endpoints(connection)
    return connection


async def due(connection, now_s, limit=9, max_bytes=1_000, without=()):
    found = await due_deliveries.due(connection, "e1", now_s, limit, max_bytes, without)
    return [delivery.id for delivery in found.waiting]


async def test_due_deliveries_are_sorted_by_time_then_by_number(connection):
    await put(connection, row("late", at=9.0), row("a"), row("b"), row("first", at=3.0), row("future", at=30.0))
    assert await due(connection, 20.0) == ["first", "late", "a", "b"]
    assert await due(connection, 20.0, limit=2) == ["first", "late"]
    assert await due_deliveries.next_due(connection, "e1", 20.0) == 30.0
    assert await due_deliveries.next_due(connection, "e1", 30.0) is None


async def test_bodies_are_read_as_far_as_there_is_room(connection):
    numbers = await put(connection, *(row(name, body=bytes(100)) for name in "abcd"))
    assert await due(connection, 20.0, max_bytes=250) == ["a", "b"]
    assert await due(connection, 20.0, max_bytes=250, without={numbers["a"], numbers["c"]}) == ["b", "d"]
    # One is larger than the room.
    assert await due(connection, 20.0, max_bytes=1) == ["a"]
    for limit, max_bytes, more in ((5, 400, False), (5, 399, True), (4, 400, True)):
        assert (await due_deliveries.due(connection, "e1", 20.0, limit, max_bytes)).more is more
    assert await due_deliveries.due(connection, "e1", 20.0, 5, 400, numbers.values()) == ([], False)


@pytest.mark.parametrize(("before_s", "now_s"), [(1_000.0, 4_600.0), (4_600.0, 1_000.0)])
async def test_clock_change_keeps_the_length_of_pauses(connection, before_s, now_s):
    numbers = await put(connection, *(row(name, at=before_s) for name in ("paused", "due", "failed")))
    await rows.put_results(connection, [result(numbers, "paused", "waiting", before_s + 7)])
    await rows.put_results(connection, [result(numbers, "due", "waiting", before_s - 7)])
    await rows.put_results(connection, [result(numbers, "failed", "failed", before_s)])
    # `new` was written with the time after the change, `old` with the time before it.
    await put(connection, row("new", at=now_s), row("old", at=before_s))
    await due_deliveries.move_due_times(connection, before_s=before_s, now_s=now_s, pauses_s=(10.0, 60.0, 300.0))
    assert (await state(connection, "paused"))[1] == now_s + 7
    assert set(await due(connection, now_s)) == {"due", "new", "old"}
    assert await state(connection, "failed") == ("failed", before_s, 1)


async def test_clock_of_another_leader_delays_no_delivery_beyond_the_pause_after_its_attempt(connection):
    names = ("paused", "soon", "untried", "second", "sixth")
    numbers = await put(connection, *(row(name, at=5_000.0) for name in names))
    await rows.put_results(connection, [result(numbers, "paused", "waiting", 5_010.0)])
    for name, attempts in (("second", 2), ("sixth", 6)):
        for n in range(1, attempts + 1):
            await rows.put_results(connection, [result(numbers, name, "waiting", 5_010.0, n=n)])
    await rows.put_results(connection, [result(numbers, "soon", "waiting", 1_010.0)])
    await due_deliveries.move_due_times(connection, before_s=1_000.0, now_s=1_000.0, pauses_s=(10.0, 60.0, 300.0))
    assert [(await state(connection, name))[1] for name in numbers] == [1_010.0, 1_010.0, 1_000.0, 1_060.0, 1_300.0]
