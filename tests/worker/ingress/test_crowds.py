"""Strangers hold what they can get, and a back end goes on: a worker with a fake control plane.

The stranger is at 127.0.0.2, the back end at 127.0.0.1, and in some tests both are at 127.0.0.1.
"""

import asyncio
import contextlib
import hashlib
import hmac
import time

import pytest

from redpoll._http import pack_answer
from redpoll.cluster.membership.timings import Timings
from redpoll.http.messages import AUTHENTICATED, CLOSES, CONTINUE, LAST
from worker.ingress.edge import reset

GET = b"GET /apps/1/channels HTTP/1.1\r\nHost: h\r\n\r\n"
PART = b"POST /a HTTP/1.1\r\nHost: h\r\nContent-Length: 9\r\n\r\n1234"
KEY, SECRET = "278d425bdf160c739803", "7ad3773142a6692b25b8"
SILENT = b""
UPGRADE = (
    f"GET /app/{KEY}?protocol=7 HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
    "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n"
).encode()


def publish(secret=SECRET, body=b"{}"):
    query = f"auth_key={KEY}&auth_timestamp={int(time.time())}&auth_version=1.0"
    query += f"&body_md5={hashlib.md5(body).hexdigest()}"
    signature = hmac.new(secret.encode(), f"POST\n/apps/1/events\n{query}".encode(), hashlib.sha256).hexdigest()
    target = f"/apps/1/events?{query}&auth_signature={signature}"
    return f"POST {target} HTTP/1.1\r\nHost: h\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


@pytest.fixture
async def open_from(bench):
    """`await open_from(address, first_bytes)`: (reader, writer)."""
    writers = []

    async def make(worker, address, data=b""):
        reader, writer = await asyncio.open_connection("127.0.0.1", worker.port, local_addr=(address, 0))
        writers.append(writer)
        if data:
            writer.write(data)
        return reader, writer

    yield make
    for writer in writers:
        writer.close()


@pytest.fixture
def authenticating(control):
    """Control finds a right credential in requests that are signed with SECRET, and leaves others unanswered."""

    def answer(request):
        if request.method != "POST" or "auth_signature" not in request.target:
            return None
        flags = AUTHENTICATED | (LAST if request.flags & CLOSES else 0)
        control.writers[-1].write(pack_answer(request.number, flags, control.echo(request)))
        return None

    control.answer = answer
    return control


async def status(reader):
    async with asyncio.timeout(60):
        head = await reader.readuntil(b"\r\n\r\n")
        for line in head.split(b"\r\n"):
            if line.lower().startswith(b"content-length:"):
                await reader.readexactly(int(line[15:]))
        return int(head.split(b" ")[1])


async def ended(reader):
    async with asyncio.timeout(60):
        with contextlib.suppress(ConnectionError):
            return await reader.read()
        return b""


async def test_requests_of_an_address_are_bounded_but_not_those_with_a_right_signature(
    bench, open_from, authenticating, wait_until
):
    worker = await bench.start(max_pending_per_address=1, trusted_proxies=["10.0.0.0/8"])
    http = worker.gate.http
    _, writer = await open_from(worker, "127.0.0.1", GET)
    await wait_until(lambda: authenticating.requests)
    refused, _ = await open_from(worker, "127.0.0.1", GET)
    assert await status(refused) == 503
    assert http.refused["address"] == 1
    # From the same address, on new connections, whole and in two packets.
    signed = publish()
    for data in (signed, signed[:-1]):
        reader, more = await open_from(worker, "127.0.0.1", data)
        if data != signed:
            await wait_until(lambda: http.reading_bytes)
            more.write(signed[-1:])
        assert await status(reader) == 200
    reader, _ = await open_from(worker, "127.0.0.1", publish(secret="wrong"))
    assert await status(reader) == 503
    # Another address has its own places, and the place of a closed connection is free.
    _, other = await open_from(worker, "127.0.0.2", GET)
    await wait_until(lambda: len(worker.gate.strangers) == 2)
    for each in (writer, other):
        reset(each)
    await wait_until(lambda: len(worker.gate.strangers) == 0)


@pytest.mark.parametrize("data", [b"GET /", PART, GET + b"GET /", GET], ids=["head", "body", "later head", "request"])
async def test_one_bound_counts_every_kind(bench, open_from, authenticating, wait_until, data):
    worker = await bench.start(max_pending_per_address=2, trusted_proxies=["10.0.0.0/8"])
    for count in (1, 2):
        await open_from(worker, "127.0.0.2", data)
        await wait_until(lambda count=count: len(worker.gate.strangers) == count)
    for more in (b"GET /", PART, GET):
        reader, _ = await open_from(worker, "127.0.0.2", more)
        assert (await ended(reader) if more == b"GET /" else await status(reader)) in (b"", 503)
    assert worker.gate.http.refused["address"] == 3
    assert len(worker.gate.strangers) == 2


@pytest.mark.parametrize(
    "start",
    [b"POST /apps/1/events", b"POST /a"],
    ids=["usual", "other"],
)
async def test_bodies_count_for_the_client_that_a_proxy_names(bench, open_from, authenticating, wait_until, start):
    worker = await bench.start(max_pending_per_address=2, trusted_proxies=["127.0.0.1/32"])

    def of(client):
        return start + b" HTTP/1.1\r\nHost: h\r\nX-Forwarded-For: %b\r\nContent-Length: 9\r\n\r\n1234" % client

    for count in (1, 2):
        await open_from(worker, "127.0.0.1", of(b"198.51.100.7"))
        await wait_until(lambda count=count: len(worker.gate.strangers) == count)
    refused, _ = await open_from(worker, "127.0.0.1", of(b"198.51.100.7"))
    assert await status(refused) == 503
    await open_from(worker, "127.0.0.1", of(b"203.0.113.9"))
    await wait_until(lambda: len(worker.gate.strangers) == 3)
    assert worker.gate.http.refused["address"] == 1


async def test_half_of_all_requests_is_for_callers_with_a_right_credential(
    bench, open_from, authenticating, wait_until
):
    worker = await bench.start()
    worker.gate.http.max_requests = 4
    reader, writer = await open_from(worker, "127.0.0.2", publish())
    assert await status(reader) == 200
    for count in (1, 2):
        await open_from(worker, "127.0.0.2", GET)
        await wait_until(lambda count=count: len(worker.gate.http.link.awaited) == count)
    refused, _ = await open_from(worker, "127.0.0.2", GET)
    assert await status(refused) == 503
    assert worker.gate.http.refused["requests"] == 1
    writer.write(publish())
    assert await status(reader) == 200
    # A token, say, which only control knows: the connection has authenticated before.
    authenticating.answer = lambda request: authenticating.echo(request)
    writer.write(GET)
    assert await status(reader) == 200
    # That answer said that the caller wasn't authenticated.
    writer.write(GET)
    assert await status(reader) == 503


async def test_half_of_unfinished_bodies_is_for_callers_with_a_right_credential(bench, open_from, control, wait_until):
    worker = await bench.start()
    http = worker.gate.http
    http.max_reading_bytes = 32_000
    control.on_head = lambda request: (
        b"HTTP/1.1 401 Unauthorized\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"
        if "auth_signature" not in request.target
        else CONTINUE
    )
    part = b"POST /a HTTP/1.1\r\nHost: h\r\nContent-Length: 9000\r\n\r\n" + b"x" * 6000
    await open_from(worker, "127.0.0.2", part)
    # As received, and as a message to control.
    await wait_until(lambda: http.reading_bytes > 2 * 6000)
    counted = http.reading_bytes
    reader, _ = await open_from(worker, "127.0.0.2", part)
    assert await status(reader) == 401
    signed = publish(body=b"x" * 9000)
    for _ in range(2):
        reader, writer = await open_from(worker, "127.0.0.2", signed[:-2000])
        await wait_until(lambda: http.reading_bytes > counted)
        writer.write(signed[-2000:])
        assert await status(reader) == 200
        await wait_until(lambda: http.reading_bytes == counted)


async def test_out_of_descriptors_silent_connections_make_room_and_a_back_end_stays(
    bench, open_from, authenticating, wait_until
):
    worker = await bench.start()
    gate = worker.gate
    reader, writer = await open_from(worker, "127.0.0.1", publish())
    assert await status(reader) == 200
    gate.max_connections = -40
    silent = [await open_from(worker, "127.0.0.2", SILENT) for _ in range(40)]
    assert await ended(silent[0][0]) == b""
    await wait_until(lambda: len(gate.strangers.newcomers) <= 8)
    writer.write(publish())
    assert await status(reader) == 200
    fresh, _ = await open_from(worker, "127.0.0.1", publish())
    assert await status(fresh) == 200
    # Nor do strangers' requests, bodies or refused WebSockets keep anybody out.
    for data in (GET, PART, UPGRADE):
        for _ in range(12):
            await open_from(worker, "127.0.0.2", data)
        fresh, _ = await open_from(worker, "127.0.0.1", publish())
        assert await status(fresh) == 200
    writer.write(publish())
    assert await status(reader) == 200


async def test_a_websocket_takes_the_place_of_a_silent_connection(bench, open_from, wait_until):
    worker = await bench.start()
    worker.gate.max_connections = 4
    silent = [await open_from(worker, "127.0.0.2", SILENT) for _ in range(4)]
    await wait_until(lambda: worker.gate.connections == 4)
    client = await bench.client(worker)
    assert client.socket_id
    assert await ended(silent[0][0]) == b""


async def test_answers_that_a_stranger_does_not_read_keep_their_place(bench, open_from, control, wait_until):
    control.answer = lambda request: b"HTTP/1.1 200 OK\r\nContent-Length: 9000000\r\n\r\n" + b"x" * 9_000_000
    worker = await bench.start(max_pending_per_address=1, trusted_proxies=["10.0.0.0/8"])
    reader, writer = await open_from(worker, "127.0.0.2", GET)
    writer.transport.pause_reading()
    await wait_until(lambda: worker.gate.strangers.idle)
    assert len(worker.gate.strangers) == 1
    refused, _ = await open_from(worker, "127.0.0.2", GET)
    assert await status(refused) == 503
    writer.transport.resume_reading()
    assert await status(reader) == 200
    await wait_until(lambda: len(worker.gate.strangers) == 0)


@pytest.mark.parametrize("data", [GET, PART], ids=["first", "post"])
async def test_one_that_gets_503_for_lack_of_http_connections_can_make_room(bench, open_from, data):
    worker = await bench.start()
    gate = worker.gate
    gate.http.max_connections = 0
    reader, _ = await open_from(worker, "127.0.0.2", data)
    assert await status(reader) == 503
    assert gate.http.refused["connections"] == 1
    assert len(gate.strangers.closing) == 1
    assert not gate.strangers.callers
    assert gate.make_room("8.8.8.8")
    assert gate._held() == 0
    assert await ended(reader) == b""


async def test_the_workers_own_answers_take_a_place_while_they_are_unread(bench, open_from, wait_until):
    worker = await bench.start(max_pending_per_address=1, trusted_proxies=["10.0.0.0/8"])
    # There is no control plane, so the worker answers all requests.
    await open_from(worker, "127.0.0.2", b"GET /")
    await wait_until(lambda: len(worker.gate.strangers) == 1)
    reader, writer = await open_from(worker, "127.0.0.2", GET)
    for _ in range(2):
        assert await status(reader) == 503
        writer.write(GET)
    # More than is as good as read.
    writer.write(GET * 40)
    answers = await ended(reader)
    assert len(answers) > 4096
    assert answers.count(b"HTTP/1.1 503 ") < 40
    assert answers.count(b"\r\nConnection: close\r\n") == 1
    reader, _ = await open_from(worker, "127.0.0.3", GET * 40)
    for _ in range(40):
        assert await status(reader) == 503
    await wait_until(lambda: len(worker.gate.strangers) == 1)


async def test_an_upgrade_that_waits_for_its_place_in_the_app_is_a_strangers(bench, open_from, wait_until, monkeypatch):
    worker = await bench.start(max_pending_per_address=1, trusted_proxies=["10.0.0.0/8"])
    strangers = worker.gate.strangers
    await bench.change(max_connections=10)
    asked = []
    limit = worker.registry.connection_limit
    admit = limit.admit
    monkeypatch.setattr(limit, "admit", asked.append)
    reader, _ = await open_from(worker, "127.0.0.2", UPGRADE)
    await wait_until(lambda: asked)
    assert len(strangers) == len(strangers.newcomers) == 1
    refused, writer = await open_from(worker, "127.0.0.2", UPGRADE)
    assert await status(refused) == 503
    assert worker.gate.http.refused["address"] == 1
    writer.close()
    await wait_until(lambda: not strangers.closing)
    # Later requests of a connection hold one, too.
    other, _ = await open_from(worker, "127.0.0.3", b"GET /healthz HTTP/1.1\r\nHost: h\r\n\r\n" + UPGRADE)
    await wait_until(lambda: len(asked) == 2)
    assert await status(other) == 200
    assert len(strangers) == 2
    admit(asked[0])
    assert (await asyncio.wait_for(reader.readline(), 60)).startswith(b"HTTP/1.1 101 ")
    assert len(strangers) == 1
    assert strangers.make_room("127.0.0.1")
    assert await ended(other) == b""
    assert len(worker.hub.admission) == 0
    assert len(strangers) == 0


async def test_one_that_makes_room_is_not_opened_by_an_answer_that_comes_before_its_end(bench, open_from, wait_until):
    """It would be counted as leaving for ever, and the worker would take one more for each."""
    # The test ends the wait.
    worker = await bench.start(timings=Timings(admit_retry_s=20.0, max_admit_s=120.0))
    gate, limit = worker.gate, worker.registry.connection_limit
    await bench.change(max_connections=1)
    client = await bench.client(worker)
    reader, _ = await open_from(worker, "127.0.0.2", UPGRADE)
    await wait_until(lambda: limit.refused)
    assert gate.make_room("8.8.8.8")
    # All that wait are admitted at once.
    limit.limit("1", 0)
    assert await ended(reader) == b""
    await wait_until(lambda: gate.connections == 1)
    assert gate._held() == 1
    assert not gate.strangers.leaving
    assert len(worker.hub.open_connections) == 1
    await client.nothing_more()


async def test_the_worker_answers_health_checks_itself(bench, open_from, control):
    worker = await bench.start()
    worker.gate.http.max_requests = 0
    reader, writer = await open_from(worker, "127.0.0.1", b"")
    ask = b"%b %b HTTP/1.1\r\nHost: h\r\n\r\n"
    # As many as come in one packet, in several goes.
    writer.write(ask % (b"GET", b"/healthz") * 100 + ask % (b"GET", b"/"))
    for _ in range(101):
        assert await status(reader) == 200
    writer.write(ask % (b"GET", b"/readyz"))
    assert await status(reader) == 503
    assert control.requests == []
