"""The short form of `hold`: the command, its reply, and that it does what the long form does."""

import random

import hiredis
import pytest

from helpers.unkeyed import shard
from redpoll.cluster.membership.hold_call import (
    CHANNEL,
    Flag,
    HoldCall,
    PlainHold,
    decode,
    encode,
    is_plain_call,
    plain_reply,
    with_source,
)
from redpoll.cluster.redis.keys import Keys
from redpoll.cluster.redis.scripts import FENCE, FENCED, HOLD, HOLD_PLAIN, REGISTER, STALE

WORKERS = ("0123456789ab.1.0", "0123456789ab.2.0", "0123456789ab.3.0")


def call(flags="", base=0, joins=0):
    return HoldCall(base, 0, flags, (), (), [object()] * joins, True, False)


def packed(keys, w, gen, channel, base=0, joins=0, share=None, app_id="7"):
    return PlainHold(keys).pack(w, gen, app_id, channel, base, joins, share)


def test_command_is_what_hiredis_packs():
    keys = Keys("px")
    for app_id, channel, base, joins, share in (
        ("7", "news", 0, 1, 31_250),
        ("a-long-id", "prädikat", 511, 512, None),
        ("7", "x" * 200, 1_000_000, 256, 0),
    ):
        at = shard(app_id, channel)
        names = (keys.worker(at, "W"), keys.occupied(at, app_id), keys.left(at), keys.counts(app_id, channel))
        expected = hiredis.pack_command(
            (*HOLD_PLAIN.command(names, ("W", 12, app_id, channel, base, joins, "" if share is None else share)),)
        )
        assert packed(keys, "W", 12, channel, base, joins, share, app_id) == expected


def test_packer_follows_the_name_and_the_connection_of_its_worker():
    keys = Keys()
    plain_hold = PlainHold(keys)
    for w, gen in (("V", 1), ("V", 2), ("W", 2)):
        assert plain_hold.pack(w, gen, "7", "news", 0, 1, None) == packed(keys, w, gen, "news", 0, 1)


@pytest.mark.parametrize(
    ("kind", "flags", "plain"),
    [
        ("c", "", True),
        ("c", Flag.OCCUPIED_LIMIT, True),
        ("c", Flag.OCCUPANCY_ROWS, False),
        ("p", "", False),
        ("q", "", False),
    ],
)
def test_only_channels_without_anything_but_counts_have_the_short_form(kind, flags, plain):
    assert is_plain_call(kind, call(flags)) is plain


def test_reply_has_a_digit_for_each_join():
    assert plain_reply(1, 1).accepted == b"1"
    assert plain_reply(2, 3).accepted == b"222"
    assert plain_reply(1, 0).accepted == b""


async def send(link, command):
    return await link.ask(*hiredis_arguments(command))


def hiredis_arguments(command):
    reader = hiredis.Reader()
    reader.feed(command)
    return reader.gets()


@pytest.mark.parametrize("seed", range(4))
async def test_short_and_long_form_leave_the_same_in_redis_and_answer_the_same(seed, link, keys):
    """The same random calls of three workers, in turn under two prefixes."""
    chance = random.Random(seed)
    others = Keys("other")
    channels = [f"news-{n}" for n in range(4)]
    shards = {shard("7", channel) for channel in channels}
    for each in (keys, others):
        for at in shards:
            for w in WORKERS:
                await link.execute(REGISTER, (each.worker(at, w),), (1, 1))
            # A leave that is held back for a webhook.
            await link.ask(b"ZADD", each.left(at), *(word for channel in channels for word in (1, f"v:7:{channel}")))
    attached = {}
    for _ in range(400):
        w, channel = chance.choice(WORKERS), chance.choice(channels)
        base, joins = chance.randrange(attached.get((w, channel), 0) + 1), chance.choice((0, 0, 1, 3))
        gen = chance.choice((1, 1, 1, 1, 1, 1, 1, 2))
        share = chance.choice((None, 0, 1, 2))
        flags = "" if share is None else Flag.OCCUPIED_LIMIT
        names, args = encode(others, w, gen, "7", channel, CHANNEL, b"topic", call(flags, base, joins), share=share)
        long = decode(flags, answer := await link.execute(HOLD, names, args))
        short = await send(link, packed(keys, w, gen, channel, base, joins, share))
        if long is None:
            assert short == answer == [STALE]
        else:
            assert plain_reply(short, joins).accepted == long.accepted
            attached[w, channel] = base + long.accepted.count(b"1")
        assert await dump(link, keys, shards, channels) == await dump(link, others, shards, channels)


async def dump(link, keys, shards, channels):
    found = []
    for at in sorted(shards):
        for w in WORKERS:
            found.append(await link.ask(b"HGETALL", keys.worker(at, w)))
        found.append(set(await link.ask(b"SMEMBERS", keys.occupied(at, "7"))))
        found.append(await link.ask(b"ZRANGE", keys.left(at), 0, -1))
    for channel in channels:
        found.append(await link.ask(b"HGETALL", keys.counts("7", channel)))
    return found


async def test_worker_that_is_unknown_or_reaped_is_fenced(link, keys):
    w, name = WORKERS[0], keys.worker(shard("7", "news"), WORKERS[0])
    command = packed(keys, w, 1, "news", 0, 1)
    assert await send(link, command) == [FENCED]
    await link.execute(REGISTER, (name,), (1, 1))
    assert await send(link, command) == 1
    await link.execute(FENCE, (name,), ())
    assert await send(link, command) == [FENCED]


async def test_call_is_repeated_with_its_source_at_once_when_redis_does_not_have_the_script(start_worker, link, truth):
    """As of other scripts: SCRIPT LOAD may be forbidden."""
    worker = await start_worker()
    await worker.attach("before")
    await link.ask(b"SCRIPT", b"FLUSH")
    await worker.attach("after")
    assert worker.registry.sync.errors == 0
    await truth.settled([worker])


def test_command_with_the_source_has_the_same_keys_and_arguments():
    command = packed(Keys(), "W", 12, "news", 3, 1)
    word, source, *more = with_source(command)
    assert (word, source) == (b"EVAL", HOLD_PLAIN.source)
    assert more == hiredis_arguments(command)[2:]
