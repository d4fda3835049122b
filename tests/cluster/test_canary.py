"""Messages that a worker sends to itself: what counts as missing, and what follows."""

import asyncio

import pytest

from helpers.proxy import Proxy
from redpoll.cluster.canary import Canary
from redpoll.cluster.redis.keys import Keys
from redpoll.cluster.redis.link import Link

EVERY_S = 0.05


@pytest.fixture
async def proxied(redis):
    """A canary on a link through a proxy that can leave out messages; `changes` are the values of `broken`."""
    with Proxy(redis.path, splits_replies=True) as proxy:
        link = Link(proxy.url, first_delay_s=0.01, max_delay_s=0.05)
        changes: list[bool] = []
        canary = Canary(link, Keys("rp"), "0123456789ab", 1, EVERY_S, changes.append)
        link.on_up = canary.connected
        link.on_down = lambda reason: canary.connection_lost()
        link.on_push = canary.push
        link.start()
        yield proxy, link, canary, changes
        canary.close()
        await link.close()


async def test_lag_is_measured_and_nothing_is_missing(proxied, wait_until):
    _, link, canary, _ = proxied
    await wait_until(lambda: canary.sent >= 4)
    assert 0 < canary.lag_s < 60
    assert (canary.missed, canary.broken, link.reconnects) == (0, False, 0)


async def test_connection_without_messages_is_replaced_and_reported_until_one_arrives(proxied, wait_until):
    proxy, link, canary, changes = proxied
    await wait_until(lambda: canary.lag_s)
    proxy.swallow_messages()
    await wait_until(lambda: link.reconnects >= 2)
    assert (changes, canary.broken) == ([True], True)
    assert canary.missed >= 6
    proxy.deliver_messages()
    await wait_until(lambda: not canary.broken)
    assert changes == [True, False]
    reconnects = link.reconnects
    number = canary.sent
    await wait_until(lambda: canary.sent >= number + 4)
    assert link.reconnects == reconnects


@pytest.fixture
async def direct(own_redis):
    """A canary without a proxy, on a Redis of its own."""
    link = Link(own_redis.url, first_delay_s=0.01, max_delay_s=0.05)
    canary = Canary(link, Keys("rp"), "0123456789ab", 1, EVERY_S)
    link.on_up = canary.connected
    link.on_push = canary.push
    link.start()
    yield own_redis, link, canary
    canary.close()
    await link.close()


async def test_redis_that_is_slow_loses_no_canary(direct, wait_until):
    redis, link, canary = direct
    await wait_until(lambda: canary.lag_s)
    redis.pause()
    await asyncio.sleep(10 * EVERY_S)  # more than three intervals, not a wait
    redis.resume()
    number = canary.sent
    await wait_until(lambda: canary.sent > number)
    assert (canary.missed, link.reconnects) == (0, 0)


async def test_canaries_go_on_after_one_that_redis_refused(direct, wait_until):
    """Such as with -BUSY, while a script of another program runs: nothing was published, so nothing is missing."""
    redis, link, canary = direct
    await wait_until(lambda: canary.lag_s)
    await link.ask(b"CONFIG", b"SET", b"busy-reply-threshold", b"1")
    other = Link(redis.url)
    other.start()
    await other.wait_up()
    other.call(b"EVAL", b"repeat until redis.call('GET', KEYS[1])", 1, b"never")
    await wait_until(lambda: link.errors)
    await link.ask(b"SCRIPT", b"KILL")
    number = canary.sent
    await wait_until(lambda: canary.sent >= number + 4)
    assert (canary.missed, canary.broken, link.reconnects) == (0, False, 0)
    await other.close()
