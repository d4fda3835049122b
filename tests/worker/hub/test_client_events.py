"""Client events, on one worker and on two, within the app's daily limit and while Redis is away."""

import json

from redpoll.cluster.quota import Quota
from redpoll.cluster.redis.keys import Keys
from redpoll.protocol.apps import DAILY_LIMITS


async def test_others_get_it_and_the_sender_does_not(bench):
    one, other = await bench.start(), await bench.start()
    sender, near, far = await bench.client(one), await bench.client(one), await bench.client(other)
    for client in (sender, near, far):
        await client.subscribe("private-room")
    await sender.send("client-typing", {"on": True}, channel="private-room")
    for client in (near, far):
        frame = await client.until("client-typing")
        assert frame["channel"] == "private-room"
        assert json.loads(frame["data"]) == {"on": True}
        assert "user_id" not in frame
    await sender.nothing_more()


async def test_on_presence_channels_it_carries_the_signed_user_and_no_other(bench):
    worker = await bench.start()
    sender, listener = await bench.client(worker), await bench.client(worker)
    await sender.subscribe("presence-room", {"user_id": "real"})
    await listener.subscribe("presence-room", {"user_id": "l"})
    await sender.send("client-x", "text", channel="presence-room", user_id="forged")
    frame = await listener.until("client-x")
    assert frame["user_id"] == "real"
    assert frame["data"] == "text"


async def test_while_redis_is_away_it_is_refused_with_4301(own_redis, bench_on):
    bench = await bench_on(own_redis)
    worker = await bench.start()
    sender = await bench.client(worker)
    await sender.subscribe("private-room")
    own_redis.kill()
    await bench.settled(worker, lambda: not worker.link.up)
    await sender.send("client-x", "1", channel="private-room")
    error = await sender.until("pusher:error")
    assert error["data"]["code"] == 4301
    own_redis.start()
    await bench.settled(worker, lambda: worker.link.up)


async def test_client_events_beyond_the_limit_are_4301_and_the_others_arrive(bench, monkeypatch):
    monkeypatch.setitem(DAILY_LIMITS, "free", 3)
    # All of it is on one day.
    monkeypatch.setitem(Quota.__init__.__kwdefaults__, "wall_clock", lambda: 1_700_000_000.0)
    worker = await bench.start(client_events_per_second=100)
    await bench.change(plan="free")
    sender, listener = await bench.client(worker), await bench.client(worker)
    for client in (sender, listener):
        await client.subscribe("private-room")
    for n in range(5):
        await sender.send("client-x", f"{n}", channel="private-room")
    assert [(await listener.next())["data"] for _ in range(3)] == ["0", "1", "2"]
    error = await sender.until("pusher:error")
    assert error["data"]["code"] == 4301
    assert "daily limit" in error["data"]["message"]
    await listener.nothing_more()
    assert await Quota(worker.link, Keys()).used("1") == 3
