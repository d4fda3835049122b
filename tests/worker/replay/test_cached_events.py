"""A cache channel's last event comes once and in its order, whether or not earlier messages are replayed."""

import hiredis

from redpoll.cluster.history import History
from redpoll.cluster.redis.keys import Keys
from worker.replay.replays import RECOVER, SUCCEEDED, Withheld, continuing, data_of, position_of

COUNT = "pusher_internal:subscription_count"


async def frames_of(client, count: int) -> list[tuple[str, ...]]:
    """The next frames: of the server's own ones their names, of others the name and the data.

    Without counts that follow the first one: it is announced to all up to 250 ms after a join."""
    frames: list[tuple[str, ...]] = []
    while len(frames) < count:
        frame = await client.next()
        shown = (frame["event"],) if frame["event"].startswith("pusher") else (frame["event"], frame["data"])
        if shown != (COUNT,) or shown not in frames:
            frames.append(shown)
    return frames


class TestGap:
    """The client doesn't have the messages before the gap, so it needs the cached event."""

    async def test_since_with_a_gap(self, bench):
        worker = await bench.start()
        await bench.keep("cache-", keep=2)
        await bench.change(subscription_count=True)
        client = await bench.client(worker, query=RECOVER)
        since = position_of(await client.subscribe("cache-a"))
        await client.socket.close()
        await bench.publish_numbers("cache-a", range(6))
        again = await bench.client(worker, query=RECOVER)
        success = data_of(await again.subscribe("cache-a", since=since))
        assert success["recovered"] is False
        assert await frames_of(again, 2) == [("n", "5"), (COUNT,)]
        await again.nothing_more()

    async def test_since_without_a_gap(self, bench):
        worker = await bench.start()
        await bench.keep("cache-")
        client = await bench.client(worker, query=RECOVER)
        since = position_of(await client.subscribe("cache-a"))
        await bench.publish_numbers("cache-a", range(3))
        since["offset"] = (await client.events(3))[1]["offset"]
        again = await bench.client(worker, query=RECOVER)
        assert data_of(await again.subscribe("cache-a", since=since))["recovered"] is True
        assert await frames_of(again, 1) == [("n", "2")]
        await again.nothing_more()

    async def test_since_after_it(self, bench):
        worker = await bench.start()
        await bench.keep("private-cache-", client_events=True)
        client, talker = await bench.client(worker, query=RECOVER), await bench.client(worker)
        since = position_of(await client.subscribe("private-cache-a"))
        await talker.subscribe("private-cache-a")
        await bench.publish_numbers("private-cache-a", range(1))
        (cached,) = await client.events(1)
        await talker.send("client-said", "1", channel="private-cache-a")
        (said,) = await client.events(1)
        again = await bench.client(worker, query=RECOVER)
        await again.subscribe("private-cache-a", since={**since, "offset": cached["offset"]})
        assert await again.next() == said
        await again.nothing_more()

    async def test_the_history_is_cleared_during_the_replay(self, bench):
        worker = await bench.start()
        await bench.keep("cache-")
        again, since, withheld = await continuing(bench, worker, "cache-a", 3)
        await History(bench.bus.link, Keys()).clear("1", "cache-a")
        success = data_of(await again.until(SUCCEEDED))
        assert success["recovered"] is False
        assert success["epoch"] != since["epoch"]
        assert await frames_of(again, 1) == [("n", "2")]
        withheld.go_on()
        await again.nothing_more()

    async def test_the_rule_is_removed_during_the_replay(self, bench):
        worker = await bench.start()
        await bench.keep("cache-")
        again, _, withheld = await continuing(bench, worker, "cache-a", 3)
        await bench.change(history=())
        withheld.go_on()
        assert data_of(await again.until(SUCCEEDED)) == {"recovered": False}
        assert await frames_of(again, 1) == [("n", "2")]
        await again.nothing_more()


class TestOrder:
    async def test_a_recovering_client_gets_it_before_the_count(self, bench):
        worker = await bench.start()
        await bench.keep("cache-")
        await bench.change(subscription_count=True)
        await bench.publish_numbers("cache-a", range(3))
        client = await bench.client(worker, query=RECOVER)
        await client.subscribe("cache-a")
        assert await frames_of(client, 2) == [("n", "2"), (COUNT,)]
        await client.nothing_more()

    async def test_it_comes_before_later_client_events(self, bench):
        worker = await bench.start(client_events_per_second=0)
        await bench.keep("private-cache-", replay=2, client_events=True)
        await bench.change(subscription_count=True)
        await self._talk(bench, worker)
        for query in ("", RECOVER):
            client = await bench.client(worker, query=query)
            await client.subscribe("private-cache-a")
            assert await frames_of(client, 4) == [("n", "0"), (COUNT,), ("client-said", "1"), ("client-said", "2")]
            await client.nothing_more(but=COUNT)

    async def test_it_comes_once_if_a_server_publishes_an_event_named_like_those_of_clients(self, bench):
        """It came with the answer to the subscribe, and again among the messages."""
        worker = await bench.start()
        await bench.keep("private-cache-", replay=200)
        # More than a page has.
        for count in (3, 150):
            await bench.publish_numbers("private-cache-a", range(count), event="client-typing")
            for query in ("", RECOVER):
                client = await bench.client(worker, query=query)
                await client.subscribe("private-cache-a")
                newest = range(3) if count == 3 else (*range(3), *range(150))
                assert await frames_of(client, len(newest)) == [("client-typing", str(n)) for n in newest]
                await client.nothing_more()

    @staticmethod
    async def _talk(bench, worker, said: int = 3):
        """The server's event, and so many client events after it, all of them stored."""
        talker, witness = await bench.client(worker), await bench.client(worker)
        for client in (talker, witness):
            await client.subscribe("private-cache-a")
        await bench.publish_numbers("private-cache-a", range(1))
        for n in range(said):
            await talker.send("client-said", str(n), channel="private-cache-a")
        await witness.events(1 + said)

    async def test_it_is_among_the_messages_if_a_later_page_has_it(self, bench):
        worker = await bench.start(client_events_per_second=0)
        await bench.keep("private-cache-", replay=1000, client_events=True)
        talker = await bench.client(worker)
        await talker.subscribe("private-cache-a")
        witness = await bench.client(worker)
        await witness.subscribe("private-cache-a")
        # More than a page has.
        for n in range(100):
            await talker.send("client-said", str(n), channel="private-cache-a")
        await witness.events(100)
        await bench.publish_numbers("private-cache-a", range(100, 101))
        await witness.events(1)
        for query in ("", RECOVER):
            client = await bench.client(worker, query=query)
            await client.subscribe("private-cache-a")
            assert [int(data) for _, data in await frames_of(client, 101)] == list(range(101))
            await client.nothing_more()

    async def test_it_comes_first_if_no_page_has_it(self, bench):
        worker = await bench.start(client_events_per_second=0)
        await bench.keep("private-cache-", keep=150, replay=1000, client_events=True)
        await self._talk(bench, worker, said=200)
        for query in ("", RECOVER):
            client = await bench.client(worker, query=query)
            await client.subscribe("private-cache-a")
            frames = await frames_of(client, 151)
            assert frames[0] == ("n", "0")
            assert [int(data) for _, data in frames[1:]] == list(range(50, 200))
            await client.nothing_more()

    async def test_redis_fails_while_later_pages_are_searched(self, bench):
        worker = await bench.start(client_events_per_second=0)
        await bench.keep("private-cache-", keep=150, replay=1000, client_events=True)
        await self._talk(bench, worker, said=200)
        searched = worker.hub.replayer._cached_events
        history, failed = searched._history, []

        class FailsOnce:
            @staticmethod
            def page(*args) -> None:
                searched._history = history
                failed.append(args)
                args[-1](hiredis.ReplyError("test"))

        searched._history = FailsOnce()
        client = await bench.client(worker)
        await client.subscribe("private-cache-a")
        assert (await frames_of(client, 151))[0] == ("n", "0")
        assert failed

    async def test_a_client_that_leaves_while_later_pages_are_searched(self, bench):
        worker = await bench.start(client_events_per_second=0)
        await bench.keep("private-cache-", keep=150, replay=1000, client_events=True)
        await self._talk(bench, worker, said=200)
        searched, waiting = worker.hub.replayer._cached_events, []
        history = searched._history

        class Withholding:
            @staticmethod
            def page(*args) -> None:
                waiting.append(args)

        searched._history = Withholding()
        staying, leaving = await bench.client(worker), await bench.client(worker)
        for client in (leaving, staying):
            await client.ask("private-cache-a")
        local_channel = worker.hub.registry.local_channel("1", "private-cache-a")
        await bench.settled(worker, lambda: waiting and len(local_channel.audience.readers.replays) == 2)
        await leaving.send("pusher:unsubscribe", {"channel": "private-cache-a"})
        await leaving.nothing_more()
        searched._history = history
        for args in waiting:
            history.page(*args)
        await staying.until(SUCCEEDED)
        assert (await frames_of(staying, 151))[0] == ("n", "0")
        await leaving.nothing_more()
        assert not searched._waiting
        assert worker.statistics.loop_exceptions_total == 0

    async def test_the_members_are_those_of_the_moment_of_the_answer(self, bench):
        worker = await bench.start()
        await bench.keep("presence-cache-", replay=1)
        await bench.publish_numbers("presence-cache-a", range(1))
        withheld = Withheld(worker)
        client, other = await bench.client(worker), await bench.client(worker)
        await client.ask("presence-cache-a", {"user_id": "u"})
        await bench.settled(worker, lambda: withheld.waiting)
        await other.ask("presence-cache-a", {"user_id": "v"})
        local_channel = worker.hub.registry.local_channel("1", "presence-cache-a")
        await bench.settled(worker, lambda: len(local_channel.audience.readers.replays) == 2)
        withheld.go_on()
        success = data_of(await client.until(SUCCEEDED))
        assert sorted(success["presence"]["ids"]) == ["u", "v"]
        assert set(success) == {"presence"}
        assert await frames_of(client, 1) == [("n", "0")]
        await client.nothing_more()

    async def test_events_that_a_rate_leaves_out_do_not_stand_for_it(self, bench):
        """The last joined event is a text of one client; the server's event is among its parts, and isn't sent."""
        worker = await bench.start(client_events_per_second=0)
        await bench.keep("private-cache-", replay=1, client_events=True, max_rate=1000, join="text", by="of")
        talker, witness = await bench.client(worker), await bench.client(worker)
        for client in (talker, witness):
            await client.subscribe("private-cache-a")

        async def write() -> None:
            await talker.send("client-said", {"text": "a", "of": 1}, channel="private-cache-a")
            await witness.until("client-said")

        await write()
        await bench.publish("private-cache-a", "n", '{"text":"b","of":2}')
        await witness.until("n")
        await write()
        client = await bench.client(worker)
        await client.subscribe("private-cache-a")
        server, text = [await client.next() for _ in range(2)]
        assert (server["event"], data_of(server)) == ("n", {"text": "b", "of": 2})
        assert (text["event"], data_of(text)) == ("client-said", {"text": "aa", "of": 1})
        await client.nothing_more()
