"""Places of channels that are about to become occupied. What clients see of them: test_limits.py."""

import hashlib

from structlog.testing import capture_logs

from helpers.unkeyed import shard
from redpoll.cluster.membership.places import with_place
from redpoll.cluster.redis.scripts import RESERVE, Script


async def outcome(socket, wait_until) -> str:
    await wait_until(lambda: socket.state != "pending")
    return socket.reason or socket.state


async def test_places_of_a_dead_worker_are_free_after_their_time(a, link, keys, make_app, wait_until):
    a.app = make_app(max_occupied_channels=3)
    await link.execute(RESERVE, [keys.places("7")], [10_000, "w private-1", "w private-2"])
    outcomes = [await outcome(a.join(f"private-{n}"), wait_until) for n in (3, 4)]
    assert outcomes == ["attached", "channels"]
    # The reserved channels may become occupied by others, too.
    assert await outcome(a.join("private-1"), wait_until) == "attached"
    # A worker gives up its own reservation only. As if ten seconds were over.
    while len(left := await link.ask(b"ZRANGE", keys.places("7"), 0, -1)) > 2:
        pass
    assert left == [b"w private-1", b"w private-2"]
    for reservation in (b"w private-1", b"w private-2"):
        await link.ask(b"ZINCRBY", keys.places("7"), -10_000_000, reservation)
    assert await outcome(a.join("private-4"), wait_until) == "attached"
    while await link.ask(b"EXISTS", keys.places("7")):
        pass


async def test_full_app_is_looked_at_once_per_second(start_worker, make_app, wait_until):
    worker = await start_worker(full_s=3600.0)
    worker.app = make_app(max_occupied_channels=2)
    places = worker.registry.sync.places
    assert await outcome(worker.join("1"), wait_until) == "attached"
    looks = places.looks
    outcomes = [await outcome(worker.join(f"{n}"), wait_until) for n in range(2, 20)]
    assert set(outcomes) == {"channels"}
    assert places.looks == looks + 1
    # Signed channels are another matter, and so is a channel that is occupied.
    assert await outcome(worker.join("private-1"), wait_until) == "attached"
    assert await outcome(worker.join("private-2"), wait_until) == "channels"
    assert places.looks == looks + 3
    assert await outcome(worker.join("1"), wait_until) == "attached"


async def test_below_the_share_of_its_shard_a_channel_needs_no_look(a, make_app, wait_until):
    a.app = make_app(max_occupied_channels=1_000_000)
    sockets = [a.join(name) for name in [f"room-{n}" for n in range(10_000) if shard("7", f"room-{n}") == 5][:50]]
    await wait_until(lambda: all(socket.state == "attached" for socket in sockets))
    assert a.registry.sync.places.looks == 0


async def test_subscribes_that_wait_for_a_place_survive_a_break(a, b, link, keys, make_app, wait_until, truth):
    a.app = b.app = make_app(max_occupied_channels=20)
    sockets = [worker.join(f"private-{n}") for n in range(15) for worker in (a, b)]
    await wait_until(lambda: a.registry.sync.places.looks and b.registry.sync.places.looks)
    for worker in (a, b):
        worker.link.drop("test")
    assert [await outcome(socket, wait_until) for socket in sockets] == ["attached"] * 30
    await truth.settled([a, b])


async def test_look_that_redis_refuses_is_repeated(a, make_app, wait_until, monkeypatch):
    a.app = make_app(max_occupied_channels=2)
    broken = Script("occupied")
    broken.source = b"#!lua\nreturn redis.error_reply('ERR broken')"
    broken.sha = hashlib.sha1(broken.source).hexdigest().encode()
    with monkeypatch.context() as patched, capture_logs() as logs:
        patched.setattr("redpoll.cluster.membership.places.OCCUPIED", broken)
        socket = a.join("private-1")
        await wait_until(lambda: a.registry.errors >= 2)
        assert socket.state == "pending"
        assert {line["reason"] for line in logs} == {"ERR broken"}
    assert await outcome(socket, wait_until) == "attached"


def test_each_worker_comes_to_the_same_places():
    reserved = ["a", "b", "private-c", "d", "private-e", "private-f"]
    free = dict.fromkeys(reserved, False)
    assert with_place(reserved, free, 0, 4) == {"a", "b", "private-c", "private-e"}
    # Refused public channels take no places of signed ones that come after them.
    assert with_place(reserved, free, 2, 4) == {"private-c", "private-e"}
    # An occupied one is counted already.
    assert with_place(reserved, free | {"d": True}, 3, 4) == {"private-c", "d"}
    assert with_place(reserved, free, 100, 0) == set(reserved)
