"""Dead letters: retried or discarded, alone or several at once."""

import pytest

from control.webhooks.transitions import APP, NOW_S
from redpoll.control.records.records import RecordError
from redpoll.control.webhooks.deadletters import DeadLetters
from redpoll.store import deliveries as delivery_rows
from redpoll.store import webhooks as endpoint_rows
from redpoll.store.deliveries import AttemptRow, Result
from redpoll.store.store import versions
from redpoll.store.webhooks import Endpoint


class Known:
    """The part of Endpoints that DeadLetters uses."""

    def __init__(self):
        self.endpoints = {}

    def known(self, endpoint_id):
        return self.endpoints.get(endpoint_id)


class World:
    """Failed deliveries f1, f2 (to e1), f3 (to the deleted e2); `waiting` and `delivered` to e1."""

    def __init__(self, store, clock):
        self.store = store
        self.due, self.given_up = [], []
        self.known = Known()
        self.letters = DeadLetters(store, self.known, clock, self.due.append, self.given_up.extend)

    async def fill(self):
        fields = {"url": "https://e.com", "secret": "s", "events": ("all",), "channels": (), "format": "service"}
        row = {"event": "cache.miss", "channel": "c", "user": None, "stamp": 1, "time_ms": 1, "trace": None}
        places = {"f1": "e1", "f2": "e1", "f3": "e2", "waiting": "e1", "delivered": "e1"}
        rows = [
            {**row, "id": name, "endpoint_id": place, "body": b"{}", "at": NOW_S, "created_at": NOW_S}
            for name, place in places.items()
        ]
        async with self.store.change() as connection:
            for name, deleted_at in (("e1", None), ("e2", 9.0)):
                endpoint = Endpoint(id=name, app_id=APP, created_at=0.0, deleted_at=deleted_at, **fields)
                self.known.endpoints[name] = endpoint
                await endpoint_rows.add(connection, endpoint)
            numbers = {delivery.id: delivery.number for delivery in await delivery_rows.add(connection, rows)}
            made = AttemptRow(1, NOW_S, 500, 1, "status", "answered 500", b"")
            became = {"f1": "failed", "f2": "failed", "f3": "failed", "delivered": "delivered"}
            results = [Result(numbers[name], name, state, NOW_S, made) for name, state in became.items()]
            await delivery_rows.put_results(connection, results)

    async def states(self, *names):
        async with self.store.reading() as connection:
            return [(await delivery_rows.find_by_id(connection, name)).state for name in names]


@pytest.fixture
async def world(store, records, clock):
    made = World(store, clock)
    await made.fill()
    return made


async def test_retried_delivery_is_due_at_once(world, clock):
    clock.advance(100)
    two, one = await world.letters.retry(["f2", "f1"])
    assert [(letter.id, letter.state, letter.at, letter.dead_letter) for letter in (two, one)] == [
        ("f2", "waiting", NOW_S + 100, "retrying"),
        ("f1", "waiting", NOW_S + 100, "retrying"),
    ]
    assert world.due == ["e1"]


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ("none", "there is no delivery with the id none"),
        ("waiting", "waiting is not a failed delivery: it is still being tried"),
        ("delivered", "delivered is not a failed delivery: it is delivered"),
        ("f3", "f3 can't be retried: its webhook e2 was deleted"),
    ],
)
async def test_impossible_retry_changes_none_of_the_deliveries(world, wrong, sentence):
    with pytest.raises(RecordError, match=sentence):
        await world.letters.retry(["f1", wrong])
    assert await world.states("f1", "f2", "f3") == ["failed"] * 3
    assert world.due == []


async def test_discarded_delivery_cannot_be_retried_or_discarded_again(world):
    (gone,) = await world.letters.discard(["f3"])
    assert gone.dead_letter == "discarded"
    assert [letter.id for letter in world.given_up] == ["f3"]
    for attempt in (world.letters.discard, world.letters.retry):
        with pytest.raises(RecordError, match="f3 is not a failed delivery: it is discarded"):
            await attempt(["f1", "f3"])
    assert await world.states("f1", "f3") == ["failed", "discarded"]


async def test_every_control_plane_learns_of_a_discard(world):
    """The one that sends may have loaded them."""
    async with world.store.reading() as connection:
        before = await versions(connection)
    await world.letters.discard(["f1"])
    async with world.store.reading() as connection:
        assert list(await endpoint_rows.all_by_id(connection, before.records)) == ["e1"]


async def test_retried_delivery_can_be_discarded_but_a_new_one_cannot(world):
    await world.letters.retry(["f1"])
    await world.letters.discard(["f1"])
    with pytest.raises(RecordError, match="waiting is not a failed delivery"):
        await world.letters.discard(["waiting"])
    assert await world.states("f1", "waiting") == ["discarded", "waiting"]


async def test_what_somebody_else_handled_meanwhile_can_be_skipped(world):
    await world.letters.discard(["f2"])
    (retried,) = await world.letters.retry(["none", "waiting", "f1", "f2", "f3"], skip=True)
    assert (retried.id, world.due) == ("f1", ["e1"])
    assert [letter.id for letter in await world.letters.discard(["f1", "f2", "f3"], skip=True)] == ["f1", "f3"]
    assert await world.letters.retry(["f1", "f3"], skip=True) == await world.letters.discard(["f2"], skip=True) == []
