import asyncio
import json
import re

import pytest
import websockets

from helpers.fallback_wire import FallbackClosed, FallbackSocket, ask
from redpoll.protocol import session_limits
from redpoll.worker.fallback.session import REOPENED_AFTER_UNITS, Session, SessionState

KEY = "278d425bdf160c739803"


class Poll:
    polls = True

    def __init__(self) -> None:
        self.text = b""
        self.is_over = False

    def begin(self) -> None:
        pass

    def write(self, lines) -> None:
        self.text += lines.text

    def end(self) -> None:
        self.is_over = True


def text(size: int) -> bytes:
    return b"\x81\x7f" + size.to_bytes(8, "big") + b"x" * size


async def test_connection_is_like_any_other_to_the_worker(bench):
    worker = await bench.start(trusted_proxies=("127.0.0.1",))
    client = await bench.fallback(worker, headers={"X-Forwarded-For": "192.0.2.7"})
    (connection,) = worker.hub.open_connections
    assert connection.transport_name == "xhr_streaming"
    assert connection.session.socket_id == client.socket_id
    assert connection.client_seen.library == "js 8.4.0"
    assert connection.client_seen.address == "192.0.2.7"
    assert connection.peer == ("192.0.2.7", 0)
    websocket = await bench.client(worker)
    assert {one.transport_name for one in worker.hub.open_connections} == {"xhr_streaming", "websocket"}
    assert websocket.socket_id != client.socket_id


async def test_nothing_is_written_beyond_what_a_client_reads_of_a_stream(bench):
    worker = await bench.start()
    fallback = FallbackSocket([("127.0.0.1", worker.port)], KEY)
    reader, writer = await asyncio.open_connection("127.0.0.1", worker.port, limit=2**22)
    writer.write(f"POST {fallback.path('xhr_streaming', 'protocol=7')} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
    await reader.readuntil(b"connection_established")
    (session,) = worker.fallback.sessions.by_name.values()
    session.connection.send(text(REOPENED_AFTER_UNITS))
    session.connection.send(b"\x81\x02{}")
    await reader.readexactly(REOPENED_AFTER_UNITS)
    await bench.settled(worker, lambda: session.outlet is None)
    assert session.connection.unsent_bytes > 0
    # The client reads all of it and opens another stream, which has the rest and no second `o`.
    again, other = await asyncio.open_connection("127.0.0.1", worker.port)
    other.write(f"POST {fallback.path('xhr_streaming', 'protocol=7')} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
    beginning = await again.readuntil(b'a["{}"]\n')
    assert b"\no\n" not in beginning
    # The first one has ended.
    assert (await reader.read()).endswith(b"0\r\n\r\n")
    for one in (writer, other):
        one.close()


async def test_session_counts_all_that_a_client_reads_of_its_first_stream(bench):
    """It left the `o` out: its client left a stream that the session still used, and the session ended."""
    worker = await bench.start()
    path = FallbackSocket([("127.0.0.1", worker.port)], KEY).path("xhr_streaming", "protocol=7")
    reader, writer = await asyncio.open_connection("127.0.0.1", worker.port, limit=2**22)
    # Its response has no chunks, so all bytes after the head are what a page reads.
    writer.write(f"POST {path} HTTP/1.0\r\nHost: x\r\n\r\n".encode())
    await reader.readuntil(b"\r\n\r\n")
    read = len(await reader.readuntil(b"connection_established")) + len(await reader.readuntil(b"\n"))
    (session,) = worker.fallback.sessions.by_name.values()
    line = REOPENED_AFTER_UNITS + 1 - read
    session.connection.send(text(line - len('a[""]\n')))
    await reader.readexactly(line)
    assert session.outlet is None
    writer.close()


async def test_messages_wait_for_earlier_ones_of_the_page(bench, monkeypatch):
    monkeypatch.setattr("redpoll.worker.fallback.session._GAP_S", 3600.0)
    worker = await bench.start()
    client = await bench.fallback(worker)
    await client.subscribe("private-a")
    first, second, third = (client.socket.path("xhr_send") for _ in range(3))
    unsubscribe = json.dumps([json.dumps({"event": "pusher:unsubscribe", "data": {"channel": "private-a"}})]).encode()
    auth = client.sign("private-a")
    subscribe = json.dumps(
        [json.dumps({"event": "pusher:subscribe", "data": {"channel": "private-a", "auth": auth}})]
    ).encode()
    # In the wrong order the page would end without its subscription.
    (session,) = worker.fallback.sessions.by_name.values()
    await client.socket.send_raw(subscribe, path=second)
    assert "private-a" in session.connection.session.channels
    await client.socket.send_raw(unsubscribe, path=first)
    await client.until("pusher_internal:subscription_succeeded")
    assert "private-a" in session.connection.session.channels
    # A gap that stays is waited for only a moment.
    monkeypatch.setattr("redpoll.worker.fallback.session._GAP_S", 0.01)
    client.socket.path("xhr_send")
    await client.socket.send_raw(b'["{\\"event\\":\\"pusher:ping\\",\\"data\\":{}}"]')
    await client.until("pusher:pong")
    assert await client.socket.send_raw(b'["{\\"event\\":\\"pusher:ping\\",\\"data\\":{}}"]', path=third) == 204
    await client.until("pusher:pong")


async def test_gap_is_waited_for_as_long_as_each_before_it(bench, monkeypatch):
    worker = await bench.start()
    await ask("127.0.0.1", worker.port, "POST", f"/pusher/app/{KEY}/7/abcdefgh/xhr?protocol=7")
    (session,) = worker.fallback.sessions.by_name.values()
    loop, timers, delivered = asyncio.get_running_loop(), [], []
    call_later = loop.call_later

    def record(delay, callback, *args):
        if callback == session._gap_over:
            timers.append(lambda: callback(*args))
            return None
        return call_later(delay, callback, *args)

    monkeypatch.setattr(loop, "call_later", record)
    monkeypatch.setattr(Session, "_deliver", lambda _, ready: delivered.extend(ready))
    for number in (2, 1, 4):
        session.bring(number, b'["%d"]' % number)
    assert delivered == [["1"], ["2"]]
    # The first gap is filled; its time doesn't count for the second one.
    timers[0]()
    session.bring(3, b'["3"]')
    assert delivered[2:] == [["3"], ["4"]]
    # A gap within those that wait, and one that stays.
    for number in (6, 8, 5):
        session.bring(number, b'["%d"]' % number)
    timers[2]()
    assert delivered[4:] == [["5"], ["6"]]
    timers[3]()
    assert delivered[6:] == [["8"]]
    assert len(timers) == 4


async def polled(bench, monkeypatch):
    """A worker, its session that a poll with the number 1 opened, and the messages that the session delivers."""
    worker = await bench.start()
    await ask("127.0.0.1", worker.port, "POST", f"/pusher/app/{KEY}/7/abcdefgh/xhr?protocol=7&n=1")
    (session,) = worker.fallback.sessions.by_name.values()
    delivered = []
    monkeypatch.setattr(Session, "_deliver", lambda _, ready: delivered.extend(ready))
    return worker, session, delivered


async def test_poll_that_overtakes_the_first_messages_leaves_them_their_order(bench, monkeypatch):
    """A subscribe, an unsubscribe and a subscribe ended without the subscription."""
    monkeypatch.setattr("redpoll.worker.fallback.session._GAP_S", 3600.0)
    _, session, delivered = await polled(bench, monkeypatch)
    session.attach(Poll(), 5)
    for number in (2, 4, 3):
        session.bring(number, b'["%d"]' % number)
    assert delivered == [["2"], ["3"], ["4"]]


async def test_messages_do_not_wait_for_requests_that_a_poll_has_waited_for(bench, monkeypatch):
    """Other sessions of the page use numbers of the same row: each message waited for a second."""
    monkeypatch.setattr("redpoll.worker.fallback.session._GAP_S", 0.0)
    worker, session, delivered = await polled(bench, monkeypatch)
    session.attach(Poll(), 5)
    await bench.settled(worker, lambda: session._order.last == 5)
    monkeypatch.setattr("redpoll.worker.fallback.session._GAP_S", 3600.0)
    session.bring(6, b'["6"]')
    assert delivered == [["6"]]


async def test_poll_that_comes_while_a_session_closes_gets_everything_in_order(bench):
    """It got the newest messages, and the ones before them were lost."""
    worker = await bench.start()
    await ask("127.0.0.1", worker.port, "POST", f"/pusher/app/{KEY}/7/abcdefgh/xhr?protocol=7")
    (session,) = worker.fallback.sessions.by_name.values()
    assert session.outlet is None
    for n in range(10):
        session.connection.send(b"\x81\x7f" + (50_000).to_bytes(8, "big") + b"m%02d" % n + b"x" * 49_997)
    session.connection.shut(4200, "restarting")
    async with asyncio.timeout(60):
        while not session.tail:
            # Each pass of the loop writes a part.
            await asyncio.sleep(0)
    assert session.state is SessionState.OPEN
    poll = Poll()
    session.attach(poll, None)
    await bench.settled(worker, lambda: poll.is_over)
    assert re.findall(rb"m\d\d|c\[\d+", poll.text) == [*(b"m%02d" % n for n in range(10)), b"c[4200"]


async def test_message_that_is_no_protocol_is_answered_as_on_a_websocket(bench):
    worker = await bench.start()
    client, websocket = await bench.fallback(worker), await bench.client(worker)
    await client.socket.send("nonsense")
    await websocket.socket.send("nonsense")
    assert await client.next() == await websocket.next()


async def test_nothing_is_taken_while_redis_is_congested(bench):
    worker = await bench.start()
    path = f"/pusher/app/{KEY}/7/abcdefgh"
    await ask("127.0.0.1", worker.port, "POST", f"{path}/xhr?protocol=7")
    (session,) = worker.fallback.sessions.by_name.values()
    received = []
    session.connection.gate.hub.perform = lambda connection, effects: received.extend(effects)
    session.connection.pause_reading()
    ping = b'["{\\"event\\":\\"pusher:ping\\",\\"data\\":{}}"]'
    answers = [(await ask("127.0.0.1", worker.port, "POST", f"{path}/xhr_send", ping)).status for _ in range(102)]
    assert answers == [204] * 100 + [503] * 2
    assert received == []
    session.connection.resume_reading()
    assert len(received) == 100
    # pusher-js doesn't look at the status of what was refused.
    assert b"c[4100," in (await ask("127.0.0.1", worker.port, "POST", f"{path}/xhr")).body


async def test_heartbeat_is_taken_while_messages_find_no_room(bench):
    worker = await bench.start()
    path = f"/pusher/app/{KEY}/7/abcdefgh"
    await ask("127.0.0.1", worker.port, "POST", f"{path}/xhr?protocol=7&n=1")
    (session,) = worker.fallback.sessions.by_name.values()
    session.connection.pause_reading()
    ping = b'["{\\"event\\":\\"pusher:ping\\",\\"data\\":{}}"]'
    for number in range(2, 102):
        assert session.bring(number, ping) == 204
    assert session.bring(102, b"[]") == 204
    session.connection.resume_reading()
    # Its number leaves no gap.
    assert session.bring(103, ping) == 204
    assert b"c[" not in (await ask("127.0.0.1", worker.port, "POST", f"{path}/xhr?n=104")).body
    assert session.state.value == "open"


@pytest.mark.parametrize(
    ("size", "status", "paused"), [(6000, 413, False), (6000, 413, True), (2049, 204, False)], ids=str
)
async def test_message_that_is_too_large_closes_the_session_as_a_websocket(bench, size, status, paused):
    """The body is refused, or only its message is too large."""
    worker = await bench.start(max_message_bytes=2048)
    client, websocket = await bench.fallback(worker), await bench.client(worker)
    # As a text in a list it is larger than 2048.
    largest = json.dumps({"event": "pusher:ping", "data": '"' * 480}).ljust(2048)
    for one in (client, websocket):
        await one.socket.send(largest)
        assert (await one.next())["event"] == "pusher:pong"
    (session,) = worker.fallback.sessions.by_name.values()
    if paused:
        session.connection.pause_reading()
    assert await client.socket.send("x" * size) == status
    await websocket.socket.send("x" * size)
    with pytest.raises(FallbackClosed) as closed:
        await client.next()
    with pytest.raises(websockets.ConnectionClosed) as websocket_closed:
        await websocket.next()
    assert (closed.value.code, closed.value.reason) == (1009, websocket_closed.value.rcvd.reason)
    assert websocket_closed.value.rcvd.code == 1009
    await bench.settled(worker, lambda: not worker.fallback.sessions.by_name)


async def test_body_that_is_no_list_of_messages_counts_as_an_invalid_message(bench, monkeypatch):
    # A hundred requests may take longer than the usual time, after which the count begins again.
    monkeypatch.setattr(session_limits, "_FAULT_WINDOW_S", 3_600.0)
    worker = await bench.start()
    client = await bench.fallback(worker)
    assert await client.socket.send_raw(b'{"event":"pusher:ping"}') == 400
    assert (await client.next())["data"]["code"] is None
    for _ in range(99):
        assert await client.socket.send_raw(b"[1]") == 400
    with pytest.raises(FallbackClosed) as closed:
        await client.until("never")
    assert closed.value.code == 4100
