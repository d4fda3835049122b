import asyncio
import json

import pytest

from helpers.fallback_wire import FallbackClosed, FallbackSocket, ask
from redpoll.cluster.membership.timings import Timings
from redpoll.cluster.redis.keys import Keys
from redpoll.worker.fallback.claims import RENEW_S
from redpoll.worker.fallback.sessions import _due

KEY = "278d425bdf160c739803"


def path(number: int = 0, action: str = "xhr") -> str:
    return f"/pusher/app/{KEY}/{number}/abcdefgh/{action}?protocol=7"


async def test_second_request_of_the_same_name_attaches_to_the_session(bench):
    worker = await bench.start()
    first = await ask("127.0.0.1", worker.port, "POST", path())
    poll = asyncio.create_task(ask("127.0.0.1", worker.port, "POST", path()))
    (session,) = worker.fallback.sessions.by_name.values()
    await bench.settled(worker, lambda: session.outlet)
    replacing = asyncio.create_task(ask("127.0.0.1", worker.port, "POST", path()))
    assert (await poll).body == b'c[2010,"Another connection still open"]\n'
    session.connection.send(b"\x81\x02{}")
    assert (await replacing).body == b'a["{}"]\n'
    assert first.body.count(b"o\n") == 1
    assert worker.fallback.sessions.begun_total == 1


async def test_addresses_are_limited_as_with_websockets(bench):
    worker = await bench.start(max_connections_per_address=2, trusted_proxies=("127.0.0.1",))
    header = {"X_Forwarded_For": "192.0.2.1"}
    for number in range(2):
        assert (await ask("127.0.0.1", worker.port, "POST", path(number), **header)).body.startswith(b"o\na[")
    refused = await ask("127.0.0.1", worker.port, "POST", path(3), **header)
    assert b"c[4100," in refused.body
    assert worker.gate.addresses.refused == 1
    assert (await ask("127.0.0.1", worker.port, "POST", path(4), X_Forwarded_For="192.0.2.2")).body.startswith(b"o\na[")
    # A session that ends gives its place back.
    session = next(iter(worker.fallback.sessions.by_name.values()))
    session.drop()
    await bench.settled(worker, lambda: session.connection.of_session is None)
    # The refused one left nothing behind.
    assert (await ask("127.0.0.1", worker.port, "POST", path(3), **header)).body.startswith(b"o\na[")


async def test_sessions_of_a_worker_are_bounded(bench):
    worker = await bench.start()
    worker.gate.max_connections = 4
    for number in range(2):
        await ask("127.0.0.1", worker.port, "POST", path(number))
    assert (await ask("127.0.0.1", worker.port, "POST", path(2))).status == 503
    assert (await ask("127.0.0.1", worker.port, "POST", path(1, "xhr_send"), b'["{}"]')).status == 204


async def test_client_that_leaves_while_redis_is_asked_gives_its_place_back(bench):
    worker = await bench.start()
    await bench.change(max_connections=1)
    for _ in range(10):
        _, writer = await asyncio.open_connection("127.0.0.1", worker.port)
        writer.write(f"POST {FallbackSocket([], KEY).path('xhr', 'protocol=7')} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        await writer.drain()
        writer.close()
    worker.fallback.sessions.wait_s = 0.0
    fallback, greeted = None, False
    while not greeted:
        # The place is free once Redis has been told.
        fallback = FallbackSocket([("127.0.0.1", worker.port)], KEY)
        await fallback.open()
        greeted = json.loads(await fallback.recv())["event"] == "pusher:connection_established"
        if not greeted:
            await fallback.close()
    assert len(worker.hub.open_connections) == 1
    await fallback.close()


async def test_record_that_changed_while_a_client_waited_for_its_place_counts(bench):
    """It shared the old one with all later sessions of the app in its worker."""
    patient = Timings(admit_retry_s=20.0, max_admit_s=120.0)
    full, worker = await bench.start(), await bench.start(timings=patient)
    await bench.change(max_connections=1)
    await bench.client(full)
    limit = worker.registry.connection_limit
    asking = asyncio.create_task(ask("127.0.0.1", worker.port, "POST", path()))
    await bench.settled(worker, lambda: limit.refused)
    await bench.change(max_connections=2, client_events=False)

    def is_open() -> bool:
        limit.retry()
        return len(worker.hub.open_connections) == 1

    await bench.settled(worker, is_open)
    (connection,) = worker.hub.open_connections
    assert connection.session.app == bench.app
    assert (await asking).body.startswith(b"o\na[")


async def test_client_whose_key_moves_to_another_app_while_it_waits_is_told_to_connect_again(bench):
    worker = await bench.start(timings=Timings(admit_retry_s=20.0, max_admit_s=120.0))
    await bench.change(max_connections=1)
    await bench.client(worker)
    limit = worker.registry.connection_limit
    asking = asyncio.create_task(ask("127.0.0.1", worker.port, "POST", path()))
    await bench.settled(worker, lambda: limit.refused)
    await bench.exchange_keys(worker, max_connections=2)
    limit.retry()
    assert b"c[4200," in (await asking).body
    assert len(worker.hub.open_connections) == 1


async def test_drain_closes_sessions_with_4200(bench):
    worker = await bench.start()
    clients = [await bench.fallback(worker, kind=kind) for kind in ("xhr", "xhr_streaming")]
    worker.evacuate(0.1)
    for client in clients:
        with pytest.raises(FallbackClosed) as closed:
            await client.until("never")
        assert closed.value.code == 4200
    assert (await ask("127.0.0.1", worker.port, "POST", path())).status == 503


async def test_claims_are_renewed_at_once_after_redis_was_lost(bench, client_of_redis, monkeypatch):
    worker = await bench.start()
    clients = [await bench.fallback(worker) for _ in range(12)]
    sessions = worker.fallback.sessions
    keys = [Keys().fallback(*name) for name in sessions.by_name]
    # Of those that have their turn later, too.
    monkeypatch.setattr("redpoll.worker.fallback.sessions._MAX_RENEWING", 5)
    await client_of_redis.flushall()
    worker.link.drop("the test breaks it")
    async with asyncio.timeout(60):
        while None in await client_of_redis.mget(keys):
            await asyncio.sleep(0.01)
    assert set(await client_of_redis.mget(keys)) == {sessions.claims.own.encode()}
    assert all(client.socket.closed is None for client in clients)


async def test_claim_of_a_session_that_has_no_heartbeats_is_renewed(bench, client_of_redis):
    """Each of its polls gets a message first."""
    worker = await bench.start()
    client = await bench.fallback(worker, kind="xhr")
    sessions = worker.fallback.sessions
    (session,) = sessions.by_name.values()
    await bench.settled(worker, lambda: session.outlet)
    await client_of_redis.flushall()
    session.renewed_at -= RENEW_S + 1
    session.connection.send(b"\x81\x02{}")
    key = Keys().fallback(*session.name)
    async with asyncio.timeout(60):
        while await client_of_redis.get(key) is None:
            await asyncio.sleep(0.01)
    assert client.socket.heartbeats == 0


async def test_what_changed_while_redis_was_asked_counts(bench, monkeypatch):
    worker = await bench.start()
    claims = worker.fallback.sessions.claims
    claim, changes = claims.claim, []

    async def change_and_claim(name, done):
        await changes.pop()()
        claim(name, done)

    async def evacuate():
        worker.evacuate(0.1)

    monkeypatch.setattr(claims, "claim", lambda name, done: worker.janitor.spawn(change_and_claim(name, done)))
    changes += [evacuate, lambda: bench.change(enabled=False)]
    assert b"c[4003," in (await ask("127.0.0.1", worker.port, "POST", path(1))).body
    await bench.change(enabled=True)
    assert (await ask("127.0.0.1", worker.port, "POST", path(2))).status == 503
    assert not worker.fallback.sessions.by_name


def test_many_that_are_due_are_taken_part_by_part():
    sessions = dict.fromkeys(range(2000), 1.0) | {"later": 3.0}
    assert _due(sessions, 0.5) == []
    assert _due(sessions, 2.0) == list(range(500))
