import asyncio
from collections import Counter

import hiredis
import pytest

from redpoll.cluster.link import Link, LinkDown
from redpoll.cluster.scripts import BURY


async def test_commands_of_one_tick_are_one_write_and_answered_in_order(link):
    replies = []
    for number in range(1000):
        link.call(b"ECHO", b"%d" % number, done=replies.append)
    assert link.unanswered == 1000
    await link.ask(b"PING")
    assert replies == [b"%d" % number for number in range(1000)]
    assert link.unanswered == 0


async def test_error_of_one_command_affects_no_other(link):
    replies = []
    link.call(b"INCR", b"n", done=replies.append)
    link.call(b"NONSENSE", done=replies.append)
    link.call(b"INCR", b"n", done=replies.append)
    await link.ask(b"PING")
    assert (replies[0], type(replies[1]), replies[2]) == (1, hiredis.ReplyError, 2)
    assert link.errors == 1


async def test_pushes_and_replies_come_in_the_order_in_which_redis_made_them(link):
    seen = []
    link.on_push = lambda topic, payload: seen.append(payload)
    link.subscribe([b"t", b"u"], lambda reply: seen.append("subscribed"))
    for number in range(500):
        link.call(b"PUBLISH", b"t", b"p%d" % number, done=lambda reply, number=number: seen.append(number))
    link.unsubscribe([b"t", b"u"], lambda reply: seen.append("unsubscribed"))
    await link.ask(b"PING")
    assert seen[0] == "subscribed"
    assert seen[-1] == "unsubscribed"
    numbers = [item for item in seen if isinstance(item, int)]
    payloads = [item for item in seen if isinstance(item, bytes)]
    assert numbers == list(range(500))
    assert payloads == [b"p%d" % number for number in range(500)]
    # A push is next to the reply of the command that caused it: before it on Redis 7.0, after it on Valkey.
    assert all(abs(seen.index(number) - seen.index(b"p%d" % number)) == 1 for number in numbers)


async def test_replies_that_came_together_are_handed_out_in_slices_and_in_order(link, monkeypatch):
    # The clock says that every look comes after the end of the slice.
    monkeypatch.setattr("redpoll.cluster.link.monotonic", iter(range(1_000_000)).__next__)
    seen, turns = [], [0]

    def other_work():
        turns[0] += 1
        if len(seen) < 2000:
            asyncio.get_running_loop().call_soon(other_work)

    for number in range(1000):
        link.call(b"ECHO", b"%d" % number, done=lambda reply: seen.append((int(reply), turns[0])))
    answered = link.ask(b"PING")
    for number in range(1000, 2000):
        link.call(b"ECHO", b"%d" % number, done=lambda reply: seen.append((int(reply), turns[0])))
    other_work()
    await answered
    await link.ask(b"PING")
    assert [number for number, _ in seen] == list(range(2000))
    in_one_turn = Counter(turn for _, turn in seen)
    assert max(in_one_turn.values()) <= 16
    assert link.unanswered == 0


async def test_link_that_breaks_while_replies_wait_hands_out_no_more_of_them(link, monkeypatch, wait_until):
    monkeypatch.setattr("redpoll.cluster.link.monotonic", iter(range(1_000_000)).__next__)
    outcomes = []

    def done(reply):
        outcomes.append(reply)
        if len(outcomes) == 20:
            # In the next pass, when the others are read and not handed out.
            asyncio.get_running_loop().call_soon(link.drop, "for the test")

    for _ in range(500):
        link.call(b"ECHO", b"x", done=done)
    await wait_until(lambda: len(outcomes) == 500)
    replies = [outcome for outcome in outcomes if isinstance(outcome, bytes)]
    assert 20 <= len(replies) <= 64
    assert all(isinstance(outcome, LinkDown) for outcome in outcomes[len(replies) :])
    await link.wait_up()
    assert await link.ask(b"ECHO", b"again") == b"again"
    assert len(outcomes) == 500


async def test_subscribe_refused_by_acl_ends_with_its_error_and_shifts_no_answer(link, redis):
    await link.ask(b"ACL", b"SETUSER", b"limited", b"on", b">pw", b"~*", b"+@all", b"&allowed:*")
    limited = Link(f"unix://limited:pw@{redis.path}")
    limited.start()
    await limited.wait_up()
    outcomes = []
    limited.subscribe([b"allowed:a"], outcomes.append)
    limited.subscribe([b"forbidden"], outcomes.append)
    limited.subscribe([b"allowed:b", b"allowed:c"], outcomes.append)
    assert await limited.ask(b"ECHO", b"x") == b"x"
    assert outcomes[0] is None
    assert isinstance(outcomes[1], hiredis.ReplyError)
    assert outcomes[2] is None
    await limited.close()
    await link.ask(b"ACL", b"DELUSER", b"limited")


async def test_scripts_are_loaded_on_every_connection_and_after_noscript(link):
    await link.ask(b"SCRIPT", b"FLUSH")
    assert await link.execute(BURY, (b"nothing",)) == 1


async def test_broken_connection_ends_pending_calls_and_is_replaced(link):
    downs, ups, outcomes = [], [], []
    link.on_down = downs.append
    link.on_up = lambda: ups.append(link.up)
    link.call(b"PING", done=outcomes.append)
    link.flush()
    link.call(b"PING", done=outcomes.append)
    link.drop("for the test")
    assert downs == ["for the test"]
    assert [outcome.sent for outcome in outcomes] == [True, False]
    with pytest.raises(LinkDown):
        await link.ask(b"PING")
    async with asyncio.timeout(10):
        await link.wait_up()
    assert ups == [True]
    assert await link.ask(b"PING") == b"PONG"
    assert link.reconnects == 1


async def test_connection_closed_by_redis_is_replaced(link, wait_until):
    downs = []
    link.on_down = downs.append
    me = await link.ask(b"CLIENT", b"ID")
    link.call(b"CLIENT", b"KILL", b"ID", me, b"SKIPME", b"no")
    await wait_until(lambda: link.connects == 2)
    assert len(downs) == 1
    assert await link.ask(b"PING") == b"PONG"


async def test_link_reconnects_to_a_restarted_redis(own_redis, wait_until):
    link = Link(own_redis.url, first_delay_s=0.01, max_delay_s=0.05)
    link.start()
    await link.wait_up()
    await link.ask(b"SET", b"k", b"v")
    own_redis.kill()
    await wait_until(lambda: not link.up)
    own_redis.start()
    await wait_until(lambda: link.up)
    assert await link.ask(b"GET", b"k") == b"v"
    await link.close()


async def test_failing_handler_does_not_stop_the_others(link):
    problems, replies = [], []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: problems.append(context))

    def fail(reply):
        raise ZeroDivisionError

    link.on_push = lambda topic, payload: 1 / 0
    link.subscribe([b"t"])
    link.call(b"PING", done=fail)
    link.call(b"PUBLISH", b"t", b"x", done=replies.append)
    assert await link.ask(b"PING") == b"PONG"
    assert replies == [1]
    assert len(problems) == link.handler_errors == 2


async def test_answers_like_loading_count_as_a_broken_connection(link, wait_until):
    # Of these answers, only READONLY can be provoked.
    await link.ask(b"REPLICAOF", b"127.0.0.1", b"1")
    try:
        outcomes = []
        link.call(b"SET", b"a", b"b", done=outcomes.append)
        await wait_until(lambda: outcomes)
        assert isinstance(outcomes[0], LinkDown)
        assert not outcomes[0].sent
    finally:
        await wait_until(lambda: link.up)
        await link.ask(b"REPLICAOF", b"NO", b"ONE")


async def test_too_much_unanswered_is_congestion_until_it_is_answered(link, redis, wait_until):
    redis.pause()
    try:
        for _ in range(50_001):
            link.call(b"PING")
        assert link.congested
    finally:
        redis.resume()
    await wait_until(lambda: not link.congested)


async def test_many_unanswered_bytes_are_congestion_too(link, redis, wait_until):
    redis.pause()
    try:
        for _ in range(65):
            link.call(b"ECHO", bytes(1024 * 1024))
        link.flush()
        assert link.congested
    finally:
        redis.resume()
    await wait_until(lambda: not link.congested)


async def test_closed_link_stays_closed(redis, wait_until):
    link = Link(redis.url, first_delay_s=0.001, max_delay_s=0.001)
    link.start()
    await link.wait_up()
    await link.close()
    with pytest.raises(LinkDown):
        await link.ask(b"PING")
    assert not link.up
