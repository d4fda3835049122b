import asyncio
import time

import pytest

from redpoll.cluster.bus import Unavailable
from redpoll.cluster.quota import Quota, Spent
from redpoll.cluster.redis.link import Link, LinkDown

MIDNIGHT = 1_700_006_400.0  # 2023-11-15, 00:00 UTC


def quota_at_noon(link, keys, **times) -> Quota:
    """A quota whose day doesn't end during the test."""
    return Quota(link, keys, wall_clock=lambda: MIDNIGHT + 43_200, **times)


async def test_messages_are_counted_up_to_the_limit_and_no_further(link, keys):
    quota = quota_at_noon(link, keys)
    assert await quota.spend("7", 3, 5) == Spent(True, 3)
    assert await quota.spend("7", 3, 5) == Spent(False, 3)
    assert await quota.spend("7", 2, 5) == Spent(True, 5)
    assert await quota.spend("7", 1, 5) == Spent(False, 5)
    assert await quota.used("7") == 5
    assert await quota.used("8") == 0


async def test_limit_is_exact_under_concurrent_calls(redis, keys, link):
    links = [Link(redis.url) for _ in range(8)]
    for link in links:
        link.start()
        await link.wait_up()
    asked = [quota_at_noon(link, keys).spend("7", 1, 1000) for link in links for _ in range(300)]
    answers = await asyncio.gather(*asked)
    assert sum(answer.ok for answer in answers) == 1000
    assert await quota_at_noon(link, keys).used("7") == 1000
    for link in links:
        await link.close()


async def test_day_ends_at_midnight_utc_and_its_count_is_kept_for_three_days(link, keys):
    now = MIDNIGHT - 1
    quota = Quota(link, keys, wall_clock=lambda: now)
    assert quota.today() == "20231114"
    await quota.spend("7", 5, 5)
    now = MIDNIGHT
    assert quota.today() == "20231115"
    assert await quota.spend("7", 1, 5) == Spent(True, 1)
    assert await quota.used("7", "20231114") == 5
    kept_s = await link.ask(b"TTL", keys.spent("7", "20231114"))
    assert 3 * 86_400 - 60 < kept_s <= 3 * 86_400


async def test_restored_count_is_the_greater(link, keys):
    quota = quota_at_noon(link, keys)
    await quota.spend("7", 10, 100)
    assert await quota.restore("7", quota.today(), 4) == 10
    assert await quota.restore("7", quota.today(), 40) == 40
    assert await quota.spend("7", 60, 100) == Spent(True, 100)
    assert await quota.spend("7", 1, 100) == Spent(False, 100)


async def test_messages_of_a_request_that_is_repeated_are_counted_once(link, keys):
    quota, began = quota_at_noon(link, keys), time.monotonic()
    for _ in range(2):
        assert await quota.spend("7", 2, 3, "abcd") == Spent(True, 2)
    assert await quota.spend("7", 2, 3, "ef01") == Spent(False, 2)
    assert await quota.spend("7", 1, 3, "ef01") == Spent(True, 3)
    assert await quota.spend("7", 2, 3, "abcd") == Spent(True, 3)
    assert await quota.spend("8", 2, 3, "abcd") == Spent(True, 2)
    kept_s = await link.ask(b"TTL", keys.counted("7", "abcd"))
    assert 129 - (time.monotonic() - began) < kept_s <= 130


async def test_callers_that_do_not_wait_are_answered_in_their_order(link, keys, wait_until):
    outcomes = []
    for _ in range(3):
        quota_at_noon(link, keys).spend_then("7", 1, 2, outcomes.append)
    await wait_until(lambda: len(outcomes) == 3)
    assert outcomes == [Spent(True, 1), Spent(True, 2), Spent(False, 2)]


async def test_nothing_is_spent_while_redis_is_away(keys, wait_until):
    quota = Quota(Link("unix:///nowhere/redis.sock"), keys, confirm_s=0.05)
    with pytest.raises(Unavailable):
        await quota.spend("7", 1, 5)
    outcomes = []
    quota.spend_then("7", 1, 5, outcomes.append)
    await wait_until(lambda: outcomes)
    assert isinstance(outcomes[0], LinkDown)


async def test_spending_at_a_redis_that_hangs_is_given_up(link, keys, redis):
    quota = quota_at_noon(link, keys, confirm_s=0.1)
    redis.pause()
    try:
        with pytest.raises(Unavailable, match="within"):
            await quota.spend("7", 1, 5)
    finally:
        redis.resume()
    # It is counted nevertheless: never too few.
    assert await quota_at_noon(link, keys).used("7") == 1
