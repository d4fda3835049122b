"""While Redis is too slow for what clients sent, they are not read (cluster/README.md "Bounds")."""

import asyncio

import pytest
import websockets


@pytest.fixture
async def behind(own_redis, bench_on, monkeypatch):
    """A worker and its client; Redis is paused with more commands unanswered than allowed."""
    bench = await bench_on(own_redis)
    worker = await bench.start(activity_timeout_s=1, pong_timeout_s=1)
    client = await bench.client(worker)
    own_redis.pause()
    # Not before: on a busy machine, more than ten commands of the start may be unanswered.
    monkeypatch.setattr("redpoll.cluster.redis.connection._MAX_UNANSWERED", 10)
    for n in range(30):
        await client.ask(f"c{n}")
    await bench.settled(worker, lambda: worker.backpressure.on)
    yield bench, worker, client
    own_redis.resume()


async def test_no_client_is_read_until_redis_has_caught_up(behind, own_redis):
    _, worker, client = behind
    await client.send("pusher:ping")
    with pytest.raises(TimeoutError):
        await client.next(0.6)
    own_redis.resume()
    await client.until("pusher:pong")
    assert not worker.backpressure.on
    # A check may come between the answers to the first subscribes and the next ones' calls, so the pong may be earlier.
    while sum(frame["event"] == "pusher_internal:subscription_succeeded" for frame in client.seen) < 30:
        await client.next()
    # On a busy machine Redis may fall behind again, when all clients go on at once.
    assert worker.backpressure.times_on >= 1


async def test_new_clients_are_refused(behind, own_redis):
    bench, worker, _ = behind
    with pytest.raises(websockets.InvalidStatus) as refused:
        await bench.open(worker)
    assert refused.value.response.status_code == 503
    own_redis.resume()
    await bench.settled(worker, lambda: not worker.backpressure.on)
    await (await bench.client(worker)).nothing_more()


async def test_time_in_which_clients_are_not_read_does_not_count_as_idle(behind, own_redis):
    bench, worker, client = behind
    tick = worker.janitor.tick
    # Longer than the two timeouts together.
    await bench.settled(worker, lambda: worker.janitor.tick > tick + 10)
    own_redis.resume()
    await client.send("pusher:ping")
    await client.until("pusher:pong")


async def test_closing_handshakes_are_read_nevertheless(behind):
    bench, worker, client = behind
    worker.hub.close_socket("1", client.socket_id)
    assert await client.closed_with() == 4009
    await bench.settled(worker, lambda: worker.gate.connections == 0)


async def test_clients_are_read_again_when_the_redis_connection_is_lost(behind, own_redis):
    bench, worker, client = behind
    own_redis.resume()
    own_redis.kill()
    await bench.settled(worker, lambda: not worker.backpressure.on)
    await client.send("pusher:ping")
    await client.until("pusher:pong")
    own_redis.start()
    async with asyncio.timeout(60):
        while sum(frame["event"] == "pusher_internal:subscription_succeeded" for frame in client.seen) < 30:
            await client.next()
