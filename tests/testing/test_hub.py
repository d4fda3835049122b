"""What the random history of test_truth.py leaves out: counts, watchlists, limits and times."""

import json

import pytest

from helpers.wire import Api, Socket, digest
from redpoll.testing import FakeServer

COUNT = "pusher_internal:subscription_count"
WATCH = "pusher_internal:watchlist_events"


async def sign_in(server, user, watchlist=()):
    client = await Socket.connect(server)
    data = json.dumps({"id": user, "watchlist": list(watchlist)})
    auth = f"{server.app_key}:{digest(server.app_secret, f'{client.socket_id}::user::{data}')}"
    client.send({"event": "pusher:signin", "data": {"auth": auth, "user_data": data}})
    await client.next("pusher:signin_success")
    return client


def states(frame):
    return {group["name"]: group["user_ids"] for group in json.loads(frame["data"])["events"]}


async def test_counts_are_announced_at_most_every_250_ms():
    with FakeServer(subscription_count=True) as server:
        clients = [await Socket.connect(server) for _ in range(3)]
        for client in clients:
            await client.subscribe("news")
        # Each has the count of its own subscribe; the first one heard of no other yet, or of all.
        server.clock.advance(0.25)
        await clients[0].settle()
        seen = [json.loads(frame["data"])["subscription_count"] for frame in clients[0].all(COUNT)]
        assert (seen[0], seen[-1]) == (1, 3)
        await clients[2].settle()
        assert json.loads(clients[2].all(COUNT)[0]["data"]) == {"subscription_count": 3}


async def test_watchers_hear_of_a_user_at_once_and_of_the_leave_3_s_later(still_time):
    with FakeServer(watchlist=True) as server:
        watcher = await sign_in(server, "1", ["2", "3"])
        assert states(await watcher.next(WATCH)) == {"offline": ["2", "3"]}
        watched = await sign_in(server, "2")
        assert states(await watcher.next(WATCH)) == {"online": ["2"]}
        await watched.close()
        again = await sign_in(server, "2")
        server.clock.advance(3)
        await watcher.settle()
        assert len(watcher.all(WATCH)) == 2
        await again.close()
        await watcher.settle()
        server.clock.advance(3)
        assert states(await watcher.next(WATCH)) == {"offline": ["2"]}


async def test_a_cached_event_comes_before_the_count_and_after_a_gap():
    with FakeServer(subscription_count=True) as server:
        server.keep_history("cache-", keep=2)
        client = await Socket.connect(server, query="protocol=7&recover=1")
        since = json.loads((await client.subscribe("cache-a"))["data"])
        async with Api(server) as api:
            for n in range(5):
                await api.publish("cache-a", "n", str(n))
        for asked in ({}, {"since": {"epoch": since["epoch"], "offset": since["offset"]}}):
            late = await Socket.connect(server, query="protocol=7&recover=1")
            late.send({"event": "pusher:subscribe", "data": {"channel": "cache-a", **asked}})
            await late.next(COUNT)
            names = [frame["event"] for frame in late.frames if frame.get("channel") == "cache-a"]
            # Another count may follow, of the subscription before.
            assert names[:2] == ["pusher_internal:subscription_succeeded", "n"]
            assert set(names[2:]) == {COUNT}


async def test_a_cached_event_with_the_name_of_a_client_event_comes_once():
    with FakeServer() as server:
        server.keep_history("cache-", keep=3, replay=3)
        async with Api(server) as api:
            for n in range(2):
                await api.publish("cache-a", "client-n", str(n))
        client = await Socket.connect(server)
        await client.subscribe("cache-a")
        await client.settle()
        assert [frame["data"] for frame in client.all("client-n")] == ["0", "1"]


async def test_a_rule_that_is_added_gives_open_subscriptions_a_position():
    with FakeServer() as server:
        client = await Socket.connect(server, query="protocol=7&recover=1")
        await client.subscribe("news")
        server.keep_history("news")
        position = json.loads((await client.next("pusher:position"))["data"])
        async with Api(server) as api:
            await api.publish("news", "n", "1")
        assert (await client.next("n"))["offset"] > position["offset"]


async def test_limits_of_the_app_are_kept():
    with FakeServer(max_presence_members=1, max_occupied_channels=3, max_connections=2) as server:
        first, second = await Socket.connect(server), await Socket.connect(server)
        third = await Socket.connect(server, established=False)
        assert await third.until_closed() == 4004
        await first.subscribe("presence-a", "1")
        second.send(second.subscribe_request("presence-a", "2"))
        assert json.loads((await second.next("pusher:subscription_error"))["data"])["status"] == 413
        await second.subscribe("presence-a", "1")
        # Public channels are refused from half of the limit on.
        await first.subscribe("news")
        first.send(first.subscribe_request("more"))
        assert (await first.next("pusher:subscription_error"))["channel"] == "more"
        await first.subscribe("private-more")


async def test_a_cached_event_is_forgotten_in_its_time(server, api):
    await api.publish("cache-a", "e", "1")
    assert (await api.get("/channels/cache-a", info="cache"))["cache"]["data"] == "1"
    client = await Socket.connect(server)
    await client.subscribe("cache-a")
    assert (await client.next("e"))["data"] == "1"
    server.clock.advance(server.app.cache_ttl_s)
    late = await Socket.connect(server)
    await late.subscribe("cache-a")
    await late.next("pusher:cache_miss", "cache-a")


async def test_channels_with_a_cached_event_are_limited():
    with FakeServer(max_cached_channels=1) as server:
        async with Api(server) as api:
            for channel, data in (("cache-a", "1"), ("cache-b", "2"), ("cache-a", "3")):
                await api.publish(channel, "e", data)
            assert (await api.get("/channels/cache-a", info="cache"))["cache"]["data"] == "3"
            assert (await api.get("/channels/cache-b", info="cache"))["cache"] is None
            server.clock.advance(server.app.cache_ttl_s)
            await api.publish("cache-b", "e", "4")
            assert (await api.get("/channels/cache-b", info="cache"))["cache"]["data"] == "4"


async def test_connections_that_do_not_sign_in_are_closed():
    with FakeServer(user_authentication_timeout_s=10) as server:
        late, in_time = await Socket.connect(server), await Socket.connect(server)
        await in_time.subscribe("private-a")
        server.clock.advance(10)
        assert (await late.until_closed(), "within 10 s" in late.close_reason) == (4009, True)
        await in_time.settle()


async def test_terminate_closes_the_users_connections(server, api):
    client, other = await sign_in(server, "1"), await sign_in(server, "2")
    assert await api.ask("POST", "/users/1/terminate_connections", {}) == (200, {})
    assert await client.until_closed() == 4009
    await other.settle()


async def test_settings_change_while_clients_are_connected(server):
    client = await Socket.connect(server)
    await client.subscribe("private-a")
    server.set(client_events=False)
    client.send({"event": "client-x", "channel": "private-a", "data": {}})
    assert (await client.next("pusher:error"))["data"]["code"] == 4301
    server.set(enabled=False)
    assert await client.until_closed() == 4003


@pytest.mark.parametrize("settings", [{"nothing": 1}, {"plan": "free"}, {"watchlist": "yes"}, {"user_resume_s": 60}])
def test_settings_that_the_fake_does_not_have_are_refused(settings):
    with pytest.raises(ValueError, match=next(iter(settings)) if "watchlist" not in settings else "bool"):
        FakeServer(**settings)


async def test_events_of_one_channel_keep_their_order_for_every_client(server):
    readers = [await Socket.connect(server) for _ in range(3)]
    for reader in readers:
        await reader.subscribe("private-a")
    async with Api(server) as api:
        for number in range(20):
            readers[0].send({"event": "client-n", "channel": "private-a", "data": f"c{number}"})
            await api.publish("private-a", "n", f"p{number}")
    # The sender first: what it sent is delivered then. Its rate limit refuses some.
    for reader in readers:
        await reader.settle()
    orders = [
        [frame["data"] for frame in reader.frames if frame["event"] in ("n", "client-n")] for reader in readers[1:]
    ]
    assert orders[0] == orders[1]
    assert len(orders[0]) >= 30
