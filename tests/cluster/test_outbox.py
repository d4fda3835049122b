"""Webhook rows on a real Redis: what `hold` writes, what a drain returns, what is deleted and what is lost."""

import asyncio
import time

import hiredis
import pytest
from structlog.testing import capture_logs

from cluster.links import quick_link
from helpers.unkeyed import shard
from redpoll.cluster.membership.hold_call import hold_keys
from redpoll.cluster.outbox import Outbox, Subject
from redpoll.cluster.redis.keys import SHARDS, Keys
from redpoll.cluster.redis.link import Link, LinkDown
from redpoll.cluster.redis.scripts import HOLD, REGISTER

A, ROOM, NEWS = "7", "presence-room", "cache-news"
W, V = "0123456789ab.1.0", "0123456789ab.2.0"
LONG_S = 60.0


class Calls:
    """Calls of `hold` by two workers, with the flags of an app whose webhooks want everything."""

    def __init__(self, link: Link, keys: Keys) -> None:
        self.link, self.keys = link, keys

    async def register(self) -> None:
        for w in (W, V):
            for at in range(SHARDS):
                await self.link.execute(REGISTER, (self.keys.worker(at, w),), (1, 1))

    async def room(
        self, w=W, *, base=0, gone=(), joins=(), flags="omd", gen=1, channel=ROOM, debounce_ms=60_000
    ) -> list:
        names = hold_keys(self.keys, w, A, channel, "p", flags)
        pairs = [part for user, info in joins for part in (user, info)]
        args = [w, gen, "p", flags, A, channel, base, 0, self.keys.topic(A, channel), self.keys.publish]
        return await self.link.execute(HOLD, names, [*args, len(gone), len(joins), *gone, *pairs, debounce_ms])

    async def news(self, w=W, *, base=0, n=0, flags="od", gen=1, channel=NEWS, debounce_ms=60_000) -> list:
        names = hold_keys(self.keys, w, A, channel, "c", flags)
        args = [w, gen, "c", flags, A, channel, base, 0, self.keys.topic(A, channel), self.keys.publish]
        return await self.link.execute(HOLD, names, [*args, 0, n, debounce_ms])

    async def left(self, channel=ROOM) -> dict[str, int]:
        """The leaves held back in the channel's shard, with their times in ms."""
        pairs = await self.link.ask(b"ZRANGE", self.keys.left(shard(A, channel)), 0, -1, b"WITHSCORES")
        return {member.decode(): int(since) for member, since in pairs}

    async def fill(self, at: int, rows: int) -> None:
        """All rows in the shard."""
        lua = """
            local now = redis.call('TIME')
            local first = math.max(tonumber(now[1]) * 1000000, tonumber(redis.call('GET', KEYS[2]) or '0'))
            for n = 1, tonumber(ARGV[1]) do
              redis.call('XADD', KEYS[1], 'MAXLEN', '~', 20000, string.format('%.0f-0', first + n),
                         'k', 'member.added', 'a', '7', 'c', 'presence-filler', 't', now[1] .. '000', 'u', n)
            end
            redis.call('SET', KEYS[2], string.format('%.0f', first + tonumber(ARGV[1])))
            return 0"""
        await self.link.ask(b"EVAL", lua, 2, self.keys.outbox(at), self.keys.clock(at), rows)


@pytest.fixture
async def calls(link, keys):
    calls = Calls(link, keys)
    await calls.register()
    return calls


@pytest.fixture
def outbox(link, keys):
    """An outbox without a debounce, in which leaves are rows at once. `patient` has one."""
    return Outbox(link, keys, 0)


@pytest.fixture
def patient(link, keys):
    return Outbox(link, keys, LONG_S)


async def rows_of(outbox, commit=True) -> list[str]:
    """The rows, as `event user`."""
    taken = await outbox.take()
    if commit:
        outbox.committed(taken.rows)
    return [f"{row.event} {row.user}" if row.user else row.event for row in taken.rows]


async def now_ms(link) -> int:
    seconds, micros = await link.ask(b"TIME")
    return int(seconds) * 1000 + int(micros) // 1000


# What hold writes


async def test_first_join_writes_occupied_then_added(calls, outbox, link):
    before = await now_ms(link)
    reply = await calls.room(joins=[("a", '{"n":1}'), ("b", ""), ("a", "")])
    rows = (await outbox.take()).rows
    assert [(row.event, row.user, row.detail) for row in rows] == [
        ("channel.occupied", None, b"3"),
        ("member.added", "a", b'{"n":1}'),
        ("member.added", "b", b""),
    ]
    assert {(row.shard, row.app_id, row.channel, row.trace) for row in rows} == {(shard(A, ROOM), A, ROOM, None)}
    assert [row.stamp for row in rows] == sorted({row.stamp for row in rows})
    assert rows[-1].stamp == int(reply[1])
    assert before <= rows[0].time_ms <= await now_ms(link)


async def test_row_of_a_member_has_the_stamp_of_its_envelope(calls, outbox, link, keys):
    pushes = []
    link.on_push = lambda topic, payload: pushes.append(payload)
    link.subscribe([keys.topic(A, ROOM)])
    await calls.room(joins=[("a", "")], flags="om")
    await calls.room(gone=["a"], flags="om")
    rows = (await outbox.take()).rows
    stamps = [int(payload.split()[2]) for payload in pushes]
    assert [row.stamp for row in rows if row.user] == stamps


async def test_event_that_no_webhook_wants_makes_no_row(calls, outbox):
    await calls.room(joins=[("a", "")], flags="")
    await calls.room(gone=["a"], flags="")
    await calls.news(n=1, flags="s")
    await calls.news(flags="s")
    assert await rows_of(outbox) == []
    assert await calls.left() == {}


async def test_webhooks_want_members_and_occupancy_separately(calls, outbox):
    await calls.room(joins=[("a", "")], flags="od")
    await calls.room(gone=["a"], flags="od")
    await calls.room(V, joins=[("b", "")], flags="md", channel="presence-b")
    await calls.room(V, gone=["b"], flags="md", channel="presence-b")
    assert sorted(await rows_of(outbox)) == [
        "channel.occupied",
        "channel.vacated",
        "member.added b",
        "member.removed b",
    ]


async def test_second_worker_and_second_tab_make_no_row(calls, outbox):
    await calls.room(joins=[("a", "")])
    await rows_of(outbox)
    await calls.room(V, joins=[("a", "")])
    await calls.room(base=1, joins=[("a", '{"new":"info"}')])
    await calls.room(V, gone=["a"])
    assert await rows_of(outbox) == []


async def test_repeated_call_writes_no_second_row(calls, outbox):
    for _ in range(3):
        await calls.room(joins=[("a", ""), ("b", "")], flags="om")
    for _ in range(3):
        await calls.room(gone=["a", "b"], flags="om")
    assert await rows_of(outbox) == [
        "channel.occupied",
        "member.added a",
        "member.added b",
        "member.removed a",
        "member.removed b",
        "channel.vacated",
    ]


async def test_without_debounce_leaves_are_written_at_once_and_vacated_last(calls, outbox):
    await calls.room(joins=[("a", ""), ("b", "")], flags="om")
    await calls.room(gone=["b", "a"], flags="om")
    assert await calls.left() == {}
    rows = (await outbox.take()).rows[3:]
    assert [(row.event, row.user) for row in rows] == [
        ("member.removed", "b"),
        ("member.removed", "a"),
        ("channel.vacated", None),
    ]


async def test_refused_join_occupies_nothing(calls, outbox, link, keys):
    names = hold_keys(keys, W, A, "presence-full", "p", "om")
    topic = keys.topic(A, "presence-full")
    args = [W, 1, "p", "om", A, "presence-full", 0, 1, topic, keys.publish, 0, 2, "a", "", "b", ""]
    assert (await link.execute(HOLD, names, args))[2] == b"10"
    assert await rows_of(outbox) == ["channel.occupied", "member.added a"]


async def test_removing_users_whom_redis_never_saw_occupies_nothing(calls, outbox):
    # The smallest count only applies to users whom Redis lists.
    await calls.room(gone=["a", "b"], flags="omu")
    assert await rows_of(outbox) == []
    assert await calls.link.ask(b"EXISTS", calls.keys.counts(A, ROOM)) == 0


async def test_pseudo_channels_make_no_rows(calls, outbox, link, keys):
    for kind, channel in (("u", "%u:a"), ("q", "%conn")):
        names = hold_keys(keys, W, A, channel, kind, "")
        for n in (2, 0):
            args = [W, 1, kind, "", A, channel, 0, 0, keys.topic(A, channel), keys.publish, 0, n]
            assert (await link.execute(HOLD, names, args))[0] == b"OK"
    assert await rows_of(outbox) == []


# Leaves within the debounce


async def test_leave_waits_since_its_own_time_and_is_cancelled_by_a_return(calls, patient, link):
    await calls.room(joins=[("a", "")])
    before = await now_ms(link)
    await calls.room(gone=["a"])
    after, left = await now_ms(link), await calls.left()
    assert set(left) == {f"v:7:{ROOM}", f"r:7:{ROOM}:a"}
    assert all(before <= since <= after for since in left.values())
    await calls.room(V, joins=[("a", "")])
    assert await calls.left() == {}
    assert await rows_of(patient) == ["channel.occupied", "member.added a"]


async def test_absence_longer_than_the_debounce_makes_both_rows_though_nobody_drained(calls, patient, link):
    """A control plane that stood still for 10 s lost the leave and the return of each member who was away meanwhile."""
    await calls.room(joins=[("a", "")])
    await calls.room(gone=["a"])
    since = await calls.left()
    while await now_ms(link) < max(since.values()) + 50:
        await asyncio.sleep(0.005)
    await calls.room(V, joins=[("a", "{}")], debounce_ms=50)
    assert await calls.left() == {}
    rows = (await patient.take()).rows
    assert [(row.event, row.user, row.detail) for row in rows] == [
        ("channel.occupied", None, b"1"),
        ("member.added", "a", b""),
        ("channel.vacated", None, b""),
        ("channel.occupied", None, b"1"),
        ("member.removed", "a", b""),
        ("member.added", "a", b"{}"),
    ]
    assert (rows[2].time_ms, rows[4].time_ms) == (since[f"v:7:{ROOM}"], since[f"r:7:{ROOM}:a"])
    assert [row.stamp for row in rows] == sorted({row.stamp for row in rows})


async def test_old_leave_is_cancelled_by_the_return_while_many_rows_are_unread(calls, patient):
    await calls.room(joins=[("a", "")])
    await calls.room(gone=["a"])
    await calls.fill(shard(A, ROOM), 10_000)
    await calls.room(V, joins=[("a", "")], debounce_ms=0)
    assert await calls.left() == {}
    assert (await patient.take()).rows[-1].channel == "presence-filler"


async def test_return_of_another_user_keeps_the_channel_and_not_the_member(calls, outbox):
    await calls.room(joins=[("a", "")])
    await rows_of(outbox)
    await calls.room(gone=["a"])
    await calls.room(V, joins=[("b", "")])
    assert set(await calls.left()) == {f"r:7:{ROOM}:a"}
    assert await rows_of(outbox) == ["member.added b", "member.removed a"]


async def test_return_cancels_a_leave_after_the_webhook_was_turned_off(calls, patient):
    await calls.room(joins=[("a", "")])
    await calls.room(gone=["a"])
    await calls.room(joins=[("a", "")], flags="")
    assert await calls.left() == {}


async def test_leave_and_return_in_one_call_make_rows_only_without_a_debounce(calls, outbox):
    await calls.room(joins=[("a", "")])
    await rows_of(outbox)
    await calls.room(gone=["a"], joins=[("a", "")])
    assert await calls.left() == {}
    assert await rows_of(outbox) == []
    await calls.room(gone=["a"], joins=[("a", "")], flags="om")
    assert await rows_of(outbox) == ["member.removed a", "member.added a"]


async def test_leave_that_waited_long_enough_is_a_row_with_the_time_of_the_leave(calls, link, keys, wait_until):
    outbox = Outbox(link, keys, LONG_S)
    await calls.room(joins=[("a", "")])
    outbox.committed((await outbox.take()).rows)
    await calls.room(gone=["a"])
    since = (await calls.left())[f"r:7:{ROOM}:a"]
    taken = await outbox.take()
    assert (taken.rows, outbox.leaves, outbox.waiting) == ([], 2, 0)
    outbox = Outbox(link, keys, 0.15)
    while not taken.rows:
        taken = await outbox.take()
    assert await now_ms(link) - since >= 150
    assert [(row.event, row.user, row.time_ms) for row in taken.rows] == [
        ("member.removed", "a", since),
        ("channel.vacated", None, since),
    ]
    assert (outbox.leaves, await calls.left()) == (0, {})


async def test_user_ids_of_any_kind_survive_the_round_trip(calls, outbox):
    users = ["a:b:c", "r:7:x", "ü 漢 ☃", "with\nnewline", " ", "%", "x" * 100, "nul\0", "v"]
    await calls.room(joins=[(user, "") for user in users])
    await rows_of(outbox)
    await calls.room(gone=users)
    rows = (await outbox.take()).rows
    assert sorted(row.user for row in rows if row.event == "member.removed") == sorted(users)
    assert {row.channel for row in rows} == {ROOM}


async def test_leaves_from_a_clock_that_was_ahead_wait_no_longer(calls, patient, link, keys):
    await calls.room(joins=[("a", "")])
    await rows_of(patient)
    await link.ask(b"ZADD", keys.left(shard(A, ROOM)), await now_ms(link) + 3_600_000, f"r:7:{ROOM}:z")
    assert await rows_of(patient) == ["member.removed z"]


async def test_leaves_from_a_clock_that_was_ahead_delay_no_others(calls, outbox, link, keys):
    await calls.room(joins=[("ann", ""), ("bob", "")])
    await rows_of(outbox)
    await calls.room(base=1, gone=["ann"])
    left = await calls.left()
    await link.ask(b"ZADD", keys.left(shard(A, ROOM)), await now_ms(link) + 3_600_000, *left)
    await calls.room(gone=["bob"])
    await link.ask(b"ZREM", keys.left(shard(A, ROOM)), f"v:{A}:{ROOM}")
    assert sorted(await rows_of(outbox)) == ["member.removed ann", "member.removed bob"]


async def test_stamp_ahead_of_the_clock_delays_no_leave(calls, link, keys):
    outbox = Outbox(link, keys, 0)
    await calls.room(joins=[("a", "")])
    await rows_of(outbox)
    ahead = 4_000_000_000_000_000
    await link.ask(b"SET", keys.clock(shard(A, ROOM)), ahead)
    await calls.room(gone=["a"])
    rows = (await outbox.take()).rows
    assert [row.stamp for row in rows] == [ahead + 2, ahead + 3]
    assert all(abs(row.time_ms - time.time() * 1000) < 60_000 for row in rows)


# Counts and cache misses


async def test_announced_count_makes_a_row(calls, outbox):
    # Of more than a hundred, the next announcement is due after five seconds. So both are sent at once.
    first, second = await asyncio.gather(calls.news(n=101, flags="sSo"), calls.news(base=101, n=1, flags="sSo"))
    assert first[-1] == 0
    assert second[6] > 0
    rows = (await outbox.take()).rows
    assert [(row.event, row.detail) for row in rows] == [("channel.occupied", b"101"), ("subscription.count", b"101")]


async def test_cache_miss_is_a_row_once_a_minute(calls, outbox, link, keys):
    assert (await calls.news(n=1, flags="cX"))[-1] == 0
    await calls.news(base=1, n=1, flags="cX")
    assert await rows_of(outbox) == ["cache.miss"]
    assert 0 < await link.ask(b"TTL", keys.cache_miss(A, NEWS)) <= 60
    await link.ask(b"DEL", keys.cache_miss(A, NEWS))
    await link.ask(b"SET", keys.cached(A, NEWS), b"- - 0 1\ne")
    await calls.news(base=2, n=1, flags="cX")
    assert await rows_of(outbox) == []


# Draining


async def test_same_rows_are_returned_until_they_are_committed(calls, outbox, link, keys):
    await calls.room(joins=[("a", "")])
    first = await outbox.take()
    assert await outbox.take() == first
    assert await Outbox(link, keys, 0).take() == first
    outbox.committed(first.rows)
    assert (await outbox.take()).rows == []
    assert (outbox.waiting, outbox.oldest_ms) == (0, None)
    await calls.room(base=1, joins=[("b", "")])
    assert [row.user for row in (await outbox.take()).rows] == ["b"]


async def test_after_a_break_stored_rows_come_again_until_they_are_committed_on_the_new_connection(calls, outbox, link):
    await calls.room(joins=[("a", "")])
    taken = await outbox.take()
    outbox.committed(taken.rows)
    link.drop("for the test")
    with pytest.raises(LinkDown):
        await outbox.take()
    await link.wait_up()
    again = await outbox.take()
    assert again.rows == taken.rows
    outbox.committed(again.rows)
    assert (await outbox.take()).rows == []


async def test_rows_of_all_shards_come_in_one_drain_in_order_of_their_stamps(calls, outbox):
    channels = [f"presence-{n}" for n in range(300)]
    await asyncio.gather(*(calls.room(joins=[("a", "")], channel=channel) for channel in channels))
    taken = await outbox.take()
    assert len(taken.rows) == 600
    assert not taken.more
    stamps: dict[int, list[int]] = {}
    for row in taken.rows:
        stamps.setdefault(row.shard, []).append(row.stamp)
    assert len(stamps) > 60
    assert all(of_one == sorted(set(of_one)) for of_one in stamps.values())


async def test_full_shard_is_read_again_until_a_thousand_rows(calls, outbox):
    await calls.fill(3, 2600)
    seen = []
    for expected in (True, True, False):
        taken = await outbox.take()
        assert taken.more is expected
        assert len(taken.rows) <= 1250
        seen += taken.rows
        outbox.committed(taken.rows)
    assert [row.user for row in seen] == [str(n) for n in range(1, 2601)]
    assert await rows_of(outbox) == []


async def test_drain_of_large_rows_ends_at_eight_mebibytes(calls, outbox, link, keys):
    lua = """for n = 1, 120 do
        redis.call('XADD', KEYS[1], n .. '-0', 'k', 'client_event', 'a', '7', 'c', 'c', 't', '1', 'x', ARGV[1]) end"""
    await link.ask(b"EVAL", lua, 1, keys.outbox(0), b"x" * 100_000)
    taken = await outbox.take()
    assert taken.more
    assert 8 * 1024 * 1024 <= sum(len(row.detail) for row in taken.rows) < 9 * 1024 * 1024
    outbox.committed(taken.rows)
    assert len(taken.rows) + len((await outbox.take()).rows) == 120


async def test_one_drain_returns_more_leaves_than_one_call_takes(calls, outbox):
    users = [f"u{n}" for n in range(500)]
    for at in range(0, 500, 250):
        await calls.room(base=at, joins=[(user, "") for user in users[at : at + 250]])
    await rows_of(outbox)
    await calls.room(base=250, gone=users[:250])
    await calls.room(gone=users[250:])
    taken = await outbox.take()
    assert sorted(row.user for row in taken.rows[:-1]) == sorted(users)
    assert taken.rows[-1].event == "channel.vacated"


async def test_age_and_number_of_waiting_rows_are_known(calls, outbox, link):
    await calls.room(joins=[("a", "")])
    rows = (await outbox.take()).rows
    await calls.room(base=1, joins=[("b", "")])
    await outbox.take()
    assert (outbox.waiting, outbox.oldest_ms) == (3, rows[0].stamp // 1000)


async def test_shard_that_cannot_be_drained_holds_up_no_other(calls, outbox, link, keys):
    await calls.room(joins=[("a", "")])
    broken = (shard(A, ROOM) + 1) % SHARDS
    await link.ask(b"SET", keys.left(broken), "not a sorted set")
    assert await rows_of(outbox) == ["channel.occupied", "member.added a"]
    assert outbox.errors == 1
    for at in range(SHARDS):
        await link.ask(b"SET", keys.left(at), "not a sorted set")
    with pytest.raises(hiredis.ReplyError, match="WRONGTYPE"):
        await outbox.take()


async def test_rows_are_fetched_when_redis_has_no_memory_left(calls, outbox, full):
    await calls.room(joins=[("a", "")])
    async with full():
        await calls.room(gone=["a"])
        assert len(await rows_of(outbox)) == 4
        assert await rows_of(outbox) == []


async def test_refusal_is_logged_once_until_all_shards_are_read_again(own_redis, keys):
    link = quick_link(own_redis.url)
    link.start()
    try:
        outbox = Outbox(link, keys, 0)
        await link.wait_up()
        with capture_logs() as lines:
            for _ in range(2):
                own_redis.call("CONFIG", "SET", "min-replicas-to-write", "1")
                for _ in range(20):
                    with pytest.raises(hiredis.ReplyError, match="NOREPLICAS"):
                        await outbox.take()
                own_redis.call("CONFIG", "SET", "min-replicas-to-write", "0")
                await outbox.take()
    finally:
        await link.close()
    of_outbox = [(line["event"], line.get("shards")) for line in lines if line["event"].startswith("outbox")]
    assert of_outbox == [("outbox not read", SHARDS), ("outbox read again", None)] * 2


async def test_shard_that_is_refused_later_is_logged_too(outbox, link, keys):
    await link.ask(b"SET", keys.left(3), "not a sorted set")
    with capture_logs() as lines:
        await outbox.take()
        await link.ask(b"SET", keys.left(4), "not a sorted set")
        await outbox.take()
        await link.ask(b"DEL", keys.left(3))
        await outbox.take()
        await link.ask(b"DEL", keys.left(4))
        await outbox.take()
    assert [(line["event"], line.get("shards")) for line in lines] == [
        ("outbox not read", 1),
        ("outbox not read", 1),
        ("outbox read again", None),
    ]


# Too many rows


async def test_rows_that_nobody_relies_on_stop_at_half_and_are_counted(calls, link, keys):
    at = shard(A, NEWS)
    await calls.fill(at, 10_000)
    reply = await calls.news(n=1, flags="oscSXd")
    assert reply[-1] == 2
    assert await link.ask(b"EXISTS", keys.cache_miss(A, NEWS)) == 0
    assert await link.ask(b"XLEN", keys.outbox(at)) == 10_001


async def test_leaves_wait_while_half_is_unread_and_are_never_lost(calls, outbox):
    await calls.room(joins=[("a", "")])
    await calls.fill(shard(A, ROOM), 10_000)
    await calls.room(gone=["a"])
    taken = await outbox.take()
    assert outbox.leaves == 2
    seen = list(taken.rows)
    while taken.rows:
        outbox.committed(taken.rows)
        taken = await outbox.take()
        seen += taken.rows
    assert [row.event for row in seen[-2:]] == ["member.removed", "channel.vacated"]


async def test_oldest_rows_beyond_the_bound_are_lost_and_counted_once(calls, outbox):
    at = shard(A, ROOM)
    await calls.room(joins=[("a", "")])
    await calls.fill(at, 500)
    taken = await outbox.take()
    outbox.committed(taken.rows)
    assert taken.lost == 0
    await outbox.take()
    await calls.fill(at, 20_300)
    taken = await outbox.take()
    assert 200 <= taken.lost <= 300
    assert outbox.waiting == 20_300 - taken.lost
    assert taken.rows[0].user == str(taken.lost + 1)
    assert (await outbox.take()).lost == 0
    assert outbox.lost == taken.lost


# A Redis that is killed


async def test_rows_and_leaves_outlive_a_killed_redis(own_redis, keys, wait_until):
    # Append-only with `appendfsync no`: Redis writes before it replies, so a killed process loses nothing.
    link = Link(own_redis.url, first_delay_s=0.01, max_delay_s=0.05)
    link.start()
    try:
        calls, outbox = Calls(link, keys), Outbox(link, keys, 0.2)
        await link.wait_up()
        await calls.register()
        seen: dict[tuple[int, int], str] = {}
        for n in range(4):
            users = [(f"{n}-{m}", "") for m in range(200)]
            await calls.room(joins=users)
            await calls.room(gone=[user for user, _ in users])
            own_redis.kill()
            await wait_until(lambda: not link.up)
            own_redis.start()
            await link.wait_up()
            taken = await outbox.take()
            seen |= {(row.shard, row.stamp): f"{row.event} {row.user}" for row in taken.rows}
            if n % 2:
                outbox.committed(taken.rows)
        while taken.rows or outbox.leaves:
            outbox.committed(taken.rows)
            taken = await outbox.take()
            seen |= {(row.shard, row.stamp): f"{row.event} {row.user}" for row in taken.rows}
        for n in range(4):
            for what in ("added", "removed"):
                assert sum(event.startswith(f"member.{what} {n}-") for event in seen.values()) == 200
    finally:
        await link.close()


# -- after a fail-over that lost writes


async def test_present_state_is_stated_again(calls, outbox):
    await calls.news(n=2)
    await calls.room(joins=[("ann", b'{"n":1}')], flags="om")
    await committed(outbox)
    room, news, empty = Subject(A, ROOM, None), Subject(A, NEWS, None), Subject(A, "empty", None)
    ann, bob = Subject(A, ROOM, "ann"), Subject(A, ROOM, "bob")
    assert await outbox.present([room, news, empty, ann, bob]) == [True, True, False, True, False]
    assert await outbox.restate([news, empty, ann, bob]) == 4
    rows = await committed(outbox)
    assert {(row.event, row.channel, row.user, row.detail) for row in rows} == {
        ("channel.occupied", NEWS, None, b"2"),
        ("channel.vacated", "empty", None, b""),
        ("member.added", ROOM, "ann", b'{"n":1}'),
        ("member.removed", ROOM, "bob", b""),
    }


async def test_leave_that_is_held_back_is_not_stated_again(calls, patient):
    await calls.room(joins=[("ann", b"")])
    await calls.room(gone=["ann"])
    await committed(patient)
    assert await patient.restate([Subject(A, ROOM, None), Subject(A, ROOM, "ann")]) == 0
    assert await committed(patient) == []


async def committed(outbox) -> list:
    """The rows that a drain returns, which are deleted with the next one."""
    rows = (await outbox.take()).rows
    outbox.committed(rows)
    return rows


async def test_rows_of_a_new_master_are_read_though_its_clock_is_behind(calls, outbox, link, wait_until):
    """What was committed on the last connection says nothing about stamps of a master that lost those writes."""
    await calls.room(joins=[("a", "")])
    taken = await outbox.take()
    outbox.committed(taken.rows)
    connects = link.connects
    link.drop("fail-over")
    await wait_until(lambda: link.up and link.connects > connects)
    key = calls.keys.outbox(shard(A, ROOM))
    await link.ask(b"DEL", key)
    early = f"{taken.rows[0].stamp - 1_000_000}-0"
    await link.ask(b"XADD", key, early, b"k", b"member.added", b"a", A, b"c", ROOM, b"t", 1, b"u", b"late")
    assert [row.user for row in (await outbox.take()).rows] == ["late"]
