import asyncio
import json

import pytest
from structlog.testing import capture_logs

from helpers.fallback_wire import FallbackClosed, ask, head_of, read_head
from redpoll.cluster.mailbox import Mailbox
from redpoll.worker.fallback.claims import SessionName

KEY = "278d425bdf160c739803"
PING = json.dumps([json.dumps({"event": "pusher:ping", "data": {}})]).encode()


async def closed_with(client) -> int:
    with pytest.raises(FallbackClosed) as closed:
        await client.until("never")
    return closed.value.code


async def unreachable(worker) -> list[bytes]:
    """Messages of other workers reach it no more. Returns their topics."""
    topics = [topic for topic in worker.fallback.mailbox.topics if b":box:" in topic]
    worker.link.unsubscribe(topics)
    while any((await worker.link.ask(b"PUBSUB", b"NUMSUB", *topics))[1::2]):
        await asyncio.sleep(0.005)
    return topics


async def test_session_ends_after_a_worker_without_its_link_refused_a_send(bench, monkeypatch):
    """pusher-js doesn't look at the status: the page would wait for its subscription for ever."""
    one, two = await bench.start(), await bench.start()
    client = await bench.fallback(one)
    away = two.fallback.mailbox.address
    monkeypatch.setattr(Mailbox, "up", property(lambda mailbox: mailbox.address != away))
    assert await client.socket.send_raw(b"[]", on=("127.0.0.1", two.port)) == 503
    assert two.fallback.lost_sends.noted == {}
    assert await client.socket.send_raw(PING, on=("127.0.0.1", two.port)) == 503
    assert len(one.fallback.sessions.by_name) == 1
    monkeypatch.undo()
    assert await closed_with(client) == 4100
    await bench.settled(two, lambda: not two.fallback.lost_sends.noted)
    assert one.fallback.sessions.by_name == {}


async def test_worker_that_could_not_be_reached_ends_the_session_when_it_is_back(bench):
    owner, other = await bench.start(), await bench.start()
    client = await bench.fallback(owner)
    await unreachable(owner)
    assert await client.socket.send_raw(PING, on=("127.0.0.1", other.port)) == 503
    await bench.settled(other, lambda: not other.fallback.lost_sends.noted)
    # However long that takes: the other worker need not be there any more.
    assert await client.socket.send_raw(PING, on=("127.0.0.1", other.port)) == 404
    assert len(owner.hub.open_connections) == 1
    owner.link.drop("the test breaks it")
    assert await closed_with(client) == 4100
    await bench.settled(owner, lambda: not len(owner.hub.open_connections))


async def test_stream_or_poll_that_is_lost_is_not_remembered(bench):
    """Its client sees it, and many of them leave the room to sends."""
    owner, other = await bench.start(), await bench.start()
    await unreachable(owner)
    for kind in ("xhr_streaming", "xhr"):
        client = await bench.fallback(owner, kind=kind)
        client.socket.targets = [("127.0.0.1", other.port)]
        (session,) = owner.fallback.sessions.by_name.values()
        session.connection.send(b"\x81\x7f" + (300_000).to_bytes(8, "big") + b"x" * 300_000)
        await client.socket.recv()
        assert await closed_with_raw(client) == 1006
        assert other.fallback.lost_sends.noted == {}
        session.drop()
        await bench.settled(owner, lambda: not owner.fallback.sessions.by_name)


async def closed_with_raw(client) -> int:
    with pytest.raises(FallbackClosed) as closed:
        await client.socket.recv()
    return closed.value.code


async def test_send_finds_its_session_after_redis_lost_who_has_it(bench, client_of_redis):
    """Until the session's worker has written its claim again, nobody knows whether there is such a session."""
    owner, other = await bench.start(), await bench.start()
    client = await bench.fallback(owner)
    await client_of_redis.flushall()
    lost_sends = other.fallback.lost_sends
    lost_sends.link_lost()
    lost_sends.link_up()
    assert await client.socket.send_raw(PING, on=("127.0.0.1", other.port)) == 503
    (name,) = owner.fallback.sessions.by_name
    invented = f"/pusher/app/{KEY}/1/invented/xhr_send"
    assert (await ask("127.0.0.1", other.port, "POST", invented, PING)).status == 503
    assert set(lost_sends.noted) == {name, SessionName(KEY, "1/invented")}
    owner.fallback.sessions.renew_all()
    assert await closed_with(client) == 4100
    await bench.settled(other, lambda: set(lost_sends.noted) == {SessionName(KEY, "1/invented")})
    # After a while, what Redis doesn't know isn't there.
    lost_sends.unsure_s = 0.0
    lost_sends.link_lost()
    lost_sends.link_up()
    await bench.settled(other, lambda: not lost_sends.noted)
    assert (await ask("127.0.0.1", other.port, "POST", invented, PING)).status == 404


async def test_only_a_break_of_the_link_makes_unknown_sessions_unsure(bench):
    worker = await bench.start()
    lost_sends = worker.fallback.lost_sends
    assert not lost_sends.unsure
    worker.link.drop("the test breaks it")
    await bench.settled(worker, lambda: lost_sends.unsure and worker.link.up)
    lost_sends.unsure_s = 0.0
    worker.link.drop("the test breaks it again")
    await bench.settled(worker, lambda: not lost_sends.unsure and worker.link.up)


@pytest.mark.parametrize("in_parts", [False, True])
async def test_send_that_its_address_may_not_have_under_way_ends_the_session(bench, in_parts):
    one = await bench.start()
    two = await bench.start(max_pending_per_address=1, trusted_proxies=() if in_parts else ("127.0.0.1",))
    client = await bench.fallback(one)
    # Others of the address have as many requests under way as it may.
    others = []
    while two.gate.strangers.reserve(other := object(), "127.0.0.1" if in_parts else "192.0.2.1"):
        others.append(other)
    path = client.socket.path("xhr_send")
    reader, writer = await asyncio.open_connection("127.0.0.1", two.port)
    head = head_of("POST", path, {} if in_parts else {"X-Forwarded-For": "192.0.2.1"}, len(PING))
    # A browser may send the head first. It is refused then.
    writer.write(head if in_parts else head + PING)
    assert (await read_head(reader)).status == 503
    writer.close()
    assert await closed_with(client) == 4100
    await bench.settled(two, lambda: not two.fallback.lost_sends.noted)


@pytest.mark.parametrize("with_body", [False, True])
async def test_send_for_whose_connection_there_is_no_room_ends_the_session(bench, with_body):
    """The head wasn't read, so the page waited for its subscription for ever."""
    one, two = await bench.start(), await bench.start()
    client = await bench.fallback(one)
    http = two.gate.http
    http.max_connections = 0
    reader, writer = await asyncio.open_connection("127.0.0.1", two.port)
    writer.write(head_of("POST", client.socket.path("xhr_send"), {}, len(PING)) + PING * with_body)
    assert (await read_head(reader)).status == 503
    writer.close()
    assert await closed_with(client) == 4100
    # Others get the same answer, and nothing of them stays.
    assert (await ask("127.0.0.1", two.port, "GET", "/apps/1/channels", b"")).status == 503
    await bench.settled(two, lambda: not two.fallback.lost_sends.noted)
    assert (len(http.connections), http.refused["connections"]) == (0, 2)
    assert not two.gate.strangers.callers


async def test_send_whose_body_does_not_come_ends_the_session(bench):
    worker = await bench.start()
    worker.gate.http.body_timeout_s = 0.1
    client = await bench.fallback(worker)
    reader, writer = await asyncio.open_connection("127.0.0.1", worker.port)
    writer.write(head_of("POST", client.socket.path("xhr_send"), {}, 100) + b'["')
    assert (await read_head(reader)).status == 408
    writer.close()
    assert await closed_with(client) == 4100


async def test_names_of_one_network_leave_room_for_others(bench):
    worker = await bench.start()
    lost_sends = worker.fallback.lost_sends
    with capture_logs() as lines:
        for number in range(300):
            lost_sends.note(SessionName(KEY, f"invented{number}"), 503, ("192.0.2.1", 1))
            lost_sends.note(SessionName(KEY, f"invented{number}"), 503, ("192.0.2.1", 1))
    assert len(lost_sends.noted) == 250
    # Once, not for each of them.
    assert [(line["log_level"], line["network"], line["remembered"]) for line in lines] == [
        ("warning", "192.0.2.1", 250)
    ]
    for number in range(300):
        lost_sends.note(SessionName(KEY, f"private{number}"), 503, ("10.0.0.1", 10))
        lost_sends.note(SessionName(KEY, f"proxied{number}"), 503, ("", 0))
    assert len(lost_sends.noted) == 850
    # Redis doesn't know these sessions, so they are forgotten, and the network has room again.
    await bench.settled(worker, lambda: not lost_sends.noted)
    with capture_logs() as lines:
        for number in range(251):
            lost_sends.note(SessionName(KEY, f"later{number}"), 503, ("192.0.2.1", 1))
    assert (len(lost_sends.noted), len(lines)) == (250, 1)
