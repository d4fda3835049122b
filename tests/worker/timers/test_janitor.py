"""Timers: pings to idle clients, 4201, close frames without an answer, sign-in timeouts."""

import asyncio
import time

import pytest
import websockets

from redpoll import _frame

UPGRADE = (
    "GET {path} HTTP/1.1\r\nHost: x\r\nConnection: keep-alive, Upgrade\r\nUpgrade: websocket\r\n"
    "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n"
)


class TestIdle:
    async def test_an_idle_client_is_pinged_in_both_ways(self, bench):
        worker = await bench.start(activity_timeout_s=1)
        client = await bench.client(worker)
        assert await client.next() == {"event": "pusher:ping", "data": "{}"}

    async def test_a_client_that_never_answers_is_closed_with_4201(self, bench):
        worker = await bench.start(activity_timeout_s=1, pong_timeout_s=1)
        worker.janitor.close_timeout_s = 0.25
        # Without a library: every library answers WebSocket pings, which count.
        reader, writer = await asyncio.open_connection("127.0.0.1", worker.port)
        writer.write(UPGRADE.format(path="/app/278d425bdf160c739803?protocol=7").encode())
        await reader.readuntil(b"pusher:connection_established")
        rest = await asyncio.wait_for(reader.read(), 60)
        assert b"pusher:ping" in rest
        assert b'"code":4201' in rest
        writer.close()

    async def test_a_client_that_answers_stays(self, bench):
        worker = await bench.start(activity_timeout_s=1, pong_timeout_s=1)
        client = await bench.client(worker)
        for _ in range(3):
            assert (await client.next())["event"] == "pusher:ping"
            await client.send("pusher:pong")
        await client.nothing_more()

    async def test_any_bytes_count(self, bench):
        """The WebSocket's own pong is enough; the page doesn't answer `pusher:ping`."""
        worker = await bench.start(activity_timeout_s=1, pong_timeout_s=1)
        client = await bench.client(worker)
        for _ in range(3):
            assert (await client.next())["event"] == "pusher:ping"
        await client.send("pusher:ping")
        await client.until("pusher:pong")


async def test_a_close_frame_without_an_answer_times_out(bench):
    worker = await bench.start()
    worker.janitor.close_timeout_s = 0.25
    reader, writer = await asyncio.open_connection("127.0.0.1", worker.port)
    writer.write(UPGRADE.format(path="/app/unknown?protocol=7").encode())
    rest = await asyncio.wait_for(reader.read(), 60)  # we never send a Close, and the read still ends
    assert b'"code":4001' in rest
    await bench.settled(worker, lambda: worker.gate.connections == 0)
    writer.close()


async def test_nothing_is_left_of_a_refused_client_that_read_slowly(bench):
    worker = await bench.start()
    last_answers = worker.janitor._last_answers
    reader, writer = await asyncio.open_connection("127.0.0.1", worker.port)
    writer.transport.pause_reading()
    writer.write(b"GET / HTTP/1.1\r\nHost: h\r\n\r\n")
    await bench.settled(worker, lambda: worker.gate.http.connections)
    (connection,) = worker.gate.http.connections

    def is_full():
        if connection.unsent_bytes > 65_536:
            return True
        # Looked at when the kernel has had its part.
        connection.write_http(b"x" * 100_000)
        return False

    await bench.settled(worker, is_full)
    close = b"\x88\x82\0\0\0\0\x03\xe8"
    writer.write(UPGRADE.format(path="/app/unknown?protocol=7").encode() + close)
    await bench.settled(worker, lambda: last_answers)
    writer.transport.resume_reading()
    while await asyncio.wait_for(reader.read(1 << 20), 60):
        pass
    writer.close()
    await bench.settled(worker, lambda: worker.gate.connections == 0)
    assert not last_answers


async def _two_with_a_late_head(bench, worker):
    """(connection, reader, writer) of two whose head is late in the same tick; the first is looked at first."""
    streams = [await asyncio.open_connection("127.0.0.1", worker.port) for _ in range(2)]
    for _, writer in streams:
        writer.write(b"GET /")
    newcomers = worker.gate.strangers.newcomers
    await bench.settled(worker, lambda: [connection.buffered for connection in newcomers] == [5, 5])
    by_peer = {connection.peer: connection for connection in newcomers}
    pairs = [(by_peer[writer.get_extra_info("sockname")], reader, writer) for reader, writer in streams]
    for connection, *_ in reversed(pairs):
        worker.janitor.http_waits(connection, 0)
    return pairs


async def test_a_connection_that_has_just_ended_may_be_late(bench):
    worker = await bench.start()
    (first, _, writer), (_, _, other) = await _two_with_a_late_head(bench, worker)
    first.abort()
    # As if the tick came before the loop reports the end.
    worker.gate.head_late(first)
    for stream in (writer, other):
        stream.close()
    await bench.settled(worker, lambda: worker.gate.connections == 0)
    assert worker.statistics.loop_exceptions_total == 0


async def test_a_deadline_that_fails_stops_no_other(bench, monkeypatch):
    worker = await bench.start()
    failed = []
    carried_out = worker.gate.head_late

    def late(connection):
        if not failed:
            failed.append(connection)
            raise RuntimeError("on purpose")
        carried_out(connection)

    monkeypatch.setattr(worker.gate, "head_late", late)
    pairs = await _two_with_a_late_head(bench, worker)
    _, reader, _ = pairs[1]
    assert (await asyncio.wait_for(reader.readline(), 60)).startswith(b"HTTP/1.1 408 ")
    assert failed == [pairs[0][0]]
    assert worker.statistics.loop_exceptions_total == 1
    for *_, writer in pairs:
        writer.close()


async def test_the_lag_of_the_loop_is_measured(bench):
    worker = await bench.start()
    worker.janitor.loop_lag.take_s()
    time.sleep(0.2)  # noqa: ASYNC251 - stalls the very loop that is measured: this is the lag, not a wait
    assert worker.janitor.loop_lag.take_s() >= 0.145


async def test_a_failed_task_is_counted(bench):
    worker = await bench.start()

    async def fail() -> None:
        raise RuntimeError("on purpose")

    worker.janitor.spawn(fail())
    await bench.settled(worker, lambda: worker.statistics.loop_exceptions_total == 1)


async def test_a_drained_client_reads_4200(bench):
    worker = await bench.start()
    client = await bench.client(worker)
    worker.drain()
    frame = await client.next()
    assert frame["data"]["code"] == 4200
    with pytest.raises(websockets.ConnectionClosed) as closed:
        await client.socket.recv()
    assert closed.value.rcvd.code == 4200


class TestSignInTimeout:
    async def test_a_client_that_does_not_sign_in_in_time_is_closed_with_4009(self, bench):
        worker = await bench.start()
        await bench.change(user_authentication_timeout_s=3600)
        client = await bench.client(worker)
        # A public channel doesn't count, and neither does one that was refused.
        await client.subscribe("news")
        await client.send("pusher:subscribe", {"channel": "private-x", "auth": "278d425bdf160c739803:00"})
        await client.until("pusher:error")
        began = time.monotonic()
        await bench.change(user_authentication_timeout_s=0.5)
        assert await client.closed_with() == 4009
        assert time.monotonic() - began > 0.3
        assert not worker.janitor.unauthorised

    async def test_a_client_that_signs_in_or_enters_a_private_channel_stays(self, bench):
        worker = await bench.start()
        await bench.change(user_authentication_timeout_s=3600)
        user, subscriber, visitor, nobody = [await bench.client(worker) for _ in range(4)]
        await user.sign_in("7")
        await subscriber.subscribe("private-x")
        # Once is enough.
        await visitor.subscribe("presence-p", {"user_id": "1"})
        await visitor.send("pusher:unsubscribe", {"channel": "presence-p"})
        await visitor.nothing_more()
        await bench.change(user_authentication_timeout_s=0.5)
        assert await nobody.closed_with() == 4009
        for client in (user, subscriber, visitor):
            await client.nothing_more()
        assert not worker.janitor.unauthorised

    async def test_turned_on_the_timeout_begins_then(self, bench):
        worker = await bench.start()
        user, nobody = await bench.client(worker), await bench.client(worker)
        await user.sign_in("7")
        await bench.change(user_authentication_timeout_s=0.5)
        assert await nobody.closed_with() == 4009
        await user.nothing_more()

    async def test_turned_off_or_longer_the_old_timeout_closes_no_connection(self, bench):
        worker = await bench.start()
        await bench.change(user_authentication_timeout_s=60)
        clients = [await bench.client(worker) for _ in range(2)]
        await bench.change(user_authentication_timeout_s=3600)
        # 75 seconds.
        for _ in range(300):
            worker.janitor.advance()
        for client in clients:
            await client.nothing_more()
        await bench.change(user_authentication_timeout_s=0)
        await bench.settled(worker, lambda: not worker.janitor.unauthorised)

    async def test_a_crowd_is_closed_in_slices(self, bench):
        worker = await bench.start()
        worker.janitor.max_expired_a_tick = 2
        await bench.change(user_authentication_timeout_s=3600)
        clients = [await bench.client(worker) for _ in range(7)]
        # From here on the ticks are the test's.
        worker.janitor.stop()
        await bench.change(user_authentication_timeout_s=0.25)
        await bench.settled(worker, lambda: set(worker.janitor._unauthorised) == {(2, 2)})
        waiting = []
        for _ in range(5):
            worker.janitor.advance()
            waiting.append(worker.janitor.unauthorised)
        assert waiting == [7, 5, 3, 1, 0]
        for client in clients:
            assert await client.closed_with() == 4009
        assert not worker.janitor.unauthorised

    async def test_nothing_is_stored_of_closed_connections(self, bench):
        worker = await bench.start()
        await bench.change(user_authentication_timeout_s=3600)
        clients = [await bench.client(worker) for _ in range(5)]
        for client in clients:
            client.socket.transport.abort()
        await bench.settled(worker, lambda: not worker.gate.connections)
        assert not worker.janitor.unauthorised

    async def test_idle_clients_are_pinged_as_well(self, bench):
        """Two deadlines of one connection: neither delays the other."""
        worker = await bench.start(activity_timeout_s=1, pong_timeout_s=1)
        worker.janitor.close_timeout_s = 0.25
        await bench.change(user_authentication_timeout_s=1.5)
        reader, writer = await asyncio.open_connection("127.0.0.1", worker.port)
        writer.write(UPGRADE.format(path="/app/278d425bdf160c739803?protocol=7").encode())
        await reader.readuntil(b"pusher:connection_established")
        rest = await asyncio.wait_for(reader.read(), 60)
        assert rest.count(b"pusher:ping") == 1
        assert b'"code":4009' in rest
        writer.close()

    async def test_a_failed_sign_in_closes_at_once(self, bench):
        worker = await bench.start()
        await bench.change(user_authentication_timeout_s=3600)
        client = await bench.client(worker)
        await client.send("pusher:signin", {"auth": "278d425bdf160c739803:00", "user_data": '{"id":"7"}'})
        assert await client.closed_with() == 4009


class TestSignInWhileRedisIsSlow:
    """pusher-js never returns after 4009, so no client that did its part may get it."""

    async def test_a_signed_subscribe_that_waits_for_redis_counts(self, own_redis, bench_on):
        bench = await bench_on(own_redis)
        worker = await bench.start()
        await bench.change(user_authentication_timeout_s=60)
        waiting, member, public, nobody = [await bench.client(worker) for _ in range(4)]
        own_redis.pause()
        await waiting.ask("private-x")
        await member.ask("presence-p", {"user_id": "1"})
        await public.ask("news")
        for client in (waiting, member, public, nobody):
            # What it sent before was received.
            await client.nothing_more()
        worker.janitor.close_timeout_s = 3600
        # 75 seconds.
        for _ in range(300):
            worker.janitor.advance()
        for client in (public, nobody):
            assert await client.closed_with() == 4009
        own_redis.resume()
        for client in (waiting, member):
            await client.until("pusher_internal:subscription_succeeded")
            await client.nothing_more()
        await bench.settled(worker, lambda: not worker.janitor.unauthorised)


class TestPings:
    async def test_silence_is_counted_from_the_last_bytes(self, bench):
        worker = await bench.start()
        tick = worker.janitor.tick
        await bench.client(worker)
        (connection,) = worker.hub.open_connections
        assert worker.janitor.silent_s(connection) <= (worker.janitor.tick - tick + 1) * 0.25
        tick = worker.janitor.tick
        await bench.settled(worker, lambda: worker.janitor.tick > tick + 3)
        assert worker.janitor.silent_s(connection) >= 1.0

    async def test_connections_that_answer_a_ping_are_not_silent(self, bench):
        worker = await bench.start()
        await bench.client(worker)
        (connection,) = worker.hub.open_connections
        # Two at a time, and then none is forgotten.
        found = await asyncio.gather(*(worker.janitor.ping([connection], _frame.ping(), 60) for _ in range(2)))
        assert found == [[], []]
        assert await worker.janitor.ping([], _frame.ping(), 60) == []
        assert not worker.janitor.pinged

    async def test_a_ping_that_follows_an_answer_at_once_does_not_make_the_connection_silent(self, bench):
        worker = await bench.start()
        client = await bench.client(worker)
        client.socket.transport.pause_reading()
        (connection,) = worker.hub.open_connections
        janitor = worker.janitor
        first = asyncio.create_task(janitor.ping([connection], _frame.ping(), 60))
        await bench.settled(worker, lambda: janitor.pinged)
        # The second ping starts after the answer to the first and before the first has noticed it.
        second = asyncio.create_task(janitor.ping([connection], _frame.ping(), 60))
        connection.heard_tick = janitor.tick
        janitor.pong_received(connection)
        assert await first == []
        client.socket.transport.resume_reading()
        assert await second == []

    async def test_a_connection_that_does_not_answer_is_silent_and_one_that_closes_is_not(self, bench):
        worker = await bench.start()
        silent, closing = await bench.client(worker), await bench.client(worker)
        silent.socket.transport.pause_reading()
        closing.socket.transport.pause_reading()
        connections = list(worker.hub.open_connections)
        assert set(await worker.janitor.ping(connections, _frame.ping(), 0.05)) == set(connections)
        assert not worker.janitor.pinged
        pinging = asyncio.create_task(worker.janitor.ping(connections, _frame.ping(), 60))
        await bench.settled(worker, lambda: worker.janitor.pinged)
        closing.socket.transport.abort()
        await bench.settled(worker, lambda: worker.janitor.pinged == 1)
        silent.socket.transport.resume_reading()
        assert await pinging == []
