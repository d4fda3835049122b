import asyncio

import pytest

from redpoll.cluster.directory import DirectoryWriter
from redpoll.cluster.membership.apps_of_dead import AppsOfDead
from redpoll.cluster.membership.reaper import Reaper
from redpoll.cluster.redis.scripts import HOLD, RESUME_POINT
from redpoll.cluster.stats import Stats

ROOM = "presence-room"


async def redis_time_s(link) -> float:
    seconds, micros = await link.ask(b"TIME")
    return int(seconds) + int(micros) / 1_000_000


async def reap_with_users(worker, link, keys, app) -> None:
    """150 members of a channel, a user who is signed in, and a subscriber who is neither were at a worker that died."""
    await DirectoryWriter(link, keys).fill([app], 1)
    worker.app = app
    worker.registry.signed_in.sign_in(app, "user")
    sockets = [worker.join(ROOM, f"member-{n}") for n in range(150)]
    await worker.attach("news")
    async with asyncio.timeout(60):
        while not all(socket.state == "attached" for socket in sockets):
            await asyncio.sleep(0.005)
        while app.user_resume_s and not await link.ask(b"EXISTS", keys.counts("7", "%u:user")):
            await asyncio.sleep(0.005)
    await worker.kill()
    await Reaper(link, keys, "ffffffffffff").reap(worker.registry.worker_id)


@pytest.fixture
def resuming(make_app):
    return make_app(max_presence_members=0, user_resume_s=60)


async def test_users_of_a_dead_worker_may_have_missed_events_since_it_last_wrote(b, link, keys, resuming):
    Stats(link, keys).write(b.registry.worker_id, {}, {})
    began_s = await redis_time_s(link)
    # As if it wrote 600 s later than now, so that this doesn't expire on a slow machine.
    await link.ask(b"EXPIRE", keys.stats(b.registry.worker_id.rpartition(".")[0]), 615)
    wrote_s = await redis_time_s(link) + 600
    await reap_with_users(b, link, keys, resuming)
    took_s = await redis_time_s(link) - began_s
    users = ["user", *(f"member-{n}" for n in range(150))]
    points = {int(await link.ask(b"GET", keys.resumed("7", user))) / 1_000_000 for user in users}
    # A message may have been on its way for 1 s.
    assert began_s + 600 - 1 - took_s <= min(points)
    assert max(points) <= wrote_s - 1 + took_s
    assert 0 < await link.ask(b"TTL", keys.resumed("7", "user")) <= 60


async def test_users_of_a_worker_that_hung_before_may_have_missed_more(b, link, keys, resuming):
    before_s = await redis_time_s(link)
    await reap_with_users(b, link, keys, resuming)
    assert int(await link.ask(b"GET", keys.resumed("7", "user"))) / 1_000_000 >= before_s - 60 - 36
    assert int(await link.ask(b"GET", keys.resumed("7", "user"))) / 1_000_000 <= await redis_time_s(link) - 60 - 30


async def test_nothing_is_written_of_users_of_apps_without_user_resume(b, link, keys, make_app):
    await reap_with_users(b, link, keys, make_app(max_presence_members=0))
    assert [key for key in await link.ask(b"KEYS", b"*") if b":y:" in key] == []


async def test_a_user_is_held_by_the_dead_worker_until_redis_has_the_point(b, link, keys, resuming, monkeypatch):
    users = ["user", *(f"member-{n}" for n in range(150))]
    written: set[bytes] = set()
    removed: list[str] = []
    run = link.run

    def note(script, names, args, done):
        if script is HOLD:
            of_call = [user for user in users if user in args or f"%u:{user}" in args]
            removed.extend(of_call)
            assert {keys.resumed("7", user) for user in of_call} <= written
        if script is RESUME_POINT:
            run(script, names, args, lambda reply: (written.update(names), done(reply)))
        else:
            run(script, names, args, done)

    monkeypatch.setattr(link, "run", note)
    await reap_with_users(b, link, keys, resuming)
    assert sorted(removed) == sorted(users)


async def test_points_are_written_when_redis_has_no_memory_left(b, link, keys, resuming, full):
    await DirectoryWriter(link, keys).fill([resuming], 1)
    b.app = resuming
    await b.attach(ROOM, "member")
    await b.kill()
    async with full():
        await Reaper(link, keys, "ffffffffffff").reap(b.registry.worker_id)
    assert await link.ask(b"EXISTS", keys.resumed("7", "member")) == 1


async def test_the_apps_of_a_page_are_read_in_one_call(b, link, keys, make_app, monkeypatch):
    names = [str(n) for n in range(100)]
    await DirectoryWriter(link, keys).fill([make_app(id=name, user_resume_s=60) for name in names], 1)
    apps = AppsOfDead(link, keys, b.registry.worker_id)
    asked = []
    ask = link.ask
    monkeypatch.setattr(link, "ask", lambda *command: (asked.append(command[0]), ask(*command))[1])
    await apps.read([*names, "of nobody"])
    await apps.read(names[50:])
    assert asked == [b"HMGET", b"PTTL"]
    assert not apps.counts("of nobody")
