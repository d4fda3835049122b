"""The codec of `publish`: both directions by themselves, and against the real script."""

import re

import pytest

from helpers.unkeyed import shard
from redpoll.cluster.publish_call import (
    CacheTerms,
    ChannelEnded,
    Flag,
    HistoriesFull,
    PublishReply,
    RowTerms,
    StoreTerms,
    decode,
    encode,
)
from redpoll.cluster.redis.keys import Keys
from redpoll.cluster.redis.scripts import PUBLISH

CACHE = CacheTerms(30, 5)
STORE = StoreTerms(10, 60, 5, "epoch", "0e")
ROW = RowTerms("user", "trace", b"{}")


def test_lua_and_python_use_the_same_name_for_each_letter():
    found = dict(re.findall(r"^local ([A-Z_]+) = flag\('(\w)'\)", PUBLISH.source.decode(), re.MULTILINE))
    assert found == {name: letter for name, letter in vars(Flag).items() if name.isupper()}


def test_keys_follow_the_flags():
    keys, at = Keys("px"), shard("A", "C")
    cached = [keys.cached("A", "C"), keys.cache_miss("A", "C"), keys.cached_channels(at, "A")]
    stored = [
        keys.history("A", "C"),
        keys.history_meta("A", "C"),
        keys.histories(at, "A"),
        keys.counts("A", "C"),
    ]
    once = [keys.published("A", "C", "x", 3)]
    for flags, expected in {
        "": [],
        "c": cached,
        "h": [keys.clock(at), *stored],
        "r": [keys.clock(at), keys.outbox(at)],
        "chri": [*cached, keys.clock(at), *stored, keys.outbox(at), *once],
    }.items():
        assert encode(keys, "A", "C", flags, b"", None, 0, once="x", index=3)[0] == expected


def test_arguments_come_in_the_order_of_the_script():
    keys = Keys()
    _, args = encode(keys, "7", "a", "chr", b"tail", CACHE, 120, STORE, ROW)
    assert args[:9] == [b"PUBLISH", keys.topic("7", "a"), "chr", b"tail", *CACHE, 120, "7", "a"]
    assert args[9:] == [*STORE, *ROW]
    # Without a history its fields are empty, so that those of the row keep their index.
    assert encode(keys, "7", "a", "r", b"tail", None, 120, row=ROW)[1][4:] == [
        *(0, 0, 120, "7", "a"),
        *(0, 0, 0, "", ""),
        *ROW,
    ]
    assert encode(keys, "7", "a", "i", b"tail", None, 120, once="x", index=2)[1][9:] == []


def test_reply_is_read_by_name():
    assert decode([b"OK", 3]) == PublishReply(3)
    assert decode([b"OK", 3, b"0", b"", 1, 1, 0]) == PublishReply(3, 0, "", True, True, False)
    assert decode([b"OK", 3, b"0", b"", 0, 0, 1]) == PublishReply(3, uncached=True)


async def test_script_understands_every_call_and_its_reply_has_every_field(link, keys):
    flags = Flag.CACHE + Flag.HISTORY + Flag.ROW + Flag.ONCE
    names, args = encode(keys, "7", "cache-a", flags, b"- - 0 1\ne", CACHE, 120, STORE, ROW, "x", 1)
    first = decode(await link.execute(PUBLISH, names, args))
    assert (first.receivers, first.epoch) == (0, "epoch")
    assert (first.over_cap, first.dropped, first.uncached) == (False, False, False)
    assert first.offset > 0
    assert decode(await link.execute(PUBLISH, names, args)) == PublishReply(0)
    assert await link.ask(b"GET", keys.cached("7", "cache-a")) == b"- - 0 1\ne"
    ((_, row),) = await link.ask(b"XRANGE", keys.outbox(shard("7", "cache-a")), b"-", b"+")
    fields = dict(zip(row[::2], row[1::2], strict=True))
    assert (fields[b"k"], fields[b"u"], fields[b"i"], fields[b"x"]) == (b"client_event", b"user", b"trace", b"{}")


async def test_script_says_that_the_app_has_no_history_left(link, keys):
    full = STORE._replace(max_histories=0)
    names, args = encode(keys, "7", "a", Flag.HISTORY, b"- - 0 1\ne", None, 120, full)
    assert decode(await link.execute(PUBLISH, names, args)) == PublishReply(0, 0, "", True, False)


async def test_nothing_is_published_after_the_event_that_ends_a_channel(link, keys):
    names, args = encode(keys, "7", "a", Flag.HISTORY + Flag.END, b"- - 0 1\ne", None, 120, STORE)
    last = decode(await link.execute(PUBLISH, names, args))
    for flags in (Flag.HISTORY, Flag.HISTORY + Flag.END):
        names, args = encode(keys, "7", "a", flags, b"- - 0 1\ne", None, 120, STORE)
        with pytest.raises(ChannelEnded):
            decode(await link.execute(PUBLISH, names, args))
    assert await link.ask(b"XLEN", keys.history("7", "a")) == 1
    # A request that is repeated because its answer was lost.
    once = Flag.HISTORY + Flag.END + Flag.ONCE
    for _ in range(2):
        names, args = encode(keys, "7", "b", once, b"- - 0 1\ne", None, 120, STORE, None, "x", 1)
        assert decode(await link.execute(PUBLISH, names, args)).receivers == 0
    assert last.offset > 0


async def test_event_that_cannot_be_stored_cannot_end_a_channel(link, keys):
    full = STORE._replace(max_histories=0)
    names, args = encode(keys, "7", "a", Flag.HISTORY + Flag.END, b"- - 0 1\ne", None, 120, full)
    with pytest.raises(HistoriesFull):
        decode(await link.execute(PUBLISH, names, args))
    assert await link.ask(b"EXISTS", keys.history_meta("7", "a")) == 0
