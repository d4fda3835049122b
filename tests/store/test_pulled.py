"""Deliveries that back ends pull, in both databases."""

import asyncio
import itertools

import pytest
import sqlalchemy as sa

from redpoll.store import deliveries as delivery_rows
from redpoll.store import due_deliveries, pulled
from redpoll.store import webhooks as endpoint_rows
from redpoll.store.schema import apps, webhooks
from redpoll.store.store import Store
from redpoll.store.webhooks import Endpoint

NOW_S = 1_000.0


async def fill(store, ids, last_of="e1"):
    """Two endpoints of one app without a URL, and these deliveries of the first. `last_of`: whose the last one is."""
    async with store.change() as connection:
        await connection.execute(sa.insert(apps).values(id="1", name="a", settings="{}"))
        for name in ("e1", "e2"):
            endpoint = Endpoint(
                id=name, app_id="1", url="", secret="s", events=("all",), channels=(), format="service", created_at=1.0
            )
            await endpoint_rows.add(connection, endpoint)
        rows = [
            {
                "id": delivery_id,
                "endpoint_id": last_of if n == len(ids) - 1 else "e1",
                "event": "channel.occupied",
                "channel": "c",
                "user": None,
                "stamp": n,
                "time_ms": 1,
                "trace": None,
                "body": b"{}",
                "at": NOW_S,
                "created_at": NOW_S,
            }
            for n, delivery_id in enumerate(ids)
        ]
        await delivery_rows.add(connection, rows)


@pytest.fixture
async def store(store_url):
    """Two endpoints of one app without a URL; the first has three deliveries, the second one."""
    opened = await Store.open(store_url)
    await fill(opened, ["d0", "d1", "d2", "d3"], last_of="e2")
    yield opened
    await opened.close()


async def test_delivery_is_due_again_after_its_lease_until_its_attempts_are_used_up(store):
    async with store.change() as connection:
        found = await pulled.due(connection, ["e1"], NOW_S, 2, 2, 1_000)
        assert [one.id for one in found] == ["d0", "d1"]
        await pulled.hand_out(connection, found, NOW_S, [NOW_S + 60, NOW_S + 90], "unacked")
        assert [one.id for one in await pulled.due(connection, ["e1", "e2"], NOW_S, 2, 9, 1_000)] == ["d2", "d3"]
        assert await pulled.next_due(connection, ["e1"], 2) == NOW_S
        assert await pulled.next_due(connection, ["other"], 2) is None
        again = await pulled.due(connection, ["e1"], NOW_S + 60, 2, 9, 1_000)
        assert [(one.id, one.attempts) for one in again] == [("d2", 0), ("d0", 1)]
        await pulled.hand_out(connection, again[1:], NOW_S + 60, [NOW_S + 120], "unacked")
        assert not await pulled.has_run_out(connection, NOW_S + 119, 2)
        assert await pulled.has_run_out(connection, NOW_S + 120, 2)
        assert [one.id for one in await pulled.due(connection, ["e1"], NOW_S + 200, 2, 9, 1_000)] == ["d2", "d1"]
        (ended,) = await pulled.run_out(connection, NOW_S + 200, 2)
        assert (ended.endpoint_id, ended.waited, ended.size) == ("e1", True, 2)
        (failed,) = await delivery_rows.find_by_ids(connection, ["d0"])
    assert (failed.state, failed.attempts, failed.dead_letter) == ("failed", 2, "pending")


async def test_acknowledged_delivery_is_delivered_with_the_time_that_it_took(store):
    async with store.change() as connection:
        found = await pulled.due(connection, ["e1"], NOW_S, 2, 1, 1_000)
        assert await pulled.acknowledge(connection, ["e1"], ["d0"], NOW_S, "delivered") == []
        await pulled.hand_out(connection, found, NOW_S, [NOW_S + 60], "unacked")
        assert await pulled.acknowledge(connection, ["e2"], ["d0"], NOW_S, "delivered") == []
        ended = await pulled.acknowledge(connection, ["e1", "e2"], ["d0", "d1", "x"], NOW_S + 1.5, "delivered")
        assert [(one.endpoint_id, one.waited, one.size) for one in ended] == [("e1", True, 2)]
        (attempt,) = await delivery_rows.attempts_at(connection, ended[0].number)
        assert (attempt.outcome, attempt.reason, attempt.duration_ms) == ("delivered", "acknowledged", 1_500)
        (delivery,) = await delivery_rows.find_by_ids(connection, ["d0"])
    assert (delivery.state, delivery.at) == ("delivered", NOW_S + 1.5)
    # A second time, it has ended.
    async with store.change() as connection:
        assert await pulled.acknowledge(connection, ["e1"], ["d0"], NOW_S + 2, "delivered") == []


async def test_dead_letter_may_be_acknowledged_after_months(store):
    """The milliseconds didn't fit into PostgreSQL's integer."""
    months_s = 90 * 86_400
    async with store.change() as connection:
        found = await pulled.due(connection, ["e1"], NOW_S, 1, 1, 1_000)
        await pulled.hand_out(connection, found, NOW_S, [NOW_S + 60], "unacked")
        assert len(await pulled.run_out(connection, NOW_S + 60, 1)) == 1
        (ended,) = await pulled.acknowledge(connection, ["e1"], ["d0"], NOW_S + months_s, "delivered")
        (attempt,) = await delivery_rows.attempts_at(connection, ended.number)
    assert (ended.waited, attempt.outcome, attempt.duration_ms) == (False, "delivered", 2**31 - 1)


async def test_dead_letters_are_made_in_batches(store, monkeypatch):
    monkeypatch.setattr(pulled, "BATCH", 2)
    async with store.change() as connection:
        found = await pulled.due(connection, ["e1", "e2"], NOW_S, 1, 9, 1_000)
        await pulled.hand_out(connection, found, NOW_S, [NOW_S + 60] * 4, "unacked")
        made = [await pulled.run_out(connection, NOW_S + 60, 1) for _ in range(3)]
    assert list(map(len, made)) == [2, 2, 0]


async def test_only_enabled_endpoints_that_are_pulled_get_dead_letters(store):
    async with store.change() as connection:
        found = await pulled.due(connection, ["e1", "e2"], NOW_S, 1, 9, 1_000)
        await pulled.hand_out(connection, found, NOW_S, [NOW_S] * 4, "unacked")
        for which, value in (("disabled_at", 1.0), ("url", "https://a.example/")):
            await connection.execute(sa.update(webhooks).where(webhooks.c.id == "e1").values({which: value}))
            assert {one.endpoint_id for one in await pulled.run_out(connection, NOW_S, 1)} <= {"e2"}
            assert not await pulled.has_run_out(connection, NOW_S, 1)
            await connection.execute(sa.update(webhooks).values(disabled_at=None, url=""))
        assert len(await pulled.run_out(connection, NOW_S, 1)) == 3


async def test_two_stores_of_one_database_hand_out_each_delivery_once(postgres_url):
    """Two nodes: each asks at the same time as the other, again and again."""
    one, other = await Store.open(postgres_url), await Store.open(postgres_url)
    try:
        await fill(one, [f"d{n}" for n in range(60)])
        all_began = asyncio.Barrier(4)

        async def take(store):
            taken = []
            while len(taken) < 60:
                async with store.change() as connection:
                    found = await pulled.due(connection, ["e1"], NOW_S, 3, 2, 1_000)
                    until_s = [NOW_S + 60] * len(found)
                    await pulled.hand_out(connection, found, NOW_S, until_s, "unacked")
                if not found:
                    break
                taken += [delivery.id for delivery in found]
                if len(taken) == len(found):
                    await all_began.wait()
            return taken

        taken = await asyncio.gather(*(take(store) for store in (one, other) * 2))
        assert sorted(itertools.chain(*taken)) == sorted(f"d{n}" for n in range(60))
        # The other node ends them, also those that it didn't hand out.
        async with other.change() as connection:
            ended = await pulled.acknowledge(connection, ["e1"], list(itertools.chain(*taken)), NOW_S, "delivered")
        assert len(ended) == 60
        async with one.reading() as connection:
            assert await pulled.next_due(connection, ["e1"], 3) is None
    finally:
        await one.close()
        await other.close()


async def test_lease_isnt_cut_to_a_shorter_pause_when_another_node_begins_to_lead(store):
    async with store.change() as connection:
        found = await pulled.due(connection, ["e1"], NOW_S, 3, 1, 1_000)
        await pulled.hand_out(connection, found, NOW_S, [NOW_S + 60], "unacked")
        for pauses_s in ((10.0, 20.0), ()):
            await due_deliveries.move_due_times(
                connection, before_s=NOW_S, now_s=NOW_S, pauses_s=pauses_s, lease_s=60.0
            )
        (delivery,) = await delivery_rows.find_by_ids(connection, ["d0"])
        assert delivery.at == NOW_S + 60
        await due_deliveries.move_due_times(connection, before_s=NOW_S, now_s=NOW_S - 500, pauses_s=(10.0,), lease_s=60)
        (delivery,) = await delivery_rows.find_by_ids(connection, ["d0"])
    assert delivery.at == NOW_S - 440
