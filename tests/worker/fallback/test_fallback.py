import asyncio
import json
from functools import partial

import pytest

from helpers.fallback_wire import PRELUDE, FallbackClosed, FallbackSocket, ask
from redpoll.worker.fallback.lines import BEAT
from redpoll.worker.fallback.session import REOPENED_AFTER_UNITS, SessionState

KINDS = ("xhr_streaming", "xhr")
KEY = "278d425bdf160c739803"


@pytest.mark.parametrize("kind", KINDS)
async def test_session_subscribes_and_gets_events_as_a_websocket_does(bench, kind):
    worker = await bench.start()
    websocket, client = await bench.client(worker), await bench.fallback(worker, kind=kind)
    for one in (websocket, client):
        await one.subscribe("private-a")
        await one.subscribe("presence-b", {"user_id": one.socket_id})
    await bench.publish("private-a", "hello", '{"text":"Grüße 🎈 \\"x\\""}')
    assert (await client.until("hello")) == (await websocket.until("hello"))
    await websocket.send("client-typing", {"n": 1}, channel="private-a")
    assert json.loads((await client.until("client-typing"))["data"]) == {"n": 1}
    await client.send("client-typing", {"n": 2}, channel="private-a")
    assert json.loads((await websocket.until("client-typing"))["data"]) == {"n": 2}
    assert [frame for frame in websocket.seen if frame["event"] == "pusher_internal:member_added"]
    assert client.socket.lines[0].startswith(PRELUDE if kind == "xhr_streaming" else "o")
    assert client.socket.lines.count("o") == 1
    assert client.socket.answers == [204, 204, 204]


@pytest.mark.parametrize("kind", KINDS)
async def test_requests_reach_another_worker_than_the_session(bench, kind):
    one, two = await bench.start(), await bench.start()
    client = await bench.fallback(one, two, kind=kind)
    for number in range(20):
        await client.subscribe(f"private-{number}")
    await bench.publish_numbers("private-7", range(50))
    assert [json.loads(frame["data"]) for frame in await client.events(50)] == list(range(50))
    assert one.fallback.relay.relayed_total + two.fallback.relay.relayed_total >= 10
    assert len(one.hub.open_connections) + len(two.hub.open_connections) == 1


async def test_stream_opened_again_in_another_worker_misses_nothing(bench):
    one, two = await bench.start(), await bench.start()
    client = await bench.fallback(one, two)
    await client.subscribe("private-a")
    for first in range(0, 300, 20):
        # No more at once than a session may have unsent.
        some = range(first, first + 20)
        await bench.publish_numbers("private-a", some, '{"n":{n},"pad":"' + "ä" * 5000 + '"}')
        assert [json.loads(frame["data"])["n"] for frame in await client.events(20)] == list(some)
    assert client.socket.streams > 300 * 5000 // REOPENED_AFTER_UNITS
    assert client.socket.lines.count("o") == 1


@pytest.mark.parametrize("version", ["1.0", "1.1"])
async def test_proxies_that_speak_http_1_0_get_streams_and_polls(bench, version):
    worker = await bench.start()
    for kind in KINDS:
        client = await bench.fallback(worker, kind=kind, version=version)
        await client.subscribe("private-a")
        await bench.publish("private-a", "hello", "1")
        await client.until("hello")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("app", "query", "headers", "code"),
    [
        ({}, "protocol=3", {}, 4007),
        ({"enabled": False}, "", {}, 4003),
        ({"tls_required": True}, "", {}, 4000),
        ({"allowed_origins": ("example.com",)}, "", {"Origin": "https://evil.example"}, 4009),
        ({"max_connections": 1}, "", {}, 4004),
    ],
)
async def test_refused_clients_get_the_codes_of_websockets(bench, kind, app, query, headers, code):
    worker = await bench.start()
    if code == 4004:
        await bench.client(worker)
    await bench.change(**app)
    fallback = FallbackSocket([("127.0.0.1", worker.port)], KEY, kind, query=query, headers=headers)
    await fallback.open()
    assert json.loads(await fallback.recv())["data"]["code"] == code
    with pytest.raises(FallbackClosed) as closed:
        await fallback.recv()
    assert closed.value.code == code
    assert closed.value.reason
    await fallback.close()


async def test_unknown_key_is_refused_with_4001(bench):
    worker = await bench.start()
    response = await ask(
        "127.0.0.1", worker.port, "POST", "/pusher/app/nokey/1/abcdefgh/xhr", Origin="https://a.example"
    )
    assert response.headers["access-control-allow-origin"] == "https://a.example"
    assert response.body.startswith(b"o\na[")
    assert b"c[4001," in response.body


@pytest.mark.parametrize("kind", KINDS)
async def test_closed_session_gets_its_code_and_never_comes_back(bench, kind):
    worker = await bench.start()
    client = await bench.fallback(worker, kind=kind)
    await client.subscribe("private-a")
    assert worker.hub.close_socket("1", client.socket_id) == 1
    await client.until("pusher:error")
    with pytest.raises(FallbackClosed) as closed:
        await client.next()
    assert closed.value.code == 4009
    await bench.settled(worker, lambda: not worker.fallback.sessions.by_name)
    for action in ("xhr", "xhr_streaming", "xhr_send"):
        body = b'["x"]' if action == "xhr_send" else b""
        response = await ask("127.0.0.1", worker.port, "POST", client.socket.path(action), body)
        assert response.status == 404, action


def is_read(worker):
    """Each session has a stream or poll. One whose client goes between two polls waits 30 s for the next one."""
    return all(session.outlet is not None for session in worker.fallback.sessions.by_name.values())


async def test_close_waits_for_the_next_poll(bench):
    worker = await bench.start()
    client = await bench.fallback(worker, kind="xhr")
    session = next(iter(worker.fallback.sessions.by_name.values()))
    await bench.settled(worker, lambda: is_read(worker))
    await client.socket.close()
    # The poll that the client had ended with it, and so did the session; another client stops between two polls.
    await bench.settled(worker, lambda: not worker.fallback.sessions.by_name)
    assert session.state.value == "ended"
    path = f"/pusher/app/{KEY}/7/abcdefgh/xhr?protocol=7"
    assert (await ask("127.0.0.1", worker.port, "POST", path)).body.startswith(b"o\na[")
    (session,) = worker.fallback.sessions.by_name.values()
    worker.hub.close_socket("1", session.connection.session.socket_id)
    await bench.settled(worker, lambda: session.state.value == "closed")
    assert len(worker.hub.open_connections) == 0
    body = (await ask("127.0.0.1", worker.port, "POST", path)).body
    assert b"pusher:error" in body
    assert b"\nc[4009," in body
    assert (await ask("127.0.0.1", worker.port, "POST", path)).status == 404


async def test_member_leaves_when_its_stream_ends(bench):
    worker, other = await bench.start(), await bench.start()
    watcher = await bench.client(other)
    await watcher.subscribe("presence-a", {"user_id": "watcher"})
    for kind in KINDS:
        client = await bench.fallback(worker, kind=kind)
        await client.subscribe("presence-a", {"user_id": kind})
        await watcher.until("pusher_internal:member_added")
        await bench.settled(worker, lambda: is_read(worker))
        await client.socket.close()
        await watcher.until("pusher_internal:member_removed")
    assert worker.fallback.sessions.by_name == {}


@pytest.mark.parametrize("kind", KINDS)
async def test_session_that_nobody_polls_or_opens_again_ends(bench, kind):
    worker = await bench.start()
    await bench.change(user_authentication_timeout_s=3600)
    worker.fallback.sessions.wait_s = 0.0
    if kind == "xhr":
        path = f"/pusher/app/{KEY}/7/abcdefgh/xhr?protocol=7"
        await ask("127.0.0.1", worker.port, "POST", path)
    else:
        fallback = FallbackSocket([("127.0.0.1", worker.port)], KEY)
        reader, writer = await asyncio.open_connection("127.0.0.1", worker.port)
        writer.write(f"POST {fallback.path('xhr_streaming', 'protocol=7')} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        await reader.readuntil(b"connection_established")
        (session,) = worker.fallback.sessions.by_name.values()
        session.connection.send(b"\x81\x7f" + (400_000).to_bytes(8, "big") + b"x" * 400_000)
        await reader.readexactly(400_000)
        writer.close()
    assert worker.fallback.sessions.begun_total == 1
    await bench.settled(worker, lambda: not worker.fallback.sessions.by_name and not len(worker.hub.open_connections))
    assert not worker.janitor.unauthorised


def is_waiting(session):
    """A stream or poll is there, and the client has answered the last heartbeat."""
    return session.outlet is not None and not session._unanswered_beat


async def test_heartbeats_are_answered_and_keep_the_session(bench):
    worker = await bench.start(activity_timeout_s=60, pong_timeout_s=30)
    # The test beats: two heartbeats before an answer would make its second one a ping.
    worker.fallback.sessions.beat_s = 3600.0
    for kind in KINDS:
        client = await bench.fallback(worker, kind=kind)
        session = list(worker.fallback.sessions.by_name.values())[-1]
        waits = partial(is_waiting, session)
        await bench.settled(worker, waits)
        begun = client.socket.heartbeats
        for count in range(1, 9):
            session.beat(BEAT)
            await bench.settled(worker, lambda n=begun + count, socket=client.socket: socket.heartbeats == n)
            await bench.settled(worker, waits)
            # 50 seconds without another byte.
            for _ in range(200):
                worker.janitor.advance()
            assert session.state is SessionState.OPEN
        assert client.socket.closed is None
        assert "a[]" not in client.socket.lines
        # A ping of the client's own is answered, and not by another heartbeat.
        await client.socket.send_raw(b"[]")
        await client.socket.send_raw(b"[]")
        await bench.settled(worker, lambda client=client: "a[]" in client.socket.lines)


async def test_client_that_does_not_read_is_closed_as_a_slow_websocket(bench):
    worker = await bench.start(max_unsent_bytes=65536)
    path = f"/pusher/app/{KEY}/7/abcdefgh/xhr?protocol=7"
    await ask("127.0.0.1", worker.port, "POST", path)
    (session,) = worker.fallback.sessions.by_name.values()
    for _ in range(100):
        session.connection.send(b"\x81\x7e" + (60_000).to_bytes(2, "big") + b"x" * 60_000)
    await bench.settled(worker, lambda: session.state.value == "closed")
    assert worker.flushing.flusher.overruns == 1
    assert b'c[4100,"slow consumer"]' in (await ask("127.0.0.1", worker.port, "POST", path)).body


async def test_preflights_follow_the_allowed_origins(bench):
    worker = await bench.start()
    await bench.change(allowed_origins=("example.com",))
    path = f"/pusher/app/{KEY}/7/abcdefgh"
    asked = {"Access_Control_Request_Method": "POST", "Access_Control_Request_Headers": "content-type"}
    for action in ("xhr_streaming", "xhr", "xhr_send"):
        response = await ask(
            "127.0.0.1", worker.port, "OPTIONS", f"{path}/{action}", Origin="https://example.com", **asked
        )
        assert response.status == 204
        assert response.headers["access-control-allow-origin"] == "https://example.com"
        assert response.headers["access-control-allow-methods"] == "POST"
        assert response.headers["access-control-allow-headers"].lower() == "content-type"
    refused = await ask("127.0.0.1", worker.port, "OPTIONS", f"{path}/xhr_send", Origin="https://evil.example", **asked)
    assert (refused.status, refused.headers.get("access-control-allow-origin")) == (403, None)


async def test_session_belongs_to_its_key_and_its_origins(bench):
    worker, other = await bench.start(), await bench.start()
    await bench.change(allowed_origins=("example.com",))
    client = await bench.fallback(worker, headers={"Origin": "https://example.com"})
    foreign = client.socket.path("xhr_send").replace(KEY, bench.other.keys[0].key)
    for one in (worker, other):
        assert (await ask("127.0.0.1", one.port, "POST", foreign, b'["x"]')).status == 404
        evil = await ask(
            "127.0.0.1", one.port, "POST", client.socket.path("xhr_send"), b'["x"]', Origin="https://evil.example"
        )
        assert evil.status == 403


async def test_body_must_be_a_list_of_texts(bench):
    worker, other = await bench.start(), await bench.start()
    client = await bench.fallback(worker)
    for one in (worker, other):
        on = ("127.0.0.1", one.port)
        for body in (b"", b"{", b'{"a":1}', b"[1]", b'["\\ud800"]', b'["\xff"]', b"[" + b'"",' * 200 + b'""]'):
            assert await client.socket.send_raw(body, on=on) == 400, body
    await client.subscribe("private-a")


async def test_body_that_is_too_large_closes_its_session_in_any_worker(bench):
    worker, other = await bench.start(max_message_bytes=2048), await bench.start(max_message_bytes=2048)
    for one in (worker, other):
        # The head alone is answered for the second.
        for size in (4101, 100_000):
            client = await bench.fallback(worker)
            assert await client.socket.send_raw(b'["' + b"x" * (size - 4) + b'"]', on=("127.0.0.1", one.port)) == 413
            with pytest.raises(FallbackClosed) as closed:
                await client.until("never")
            assert closed.value.code == 1009
            await bench.settled(other, lambda: not other.fallback.lost_sends.noted)


async def test_setting_switches_it_off(bench):
    worker = await bench.start(http_fallback=False)
    response = await ask("127.0.0.1", worker.port, "POST", f"/app/{KEY}/7/abcdefgh/xhr")
    assert response.status == 426
    assert worker.fallback.sessions.begun_total == 0


async def test_dead_worker_ends_what_was_relayed_from_it(bench):
    one, two = await bench.start(), await bench.start()
    client = await bench.fallback(one, two, kind="xhr")
    owner, other = (one, two) if one.fallback.sessions.by_name else (two, one)
    # Polls go to both by turns; wait until the other has one.
    await bench.settled(other, lambda: other.fallback.relay.waiting)
    owner.drain()
    await bench.settled(other, lambda: client.socket.closed)
    assert client.socket.closed.code in (4200, 1006)
    await bench.settled(other, lambda: not other.fallback.relay.waiting)


async def test_channels_event_becomes_a_line_once_for_all_sessions(bench):
    worker = await bench.start()
    clients = [await bench.fallback(worker) for _ in range(20)]
    for client in clients:
        await client.subscribe("a")
    made = worker.fallback.sessions.maker.made
    await bench.publish("a", "hello", "1")
    for client in clients:
        await client.until("hello")
    assert worker.fallback.sessions.maker.made == made + 1
