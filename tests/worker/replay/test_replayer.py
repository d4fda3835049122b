"""Earlier messages for new subscribers: by rule, by request, and after a break. Each message once and in order."""

import asyncio
import contextlib
import random
import socket

import pytest
import websockets

from redpoll.cluster.history import History
from redpoll.cluster.redis.keys import Keys
from worker.replay.replays import RECOVER, SUCCEEDED, Withheld, continuing, data_of, position_of

ADDED = "pusher_internal:member_added"


def numbers(frames: list[dict]) -> list[int]:
    return [int(frame["data"]) for frame in frames]


def history_of(bench) -> History:
    return History(bench.bus.link, Keys())


class TestByRule:
    async def test_a_stock_client_gets_the_last_messages_after_its_success_and_before_live_ones(self, bench):
        worker = await bench.start()
        await bench.keep(replay=3)
        await bench.publish_numbers("stored-a", range(10))
        client = await bench.client(worker)
        assert await client.subscribe("stored-a") == {"event": SUCCEEDED, "channel": "stored-a", "data": "{}"}
        assert await client.events(3) == [{"event": "n", "channel": "stored-a", "data": str(n)} for n in (7, 8, 9)]
        await bench.publish_numbers("stored-a", range(10, 12))
        assert numbers(await client.events(2)) == [10, 11]
        await client.nothing_more()
        assert worker.hub.registry.local_channel("1", "stored-a").audience.readers is None

    async def test_by_time(self, bench):
        worker = await bench.start()
        await bench.keep(replay_seconds=600)
        await bench.publish_numbers("stored-a", range(150))
        client = await bench.client(worker)
        await client.subscribe("stored-a")
        assert numbers(await client.events(150)) == list(range(150))
        await client.nothing_more()

    async def test_an_empty_history_replays_nothing(self, bench):
        worker = await bench.start()
        await bench.keep(replay=3)
        client = await bench.client(worker)
        await client.subscribe("stored-a")
        await client.nothing_more()
        await bench.publish_numbers("stored-a", range(1))
        assert numbers(await client.events(1)) == [0]

    async def test_channels_without_a_rule_are_not_affected(self, bench):
        worker = await bench.start()
        await bench.keep(replay=3)
        await bench.publish_numbers("other", range(3))
        client = await bench.client(worker, query=RECOVER)
        stock = await bench.client(worker)
        for one in (stock, client):
            assert (await one.subscribe("other"))["data"] == "{}"
            await bench.publish_numbers("other", range(1))
            assert await one.events(1) == [{"event": "n", "channel": "other", "data": "0"}]
        await client.socket.close()
        channel = worker.hub.registry.local_channel("1", "other")
        await bench.settled(worker, lambda: channel.attached == 1)
        assert channel.audience.readers is None

    async def test_each_message_comes_once_over_many_pages_while_publishing_goes_on(self, bench):
        one, other = await bench.start(), await bench.start()
        await bench.keep(replay=1000)
        await bench.publish_numbers("stored-a", range(1000))
        publishing = asyncio.create_task(self._publish(bench, range(1000, 3000)))
        clients = []
        for worker in (one, other) * 4:
            client = await bench.client(worker)
            await client.subscribe("stored-a")
            clients.append(client)
        await publishing
        await bench.publish("stored-a", "end", "-1")
        for client in clients:
            await client.until("end")
            received = numbers([frame for frame in client.seen if frame["event"] == "n"])
            # Nothing is missing after its first message, and it got at least as many as the rule says.
            assert received == list(range(received[0], 3000))
            assert len(received) >= 1000

    @staticmethod
    async def _publish(bench, span: range) -> None:
        for at in range(span.start, span.stop, 10):
            await bench.publish_numbers("stored-a", range(at, at + 10))

    async def test_replays_of_many_channels_do_not_overflow_a_slow_client(self, bench):
        worker = await bench.start()
        await bench.keep(replay=20)
        channels = [f"stored-{n}" for n in range(60)]
        for channel in channels:
            await bench.publish_numbers(channel, range(20), "x" * 8000)
        for query in ("", RECOVER):
            raw = socket.socket()
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)
            raw.connect(("127.0.0.1", worker.port))
            client = await bench.client(worker, query=query, max_queue=1, sock=raw)
            for channel in channels:
                await client.ask(channel, rewind={"count": 20})
            await bench.settled(worker, lambda: worker.hub.replayer.waiting)
            assert len(await client.events(60 * 20)) == 60 * 20
            await client.nothing_more()

    async def test_subscribers_that_come_together_share_pages(self, bench):
        worker = await bench.start()
        await bench.keep(replay=640)
        await bench.publish_numbers("stored-a", range(640))
        clients = [await bench.client(worker) for _ in range(20)]
        before = worker.registry.history.pages
        await asyncio.gather(*(client.subscribe("stored-a") for client in clients))
        for client in clients:
            assert numbers(await client.events(640)) == list(range(640))
        # One of them needs ten pages; without sharing it would be 200.
        assert worker.registry.history.pages - before <= 60
        assert worker.hub.replayer.replayed == 20 * 640


class TestRewind:
    async def test_for_a_number_of_messages(self, bench):
        worker = await bench.start()
        await bench.keep()
        await bench.publish_numbers("stored-a", range(100))
        client = await bench.client(worker)
        assert (await client.subscribe("stored-a", rewind={"count": 70}))["data"] == "{}"
        received = await client.events(70)
        assert numbers(received) == list(range(30, 100))
        assert all("offset" not in frame for frame in received)
        await client.nothing_more()

    async def test_for_a_span_of_time(self, bench):
        worker = await bench.start()
        await bench.keep()
        await bench.publish_numbers("stored-a", range(5))
        client = await bench.client(worker)
        await client.subscribe("stored-a", rewind={"seconds": 60})
        assert numbers(await client.events(5)) == list(range(5))

    async def test_for_more_than_there_is(self, bench):
        worker = await bench.start()
        await bench.keep()
        await bench.publish_numbers("stored-a", range(3))
        client = await bench.client(worker)
        await client.subscribe("stored-a", rewind={"count": 1000})
        assert numbers(await client.events(3)) == [0, 1, 2]
        await client.nothing_more()

    async def test_a_rewind_overrides_the_rule(self, bench):
        worker = await bench.start()
        await bench.keep(replay=3)
        await bench.publish_numbers("stored-a", range(9))
        client = await bench.client(worker)
        await client.subscribe("stored-a", rewind={"count": 1})
        assert numbers(await client.events(1)) == [8]
        await client.nothing_more()

    async def test_an_invalid_rewind_is_refused(self, bench):
        worker = await bench.start()
        await bench.keep()
        client = await bench.client(worker)
        await client.ask("stored-a", rewind={"count": -1})
        assert data_of(await client.until("pusher:subscription_error"))["type"] == "InvalidRewind"

    async def test_a_recovering_client_gets_the_offset_before_the_replay(self, bench):
        worker = await bench.start()
        await bench.keep()
        await bench.publish_numbers("stored-a", range(10))
        client = await bench.client(worker, query=RECOVER)
        place = position_of(await client.subscribe("stored-a", rewind={"count": 4}))
        received = await client.events(4)
        assert place["offset"] < received[0]["offset"]
        # A client cut off right after the success frame loses nothing.
        again = await bench.client(worker, query=RECOVER)
        assert data_of(await again.subscribe("stored-a", since=place))["recovered"] is True
        assert await again.events(4) == received

    async def test_a_second_subscribe_during_a_replay_gets_the_same_offset(self, bench):
        worker = await bench.start()
        await bench.keep()
        await bench.publish_numbers("stored-a", range(10))
        client = await bench.client(worker, query=RECOVER)
        for _ in range(2):
            await client.ask("stored-a", rewind={"seconds": 60})
        places = [position_of(await client.until(SUCCEEDED)) for _ in range(2)]
        assert places[0] == places[1]
        assert numbers(await client.events(10)) == list(range(10))

    async def test_a_client_that_continues_and_subscribes_twice_gets_an_offset_in_both_answers(self, bench):
        worker = await bench.start()
        await bench.keep()
        client = await bench.client(worker, query=RECOVER)
        old = position_of(await client.subscribe("stored-a"))
        await bench.publish_numbers("stored-a", range(3))
        top = (await client.events(3))[-1]["offset"]
        for since, place in (
            (None, top),
            ({**old, "offset": top}, top),
            (old, old["offset"]),
            ({**old, "offset": top - 1}, top),
            ({"epoch": "of-another", "offset": 1}, top),
        ):
            again = await bench.client(worker, query=RECOVER)
            for _ in range(2):
                await again.ask("stored-a", **({"since": since} if since else {}))
            places = [position_of(await again.until(SUCCEEDED)) for _ in range(2)]
            assert places == [{**old, "offset": place}] * 2, since

    async def test_the_success_frame_of_a_presence_channel_has_the_members(self, bench):
        worker = await bench.start()
        await bench.keep("presence-")
        await bench.publish_numbers("presence-a", range(3))
        client = await bench.client(worker, query=RECOVER)
        success = data_of(await client.subscribe("presence-a", {"user_id": "u"}, rewind={"count": 2}))
        assert success["presence"]["ids"] == ["u"]
        assert success["epoch"]
        assert numbers(await client.events(2)) == [1, 2]


class TestRecovery:
    async def test_only_recovering_clients_get_offsets(self, bench):
        worker = await bench.start()
        await bench.keep()
        recovering, stock = await bench.client(worker, query=RECOVER), await bench.client(worker)
        by_subscribe = await bench.client(worker)
        place = position_of(await recovering.subscribe("stored-a"))
        assert (await stock.subscribe("stored-a"))["data"] == "{}"
        assert position_of(await by_subscribe.subscribe("stored-a", recover=True)) == place
        await bench.publish_numbers("stored-a", range(2))
        assert all("offset" not in frame for frame in await stock.events(2))
        received = await recovering.events(2)
        assert place["offset"] < received[0]["offset"] < received[1]["offset"]
        assert await by_subscribe.events(2) == received

    async def test_a_client_continues_without_a_gap_on_any_worker(self, bench):
        one, other = await bench.start(), await bench.start()
        await bench.keep()
        client = await bench.client(one, query=RECOVER)
        place = position_of(await client.subscribe("stored-a"))
        await bench.publish_numbers("stored-a", range(5))
        place["offset"] = (await client.events(5))[2]["offset"]
        await client.socket.close()
        await bench.publish_numbers("stored-a", range(5, 200))
        again = await bench.client(other, query=RECOVER)
        success = data_of(await again.subscribe("stored-a", since=place))
        assert success == {"epoch": place["epoch"], "offset": place["offset"], "recovered": True}
        assert numbers(await again.events(197)) == list(range(3, 200))
        await again.nothing_more()

    async def test_a_client_that_missed_nothing_gets_no_messages(self, bench):
        worker = await bench.start()
        await bench.keep(replay=10)
        await bench.publish_numbers("stored-a", range(5))
        client = await bench.client(worker, query=RECOVER)
        await client.subscribe("stored-a")
        place = {"epoch": data_of(client.seen[-1])["epoch"], "offset": (await client.events(5))[-1]["offset"]}
        again = await bench.client(worker, query=RECOVER)
        assert data_of(await again.subscribe("stored-a", since=place)) == {**place, "recovered": True}
        await again.nothing_more()

    async def test_an_unknown_position_is_not_recovered_and_the_present_one_is_sent(self, bench):
        worker = await bench.start()
        await bench.keep(keep=10, replay=5)
        client = await bench.client(worker, query=RECOVER)
        old = position_of(await client.subscribe("stored-a"))
        await bench.publish_numbers("stored-a", range(50))
        top = (await client.events(50))[-1]["offset"]
        wrong = [
            {**old, "epoch": "of-another"},
            {**old, "offset": top + 1},
            {**old, "offset": top - 1},
            {**old, "offset": 1},
            # Trimmed: 50 messages follow it, ten are stored.
            old,
        ]
        for since in wrong:
            again = await bench.client(worker, query=RECOVER)
            success = data_of(await again.subscribe("stored-a", since=since))
            assert success == {"epoch": old["epoch"], "offset": top, "recovered": False}, since
            await again.nothing_more()
        await bench.publish_numbers("stored-a", range(50, 51))
        assert numbers(await again.events(1)) == [50]

    async def test_a_channel_without_history_has_no_position(self, bench):
        worker = await bench.start()
        client = await bench.client(worker, query=RECOVER)
        success = await client.subscribe("news", since={"epoch": "e", "offset": 1})
        assert data_of(success) == {"recovered": False}
        await bench.publish("news", "n", "1")
        assert await client.events(1) == [{"event": "n", "channel": "news", "data": "1"}]

    async def test_recovering_clients_get_a_new_position_when_the_history_is_cleared(self, bench):
        worker = await bench.start()
        await bench.keep()
        client, stock = await bench.client(worker, query=RECOVER), await bench.client(worker)
        before = position_of(await client.subscribe("stored-a"))
        await stock.subscribe("stored-a")
        await bench.publish_numbers("stored-a", range(2))
        await client.events(2)
        epoch = await history_of(bench).clear("1", "stored-a")
        position = data_of(await client.until("pusher:position"))
        assert position["epoch"] == epoch != before["epoch"]
        assert position["recovered"] is False
        await bench.publish_numbers("stored-a", range(2, 4))
        assert numbers(await client.events(2)) == [2, 3]
        assert numbers(await stock.events(4)) == [0, 1, 2, 3]
        again = await bench.client(worker, query=RECOVER)
        since = {"epoch": position["epoch"], "offset": position["offset"]}
        assert data_of(await again.subscribe("stored-a", since=since))["recovered"] is True
        assert numbers(await again.events(2)) == [2, 3]

    @pytest.mark.parametrize("paced", [False, True])
    async def test_notices_are_counted_by_those_who_get_them(self, bench, paced):
        """The counter raises an alert: a history that is cleared while nobody recovers must not."""
        worker = await bench.start()
        await bench.keep(**({"max_rate": 1000, "latest": True} if paced else {}))
        stock = await bench.client(worker)
        await stock.subscribe("stored-a")
        await bench.publish_numbers("stored-a", range(1))
        await stock.events(1)
        await history_of(bench).clear("1", "stored-a")
        # After the notice of the clear, which came on the same connection.
        await bench.publish_numbers("stored-a", range(1, 2))
        await stock.events(1)
        assert worker.gate.hub.replayer.positions_sent == 0
        recovering = [await bench.client(worker, query=RECOVER) for _ in range(2)]
        for client in recovering:
            await client.subscribe("stored-a")
        await history_of(bench).clear("1", "stored-a")
        for client in recovering:
            await client.until("pusher:position")
        assert worker.gate.hub.replayer.positions_sent == 2

    async def test_messages_published_while_there_was_no_rule_count_as_missing(self, bench):
        worker = await bench.start()
        await bench.keep(era="a")
        stays, goes = await bench.client(worker, query=RECOVER), await bench.client(worker, query=RECOVER)
        place = position_of(await stays.subscribe("stored-a"))
        await goes.subscribe("stored-a")
        await bench.publish_numbers("stored-a", range(2))
        place["offset"] = (await goes.events(2))[-1]["offset"]
        await goes.socket.close()
        await bench.change(history=())
        await bench.publish_numbers("stored-a", range(2, 4))
        await bench.keep(era="b")
        back = await bench.client(worker, query=RECOVER)
        position = data_of(await back.subscribe("stored-a", since=place))
        assert position["recovered"] is False
        assert position["epoch"] != place["epoch"]
        await bench.publish_numbers("stored-a", range(4, 6))
        assert numbers(await back.events(2)) == [4, 5]
        # The client that stayed missed nothing, and continues from the new position.
        assert numbers(await stays.events(6)) == list(range(6))
        positions = [data_of(frame) for frame in stays.seen if frame["event"] == "pusher:position"]
        assert [sent["epoch"] for sent in positions] == [position["epoch"]]
        again = await bench.client(worker, query=RECOVER)
        since = {"epoch": position["epoch"], "offset": stays.seen[-2]["offset"]}
        assert data_of(await again.subscribe("stored-a", since=since))["recovered"] is True
        assert numbers(await again.events(1)) == [5]

    @pytest.mark.parametrize("paced", [False, True])
    async def test_a_rule_that_is_added_gives_open_subscriptions_a_position(self, bench, paced):
        worker = await bench.start()
        rate = {"max_rate": 1000, "latest": True} if paced else {}
        if paced:
            await bench.keep(keep=0, seconds=0, **rate)
        by_connection, by_subscribe = await bench.client(worker, query=RECOVER), await bench.client(worker)
        stock = await bench.client(worker)
        await by_connection.subscribe("stored-a")
        await by_subscribe.subscribe("stored-a", recover=True)
        await stock.subscribe("stored-a")
        await bench.publish_numbers("stored-a", range(1))
        for client in (by_connection, by_subscribe):
            assert await client.events(1) == [{"event": "n", "channel": "stored-a", "data": "0"}]
        await bench.keep(**rate)
        positions = [data_of(await client.until("pusher:position")) for client in (by_connection, by_subscribe)]
        assert positions[0] == positions[1]
        await bench.publish_numbers("stored-a", range(1, 2))
        (live,) = await by_connection.events(1)
        assert live["offset"] > positions[0]["offset"]
        assert await by_subscribe.events(1) == [live]
        assert all("offset" not in frame for frame in await stock.events(2))
        # A second subscribe has the position as well.
        assert position_of(await by_connection.subscribe("stored-a")) == {
            "epoch": positions[0]["epoch"],
            "offset": live["offset"],
        }
        again = await bench.client(worker, query=RECOVER)
        since = {"epoch": positions[0]["epoch"], "offset": positions[0]["offset"]}
        assert data_of(await again.subscribe("stored-a", since=since))["recovered"] is True
        assert numbers(await again.events(1)) == [1]

    async def test_a_second_subscribe_gets_the_present_offset(self, bench):
        worker = await bench.start()
        await bench.keep()
        client = await bench.client(worker, query=RECOVER)
        place = position_of(await client.subscribe("stored-a"))
        await bench.publish_numbers("stored-a", range(1))
        offset = (await client.events(1))[0]["offset"]
        assert position_of(await client.subscribe("stored-a")) == {**place, "offset": offset}
        await client.nothing_more()

    async def test_a_client_that_is_cut_repeatedly_gets_everything_once_and_in_order(self, bench):
        workers = [await bench.start(), await bench.start()]
        await bench.keep(keep=5000)
        count = 3000
        reader, chance = Reader(bench, workers), random.Random(1)
        reading = asyncio.create_task(reader.read(count))
        await bench.settled(workers[0], lambda: is_over(reading) or reader.place is not None)
        for at in range(0, count, 20):
            await bench.publish_numbers("stored-a", range(at, at + 20))
            if chance.random() < 0.1:
                # Publishing goes on between two cuts, whether or not the client is connected.
                await bench.settled(workers[0], lambda: is_over(reading) or reader.client is not None)
                reader.cut()
        await asyncio.wait_for(reading, 60)
        assert reader.received == list(range(count))
        assert reader.cuts > 1

    async def test_when_redis_restarts_in_the_middle_nothing_is_missing(self, own_redis, bench_on):
        bench = await bench_on(own_redis)
        workers = [await bench.start(), await bench.start()]
        await bench.keep(keep=5000)
        reader, stock = Reader(bench, workers), await bench.client(workers[0])
        await stock.subscribe("stored-a")
        reading = asyncio.create_task(reader.read(600))
        await bench.settled(workers[0], lambda: is_over(reading) or reader.place is not None)
        await bench.publish_numbers("stored-a", range(200))
        own_redis.kill()
        reader.cut()
        own_redis.start()
        await bench.settled(workers[0], lambda: bench.bus.link.connects == 2 and bench.bus.link.up)
        # Workers may not have subscribed again yet.
        await bench.publish_numbers("stored-a", range(200, 600))
        await asyncio.wait_for(reading, 60)
        assert reader.received == list(range(600))
        assert numbers(await stock.events(600)) == list(range(600))
        await stock.nothing_more()

    async def test_recovering_clients_get_a_new_position_when_redis_lost_everything(self, own_redis, bench_on):
        bench = await bench_on(own_redis)
        worker = await bench.start()
        await bench.keep()
        client = await bench.client(worker, query=RECOVER)
        before = position_of(await client.subscribe("stored-a"))
        await bench.publish_numbers("stored-a", range(3))
        await client.events(3)
        own_redis.flush()
        await bench.directory.fill([bench.app], bench.version)
        worker.link.drop("test")
        await bench.settled(
            worker, lambda: worker.registry.local_channel("1", "stored-a").asserted and worker.link.connects == 2
        )
        await bench.publish_numbers("stored-a", range(3, 5))
        after = data_of(await client.until("pusher:position"))
        assert after["epoch"] != before["epoch"]
        assert numbers(await client.events(2)) == [3, 4]


def is_over(reading: asyncio.Task) -> bool:
    """Whether it has ended; raises what it raised."""
    if reading.done():
        reading.result()
    return reading.done()


class Reader:
    """A recovering client that continues from its position on a new connection when it is cut."""

    def __init__(self, bench, workers) -> None:
        self.bench = bench
        self.workers = workers
        self.chance = random.Random(2)
        self.place: dict | None = None
        self.received: list[int] = []
        self.cuts = 0
        self.client = None

    def cut(self) -> None:
        if self.client is not None:
            self.client.socket.transport.abort()
            self.client = None
            self.cuts += 1

    async def read(self, count: int) -> None:
        while len(self.received) < count:
            # Not OSError: a message that never comes is a TimeoutError.
            with contextlib.suppress(websockets.WebSocketException, ConnectionError):
                await self._read(count)

    async def _read(self, count: int) -> None:
        client = await self.bench.client(self.chance.choice(self.workers), query=RECOVER)
        await client.ask("stored-a", **({"since": self.place} if self.place else {}))
        success = data_of(await client.until(SUCCEEDED))
        assert success.get("recovered", True) is True, success
        self.place = {"epoch": success["epoch"], "offset": success["offset"]}
        self.client = client
        while len(self.received) < count:
            (frame,) = await client.events(1)
            self.received.append(int(frame["data"]))
            self.place["offset"] = frame["offset"]


class TestLiveEventsWait:
    async def test_events_wait_members_and_counts_do_not(self, bench):
        worker = await bench.start()
        await bench.keep("presence-", replay=2)
        await bench.publish_numbers("presence-a", range(3))
        withheld = Withheld(worker)
        client, other = await bench.client(worker), await bench.client(worker)
        await client.subscribe("presence-a", {"user_id": "u"})
        await bench.settled(worker, lambda: withheld.waiting)
        await bench.publish_numbers("presence-a", range(3, 5))
        await other.subscribe("presence-a", {"user_id": "v"})
        assert data_of(await client.until(ADDED))["user_id"] == "v"
        await client.nothing_more()
        withheld.go_on()
        assert numbers(await client.events(4)) == [1, 2, 3, 4]

    async def test_the_success_frame_waits_until_it_is_known_whether_messages_are_missing(self, bench):
        worker = await bench.start()
        await bench.keep()
        await bench.change(subscription_count=True)
        client, _, withheld = await continuing(bench, worker, "stored-a", 2)
        await bench.client(worker)
        await client.nothing_more()
        withheld.go_on()
        assert data_of(await client.next())["recovered"] is True
        assert data_of(await client.next()) == {"subscription_count": 2}
        assert numbers(await client.events(2)) == [0, 1]

    async def test_unstored_events_come_at_their_place(self, bench):
        worker = await bench.start()
        await bench.keep("private-", replay=10)
        await bench.publish_numbers("private-a", range(2))
        talker = await bench.client(worker)
        await talker.subscribe("private-a")
        await talker.events(2)
        withheld = Withheld(worker)
        client = await bench.client(worker)
        await client.subscribe("private-a")
        await bench.settled(worker, lambda: withheld.waiting)
        for n in (2, 4):
            await talker.send("client-said", str(n), channel="private-a")
            await bench.settled(
                worker,
                lambda n=n: (
                    len(worker.hub.registry.local_channel("1", "private-a").audience.readers.unstored) == n // 2
                ),
            )
            await bench.publish_numbers("private-a", range(n + 1, n + 2))
            await talker.until("n")
        withheld.go_on()
        assert numbers(await client.events(6)) == [0, 1, 2, 3, 4, 5]
        await client.nothing_more()

    async def test_those_from_before_a_subscribe_do_not_come(self, bench):
        """A newcomer got all that waited for the replays of others, and a client that continued got it twice."""
        worker = await bench.start()
        await bench.keep("private-")
        await bench.publish_numbers("private-a", range(2))
        talker = await bench.client(worker, query=RECOVER)
        since = position_of(await talker.subscribe("private-a", rewind={"count": 1}))
        since["offset"] = (await talker.events(1))[0]["offset"]
        withheld = Withheld(worker)
        slow = await bench.client(worker)
        await slow.subscribe("private-a", rewind={"count": 10})
        await bench.settled(worker, lambda: withheld.waiting)
        await talker.send("client-said", "2", channel="private-a")
        readers = worker.hub.registry.local_channel("1", "private-a").audience.readers
        await bench.settled(worker, lambda: readers.unstored)
        for more in ({"recover": True}, {"recover": True, "since": since}):
            client = await bench.client(worker)
            await client.subscribe("private-a", **more)
            await client.nothing_more()
        withheld.go_on()
        assert numbers(await slow.events(3)) == [0, 1, 2]

    async def test_a_client_that_leaves_or_closes_during_its_replay_leaves_nothing(self, bench):
        worker = await bench.start()
        await bench.keep()
        witness = await bench.client(worker, query=RECOVER)
        since = position_of(await witness.subscribe("stored-a"))
        await bench.publish_numbers("stored-a", range(3))
        await witness.events(3)
        withheld = Withheld(worker)
        leaving, closing = await bench.client(worker), await bench.client(worker)
        await leaving.ask("stored-a", since=since)
        await closing.subscribe("stored-a", rewind={"count": 2})
        readers = worker.hub.registry.local_channel("1", "stored-a").audience.readers
        await bench.settled(worker, lambda: len(readers.replays) == 2)
        await leaving.send("pusher:unsubscribe", {"channel": "stored-a"})
        closing.socket.transport.abort()
        await bench.settled(worker, lambda: not readers.replays)
        withheld.go_on()
        await leaving.nothing_more()
        await bench.settled(worker, lambda: worker.hub.registry.local_channel("1", "stored-a").confirmed == 1)
        await witness.socket.close()
        await bench.settled(worker, lambda: worker.hub.registry.local_channel("1", "stored-a") is None)
        assert worker.statistics.loop_exceptions_total == 0

    async def test_clearing_the_history_ends_replays(self, bench):
        worker = await bench.start()
        await bench.keep()
        await bench.publish_numbers("stored-a", range(200))
        withheld = Withheld(worker)
        stock, recovering = await bench.client(worker), await bench.client(worker, query=RECOVER)
        await stock.subscribe("stored-a", rewind={"count": 200})
        await recovering.ask("stored-a", rewind={"count": 200})
        readers = worker.hub.registry.local_channel("1", "stored-a").audience.readers
        await bench.settled(worker, lambda: len(readers.replays) == 2)
        epoch = await history_of(bench).clear("1", "stored-a")
        assert data_of(await recovering.until(SUCCEEDED))["epoch"] == epoch
        await bench.publish_numbers("stored-a", range(200, 202))
        assert numbers(await recovering.events(2)) == numbers(await stock.events(2)) == [200, 201]
        withheld.go_on()
        await stock.nothing_more()
        await recovering.nothing_more()

    async def test_removing_the_rule_ends_replays(self, bench):
        worker = await bench.start()
        await bench.keep()
        await bench.publish_numbers("stored-a", range(5))
        withheld = Withheld(worker)
        client = await bench.client(worker)
        await client.subscribe("stored-a", rewind={"count": 5})
        await bench.settled(worker, lambda: withheld.waiting)
        await bench.change(history=())
        await bench.publish_numbers("stored-a", range(5, 7))
        assert numbers(await client.events(2)) == [5, 6]
        withheld.go_on()
        await client.nothing_more()

    async def test_an_excluded_socket_does_not_get_the_message_by_replay_either(self, bench):
        worker = await bench.start()
        await bench.keep(replay=5)
        client = await bench.client(worker)
        await bench.publish("stored-a", "n", "0")
        await bench.publish("stored-a", "n", "1", skip=client.socket_id)
        await bench.publish("stored-a", "n", "2")
        await client.subscribe("stored-a")
        assert numbers(await client.events(2)) == [0, 2]
        await client.nothing_more()


class TestSlowReaders:
    async def test_slow_readers_delay_no_other_and_miss_nothing(self, bench):
        worker = await bench.start()
        await bench.keep(keep=10_000)
        padding = "x" * 2000
        await bench.publish_numbers("stored-a", range(6000), f"{{n}} {padding}")
        slow = await bench.client(worker, max_queue=1)
        await slow.ask("stored-a", rewind={"seconds": 600})
        replayer = worker.hub.replayer
        await bench.settled(worker, lambda: replayer.waiting)
        unsent = max(connection.unsent_bytes for connection in worker.hub.open_connections)
        assert unsent < 640 * 1024
        quick = await bench.client(worker)
        await quick.subscribe("stored-a", rewind={"count": 100})
        await quick.events(100)
        await bench.publish_numbers("stored-a", range(6000, 6100))
        await quick.events(100)
        received = [int(frame["data"].split()[0]) for frame in await slow.events(6100)]
        assert received == list(range(6100))
        await slow.nothing_more()
        assert not replayer.waiting

    async def test_a_replay_that_finds_messages_trimmed_says_so_and_goes_live(self, bench):
        worker = await bench.start()
        await bench.keep(keep=64, seconds=600)
        client = await bench.client(worker, query=RECOVER)
        since = position_of(await client.subscribe("stored-a"))
        await bench.publish_numbers("stored-a", range(10))
        withheld = Withheld(worker)
        slow = await bench.client(worker, query=RECOVER)
        await slow.ask("stored-a", since=since)
        await bench.settled(worker, lambda: withheld.waiting)
        # Trimmed before its first page is read.
        await bench.publish_numbers("stored-a", range(10, 100))
        withheld.go_on()
        success = data_of(await slow.until(SUCCEEDED))
        assert success["recovered"] is False
        assert success["offset"] == (await client.events(100))[-1]["offset"]
        await bench.publish_numbers("stored-a", range(100, 101))
        assert numbers(await slow.events(1)) == [100]

    async def test_a_replay_gives_up_on_a_publisher_that_is_always_faster(self, bench):
        worker = await bench.start()
        await bench.keep(keep=300)
        first = await bench.client(worker, query=RECOVER)
        since = position_of(await first.subscribe("stored-a"))
        await bench.publish_numbers("stored-a", range(150))
        await first.events(150)
        withheld = Withheld(worker)
        client = await bench.client(worker, query=RECOVER)
        await client.ask("stored-a", since=since)
        for at in range(150, 150 + 64 * 13, 64):
            await bench.settled(worker, lambda: withheld.waiting)
            await bench.publish_numbers("stored-a", range(at, at + 64))
            await first.events(64)
            withheld.let_one()
        position = data_of(await client.until("pusher:position"))
        assert position == {"epoch": since["epoch"], "offset": first.seen[-1]["offset"], "recovered": False}
        received = numbers([frame for frame in client.seen if frame["event"] == "n"])
        assert received == list(range(64 * 13))
        await bench.publish_numbers("stored-a", range(2000, 2001))
        assert numbers(await client.events(1)) == [2000]


class TestCacheChannels:
    async def test_the_cached_event_is_not_sent_twice(self, bench):
        worker = await bench.start()
        await bench.keep("cache-", replay=2)
        await bench.publish_numbers("cache-a", range(3))
        client = await bench.client(worker)
        await client.subscribe("cache-a")
        assert numbers(await client.events(2)) == [1, 2]
        await client.nothing_more()

    async def test_the_cached_event_is_sent_if_nothing_is_replayed(self, bench):
        worker = await bench.start()
        await bench.keep("cache-")
        await bench.publish_numbers("cache-a", range(3))
        stock, recovering = await bench.client(worker), await bench.client(worker, query=RECOVER)
        await stock.subscribe("cache-a")
        assert numbers(await stock.events(1)) == [2]
        place = position_of(await recovering.subscribe("cache-a"))
        assert numbers(await recovering.events(1)) == [2]
        again = await bench.client(worker, query=RECOVER)
        assert data_of(await again.subscribe("cache-a", since=place))["recovered"] is True
        await again.nothing_more()

    async def test_a_cache_miss_is_sent_once(self, bench):
        worker = await bench.start()
        await bench.keep("cache-", replay=2)
        client = await bench.client(worker)
        await client.subscribe("cache-a")
        await client.until("pusher:cache_miss")
        await client.nothing_more()
