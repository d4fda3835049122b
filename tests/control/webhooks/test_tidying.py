"""What the leader removes, and that no step of it needs the others."""

from types import SimpleNamespace

import msgspec
import pytest

from control.webhooks.transitions import APP, NOW_S, Box, later, seen, tidy, transition
from helpers.receiver import status
from redpoll.config.settings import Settings
from redpoll.control.records.loaded_records import Origin
from redpoll.control.records.records import RecordError, Records
from redpoll.control.webhooks.webhooks import Webhooks
from redpoll.store import deliveries as delivery_rows
from redpoll.store import old_deliveries, pulled
from redpoll.store.errors import StoreUnavailable
from redpoll.store.store import Store
from store.written_deliveries import put, result, row

BROKEN = status(500, "Internal Server Error")
# The tidying of a test is the only one.
NEVER = {"tidy_every_s": 3_600.0}


async def test_old_deliveries_are_removed_and_a_deleted_endpoint_with_its_last_one(
    make_webhooks, receiver, clock, wait_until
):
    box = Box()
    webhooks = await make_webhooks(box, {"max_finished": 2, **NEVER})
    endpoint = await webhooks.endpoints.create(APP, receiver.url)
    for number in range(1, 6):
        box.put(transition(channel=f"c{number}"))
        await seen(webhooks, "delivered", number)
        clock.advance(1)
    await wait_until(lambda: not box.rows and webhooks.intake.forgotten_before() == clock())
    await tidy(webhooks)
    # Nothing is removed in the first minute.
    await seen(webhooks, "delivered", 5)
    await later(webhooks, clock, wait_until, 61)
    await tidy(webhooks)
    assert {delivery.channel for delivery in await seen(webhooks, "delivered", 2)} == {"c4", "c5"}
    await webhooks.endpoints.delete(endpoint.id)
    await later(webhooks, clock, wait_until, 7 * 86_400)
    await tidy(webhooks)
    assert await webhooks.deliveries(APP) == []
    with pytest.raises(RecordError, match="has no webhook"):
        await webhooks.deliveries(APP, endpoint_id=endpoint.id)


async def test_oldest_dead_letters_of_an_endpoint_are_removed_and_counted(make_webhooks, receiver, clock, wait_until):
    """A client that joins and leaves at a failing endpoint made dead letters without end."""
    receiver.answer = status(500)
    box = Box()
    webhooks = await make_webhooks(box, NEVER, webhook_retry_after_s=(), webhook_max_dead_letters=3)
    endpoint = await webhooks.endpoints.create(APP, receiver.url)
    for number in range(1, 6):
        box.put(transition(channel=f"c{number}"))
        await seen(webhooks, "failed", number)
        clock.advance(1)
    await later(webhooks, clock, wait_until, 61)
    await tidy(webhooks)
    assert {delivery.channel for delivery in await seen(webhooks, "failed", 3)} == {"c3", "c4", "c5"}
    assert webhooks.counters()["webhook_dead_letters_removed_total"] == 2
    await tidy(webhooks)
    assert (await webhooks.depths(APP))[endpoint.id].failed == 3


async def test_dead_letters_that_are_handled_during_the_tidying_count_as_gone(
    make_webhooks, receiver, clock, monkeypatch, wait_until
):
    """As many others were removed, though the bound had room for them."""
    box, receiver.answer = Box(), BROKEN
    webhooks = await make_webhooks(box, NEVER, webhook_retry_after_s=(), webhook_max_dead_letters=3)
    await webhooks.endpoints.create(APP, receiver.url)
    box.put(*(transition(channel=f"c{number}") for number in range(5)))
    letters = await seen(webhooks, "failed", 5)
    await later(webhooks, clock, wait_until, 61)
    endpoints_to_limit = old_deliveries.endpoints_to_limit

    async def found_before_the_operator_discards(*arguments, **more):
        found = await endpoints_to_limit(*arguments, **more)
        assert len(found) == 1
        await webhooks.dead_letters.discard([letters[0].id, letters[1].id])
        return found

    monkeypatch.setattr(old_deliveries, "endpoints_to_limit", found_before_the_operator_discards)
    await tidy(webhooks)
    assert {letter.id for letter in await webhooks.deliveries(APP, states=("failed",))} == {
        letter.id for letter in letters[2:]
    }
    assert webhooks.counters()["webhook_dead_letters_removed_total"] == 0


async def test_tidying_works_with_more_endpoints_than_a_statement_has_values(postgres_url, clock):
    """PostgreSQL takes 32,767 values: with more endpoints, of all apps together, every tidying failed."""
    store = await Store.open(postgres_url)
    records = Records(store)
    await records.load()
    await records.upsert_app(APP, "a" * 20, "b" * 40)
    webhooks = Webhooks(store, records, Settings(), clock=clock, steady=clock.steady, tidy_every_s=3_600.0)
    try:
        await webhooks.load()
        endpoint = await webhooks.endpoints.create(APP, None)
        webhooks.start(Box(transition()), lambda *_: None)
        await seen(webhooks, "waiting", 1)
        # Only memory has the others.
        ids = [f"e{number}" for number in range(33_000)]
        records.on_endpoints({one: msgspec.structs.replace(endpoint, id=one) for one in ids}, Origin.OTHERS)
        await tidy(webhooks)
        assert webhooks.counters()["webhook_deliveries_waiting"] == 1
    finally:
        await webhooks.finish()
        await store.close()


# -- steps of which one fails, or takes long


@pytest.fixture
def tidied(make_webhooks, store, clock):
    """`await tidied(webhooks)`: one round for a Webhooks that isn't started."""
    schedule = SimpleNamespace(forget=lambda known: None)
    intake = SimpleNamespace(forgotten_before=clock)

    async def tidied(webhooks):
        await webhooks.tidying.tidy(store, schedule, intake)

    return tidied


@pytest.mark.parametrize("step", ["depths", "endpoints_to_prune"])
async def test_step_that_fails_stops_no_other_one(make_webhooks, store, tidied, monkeypatch, step):
    """A count that took longer than a statement may let the store grow."""
    webhooks = await make_webhooks(webhook_retry_after_s=(), webhook_max_dead_letters=1)
    endpoint = await webhooks.endpoints.create(APP, None)
    async with store.change() as connection:
        numbers = await put(connection, *(row(name, endpoint.id) for name in ("a", "b", "c", "leased")))
        await delivery_rows.put_results(
            connection,
            [
                *(result(numbers, name, "failed", NOW_S - 500.0) for name in "abc"),
                result(numbers, "leased", "waiting", NOW_S - 1.0),
            ],
        )

    async def fail(*_, **__):
        raise StoreUnavailable("timed out")

    monkeypatch.setattr(delivery_rows if step == "depths" else old_deliveries, step, fail)
    await tidied(webhooks)
    assert [(one.id, one.state) for one in await webhooks.deliveries(APP)] == [("leased", "failed")]
    assert webhooks.tidying.dead_letters_removed == 3


LOOKS = [
    (delivery_rows, "depths"),
    (pulled, "has_run_out"),
    (old_deliveries, "endpoints_to_prune"),
    (old_deliveries, "endpoints_to_limit"),
]


@pytest.mark.parametrize(("module", "look"), LOOKS)
async def test_looks_that_read_much_are_rare_if_they_take_long(make_webhooks, tidied, clock, monkeypatch, module, look):
    """What many deliveries that nobody fetches have was counted every 5 s, by half of a core."""
    webhooks = await make_webhooks()
    await webhooks.endpoints.create(APP, None)
    took_s, looks = [0.0], []

    async def take_long(*_, **__):
        looks.append(clock())
        clock.advance(took_s[0])
        return {}

    monkeypatch.setattr(module, look, take_long)
    await tidied(webhooks)
    took_s[0] = 2.0
    await tidied(webhooks)
    assert len(looks) == 2
    await tidied(webhooks)
    clock.advance(99.0)
    await tidied(webhooks)
    assert len(looks) == 2
    clock.advance(1.0)
    await tidied(webhooks)
    assert len(looks) == 3


@pytest.mark.parametrize(
    ("state", "remove", "look"),
    [
        ("delivered", "remove_finished", "endpoints_to_prune"),
        ("failed", "remove_dead_letters", "endpoints_to_limit"),
    ],
)
async def test_one_round_removes_a_part_of_many_and_the_next_goes_on(
    make_webhooks, store, tidied, clock, monkeypatch, state, remove, look
):
    """The other steps waited until millions of one endpoint were gone."""
    webhooks = await make_webhooks(None, {"max_finished": 1}, webhook_max_dead_letters=1)
    endpoint = await webhooks.endpoints.create(APP, None)
    async with store.change() as connection:
        numbers = await put(connection, *(row(f"d{number}", endpoint.id) for number in range(6)))
        results = [result(numbers, f"d{number}", state, NOW_S - 500.0 + number) for number in range(6)]
        await delivery_rows.put_results(connection, results)
    monkeypatch.setattr(old_deliveries, "BATCH", 1)
    remove_some, find, looks = getattr(old_deliveries, remove), getattr(old_deliveries, look), []

    async def take_long(*arguments, **more):
        clock.advance(0.5)
        return await remove_some(*arguments, **more)

    async def found(*arguments, **more):
        looks.append(clock())
        # The next one comes after all that this test does.
        clock.advance(10.0)
        return await find(*arguments, **more)

    monkeypatch.setattr(old_deliveries, remove, take_long)
    monkeypatch.setattr(old_deliveries, look, found)
    left = []
    for _ in range(4):
        await tidied(webhooks)
        left.append(sorted(one.id for one in await webhooks.deliveries(APP)))
    assert left == [["d2", "d3", "d4", "d5"], ["d4", "d5"], ["d5"], ["d5"]]
    assert len(looks) == 1


async def test_count_that_failed_is_repeated_within_a_minute(make_webhooks, tidied, clock, monkeypatch):
    """While PostgreSQL is away a count takes as long as a statement may. A new leader had no figures for long."""
    webhooks = await make_webhooks()
    counts = []

    async def depths(*_, **__):
        counts.append(clock())
        clock.advance(15.0)
        raise StoreUnavailable("timed out")

    monkeypatch.setattr(delivery_rows, "depths", depths)
    await tidied(webhooks)
    clock.advance(59.0)
    await tidied(webhooks)
    assert len(counts) == 1
    clock.advance(1.0)
    await tidied(webhooks)
    assert len(counts) == 2
