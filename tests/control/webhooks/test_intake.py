"""From the outbox into the store: which endpoints get a delivery. No transition is lost or stored twice."""

import asyncio
import json

import msgspec
import pytest
import sqlalchemy as sa

from redpoll.cluster.link import LinkDown
from redpoll.control.webhooks.intake import DRAIN_EVERY_S, Intake, delivery_id
from redpoll.store import deliveries as delivery_rows
from redpoll.store import webhooks as endpoint_rows
from redpoll.store.webhooks import Endpoint
from transitions import APP, NOW_S, OTHER, Box, transition


@pytest.fixture
def endpoints():
    """The endpoints by app id, as intake sees them."""
    return {}


@pytest.fixture
async def add_endpoint(store, records, endpoints):
    async def add(endpoint_id="e1", app_id=APP, **more):
        fields = {
            "url": "https://e.com",
            "secret": "s",
            "events": ("all",),
            "channels": (),
            "format": "service",
            **more,
        }
        endpoint = Endpoint(id=endpoint_id, app_id=app_id, created_at=NOW_S, **fields)
        async with store.change() as connection:
            await endpoint_rows.add(connection, endpoint)
        endpoints.setdefault(app_id, []).append(endpoint)

    return add


@pytest.fixture
def make_intake(store, endpoints, clock):
    def make(box, added=None, traced=None):
        on_new = [].extend if added is None else added.extend

        def on_traced(row, delivery, endpoint):
            (traced if traced is not None else []).append((row.trace, row.app_id, delivery, endpoint))

        def any_enabled():
            return any(endpoint.enabled for of_app in endpoints.values() for endpoint in of_app)

        return Intake(box, store, lambda app_id: endpoints.get(app_id, ()), any_enabled, on_new, on_traced, clock)

    return make


async def written(store):
    """All deliveries, oldest first."""
    async with store.reading() as connection:
        return (await delivery_rows.find(connection, ("e1", "e2", "e3"), delivery_rows.STATES, 10_000))[::-1]


# -- which endpoints get a delivery


async def test_every_endpoint_that_wants_a_transition_gets_a_delivery(store, add_endpoint, make_intake):
    await add_endpoint("e1", events=("channel.occupied", "cache.miss"))
    await add_endpoint("e2", channels=("private-", "room"))
    await add_endpoint("e3", app_id=OTHER)
    rows = [
        transition("channel.occupied", "room-1"),
        transition("channel.vacated", "room-1"),
        transition("channel.vacated", "lobby"),
        transition("cache.miss", "room-2"),
        transition("member.added", "private-x", app_id=OTHER, user="ann"),
        transition("channel.occupied", "room-1", app_id="77"),
    ]
    added = []
    await make_intake(Box(*rows), added=added).drain_once()
    expected = [
        ("e1", "channel.occupied", "room-1"),
        ("e2", "channel.occupied", "room-1"),
        ("e2", "channel.vacated", "room-1"),
        # Extra events must be chosen by name. `all` means the five standard events.
        ("e1", "cache.miss", "room-2"),
        ("e3", "member.added", "private-x"),
    ]
    found = await written(store)
    assert [(delivery.endpoint_id, delivery.event, delivery.channel) for delivery in found] == expected
    assert [delivery.id for delivery in added] == [delivery.id for delivery in found]
    assert (found[-1].user, found[-1].state, found[-1].at) == ("ann", "waiting", NOW_S)


async def test_body_is_rendered_in_the_format_of_the_endpoint(store, add_endpoint, make_intake):
    await add_endpoint("e1")
    await add_endpoint("e2", format="pusher")
    row = transition("channel.occupied", "room", trace="tr", detail=b"3")
    await make_intake(Box(row)).drain_once()
    service, pusher = await written(store)
    assert json.loads(service.body)["data"] == {"channel": "room", "subscription_count": 3, "seq": row.stamp}
    assert json.loads(pusher.body)["events"][0]["name"] == "channel_occupied"
    assert (service.stamp, service.time_ms, service.trace) == (row.stamp, row.time_ms, "tr")


async def test_disabled_endpoint_gets_transitions_from_before_it_was_disabled(store, add_endpoint, make_intake):
    await add_endpoint("e1", disabled_at=NOW_S)
    before = transition(time_ms=int(NOW_S * 1000) - 1)
    await make_intake(Box(before, transition(time_ms=int(NOW_S * 1000)))).drain_once()
    assert [delivery.stamp for delivery in await written(store)] == [before.stamp]


async def test_unreadable_row_is_counted_and_skipped(store, add_endpoint, make_intake):
    await add_endpoint("e1")
    good = transition("client_event")
    box = Box(transition("client_event", detail=b"{not json"), good)
    intake = make_intake(box)
    await intake.drain_once()
    await intake.drain_once()
    assert [delivery.stamp for delivery in await written(store)] == [good.stamp]
    assert (intake.unreadable_total, intake.taken_total, box.rows) == (1, 2, [])


# -- no loss, no repetition


async def test_row_is_removed_from_redis_only_after_the_commit(store, add_endpoint, make_intake, monkeypatch):
    await add_endpoint("e1")
    box = Box(transition())
    full = sa.exc.OperationalError("INSERT", None, OSError("database or disk is full"))
    intake = make_intake(box)
    with monkeypatch.context() as broken:

        async def add(_connection, _rows):
            raise full

        broken.setattr(delivery_rows, "add", add)
        assert await intake.drain_once() > DRAIN_EVERY_S
        await intake.drain_once()
        assert len(box.rows) == 1
    await intake.drain_once()
    assert len(await written(store)) == 1
    await intake.drain_once()
    assert box.rows == []


async def test_drain_is_repeated_after_redis_was_away(store, add_endpoint, make_intake):
    await add_endpoint("e1")
    box = Box(transition())
    box.fault = LinkDown(False)
    intake = make_intake(box)
    assert await intake.drain_once() == DRAIN_EVERY_S
    box.fault = None
    await intake.drain_once()
    assert len(await written(store)) == 1


async def test_drain_is_repeated_at_once_if_more_rows_wait(store, add_endpoint, make_intake):
    await add_endpoint("e1")
    box = Box(*(transition() for _ in range(5)))
    box.page = 2
    intake = make_intake(box)
    assert [await intake.drain_once() for _ in range(4)] == [0.0, 0.0, DRAIN_EVERY_S, DRAIN_EVERY_S]
    assert len(await written(store)) == 5


async def test_repeated_row_creates_no_second_delivery(store, add_endpoint, make_intake):
    await add_endpoint("e1")
    row = transition()
    added = []
    for _ in range(3):
        # As if the control plane had been killed before it removed the row from Redis.
        await make_intake(Box(row), added=added).drain_once()
    assert [delivery.id for delivery in await written(store)] == [delivery_id(row.shard, row.stamp, "e1")]
    assert len(added) == 1


async def test_delivery_id_is_derived_from_shard_stamp_and_endpoint():
    assert delivery_id(7, 12, "e1") == delivery_id(7, 12, "e1")
    assert len({delivery_id(*parts) for parts in ((7, 12, "e1"), (71, 2, "e1"), (7, 12, "e2"), (8, 12, "e1"))}) == 4


async def test_no_transition_is_lost_if_intake_is_killed_at_any_moment(store, add_endpoint, make_intake):
    await add_endpoint("e1")
    await add_endpoint("e2")
    box = Box()
    rows = []
    for moment in range(60):
        new = [transition() for _ in range(3)]
        rows += new
        box.put(*new)
        intake = make_intake(box)
        look = asyncio.create_task(intake.drain_once())
        for _ in range(moment):
            await asyncio.sleep(0)
        if moment % 2:
            # Gives the thread of the database time to start.
            await asyncio.sleep(moment * 0.0001)
        look.cancel()
        await asyncio.gather(look, return_exceptions=True)
    intake = make_intake(box)
    while box.rows:
        await intake.drain_once()
    expected = {delivery_id(row.shard, row.stamp, name) for row in rows for name in ("e1", "e2")}
    found = [delivery.id for delivery in await written(store)]
    assert len(found) == len(expected)
    assert set(found) == expected


# -- what may be removed


async def test_forgotten_before_excludes_rows_that_redis_may_return_again(store, add_endpoint, make_intake, clock):
    await add_endpoint("e1")
    box = Box(transition(), transition())
    box.page = 1
    intake = make_intake(box)
    assert intake.forgotten_before() == 0.0
    await intake.drain_once()
    # An earlier process may have left rows in Redis, until all rows were read and removed once.
    assert intake.forgotten_before() == 0.0
    await intake.drain_once()
    assert intake.forgotten_before() == 0.0
    await intake.drain_once()
    assert intake.forgotten_before() == NOW_S
    box.put(transition())
    await intake.drain_once()
    clock.advance(60)
    box.fault = LinkDown(True)
    await intake.drain_once()
    assert intake.forgotten_before() == NOW_S
    box.fault = None
    await intake.drain_once()
    assert intake.forgotten_before() == NOW_S + 60


async def test_forgotten_before_does_not_advance_while_the_store_fails(store, add_endpoint, make_intake, monkeypatch):
    await add_endpoint("e1")
    intake = make_intake(Box(transition()))

    async def add(_connection, _rows):
        raise sa.exc.OperationalError("INSERT", None, OSError("database or disk is full"))

    monkeypatch.setattr(delivery_rows, "add", add)
    for _ in range(3):
        await intake.drain_once()
    assert intake.forgotten_before() == 0.0


# -- how often the outbox is read


async def drains_in(box, seconds):
    before = box.drains
    await asyncio.sleep(seconds)
    return box.drains - before


@pytest.fixture
async def running(make_intake):
    """`running(box)`: runs an intake until the test ends."""
    tasks = []

    def run(box):
        tasks.append(asyncio.create_task(make_intake(box).run()))

    yield run
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_outbox_is_read_once_a_second_without_endpoints(running, wait_until):
    box = Box()
    running(box)
    await wait_until(lambda: box.drains)
    assert await drains_in(box, 0.8) <= 1


@pytest.mark.parametrize("wanted", ["endpoint", "leave", "row"])
async def test_outbox_is_read_ten_times_a_second_with_endpoints_or_waiting_rows(
    running, wait_until, add_endpoint, endpoints, wanted
):
    box = Box()
    running(box)
    await wait_until(lambda: box.drains)
    if wanted == "endpoint":
        # Within the next 100 ms, not in the next second.
        await add_endpoint("e1")
        await wait_until(lambda: box.drains >= 3, 0.8)
        # A disabled endpoint gets nothing more.
        endpoints[APP] = [msgspec.structs.replace(endpoints[APP][0], disabled_at=NOW_S)]
        await asyncio.sleep(0.2)
        assert await drains_in(box, 0.8) <= 1
    elif wanted == "leave":
        box.leaves = 1
        await wait_until(lambda: box.drains >= 5, 3)
        box.leaves = 0
    else:
        box.committed = lambda rows: None
        box.put(transition())
        await wait_until(lambda: box.drains >= 5, 3)
