import asyncio
import time

import pytest

from cluster.links import deafen
from helpers.bus_publishing import Outgoing, publish_all
from redpoll.cluster.bus import Bus, Unavailable
from redpoll.cluster.idempotency import Idempotency, Outcome

REQUEST = b"POST /apps/7/events\n{}"


@pytest.fixture
def idempotency(link, keys):
    return Idempotency(link, keys)


async def test_answered_request_gets_the_same_answer(idempotency):
    claim = await idempotency.claim("7", "id-1", REQUEST)
    assert (claim.outcome, claim.answer) == (Outcome.NEW, None)
    await idempotency.settle(claim, b'200 {"a": 1}')
    again = await idempotency.claim("7", "id-1", REQUEST)
    assert (again.outcome, again.answer) == (Outcome.ANSWERED, b'200 {"a": 1}')


async def test_empty_answer_is_an_answer(idempotency):
    await idempotency.settle(await idempotency.claim("7", "id-1", REQUEST), b"")
    assert (await idempotency.claim("7", "id-1", REQUEST)).outcome is Outcome.ANSWERED


async def test_request_without_an_answer_is_completed(idempotency):
    first = await idempotency.claim("7", "id-1", REQUEST)
    again = await idempotency.claim("7", "id-1", REQUEST)
    assert (again.outcome, again.once) == (Outcome.AGAIN, first.once)


async def test_same_id_with_another_request_is_a_conflict(idempotency):
    claim = await idempotency.claim("7", "id-1", REQUEST)
    assert (await idempotency.claim("7", "id-1", b"other")).outcome is Outcome.CONFLICT
    await idempotency.settle(claim, b"200")
    assert (await idempotency.claim("7", "id-1", b"other")).outcome is Outcome.CONFLICT


async def test_ids_of_two_apps_are_independent(idempotency):
    await idempotency.claim("7", "id-1", REQUEST)
    assert (await idempotency.claim("8", "id-1", REQUEST)).outcome is Outcome.NEW
    assert (await idempotency.claim("7", "id-2", REQUEST)).outcome is Outcome.NEW


async def test_withdrawing_a_repetition_leaves_the_first_claim(idempotency):
    first = await idempotency.claim("7", "id-1", REQUEST)
    again = await idempotency.claim("7", "id-1", REQUEST)
    await idempotency.withdraw(again)
    assert (await idempotency.claim("7", "id-1", REQUEST)).outcome is Outcome.AGAIN
    await idempotency.withdraw(first)
    assert (await idempotency.claim("7", "id-1", b"other")).outcome is Outcome.NEW


async def test_claims_and_answers_are_known_for_two_minutes(idempotency, link):
    async def is_known_for_two_minutes() -> bool:
        kept_s = await link.ask(b"TTL", claim.key)
        return 119 - (time.monotonic() - began) < kept_s <= 120

    began = time.monotonic()
    claim = await idempotency.claim("7", "id-1", REQUEST)
    assert await is_known_for_two_minutes()
    await link.ask(b"EXPIRE", claim.key, 5)
    began = time.monotonic()
    await idempotency.settle(claim, b"200")
    assert await is_known_for_two_minutes()


async def test_repeated_request_publishes_once(idempotency, link, keys, make_app, start_worker, wait_until):
    worker = await start_worker(1)
    socket = worker.join("news")
    cached = worker.join("cache-news")
    await wait_until(lambda: socket.state == cached.state == "attached")
    bus, app = Bus(link, keys), make_app()
    items = [Outgoing("news", "e", "1"), Outgoing("cache-news", "e", "2"), Outgoing("news", "e", "3")]
    deafen(link)
    claiming = asyncio.ensure_future(idempotency.claim("7", "id-1", REQUEST))
    await asyncio.sleep(0)
    link.flush()
    link.drop("for the test")
    with pytest.raises(Unavailable):
        await claiming
    await link.wait_up()
    claim = await idempotency.claim("7", "id-1", REQUEST)
    deafen(link)
    publishing = asyncio.ensure_future(publish_all(bus, app, items[:2], once=claim.once))
    await wait_until(lambda: len(cached.events) == 1)
    link.drop("for the test")
    with pytest.raises(Unavailable):
        await publishing
    for _ in range(3):
        again = await idempotency.claim("7", "id-1", REQUEST)
        assert (again.outcome, again.once) == (Outcome.AGAIN, claim.once)
        assert await publish_all(bus, app, items, once=again.once) == [1, 1, 1]
    await wait_until(lambda: len(socket.events) == 2)
    assert [event[-1:] for event in socket.events + cached.events] == [b"1", b"3", b"2"]
    # A repetition that is claimed at the last moment finds what was published.
    assert await link.ask(b"TTL", keys.published("7", "news", claim.once, 0)) > await link.ask(b"TTL", claim.key)


async def test_claim_that_redis_does_not_confirm_is_unavailable(link, keys, redis):
    idempotency = Idempotency(link, keys, confirm_s=0.1)
    redis.pause()
    try:
        with pytest.raises(Unavailable):
            await idempotency.claim("7", "id-1", REQUEST)
    finally:
        redis.resume()
