"""Channels, members, client events and counts, on one worker and on two."""

import asyncio
import json
import time

import msgspec
import pytest
import websockets

from cluster.links import deafen, hear, note_holds
from helpers.bus_publishing import publish_all
from redpoll.cluster.membership.join_queue import MAX_IN_TURN
from redpoll.cluster.membership.timings import Timings
from redpoll.cluster.redis.keys import Keys
from redpoll.protocol.apps import HistoryRule, Key
from redpoll.worker.statistics import Statistics

SUCCEEDED = "pusher_internal:subscription_succeeded"
ADDED = "pusher_internal:member_added"
REMOVED = "pusher_internal:member_removed"


def data_of(frame: dict) -> dict:
    return json.loads(frame["data"])


class TestChannels:
    async def test_only_subscribers_get_what_is_published(self, bench):
        worker = await bench.start()
        inside, outside = await bench.client(worker), await bench.client(worker)
        success = await inside.subscribe("news")
        assert success == {"event": SUCCEEDED, "channel": "news", "data": "{}"}
        await bench.publish("news", "headline", '{"n":1}')
        frame = await inside.next()
        assert frame == {"event": "headline", "channel": "news", "data": '{"n":1}'}
        await outside.nothing_more()

    async def test_only_ids_that_a_connection_can_have_close_one(self, bench):
        worker = await bench.start()
        client = await bench.client(worker)
        for id_ in ("9" * 5_000 + ".1", f"{1 << 64}.1", "1", "x.1", "1.2.3"):
            assert worker.hub.close_socket("1", id_) == 0
        assert worker.hub.close_socket("1", client.socket_id) == 1

    async def test_data_is_passed_on_byte_for_byte(self, bench):
        worker = await bench.start()
        client = await bench.client(worker)
        await client.subscribe("news")
        data = 'not JSON " \\ \u0000 \u001f \u2028 é 🎈 {"a": 1.0e0}'
        await bench.publish("news", "App\\Events\\Shipped", data)
        frame = await client.next()
        assert frame["data"] == data
        assert frame["event"] == "App\\Events\\Shipped"

    async def test_the_excluded_socket_gets_nothing_even_on_another_worker(self, bench):
        one, other = await bench.start(), await bench.start()
        sender, listener = await bench.client(other), await bench.client(one)
        await sender.subscribe("news")
        await listener.subscribe("news")
        await bench.publish("news", "said", "1", skip=sender.socket_id)
        assert (await listener.next())["event"] == "said"
        await sender.nothing_more()

    async def test_after_unsubscribe_nothing_is_delivered(self, bench):
        worker = await bench.start()
        client, witness = await bench.client(worker), await bench.client(worker)
        await client.subscribe("news")
        await witness.subscribe("news")
        await client.send("pusher:unsubscribe", {"channel": "news"})
        await client.nothing_more()
        await bench.publish("news", "late", "1")
        await witness.until("late")
        await client.nothing_more()

    async def test_a_second_subscribe_is_acknowledged_again_and_events_still_come_once(self, bench):
        worker = await bench.start()
        client = await bench.client(worker)
        await client.subscribe("news")
        await client.subscribe("news")
        await bench.publish("news", "once", "1")
        await client.until("once")
        await client.nothing_more()

    async def test_subscribe_and_unsubscribe_at_once_leaves_nothing(self, bench):
        worker = await bench.start()
        client = await bench.client(worker)
        for _ in range(20):
            await client.ask("news")
            await client.send("pusher:unsubscribe", {"channel": "news"})
        await client.subscribe("other")
        await bench.settled(worker, lambda: worker.hub.registry.local_channel("1", "news") is None)
        await bench.settled(worker, lambda: not worker.hub.joins)
        await bench.publish("news", "ghost", "1")
        await client.nothing_more()

    async def test_events_of_one_call_arrive_in_order(self, bench):
        worker = await bench.start()
        client = await bench.client(worker)
        await client.subscribe("news")
        for start in range(0, 500, 10):
            await publish_all(bench.bus, bench.app, [("news", "n", str(n), None) for n in range(start, start + 10)])
        assert [int((await client.next())["data"]) for _ in range(500)] == list(range(500))

    async def test_a_closed_connection_is_removed_everywhere(self, bench):
        worker = await bench.start()
        client = await bench.client(worker)
        # More than a connection leaves at once.
        for n in range(150):
            await client.ask(f"c{n}")
        await client.ask("presence-p", {"user_id": "1"})
        for _ in range(151):
            await client.until(SUCCEEDED)
        client.socket.transport.abort()
        await bench.settled(worker, lambda: not len(worker.hub.open_connections))
        await bench.settled(worker, lambda: not worker.registry.channels)
        assert worker.gate.connections == 0


class TestSubscribesAtOnce:
    """A public channel that is held already admits subscribers before Redis knows of them."""

    async def test_subscriber_hears_events_while_redis_does_not_answer(self, bench):
        worker = await bench.start()
        first, second = await bench.client(worker), await bench.client(worker)
        await first.subscribe("news")
        deafen(worker.link)
        assert await second.subscribe("news") == {"event": SUCCEEDED, "channel": "news", "data": "{}"}
        assert not worker.hub.joins
        hear(worker.link)
        await bench.publish("news", "headline", "1")
        await second.until("headline")
        await first.until("headline")

    async def test_redis_gets_the_number_at_once_and_then_once_in_an_interval(self, bench):
        # The test ends the intervals.
        worker = await bench.start(timings=Timings(count_s=600))
        clients = [await bench.client(worker) for _ in range(20)]
        await clients[0].subscribe("news")
        calls = []
        note_holds(worker.registry, calls.append)

        async def in_redis():
            return [int(count) for count in await worker.link.ask(b"HVALS", Keys().counts("1", "news"))]

        async def until_in_redis(expected):
            async with asyncio.timeout(60):
                while await in_redis() != expected:
                    await asyncio.sleep(0.01)

        for client in clients[1:]:
            await client.subscribe("news")
        await until_in_redis([2])
        worker.registry.sync.counts.interval_over()
        await until_in_redis([20])
        assert calls == ["news"] * 2
        for client in clients[1:]:
            await client.send("pusher:unsubscribe", {"channel": "news"})
            await client.nothing_more()
        assert await in_redis() == [20]
        worker.registry.sync.counts.interval_over()
        await until_in_redis([1])
        assert calls == ["news"] * 3
        await clients[0].send("pusher:unsubscribe", {"channel": "news"})
        await bench.settled(worker, lambda: worker.registry.local_channel("1", "news") is None)
        assert await in_redis() == []

    @pytest.mark.parametrize(
        "settings",
        [
            {"subscription_count": True},
            {"hooks": "o"},
            {"history": (HistoryRule(id="0a0b0c", name="news", keep=5, seconds=60),)},
        ],
    )
    async def test_channel_for_which_redis_has_an_answer_waits_for_it(self, bench, settings):
        worker = await bench.start()
        first, second = await bench.client(worker), await bench.client(worker)
        await bench.change(**settings)
        await first.subscribe("news")
        deafen(worker.link)
        await second.ask("news")
        await second.nothing_more()
        hear(worker.link)
        await second.until(SUCCEEDED)

    @pytest.mark.parametrize("channel", ["cache-news", "presence-news"])
    async def test_channel_of_another_kind_waits_for_redis(self, bench, channel):
        worker = await bench.start()
        first, second = await bench.client(worker), await bench.client(worker)
        member = {"user_id": "1"} if channel.startswith("presence-") else None
        await first.subscribe(channel, member)
        deafen(worker.link)
        await second.ask(channel, member)
        await second.nothing_more()
        hear(worker.link)
        await second.until(SUCCEEDED)

    async def test_subscribe_waits_while_redis_is_away(self, own_redis, bench_on):
        bench = await bench_on(own_redis)
        worker = await bench.start()
        first, second = await bench.client(worker), await bench.client(worker)
        await first.subscribe("news")
        own_redis.kill()
        await bench.settled(worker, lambda: not worker.link.up)
        await second.ask("news")
        await second.nothing_more()
        own_redis.start()
        await second.until(SUCCEEDED)


class TestTurns:
    async def test_client_does_not_wait_for_the_many_subscribes_of_another(self, bench):
        worker = await bench.start()
        many, other = await bench.client(worker), await bench.client(worker)
        deafen(worker.link)
        for n in range(300):
            await many.ask(f"c{n}")
        await many.nothing_more()
        await other.ask("news")
        await other.nothing_more()
        # Redis has a few of the many, and the other's.
        await bench.settled(worker, lambda: worker.registry.sync.in_flight == MAX_IN_TURN + 1)
        hear(worker.link)
        await other.until(SUCCEEDED)
        assert [(await many.until(SUCCEEDED))["channel"] for _ in range(300)] == [f"c{n}" for n in range(300)]
        assert not worker.hub.joins

    async def test_client_that_left_leaves_none_of_its_subscribes(self, bench):
        worker = await bench.start()
        many = await bench.client(worker)
        deafen(worker.link)
        for n in range(100):
            await many.ask(f"c{n}")
        for n in range(0, 100, 3):
            await many.send("pusher:unsubscribe", {"channel": f"c{n}"})
        await many.nothing_more()
        many.socket.transport.abort()
        await bench.settled(worker, lambda: not len(worker.hub.open_connections))
        hear(worker.link)
        await bench.settled(worker, lambda: not worker.registry.channels)
        assert not worker.hub.joins
        assert not worker.hub.joins.withdrawn


class TestSubscribesOfAnAddress:
    """The limit of an address counts each subscribe, also of channels that the connection has already."""

    @staticmethod
    async def start(bench):
        worker = await bench.start(subscribes_per_second_per_address=1, trusted_proxies=("127.0.0.1",))
        headers = {"additional_headers": {"X-Forwarded-For": "8.8.8.8"}}
        return worker, [await bench.client(worker, **headers) for _ in range(2)]

    @staticmethod
    async def until_refused(client):
        error = await client.until("pusher:subscription_error")
        assert data_of(error) | {"error": ""} == {"type": "LimitReached", "error": "", "status": 429}

    async def test_repeated_subscribes_count(self, bench):
        worker, (client, _) = await self.start(bench)
        await client.subscribe("news")
        for _ in range(100):
            await client.ask("news")
        await self.until_refused(client)
        assert worker.hub.subscribe_rates.refused
        # The first subscription stays.
        await bench.publish("news", "headline", "1")
        await client.until("headline")

    async def test_those_repeated_while_pending_count_when_they_are_answered(self, bench):
        worker, (client, _) = await self.start(bench)
        deafen(worker.link)
        for _ in range(101):
            await client.ask("news")
        await client.nothing_more()
        hear(worker.link)
        await client.until(SUCCEEDED)
        await self.until_refused(client)
        await bench.publish("news", "headline", "1")
        await client.until("headline")

    async def test_those_repeated_while_pending_count_when_redis_refuses_the_channel(self, bench):
        worker, (first, second) = await self.start(bench)
        await bench.change(max_presence_members=1)
        await first.subscribe("presence-p", {"user_id": "1"})
        deafen(worker.link)
        for _ in range(101):
            await second.ask("presence-p", {"user_id": "2"})
        await second.nothing_more()
        hear(worker.link)
        assert data_of(await second.until("pusher:subscription_error"))["status"] == 413
        for number in range(30):
            await first.ask(f"c{number}")
        await self.until_refused(first)


class TestFaultsOfOurs:
    """An exception in what concerns one connection stops nothing that concerns others, and leaves no ghosts."""

    @pytest.fixture
    def faults(self, monkeypatch):
        """The exceptions that the worker's loop was told."""
        told = []
        monkeypatch.setattr(Statistics, "loop_exception", lambda _, loop, context: told.append(context["exception"]))
        return told

    @pytest.mark.parametrize("channel", ["private-news", "presence-news", "news"])
    async def test_join_that_fails_closes_its_connection_and_the_others_are_attached(self, bench, channel, faults):
        worker = await bench.start()
        clients = [await bench.client(worker) for _ in range(5)]
        unlucky = worker.hub.open_connections.find("1", *map(int, clients[2].socket_id.split(".")))

        def fail(name):
            raise ValueError("for the test")

        unlucky.session = Stubborn(unlucky.session, fail)
        for number, client in enumerate(clients):
            await client.ask(channel, {"user_id": str(number)} if channel.startswith("presence-") else None)
        for client in clients[:2] + clients[3:]:
            await client.until(SUCCEEDED)
        with pytest.raises(websockets.ConnectionClosed):
            await clients[2].until("never")
        await bench.settled(worker, lambda: worker.gate.connections == 4)
        await bench.settled(worker, lambda: worker.registry.local_channel("1", channel).attached == 4)
        assert [str(fault) for fault in faults] == ["for the test"]

    async def test_close_that_fails_for_one_channel_leaves_the_others(self, bench, faults):
        worker = await bench.start()
        client = await bench.client(worker)
        for channel in ("a", "b", "c"):
            await client.subscribe(channel)
        leave = worker.hub.registry.leave

        def fail(app_id, channel, user=None):
            leave(app_id, channel, user)
            if channel == "b":
                raise ValueError("for the test")

        worker.hub.registry.leave = fail
        client.socket.transport.abort()
        await bench.settled(worker, lambda: not worker.registry.channels)
        await bench.settled(worker, lambda: worker.gate.connections == 0)
        assert [str(fault) for fault in faults] == ["for the test"]

    async def test_member_frame_that_fails_does_not_keep_the_joiner_out(self, bench, faults):
        worker = await bench.start()
        first, second = await bench.client(worker), await bench.client(worker)
        await first.subscribe("presence-p", {"user_id": "1"})
        added = worker.hub.member_added

        def fail(*values):
            raise ValueError("for the test")

        worker.hub.member_added = fail
        await second.subscribe("presence-p", {"user_id": "2"})
        worker.hub.member_added = added
        assert [str(fault) for fault in faults] == ["for the test"]


class Stubborn:
    """A session that fails when its subscription is confirmed."""

    def __init__(self, session, joined):
        self._session = session
        self.joined = joined

    def __getattr__(self, name):
        return getattr(self._session, name)


class TestPresence:
    async def test_a_new_member_gets_all_members_and_the_others_get_the_new_one(self, bench):
        one, other = await bench.start(), await bench.start()
        first, second = await bench.client(one), await bench.client(other)
        success = await first.subscribe("presence-p", {"user_id": 10, "user_info": {"name": "A"}})
        assert data_of(success) == {"presence": {"count": 1, "ids": ["10"], "hash": {"10": {"name": "A"}}}}
        success = await second.subscribe("presence-p", {"user_id": "b"})
        presence = data_of(success)["presence"]
        assert presence["count"] == 2
        assert set(presence["ids"]) == {"10", "b"}
        assert presence["hash"] == {"10": {"name": "A"}, "b": {}}
        frame = await first.until(ADDED)
        assert frame["channel"] == "presence-p"
        assert data_of(frame) == {"user_id": "b", "user_info": {}}
        await second.nothing_more()

    async def test_second_tab_does_not_announce_member_again(self, bench):
        one, other = await bench.start(), await bench.start()
        watcher, tab, second_tab = await bench.client(one), await bench.client(one), await bench.client(other)
        await watcher.subscribe("presence-p", {"user_id": "w"})
        await tab.subscribe("presence-p", {"user_id": "u"})
        await watcher.until(ADDED)
        await second_tab.subscribe("presence-p", {"user_id": "u"})
        await tab.socket.close()
        await bench.settled(one, lambda: len(one.hub.open_connections) == 1)
        await watcher.nothing_more()
        await second_tab.socket.close()
        assert data_of(await watcher.until(REMOVED)) == {"user_id": "u"}
        await watcher.nothing_more()

    async def test_the_limit_counts_users_and_a_second_tab_still_enters(self, bench):
        worker = await bench.start()
        app = worker.directory.by_id["1"]
        await bench.put("1", msgspec.structs.replace(app, max_presence_members=2))
        await bench.settled(worker, lambda: worker.directory.by_id["1"].max_presence_members == 2)
        clients = [await bench.client(worker) for _ in range(4)]
        await clients[0].subscribe("presence-p", {"user_id": "a"})
        await clients[1].subscribe("presence-p", {"user_id": "b"})
        await clients[2].ask("presence-p", {"user_id": "c"})
        error = await clients[2].until("pusher:subscription_error")
        assert data_of(error)["type"] == "LimitReached"
        assert data_of(error)["status"] == 413
        await clients[3].subscribe("presence-p", {"user_id": "a"})

    async def test_a_worker_that_dies_takes_its_members_with_it(self, bench):
        """A drained worker; tests/failures kills one."""
        one, other = await bench.start(), await bench.start()
        stays, goes = await bench.client(one), await bench.client(other)
        await stays.subscribe("presence-p", {"user_id": "s"})
        await goes.subscribe("presence-p", {"user_id": "g"})
        await stays.until(ADDED)
        other.drain()
        assert data_of(await stays.until(REMOVED)) == {"user_id": "g"}


class TestCacheChannels:
    async def test_a_late_subscriber_gets_the_last_event_after_the_success(self, bench):
        worker = await bench.start()
        for n in range(3):
            await bench.publish("cache-c", "state", f'{{"n":{n}}}')
        client = await bench.client(worker)
        success = await client.subscribe("cache-c")
        assert success["event"] == SUCCEEDED
        assert await client.next() == {"event": "state", "channel": "cache-c", "data": '{"n":2}'}
        await client.nothing_more()

    async def test_a_channel_without_a_cached_event_is_a_miss(self, bench):
        client = await bench.client(await bench.start())
        for channel in ("cache-c", "private-cache-c"):
            await client.subscribe(channel)
            assert await client.next() == {"event": "pusher:cache_miss", "channel": channel, "data": "{}"}
        await client.nothing_more()

    async def test_the_excluded_socket_gets_it_when_it_comes_back(self, bench):
        client = await bench.client(await bench.start())
        await client.subscribe("cache-c")
        await client.until("pusher:cache_miss")
        await bench.publish("cache-c", "state", "1", skip=client.socket_id)
        await client.nothing_more()
        await client.send("pusher:unsubscribe", {"channel": "cache-c"})
        await client.subscribe("cache-c")
        assert (await client.next())["data"] == "1"

    async def test_client_events_are_not_cached(self, bench):
        worker = await bench.start()
        sender, late = await bench.client(worker), await bench.client(worker)
        await sender.subscribe("private-cache-c")
        await sender.until("pusher:cache_miss")
        await sender.send("client-x", "1", channel="private-cache-c")
        await sender.nothing_more()
        await late.subscribe("private-cache-c")
        assert (await late.next())["event"] == "pusher:cache_miss"

    async def test_presence_members_come_with_it(self, bench):
        client = await bench.client(await bench.start())
        await bench.publish("presence-cache-c", "state", "1")
        success = await client.subscribe("presence-cache-c", {"user_id": "u"})
        assert data_of(success)["presence"]["ids"] == ["u"]
        assert (await client.next())["event"] == "state"

    async def test_exactly_one_of_cached_and_live(self, bench):
        """Subscribing while it is published: each event comes once, cached or live."""
        worker = await bench.start()
        for n in range(40):
            client = await bench.client(worker)
            publishing = asyncio.create_task(bench.publish(f"cache-{n}", "state", "1"))
            await client.subscribe(f"cache-{n}")
            await publishing
            if (first := (await client.next())["event"]) != "state":
                assert first == "pusher:cache_miss"
                assert (await client.next())["event"] == "state"
            await client.nothing_more()
            await client.socket.close()


class TestCounts:
    COUNT = "pusher_internal:subscription_count"

    async def test_joiners_get_the_count_after_their_success_and_the_others_soon(self, bench):
        one, other = await bench.start(), await bench.start()
        await bench.change(subscription_count=True)
        first, second = await bench.client(one), await bench.client(other)
        await first.subscribe("news")
        assert await first.next() == {"event": self.COUNT, "channel": "news", "data": '{"subscription_count":1}'}
        await second.subscribe("news")
        assert data_of(await second.next()) == {"subscription_count": 2}
        assert data_of(await first.until(self.COUNT)) == {"subscription_count": 2}
        await second.socket.close()
        assert data_of(await first.until(self.COUNT)) == {"subscription_count": 1}
        await first.nothing_more()

    async def test_the_cached_event_comes_before_the_count(self, bench):
        worker = await bench.start()
        await bench.change(subscription_count=True)
        client = await bench.client(worker)
        await bench.publish("cache-c", "state", "1")
        await client.subscribe("cache-c")
        assert [(await client.next())["event"] for _ in range(2)] == ["state", self.COUNT]

    async def test_presence_channels_have_no_counts(self, bench):
        worker = await bench.start()
        await bench.change(subscription_count=True)
        client = await bench.client(worker)
        await client.subscribe("presence-p", {"user_id": "u"})
        await client.nothing_more()

    async def test_turned_on_subscribers_get_counts_and_turned_off_they_do_not(self, bench):
        worker = await bench.start()
        client, another = await bench.client(worker), await bench.client(worker)
        await client.subscribe("news")
        await bench.change(subscription_count=True)
        assert data_of(await client.until(self.COUNT)) == {"subscription_count": 1}
        await bench.change(subscription_count=False)
        await another.subscribe("news")
        await another.nothing_more()
        await client.nothing_more()

    async def test_many_joins_at_once_send_few_counts(self, bench):
        worker = await bench.start()
        await bench.change(subscription_count=True)
        first = await bench.client(worker)
        await first.subscribe("news")
        others = [await bench.client(worker) for _ in range(50)]
        await asyncio.gather(*(client.subscribe("news") for client in others))
        counts = [data_of(await first.until(self.COUNT))["subscription_count"]]
        while counts[-1] != 51:
            counts.append(data_of(await first.until(self.COUNT))["subscription_count"])
        assert len(counts) < 12


class TestRecords:
    async def test_a_disabled_key_signs_nothing_more_and_its_connections_stay(self, bench):
        worker = await bench.start()
        client = await bench.client(worker)
        await client.subscribe("private-before")
        old, new = bench.app.keys[0], Key(key="new", secret="secret")
        await bench.change(keys=(old, new))
        await client.subscribe("private-between")
        await bench.change(keys=(msgspec.structs.replace(old, enabled=False), new))
        await client.ask("private-after")
        assert data_of(await client.until("pusher:subscription_error"))["status"] == 401
        await bench.publish("private-before", "still", "1")
        await client.until("still")

    async def test_a_changed_setting_counts_for_open_connections(self, bench):
        worker = await bench.start()
        sender = await bench.client(worker)
        await sender.subscribe("private-room")
        await bench.put("1", msgspec.structs.replace(worker.directory.by_id["1"], client_events=False))
        await bench.settled(worker, lambda: not worker.directory.by_id["1"].client_events)
        await sender.send("client-x", "1", channel="private-room")
        assert (await sender.until("pusher:error"))["data"]["code"] == 4301


@pytest.mark.parametrize("count", [300])
async def test_many_join_one_presence_channel_at_once(bench, count):
    """Each gets all others exactly once, and the last one sees everyone."""
    worker = await bench.start()
    app = worker.directory.by_id["1"]
    await bench.put("1", msgspec.structs.replace(app, max_presence_members=1000))
    await bench.settled(worker, lambda: worker.directory.by_id["1"].max_presence_members == 1000)
    clients = [await bench.client(worker) for _ in range(count)]
    successes = await asyncio.gather(
        *(client.subscribe("presence-p", {"user_id": str(n)}) for n, client in enumerate(clients))
    )
    for client, success in zip(clients, successes, strict=True):
        seen = set(data_of(success)["presence"]["ids"])
        while len(seen) < count:
            user = data_of(await client.until(ADDED))["user_id"]
            assert user not in seen
            seen.add(user)


class TestTheConsole:
    async def test_the_console_gets_published_events_and_client_events(self, bench):
        worker = await bench.start()
        own = Key(key="c0c0c0c0c0c0c0c0c0c0", secret="5e5e5e5e5e5e5e5e5e5e")
        await bench.change(console_key=own, console_until=time.time() + 60)
        dashboard = msgspec.structs.replace(bench.app, keys=(own,))
        watcher = await bench.client(worker, dashboard)
        await watcher.subscribe("private-redpoll.console", app=dashboard)
        await bench.publish("news", "headline", 'é "quoted"')
        shown = await watcher.next()
        assert shown["event"] == "event"
        assert shown["channel"] == "private-redpoll.console"
        expected = {"channel": "news", "event": "headline", "data": 'é "quoted"', "user_id": None, "skip": None}
        assert data_of(shown) == expected
        talker = await bench.client(worker)
        await talker.subscribe("presence-p", {"user_id": "u"})
        await talker.send("client-said", {"n": 1}, channel="presence-p")
        shown = data_of(await watcher.until("event"))
        assert (shown["event"], shown["user_id"], shown["skip"]) == ("client-said", "u", talker.socket_id)
        assert json.loads(shown["data"]) == {"n": 1}
