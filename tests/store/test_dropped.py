"""How many deliveries of an endpoint were dropped, on both databases."""

from redpoll.store import dropped


async def test_numbers_add_up_by_endpoint_until_they_are_forgotten(connection):
    await dropped.note(connection, {"a": 2}, 10.0)
    await dropped.note(connection, {"a": 3, "b": 1}, 20.5)
    assert await dropped.counts(connection, ["a", "b", "c"]) == {"a": (5, 20.5), "b": (1, 20.5)}
    await dropped.forget(connection, ["a"])
    assert await dropped.counts(connection, ["a", "b"]) == {"b": (1, 20.5)}


async def test_endpoints_may_be_more_than_a_statement_has_values_or_all(connection):
    """PostgreSQL takes 32,767."""
    ids = ["a", *(f"x{number}" for number in range(33_000)), "b"]
    await dropped.note(connection, {"a": 2, "b": 1}, 10.0)
    expected = {"a": (2, 10.0), "b": (1, 10.0)}
    assert await dropped.counts(connection, ids) == await dropped.counts(connection, None) == expected
    await dropped.forget(connection, ids)
    assert await dropped.counts(connection, None) == {}
