"""Redis is behind with what clients asked for: they are not read until it has caught up (cluster.md 9)."""

import asyncio

import pytest
import websockets


@pytest.fixture
async def behind(own_redis, bench_on, monkeypatch):
    """A worker and its client; Redis stands still with more commands unanswered than it may have."""
    monkeypatch.setattr("redpoll.cluster.link._MAX_UNANSWERED", 20)
    bench = await bench_on(own_redis)
    worker = await bench.start(activity_timeout_s=1, pong_timeout_s=1)
    client = await bench.client(worker)
    own_redis.pause()
    for n in range(30):
        await client.ask(f"c{n}")
    await bench.settled(worker, lambda: worker.backpressure.on)
    yield bench, worker, client
    own_redis.resume()


async def test_nobody_is_read_until_redis_has_caught_up(behind, own_redis):
    _, worker, client = behind
    await client.send("pusher:ping")
    with pytest.raises(TimeoutError):
        await client.next(0.6)
    own_redis.resume()
    await client.until("pusher:pong")
    assert sum(frame["event"] == "pusher_internal:subscription_succeeded" for frame in client.seen) == 30
    assert not worker.backpressure.on
    assert worker.backpressure.times_on == 1


async def test_new_clients_are_told_to_come_later(behind, own_redis):
    bench, worker, _ = behind
    with pytest.raises(websockets.InvalidStatus) as refused:
        await bench.open(worker)
    assert refused.value.response.status_code == 503
    own_redis.resume()
    await bench.settled(worker, lambda: not worker.backpressure.on)
    await (await bench.client(worker)).nothing_more()


async def test_time_in_which_we_did_not_listen_is_nobodys_silence(behind, own_redis):
    bench, worker, client = behind
    tick = worker.janitor._tick
    # Longer than the two timeouts together.
    await bench.settled(worker, lambda: worker.janitor._tick > tick + 10)
    own_redis.resume()
    await client.send("pusher:ping")
    await client.until("pusher:pong")


async def test_a_close_is_answered_and_read_all_the_same(behind):
    bench, worker, client = behind
    worker.hub.close_socket("1", client.socket_id)
    assert await client.closed_with() == 4009
    await bench.settled(worker, lambda: worker.gate.connections == 0)


async def test_a_redis_that_went_away_altogether_does_not_keep_them_unread(behind, own_redis):
    bench, worker, client = behind
    own_redis.resume()
    own_redis.kill()
    await bench.settled(worker, lambda: not worker.backpressure.on)
    await client.send("pusher:ping")
    await client.until("pusher:pong")
    own_redis.start()
    async with asyncio.timeout(10):
        while sum(frame["event"] == "pusher_internal:subscription_succeeded" for frame in client.seen) < 30:
            await client.next()
