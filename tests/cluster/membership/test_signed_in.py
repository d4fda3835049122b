"""Signed-in users in Redis. test_online.py covers watching them."""

import asyncio
import random
from collections import defaultdict
from types import SimpleNamespace

import pytest

from redpoll.cluster.membership.reaper import Reaper
from redpoll.cluster.membership.signed_in import SignedInUsers
from redpoll.loop.slices import SLICE_S


@pytest.fixture
async def a(start_worker, make_app):
    worker = await start_worker(1)
    worker.app = make_app(watchlist=True)
    return worker


async def signed_in(link, keys, user):
    return sum(int(n) for n in await link.ask(b"HVALS", keys.counts("7", f"%u:{user}")))


async def until_signed_in(link, keys, user, n):
    while await signed_in(link, keys, user) != n:
        await link.ask(b"PING")


async def test_connections_of_a_user_are_counted_and_gone_with_the_last(a, link, keys, wait_until, truth):
    for _ in range(3):
        a.registry.signed_in.sign_in(a.app, "u")
    await until_signed_in(link, keys, "u", 3)
    a.registry.signed_in.sign_out("7", "u")
    await until_signed_in(link, keys, "u", 2)
    a.registry.signed_in.sign_out("7", "u")
    a.registry.signed_in.sign_out("7", "u")
    await wait_until(lambda: not [*a.registry.local_channels()])
    assert await truth.channel_keys() == []


async def test_signed_in_user_is_no_channel(a, link, keys, truth):
    a.registry.signed_in.sign_in(a.app, "u")
    await until_signed_in(link, keys, "u", 1)
    assert a.sockets.opened_channels == []
    assert not [key for key in await truth.channel_keys() if key.split(b":")[2] == b"a"]
    assert await link.ask(b"PUBSUB", b"CHANNELS", b"*%u*") == []


async def test_without_a_watchlist_redis_hears_nothing_until_it_is_turned_on(
    a, make_app, link, keys, wait_until, truth
):
    a.app = make_app()
    for user in ("u", "u", "v"):
        a.registry.signed_in.sign_in(a.app, user)
    assert not [*a.registry.local_channels()]
    a.registry.app_changed(a.app, make_app(watchlist=True))
    await until_signed_in(link, keys, "u", 2)
    await until_signed_in(link, keys, "v", 1)
    a.registry.signed_in.sign_out("7", "u")
    await until_signed_in(link, keys, "u", 1)
    a.registry.app_changed(make_app(watchlist=True), a.app)
    await wait_until(lambda: not [*a.registry.local_channels()])
    assert await truth.channel_keys() == []
    a.registry.signed_in.sign_out("7", "u")
    a.registry.signed_in.sign_out("7", "v")
    assert not [*a.registry.local_channels()]


@pytest.mark.parametrize("emptied", [False, True])
async def test_after_a_break_users_are_asserted_again(a, link, keys, wait_until, emptied):
    a.registry.signed_in.sign_in(a.app, "stays")
    a.registry.signed_in.sign_in(a.app, "goes")
    await until_signed_in(link, keys, "goes", 1)
    if emptied:
        await link.ask(b"FLUSHALL")
    a.link.drop("for the test")
    a.registry.signed_in.sign_out("7", "goes")
    a.registry.signed_in.sign_in(a.app, "comes")
    await until_signed_in(link, keys, "comes", 1)
    await until_signed_in(link, keys, "stays", 1)
    await until_signed_in(link, keys, "goes", 0)


async def test_sign_in_whose_reply_was_lost_is_undone_after_the_sign_out(a, link, keys, wait_until, truth):
    a.deafen()
    a.registry.signed_in.sign_in(a.app, "u")
    await until_signed_in(link, keys, "u", 1)
    a.link.drop("for the test")
    a.registry.signed_in.sign_out("7", "u")
    await wait_until(lambda: not [*a.registry.local_channels()])
    assert await truth.channel_keys() == []


async def test_killed_worker_leaves_no_user(a, link, keys, truth):
    a.registry.signed_in.sign_in(a.app, "u")
    await until_signed_in(link, keys, "u", 1)
    await a.kill()
    await Reaper(link, keys, "ffffffffffff").reap(a.registry.worker_id)
    assert await truth.channel_keys() == []


async def test_server_to_user_channel_is_joined_when_its_topic_is_subscribed(a, link, keys, wait_until, truth):
    channel = "#server-to-user-u"
    first, second = a.join(channel), a.join(channel)
    assert first.state == "pending"
    await wait_until(lambda: first.state == second.state == "attached")
    assert await link.ask(b"PUBLISH", keys.topic("7", channel), b"e 0 0 - - 0 1\ne1") == 1
    await wait_until(lambda: first.events == second.events == [b"e 0 0 - - 0 1\ne1"])
    assert await truth.channel_keys() == []
    third = a.join(channel)
    await wait_until(lambda: third.state == "attached")
    for _ in range(3):
        a.link.drop("for the test")
        late = a.join(channel)
        await wait_until(lambda late=late: late.state == "attached")
        assert await link.ask(b"PUBLISH", keys.topic("7", channel), b"e 0 0 - - 0 1\ne2") == 1
    gone = a.join(channel)
    a.leave(gone)
    a.leave_all()
    await wait_until(lambda: not [*a.registry.local_channels()])
    await a.link.ask(b"PING")
    assert await a.link.ask(b"PUBSUB", b"CHANNELS", b"*:t:*") == []
    assert gone.state == "left"


class Told:
    """What Redis is told, without one: the numbers by user, and how often. By its clock, a slice has ten users."""

    def __init__(self):
        self.numbers = defaultdict(lambda: SimpleNamespace(attached=0))
        self.times = 0
        self.now = 0.0
        self.users = SignedInUsers(self)
        self.users._slices.clock = self.clock

    def hold(self, app_id, channel, kind):
        return self.numbers[channel.removeprefix("%u:")]

    def mark_dirty(self, local_channel):
        self.times += 1

    def clock(self):
        self.now += 0.11 * SLICE_S
        return self.now

    @property
    def online(self):
        return {user: told.attached for user, told in self.numbers.items() if told.attached}


@pytest.fixture
def told():
    return Told()


async def test_after_a_switch_each_pass_of_the_loop_tells_redis_of_a_slice_of_the_users(told, make_app):
    for n in range(95):
        told.users.sign_in(make_app(), f"u{n}")
    for on in (True, False):
        told.times = 0
        told.users.switch("7", on)
        for passes in range(12):
            assert told.times == min(10 * passes, 95)
            assert all(told.users.here("7", f"u{n}") for n in range(95))
            await asyncio.sleep(0)
        assert len(told.online) == (95 if on else 0)


async def test_user_who_comes_or_goes_does_not_wait_for_the_others(told, make_app):
    off, on = make_app(), make_app(watchlist=True)
    for n in range(95):
        told.users.sign_in(off, f"u{n}")
    told.users.sign_in(on, "u0")
    told.users.sign_in(on, "new")
    told.users.sign_out("7", "u1")
    assert told.online == {"u0": 2, "new": 1}
    for _ in range(12):
        await asyncio.sleep(0)
    assert len(told.online) == 95
    told.users.switch("7", False)
    told.users.sign_in(off, "u2")
    told.users.sign_out("7", "u3")
    assert set(told.numbers) - set(told.online) >= {"u2", "u3"}
    for _ in range(12):
        await asyncio.sleep(0)
    assert told.online == {}


async def test_switch_back_under_way_changes_only_what_was_told(told, make_app):
    for n in range(95):
        told.users.sign_in(make_app(), f"u{n}")
    told.users.switch("7", True)
    for _ in range(3):
        await asyncio.sleep(0)
    told.users.switch("7", False)
    for _ in range(12):
        await asyncio.sleep(0)
    assert (told.online, told.times) == ({}, 60)


@pytest.mark.parametrize("seed", range(20))
async def test_redis_knows_the_users_in_the_end_whatever_happens_while_an_app_is_switched(told, make_app, seed):
    rng = random.Random(seed)
    numbers = defaultdict(int)
    on = False
    for _ in range(400):
        user = f"u{rng.randrange(60)}"
        match rng.randrange(12):
            case 0:
                on = not on
                told.users.switch("7", on)
            case 1 | 2:
                await asyncio.sleep(0)
            case 3 | 4 | 5 if numbers[user]:
                numbers[user] -= 1
                told.users.sign_out("7", user)
            case _:
                numbers[user] += 1
                told.users.sign_in(make_app(watchlist=on), user)
        assert told.users.here("7", user) == (numbers[user] > 0)
    for _ in range(12):
        await asyncio.sleep(0)
    assert told.online == ({user: n for user, n in numbers.items() if n} if on else {})
