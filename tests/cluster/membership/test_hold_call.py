"""The codec of `hold`: both directions by themselves, and against the real script."""

import re

import pytest

from cluster.announced import announced_count
from helpers.unkeyed import shard
from redpoll.cluster.hooks import Hook
from redpoll.cluster.membership import hold_call
from redpoll.cluster.membership.hold_call import (
    CHANNEL,
    PRESENCE,
    Flag,
    HistoryTerms,
    HoldCall,
    HoldReply,
    decode,
    encode,
    hold_keys,
    hook_flags,
)
from redpoll.cluster.redis.keys import Keys
from redpoll.cluster.redis.scripts import HOLD, REGISTER

W = "0123456789ab.1.0"
ALL_HOOKS = Hook.OCCUPANCY + Hook.MEMBERS + Hook.CLIENT_EVENTS + Hook.CACHE_MISSES + Hook.COUNTS


def letters(of: type) -> dict[str, str]:
    return {name: letter for name, letter in vars(of).items() if name.isupper()}


def call(flags="", base=0, gone=(), users=(), joins=(), cap=0) -> HoldCall:
    return HoldCall(base, cap, flags, gone, users, joins, True, False)


@pytest.mark.parametrize(
    ("hooks", "channel", "kind", "flags"),
    [
        ("", "news", "c", ""),
        ("omcxs", "news", "c", "oS"),
        ("omcxs", "cache-news", "c", "oSX"),
        ("omcxs", "presence-room", "p", "om"),
        ("omcxs", "presence-cache-room", "p", "omX"),
        ("ms", "presence-room", "p", "m"),
        ("m", "news", "c", ""),
        ("c", "news", "c", ""),
        ("omcxs", "private-redpoll.console", "c", ""),
        ("omcxs", "%u:a", "u", ""),
        ("omcxs", "%conn", "q", ""),
        ("omcxs", "#server-to-user-a", "t", ""),
    ],
)
def test_hooks_become_the_flags_that_apply_to_the_channel(hooks, channel, kind, flags):
    assert set(ALL_HOOKS) == set("omcxs")
    assert hook_flags(hooks, channel, kind) == flags


def test_lua_and_python_use_the_same_name_for_each_letter():
    source = HOLD.source.decode()
    flags = dict(re.findall(r"^local ([A-Z_]+) = flag\('(\w)'\)", source, re.MULTILINE))
    assert flags == letters(Flag)
    kinds = dict(re.findall(r"^local ([A-Z_]+) = kind == '(\w)'", source, re.MULTILINE))
    assert kinds == {name: getattr(hold_call, name) for name in ("CHANNEL", "PRESENCE", "SIGNED_IN", "CONNECTIONS")}


def test_arguments_come_in_the_order_of_the_script():
    keys = Keys()
    users = (("b", b"1"), ("c", b""))
    history = HistoryTerms("epoch", 60, 5, "0e")
    names, args = encode(
        keys, W, 3, "7", "presence-a", PRESENCE, b"topic", call("rh", 4, ("a",), users, cap=9), "d", history, 0, 2_500
    )
    assert args[:10] == [W, 3, PRESENCE, "rhd", "7", "presence-a", 4, 9, b"topic", b"PUBLISH"]
    assert args[10:] == [1, 2, "a", "b", b"1", "c", b"", "epoch", 60, 5, "0e", 2_500]
    assert names == hold_keys(keys, W, "7", "presence-a", PRESENCE, "rhd")
    public = encode(keys, W, 3, "7", "news", CHANNEL, b"topic", call(joins=[object(), object()]))[1]
    assert public[10:] == [0, 2]


def test_keys_follow_the_kind_and_the_flags():
    keys, at = Keys("px"), shard("A", "C")
    common = [keys.worker(at, "W"), keys.counts("A", "C"), keys.occupied(at, "A"), keys.clock(at)]
    common += [keys.outbox(at), keys.left(at)]
    assert hold_keys(keys, "W", "A", "C", "c", "ukeoSXd") == common
    assert hold_keys(keys, "W", "A", "C", "p", "ro") == [*common, keys.members("A", "C")]
    histories = [keys.history_meta("A", "C"), keys.histories(at, "A")]
    cached = [keys.cached("A", "C"), keys.cache_miss("A", "C")]
    assert hold_keys(keys, "W", "A", "C", "c", "schX") == [
        *common,
        announced_count(keys, "A", "C"),
        *cached,
        *histories,
    ]
    assert hold_keys(keys, "W", "A", "C", "c", "c") == [*common, *cached[:1]]


def test_reply_is_read_by_the_flags_of_its_call():
    head = [b"OK", b"17", b"10", [0], []]
    assert decode("", head) == HoldReply(17, b"10", [0], [])
    whole = decode("rchsS", [*head, [b"u", b"w\n"], None, b"e", b"5", 3, 250, 1])
    assert whole == HoldReply(17, b"10", [0], [], [b"u", b"w\n"], None, "e", 5, 3, 250, 1)
    assert decode("h", [*head, None, b"0"]).epoch is None
    assert decode("X", [*head, 2]).dropped == 2


@pytest.mark.parametrize("refusal", [b"FENCED", b"STALE"])
def test_refusal_is_no_reply(refusal):
    assert decode("rchsS", [refusal]) is None


def test_big_reply_is_the_roster_before_the_cached_event():
    assert [call(flags).big_reply for flags in ("", "shom", "ch", "rc")] == ["", "", "c", "r"]


def test_call_adds_a_subscription_for_each_join_or_for_each_user_of_a_reassertion():
    assert call(joins=[object(), object()]).joining == 2
    assert call(users=[("a", b"")], joins=[object()]).joining == 1
    assert call(users=[("a", b""), ("b", b"")]).joining == 2


async def run(link, keys, channel, kind, hold, history=None, extra_flags=""):
    names, args = encode(keys, W, 1, "7", channel, kind, keys.topic("7", channel), hold, extra_flags, history)
    return decode(hold.flags, await link.execute(HOLD, names, args))


async def test_script_understands_every_call_and_its_reply_has_every_field(link, keys):
    channel = "presence-cache-a"
    await link.execute(REGISTER, (keys.worker(shard("7", channel), W),), (1, 1))
    await link.ask(b"SET", keys.cached("7", channel), b"tail")
    history = HistoryTerms("epoch", 60, 5, "")
    users = (("a", b"{}"), ("b", b""), ("c", b""))
    reply = await run(link, keys, channel, PRESENCE, call("rchomX", users=users, cap=2), history, Flag.DEBOUNCE)
    assert (reply.accepted, reply.added, reply.removed, reply.dropped) == (b"110", [0, 1], [], 0)
    assert dict(zip(reply.roster[::2], reply.roster[1::2], strict=True)) == {
        b"a": W.encode() + b"\n{}",
        b"b": W.encode() + b"\n",
    }
    assert (reply.cached, reply.epoch) == (b"tail", "epoch")
    assert 0 < reply.top <= reply.stamp
    reply = await run(link, keys, channel, PRESENCE, call(base=1, gone=("x", "b")))
    assert (reply.accepted, reply.added, reply.removed) == (b"", [], [1])


async def test_script_announces_the_count_and_says_when_it_may_do_so_again(link, keys):
    await link.execute(REGISTER, (keys.worker(shard("7", "news"), W),), (1, 1))
    first = await run(link, keys, "news", CHANNEL, call("sS", joins=[object()] * 101))
    assert (first.accepted, first.total, first.due_ms, first.dropped) == (b"1" * 101, 101, 0, 0)
    second = await run(link, keys, "news", CHANNEL, call("s", base=101, joins=[object()]))
    assert second.total == 102
    # Above a hundred subscribers.
    assert 0 < second.due_ms <= 5000


async def test_script_refuses_another_connections_call(link, keys):
    assert await run(link, keys, "news", CHANNEL, call(joins=[object()])) is None
    await link.execute(REGISTER, (keys.worker(shard("7", "news"), W),), (2, 1))
    assert await run(link, keys, "news", CHANNEL, call(joins=[object()])) is None
