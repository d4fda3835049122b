"""Workers that only their hashes name: found, and reaped with all that they held."""

import asyncio

from redpoll.cluster.membership.hold_call import hold_keys
from redpoll.cluster.membership.reaper import Reaper, orphans
from redpoll.cluster.redis.keys import SHARDS
from redpoll.cluster.redis.scripts import HOLD, REGISTER

RUN, ROOM, LOST = "0123456789ab", "presence-room", "ba9876543210.3.0"


async def test_hash_without_a_beat_is_found(link, keys):
    for w in (b"ba9876543210.1.0", b"ba9876543210.2.1"):
        await link.ask(b"HSET", keys.worker(7, w.decode()), b"gen", 1)
    await link.ask(b"HSET", keys.beat, b"ba9876543210.1.0", 5)
    # Names that only look alike: another prefix, and a channel.
    await link.ask(b"HSET", b"other:{0}:w:ba9876543210.9.0", b"gen", 1)
    await link.ask(b"HSET", keys.heads[3] + b"c:7:x:w:ba9876543210.8.0", b"w", 1)
    assert await orphans(link, keys) == {b"ba9876543210.2.1"}


async def test_members_of_a_worker_without_a_beat_are_removed(link, keys, wait_until):
    for at in range(SHARDS):
        await link.execute(REGISTER, (keys.worker(at, LOST),), (1, 1))
    args = [LOST, 1, "p", "", "7", ROOM, 0, 0, keys.topic("7", ROOM), keys.publish, 0, 1, "ghost", ""]
    await link.execute(HOLD, hold_keys(keys, LOST, "7", ROOM, "p", ""), args)
    assert await link.ask(b"HKEYS", keys.members("7", ROOM)) == [b"ghost"]
    reaper = Reaper(link, keys, RUN, read_s=0.05)
    task = asyncio.ensure_future(reaper.run())
    await wait_until(lambda: reaper.reaped == 1)
    assert await link.ask(b"HLEN", keys.members("7", ROOM)) == 0
    assert await link.ask(b"HLEN", keys.beat) == 0
    # After a reconnect it looks again.
    await link.ask(b"HSET", keys.worker(7, LOST), b"gen", 1)
    reaper.look_for_orphans_after_s = 0.05
    link.drop("for the test")
    await wait_until(lambda: reaper.reaped == 2)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert await orphans(link, keys) == set()
