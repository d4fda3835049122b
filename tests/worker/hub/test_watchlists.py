"""Watchlist frames, as pusher-js routes them, over two workers."""

import asyncio
import json
import random

import msgspec
import pytest

from redpoll.cluster.membership.timings import Timings

EVENTS = "pusher_internal:watchlist_events"


def groups(frame: dict) -> dict[str, list[str]]:
    """`{"online": [...], "offline": [...]}` of a frame; a group without users is missing."""
    assert set(frame) == {"event", "data"}
    return {group["name"]: group["user_ids"] for group in json.loads(frame["data"])["events"]}


async def known(bench, worker, user: str) -> None:
    """Redis knows that this user is signed in on this worker; the success frame doesn't wait for that."""

    def confirmed() -> bool:
        held = worker.registry.local_channel("1", f"%u:{user}")
        return held is not None and held.confirmed == 1

    await bench.settled(worker, confirmed)


@pytest.fixture
async def pair(bench):
    """Two workers and an app with watchlists, without the delay before a user counts as offline."""
    timings = Timings(offline_s=0.05, second_look_s=0.5)
    workers = [await bench.start(timings=timings), await bench.start(timings=timings)]
    await bench.change(watchlist=True)
    return workers


class TestTheFirstFrame:
    async def test_it_follows_the_success_frame_and_has_the_whole_list(self, bench, pair):
        one, other = pair
        there = await bench.client(other)
        await there.sign_in("8")
        await known(bench, other, "8")
        client = await bench.client(one)
        await client.sign_in("7", watchlist=["8", "9", "7"])
        frame = await client.next()
        assert frame["event"] == EVENTS
        # Users who watch themselves are online: they have just signed in.
        assert groups(frame) == {"online": ["8", "7"], "offline": ["9"]}
        await client.nothing_more()

    async def test_a_group_without_users_is_left_out(self, bench, pair):
        client = await bench.client(pair[0])
        await client.sign_in("7", watchlist=["8", "9"])
        assert groups(await client.next()) == {"offline": ["8", "9"]}

    async def test_no_list_or_an_empty_one_makes_no_frame(self, bench, pair):
        client = await bench.client(pair[0])
        await client.sign_in("7")
        await client.sign_in("7", watchlist=[])
        await client.nothing_more()
        assert pair[0].hub.users.watchlists.watched == 0

    async def test_a_second_watcher_of_the_same_user_gets_its_frame_at_once(self, bench, pair):
        first, second = await bench.client(pair[0]), await bench.client(pair[0])
        await first.sign_in("7", watchlist=["9"])
        assert groups(await first.next()) == {"offline": ["9"]}
        await second.sign_in("8", watchlist=["9"])
        assert groups(await second.next()) == {"offline": ["9"]}
        await first.nothing_more()
        assert pair[0].hub.users.watchlists.watched == 1

    async def test_the_same_user_again_replaces_the_list(self, bench, pair):
        client = await bench.client(pair[0])
        await client.sign_in("7", watchlist=["8", "9"])
        await client.until(EVENTS)
        await client.sign_in("7", watchlist=["9", "10"])
        assert groups(await client.next()) == {"offline": ["9", "10"]}
        dropped, staying = await bench.client(pair[1]), await bench.client(pair[1])
        await dropped.sign_in("8")
        await staying.sign_in("10")
        assert groups(await client.next()) == {"online": ["10"]}
        assert pair[0].hub.users.watchlists.watched == 2

    async def test_more_than_a_hundred_are_truncated_with_an_error(self, bench, pair):
        client = await bench.client(pair[0])
        await client.sign_in("7", watchlist=[str(n) for n in range(1000, 1105)])
        error = await client.next()
        assert error["data"]["code"] == 4302
        assert len(groups(await client.next())["offline"]) == 100

    async def test_without_the_setting_no_frame_is_sent(self, bench):
        worker = await bench.start()
        client = await bench.client(worker)
        await client.sign_in("7", watchlist=["7", "8"])
        await client.nothing_more()
        assert worker.hub.users.watchlists.watched == 0


class TestChanges:
    async def test_changes_are_sent_across_workers(self, bench, pair):
        one, other = pair
        near, far = await bench.client(one), await bench.client(other)
        for client in (near, far):
            await client.sign_in("w", watchlist=["8"])
            await client.until(EVENTS)
        tab, second_tab = await bench.client(other), await bench.client(one)
        await tab.sign_in("8")
        for client in (near, far):
            assert groups(await client.next()) == {"online": ["8"]}
        await second_tab.sign_in("8")
        await known(bench, one, "8")
        await tab.socket.close()
        await bench.settled(other, lambda: len(other.hub.open_connections) == 1)
        for client in (near, far):
            await client.nothing_more()
        second_tab.socket.transport.abort()
        for client in (near, far):
            assert groups(await client.next()) == {"offline": ["8"]}

    async def test_a_page_reload_sends_nothing(self, bench, pair):
        one, other = pair
        one.registry.online.timings = Timings(offline_s=60.0)
        watcher, page = await bench.client(one), await bench.client(other)
        await page.sign_in("8")
        await known(bench, other, "8")
        await watcher.sign_in("w", watchlist=["8"])
        assert groups(await watcher.until(EVENTS)) == {"online": ["8"]}
        await page.socket.close()
        page = await bench.client(other)
        await page.sign_in("8")
        await watcher.nothing_more()

    async def test_changes_of_one_loop_pass_are_one_frame(self, bench, pair):
        watcher = await bench.client(pair[0])
        await watcher.sign_in("w", watchlist=["1", "2", "3"])
        await watcher.until(EVENTS)
        watchlists = pair[0].hub.users.watchlists
        for user, online in (("1", True), ("2", True), ("3", True), ("2", False)):
            watchlists.user_state("1", user, online)
        # 2 came and went before a frame was sent.
        assert groups(await watcher.next()) == {"online": ["1", "3"]}
        watchlists.user_state("1", "1", False)
        watchlists.user_state("1", "2", True)
        assert groups(await watcher.next()) == {"online": ["2"], "offline": ["1"]}
        await watcher.nothing_more()

    async def test_members_of_presence_channels_are_not_online(self, bench, pair):
        watcher, member = await bench.client(pair[0]), await bench.client(pair[0])
        await watcher.sign_in("w", watchlist=["8"])
        await watcher.until(EVENTS)
        await member.subscribe("presence-p", {"user_id": "8"})
        await watcher.nothing_more()

    async def test_users_of_another_app_are_other_users(self, bench, pair):
        await bench.put("2", msgspec.structs.replace(bench.other, watchlist=True))
        one, _ = pair
        await bench.settled(one, lambda: one.directory.by_id["2"].watchlist)
        watcher = await bench.client(one)
        stranger = await bench.client(one, bench.other)
        await watcher.sign_in("w", watchlist=["8"])
        await watcher.until(EVENTS)
        await stranger.sign_in("8", bench.other, watchlist=["w"])
        assert groups(await stranger.next()) == {"offline": ["w"]}
        await watcher.nothing_more()


class TestTheEnd:
    async def test_users_are_not_watched_after_the_watchers_closed(self, bench, pair):
        worker = pair[0]
        clients = [await bench.client(worker) for _ in range(3)]
        for n, client in enumerate(clients):
            await client.sign_in(f"w{n}", watchlist=["8", f"{n}"])
            await client.until(EVENTS)
        assert worker.hub.users.watchlists.watched == 4
        for client in clients:
            client.socket.transport.abort()
        await bench.settled(worker, lambda: not len(worker.hub.open_connections))
        assert worker.hub.users.watchlists.watched == 0
        assert worker.statistics.loop_exceptions_total == 0

    async def test_a_list_that_was_never_sent_is_forgotten_too(self, own_redis, bench_on):
        bench = await bench_on(own_redis)
        worker = await bench.start()
        await bench.change(watchlist=True)
        client, other = await bench.client(worker), await bench.client(worker)
        own_redis.pause()
        for watcher in (client, other):
            await watcher.sign_in("7", watchlist=["8", "9"])
        client.socket.transport.abort()
        await bench.settled(worker, lambda: len(worker.hub.open_connections) == 1)
        own_redis.resume()
        assert groups(await other.until(EVENTS)) == {"offline": ["8", "9"]}
        assert worker.statistics.loop_exceptions_total == 0


class TestTheSwitch:
    async def test_turned_on_signed_in_clients_get_their_lists(self, bench):
        workers = [await bench.start(), await bench.start()]
        watcher, user = await bench.client(workers[0]), await bench.client(workers[1])
        await watcher.sign_in("w", watchlist=["8", "9"])
        await user.sign_in("8")
        await bench.change(watchlist=True)
        # The other worker may report a moment later that it has the user.
        seen: dict[str, str] = {}
        async with asyncio.timeout(60):
            while seen != {"8": "online", "9": "offline"}:
                for name, users in groups(await watcher.next()).items():
                    seen.update(dict.fromkeys(users, name))

    async def test_lists_that_may_be_turned_on_are_known_by_app_until_their_clients_close(self, bench):
        """When one app turned them on, the lists of all apps were looked at."""
        worker = await bench.start()
        clients = [await bench.client(worker), await bench.client(worker, bench.other)]
        for client, app in zip(clients, (bench.app, bench.other), strict=True):
            await client.sign_in("w", app, watchlist=["7"])
        users = worker.hub.users
        assert {app_id: len(lists) for app_id, lists in users._wanted.items()} == {"1": 1, "2": 1}
        for client in clients:
            await client.socket.close()
        await bench.settled(worker, lambda: not users._wanted)

    async def test_on_and_off_and_on_again_many_lists_are_right(self, bench):
        worker = await bench.start()
        clients = [await bench.client(worker) for _ in range(120)]
        for n, client in enumerate(clients):
            await client.sign_in(f"w{n}", watchlist=["8", f"w{n}"])
        for on in (True, False, True):
            bench.app = msgspec.structs.replace(bench.app, watchlist=on)
            await bench.put("1", bench.app)
        left = dict(enumerate(clients))
        left.pop(5).socket.transport.abort()
        # A list may have been sent when it was first turned on, so no frame shows that the last change has come.
        await bench.settled(worker, lambda: worker.directory.version == bench.version)
        await bench.settled(worker, lambda: len(worker.hub.open_connections) == 119)
        for n, client in left.items():
            # No user who is signed in all the time is reported offline in between.
            assert groups(await client.until(EVENTS)) == {"online": [f"w{n}"], "offline": ["8"]}
        for n, client in left.items():
            await client.send("pusher:ping")
            while (frame := await client.next())["event"] != "pusher:pong":
                assert groups(frame) == {"online": [f"w{n}"], "offline": ["8"]}
        assert worker.hub.users.watchlists.watched == 120
        assert worker.statistics.loop_exceptions_total == 0

    async def test_turned_off_nothing_more_is_sent(self, bench, pair):
        watcher, user = await bench.client(pair[0]), await bench.client(pair[1])
        await watcher.sign_in("w", watchlist=["8"])
        await watcher.until(EVENTS)
        await bench.change(watchlist=False)
        await user.sign_in("8")
        await watcher.nothing_more()
        assert pair[0].hub.users.watchlists.watched == 0


async def test_a_hundred_watch_the_same_hundred_across_a_restart_of_redis(own_redis, bench_on):
    """Every watcher gets each user once, and no changes when Redis comes back with its data."""
    bench = await bench_on(own_redis)
    workers = [await bench.start(), await bench.start()]
    await bench.change(watchlist=True)
    ids = [str(n) for n in range(20)]
    clients = [await bench.client(workers[n % 2]) for n in range(20)]
    for user, client in zip(ids, clients, strict=True):
        await client.sign_in(user, watchlist=ids)
    for client in clients:
        online: set[str] = set()
        while len(online) < 20:
            frame = groups(await client.until(EVENTS))
            assert not online & set(frame.get("online", ()))
            online |= set(frame.get("online", ()))
    own_redis.kill()
    for worker in workers:
        await bench.settled(worker, lambda worker=worker: not worker.link.up)
    own_redis.start()
    for worker in workers:
        await bench.settled(worker, lambda worker=worker: worker.link.up and worker.link.unanswered == 0)
    for client in clients:
        await client.nothing_more()


@pytest.mark.parametrize("seed", range(3))
async def test_after_random_changes_every_watcher_has_the_right_states(bench, pair, seed):
    """Random sign-ins, new lists and ends on two workers, a broken connection to Redis in between."""
    dice = random.Random(seed)
    users = [f"u{n}" for n in range(6)]
    here: dict[str, list] = {user: [] for user in users}
    watchers = [(await bench.client(dice.choice(pair)), set(users[:4])) for _ in range(6)]
    for client, watched in watchers:
        await client.sign_in("w", watchlist=sorted(watched))
    for step in range(60):
        user = dice.choice(users)
        what = dice.random()
        if what < 0.45:
            client = await bench.client(dice.choice(pair))
            await client.sign_in(user)
            here[user].append(client)
        elif what < 0.85 and here[user]:
            here[user].pop().socket.transport.abort()
        else:
            client, watched = dice.choice(watchers)
            watched.clear()
            watched.update(dice.sample(users, dice.randint(1, 6)))
            await client.sign_in("w", watchlist=sorted(watched))
        if step in (20, 40):
            pair[step == 40].link.drop("cut by the test")
    truth = {user: "online" if here[user] else "offline" for user in users}
    for client, watched in watchers:
        # A new list is sent in full, so earlier frames don't matter.
        known: dict[str, str] = {}
        for frame in client.seen:
            if frame["event"] == EVENTS:
                for name, ids in groups(frame).items():
                    known.update(dict.fromkeys(ids, name))
        async with asyncio.timeout(60):
            while {user: known.get(user) for user in watched} != {user: truth[user] for user in watched}:
                for name, ids in groups(await client.until(EVENTS)).items():
                    known.update(dict.fromkeys(ids, name))
    assert sum(worker.statistics.loop_exceptions_total for worker in pair) == 0
