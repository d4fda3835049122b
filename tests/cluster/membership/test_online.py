"""Watched users over several workers on a real Redis."""

import asyncio
from dataclasses import replace
from types import SimpleNamespace

import pytest

from redpoll.cluster.membership.online import Online
from redpoll.cluster.membership.reaper import Reaper
from redpoll.cluster.membership.timings import Timings
from redpoll.cluster.redis.keys import SHARDS, Keys
from redpoll.loop.slices import SLICE_S


@pytest.fixture
async def a(start_worker, make_app):
    worker = await start_worker(1)
    worker.app = make_app(watchlist=True)
    return worker


@pytest.fixture
async def b(start_worker, make_app):
    worker = await start_worker(2)
    worker.app = make_app(watchlist=True)
    return worker


def look_again(worker):
    """The second look after a break, which otherwise comes after `second_look_s`."""
    online = worker.registry.online
    for watched in online.watched.values():
        if watched.timer is not None:
            watched.stop_timer()
            online.look_again(watched)


async def until_in_redis(worker, user, n, wait):
    def confirmed():
        local_channel = worker.registry.local_channel("7", f"%u:{user}")
        return (local_channel.confirmed if local_channel else 0) == n and not (local_channel and local_channel.busy)

    await wait(confirmed)


async def test_first_state_is_sent_at_once_and_every_change_after_it(a, b, wait_until):
    b.registry.signed_in.sign_in(b.app, "on")
    await until_in_redis(b, "on", 1, wait_until)
    assert a.registry.online.watch("7", "on") is None
    assert a.registry.online.watch("7", "off") is None
    await wait_until(lambda: sorted(a.sockets.states) == [("off", False), ("on", True)])
    b.registry.signed_in.sign_in(b.app, "off")
    await wait_until(lambda: a.sockets.states[2:] == [("off", True)])
    b.registry.signed_in.sign_out("7", "on")
    await wait_until(lambda: a.sockets.states[3:] == [("on", False)])
    assert a.sockets.faults == []


async def test_later_watchers_are_sent_what_is_known(a, wait_until):
    a.registry.online.watch("7", "u")
    await wait_until(lambda: a.sockets.states)
    assert a.registry.online.watch("7", "u") is False
    assert a.sockets.states == [("u", False)]


async def test_own_users_are_watched_like_others(a, wait_until):
    a.registry.signed_in.sign_in(a.app, "u")
    a.registry.online.watch("7", "u")
    await wait_until(lambda: a.sockets.states[-1:] == [("u", True)])
    a.registry.signed_in.sign_out("7", "u")
    await wait_until(lambda: a.sockets.states[-1:] == [("u", False)])


async def test_own_user_is_not_reported_offline_while_watchlists_are_turned_off_and_on(a, make_app, wait_until):
    off = make_app(watchlist=False)
    a.registry.signed_in.sign_in(off, "u")
    a.registry.online.watch("7", "u")
    a.registry.online.watch("7", "absent")
    # Asked and answered after the question about the user.
    await wait_until(lambda: a.sockets.states == [("absent", False)])
    a.registry.app_changed(off, a.app)
    await wait_until(lambda: a.sockets.states[1:] == [("u", True)])


async def test_own_user_who_returned_is_never_reported_offline_before_redis_knows(a, wait_until):
    a.registry.signed_in.sign_in(a.app, "u")
    await until_in_redis(a, "u", 1, wait_until)
    a.registry.signed_in.sign_out("7", "u")
    await asyncio.sleep(0)
    assert a.registry.local_channel("7", "%u:u").busy
    # The return waits for the call that removes the user. Our question runs between the two.
    a.registry.signed_in.sign_in(a.app, "u")
    assert a.registry.online.watch("7", "u") is None
    await wait_until(lambda: a.sockets.states)
    await until_in_redis(a, "u", 1, wait_until)
    assert a.sockets.states == [("u", True)]
    a.registry.signed_in.sign_out("7", "u")
    await wait_until(lambda: a.sockets.states[1:] == [("u", False)])


async def test_own_user_who_left_again_before_redis_knew_of_the_return_is_offline(a, wait_until):
    a.registry.signed_in.sign_in(a.app, "u")
    await until_in_redis(a, "u", 1, wait_until)
    a.registry.signed_in.sign_out("7", "u")
    await asyncio.sleep(0)
    assert a.registry.local_channel("7", "%u:u").busy
    a.registry.signed_in.sign_in(a.app, "u")
    a.registry.online.watch("7", "u")
    a.registry.signed_in.sign_out("7", "u")
    await wait_until(lambda: a.sockets.states == [("u", False)])


async def test_reload_of_a_page_is_seen_by_no_watcher(a, start_worker, make_app, wait_until):
    b = await start_worker(2)
    b.app = make_app(watchlist=True)
    # However slow the machine is, the reload is quicker.
    a.registry.online.timings = replace(a.registry.online.timings, offline_s=60)
    a.registry.online.watch("7", "u")
    b.registry.signed_in.sign_in(b.app, "u")
    await wait_until(lambda: a.sockets.states[-1:] == [("u", True)])
    states = list(a.sockets.states)
    watched = a.registry.online.watched["7", "u"]
    for _ in range(5):
        b.registry.signed_in.sign_out("7", "u")
        await until_in_redis(b, "u", 0, wait_until)
        await wait_until(lambda: watched.timer)
        b.registry.signed_in.sign_in(b.app, "u")
        await until_in_redis(b, "u", 1, wait_until)
        await wait_until(lambda: watched.timer is None)
    assert a.sockets.states == states


async def test_user_on_two_workers_is_offline_when_both_have_released_it(a, b, wait_until):
    a.registry.online.watch("7", "u")
    for worker in (a, b):
        worker.registry.signed_in.sign_in(worker.app, "u")
    await wait_until(lambda: a.sockets.states[-1:] == [("u", True)])
    b.registry.signed_in.sign_out("7", "u")
    await until_in_redis(b, "u", 0, wait_until)
    await asyncio.sleep(0.3)
    assert a.sockets.states[-1] == ("u", True)
    a.registry.signed_in.sign_out("7", "u")
    await wait_until(lambda: a.sockets.states[-1] == ("u", False))


async def test_nothing_is_reported_of_users_who_are_no_longer_watched(a, b, wait_until):
    a.registry.online.watch("7", "u")
    a.registry.online.watch("7", "u")
    await wait_until(lambda: a.sockets.states)
    a.registry.online.unwatch("7", "u")
    b.registry.signed_in.sign_in(b.app, "u")
    await wait_until(lambda: a.sockets.states[-1] == ("u", True))
    b.registry.signed_in.sign_out("7", "u")
    await until_in_redis(b, "u", 0, wait_until)
    a.registry.online.unwatch("7", "u")
    # When it is watched again in the same tick, Redis is asked again and the old delay is cancelled.
    assert a.registry.online.watch("7", "u") is None
    await wait_until(lambda: a.sockets.states[-1] == ("u", False))
    a.registry.online.unwatch("7", "u")
    await a.link.ask(b"PING")
    assert await a.link.ask(b"PUBSUB", b"CHANNELS", b"*%u*") == []


async def test_topics_and_questions_go_in_one_write(a, wait_until):
    commands = []
    call = a.link.call

    def note(*command, **more):
        commands.append(command[0])
        call(*command, **more)

    a.link.call = note
    for n in range(100):
        a.registry.online.watch("7", f"u{n}")
    await wait_until(lambda: len(a.sockets.states) == 100)
    commands = [command for command in commands if command in (b"SUBSCRIBE", b"EXISTS")]
    assert commands == [b"SUBSCRIBE"] + [b"EXISTS"] * 100


async def test_users_of_a_killed_worker_go_offline_once_when_it_is_reaped(a, b, link, keys, wait_until):
    for user in ("u", "v"):
        a.registry.online.watch("7", user)
        b.registry.signed_in.sign_in(b.app, user)
    a.registry.signed_in.sign_in(a.app, "v")
    await wait_until(lambda: {("u", True), ("v", True)} <= set(a.sockets.states))
    await b.kill()
    sent = len(a.sockets.states)
    await Reaper(link, keys, "ffffffffffff").reap(b.registry.worker_id)
    await wait_until(lambda: len(a.sockets.states) > sent)
    await asyncio.sleep(0.3)
    assert a.sockets.states[sent:] == [("u", False)]


async def test_break_is_seen_by_no_watcher_and_changes_during_it_are_sent_afterwards(a, b, wait_until):
    for user in ("stays", "goes", "comes"):
        a.registry.online.watch("7", user)
    for user in ("stays", "goes"):
        b.registry.signed_in.sign_in(b.app, user)
    await wait_until(lambda: {("stays", True), ("goes", True), ("comes", False)} <= set(a.sockets.states))
    sent = len(a.sockets.states)
    a.link.drop("for the test")
    b.registry.signed_in.sign_out("7", "goes")
    b.registry.signed_in.sign_in(b.app, "comes")
    await wait_until(lambda: len(a.sockets.states) == sent + 2)
    assert a.sockets.states[sent:] == [("comes", True), ("goes", False)]
    assert a.sockets.faults == []


async def test_redis_that_lost_everything_reports_no_user_offline(a, b, link, keys, wait_until):
    for worker in (a, b):
        worker.registry.online.timings = replace(worker.registry.online.timings, second_look_s=60)
        worker.registry.online.watch("7", "u")
        worker.registry.online.watch("7", "v")
        worker.registry.signed_in.sign_in(worker.app, "u" if worker is a else "v")
    await wait_until(lambda: {("u", True), ("v", True)} <= set(a.sockets.states) & set(b.sockets.states))
    sent = [len(worker.sockets.states) for worker in (a, b)]
    await link.ask(b"FLUSHALL")
    await wait_until(lambda: a.registry.worker_id.endswith(".1") and b.registry.worker_id.endswith(".1"))
    for user in ("u", "v"):
        while await link.ask(b"HVALS", keys.counts("7", f"%u:{user}")) != [b"1"]:
            await asyncio.sleep(0.005)
    for worker in (a, b):
        look_again(worker)
        await worker.link.ask(b"PING")
    assert [len(worker.sockets.states) for worker in (a, b)] == sent
    b.registry.signed_in.sign_out("7", "v")
    await wait_until(lambda: a.sockets.states[-1] == ("v", False))


async def test_states_are_right_again_when_redis_restarts(own_redis, start_worker, make_app, wait_until):
    a, b = [await start_worker(k, server=own_redis) for k in (1, 2)]
    b.app = make_app(watchlist=True)
    for user in ("stays", "goes", "comes"):
        a.registry.online.watch("7", user)
    for user in ("stays", "goes"):
        b.registry.signed_in.sign_in(b.app, user)
    await wait_until(lambda: {("stays", True), ("goes", True), ("comes", False)} <= set(a.sockets.states))
    sent = len(a.sockets.states)
    own_redis.kill()
    b.registry.signed_in.sign_out("7", "goes")
    b.registry.signed_in.sign_in(b.app, "comes")
    own_redis.start()
    await wait_until(lambda: len(a.sockets.states) == sent + 2)
    await asyncio.sleep(0.5)
    assert sorted(a.sockets.states[sent:]) == [("comes", True), ("goes", False)]


async def test_question_that_redis_fails_is_asked_again(a, link, keys, wait_until, redis):
    await link.ask(b"ACL", b"SETUSER", b"default", b"-exists")
    try:
        a.registry.online.watch("7", "u")
        await wait_until(lambda: a.registry.errors >= 2)
        assert a.sockets.states == []
    finally:
        await link.ask(b"ACL", b"SETUSER", b"default", b"+exists")
    await wait_until(lambda: a.sockets.states == [("u", False)])


class Asked:
    """A link that notes what is asked and answers when the test says so. By its clock, a slice has two steps."""

    def __init__(self):
        self.subscribed, self.unsubscribed, self.questions, self.states = [], [], [], []
        self.now = 0.0
        users = SimpleNamespace(here=lambda app_id, user_id: False)
        self.online = Online(self, Keys(), users, SimpleNamespace(user_state=self.user_state), Timings())
        self.online._slices.clock = self.clock

    def clock(self):
        self.now += 0.6 * SLICE_S
        return self.now

    def subscribe(self, topics, done):
        self.subscribed += topics

    def unsubscribe(self, topics, done):
        self.unsubscribed += topics

    def call(self, *command, done):
        self.questions.append((command[1].decode().rpartition(":")[2], done))

    def user_state(self, app_id, user_id, online):
        self.states.append((user_id, online))

    def answer(self, reply):
        questions, self.questions = self.questions, []
        for _, done in questions:
            done(reply)

    @property
    def names(self):
        return sorted(name for name, _ in self.questions)


@pytest.fixture
def asked():
    return Asked()


async def passes(count):
    for _ in range(count):
        await asyncio.sleep(0)


async def test_after_a_break_each_pass_of_the_loop_asks_for_a_slice_of_the_users(asked):
    users = sorted(f"u{n}" for n in range(1000))
    for user in users:
        asked.online.watch("7", user)
    asked.online.connected(range(SHARDS))
    asked.online.watch("7", "new")
    assert asked.questions == []
    for number in range(1, 5):
        await passes(1)
        # One step in the first slice is that of the new user.
        assert len(asked.questions) == 200 * number - 99
        assert asked.questions[0][0] == "new"
    await passes(4)
    assert set(asked.names) == {*users, "new"}
    assert len(set(asked.subscribed)) == len(asked.subscribed) == 1001
    # Our name was given up: everything is asked for again, on the same connection.
    asked.answer(True)
    asked.online.connected(range(SHARDS))
    await passes(10)
    assert asked.names == sorted([*users, "new"])
    assert len(asked.subscribed) == 1001


async def test_break_while_users_are_asked_for_begins_with_all_of_them_again(asked):
    for n in range(1000):
        asked.online.watch("7", f"u{n}")
    asked.online.connected(range(SHARDS))
    await passes(2)
    assert len(asked.subscribed) == 400
    asked.online.connection_lost(range(SHARDS))
    asked.online.watch("7", "new")
    asked.online.unwatch("7", "u0")
    await passes(4)
    assert len(asked.subscribed) == 400
    asked.subscribed, asked.questions = [], []
    asked.online.connected(range(SHARDS))
    await passes(2)
    # A part of the shards is lost again.
    half = range(SHARDS // 2)
    asked.online.connection_lost(half)
    kept = {watched.user_id for watched in asked.online.watched.values() if watched.shard not in half}
    before = set(asked.names)
    asked.questions = []
    await passes(20)
    assert set(asked.names) <= kept <= before | set(asked.names)
    asked.questions = []
    asked.online.connected(half)
    await passes(20)
    assert asked.names == sorted({*(f"u{n}" for n in range(1, 1000)), "new"} - kept)
    # Nothing was subscribed any more that could be unsubscribed.
    assert asked.unsubscribed == []


async def test_user_who_is_watched_again_is_subscribed_after_the_unsubscribe(asked):
    asked.online.connected(range(SHARDS))
    asked.online.watch("7", "u")
    await passes(2)
    asked.online.unwatch("7", "u")
    asked.online.watch("7", "u")
    topics = asked.subscribed = asked.unsubscribed = []
    await passes(4)
    assert len(topics) == 2
    assert topics[0] == topics[1]
    asked.online.close()
    asked.online.watch("7", "v")
    await passes(4)
    assert len(topics) == 2


async def test_delay_that_began_before_a_break_reports_nothing(asked):
    asked.online.timings = replace(asked.online.timings, offline_s=0)
    asked.online.connected(range(SHARDS))
    asked.online.watch("7", "u")
    await passes(2)
    asked.answer(True)
    watched = asked.online.watched["7", "u"]
    asked.online.push(watched.topic, b"f 0 0")
    assert watched.timer is not None
    asked.online.connection_lost(range(SHARDS))
    while watched.timer is not None:
        await asyncio.sleep(0)
    assert asked.states == [("u", True)]
