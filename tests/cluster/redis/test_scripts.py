"""The transitions of the scripts, one call at a time, against a real Redis."""

import time

import hiredis
import pytest

from cluster.announced import announced_count
from helpers.unkeyed import shard
from redpoll.cluster.envelopes import Envelope, parse_added, parse_count, parse_removed
from redpoll.cluster.membership.hold_call import hold_keys
from redpoll.cluster.publish_call import CacheTerms, PublishReply, decode, encode
from redpoll.cluster.redis.keys import Keys
from redpoll.cluster.redis.link import Link
from redpoll.cluster.redis.scripts import (
    ALL,
    BEAT,
    BURY,
    CLEAR,
    DIR_FILL,
    DIR_PUT,
    FENCE,
    HISTORY,
    HOLD,
    HOLD_PLAIN,
    LOCATE,
    OCCUPIED,
    PUBLISH,
    REGISTER,
    SPEND,
)

A, C = "7", "presence-room"
W, V = "0123456789ab.1.0", "0123456789ab.2.0"


class Room:
    """One channel, and calls of `hold` on it."""

    def __init__(self, link: Link, keys: Keys, channel: str = C, kind: str = "p") -> None:
        self.link, self.keys, self.channel, self.kind = link, keys, channel, kind
        self.at = shard(A, channel)
        self.pushes: list[bytes] = []
        link.on_push = lambda topic, payload: self.pushes.append(payload)

    async def open(self) -> "Room":
        self.link.subscribe([self.keys.topic(A, self.channel)])
        for w in (W, V):
            await self.register(w, 1, fresh=1)
        return self

    async def register(self, w: str, gen: int, fresh: int = 0) -> list:
        return await self.link.execute(REGISTER, (self.keys.worker(self.at, w),), (gen, fresh))

    async def hold(self, w=W, *, gen=1, base=0, cap=0, flags="", gone=(), joins=(), n=None, more=()) -> list:
        keys = hold_keys(self.keys, w, A, self.channel, self.kind, flags)
        args = [w, gen, self.kind, flags, A, self.channel, base, cap]
        args += [self.keys.topic(A, self.channel), self.keys.publish, len(gone)]
        args += [len(joins) if n is None else n, *gone]
        if self.kind == "p":
            for user, info in joins:
                args += [user, info]
        return await self.link.execute(HOLD, keys, [*args, *more])

    async def counts(self) -> dict:
        return await self.link.ask(b"HGETALL", self.keys.counts(A, self.channel))

    async def members(self) -> dict:
        return await self.link.ask(b"HGETALL", self.keys.members(A, self.channel))

    async def fields(self, w=W) -> dict:
        return await self.link.ask(b"HGETALL", self.keys.worker(self.at, w))

    async def occupied(self) -> set:
        return set(await self.link.ask(b"SMEMBERS", self.keys.occupied(self.at, A)))

    async def announced(self) -> list[str]:
        """The deltas pushed since the last look, as `+user` and `-user`."""
        await self.link.ask(b"PING")
        pushes, self.pushes[:] = list(self.pushes), []
        return [
            "+" + parse_added(push).user if push[:1] == Envelope.MEMBER_ADDED else "-" + parse_removed(push).user
            for push in pushes
        ]


@pytest.fixture
async def room(link, keys):
    return await Room(link, keys).open()


@pytest.fixture
async def plain(link, keys):
    return await Room(link, keys, "news", "c").open()


def test_every_script_has_a_shebang_and_documents_its_keys_and_arguments():
    for script in ALL:
        lines = script.source.decode().splitlines()
        if script in (HISTORY, LOCATE, OCCUPIED):
            assert lines[0] == "#!lua flags=no-writes"
        else:
            assert lines[0] == ("#!lua" if script in (DIR_FILL, DIR_PUT, PUBLISH, SPEND) else "#!lua flags=allow-oom")
        head = [line for line in lines[1:12] if line.startswith("--")]
        assert any("KEYS" in line for line in head), script.name
        assert any("Returns" in line for line in lines if line.startswith("--")), script.name


# hold: counts


async def test_first_subscription_occupies_the_channel_and_the_last_vacates_it(plain):
    assert (await plain.hold(n=2))[2] == b"11"
    assert await plain.counts() == {W.encode(): b"2"}
    assert await plain.fields() == {b"gen": b"1", b"7:news": b"c2"}
    assert await plain.occupied() == {b"news"}
    await plain.hold(V, n=1)
    await plain.hold(base=0)
    assert await plain.occupied() == {b"news"}
    await plain.hold(V, base=0)
    assert await plain.occupied() == set()
    assert await plain.counts() == {}
    assert await plain.fields() == {b"gen": b"1"}


async def test_repeated_call_changes_nothing(plain):
    for _ in range(3):
        await plain.hold(base=4, n=1)
    assert await plain.counts() == {W.encode(): b"5"}
    for _ in range(3):
        await plain.hold(base=0)
    assert await plain.counts() == {}
    assert await plain.occupied() == set()


async def test_stamps_only_grow_even_if_the_clock_is_ahead(plain, link):
    ahead = 4_000_000_000_000_000
    first = int((await plain.hold(n=1))[1])
    await link.ask(b"SET", plain.keys.clock(plain.at), ahead)
    second = int((await plain.hold(n=1))[1])
    assert first < second == ahead + 1
    assert await link.ask(b"GET", plain.keys.clock(plain.at)) == b"%d" % second


# hold: users


async def test_new_user_is_announced_with_its_info_and_its_second_worker_is_not(room):
    assert await room.hold(joins=[("u", '{"a":1}')]) != []
    await room.link.ask(b"PING")
    added = parse_added(room.pushes[0])
    assert (added.w, added.user, added.info) == (W, "u", b'{"a":1}')
    assert await room.announced() == ["+u"]
    reply = await room.hold(V, joins=[("u", "")])
    assert reply[2:] == [b"1", [], []]
    assert await room.announced() == []
    assert await room.members() == {b"u": f'{W} {V}\n{{"a":1}}'.encode()}


async def test_user_is_removed_with_its_last_worker(room):
    await room.hold(joins=[("u", "")])
    await room.hold(V, joins=[("u", "")])
    assert (await room.hold(gone=["u"]))[4] == []
    assert await room.announced() == ["+u"]
    assert (await room.hold(V, gone=["u"]))[4] == [0]
    assert await room.announced() == ["-u"]
    assert await room.members() == {}


async def test_later_info_replaces_the_earlier_unless_it_is_empty_or_asserted(room):
    await room.hold(joins=[("u", "1")])
    assert (await room.hold(V, joins=[("u", "")]))[3] == []
    assert (await room.hold(V, base=1, joins=[("u", "2")]))[3] == [0]
    assert (await room.hold(base=0, joins=[("u", "1")], flags="k"))[3] == []
    assert (await room.members())[b"u"].endswith(b"\n2")
    assert await room.announced() == ["+u", "+u"]


async def test_info_may_have_any_bytes(room):
    info = '{"x":"a\\nb €"}\n \n'
    await room.hold(joins=[("ü", info)])
    reply = await room.hold(V, joins=[("v", "")], flags="r")
    assert dict(zip(reply[5][::2], reply[5][1::2], strict=True)) == {
        "ü".encode(): f"{W}\n{info}".encode(),
        b"v": f"{V}\n".encode(),
    }


async def test_cap_refuses_new_users_and_admits_further_tabs(room):
    reply = await room.hold(cap=2, joins=[("a", ""), ("b", ""), ("c", ""), ("a", "")])
    assert reply[2:4] == [b"1101", [0, 1]]
    assert await room.counts() == {W.encode(): b"3"}
    assert (await room.hold(V, cap=2, joins=[("c", ""), ("b", "")]))[2] == b"01"
    assert (await room.hold(base=3, cap=2, gone=["a"], joins=[("c", "")]))[2:] == [b"1", [0], [0]]
    assert await room.announced() == ["+a", "+b", "-a", "+c"]


async def test_refused_join_leaves_no_key(room):
    await room.hold(V, joins=[("a", "")])
    await room.hold(cap=1, joins=[("b", "")])
    assert await room.fields() == {b"gen": b"1"}
    assert await room.counts() == {V.encode(): b"1"}


async def test_leave_and_return_in_one_call_are_announced_in_that_order(room):
    await room.hold(joins=[("u", "")])
    await room.hold(base=0, gone=["u"], joins=[("u", "")])
    assert await room.announced() == ["+u", "-u", "+u"]
    assert await room.members() == {b"u": W.encode() + b"\n"}


async def test_full_call_of_256_gone_users_and_256_joins_is_one_step(room):
    before = [f"a{n}" for n in range(256)]
    after = [(f"b{n}", "") for n in range(256)]
    await room.hold(joins=[(user, "") for user in before])
    reply = await room.hold(base=0, gone=before, joins=after)
    assert (reply[2], reply[3], reply[4]) == (b"1" * 256, list(range(256)), list(range(256)))
    assert len(await room.members()) == 256


async def test_roster_comes_only_if_it_is_asked_for(room):
    assert len(await room.hold(joins=[("u", "")])) == 5
    assert (await room.hold(base=1, flags="r"))[5] == [b"u", W.encode() + b"\n"]


# hold: the smallest count while users remain to be removed, and which connections may call


async def test_count_stays_above_zero_while_users_remain_to_be_removed(room):
    await room.hold(joins=[("a", ""), ("b", "")])
    await room.hold(base=0, gone=["a"], flags="u")
    assert await room.counts() == {W.encode(): b"1"}
    assert (await room.fields())[b"7:presence-room"] == b"p1"
    await room.hold(base=0, gone=["b"])
    assert await room.counts() == {}
    assert await room.occupied() == set()


async def test_call_of_another_connection_is_stale_and_changes_nothing(room):
    await room.hold(joins=[("a", "")])
    await room.register(W, 2)
    assert await room.hold(gen=1, base=0, gone=["a"]) == [b"STALE"]
    assert await room.hold(gen=3, base=0, gone=["a"]) == [b"STALE"]
    assert await room.counts() == {W.encode(): b"1"}
    assert await room.announced() == ["+a"]


async def test_fenced_worker_is_refused_and_only_the_reaper_may_call_for_it(room):
    await room.hold(joins=[("a", "")])
    assert await room.hold(gen=-1, base=0, gone=["a"]) == [b"STALE"]
    assert await room.link.execute(FENCE, (room.keys.worker(room.at, W),)) == 1
    assert await room.hold(base=0, gone=["a"]) == [b"FENCED"]
    assert (await room.hold(gen=-1, base=0, gone=["a"]))[0] == b"OK"
    assert await room.announced() == ["+a", "-a"]


async def test_worker_that_redis_does_not_know_is_fenced(room):
    assert await room.hold("0123456789ab.9.0", joins=[("a", "")]) == [b"FENCED"]
    assert await room.members() == {}


async def test_reaper_never_raises_a_count(room):
    await room.hold(joins=[("a", "")])
    await room.link.execute(FENCE, (room.keys.worker(room.at, W),))
    await room.hold(gen=-1, base=5)
    assert await room.counts() == {W.encode(): b"1"}
    await room.hold(gen=-1, base=0, gone=["a"])
    await room.hold(gen=-1, base=0, flags="u")
    assert await room.counts() == {}
    assert await room.occupied() == set()


# register, fence, bury, beat, dir_put


async def test_register_takes_a_greater_gen_and_returns_what_is_held(room):
    await room.hold(joins=[("a", "")])
    assert await room.register(W, 1, fresh=1) == [b"STALE"]
    assert await room.register(W, 1) == [b"STALE"]
    answer = await room.register(W, 2)
    assert answer[0] == b"OK"
    assert dict(zip(answer[1][::2], answer[1][1::2], strict=True)) == await room.fields()
    assert await room.register("0123456789ab.9.0", 2) == [b"FENCED"]
    await room.link.execute(FENCE, (room.keys.worker(room.at, W),))
    assert await room.register(W, 3) == [b"FENCED"]


async def test_fence_makes_no_worker_and_bury_takes_only_an_empty_one(room):
    unknown = (room.keys.worker(room.at, "0123456789ab.9.0"),)
    assert await room.link.execute(FENCE, unknown) == 0
    assert await room.link.ask(b"EXISTS", *unknown) == 0
    mine = (room.keys.worker(room.at, W),)
    await room.hold(joins=[("a", "")])
    assert await room.link.execute(BURY, mine) == 0
    await room.hold(base=0, gone=["a"])
    assert await room.link.execute(BURY, mine) == 1
    assert await room.link.ask(b"EXISTS", *mine) == 0
    assert await room.link.execute(BURY, mine) == 1


async def test_sum_of_counts_is_kept_and_never_outlives_a_call_that_does_not_keep_it(link, keys):
    """Adding up the counts of all workers at each call costs the square of the workers."""
    news = await Room(link, keys, "news", "c").open()
    assert (await news.hold(n=2))[0] == b"OK"
    assert b"sum" not in await news.counts()
    # The app turned subscription_count on; the first call adds up, the next ones don't.
    assert (await news.hold(V, n=3, flags="s"))[5] == 5
    assert (await news.counts())[b"sum"] == b"5"
    await link.ask(b"HSET", keys.counts(A, "news"), b"sum", 105)
    assert (await news.hold(V, base=4, flags="s"))[5] == 106
    # A worker that doesn't know it yet.
    await news.hold(base=1)
    assert await news.counts() == {W.encode(): b"1", V.encode(): b"4"}
    assert (await news.hold(V, base=4, flags="s"))[5] == 5
    names = (keys.worker(news.at, W), keys.occupied(news.at, A), keys.left(news.at), keys.counts(A, "news"))
    assert await link.execute(HOLD_PLAIN, names, (W, 1, A, "news", 6, 0, 0)) == 1
    assert await news.counts() == {W.encode(): b"6", V.encode(): b"4"}
    assert (await news.hold(V, base=4, flags="s"))[5] == 10
    # The last one takes it away.
    await link.execute(HOLD_PLAIN, names, (W, 1, A, "news", 0, 0, 0))
    assert await news.occupied() == {b"news"}
    await news.hold(V, flags="s")
    assert (await news.counts(), await news.occupied()) == ({}, set())
    await news.hold(V, n=1, flags="s")
    await link.execute(HOLD_PLAIN, (names[0].replace(W.encode(), V.encode()), *names[1:]), (V, 1, A, "news", 0, 0, 0))
    assert (await news.counts(), await news.occupied()) == ({}, set())


async def test_beat_counts_and_returns_the_version_but_not_the_table(link, keys):
    """With the table in each reply, the beats of 3,200 workers took three cores of Redis (bench/parts/beats.py)."""
    names = (keys.beat, keys.directory_version, keys.revoked_grants)
    assert await link.execute(BEAT, names, (W, 0)) == [b"FENCED"]
    assert await link.ask(b"EXISTS", keys.beat) == 0
    await link.ask(b"HSET", keys.beat, *(part for k in range(2, 100) for part in (f"0123456789ab.{k}.0", 1)))
    assert await link.execute(BEAT, names, (W, 1)) == [b"OK", None, None]
    await link.ask(b"SET", keys.directory_version, 12)
    revoked = await link.ask(b"XADD", keys.revoked_grants, b"*", b"1 jti x", 5)
    assert await link.execute(BEAT, names, (W, 0)) == [b"OK", b"12", revoked]
    assert await link.ask(b"HGET", keys.beat, W) == b"2"
    await link.ask(b"HSET", keys.beat, W, -1)
    assert await link.execute(BEAT, names, (W, 0)) == [b"FENCED"]
    assert await link.execute(BEAT, names, (W, 1)) == [b"FENCED"]
    assert await link.ask(b"HGET", keys.beat, W) == b"-1"


async def test_dir_put_writes_record_and_version_and_publishes_in_one_step(link, keys):
    pushes = []
    link.on_push = lambda topic, payload: pushes.append((topic, payload))
    link.subscribe([keys.sys])
    names = (keys.directory, keys.directory_version)
    to_sys = (keys.publish, keys.sys)
    await link.ask(b"SET", keys.directory_version, "4 0 four")
    assert await link.execute(DIR_PUT, names, ("7", "{}", 5, *to_sys, "m5", 4, "five", "four")) == 1
    assert await link.ask(b"HGETALL", keys.directory) == {b"7": b"{}"}
    assert await link.ask(b"GET", keys.directory_version) == b"5 1 five"
    # Another version before, another change with its number, records that are lost.
    assert await link.execute(DIR_PUT, names, ("7", "[]", 7, *to_sys, "m7", 6, "seven", "six")) == 0
    assert await link.execute(DIR_PUT, names, ("7", "[]", 6, *to_sys, "m6", 5, "six", "other")) == 0
    await link.ask(b"SET", keys.directory_version, "5 2 five")
    assert await link.execute(DIR_PUT, names, ("7", "[]", 6, *to_sys, "m6", 5, "six", "five")) == 0
    await link.ask(b"SET", keys.directory_version, "5 1 five")
    await link.execute(DIR_PUT, names, ("7", "", 6, *to_sys, "m6", 5, "six", "five"))
    assert await link.ask(b"EXISTS", keys.directory) == 0
    assert await link.ask(b"GET", keys.directory_version) == b"6 0 six"
    assert pushes == [(keys.sys, b"m5"), (keys.sys, b"m6")]


async def test_leaves_are_taken_when_redis_has_no_memory_left(room):
    await room.hold(joins=[("a", "")])
    await room.link.ask(b"CONFIG", b"SET", b"maxmemory", 1)
    try:
        assert (await room.hold(base=0, gone=["a"]))[0] == b"OK"
    finally:
        await room.link.ask(b"CONFIG", b"SET", b"maxmemory", 0)
    assert await room.members() == {}


# hold: announced counts


@pytest.fixture
async def counting(link, keys):
    return await Room(link, keys, "news", "c").open()


async def told_counts(room) -> list[int]:
    await room.link.ask(b"PING")
    pushes, room.pushes[:] = list(room.pushes), []
    return [parse_count(push) for push in pushes]


async def now_ms(link) -> int:
    seconds, micros = await link.ask(b"TIME")
    return int(seconds) * 1000 + int(micros) // 1000


async def age(room, ms: int) -> None:
    """Moves the last announcement into the past."""
    key = announced_count(room.keys, A, room.channel)
    said, at = (await room.link.ask(b"GET", key)).split()
    await room.link.ask(b"SET", key, b"%b %d" % (said, int(at) - ms), b"KEEPTTL")


async def held_again(room, window_ms: int, **how) -> int:
    """A call of `hold` after an announcement. Checks when the next one is due, by Redis' clock; returns the total."""
    announced_ms = int((await room.link.ask(b"GET", announced_count(room.keys, A, room.channel))).split()[1])
    before_ms = await now_ms(room.link)
    total, due_ms = (await room.hold(**how, flags="s"))[5:]
    after_ms = await now_ms(room.link)
    if due_ms:
        assert before_ms + due_ms <= announced_ms + window_ms <= after_ms + due_ms
    else:
        # On a busy machine the window passed before the call.
        assert announced_ms + window_ms <= after_ms
    return total


async def test_count_is_announced_at_once_and_then_when_the_window_has_passed(counting):
    assert (await counting.hold(n=1, flags="s"))[5:] == [1, 0]
    assert await held_again(counting, 250, w=V, n=1) == 2
    await age(counting, 250)
    assert (await counting.hold(base=1, flags="s"))[5:] == [2, 0]
    assert (await counting.hold(base=1, flags="s"))[5:] == [2, 0]
    assert await told_counts(counting) == [1, 2]


async def test_above_a_hundred_the_window_is_five_seconds(counting):
    await counting.hold(n=100, flags="s")
    assert await held_again(counting, 5000, base=100, n=1) == 101
    assert await told_counts(counting) == [100]
    await age(counting, 5000)
    assert (await counting.hold(base=101, flags="s"))[5:] == [101, 0]
    assert await told_counts(counting) == [101]


async def test_announcement_in_the_future_counts_as_passed(counting):
    await counting.hold(n=1, flags="s")
    await age(counting, -60_000)
    assert (await counting.hold(base=1, n=1, flags="s"))[5:] == [2, 0]


async def test_count_is_announced_with_the_last_call_of_a_worker_that_ends_or_is_reaped(counting):
    # More than a hundred: the window is long.
    await counting.hold(n=103, flags="s")
    await counting.hold(V, n=2, flags="s")
    assert (await counting.hold(V, base=1, flags="se"))[5:] == [104, 0]
    await counting.link.execute(FENCE, (counting.keys.worker(counting.at, V),))
    assert (await counting.hold(V, gen=-1, base=0, flags="s"))[5:] == [103, 0]
    assert await told_counts(counting) == [103, 104, 103]


async def test_count_that_returned_to_its_old_value_is_not_announced_again(counting):
    await counting.hold(n=101, flags="s")
    assert (await counting.hold(V, n=1, flags="s"))[6] > 0
    assert (await counting.hold(V, base=0, flags="s"))[5:] == [101, 0]
    assert await told_counts(counting) == [101]


async def test_channel_without_subscribers_has_no_announced_count(counting):
    await counting.hold(n=1, flags="s")
    assert (await counting.hold(base=0, flags="s"))[5:] == [0, 0]
    assert await counting.link.ask(b"EXISTS", announced_count(counting.keys, A, "news")) == 0


async def test_announced_count_is_stored_for_a_minute_and_while_another_waits(counting):
    key = announced_count(counting.keys, A, "news")
    await counting.hold(n=101, flags="s")
    assert 50 < await counting.link.ask(b"TTL", key) <= 60
    assert (await counting.hold(V, n=1, flags="s"))[6] > 0
    assert await counting.link.ask(b"TTL", key) > 60
    await age(counting, 5000)
    assert (await counting.hold(V, base=1, flags="s"))[5:] == [102, 0]
    assert 50 < await counting.link.ask(b"TTL", key) <= 60


async def test_unchanged_count_is_not_announced_again_after_a_minute(counting):
    await counting.hold(n=2, flags="s")
    await counting.link.ask(b"DEL", announced_count(counting.keys, A, "news"))
    assert (await counting.hold(base=2, flags="s"))[5:] == [2, 0]
    assert (await counting.hold(base=3, flags="s"))[5:] == [3, 0]
    assert await told_counts(counting) == [2, 3]
    # A call that doesn't keep the sum: it isn't known any more whether it was announced.
    await counting.link.ask(b"DEL", announced_count(counting.keys, A, "news"))
    await counting.hold(base=3)
    assert (await counting.hold(base=3, flags="s"))[5:] == [3, 0]
    assert await told_counts(counting) == [3]


async def test_cached_event_comes_with_roster_and_count_each_in_its_place(link, keys):
    room = await Room(link, keys, "presence-cache-room").open()
    assert (await room.hold(joins=[("u", "")], flags="rc"))[5:] == [[b"u", W.encode() + b"\n"], None]
    await link.ask(b"SET", keys.cached(A, room.channel), b"tail")
    assert (await room.hold(base=1, joins=[("u", "")], flags="c"))[5:] == [b"tail"]
    plain = await Room(link, keys, "cache-news", "c").open()
    assert (await plain.hold(n=1, flags="cs"))[5:] == [None, 1, 0]


# hold: users and connections


async def test_user_is_online_with_its_first_worker_and_offline_with_its_last(link, keys):
    user = await Room(link, keys, "%u:1", "u").open()
    await user.hold(base=1)
    await user.hold(base=2)
    await user.hold(V, base=1)
    await user.hold(base=0)
    await user.hold(V, base=0)
    await user.hold(V, base=0)
    await link.ask(b"PING")
    assert [(push[:1], push.split(b" ")[1].decode()) for push in user.pushes] == [(b"o", W), (b"f", V)]
    assert await user.occupied() == set()


async def test_connections_are_admitted_up_to_the_cap_over_all_workers(link, keys):
    app = await Room(link, keys, "%conn", "q").open()
    assert (await app.hold(n=2, cap=5))[2] == b"11"
    assert (await app.hold(V, n=5, cap=5))[2] == b"11100"
    assert (await app.hold(base=2, n=1, cap=5))[2] == b"0"
    assert (await app.hold(base=1, n=2, cap=5))[2] == b"10"
    assert (await app.hold(base=9, n=1, cap=5))[2] == b"0"
    assert (await app.hold(base=9, n=1))[2] == b"1"
    assert await app.fields() == {b"gen": b"1", b"7:%conn": b"q10"}
    assert await app.occupied() == set()
    await app.link.ask(b"PING")
    assert app.pushes == []


# hold: the position of a history (test_outbox.py tests rows for webhooks)


async def test_first_join_begins_a_history_and_later_ones_get_its_position(plain, link):
    hm = plain.keys.history_meta(A, "news")
    reply = await plain.hold(n=1, flags="h", more=("E1", 60, 9, ""))
    assert reply[5:] == [b"E1", reply[1]]
    assert 86_400 < await link.ask(b"TTL", hm) <= 86_460
    assert (await plain.hold(V, n=1, flags="h", more=("E2", 600, 9, "")))[5:] == [b"E1", reply[1]]
    assert 86_460 < await link.ask(b"TTL", hm) <= 87_000
    # Something was published.
    await link.ask(b"HSET", hm, b"s", 12345, b"t", 60)
    assert (await plain.hold(base=1, n=1, flags="h", more=("E3", 60, 9, "")))[5:] == [b"E1", b"12345"]
    assert await link.ask(b"TTL", hm) > 2_600_000


async def test_history_begins_only_below_the_cap_or_where_one_exists(plain, link):
    keys, soon = plain.keys, int(time.time() * 1000) + 60_000
    ha = keys.histories(plain.at, A)
    await link.ask(b"ZADD", ha, soon, "other", 1, "long ago")
    assert (await plain.hold(n=1, flags="h", more=("E1", 60, 1, "")))[5:] == [None, b"0"]
    assert await link.ask(b"EXISTS", keys.history_meta(A, "news")) == 0
    await link.ask(b"ZADD", ha, soon, "news")
    assert (await plain.hold(n=1, flags="h", more=("E1", 60, 1, "")))[5] == b"E1"


async def test_history_of_another_era_is_a_new_one_with_the_same_lifetime(plain, link):
    hm = plain.keys.history_meta(A, "news")
    first = await plain.hold(n=1, flags="h", more=("E1", 60, 9, "a"))
    assert (await plain.hold(V, n=1, flags="h", more=("E2", 60, 9, "a")))[5:] == [b"E1", first[1]]
    await link.ask(b"EXPIRE", hm, 2_678_400)
    again = await plain.hold(base=1, n=1, flags="h", more=("E3", 60, 9, "b"))
    assert again[5:] == [b"E3", again[1]]
    assert int(again[1]) > int(first[1])
    assert await link.ask(b"TTL", hm) > 2_600_000
    # Beyond the cap no new one begins, and the old one doesn't count.
    await link.ask(b"ZREM", plain.keys.histories(shard(A, "news"), A), "news")
    assert (await plain.hold(base=2, n=1, flags="h", more=("E4", 60, 0, "c")))[5] is None


async def test_fields_of_a_reply_of_hold_come_in_order(link, keys):
    room = await Room(link, keys, "presence-cache-room").open()
    await link.ask(b"SET", keys.cached(A, room.channel), b"tail")
    flags, joins = "rchomXd", [("u", ""), ("v", "")]
    reply = await room.hold(joins=joins, flags=flags, more=("E1", 60, 9, ""))
    users = {b"u": f"{W}\n".encode(), b"v": f"{W}\n".encode()}
    roster, *rest = reply[5:]
    assert dict(zip(roster[::2], roster[1::2], strict=True)) == users
    assert rest == [b"tail", b"E1", reply[1], 0]


# publish, spend


async def test_publish_and_spend_are_refused_when_redis_has_no_memory_left(link, keys):
    await link.ask(b"CONFIG", b"SET", b"maxmemory", 1)
    try:
        with pytest.raises(hiredis.ReplyError, match="OOM"):
            await link.execute(SPEND, (keys.spent(A, "d"),), (1, 5, 0, 60))
        names, _ = encode(keys, A, "cache-a", "c", b"", None, 60)
        with pytest.raises(hiredis.ReplyError, match="OOM"):
            await link.execute(PUBLISH, names, (keys.publish, b"t", "c", "tail", 60, 9, 60, A, "cache-a"))
    finally:
        await link.ask(b"CONFIG", b"SET", b"maxmemory", 0)


async def test_publish_caches_and_returns_its_receivers_each_time_it_is_repeated(link, keys):
    pushes = []
    link.on_push = lambda topic, payload: pushes.append(payload)
    topic = keys.topic(A, "cache-a")
    link.subscribe([topic])
    names, _ = encode(keys, A, "cache-a", "ci", b"", None, 120, once="x")
    args = (keys.publish, topic, "ci", "- - 0 1\ne", 60, 9, 120, A, "cache-a")
    first = await link.execute(PUBLISH, names, args)
    again = await link.execute(PUBLISH, names, args)
    assert (first, again) == ([b"OK", 1, b"0", b"", 0, 0, 0], [b"OK", 1])
    assert pushes == [b"e 0 0 - - 0 1\ne"]
    assert await link.ask(b"GET", names[0]) == b"- - 0 1\ne"
    assert await link.execute(PUBLISH, names[3:], (keys.publish, topic, "i", "other", 0, 0, 120)) == [b"OK", 1]


class Caching:
    """Publishes to cache channels of one shard. `channels` is two of them."""

    def __init__(self, link: Link, keys: Keys) -> None:
        self.link, self.keys, self.at = link, keys, 5
        self.names = keys.in_shard(self.at)
        self.counted = keys.cached_channels(self.at, A)
        self.pushes: list[bytes] = []
        link.on_push = lambda topic, payload: self.pushes.append(payload)
        link.subscribe([self.names.topic(A, channel) for channel in ("cache-a", "cache-b")])

    async def publish(self, channel: str, data: str, *, cap: int = 1, seconds: int = 60) -> PublishReply:
        tail = f"- - 0 1\ne{data}".encode()
        terms = CacheTerms(seconds, cap)
        return decode(await self.link.execute(PUBLISH, *encode(self.names, A, channel, "c", tail, terms, 60)))

    async def cached(self, channel: str) -> str | None:
        tail = await self.link.ask(b"GET", self.names.cached(A, channel))
        return tail and tail[9:].decode()


@pytest.fixture
def caching(link, keys):
    return Caching(link, keys)


async def test_event_beyond_the_cap_on_cached_channels_is_published_and_not_cached(caching):
    assert not (await caching.publish("cache-a", "1")).uncached
    assert (await caching.publish("cache-b", "2")) == PublishReply(1, uncached=True)
    assert not (await caching.publish("cache-a", "3")).uncached
    assert (await caching.cached("cache-a"), await caching.cached("cache-b")) == ("3", None)
    assert [push[-1:] for push in caching.pushes] == [b"1", b"2", b"3"]
    assert not (await caching.publish("cache-b", "4", cap=2)).uncached
    assert await caching.cached("cache-b") == "4"


async def test_cached_event_that_expired_leaves_its_place_to_another_channel(caching, link):
    before_ms = await now_ms(link)
    await caching.publish("cache-a", "1", seconds=604_800)
    after_ms = await now_ms(link)
    ends_ms = int(float(await link.ask(b"ZSCORE", caching.counted, b"cache-a")))
    assert before_ms <= ends_ms - 604_800_000 <= after_ms
    # The table outlives its entries, also if no new channel comes.
    await link.ask(b"EXPIRE", caching.counted, 60)
    await caching.publish("cache-a", "1", seconds=604_800)
    assert await link.ask(b"TTL", caching.counted) > 604_800
    await link.ask(b"ZADD", caching.counted, after_ms - 1, b"cache-a")
    assert not (await caching.publish("cache-b", "2")).uncached
    assert await link.ask(b"ZRANGE", caching.counted, 0, -1) == [b"cache-b"]
    # It has no place any more, and the event that it has is not its last one.
    assert (await caching.publish("cache-a", "3")).uncached
    assert await caching.cached("cache-a") is None


async def test_event_that_is_not_cached_leaves_the_marker_of_the_reported_miss(caching, link):
    marker = caching.names.cache_miss(A, "cache-b")
    await link.ask(b"SET", marker, b"1")
    await caching.publish("cache-b", "1", cap=0)
    assert await link.ask(b"EXISTS", marker) == 1
    await caching.publish("cache-b", "2")
    assert await link.ask(b"EXISTS", marker) == 0


# publish, history, locate, clear: a channel's history


class Story:
    """One channel with history, and calls of the scripts on it."""

    def __init__(self, link: Link, keys: Keys, channel: str = "news") -> None:
        self.link, self.keys, self.channel = link, keys, channel
        self.at = shard(A, channel)
        self.topic = keys.topic(A, channel)
        self.h, self.hm, self.ha = keys.history(A, channel), keys.history_meta(A, channel), keys.histories(self.at, A)
        self.pushes: list[bytes] = []
        link.on_push = lambda topic, payload: self.pushes.append(payload)
        link.subscribe([self.topic])

    async def publish(
        self, data="x", *, keep=100, seconds=60, cap=9, epoch="E1", era="", flags="h", more=(), once=""
    ) -> list:
        names, _ = encode(self.keys, A, self.channel, flags, b"", None, 60, once=once)
        args = (self.keys.publish, self.topic, flags, f"- - 0 1\ne{data}", 0, 0, 60, A, self.channel)
        return await self.link.execute(PUBLISH, names, (*args, keep, seconds, cap, epoch, era, *more))

    async def read(self, after=0, upto="+", count=64, most=10_000, end="first") -> tuple:
        """Epoch, top, more and the messages, each as (offset, prev, data)."""
        reply = await self.link.execute(HISTORY, (self.h, self.hm), (after, upto, count, most, end))
        epoch, top, more, flat, _base, _ended = reply
        rows = [(int(flat[at]), int(flat[at + 1]), flat[at + 2][9:].decode()) for at in range(0, len(flat), 3)]
        return epoch, int(top), more, rows

    async def locate(self, n, start="+", seconds=0, most=100_000) -> list[int]:
        """The offset, how many messages were counted, and whether there may be more."""
        reply = await self.link.execute(LOCATE, (self.h, self.hm), (start, n, seconds, most))
        return [int(number) for number in reply]


@pytest.fixture
def story(link, keys):
    return Story(link, keys)


async def test_stored_event_has_its_offset_and_the_one_before(story, link, keys):
    before_ms = await now_ms(link)
    offsets = [int((await story.publish(data))[2]) for data in "abc"]
    assert offsets == sorted(set(offsets))
    assert before_ms <= offsets[0] // 1000 <= await now_ms(link)
    assert int(await link.ask(b"GET", keys.clock(story.at))) == offsets[2]
    # The first message of a new epoch follows no known message.
    prevs = [offsets[0] - 1, *offsets[:2]]
    assert story.pushes == [
        b"e %d %d - - 0 1\ne%b" % terms for terms in zip(offsets, prevs, (b"a", b"b", b"c"), strict=True)
    ]
    assert await story.read() == (b"E1", offsets[2], 0, list(zip(offsets, prevs, "abc", strict=True)))


async def test_offsets_go_on_from_the_clock_or_from_the_last_one(story, link, keys):
    ahead = 4_000_000_000_000_000
    await link.ask(b"SET", keys.clock(story.at), ahead)
    assert (await story.publish())[2] == b"4000000000000001"
    await link.ask(b"DEL", keys.clock(story.at))
    assert (await story.publish())[2] == b"4000000000000002"


async def test_epoch_is_that_of_the_first_message_until_the_history_is_lost(story, link):
    assert (await story.publish(epoch="E1"))[3] == b"E1"
    assert (await story.publish(epoch="E2"))[3] == b"E1"
    await link.ask(b"DEL", story.h, story.hm)
    assert (await story.publish(epoch="E3"))[3] == b"E3"
    ((offset, prev, _),) = (await story.read())[3]
    assert prev == offset - 1


async def test_no_more_is_stored_than_the_rule_says_and_no_longer(story, link):
    offsets = [int((await story.publish(str(n), keep=3, seconds=3_600))[2]) for n in range(5)]
    assert [row[0] for row in (await story.read())[3]] == offsets[2:]
    assert await link.ask(b"XLEN", story.h) == 3
    # Plus the time that it may wait to be trimmed.
    assert 3_600_000 < await link.ask(b"PTTL", story.h) <= 3_660_000
    assert 3_600 + 86_400 < await link.ask(b"TTL", story.hm) <= 3_660 + 86_400


async def test_message_older_than_the_rule_says_is_hidden_at_once_and_trimmed_by_the_next(story, link):
    # As if it had been published an hour and a second ago, and the stream were to be trimmed in a minute.
    first = (await now_ms(link) - 3_601_000) * 1000
    await link.ask(b"XADD", story.h, b"%d-0" % first, b"p", first - 1, b"d", b"- - 0 1\nea")
    due_ms = await now_ms(link) + 60_000
    await link.ask(b"HSET", story.hm, b"e", b"E1", b"s", first, b"r", b"", b"t", 3_600, b"x", due_ms)
    second = int((await story.publish("b", seconds=3_600))[2])
    assert await link.ask(b"XLEN", story.h) == 2
    assert await story.read() == (b"E1", second, 0, [(second, first, "b")])
    assert await story.locate(9) == [first, 1, 0]
    await link.ask(b"HSET", story.hm, b"x", 0)
    third = int((await story.publish("c", seconds=3_600))[2])
    assert await link.ask(b"XLEN", story.h) == 2
    assert [row[0] for row in (await story.read())[3]] == [second, third]


async def test_stream_is_trimmed_when_it_is_due_or_the_rule_has_changed(story, link):
    async def is_tidied_by(seconds: int) -> bool:
        await link.ask(b"PERSIST", story.h)
        await story.publish(seconds=seconds)
        return await link.ask(b"TTL", story.h) > 0

    assert await is_tidied_by(3600)
    assert not await is_tidied_by(3600)
    before_ms = await now_ms(link)
    assert await is_tidied_by(1800)
    after_ms = await now_ms(link)
    assert not await is_tidied_by(1800)
    # A minute later.
    assert before_ms + 60_000 <= int(await link.ask(b"HGET", story.hm, b"x")) <= after_ms + 60_000
    await link.ask(b"HSET", story.hm, b"x", after_ms)
    assert await is_tidied_by(1800)


async def test_page_is_bounded_by_count_and_by_bytes_and_says_if_there_is_more(story):
    offsets = [int((await story.publish(str(n)))[2]) for n in range(40)]
    for count in (1, 15, 16, 17, 39):
        _, _, more, rows = await story.read(count=count)
        assert (more, [row[0] for row in rows]) == (1, offsets[:count])
        _, _, more, rows = await story.read(count=count, end="last")
        assert (more, [row[0] for row in rows]) == (1, offsets[-count:])
    assert (await story.read(count=40))[2] == 0
    _, _, more, rows = await story.read(after=offsets[9], upto=offsets[19])
    assert (more, [row[0] for row in rows]) == (0, offsets[10:20])
    _, _, more, rows = await story.read(most=3 * 10)
    assert (more, len(rows)) == (1, 3)
    _, _, more, rows = await story.read(most=1, end="last")
    assert (more, [row[0] for row in rows]) == (1, offsets[-1:])
    assert await story.read(after=offsets[-1]) == (b"E1", offsets[-1], 0, [])
    assert await story.read(after=offsets[-1] + 10**9) == (b"E1", offsets[-1], 0, [])


async def test_last_messages_begin_after_the_offset_that_locate_finds(story, link):
    assert await story.locate(3) == [0, 0, 0]
    offsets = [int((await story.publish(str(n)))[2]) for n in range(10)]
    assert await story.locate(3) == [offsets[6], 3, 1]
    assert await story.locate(3, start=offsets[6]) == [offsets[3], 3, 1]
    assert await story.locate(99) == [offsets[0] - 1, 10, 0]
    assert await story.locate(5, start=1) == [1, 0, 0]
    before_ms = await now_ms(link)
    ago = (await story.locate(0, seconds=30))[0]
    assert before_ms - 30_000 <= ago / 1000 < await now_ms(link) - 30_000 + 1


async def test_locate_reads_no_more_than_it_may_and_is_called_again_for_the_rest(story):
    """It had Redis copy up to 256 messages of up to 256 KiB in one step."""
    offsets = [int((await story.publish("x" * 1_000))[2]) for _ in range(50)]
    assert await story.locate(40, most=10_000) == [offsets[33], 16, 1]
    assert await story.locate(24, start=offsets[33], most=10_000) == [offsets[17], 16, 1]
    assert await story.locate(8, start=offsets[17], most=10_000) == [offsets[9], 8, 1]
    assert await story.locate(40, most=20_000) == [offsets[17], 32, 1]


async def test_channel_beyond_the_cap_is_sent_live_only_until_another_expires(link, keys):
    # Two channels of one shard.
    names = [f"news-{n}" for n in range(400)]
    one, other = (Story(link, keys, name) for name in [name for name in names if shard(A, name) == 5][:2])
    assert (await one.publish(cap=1))[4] == 0
    assert (await one.publish(cap=1))[4] == 0
    reply = await other.publish(cap=1)
    assert (reply[2], reply[3], reply[4]) == (b"0", b"", 1)
    assert other.pushes[-1] == b"e 0 0 - - 0 1\nex"
    assert await link.ask(b"EXISTS", other.h, other.hm) == 0
    # Its stream has expired.
    await link.ask(b"ZADD", one.ha, 1, one.channel)
    await link.ask(b"HDEL", one.hm, b"x")
    assert (await other.publish(cap=1))[4] == 0
    assert await link.ask(b"ZRANGE", one.ha, 0, -1) == [other.channel.encode()]
    assert (await one.publish(cap=1))[4] == 1


async def test_in_another_era_a_history_is_a_new_one_and_the_old_one_stays(story):
    one = int((await story.publish("a", epoch="E1", era="a"))[2])
    assert (await story.publish("b", epoch="E2", era="a"))[3] == b"E1"
    reply = await story.publish("c", epoch="E3", era="b")
    assert reply[3] == b"E3"
    third = int(reply[2])
    epoch, top, _, rows = await story.read()
    assert (epoch, top, [data for *_, data in rows]) == (b"E3", third, ["a", "b", "c"])
    # No message has the offset that it follows.
    assert rows[0][0] == one
    assert rows[2][1] not in (rows[0][0], rows[1][0])


async def test_history_that_missed_an_event_is_a_new_one_later(link, keys, story):
    await story.publish(epoch="E1")
    await link.ask(b"DEL", story.ha, story.h)
    await link.ask(b"HDEL", story.hm, b"x")
    await story.publish(cap=0)
    assert (await story.publish(epoch="E2"))[3] == b"E2"


async def test_cleared_history_has_a_new_epoch_and_its_offsets_grow_on(story, link, keys):
    names = (story.h, story.hm, story.ha)
    args = (keys.publish, story.topic, "E2", story.channel)
    assert await link.execute(CLEAR, names, args) == 0
    first = int((await story.publish("a"))[2])
    assert await link.execute(CLEAR, names, args) == 1
    assert story.pushes[1:] == [b"x E2"]
    assert await story.read() == (b"E2", first, 0, [])
    assert await link.ask(b"EXISTS", story.ha) == 0
    second = int((await story.publish("b", epoch="E9"))[2])
    assert await story.read() == (b"E2", second, 0, [(second, first, "b")])
    # It expires by itself, and counts among the histories of the app again.
    assert await link.ask(b"TTL", story.h) > 0
    assert await link.ask(b"EXISTS", story.ha) == 1


async def test_repeated_publish_is_stored_once(story):
    first = await story.publish(flags="hi", once="x")
    assert await story.publish("other", flags="hi", once="x") == [b"OK", 1]
    assert (await story.read())[1:] == (int(first[2]), 0, [(int(first[2]), int(first[2]) - 1, "x")])


async def test_row_for_webhooks_has_the_stamp_that_the_message_has(story, link, keys):
    reply = await story.publish(flags="hr", more=("u1", "ab" * 16, "{}"))
    await story.publish(flags="r", more=("", "", '{"n":1}'))
    rows = await link.ask(b"XRANGE", keys.outbox(story.at), b"-", b"+")
    assert rows[0][0] == reply[2] + b"-0"
    first, second = (dict(zip(row[1][::2], row[1][1::2], strict=True)) for row in rows)
    time_ms = first.pop(b"t")
    assert abs(int(time_ms) - int(reply[2]) // 1000) <= 1
    assert first == {
        b"k": b"client_event",
        b"a": A.encode(),
        b"c": b"news",
        b"x": b"{}",
        b"u": b"u1",
        b"i": b"ab" * 16,
    }
    del second[b"t"]
    assert second == {b"k": b"client_event", b"a": A.encode(), b"c": b"news", b"x": b'{"n":1}'}
    assert story.pushes[1] == b"e 0 0 - - 0 1\nex"


async def test_rows_of_client_events_stop_at_half_of_the_bound(story, link, keys):
    out = keys.outbox(story.at)
    lua = "for n = 1, 10000 do redis.call('XADD', KEYS[1], n .. '-0', 'k', 'x') end"
    await link.ask(b"EVAL", lua, 1, out)
    assert (await story.publish(flags="r", more=("", "", "{}")))[4:] == [0, 1, 0]
    assert await link.ask(b"XLEN", out) == 10_000
    await link.ask(b"XTRIM", out, b"MAXLEN", b"=", 9_999)
    assert (await story.publish(flags="r", more=("", "", "{}")))[4:] == [0, 0, 0]


async def test_history_can_be_read_and_cleared_when_redis_has_no_memory_left(story, link, keys):
    await story.publish()
    await link.ask(b"CONFIG", b"SET", b"maxmemory", 1)
    try:
        with pytest.raises(hiredis.ReplyError, match="OOM"):
            await story.publish()
        assert len((await story.read())[3]) == 1
        assert (await story.locate(1))[1] == 1
        args = (keys.publish, story.topic, "E2", story.channel)
        assert await link.execute(CLEAR, (story.h, story.hm, story.ha), args) == 1
    finally:
        await link.ask(b"CONFIG", b"SET", b"maxmemory", 0)
