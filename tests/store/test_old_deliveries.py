"""Removal of finished deliveries and of dead letters, on both databases."""

import pytest

from redpoll.store import deliveries as rows
from redpoll.store import old_deliveries
from store.written_deliveries import add_endpoints, put, result, row


@pytest.fixture
async def connection(connection):
    """One transaction, in a store that has the endpoints e1 and e2."""
    await add_endpoints(connection)
    return connection


async def test_old_and_excess_deliveries_are_removed_but_not_unfinished_ones(connection):
    numbers = await put(connection, *(row(f"d{number}") for number in range(8)), row("other", "e2"))
    done = [result(numbers, f"d{number}", "delivered", 20.0 + number) for number in range(6)]
    await rows.put_results(
        connection, [*done, result(numbers, "d6", "failed", 1.0), result(numbers, "other", "delivered", 1.0)]
    )

    assert set(await old_deliveries.endpoints_to_prune(connection, keep=5, older_than=0.5)) == {"e1"}
    assert set(await old_deliveries.endpoints_to_prune(connection, keep=6, older_than=1.0)) == {"e2"}
    assert await old_deliveries.endpoints_to_prune(connection, keep=6, older_than=0.5) == []

    async def left():
        return [delivery.id for delivery in await rows.find(connection, ("e1", "e2"), rows.STATES, 99)][::-1]

    # The newest two of the delivered stay, and everything that was finished after 22.
    await old_deliveries.remove_finished(connection, "e1", keep=2, older_than=0.0, before=22.0)
    assert await left() == ["d6", "other", "d7", "d3", "d4", "d5"]
    # Everything that was finished by 24 is removed, even if there are few.
    await old_deliveries.remove_finished(connection, "e1", keep=9, older_than=24.0, before=99.0)
    assert await left() == ["d6", "other", "d7", "d5"]
    assert await rows.attempts_at(connection, numbers["d3"]) == []
    assert len(await rows.attempts_at(connection, numbers["d5"])) == 1


async def test_the_newest_stay_also_of_many_that_were_finished_at_the_same_time(connection):
    numbers = await put(connection, *(row(f"d{number}") for number in range(8)))
    await rows.discard(connection, list(numbers.values()), 20.0)
    while await old_deliveries.remove_finished(connection, "e1", keep=3, older_than=0.0, before=99.0):
        pass
    left = await rows.find(connection, ("e1",), rows.STATES, 99)
    assert {delivery.id for delivery in left} == {"d5", "d6", "d7"}


async def test_result_of_a_removed_delivery_is_not_that_of_another_with_its_number(connection):
    first = await put(connection, row("of a deleted app"))
    await rows.discard(connection, list(first.values()), 20.0)
    assert await old_deliveries.remove_finished(connection, "e1", keep=0, older_than=0.0, before=99.0)
    second = await put(connection, row("another", "e2"))
    assert [*first.values()] == [*second.values()]
    await rows.put_results(connection, [result(first, "of a deleted app", "delivered", 21.0)])
    (found,) = await rows.find(connection, ("e1", "e2"), rows.STATES, 99)
    assert (found.id, found.state, found.attempts) == ("another", "waiting", 0)
    assert await rows.attempts_at(connection, found.number) == []


async def test_oldest_dead_letters_are_removed_but_not_recent_ones(connection):
    numbers = await put(connection, *(row(f"d{number}") for number in range(8)), row("other", "e2"))
    failed = [result(numbers, f"d{number}", "failed", 20.0 + number) for number in range(6)]
    await rows.put_results(connection, [*failed, result(numbers, "other", "failed", 1.0)])
    assert await old_deliveries.remove_dead_letters(connection, "e1", keep=4, before=99.0) == 2
    assert await old_deliveries.remove_dead_letters(connection, "e1", keep=0, before=23.0) == 2
    assert await old_deliveries.remove_dead_letters(connection, "e1", keep=2, before=99.0) == 0
    left = await rows.find(connection, ("e1", "e2"), rows.STATES, 99)
    assert {delivery.id for delivery in left} == {"d4", "d5", "d6", "d7", "other"}
    assert await rows.attempts_at(connection, numbers["d0"]) == []


async def test_endpoints_with_too_many_dead_letters_are_found(connection):
    numbers = await put(connection, row("a"), row("b"), row("c", "e2"), row("waits", "e2"))
    await rows.put_results(connection, [result(numbers, name, "failed", 20.0) for name in "abc"])
    assert await old_deliveries.endpoints_to_limit(connection, keep=1) == ["e1"]
    assert set(await old_deliveries.endpoints_to_limit(connection, keep=0)) == {"e1", "e2"}
    assert await old_deliveries.endpoints_to_limit(connection, keep=2) == []
