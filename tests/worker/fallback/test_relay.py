import asyncio
import json

import pytest

from fallback_wire import FallbackClosed, ask
from redpoll.cluster.mailbox import Mailbox
from redpoll.worker.fallback.claims import SessionName

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
    return [topic for topic in worker.fallback._mailbox.topics if b":box:" in topic]


async def test_client_that_leaves_ends_its_session_in_the_other_worker(bench):
    client, owner, other = await relayed(bench)
    await client.socket.close()
    await bench.settled(owner, lambda: not owner.fallback.sessions.by_name)
    await bench.settled(other, lambda: not other.fallback.relay.waiting)
    assert owner.fallback.relay.outlets == {}


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
    relay = other.fallback.relay
    # The link breaks, and is back before the client polls again.
    relay._link_lost()
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
    assert (await ask("127.0.0.1", other.port, "POST", client.socket.path("xhr_send"), b'["x"]')).status == 404


@pytest.mark.parametrize("lost", ["send", "xhr_streaming", "xhr"])
async def test_request_that_meets_an_owner_whose_link_is_down_ends_the_session_later(bench, lost):
    """The client's request is answered at once. The session's worker hears of it when its link is up again."""
    owner, other = await bench.start(), await bench.start()
    # It must not end because its client fetches nothing.
    owner.fallback.sessions.wait_s = 3600.0
    client = await bench.fallback(owner, kind="xhr" if lost == "xhr" else "xhr_streaming")
    topics = topics_of(owner)
    owner.link.unsubscribe(topics)
    while any((await owner.link.ask(b"PUBSUB", b"NUMSUB", *topics))[1::2]):
        await asyncio.sleep(0.005)
    if lost == "send":
        assert await client.socket.send_raw(b'["{}"]', on=("127.0.0.1", other.port)) == 404
    else:
        (session,) = owner.fallback.sessions.by_name.values()
        client.socket.targets = [("127.0.0.1", other.port)]
        session.connection.send(b"\x81\x7f" + (300_000).to_bytes(8, "big") + b"x" * 300_000)
        await client.socket.recv()
        with pytest.raises(FallbackClosed) as closed:
            await client.socket.recv()
        assert closed.value.code == 1006
    assert len(owner.hub.open_connections) == 1
    owner.link.subscribe(topics)
    # It has left its channels. Its last lines may wait for a poll.
    await bench.settled(owner, lambda: not len(owner.hub.open_connections))


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


async def test_send_that_is_lost_ends_the_session(bench, monkeypatch):
    """pusher-js doesn't look at the status: the page would wait for its subscription for ever."""
    one, two = await bench.start(), await bench.start()
    client = await bench.fallback(one)
    away = two.fallback._mailbox.address
    monkeypatch.setattr(Mailbox, "up", property(lambda mailbox: mailbox.address != away))
    assert await client.socket.send_raw(b"[]", on=("127.0.0.1", two.port)) == 503
    assert two.fallback.relay._missed == {}
    assert await client.socket.send_raw(b'["{}"]', on=("127.0.0.1", two.port)) == 503
    assert len(one.fallback.sessions.by_name) == 1
    monkeypatch.undo()
    with pytest.raises(FallbackClosed) as closed:
        await client.until("never")
    assert closed.value.code == 4100
    await bench.settled(two, lambda: not two.fallback.relay._missed)
    assert one.fallback.sessions.by_name == {}


async def test_send_that_its_address_may_not_have_under_way_ends_the_session_with_a_code(bench):
    one = await bench.start()
    two = await bench.start(max_pending_per_address=1, trusted_proxies=("127.0.0.1",))
    client = await bench.fallback(one)
    # Somebody else of the address has a request under way.
    assert two.gate.strangers.reserve(object(), "192.0.2.1")
    path = client.socket.path("xhr_send")
    refused = await ask("127.0.0.1", two.port, "POST", path, b'["{}"]', X_Forwarded_For="192.0.2.1")
    assert refused.status == 503
    with pytest.raises(FallbackClosed) as closed:
        await client.until("never")
    assert closed.value.code == 4100
    await bench.settled(two, lambda: not two.fallback.relay._missed)


async def test_names_of_one_network_leave_room_for_others(bench):
    relay = (await bench.start()).fallback.relay
    for number in range(300):
        relay.missed(SessionName(KEY, f"invented{number}"), b"[1]", ("192.0.2.1", 1))
        relay.missed(SessionName(KEY, f"invented{number}"), b"[1]", ("192.0.2.1", 1))
    assert len(relay._missed) == 250
    for number in range(300):
        relay.missed(SessionName(KEY, f"private{number}"), b"[1]", ("10.0.0.1", 10))
        relay.missed(SessionName(KEY, f"proxied{number}"), b"[1]", ("", 0))
    assert len(relay._missed) == 850
    for name in list(relay._missed):
        relay._forget_missed(name)
    assert not relay._missed_of


async def test_malformed_messages_of_other_workers_are_refused(bench):
    worker = await bench.start()
    worker.fallback.relay._received(b"\x00nonsense")
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
