"""From the outbox into the store: which endpoints get a delivery. No transition is lost or stored twice."""

import asyncio
import json
from contextlib import asynccontextmanager

import hiredis
import msgspec
import pytest
import sqlalchemy as sa
from structlog.testing import capture_logs

from control.webhooks.transitions import APP, NOW_S, OTHER, Box, transition
from redpoll.cluster.outbox import Subject
from redpoll.cluster.redis.link import LinkDown
from redpoll.control.webhooks.announced import Announced
from redpoll.control.webhooks.intake import TAKE_EVERY_S, Intake, delivery_id
from redpoll.control.webhooks.waiting_bound import WaitingBound
from redpoll.store import deliveries as delivery_rows
from redpoll.store import webhooks as endpoint_rows
from redpoll.store.leadership import NotLeader
from redpoll.store.store import raise_version, versions
from redpoll.store.webhooks import Endpoint


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
    def make(box, added=None, traced=None, compare_after_s=(), lasts_s=3_600, known=None, bound=None, found=None):
        on_new = [].extend if added is None else added.extend
        on_found = (set() if found is None else found).update

        def on_traced(row, delivery, endpoint):
            (traced if traced is not None else []).append((row.trace, row.app_id, delivery, endpoint))

        def any_enabled():
            return any(endpoint.enabled for of_app in endpoints.values() for endpoint in of_app)

        def endpoint(endpoint_id):
            return next((one for of_app in endpoints.values() for one in of_app if one.id == endpoint_id), None)

        announced = Announced(box, endpoint, compare_after_s=compare_after_s, lasts_s=lasts_s)
        of_app = lambda app_id: endpoints.get(app_id, ())  # noqa: E731
        bound = bound or WaitingBound(100_000)
        return Intake(box, store, of_app, any_enabled, on_new, on_found, on_traced, announced, bound, clock, known)

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
    await make_intake(Box(*rows), added=added).take_once()
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
    await make_intake(Box(row)).take_once()
    service, pusher = await written(store)
    assert json.loads(service.body)["data"] == {"channel": "room", "subscription_count": 3, "seq": row.stamp}
    assert json.loads(pusher.body)["events"][0]["name"] == "channel_occupied"
    assert (service.stamp, service.time_ms, service.trace) == (row.stamp, row.time_ms, "tr")


async def test_disabled_endpoint_gets_transitions_from_before_it_was_disabled(store, add_endpoint, make_intake):
    await add_endpoint("e1", disabled_at=NOW_S)
    before = transition(time_ms=int(NOW_S * 1000) - 1)
    await make_intake(Box(before, transition(time_ms=int(NOW_S * 1000)))).take_once()
    assert [delivery.stamp for delivery in await written(store)] == [before.stamp]


async def test_endpoint_that_the_store_lost_does_not_block_the_others(store, add_endpoint, make_intake, endpoints):
    await add_endpoint("e1")
    await add_endpoint("lost")
    async with store.change() as connection:
        await connection.execute(sa.text("DELETE FROM webhooks WHERE id = 'lost'"))
    box = Box(transition())
    intake = make_intake(box)
    with capture_logs() as lines:
        await intake.take_once()
        box.rows.append(transition())
        await intake.take_once()
    assert {delivery.endpoint_id for delivery in await written(store)} == {"e1"}
    assert intake.taken_total == 2
    assert [line["endpoint"] for line in lines if "not in the record store" in line["event"]] == ["lost"]


async def test_unreadable_row_is_counted_and_skipped(store, add_endpoint, make_intake):
    await add_endpoint("e1")
    good = transition("client_event")
    box = Box(transition("client_event", detail=b"{not json"), good)
    intake = make_intake(box)
    await intake.take_once()
    await intake.take_once()
    assert [delivery.stamp for delivery in await written(store)] == [good.stamp]
    assert (intake.unreadable_total, intake.taken_total, box.rows) == (1, 2, [])


# -- no loss, no repetition


async def test_too_many_deliveries_are_dropped_and_counted(store, add_endpoint, make_intake):
    """A client that subscribed to new channels filled the record store through an endpoint that doesn't answer."""
    await add_endpoint("e1")
    bound = WaitingBound(6)
    box = Box(*(transition(channel=f"c{number}") for number in range(5)))
    again = list(box.rows)
    intake = make_intake(box, bound=bound)
    await intake.take_once()
    # Public channels take half of the places.
    assert [delivery.channel for delivery in await written(store)] == ["c0", "c1", "c2"]
    box.put(*(transition(channel=f"private-{number}") for number in range(5)))
    await intake.take_once()
    assert [delivery.channel for delivery in await written(store)][3:] == ["private-0", "private-1", "private-2"]
    # Rows whose deliveries are stored aren't dropped when they are read again.
    box._committed.clear()
    box.rows = again[:3]
    await intake.take_once()
    assert bound.dropped_total == 4
    async with store.reading() as connection:
        depth = (await delivery_rows.depths(connection, ["e1"]))["e1"]
    assert (depth.waiting, depth.dropped, depth.dropped_at) == (6, 4, NOW_S)


async def test_row_is_removed_from_redis_only_after_the_commit(store, add_endpoint, make_intake, monkeypatch):
    await add_endpoint("e1")
    box = Box(transition())
    full = sa.exc.OperationalError("INSERT", None, OSError("database or disk is full"))
    intake = make_intake(box)
    with monkeypatch.context() as broken:

        async def add(_connection, _rows):
            raise full

        broken.setattr(delivery_rows, "add", add)
        assert await intake.take_once() > TAKE_EVERY_S
        await intake.take_once()
        assert len(box.rows) == 1
    await intake.take_once()
    assert len(await written(store)) == 1
    await intake.take_once()
    assert box.rows == []


async def test_deliveries_of_many_endpoints_are_written_in_parts(store, add_endpoint, make_intake, monkeypatch):
    """All that was read, times the endpoints of an app, was one transaction, and everything else waited for it."""
    for number in range(50):
        await add_endpoint(f"e{number}", events=("all", "client_event"))
    large = b'{"event":"client-x","data":"%s","socket_id":"1.2"}' % (b"x" * 100_000)
    rows = [transition(channel=f"c{number}") for number in range(25)]
    box = Box(*rows, *(transition("client_event", detail=large) for _ in range(2)))
    all_rows, sizes, added = list(box.rows), [], []
    intake = make_intake(box, added=added)

    async def add(connection, rows, ask=delivery_rows.add):
        sizes.append(len(rows))
        if len(sizes) == 3:
            raise sa.exc.OperationalError("INSERT", None, OSError("database or disk is full"))
        return await ask(connection, rows)

    monkeypatch.setattr(delivery_rows, "add", add)
    await intake.take_once()
    # What is committed stays committed, and the rest is read again.
    assert box._committed == {(row.shard, row.stamp) for row in all_rows[:20]}
    await intake.take_once()
    assert sizes == [500, 500, 300, 300, 50]
    expected = {delivery_id(row.shard, row.stamp, f"e{number}") for row in all_rows for number in range(50)}
    assert (len(added), {delivery.id for delivery in added}) == (1_350, expected)
    assert intake.taken_total == 27


async def test_former_leader_that_does_not_know_an_endpoint_leaves_its_rows(store, make_intake, monkeypatch):
    # It was paused, and another node created the endpoint meanwhile.
    box = Box(transition())
    intake = make_intake(box)
    with monkeypatch.context() as replaced:

        @asynccontextmanager
        async def change():
            raise NotLeader("another node leads now")
            yield

        replaced.setattr(store, "change", change)
        for _ in range(2):
            await intake.take_once()
    assert len(box.rows) == 1


async def test_rows_wait_until_the_endpoints_of_other_servers_are_known(store, add_endpoint, make_intake):
    async with store.reading() as connection:
        known = [await versions(connection)]
    box = Box(transition())
    intake = make_intake(box, known=lambda: known[0])
    # Another server created the endpoint and told the workers to write rows; this one hasn't read it yet.
    async with store.change() as connection:
        created = await raise_version(connection, webhooks=("e1",))
    await intake.take_once()
    await intake.take_once()
    assert (len(box.rows), await written(store)) == (1, [])
    await add_endpoint("e1")
    known[0] = created
    await intake.take_once()
    assert len(await written(store)) == 1


async def test_drain_is_repeated_after_redis_was_away(store, add_endpoint, make_intake):
    await add_endpoint("e1")
    box = Box(transition())
    box.fault = LinkDown(False)
    intake = make_intake(box)
    assert await intake.take_once() == TAKE_EVERY_S
    box.fault = None
    await intake.take_once()
    assert len(await written(store)) == 1


async def test_redis_that_refuses_is_asked_less_often(store, make_intake):
    box = Box(transition())
    box.fault = hiredis.ReplyError("NOREPLICAS Not enough good replicas to write.")
    assert await make_intake(box).take_once() > TAKE_EVERY_S


async def test_drain_is_repeated_at_once_if_more_rows_wait(store, add_endpoint, make_intake):
    await add_endpoint("e1")
    box = Box(*(transition("client_event") for _ in range(5)))
    box.page = 2
    intake = make_intake(box)
    assert [await intake.take_once() for _ in range(4)] == [0.0, 0.0, TAKE_EVERY_S, TAKE_EVERY_S]
    assert len(await written(store)) == 5


async def test_repeated_row_creates_no_second_delivery(store, add_endpoint, make_intake):
    await add_endpoint("e1")
    row = transition()
    added = []
    for _ in range(3):
        # As if the control plane had been killed before it removed the row from Redis.
        await make_intake(Box(row), added=added).take_once()
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
        new = [transition("client_event") for _ in range(3)]
        rows += new
        box.put(*new)
        intake = make_intake(box)
        look = asyncio.create_task(intake.take_once())
        for _ in range(moment):
            await asyncio.sleep(0)
        if moment % 2:
            # Gives the thread of the database time to start.
            await asyncio.sleep(moment * 0.0001)
        look.cancel()
        await asyncio.gather(look, return_exceptions=True)
    intake = make_intake(box)
    while box.rows:
        await intake.take_once()
    expected = {delivery_id(row.shard, row.stamp, name) for row in rows for name in ("e1", "e2")}
    found = [delivery.id for delivery in await written(store)]
    assert len(found) == len(expected)
    assert set(found) == expected


# -- what may be removed


async def test_forgotten_before_excludes_rows_that_redis_may_return_again(store, add_endpoint, make_intake, clock):
    await add_endpoint("e1")
    box = Box(transition("client_event"), transition("client_event"))
    box.page = 1
    intake = make_intake(box)
    assert intake.forgotten_before() == 0.0
    await intake.take_once()
    # An earlier process may have left rows in Redis, until all rows were read and removed once.
    assert intake.forgotten_before() == 0.0
    await intake.take_once()
    assert intake.forgotten_before() == 0.0
    await intake.take_once()
    assert intake.forgotten_before() == NOW_S
    box.put(transition("client_event"))
    await intake.take_once()
    clock.advance(60)
    box.fault = LinkDown(True)
    await intake.take_once()
    assert intake.forgotten_before() == NOW_S
    box.fault = None
    await intake.take_once()
    assert intake.forgotten_before() == NOW_S + 60
    # It may lose writes of the time before its last answer, however long it is away.
    box.fault = LinkDown(True)
    clock.advance(3_600)
    await intake.take_once()
    assert intake.forgotten_before() == NOW_S + 60


async def test_forgotten_before_does_not_advance_while_the_store_fails(store, add_endpoint, make_intake, monkeypatch):
    await add_endpoint("e1")
    intake = make_intake(Box(transition()))

    async def add(_connection, _rows):
        raise sa.exc.OperationalError("INSERT", None, OSError("database or disk is full"))

    monkeypatch.setattr(delivery_rows, "add", add)
    for _ in range(3):
        await intake.take_once()
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
    running, wait_until, add_endpoint, endpoints, wanted, monkeypatch
):
    def idle_for_long() -> None:
        # What is read from now on is not read because a second is over.
        monkeypatch.setattr("redpoll.control.webhooks.intake.IDLE_TAKE_EVERY_S", 3600.0)

    box = Box()
    if wanted == "endpoint":
        idle_for_long()
        running(box)
        await wait_until(lambda: box.drains)
        # At the next look at the endpoints.
        await add_endpoint("e1")
        await wait_until(lambda: box.drains >= 3)
        # A disabled endpoint gets nothing more.
        endpoints[APP] = [msgspec.structs.replace(endpoints[APP][0], disabled_at=NOW_S)]
        await asyncio.sleep(0.2)
        assert await drains_in(box, 0.8) <= 1
        return
    running(box)
    await wait_until(lambda: box.drains)
    if wanted == "leave":
        box.leaves = 1
    else:
        box.committed = lambda rows: None
        box.put(transition("client_event"))
    drains = box.drains
    await wait_until(lambda: box.drains > drains)
    idle_for_long()
    # One of them may still come after a second.
    await wait_until(lambda: box.drains >= drains + 4)
    box.leaves = 0


# -- after a fail-over that lost writes


async def events(store):
    return [(delivery.event, delivery.channel, delivery.user) for delivery in await written(store)]


async def test_transition_that_redis_repeats_is_announced_once(store, add_endpoint, make_intake):
    await add_endpoint("e1")
    await make_intake(
        Box(transition("channel.occupied"), transition("member.added", user="ann"), transition("channel.vacated"))
    ).take_once()
    # The leader and Redis failed together. What was lost happens again, and one row is here again.
    again = Box(
        transition("channel.vacated"),
        transition("member.added", user="ann"),
        transition("channel.occupied"),
        transition("channel.occupied"),
    )
    await make_intake(again).take_once()
    room = "room"
    assert await events(store) == [
        ("channel.occupied", room, None),
        ("member.added", room, "ann"),
        ("channel.vacated", room, None),
        ("channel.occupied", room, None),
    ]


async def test_commit_without_an_answer_is_known_to_the_next_announcement(
    store, add_endpoint, make_intake, monkeypatch
):
    await add_endpoint("e1")
    await add_endpoint("e2", app_id=OTHER)
    box = Box(transition("member.removed", user="ann"))
    added, found = [], set()
    intake = make_intake(box, added, found=found)
    await intake.take_once()
    box.put(transition("member.added", user="ann"))
    change = store.change
    with monkeypatch.context() as broken:

        @asynccontextmanager
        async def change_without_an_answer():
            async with change() as connection:
                yield connection
            raise sa.exc.OperationalError("COMMIT", None, OSError("connection lost"))

        broken.setattr(store, "change", change_without_an_answer)
        await intake.take_once()
    assert (len(added), found) == (1, set())
    box.put(transition("member.removed", user="ann"))
    await intake.take_once()
    assert [event for event, _, _ in await events(store)] == ["member.removed", "member.added", "member.removed"]
    # The schedule wasn't told of the second one, and must look for it.
    assert (len(added), found) == (2, {"e1"})


async def test_rows_that_a_failover_brings_back_change_nothing(store, add_endpoint, make_intake):
    await add_endpoint("e1")
    rows = [transition("channel.occupied"), transition("channel.vacated"), transition("channel.occupied")]
    box = Box(*rows)
    intake = make_intake(box)
    await intake.take_once()
    box.connects = 2
    box.put(*rows[:2], transition("channel.occupied"))
    await intake.take_once()
    assert [event for event, *_ in await events(store)] == [row.event for row in rows]


async def test_endpoint_of_one_event_of_a_pair_gets_each_of_them(store, add_endpoint, make_intake):
    await add_endpoint("e1", events=("channel.occupied",))
    await make_intake(Box(transition("channel.occupied"), transition("channel.occupied"))).take_once()
    assert len(await written(store)) == 2


async def test_what_redis_lost_is_stated_again(store, add_endpoint, make_intake):
    await add_endpoint("e1")
    added = [transition("member.added", user=user) for user in ("gone", "here")]
    await make_intake(Box(transition("channel.occupied"), *added)).take_once()
    box = Box()
    box.is_present = {Subject(APP, "room", None): True, Subject(APP, "room", "here"): True}
    await make_intake(box, compare_after_s=(0.0,)).take_once()
    assert box.restated == [Subject(APP, "room", "gone")]
    # Later it is no longer looked at.
    intake = make_intake(box, compare_after_s=(), lasts_s=0.0)
    await intake.take_once()
    assert not intake._announced.active


class BoxThatLoses(Box):
    """Two channels are occupied and announced. `lose` is a fail-over: nobody knows of `gone` any more, and `room` is
    occupied once more. `lacks_shard`: one shard doesn't answer."""

    def __init__(self):
        super().__init__(transition(channel="gone"), transition())
        self.is_present = {Subject(APP, "gone", None): True, Subject(APP, "room", None): True}
        self.lacks_shard = False

    async def take(self):
        self.errors += self.lacks_shard
        return await super().take()

    def lose(self):
        self.connects += 1
        del self.is_present[Subject(APP, "gone", None)]
        self.put(transition())


async def assert_put_right(box, store):
    once_each = [("channel.occupied", channel, None) for channel in ("gone", "room")]
    assert (await events(store), box.restated) == (once_each, [Subject(APP, "gone", None)])


@pytest.mark.parametrize("part", ["all", "one shard"])
async def test_outage_may_last_longer_than_deliveries_are_read_back(store, add_endpoint, make_intake, clock, part):
    await add_endpoint("e1")
    box = BoxThatLoses()
    intake = make_intake(box, compare_after_s=(0.0,), lasts_s=0.0)
    await intake.take_once()
    box.fault = LinkDown(False) if part == "all" else None
    box.lacks_shard = part == "one shard"
    for _ in range(3):
        clock.advance(60)
        await intake.take_once()
    box.fault, box.lacks_shard = None, False
    box.lose()
    await intake.take_once()
    await assert_put_right(box, store)


async def test_announcements_are_read_however_long_the_store_is_away(
    store, add_endpoint, make_intake, clock, monkeypatch
):
    await add_endpoint("e1")
    box = BoxThatLoses()
    intake = make_intake(box, compare_after_s=(0.0,), lasts_s=0.0)
    await intake.take_once()
    box.lose()
    with monkeypatch.context() as broken:

        def reading():
            raise sa.exc.OperationalError("SELECT", None, OSError("connection lost"))

        broken.setattr(store, "reading", reading)
        for _ in range(3):
            clock.advance(60)
            await intake.take_once()
    await intake.take_once()
    await assert_put_right(box, store)


async def test_new_leader_reads_back_from_the_last_delivery(store, add_endpoint, make_intake, clock):
    """The former one may have died with Redis long ago, or had another clock."""
    await add_endpoint("e1")
    box = BoxThatLoses()
    await make_intake(box).take_once()
    clock.advance(3_600)
    box.lose()
    await make_intake(box, compare_after_s=(0.0,)).take_once()
    await assert_put_right(box, store)
