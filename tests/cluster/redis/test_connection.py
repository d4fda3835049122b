"""The connection is tested through the Link that owns it."""

import asyncio
import socket
from collections import Counter, namedtuple
from types import SimpleNamespace

import hiredis
import pytest

from redpoll.cluster.redis.connection import RedisConnection
from redpoll.cluster.redis.link import LinkDown


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


async def test_what_is_read_in_two_parts_arrives_whole(link):
    """As asyncio does with two TLS records; uvloop doesn't."""
    connection, replies = link.connection, []
    link.call(b"ECHO", b"x", done=replies.append)
    buffer, answer = connection.get_buffer(-1), b"$5\r\nwhole\r\n"
    buffer[:3], buffer[3:][: len(answer) - 3] = answer[:3], answer[3:]
    connection.buffer_updated(len(answer))
    assert replies == [b"whole"]
    link.drop("for the test")


async def test_replies_that_came_together_are_handed_out_in_slices_and_in_order(link, monkeypatch):
    # The clock says that every look comes after the end of the slice.
    monkeypatch.setattr("redpoll.cluster.redis.connection.monotonic", iter(range(1_000_000)).__next__)
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
    # The end of what one read brought, and a slice of the next read, may come in one turn.
    assert max(in_one_turn.values()) < 2 * 16
    assert link.unanswered == 0


async def test_link_that_breaks_while_replies_wait_hands_out_no_more_of_them(link, monkeypatch, wait_until):
    monkeypatch.setattr("redpoll.cluster.redis.connection.monotonic", iter(range(1_000_000)).__next__)
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


PUSH = b">3\r\n$7\r\nmessage\r\n$1\r\nt\r\n$4\r\n%04d\r\n"


async def connection_to(seen):
    """A connection and the other end of it. `seen` gets what comes, and how it ended."""
    ours, theirs = socket.socketpair()
    owner = SimpleNamespace(
        sharded=False,
        errors=0,
        on_push=lambda topic, payload: seen.append(int(payload)),
        on_moved=pytest.fail,
        report=seen.append,
        connection_lost=lambda connection, reason: seen.append("lost"),
    )
    _, connection = await asyncio.get_running_loop().create_connection(lambda: RedisConnection(owner), sock=ours)
    return connection, theirs


async def test_what_came_before_a_write_that_fails_is_handed_out(wait_until):
    """Redis is killed, and before anything of it is read, a command is written."""
    seen, outcomes = [], []
    connection, theirs = await connection_to(seen)
    theirs.sendall(b"".join(PUSH % number for number in range(20)))
    theirs.close()
    connection.send(b"PING\r\n", outcomes.append)
    connection.flush()
    await wait_until(lambda: outcomes)
    assert seen == [*range(20), "lost"]
    assert isinstance(outcomes[0], LinkDown)


async def test_slices_of_what_came_go_on_after_the_connection_has_ended(wait_until, monkeypatch):
    # Each slice has 16 items.
    monkeypatch.setattr("redpoll.cluster.redis.connection.monotonic", iter(range(1_000_000)).__next__)
    seen, outcomes = [], []

    def ask():
        connection.send(b"PING\r\n", lambda reply: outcomes.append(reply.sent))
        connection.flush()

    def seeing(item):
        seen.append(item)
        if item == 20:
            theirs.close()
            ask()
        if item == 1000:
            assert connection.transport is None
            ask()

    connection, theirs = await connection_to(SimpleNamespace(append=seeing))
    theirs.sendall(b"".join(PUSH % number for number in range(2000)))
    await wait_until(lambda: len(outcomes) == 2)
    assert seen == [*range(2000), "lost"]
    assert outcomes == [True, False]


async def test_what_waited_for_the_kernel_begins_with_a_ping_too(wait_until):
    outcomes = []
    connection, theirs = await connection_to([])
    connection.be_answered_last()
    connection.pause_writing()
    for name in (b"a", b"b"):
        connection.send(b"GET %b\r\n" % name, outcomes.append)
    connection.resume_writing()
    theirs.settimeout(60)
    wanted = b"*1\r\n$4\r\nPING\r\nGET a\r\nGET b\r\n"
    assert theirs.recv(len(wanted), socket.MSG_WAITALL) == wanted
    theirs.sendall(b"+PONG\r\n:1\r\n:2\r\n")
    await wait_until(lambda: len(outcomes) == 2)
    assert outcomes == [1, 2]
    assert connection.unanswered == 0
    connection.lose("for the test")
    theirs.close()


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


async def test_answers_like_loading_count_as_a_broken_connection(link, redis, wait_until):
    # Of these answers, only READONLY can be provoked.
    await link.ask(b"REPLICAOF", b"127.0.0.1", b"1")
    try:
        outcomes = []
        link.call(b"SET", b"a", b"b", done=outcomes.append)
        await wait_until(lambda: outcomes)
        assert isinstance(outcomes[0], LinkDown)
        assert not outcomes[0].sent
    finally:
        redis.call("REPLICAOF", "NO", "ONE")
    await wait_until(lambda: link.up)


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


async def test_commands_that_are_not_written_yet_are_left_out_when_nobody_waits_for_them(link, redis, wait_until):
    class Waiting(list):
        over = False

        def __call__(self, reply):
            self.append(reply)

    # As _publish.Commands, which has only PUBLISH.
    Several = namedtuple("Several", "data count")
    given_up, awaited, many_given_up = Waiting(), Waiting(), Waiting()
    big = bytes(1024 * 1024)
    redis.pause()
    try:
        # More than the kernel takes, so that the rest waits in this process.
        for _ in range(30):
            link.call(b"SET", b"filler", big)
        link.flush()
        await wait_until(lambda: link.connection.blocked)
        link.call(b"RPUSH", b"left-out", b"1", done=given_up)
        link.call(b"RPUSH", b"written", b"1", done=awaited)
        link.publish(Several(hiredis.pack_command((b"RPUSH", b"left-out", b"2")) * 3, 3), many_given_up)
        link.publish(Several(hiredis.pack_command((b"RPUSH", b"written", b"2")) * 2, 2), awaited)
        link.call(b"RPUSH", b"written", b"3", done=awaited)
        link.flush()
        given_up.over = many_given_up.over = True
    finally:
        redis.resume()
    assert await link.ask(b"LRANGE", b"written", 0, -1) == [b"1", b"2", b"2", b"3"]
    assert await link.ask(b"EXISTS", b"left-out") == 0
    assert (given_up, many_given_up, awaited) == ([], [], [1, 2, 3, 4])
    assert link.unanswered == 0
    assert not link.congested


async def test_commands_that_wait_for_the_kernel_are_written_in_order_and_slices_each_looked_at_once(
    link, redis, wait_until, monkeypatch
):
    """Redis reads a little at a time. All that waited was gone through each time, which took seconds for 40,000."""
    looks = [0]

    class Waiting:
        @property
        def over(self):
            looks[0] += 1
            return False

        def __call__(self, reply):
            pass

    count, late = 20_000, 0
    redis.pause()
    try:
        link.call(b"SET", b"filler", bytes(32 * 1024 * 1024))
        link.flush()
        await wait_until(lambda: link.connection.blocked)
        for number in range(count):
            link.call(b"RPUSH", b"waited", b"%0400d" % number, done=Waiting())
        assert link.unanswered == count + 1
    finally:
        redis.resume()
    # The clock says that every look comes after the end of the slice.
    monkeypatch.setattr("redpoll.cluster.redis.connection.monotonic", iter(range(10_000_000)).__next__)
    most = before = 0
    while looks[0] < count:
        link.call(b"RPUSH", b"waited", b"%0400d" % (count + late))
        late += 1
        await asyncio.sleep(0)
        most, before = max(most, looks[0] - before), looks[0]
    await link.ask(b"PING")
    assert looks[0] == count
    assert most < 2_000
    assert link.unanswered == 0
    found = await link.ask(b"LRANGE", b"waited", 0, -1)
    assert [int(number) for number in found] == list(range(count + late))


def pushes(*words):
    """RPUSH of each word, as commands that are published together."""
    packed = [hiredis.pack_command((b"RPUSH", b"list", word)) for word in words]
    return SimpleNamespace(data=b"".join(packed), count=len(packed))


QUESTION = hiredis.pack_command((b"ECHO", b"answer"))


async def test_publishes_and_their_question_are_written_at_once_after_what_was_queued(link):
    replies, before = [], link.connection.queued
    link.call(b"RPUSH", b"list", b"first", done=replies.append)
    assert link.connection.queued == before
    link.publish_now(pushes(b"a", b"b"), replies.append, QUESTION, replies.append)
    assert link.connection.queued == before + 4
    link.publish_now(pushes(b"c"), replies.append, QUESTION, replies.append)
    assert link.connection.queued == before + 6
    assert await link.ask(b"LRANGE", b"list", 0, -1) == [b"first", b"a", b"b", b"c"]
    assert replies == [1, 2, 3, b"answer", 4, b"answer"]


async def test_publishes_and_their_question_wait_for_the_kernel_in_order_and_end_with_the_connection(
    link, redis, wait_until
):
    replies, outcomes = [], []
    redis.pause()
    try:
        link.call(b"SET", b"filler", bytes(32 * 1024 * 1024))
        link.flush()
        await wait_until(lambda: link.connection.blocked)
        link.publish_now(pushes(b"a", b"b"), replies.append, QUESTION, replies.append)
        link.call(b"RPUSH", b"list", b"c", done=replies.append)
    finally:
        redis.resume()
    assert await link.ask(b"LRANGE", b"list", 0, -1) == [b"a", b"b", b"c"]
    assert replies == [1, 2, b"answer", 3]
    link.drop("for the test")
    link.publish_now(pushes(b"d", b"e"), outcomes.append, QUESTION, outcomes.append)
    await wait_until(lambda: len(outcomes) == 3)
    assert [outcome.sent for outcome in outcomes] == [False] * 3


async def test_commands_that_wait_for_the_kernel_count_as_congestion_and_end_with_the_connection(
    link, redis, wait_until
):
    outcomes = []
    redis.pause()
    try:
        link.call(b"ECHO", bytes(32 * 1024 * 1024))
        link.flush()
        await wait_until(lambda: link.connection.blocked)
        for _ in range(33):
            link.call(b"ECHO", bytes(1024 * 1024), done=outcomes.append)
        link.flush()
        assert link.congested
        link.drop("for the test")
    finally:
        redis.resume()
    assert [outcome.sent for outcome in outcomes] == [False] * 33
    await wait_until(lambda: link.up)
