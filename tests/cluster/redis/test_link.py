import asyncio
from collections import namedtuple

import hiredis
import pytest

from redpoll.cluster.redis.link import Link, LinkDown
from redpoll.cluster.redis.scripts import BURY

Commands = namedtuple("Commands", "data count")
ECHO = hiredis.pack_command((b"ECHO", b"asked"))


async def test_several_commands_are_asked_together(link):
    assert await link.ask_all([(b"ECHO", b"%d" % number) for number in range(300)]) == [b"%d" % n for n in range(300)]
    assert await link.ask_all([]) == []
    with pytest.raises(hiredis.ReplyError):
        await link.ask_all([(b"INCR", b"n"), (b"NONSENSE",), (b"ALSO NONSENSE",), (b"INCR", b"n")])
    assert await link.ask_all([(b"GET", b"n")]) == [b"2"]
    answers = asyncio.ensure_future(link.ask_all([(b"PING",), (b"PING",)]))
    await asyncio.sleep(0)
    link.drop("for the test")
    with pytest.raises(LinkDown):
        await answers
    assert link.unanswered == 0


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


async def test_each_write_of_a_link_that_is_answered_last_begins_with_a_ping(redis):
    """So Redis writes to subscribers before it answers the publisher."""
    link = Link(redis.url, is_answered_last=True)
    link.start()
    await link.wait_up()
    reader, writer = await asyncio.open_unix_connection(redis.path)
    writer.write(b"MONITOR\r\n")
    assert await reader.readline() == b"+OK\r\n"
    replies, seen = [], []
    for number in range(2):
        link.call(b"PUBLISH", b"t", b"%d" % number, done=replies.append)
    assert await link.ask(b"ECHO", b"first") == b"first"
    link.publish_now(Commands(hiredis.pack_command((b"PUBLISH", b"t", b"2")), 1), replies.append, ECHO, replies.append)
    assert await link.ask(b"ECHO", b"second") == b"second"
    while b'"ECHO" "second"' not in seen:
        line = (await reader.readline()).rstrip()
        seen.append(line[line.index(b"] ") + 2 :])
    assert seen == [
        *(b'"PING"', b'"PUBLISH" "t" "0"', b'"PUBLISH" "t" "1"', b'"ECHO" "first"'),
        *(b'"PING"', b'"PUBLISH" "t" "2"', b'"ECHO" "asked"'),
        *(b'"PING"', b'"ECHO" "second"'),
    ]
    assert replies == [0, 0, 0, b"asked"]
    writer.close()
    await link.close()


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
    async with asyncio.timeout(60):
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


async def test_connection_closed_right_after_the_greeting_is_replaced(redis, monkeypatch):
    """The link took it for up, never looked at it again, and no call was ever answered."""
    greet, greeted = Link._greet, []

    async def greet_and_lose_the_first(self, connection):
        await greet(self, connection)
        greeted.append(connection)
        if len(greeted) == 1:
            connection.lose("for the test")

    monkeypatch.setattr(Link, "_greet", greet_and_lose_the_first)
    link = Link(redis.url, first_delay_s=0.001, max_delay_s=0.001)
    link.start()
    await link.wait_up()
    async with asyncio.timeout(60):
        assert await link.ask(b"PING") == b"PONG"
    assert (len(greeted), link.connects) == (2, 1)
    await link.close()


async def test_link_that_is_closed_while_it_is_greeted_leaves_no_connection():
    """Its socket stayed open for ever: one at each fail-over from a master that hung."""
    greeted, ended = asyncio.Event(), asyncio.Event()

    async def serve(reader, writer):
        await reader.read(1)
        greeted.set()
        await reader.read()
        ended.set()
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as hung:
        link = Link(f"redis://127.0.0.1:{hung.sockets[0].getsockname()[1]}")
        link.start()
        async with asyncio.timeout(60):
            await greeted.wait()
            await link.close()
            await ended.wait()


async def test_connection_to_a_redis_that_answers_nothing_is_replaced(own_redis, wait_until):
    """Of each link, because its owner may ask nothing meanwhile."""
    link = Link(own_redis.url, first_delay_s=0.01, max_delay_s=0.05, look_every_s=0.05, max_unanswered_looks=10)
    reasons = []
    link.on_down = reasons.append
    link.start()
    await link.wait_up()
    own_redis.pause()
    await wait_until(lambda: not link.up)
    assert reasons[-1] == "no answer within 0.5 s"
    # Redis may be slow at first.
    link._max_unanswered_looks = 100_000
    own_redis.resume()
    await link.wait_up()
    assert await link.ask(b"PING") == b"PONG"
    await link.close()


async def test_closed_link_stays_closed(redis, wait_until):
    link = Link(redis.url, first_delay_s=0.001, max_delay_s=0.001)
    link.start()
    await link.wait_up()
    await link.close()
    with pytest.raises(LinkDown):
        await link.ask(b"PING")
    assert not link.up
