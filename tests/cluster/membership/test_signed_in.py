"""Signed-in users in Redis. test_online.py covers watching them."""

import pytest

from redpoll.cluster.membership.reaper import Reaper


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
