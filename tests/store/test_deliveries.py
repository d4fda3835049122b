"""Deliveries and their attempts: allowed changes of state, order and pages."""

import pytest
import sqlalchemy as sa

from redpoll.store import deliveries as rows
from redpoll.store import dropped, due_deliveries
from redpoll.store.deliveries import AttemptRow, Depth
from store.written_deliveries import add_endpoints, put, result, row, state

# More than a statement of PostgreSQL may have: asyncpg takes 32,767 values.
TOO_MANY = 33_000


@pytest.fixture
async def connection(connection):
    """One transaction, in a store that has the endpoints e1 and e2."""
    await add_endpoints(connection)
    return connection


# -- adding


async def test_new_delivery_is_due_from_its_time_on(connection):
    (written,) = await rows.add(connection, [row("d1")])
    assert (written.id, written.endpoint_id, written.attempts, written.cycle_from) == ("d1", "e1", 0, 0)
    assert (await due_deliveries.due(connection, "e1", 10.0, 9, 1_000)).waiting == [written]
    assert (await due_deliveries.due(connection, "e1", 9.9, 9, 1_000)).waiting == []
    assert (await due_deliveries.due(connection, "e2", 10.0, 9, 1_000)).waiting == []
    found = await rows.find_by_id(connection, "d1")
    assert (found.stamp, found.time_ms, found.trace, found.user, found.body) == (17, 170, "t", "u", b"{}")


async def test_adding_an_existing_delivery_changes_nothing(connection):
    numbers = await put(connection, row("d1"))
    await rows.put_results(connection, [result(numbers, "d1", "delivered", 11.0)])
    again = await rows.add(connection, [row("d1"), row("d2"), row("d2")])
    assert [delivery.id for delivery in again] == ["d2"]
    assert await state(connection, "d1") == ("delivered", 11.0, 1)
    assert await rows.add(connection, [row("d1")]) == []


async def test_twelve_thousand_deliveries_are_added_and_found_in_one_call(connection):
    many = [row(f"d{number}") for number in range(12_000)]
    assert len(await rows.add(connection, many)) == 12_000
    assert await rows.add(connection, many) == []
    assert len(await rows.find_by_ids(connection, [delivery["id"] for delivery in many])) == 12_000


# -- what was announced


async def announced_since(connection, created_at):
    pages = rows.since(connection, created_at, 90.0, ("channel.occupied", "channel.vacated"))
    return [announcement.channel async for page in pages for announcement in page]


async def test_announcements_are_read_back_from_the_last_delivery_of_any_event(connection):
    occupied = {"event": "channel.occupied", "user": None}
    await put(connection, row("a", at=100.0, channel="a", **occupied), row("b", at=150.0, channel="b", **occupied))
    await put(connection, row("c", at=200.0, event="client_event"))
    assert await announced_since(connection, None) == ["b"]
    assert await announced_since(connection, 190.0) == ["b", "a"]


async def test_reading_announcements_ends_at_older_deliveries_of_other_events(connection):
    """With millions of them, no webhook was sent for the time of their reading, after each connection to Redis."""
    occupied = {"event": "channel.occupied", "user": None, "at": 200.0}
    await put(connection, row("unread", channel="unread", **occupied))
    await put(connection, *(row(f"old{number}", at=10.0, event="client_event") for number in range(1_000)))
    await put(connection, row("read", channel="read", **occupied))
    assert await announced_since(connection, 200.0) == ["read"]


# -- the schedule


async def test_result_changes_a_waiting_delivery_and_stores_the_attempt(connection):
    numbers = await put(connection, row("retried"), row("done"), row("failed"))
    outcome = {"retried": ("waiting", 70.0), "done": ("delivered", 11.0), "failed": ("failed", 12.0)}
    await rows.put_results(connection, [result(numbers, name, *change) for name, change in outcome.items()])
    for name, (became, at) in outcome.items():
        assert await state(connection, name) == (became, at, 1)
    made = await rows.attempts_at(connection, numbers["done"])
    assert made == [AttemptRow(1, 10.5, 500, 12, "status", "answered 500", b"\xff")]


async def test_late_or_repeated_result_does_not_change_the_delivery(connection):
    numbers = await put(connection, row("d1"), row("d2"))
    await rows.discard(connection, ["d1"], 11.0)
    await rows.put_results(connection, [result(numbers, "d1", "waiting", 70.0)])
    assert await state(connection, "d1") == ("discarded", 11.0, 0)
    # The attempt was made, so it is shown.
    assert len(await rows.attempts_at(connection, numbers["d1"])) == 1
    for _ in range(2):
        await rows.put_results(connection, [result(numbers, "d2", "waiting", 70.0)])
    assert await state(connection, "d2") == ("waiting", 70.0, 1)
    assert len(await rows.attempts_at(connection, numbers["d2"])) == 1


async def test_result_of_a_removed_delivery_does_not_block_other_results(connection):
    numbers = await put(connection, row("d1"), row("d2"))
    await connection.execute(sa.delete(rows.deliveries).where(rows.deliveries.c.id == "d1"))
    await rows.put_results(connection, [result(numbers, name, "delivered", 11.0) for name in numbers])
    assert await state(connection, "d2") == ("delivered", 11.0, 1)
    assert await rows.attempts_at(connection, numbers["d1"]) == []


# -- dead letters


async def test_retry_affects_only_failed_deliveries_and_starts_a_new_cycle(connection):
    numbers = await put(connection, row("d1"), row("d2"))
    await rows.put_results(connection, [result(numbers, "d1", "waiting", 20.0)])
    await rows.put_results(connection, [result(numbers, "d1", "failed", 21.0, n=2)])
    assert (await rows.find_by_id(connection, "d1")).dead_letter == "pending"
    assert await rows.retry(connection, ["d1", "d2"], 50.0) == 1
    again = await rows.find_by_id(connection, "d1")
    assert (again.state, again.at, again.attempts, again.cycle_from) == ("waiting", 50.0, 2, 2)
    assert again.dead_letter == "retrying"
    await rows.put_results(connection, [result(numbers, "d1", "delivered", 51.0, n=3)])
    assert (await rows.find_by_id(connection, "d1")).dead_letter == "delivered"
    assert [attempt.n for attempt in await rows.attempts_at(connection, numbers["d1"])] == [1, 2, 3]


async def test_delivery_that_never_failed_is_no_dead_letter(connection):
    numbers = await put(connection, row("d1"))
    assert (await rows.find_by_id(connection, "d1")).dead_letter is None
    await rows.put_results(connection, [result(numbers, "d1", "delivered", 11.0)])
    assert (await rows.find_by_id(connection, "d1")).dead_letter is None


async def test_delivered_or_discarded_deliveries_are_not_discarded_again(connection):
    numbers = await put(connection, row("d1"), row("d2"))
    await rows.put_results(connection, [result(numbers, "d1", "delivered", 11.0)])
    assert await rows.discard(connection, ["d1", "d2"], 12.0) == 1
    assert await rows.discard(connection, ["d1", "d2"], 13.0) == 0
    assert (await state(connection, "d2"))[:2] == ("discarded", 12.0)


async def test_bulk_changes_affect_only_deliveries_in_the_given_states(connection):
    numbers = await put(connection, row("a"), row("b", "e2"), row("waits"))
    await rows.put_results(connection, [result(numbers, "a", "failed", 20.0), result(numbers, "b", "failed", 21.0)])
    assert set(await rows.numbers(connection, ("e1", "e2"), ("failed",))) == {numbers["a"], numbers["b"]}
    assert await rows.numbers(connection, ("e2",), ("waiting",)) == []
    assert await rows.retry(connection, list(numbers.values()), 30.0) == 2
    assert (await state(connection, "a"))[:2] == ("waiting", 30.0)
    assert await rows.discard(connection, list(numbers.values()), 31.0, ("failed",)) == 0
    assert await rows.discard(connection, list(numbers.values()), 31.0, ("waiting",)) == 3


# -- reading


async def test_deliveries_are_paged_newest_first(connection):
    await put(connection, *(row(f"d{number}", f"e{number % 2 + 1}", at=float(number // 2)) for number in range(7)))
    seen, before = [], None
    while page := await rows.find(connection, ("e1", "e2"), rows.STATES, 2, before):
        seen += [delivery.id for delivery in page]
        before = (page[-1].at, page[-1].number)
    assert seen == ["d6", "d5", "d4", "d3", "d2", "d1", "d0"]
    assert [delivery.id for delivery in await rows.find(connection, ("e2",), ("waiting",), 9)] == ["d5", "d3", "d1"]
    assert await rows.find(connection, ("e1",), ("failed",), 9) == []


async def test_depths_count_waiting_and_failed_deliveries(connection):
    numbers = await put(connection, row("a", at=5.0), row("b", at=6.0), row("c", at=7.0), row("d", "e2"))
    await rows.put_results(connection, [result(numbers, "a", "failed", 20.0), result(numbers, "d", "failed", 20.0)])
    assert await rows.depths(connection, ("e1", "e2")) == {"e1": Depth(2, 1, 6.0), "e2": Depth(0, 1, None)}
    assert await rows.depths(connection, ()) == {}


async def test_depths_sum_the_bodies_of_as_many_deliveries_as_asked(connection):
    await put(connection, row("a"), row("b"), row("c", body=bytes(1_000)), row("d", "e2", body=b"x"))
    found = await rows.depths(connection, ("e1", "e2"), sum_from=3)
    assert {endpoint_id: depth.waiting_bytes for endpoint_id, depth in found.items()} == {"e1": 1_004, "e2": 0}


async def test_endpoints_to_read_may_be_more_than_a_statement_has_values(connection):
    """With more endpoints than that, the tidying failed for ever."""
    # Those that have something are in different parts of the list.
    ids = ["e1", *(f"x{number}" for number in range(TOO_MANY)), "e2"]
    await put(connection, row("a", at=1.0), row("b", "e2", at=2.0), row("c", at=3.0))
    await dropped.note(connection, {"e2": 4}, 9.0)
    expected = {"e1": Depth(2, 0, 1.0, 4), "e2": Depth(1, 0, 2.0, 2, 4, 9.0)}
    assert await rows.depths(connection, ids, sum_from=1) == expected
    assert [one.id for one in await rows.find(connection, ids, rows.STATES, 2)] == ["c", "b"]
    assert [one.id for one in await rows.find(connection, ids, rows.STATES, 9, (3.0, 3))] == ["b", "a"]


async def test_depths_of_all_endpoints_need_no_list(connection):
    await put(connection, row("a", at=5.0), row("b", "e2", at=6.0))
    await dropped.note(connection, {"e2": 4}, 9.0)
    expected = {"e1": Depth(1, 0, 5.0, 2), "e2": Depth(1, 0, 6.0, 2, 4, 9.0)}
    assert await rows.depths(connection, None, sum_from=1) == expected
