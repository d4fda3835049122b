"""User resume: a user who comes back after a break gets the missed messages, and nobody else does."""

import asyncio
import json
from contextlib import asynccontextmanager

import pytest
import redis as redis_py

from helpers.proxy import Proxy
from redpoll.cluster.lifecycle import Lifecycle
from redpoll.cluster.redis.keys import Keys
from redpoll.cluster.redis.scripts import HOLD, RESUME_POINT
from redpoll.worker.replay.user_resume import ResumeTimings

PING = "pusher:ping"


def numbers(frames: list[dict]) -> list[int]:
    return [int(frame["data"]) for frame in frames]


@pytest.fixture
async def resuming(bench):
    """A bench whose app has user resume, with history on all channels."""
    await bench.change(user_resume_s=60)
    await bench.keep("")
    return bench


# A busy machine may let workers answer each other late, and a stall doesn't count as a connection's silence.
PATIENT = ResumeTimings(answers_s=20.0, in_flight_s=60.0)


async def client_through(proxy, bench, worker):
    """A client whose bytes go through `proxy`."""
    bench.url = lambda _, path: f"ws://127.0.0.1:{proxy.port}{path}"
    client = await bench.client(worker)
    del bench.url
    return client


@asynccontextmanager
async def missing_three(bench, worker):
    """User 7 at this worker got 0 and 1 on `news`. Then the network stalled, and 2, 3 and 4 were published."""
    with Proxy(("127.0.0.1", worker.port)) as proxy:
        client = await client_through(proxy, bench, worker)
        await client.sign_in("7")
        await client.subscribe("news")
        await bench.publish_numbers("news", range(2))
        await client.events(2)
        proxy.stall()
        await bench.publish_numbers("news", range(2, 5))
        yield


async def two_workers(bench, timings: ResumeTimings = PATIENT):
    workers = [await bench.start(), await bench.start()]
    for worker in workers:
        worker.hub.user_resume.timings = timings
    return workers


def point_of(bench, user: str) -> tuple[int | None, int]:
    """What Redis has of the user's last closed connection: the offset, and the seconds until it expires."""
    with redis_py.Redis(unix_socket_path=bench.redis.path) as client:
        key = Keys().resumed("1", user)
        found = client.get(key)
        return int(found) if found else None, client.ttl(key)


def redis_time_s(bench) -> float:
    with redis_py.Redis(unix_socket_path=bench.redis.path) as client:
        seconds, micros = client.time()
    return seconds + micros / 1_000_000


async def cut(bench, worker, client) -> None:
    """The connection breaks, and the worker notices."""
    client.socket.transport.abort()
    await bench.settled(
        worker, lambda: all(open_.session.socket_id != client.socket_id for open_ in worker.hub.open_connections)
    )


async def point_written(bench, user: str) -> None:
    async with asyncio.timeout(60):
        while point_of(bench, user)[0] is None:
            await asyncio.sleep(0.005)


async def got_all(client, span: range) -> None:
    """All of these come, in order; some from before the break may come twice."""
    want, got = set(span), []
    while not want <= set(got):
        got += numbers(await client.events(1))
    assert got == sorted(got)


class TestSignedInUsers:
    async def test_missed_messages_come_before_live_events(self, resuming):
        one, other = await resuming.start(), await resuming.start()
        client = await resuming.client(one)
        await client.sign_in("7")
        await client.subscribe("news")
        await resuming.publish_numbers("news", range(3))
        await client.events(3)
        await cut(resuming, one, client)
        await point_written(resuming, "7")
        await resuming.publish_numbers("news", range(3, 100))
        again = await resuming.client(other)
        await again.sign_in("7")
        await again.subscribe("news")
        await resuming.publish_numbers("news", range(100, 102))
        await got_all(again, range(3, 102))
        await again.nothing_more()

    async def test_a_channel_subscribed_before_the_sign_in_gets_them_after_live_events(self, resuming):
        worker = await resuming.start()
        client = await resuming.client(worker)
        await client.sign_in("7")
        await client.subscribe("news")
        await cut(resuming, worker, client)
        await point_written(resuming, "7")
        await resuming.publish_numbers("news", range(3))
        again = await resuming.client(worker)
        await again.subscribe("news")
        await again.nothing_more()
        await resuming.publish_numbers("news", range(3, 4))
        assert numbers(await again.events(1)) == [3]
        await again.sign_in("7")
        assert numbers(await again.events(3)) == [0, 1, 2]
        await again.nothing_more()

    async def test_a_replay_that_waits_for_its_page_begins_where_the_user_was_cut_off(self, resuming):
        worker = await resuming.start()
        await resuming.keep("", replay=2)
        client = await resuming.client(worker)
        await client.sign_in("7")
        await client.subscribe("news")
        await cut(resuming, worker, client)
        await point_written(resuming, "7")
        await resuming.publish_numbers("news", range(10))
        history, waiting = worker.hub.replayer.pages.history, []

        class Withheld:
            locate = staticmethod(history.locate)

            def page(self, *args) -> None:
                waiting.append(args)

        worker.hub.replayer.pages.history = Withheld()
        again = await resuming.client(worker)
        await again.subscribe("news")
        await resuming.settled(worker, lambda: waiting)
        await again.sign_in("7")
        await resuming.settled(worker, lambda: not worker.hub.user_resume.looking_up)
        worker.hub.replayer.pages.history = history
        for args in waiting:
            history.page(*args)
        assert numbers(await again.events(10)) == list(range(10))
        await again.nothing_more()

    async def test_the_rule_replays_at_least_as_much(self, resuming):
        worker = await resuming.start()
        await resuming.keep("", replay=5)
        await resuming.publish_numbers("news", range(10))
        client = await resuming.client(worker)
        await client.sign_in("7")
        await client.subscribe("news")
        assert numbers(await client.events(5)) == list(range(5, 10))
        await client.nothing_more()

    async def test_an_old_connection_that_hangs_counts(self, resuming):
        one, other = await two_workers(resuming)
        async with missing_three(resuming, one):
            again = await resuming.client(other)
            await again.sign_in("7")
            await again.subscribe("news")
            await got_all(again, range(2, 5))
            await again.nothing_more()
            assert len(one.hub.open_connections) == 1

    @pytest.mark.parametrize("at_another_worker", [False, True])
    async def test_an_old_connection_that_ends_when_it_is_pinged_counts(self, resuming, at_another_worker):
        """Its machine has begun anew, and answers the ping with a reset."""
        one, other = await two_workers(resuming)
        async with missing_three(resuming, one):
            (old,) = one.hub.open_connections
            ping = one.janitor.ping

            async def ping_and_reset(connections, *more):
                if old in connections:
                    asyncio.get_running_loop().call_soon(old.abort)
                return await ping(connections, *more)

            one.janitor.ping = ping_and_reset
            again = await resuming.client(other if at_another_worker else one)
            await again.sign_in("7")
            await again.subscribe("news")
            await got_all(again, range(2, 5))

    @pytest.mark.parametrize("as_member", [False, True])
    async def test_a_worker_that_was_killed_and_is_still_listed_counts(self, resuming, client_of_redis, as_member):
        worker = await resuming.start()
        worker.hub.user_resume.timings = ResumeTimings(answers_s=0.01)
        channel = "presence-p" if as_member else "news"
        await resuming.publish_numbers(channel, range(3))
        if as_member:
            await client_of_redis.hset(Keys().members("1", channel), "7", "ffffffffffff.1.0\n")
        else:
            await client_of_redis.hset(Keys().counts("1", "%u:7"), "ffffffffffff.1.0", 1)
        client = await resuming.client(worker)
        if as_member:
            await client.subscribe(channel, {"user_id": "7"})
        else:
            await client.sign_in("7")
            await client.subscribe(channel)
        assert numbers(await client.events(3)) == [0, 1, 2]
        await client.nothing_more()

    async def test_a_point_that_was_written_while_the_holders_were_asked_counts(self, resuming, client_of_redis):
        worker = await resuming.start()
        await resuming.publish_numbers("news", range(3))
        ask = worker.link.ask

        async def ask_and_write(*command):
            reply = await ask(*command)
            if command == (b"HKEYS", Keys().counts("1", "%u:7")):
                await client_of_redis.set(Keys().resumed("1", "7"), 0, ex=60)
            return reply

        worker.link.ask = ask_and_write
        client = await resuming.client(worker)
        await client.sign_in("7")
        await client.subscribe("news")
        assert numbers(await client.events(3)) == [0, 1, 2]

    async def test_another_open_tab_does_not_count(self, resuming):
        # A busy machine must not make an open tab look silent.
        one, other = await two_workers(resuming, ResumeTimings(answers_s=20.0, pong_s=10.0))
        for worker in (one, other):
            tab = await resuming.client(worker)
            await tab.sign_in("7")
            await tab.subscribe("news")
        await resuming.publish_numbers("news", range(3))
        client = await resuming.client(one)
        await client.sign_in("7")
        await client.subscribe("news")
        await resuming.publish_numbers("news", range(3, 4))
        assert numbers(await client.events(1)) == [3]
        await client.nothing_more()

    async def test_only_the_latest_connections_of_a_shared_user_id_are_pinged(self, resuming):
        worker = await resuming.start()
        clients = [await resuming.client(worker) for _ in range(40)]
        for client in clients[:-1]:
            await client.sign_in("guest")
        await resuming.settled(worker, lambda: not worker.hub.user_resume.looking_up)
        pinged = []
        ping = worker.janitor.ping

        async def record(connections, *args):
            pinged.extend(connections)
            return await ping(connections, *args)

        worker.janitor.ping = record
        await clients[-1].sign_in("guest")
        await resuming.settled(worker, lambda: not worker.hub.user_resume.looking_up)
        assert [connection.session.socket_id for connection in pinged] == [client.socket_id for client in clients[7:-1]]

    async def test_other_users_first_visits_and_other_apps_get_nothing(self, resuming):
        worker = await resuming.start()
        client = await resuming.client(worker)
        await client.sign_in("7")
        await cut(resuming, worker, client)
        await point_written(resuming, "7")
        await resuming.publish_numbers("news", range(3))
        for user in ("8", None):
            other = await resuming.client(worker)
            if user is not None:
                await other.sign_in(user)
            await other.subscribe("news")
            await other.nothing_more()
        theirs = await resuming.client(worker, resuming.other)
        await theirs.sign_in("7", resuming.other)
        await theirs.subscribe("news", app=resuming.other)
        await theirs.nothing_more()

    async def test_a_client_that_names_an_offset_continues_only_from_there(self, resuming):
        worker = await resuming.start()
        client = await resuming.client(worker, query="&recover=1")
        await client.sign_in("7")
        await client.subscribe("news")
        await resuming.publish_numbers("news", range(3))
        epoch = json.loads(client.seen[-1]["data"])["epoch"]
        offset = (await client.events(3))[1]["offset"]
        await cut(resuming, worker, client)
        await point_written(resuming, "7")
        again = await resuming.client(worker, query="&recover=1")
        await again.sign_in("7")
        await again.subscribe("news", since={"epoch": epoch, "offset": offset})
        assert numbers(await again.events(1)) == [2]
        await again.nothing_more()

    async def test_a_client_that_comes_back_as_recovering_gets_nothing_twice(self, resuming):
        worker = await resuming.start()
        client = await resuming.client(worker)
        await client.sign_in("7")
        place = json.loads((await client.subscribe("news", recover=True))["data"])
        await cut(resuming, worker, client)
        await point_written(resuming, "7")
        await resuming.publish_numbers("news", range(2))
        again = await resuming.client(worker)
        await again.subscribe("news")
        await again.send("pusher:unsubscribe", {"channel": "news"})
        since = {"epoch": place["epoch"], "offset": place["offset"]}
        await again.subscribe("news", recover=True, since=since)
        assert numbers(await again.events(2)) == [0, 1]
        await again.sign_in("7")
        await resuming.settled(worker, lambda: not worker.hub.user_resume.looking_up)
        await resuming.publish_numbers("news", range(2, 3))
        assert numbers(await again.events(1)) == [2]
        await again.nothing_more()

    @pytest.mark.parametrize("paced", [False, True])
    async def test_nothing_is_filled_in_for_a_connection_that_recovers(self, resuming, paced):
        worker = await resuming.start()
        await resuming.keep("", **({"max_rate": 1000, "latest": True} if paced else {}))
        await resuming.publish_numbers("news", range(2))
        client = await resuming.client(worker, query="&recover=1")
        await client.subscribe("news")
        (connection,) = worker.hub.open_connections
        local_channel = worker.hub.registry.local_channel("1", "news")
        worker.hub.replayer.replay_missed(local_channel, connection, 0, local_channel.history.last)
        assert not local_channel.audience.readers.fills
        await client.nothing_more()


class TestMembers:
    async def test_a_member_who_comes_back_gets_missed_messages(self, resuming):
        one, other = await resuming.start(), await resuming.start()
        client = await resuming.client(one)
        await client.subscribe("presence-p", {"user_id": "m"})
        await resuming.publish_numbers("presence-p", range(2))
        await client.events(2)
        await cut(resuming, one, client)
        await point_written(resuming, "m")
        await resuming.publish_numbers("presence-p", range(2, 80))
        again = await resuming.client(other)
        await again.subscribe("presence-p", {"user_id": "m"})
        await got_all(again, range(2, 80))
        await again.nothing_more()

    async def test_a_member_whose_old_socket_hangs_on_another_worker(self, resuming):
        one, other = await two_workers(resuming)
        with Proxy(("127.0.0.1", one.port)) as proxy:
            client = await client_through(proxy, resuming, one)
            await client.subscribe("presence-p", {"user_id": "m"})
            proxy.stall()
            await resuming.publish_numbers("presence-p", range(3))
            again = await resuming.client(other)
            await again.subscribe("presence-p", {"user_id": "m"})
            assert numbers(await again.events(3)) == [0, 1, 2]


class TestThePoint:
    async def test_it_is_shortly_before_the_last_bytes_and_expires_as_the_app_says(self, resuming):
        worker = await resuming.start()
        client = await resuming.client(worker)
        await client.sign_in("7")
        silent_s, ages_s = worker.janitor.silent_s, []

        def note(connection) -> float:
            ages_s.append(silent_s(connection))
            return ages_s[-1]

        worker.janitor.silent_s = note
        before_s = redis_time_s(resuming)
        await cut(resuming, worker, client)
        await point_written(resuming, "7")
        after_s = redis_time_s(resuming)
        point, ttl_s = point_of(resuming, "7")
        # The janitor doesn't count stalls as silence. One between the answer of Redis and its use makes the point
        # earlier, by no more than all of this took.
        earliest_s = before_s - ages_s[-1] - worker.hub.user_resume.timings.in_flight_s - (after_s - before_s)
        latest_s = after_s - ages_s[-1] - worker.hub.user_resume.timings.in_flight_s
        assert earliest_s - 0.1 < point / 1_000_000 < latest_s + 0.1
        assert ages_s[-1] >= 0.25
        assert 59 - (redis_time_s(resuming) - before_s) < ttl_s <= 60

    async def test_a_worker_that_ends_writes_one_for_every_user(self, resuming):
        ending, staying = await resuming.start(), await resuming.start()
        clients = [await resuming.client(ending) for _ in range(30)]
        for n, client in enumerate(clients):
            await client.sign_in(str(n))
        # A worker waits one second for Redis to have them all, and a busy machine may need longer.
        finish = ending.hub.user_resume.finish
        ending.hub.user_resume.finish = lambda: finish(60)
        ending.drain()
        await asyncio.wait_for(ending.life.until(Lifecycle.STOPPED), 60)
        assert all(point_of(resuming, str(n))[0] for n in range(30))
        await resuming.publish_numbers("news", range(3))
        again = await resuming.client(staying)
        await again.sign_in("7")
        await again.subscribe("news")
        assert numbers(await again.events(3)) == [0, 1, 2]

    async def test_it_is_written_although_redis_breaks_meanwhile(self, resuming):
        worker = await resuming.start()
        client = await resuming.client(worker)
        await client.sign_in("7")
        link, writes = worker.link, []
        run = link.run

        def run_and_break(script, *call):
            run(script, *call)
            if script is RESUME_POINT:
                writes.append(script)
                if len(writes) == 1:
                    link.drop("for the test")

        link.run = run_and_break
        await cut(resuming, worker, client)
        await point_written(resuming, "7")
        assert len(writes) == 2

    async def test_redis_has_it_before_the_worker_lets_go_of_the_user(self, resuming):
        worker = await resuming.start()
        client = await resuming.client(worker)
        await client.sign_in("7")
        await client.subscribe("presence-p", {"user_id": "m"})
        await resuming.settled(worker, lambda: not worker.registry.sync.in_flight)
        run, scripts = worker.link.run, []

        def note(script, *call):
            if script in (HOLD, RESUME_POINT):
                scripts.append(script)
            run(script, *call)

        worker.link.run = note
        await cut(resuming, worker, client)
        await point_written(resuming, "7")
        await resuming.settled(worker, lambda: worker.registry.local_channel("1", "presence-p") is None)
        assert scripts[:3] == [RESUME_POINT, RESUME_POINT, HOLD]

    async def test_apps_without_it_pay_nothing(self, bench):
        worker = await bench.start()
        await bench.keep("")
        client = await bench.client(worker)
        await client.sign_in("7")
        await client.subscribe("presence-p", {"user_id": "7"})
        assert worker.hub.user_resume.idle
        await cut(bench, worker, client)
        await bench.settled(worker, lambda: worker.registry.local_channel("1", "presence-p") is None)
        assert point_of(bench, "7")[0] is None

    async def test_nothing_is_remembered_of_closed_connections(self, resuming):
        worker = await resuming.start()
        client = await resuming.client(worker)
        await client.subscribe("presence-p", {"user_id": "m"})
        await client.sign_in("7")
        await client.subscribe("news")
        await cut(resuming, worker, client)
        assert not worker.hub.user_resume._attached
        await point_written(resuming, "7")
        await point_written(resuming, "m")
        await resuming.settled(worker, lambda: worker.hub.user_resume.idle)

    async def test_nothing_is_remembered_of_a_connection_that_closes_while_its_user_is_looked_up(self, resuming):
        worker = await resuming.start()
        await resuming.publish_numbers("news", range(3))
        asked, answered, ask = asyncio.Event(), asyncio.Event(), worker.link.ask

        async def ask_slowly(*command):
            if command[0] == b"HKEYS":
                asked.set()
                await answered.wait()
            return await ask(*command)

        worker.link.ask = ask_slowly
        client = await resuming.client(worker)
        await client.sign_in("7")
        await asked.wait()
        await client.subscribe("news")
        await cut(resuming, worker, client)
        assert not worker.hub.user_resume._attached
        answered.set()
        await resuming.settled(worker, lambda: worker.hub.user_resume.idle)

    async def test_nothing_is_remembered_of_channels_that_were_left(self, resuming):
        worker = await resuming.start()
        client = await resuming.client(worker)
        await client.subscribe("news")
        assert not worker.hub.user_resume.idle
        await client.send("pusher:unsubscribe", {"channel": "news"})
        await client.nothing_more()
        assert worker.hub.user_resume.idle

    async def test_a_user_that_the_connection_no_longer_is_gets_none(self, resuming):
        worker = await resuming.start()
        client = await resuming.client(worker)
        for user in ("left", "last"):
            await client.subscribe("presence-p", {"user_id": user})
            await client.send("pusher:unsubscribe", {"channel": "presence-p"})
        # The last one is also somewhere else.
        await client.subscribe("presence-p", {"user_id": "last"})
        await client.subscribe("presence-q", {"user_id": "last"})
        await client.send("pusher:unsubscribe", {"channel": "presence-p"})
        await client.nothing_more()
        await cut(resuming, worker, client)
        # Users are written in the order in which they came.
        await point_written(resuming, "last")
        assert point_of(resuming, "left")[0] is None

    async def test_a_member_who_left_before_the_connection_closed_gets_none(self, resuming):
        worker = await resuming.start()
        client, later = await resuming.client(worker), await resuming.client(worker)
        await client.subscribe("presence-p", {"user_id": "left"})
        await client.send("pusher:unsubscribe", {"channel": "presence-p"})
        await client.nothing_more()
        await later.sign_in("later")
        await resuming.settled(worker, lambda: not worker.hub.user_resume.looking_up)
        await cut(resuming, worker, client)
        await cut(resuming, worker, later)
        await point_written(resuming, "later")
        assert point_of(resuming, "left")[0] is None

    async def test_a_member_that_was_refused_gets_none(self, resuming):
        worker = await resuming.start()
        await resuming.change(max_presence_members=1)
        first, client = await resuming.client(worker), await resuming.client(worker)
        await first.subscribe("presence-p", {"user_id": "first"})
        await client.ask("presence-p", {"user_id": "refused"})
        await client.until("pusher:subscription_error")
        await client.until("pusher:error")
        await client.subscribe("presence-q", {"user_id": "member"})
        await cut(resuming, worker, client)
        await point_written(resuming, "member")
        assert point_of(resuming, "refused")[0] is None

    async def test_who_signed_in_stays_the_user_after_leaving_as_a_member(self, resuming):
        worker = await resuming.start()
        client = await resuming.client(worker)
        await client.sign_in("7")
        await client.subscribe("presence-p", {"user_id": "7"})
        await client.send("pusher:unsubscribe", {"channel": "presence-p"})
        await client.nothing_more()
        await cut(resuming, worker, client)
        await point_written(resuming, "7")

    async def test_a_member_who_comes_and_goes_is_looked_up_once(self, resuming):
        worker = await resuming.start()
        client = await resuming.client(worker)
        find, found = worker.hub.user_resume._find_point, []

        async def note(*args):
            found.append(args[1])
            return await find(*args)

        worker.hub.user_resume._find_point = note
        for _ in range(3):
            await client.subscribe("presence-p", {"user_id": "m"})
            await client.send("pusher:unsubscribe", {"channel": "presence-p"})
        await client.nothing_more()
        await resuming.settled(worker, lambda: not worker.hub.user_resume.looking_up)
        assert found == ["m"]

    async def test_turned_on_it_counts_for_open_connections(self, bench):
        worker = await bench.start()
        await bench.keep("")
        client = await bench.client(worker)
        await client.sign_in("7")
        await client.subscribe("presence-p", {"user_id": "m"})
        await bench.change(user_resume_s=60)
        await cut(bench, worker, client)
        await point_written(bench, "7")
        await point_written(bench, "m")
        await bench.change(user_resume_s=0)
        await bench.settled(worker, lambda: worker.hub.user_resume.idle)
