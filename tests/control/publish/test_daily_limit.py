"""The daily limit and the copy of its counters, with a real store and a real Redis that loses its data."""

import asyncio

import pytest

from redpoll.cluster.bus import Unavailable
from redpoll.cluster.quota import Quota
from redpoll.cluster.redis.keys import Keys
from redpoll.control.publish.daily_limit import DailyLimit
from redpoll.control.records.records import Records
from redpoll.store.errors import StoreUnavailable
from redpoll.store.store import Store, database_url

NOON = 1_700_050_000.0  # 2023-11-15 12:06:40 UTC
TODAY, TOMORROW = "20231115", "20231116"


class Clock:
    def __init__(self):
        self.now = NOON

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
async def records(tmp_path):
    store = await Store.open(database_url(tmp_path))
    records = Records(store)
    await records.load()
    for app_id in ("3", "4"):
        await records.upsert_app(app_id, f"key{app_id}", "secret")
        await records.set_app(app_id, {"plan": "free"})
    yield records
    await records.finish()
    await store.close()


@pytest.fixture
async def make(link, records, clock):
    made = []

    def new(copy_every_s=60.0, kept_shards=frozenset):
        quota = Quota(link, Keys("rp"), wall_clock=clock)
        made.append(DailyLimit(quota, records, kept_shards, copy_every_s=copy_every_s, wall_clock=clock))
        return made[-1], quota

    yield new
    for daily in made:
        await daily.finish()


async def test_messages_beyond_the_limit_are_refused_as_a_whole_and_not_counted(make, records):
    daily, quota = make()
    daily.link_up()
    app = records.apps["3"]
    assert await daily.spend(app, 7, 10) == (True, 7)
    assert await daily.spend(app, 4, 10) == (False, 7)
    assert await daily.spend(app, 3, 10) == (True, 10)
    assert await quota.used("3") == 10
    assert await quota.used("4") == 0


async def test_headers_show_the_rest_and_the_reset_at_midnight_utc(make, records):
    daily, _ = make()
    daily.link_up()
    spent = await daily.spend(records.apps["3"], 7, 10)
    assert daily.headers(spent, 10).decode().splitlines() == [
        "X-RateLimit-Policy: daily",
        "X-RateLimit-Limit: 10",
        "X-RateLimit-Reset: 1700092800",
        "X-RateLimit-Remaining: 3",
    ]
    assert daily.left_s() == 42_800


async def test_counters_are_copied_to_the_store(make, records, wait_until):
    daily, quota = make(copy_every_s=0.01)
    daily.link_up()
    daily.start()
    await daily.spend(records.apps["3"], 5, 10)
    # As a worker counts client events.
    await quota.spend("4", 2, 10)
    stored = {}

    async def copied():
        while stored != {"3": 5, "4": 2}:
            stored.clear()
            stored.update(await records.daily_used(TODAY))
            await asyncio.sleep(0.005)

    await asyncio.wait_for(copied(), 60)


async def test_counters_are_copied_at_shutdown(make, records):
    daily, _quota = make()
    daily.link_up()
    daily.start()
    await daily.spend(records.apps["3"], 5, 10)
    await daily.finish()
    assert await records.daily_used(TODAY) == {"3": 5}


async def test_start_uses_the_larger_of_redis_counter_and_copy(make, records):
    await records.save_daily(TODAY, {"3": 8, "4": 1})
    daily, quota = make()
    await quota.spend("3", 2, 10)
    await quota.spend("4", 6, 10)
    daily.link_up()
    assert await daily.spend(records.apps["3"], 1, 10) == (True, 9)
    assert await daily.spend(records.apps["4"], 1, 10) == (True, 7)


async def test_spending_waits_until_lost_counters_are_restored(make, records, redis):
    daily, quota = make()
    daily.link_up()
    await daily.spend(records.apps["3"], 9, 10)
    daily.link_down()
    redis.flush()
    spending = asyncio.create_task(daily.spend(records.apps["3"], 5, 10))
    await asyncio.sleep(0)
    assert not spending.done()
    daily.link_up()
    assert await spending == (False, 9)
    assert await quota.used("3") == 9


async def test_spending_waits_only_where_counters_may_be_lost(make, records):
    """While any master of a Cluster was away, no app with a limit could publish."""
    kept: set[int] = set()
    daily, quota = make(kept_shards=lambda: frozenset(kept))
    here, elsewhere = records.apps["3"], records.apps["4"]
    assert quota.shard("3") != quota.shard("4")
    daily.link_up()
    for app in (here, elsewhere):
        await daily.spend(app, 1, 10)
    kept.update({quota.shard("3"), quota.shard("4")})
    daily.link_down()
    for app in (here, elsewhere):
        assert await asyncio.wait_for(daily.spend(app, 1, 10), 60) == (True, 2)
    # Another master is lost before the first one is back.
    kept.remove(quota.shard("4"))
    daily.link_down()
    assert await daily.spend(here, 1, 10) == (True, 3)
    waiting = asyncio.create_task(daily.spend(elsewhere, 1, 10))
    await asyncio.sleep(0)
    kept.add(quota.shard("4"))
    daily.link_down()
    assert await daily.spend(here, 1, 10) == (True, 4)
    assert not waiting.done()
    daily.link_up()
    assert await waiting == (True, 3)


async def test_another_node_restores_what_the_one_that_copied_has_written(make, records, redis):
    one, _ = make()
    other, quota = make()
    app = records.apps["3"]
    for daily in (one, other):
        daily.link_up()
    await other.spend(records.apps["4"], 1, 10)
    one.start()
    await one.spend(app, 5, 10)
    await one.finish()
    redis.flush()
    other.link_up()
    assert await other.spend(app, 1, 10) == (True, 6)
    assert await quota.used("3") == 6


async def test_copy_notices_a_redis_that_was_flushed_without_a_reconnect(make, records, redis, wait_until):
    daily, quota = make(copy_every_s=0.01)
    daily.link_up()
    await daily.spend(records.apps["3"], 9, 10)
    redis.flush()
    daily.start()

    async def put_back():
        while await quota.used("3") != 9:
            await asyncio.sleep(0.005)

    await asyncio.wait_for(put_back(), 60)


async def test_counter_starts_at_zero_on_a_new_day(make, records, clock):
    daily, quota = make()
    daily.link_up()
    app = records.apps["3"]
    assert await daily.spend(app, 10, 10) == (True, 10)
    clock.now = 1_700_092_800.0
    assert await daily.spend(app, 1, 10) == (True, 1)
    daily.link_up()
    assert await daily.spend(app, 1, 10) == (True, 2)
    assert await quota.used("3", TODAY) == 10
    assert await quota.used("3", TOMORROW) == 2


async def test_count_that_redis_confirms_after_midnight_is_none_of_the_new_day(make, records, clock, monkeypatch):
    daily, quota = make()
    daily.link_up()
    app, spend = records.apps["3"], quota.spend

    async def answered_late(*args):
        monkeypatch.undo()
        spent = await spend(*args)
        clock.now = 1_700_092_800.0
        daily.link_up()
        # It waits until the counters of the new day are read.
        await daily.spend(records.apps["4"], 1, 10)
        return spent

    monkeypatch.setattr(quota, "spend", answered_late)
    assert await daily.spend(app, 10, 10) == (True, 10)
    daily.link_up()
    assert await daily.spend(app, 1, 10) == (True, 1)


async def test_spending_waits_while_the_store_fails(make, records, monkeypatch, wait_until):
    from sqlalchemy.exc import OperationalError

    daily, _ = make()
    reads = 0
    answer = records.daily_used

    async def fails_twice(day):
        nonlocal reads
        reads += 1
        if reads < 3:
            raise OperationalError("select", {}, Exception("disk I/O error"))
        return await answer(day)

    monkeypatch.setattr(records, "daily_used", fails_twice)
    daily.link_up()
    assert await daily.spend(records.apps["3"], 1, 10) == (True, 1)
    assert reads == 3


async def test_spending_is_unavailable_while_redis_is_away(make, records, link, redis):
    daily, _quota = make()
    daily.link_up()
    await daily.spend(records.apps["3"], 1, 10)
    await link.close()
    with pytest.raises(Unavailable):
        await daily.spend(records.apps["3"], 1, 10)


async def test_while_postgres_is_away_counting_continues_from_redis(make, records, monkeypatch):
    daily, quota = make()
    app = records.apps["3"]
    assert await quota.spend(app.id, 4, 10) == (True, 4)

    async def away(_day):
        raise StoreUnavailable("PostgreSQL is away")

    monkeypatch.setattr(records, "daily_used", away)
    daily.link_up()
    assert await asyncio.wait_for(daily.spend(app, 3, 60), 60) == (True, 7)
