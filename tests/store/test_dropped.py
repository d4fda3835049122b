"""How many deliveries of an endpoint were dropped, on both databases."""

from redpoll.store import dropped


async def test_numbers_add_up_by_endpoint_until_they_are_forgotten(connection):
    await dropped.note(connection, {"a": 2}, 10.0)
    await dropped.note(connection, {"a": 3, "b": 1}, 20.5)
    assert await dropped.counts(connection, ["a", "b", "c"]) == {"a": (5, 20.5), "b": (1, 20.5)}
    await dropped.forget(connection, ["a"])
    assert await dropped.counts(connection, ["a", "b"]) == {"b": (1, 20.5)}
