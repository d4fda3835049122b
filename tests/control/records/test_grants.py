"""Revocations of grants in a control plane: in memory, in Redis and in the record store."""

import asyncio
import contextlib
import time
from types import SimpleNamespace

import pytest

from redpoll.cluster.bus import Unavailable
from redpoll.cluster.questions import GrantRevoked
from redpoll.cluster.redis.keys import Keys
from redpoll.cluster.redis.link import Link
from redpoll.cluster.survey import Survey
from redpoll.control.records import grants as grants_module
from redpoll.control.records.grants import Grants
from redpoll.loop.turns import TooManyWaiting
from redpoll.protocol.apps import App
from redpoll.protocol.errors import ApiError
from redpoll.store import apps as app_rows
from redpoll.store import audit, revoked_grants
from redpoll.store.audit import COMMAND_LINE
from redpoll.store.store import Store, database_url

NOW_S = int(time.time())


@pytest.fixture
async def store(tmp_path):
    opened = await Store.open(database_url(tmp_path))
    async with opened.change() as connection:
        await app_rows.add(connection, App(id="1", name="x", keys=()))
    yield opened
    await opened.close()


@pytest.fixture
async def make(store, redis):
    """`await make()`: one control plane's grants, of a node of its own. `more` are arguments of Grants."""
    async with contextlib.AsyncExitStack() as stack:

        async def make_one(linked: bool = True, **more) -> Grants:
            link = Link(redis.url)
            keys = Keys()
            grants = Grants(store, link, keys, more.pop("survey", Survey(link, keys)), lambda: float(NOW_S), **more)
            await grants.load()
            if linked:
                link.start(on_up=grants.link_up)
                await link.wait_up()
            grants.start()
            stack.push_async_callback(link.close)
            stack.push_async_callback(grants.finish)
            return grants

        yield make_one


async def stored(store: Store) -> list[tuple[str, str, int]]:
    async with store.reading() as connection:
        return sorted(await revoked_grants.everything(connection))


async def until_stored(store: Store, expected: list[tuple[str, str, int]]) -> None:
    async with asyncio.timeout(60):
        while await stored(store) != expected:
            await asyncio.sleep(0.01)


async def test_a_revocation_is_in_redis_at_once_and_in_the_store_soon(make, store, redis):
    grants = await make()
    assert await grants.revoke("1", "jti a", COMMAND_LINE) == (NOW_S, 0)
    assert redis.call("XLEN", Keys().revoked_grants) == 1
    await until_stored(store, [("1", "jti a", NOW_S)])
    # Idempotent, and written once.
    assert await grants.revoke("1", "jti a") == (NOW_S, 0)
    async with store.reading() as connection:
        found = await audit.find(connection, limit=10)
    assert [(entry.action, entry.target) for entry in found] == [("grant revoke", "jti a")]
    # The next process has it.
    assert list((await make()).table) == [("1", "jti a", NOW_S)]


async def test_a_store_that_is_away_gets_it_later(make, store, monkeypatch):
    grants = await make(retry_s=0.01)
    add, fails = revoked_grants.add, [True]

    async def failing(connection, revoked):
        if fails:
            raise grants_module.SQLAlchemyError("away")
        await add(connection, revoked)

    monkeypatch.setattr(revoked_grants, "add", failing)
    assert await grants.revoke("1", "sub b") == (NOW_S, 0)
    assert await stored(store) == []
    fails.clear()
    await until_stored(store, [("1", "sub b", NOW_S)])


async def test_an_empty_redis_is_filled_from_the_store_and_from_memory(make, store, redis):
    async with store.change() as connection:
        await revoked_grants.add(connection, [("1", "jti stored", NOW_S - 1)])
    grants = await make()
    grants.heard(GrantRevoked("1", "jti heard", NOW_S))
    await until_stored(store, [("1", "jti heard", NOW_S), ("1", "jti stored", NOW_S - 1)])
    redis.call("DEL", Keys().revoked_grants)
    grants.link_up()
    await grants.fill()
    entries = redis.call("XRANGE", Keys().revoked_grants, "-", "+")
    fields = b" ".join(part for _, pairs in entries for part in pairs)
    assert b"1 jti stored" in fields
    assert b"1 jti heard" in fields


async def test_without_redis_it_is_not_confirmed_but_counts_once_redis_is_there(make, store):
    grants = await make(linked=False, written_within_s=0.01)
    with pytest.raises(Unavailable):
        await grants.revoke("1", "jti a")
    await until_stored(store, [("1", "jti a", NOW_S)])


async def test_an_app_has_a_bounded_number_of_revocations(make, monkeypatch):
    monkeypatch.setattr(grants_module, "MAX_REVOKED", 2)
    grants = await make()
    await grants.revoke("1", "jti a")
    await grants.revoke("1", "jti b")
    await grants.revoke("1", "jti b")
    with pytest.raises(ApiError, match="disable that one") as refused:
        await grants.revoke("1", "jti c")
    assert refused.value.status == 429


async def test_an_unsubscribed_user_needs_a_new_grant_where_grants_are_accepted(make):
    grants = await make()
    assert await grants.unsubscribe("1", "private-a", "7", "", granted=False) == 0
    assert list(grants.table) == []
    assert await grants.unsubscribe("1", "private-a", "7", "", granted=True) == 0
    assert list(grants.table) == [("1", "channel private-a sub 7", NOW_S)]


async def test_a_question_waits_for_others_for_a_bounded_time(make):
    never, asked = asyncio.Event(), asyncio.Event()

    async def silent(question):
        asked.set()
        await never.wait()

    grants = await make(survey=SimpleNamespace(ask=silent), asked_within_s=0.01)
    first = asyncio.create_task(grants.revoke("1", "jti a"))
    await asked.wait()
    with pytest.raises(Unavailable, match="other requests"):
        await grants.revoke("1", "jti b")
    # It is in Redis, where every worker finds it.
    assert ("1", "jti b", NOW_S) in list(grants.table)
    first.cancel()


async def test_requests_of_one_app_keep_no_other_app_waiting_for_all_of_them(make):
    answered, asked = asyncio.Semaphore(0), []

    async def ask(question):
        asked.append(question.app)
        await answered.acquire()
        return {}

    grants = await make(survey=SimpleNamespace(ask=ask), asked_within_s=600.0)

    def unsubscribe(app_id):
        return asyncio.create_task(grants.unsubscribe(app_id, "private-a", "", "1.2", granted=False))

    waiting = [unsubscribe("1") for _ in range(1_000)]
    for _ in range(10):
        await asyncio.sleep(0)
    other = unsubscribe("2")
    for _ in range(len(waiting) + 1):
        answered.release()
    assert await other == 0
    assert asked[:2] == ["1", "2"]
    outcomes = await asyncio.gather(*waiting, return_exceptions=True)
    # Its own ones are answered in their order, and those beyond the bound are refused at once.
    assert (outcomes[:257], len(asked)) == ([0] * 257, 258)
    assert {type(outcome) for outcome in outcomes[257:]} == {TooManyWaiting}


async def test_repeated_revocations_do_not_lengthen_the_stream_for_ever(make, redis, monkeypatch):
    monkeypatch.setattr("redpoll.cluster.revoked_grants._MAX_SPARE_ENTRIES", 5)
    grants = await make()
    for _ in range(20):
        await grants.revoke("1", "jti a")
    async with asyncio.timeout(60):
        while redis.call("XLEN", Keys().revoked_grants) > 6:
            await asyncio.sleep(0.01)


async def test_connection_that_comes_up_while_redis_is_filled_fills_it_again(make, monkeypatch, wait_until):
    grants = await make()
    begun, go_on = [], asyncio.Event()

    async def fill():
        begun.append(1)
        await go_on.wait()

    monkeypatch.setattr(grants._redis, "fill", fill)
    grants.link_up()
    await wait_until(lambda: len(begun) == 1)
    grants.link_up()
    go_on.set()
    await wait_until(lambda: len(begun) == 2)
