import asyncio
import json

import pytest

from helpers.fallback_wire import FallbackClosed, FallbackSocket, ask

KEY = "278d425bdf160c739803"


async def relayed(bench, kind="xhr_streaming"):
    """A client, the worker with its session, and another one that has its stream or poll."""
    owner, other = await bench.start(), await bench.start()
    client = await bench.fallback(owner, kind=kind)
    client.socket.targets = [("127.0.0.1", other.port)]
    (session,) = owner.fallback.sessions.by_name.values()
    # The client opens its stream again, or polls again: in the other worker.
    session.connection.send(b"\x81\x7f" + (300_000).to_bytes(8, "big") + b"x" * 300_000)
    await client.socket.recv()
    # The owner has answered it.
    relay = other.fallback.relay
    await bench.settled(other, lambda: relay._waiting and all(waiting.begun for waiting in relay._waiting.values()))
    return client, owner, other


def topics_of(worker):
    """Where the messages of other workers come."""
    return [topic for topic in worker.fallback.mailbox.topics if b":box:" in topic]


async def test_client_that_leaves_ends_its_session_in_the_other_worker(bench):
    client, owner, other = await relayed(bench)
    await client.socket.close()
    await bench.settled(owner, lambda: not owner.fallback.sessions.by_name)
    await bench.settled(other, lambda: not other.fallback.relay.waiting)
    assert owner.fallback.relay.outlets == {}


async def test_client_that_leaves_before_its_session_is_found_ends_it(bench, monkeypatch):
    owner, other = await bench.start(), await bench.start()
    owner.fallback.sessions.wait_s = 3600.0
    client = FallbackSocket([], KEY)
    assert (await ask("127.0.0.1", owner.port, "POST", client.path("xhr", "protocol=7"))).status == 200
    assert len(owner.fallback.sessions.by_name) == 1
    # The next poll reaches the other worker, and its client goes before Redis has said who has the session.
    held, claims = asyncio.Queue(), other.fallback.sessions.claims
    monkeypatch.setattr(claims, "claim", lambda *asked: held.put_nowait(asked))
    _, writer = await asyncio.open_connection("127.0.0.1", other.port)
    writer.write(f"POST {client.path('xhr', 'protocol=7')} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
    name, found = await held.get()
    writer.close()
    await bench.settled(other, lambda: not other.gate.http.connections)
    monkeypatch.undo()
    claims.claim(name, found)
    await bench.settled(owner, lambda: not owner.fallback.sessions.by_name)
    assert other.fallback.relay.waiting == 0


@pytest.mark.parametrize("kind", ["xhr_streaming", "xhr"])
async def test_break_of_the_link_ends_what_was_relayed(bench, kind):
    for side in (0, 1):
        client, *workers = await relayed(bench, kind)
        workers[side].link.drop("the test breaks it")
        async with asyncio.timeout(60):
            while client.socket.closed is None:
                await asyncio.sleep(0.01)
        assert client.socket.closed.code == 1006
        await bench.settled(workers[0], lambda workers=workers: not workers[0].fallback.sessions.by_name)
        for worker in workers:
            await bench.settled(worker, lambda worker=worker: worker.registry.ready and worker.link.up)


async def test_poll_ends_with_an_error_when_its_answer_may_be_lost(bench):
    client, _, other = await relayed(bench, "xhr")
    # The link breaks, and is back before the client polls again.
    other.fallback.mailbox.connection_lost()
    with pytest.raises(FallbackClosed, match="interrupted") as closed:
        await client.until("never")
    assert closed.value.code == 1006


async def test_worker_that_stops_closes_sessions_whose_streams_are_in_others(bench):
    client, owner, other = await relayed(bench)
    socket = client.socket
    # The port of the worker that stops is closed at once: the client has nothing under way there. The prelude of the
    # first stream comes before the session is open, and isn't answered.
    await bench.settled(other, lambda: len(socket.answers) == socket.heartbeats - 1)
    owner.drain()
    with pytest.raises(FallbackClosed) as closed:
        await client.until("never")
    assert closed.value.code == 4200


async def test_owner_that_vanishes_is_noticed(bench, client_of_redis):
    client, owner, other = await relayed(bench)
    # Its topic has no reader any more, as if the process were gone.
    owner.link.unsubscribe(topics_of(owner))
    async with asyncio.timeout(60):
        while client.socket.closed is None:
            await asyncio.sleep(0.01)
    await bench.settled(other, lambda: not other.fallback.relay.waiting)
    assert not other.fallback.lost_sends.noted
    statuses = {await client.socket.send_raw(b'["x"]')}
    # The worker that can't be reached is asked again, until its session is marked as ended.
    while 404 not in statuses:
        statuses.add(await client.socket.send_raw(b'["x"]'))
    assert statuses == {503, 404}


async def test_sends_reach_the_session_in_order_over_two_workers(bench):
    one, two = await bench.start(), await bench.start()
    client = await bench.fallback(one, two)
    watcher = await bench.client(one)
    for each in (client, watcher):
        await each.subscribe("private-a")
    paths = [client.socket.path("xhr_send") for _ in range(8)]
    bodies = [json.dumps([json.dumps({"event": "client-n", "channel": "private-a", "data": str(n)})]) for n in range(8)]
    # The last first; the gap is filled before it is given up, or they come late but all.
    sends = [
        client.socket.send_raw(body.encode(), path=path)
        for path, body in reversed(list(zip(paths, bodies, strict=True)))
    ]
    assert await asyncio.gather(*sends) == [204] * 8
    assert sorted(frame["data"] for frame in await watcher.events(8)) == [str(n) for n in range(8)]


async def test_malformed_messages_of_other_workers_are_refused(bench):
    worker = await bench.start()
    (topic,) = topics_of(worker)
    assert await worker.link.ask(b"PUBLISH", topic, b"\x00nonsense") == 1
    client = await bench.fallback(worker)
    await client.subscribe("a")


async def test_unknown_session_is_404_from_any_worker(bench):
    one, two = await bench.start(), await bench.start()
    for worker in (one, two):
        response = await ask("127.0.0.1", worker.port, "POST", f"/pusher/app/{KEY}/1/guessing/xhr_send?n=1", b'["x"]')
        assert response.status == 404
    client = await bench.fallback(one)
    client.socket.session = client.socket.session[:-1] + "x"
    for worker in (one, two):
        assert await client.socket.send_raw(b'["x"]', on=("127.0.0.1", worker.port)) == 404
