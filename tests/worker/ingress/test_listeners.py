"""PROXY headers, TLS handshakes, and clients that leave before their first byte of HTTP."""

import asyncio
import contextlib
import errno
import gc
import json
import os
import resource
import socket
import ssl

import pytest
from structlog.testing import capture_logs

from redpoll._sockets import Poller
from redpoll.http.messages import SECURE
from redpoll.worker.ingress import gate as gate_module
from redpoll.worker.ingress import listeners
from redpoll.worker.ingress.client_connection import ProxiedPeer
from worker.ingress.edge import Edge, first_frame, until_end, upgrade

KEY = "278d425bdf160c739803"
PATH = f"/app/{KEY}?protocol=7"
V1 = b"PROXY TCP4 203.0.113.9 192.0.2.1 4711 443\r\n"
ADDRESSES = socket.inet_aton("203.0.113.9") + socket.inet_aton("192.0.2.1") + (4711).to_bytes(2, "big") + b"\x01\xbb"
TLS_SEEN = b"\x20\x00\x05\x01\x00\x00\x00\x00"
SIGNATURE = b"\r\n\r\n\x00\r\nQUIT\n"
V2 = SIGNATURE + b"\x21\x11\x00\x0c" + ADDRESSES
V2_TLS = SIGNATURE + b"\x21\x11\x00\x14" + ADDRESSES + TLS_SEEN
V2_LOCAL = SIGNATURE + b"\x20\x00\x00\x00"
HEADERS = {"version 1": V1, "version 2": V2, "version 2 after TLS": V2_TLS}


@pytest.fixture
async def edges(bench, tmp_path):
    """`await edges(**settings)`: an Edge with these settings, for a worker with `worker_settings`."""
    made = []

    async def make(worker_settings=(), **settings) -> Edge:
        edge = Edge(await bench.start(**dict(worker_settings)), tmp_path, **settings)
        made.append(edge)
        await edge.listeners.open()
        return edge

    yield make
    for edge in made:
        edge.close()


GET = b"GET /apps/1/channels HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"


class TestProxyHeaders:
    @pytest.mark.parametrize("tls", [False, True], ids=["plain", "tls"])
    @pytest.mark.parametrize("header", HEADERS.values(), ids=HEADERS)
    async def test_control_gets_the_address_that_the_proxy_named(self, edges, control, header, tls):
        edge = await edges(proxy_protocol=True)
        assert b" 200 OK" in await edge.ask(GET, tls=tls, before=header)
        (request,) = control.requests
        assert request.client == "203.0.113.9"
        assert bool(request.flags & SECURE) == (tls or header is V2_TLS)

    async def test_a_proxy_that_connects_for_itself_is_the_client(self, edges, control):
        edge = await edges(proxy_protocol=True)
        reader, writer = await edge.connect(tls=False, before=V2_LOCAL + GET)
        assert b" 200 OK" in await reader.read()
        (request,) = control.requests
        assert (request.client, request.flags & SECURE) == (writer.get_extra_info("sockname")[0], 0)

    async def test_a_header_may_come_byte_by_byte_or_together_with_the_request(self, edges):
        edge = await edges(proxy_protocol=True)
        for header in HEADERS.values():
            reader, writer = await edge.connect(tls=False, before=header + upgrade(PATH))
            assert b"connection_established" in await first_frame(reader)
            reader, writer = await edge.connect(tls=False)
            writer.transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for i in range(len(header)):
                writer.write(header[i : i + 1])
                await asyncio.sleep(0)
            writer.write(upgrade(PATH))
            assert b"connection_established" in await first_frame(reader)

    @pytest.mark.parametrize(
        "garbage",
        [b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", b"PROXY TCP4 a b c d\r\n", SIGNATURE + b"\x31", V2[:20] + b"\0"],
    )
    async def test_a_connection_without_a_valid_header_is_dropped(self, edges, garbage, wait_until):
        edge = await edges({"head_timeout_s": 0.5}, proxy_protocol=True, head_timeout_s=0.5)
        assert await edge.ask(garbage, tls=False) == b""
        with pytest.raises((ssl.SSLError, ConnectionError)):
            await edge.connect(before=garbage)
        # The last header is completed by the first bytes of TLS. Then an alert comes, and only after it the end.
        await wait_until(lambda: edge.listeners.handshakes_failed_total == 2)
        assert edge.worker.gate.connections == 0

    async def test_an_incomplete_header_times_out(self, edges):
        edge = await edges(proxy_protocol=True, head_timeout_s=0.3)
        assert await edge.ask(b"PROXY TCP4 203.", tls=False) == b""
        assert await edge.ask(b"", tls=False) == b""
        assert edge.listeners.entering == 0

    async def test_clients_that_are_no_trusted_proxies_connect_without_a_header(self, edges):
        edge = await edges(proxy_protocol=True, trusted_proxies=("10.0.0.0/8",))
        reader, _ = await edge.connect(tls=False, before=upgrade(PATH))
        assert b"connection_established" in await first_frame(reader)
        # A header of theirs isn't parsed: it is an invalid HTTP request.
        assert b" 400 Bad Request" in await edge.ask(V1 + upgrade(PATH), tls=False)
        reader, writer = await edge.connect()
        writer.write(upgrade(PATH))
        assert b"connection_established" in await first_frame(reader)

    async def test_a_trusted_proxy_must_send_a_header(self, edges):
        edge = await edges(proxy_protocol=True, trusted_proxies=("127.0.0.1",))
        assert await edge.ask(upgrade(PATH), tls=False) == b""
        reader, _ = await edge.connect(tls=False, before=V1 + upgrade(PATH))
        assert b"connection_established" in await first_frame(reader)

    async def test_with_proxy_protocol_off_a_header_is_an_invalid_request(self, edges):
        edge = await edges()
        assert b" 400 Bad Request" in await edge.ask(V1 + upgrade(PATH), tls=False)


class TestTlsRequired:
    """4000 is never sent to a client that used TLS, to this server or to a proxy (protocol/README.md "Close codes")."""

    @pytest.mark.parametrize(
        ("tls", "before", "extra", "expected"),
        [
            (False, V1, "", b"4000"),
            (False, V2, "", b"4000"),
            (False, V2_TLS, "", b"connection_established"),
            (True, V1, "", b"connection_established"),
            (False, V2_LOCAL, "X-Forwarded-Proto: https\r\n", b"connection_established"),
            (False, V2_LOCAL, "X-Forwarded-Proto: http\r\n", b"4000"),
            (True, V2_LOCAL, "X-Forwarded-Proto: http\r\n", b"4000"),
            # The proxy names a client that isn't trusted, so the client's own X-Forwarded-Proto doesn't count.
            (False, V1, "X-Forwarded-Proto: https\r\n", b"4000"),
            (False, V2_TLS, "X-Forwarded-Proto: http\r\n", b"connection_established"),
        ],
    )
    async def test_only_the_clients_own_connection_must_use_tls(self, bench, edges, tls, before, extra, expected):
        trusted = {"trusted_proxies": ("127.0.0.1",)}
        edge = await edges(trusted, proxy_protocol=True, **trusted)
        await bench.change(tls_required=True)
        reader, writer = await edge.connect(tls=tls, before=before)
        writer.write(upgrade(PATH, extra))
        assert expected in await first_frame(reader)

    async def test_a_plain_client_is_refused_and_a_tls_client_is_not(self, bench, edges):
        edge = await edges()
        await bench.change(tls_required=True)
        reader, _ = await edge.connect(tls=False, before=upgrade(PATH, "X-Forwarded-Proto: https\r\n"))
        refusal = json.loads(await first_frame(reader))
        assert refusal["data"]["code"] == 4000
        reader, writer = await edge.connect()
        writer.write(upgrade(PATH))
        assert b"connection_established" in await first_frame(reader)


def client_hello() -> bytes:
    """The first bytes of a handshake, as a client sends them."""
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    context = ssl.create_default_context()
    with pytest.raises(ssl.SSLWantReadError):
        context.wrap_bio(incoming, outgoing, server_hostname="localhost").do_handshake()
    return outgoing.read()


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def alive() -> int:
    gc.collect()
    # isinstance() reads __class__, and the lazy objects of libraries (Django's settings) do work for it.
    return sum(issubclass(type(item), ProxiedPeer) for item in gc.get_objects())


class TestUnfinishedHandshakes:
    async def test_fifty_aborted_handshakes_leave_no_descriptors_or_objects(self, edges, wait_until):
        edge = await edges()
        hello = client_hello()
        before, connections = descriptors(), alive()
        for turn in range(50):
            _, writer = await asyncio.open_connection("127.0.0.1", edge.listeners.tls_port)
            # Cut at many places, by an end of file and by a reset; some before, some after the server's answer.
            writer.write(hello[: 1 + turn * len(hello) // 49])
            if turn % 3:
                await writer.drain()
                await asyncio.sleep(0.002)
            if turn % 2:
                writer.transport.get_extra_info("socket").setsockopt(
                    socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0"
                )
            writer.transport.abort()
        await wait_until(lambda: edge.listeners.handshakes_failed_total == 50)
        await wait_until(lambda: descriptors() <= before)
        assert edge.listeners.entering == 0
        assert edge.worker.gate.connections == 0
        assert alive() == connections
        assert len(asyncio.all_tasks()) < 20

    async def test_a_handshake_times_out_after_head_timeout_s(self, edges, wait_until):
        edge = await edges(head_timeout_s=0.4)
        before = descriptors()
        silent = [await asyncio.open_connection("127.0.0.1", edge.listeners.tls_port) for _ in range(3)]
        silent[0][1].write(client_hello()[:100])
        for reader, writer in silent:
            assert await until_end(reader) == b""
            writer.transport.abort()
        await wait_until(lambda: descriptors() <= before)
        assert edge.listeners.entering == 0

    async def test_silence_after_the_handshake_ends_without_a_byte(self, edges):
        edge = await edges({"head_timeout_s": 0.5})
        assert await edge.ask(b"") == b""

    async def test_plain_http_on_the_tls_port_is_dropped(self, edges):
        edge = await edges()
        reader, writer = await asyncio.open_connection("127.0.0.1", edge.listeners.tls_port)
        writer.write(upgrade(PATH))
        assert await until_end(reader) == b""
        writer.transport.abort()

    async def test_connections_in_tls_setup_count_toward_the_limit(self, edges, wait_until):
        edge = await edges()
        gate = edge.worker.gate
        gate.max_connections = 0  # 48 more may be in setup
        before = descriptors()
        waiting = [await asyncio.open_connection("127.0.0.1", edge.listeners.tls_port) for _ in range(60)]
        # The oldest gave way, some at a time.
        await wait_until(lambda: all(reader.at_eof() for reader, _ in waiting[:12]))
        await wait_until(lambda: edge.listeners.entering + sum(reader.at_eof() for reader, _ in waiting) == 60)
        assert gate.entering == edge.listeners.entering == len(gate.strangers) <= 48
        assert not waiting[-1][0].at_eof()
        for _, writer in waiting:
            writer.transport.abort()
        await wait_until(lambda: descriptors() <= before)

    async def test_handshakes_hold_places_of_their_address(self, edges, wait_until):
        """Ten times the setting, because the address is private and might be a proxy's."""
        edge = await edges({"max_pending_per_address": 1})
        waiting = [await asyncio.open_connection("127.0.0.1", edge.listeners.tls_port) for _ in range(12)]
        await wait_until(lambda: sum(reader.at_eof() for reader, _ in waiting) == 2)
        assert edge.listeners.entering == len(edge.worker.gate.strangers) == 10
        assert edge.worker.gate.http.refused["address"] == 2
        for _, writer in waiting:
            writer.transport.abort()
        await wait_until(lambda: edge.listeners.entering == 0)
        assert len(edge.worker.gate.strangers) == 0
        # One that succeeds keeps its place until there is a complete head.
        opened = [await edge.connect() for _ in range(10)]
        await wait_until(lambda: edge.listeners.entering == 0)
        assert len(edge.worker.gate.strangers) == 10
        for _, writer in opened:
            writer.write(upgrade(PATH))
        await wait_until(lambda: len(edge.worker.gate.strangers) == 0)

    async def test_memory_is_given_back_while_connections_end_and_not_for_all_at_once(
        self, edges, wait_until, monkeypatch
    ):
        """A worker stands still for as long as the system takes the memory."""
        given = []
        for module in (listeners, gate_module):
            monkeypatch.setattr(module, "give_memory_back", lambda: given.append(edge.worker.gate.connections))
        # Without a TLS port nothing is given back from time to time.
        edge = await edges(tls=False)
        edge.worker.gate.give_back_memory()
        waiting = [await asyncio.open_connection("127.0.0.1", edge.listeners.port) for _ in range(300)]
        await wait_until(lambda: edge.worker.gate.connections == 300)
        assert given == []
        for _, writer in waiting:
            writer.transport.abort()
        await wait_until(lambda: edge.worker.gate.connections == 0)
        assert given == [300 - 256]

    async def test_finish_cancels_connections_in_tls_setup(self, edges, wait_until):
        edge = await edges()
        before = descriptors()
        reader, writer = await asyncio.open_connection("127.0.0.1", edge.listeners.tls_port)
        writer.write(client_hello()[:50])
        await wait_until(lambda: edge.listeners.entering == 1)
        edge.listeners.close()
        edge.listeners.close()
        assert edge.listeners.entering == 1
        edge.listeners.finish()
        assert await until_end(reader) == b""
        writer.transport.abort()
        await wait_until(lambda: edge.listeners.entering == 0)
        # The two listening sockets are gone as well.
        await wait_until(lambda: descriptors() <= before - 2)


async def test_without_descriptors_accepting_pauses_and_resumes(edges, wait_until):
    edge = await edges()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    client = socket.socket()
    client.setblocking(False)
    # A collection below would close sockets that earlier tests left, and the listener would get a descriptor.
    gc.collect()
    taken = [os.dup(0)]
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + 1, hard))
        with contextlib.suppress(OSError):
            while True:
                taken.append(os.dup(0))
        with pytest.raises(BlockingIOError):
            client.connect(("127.0.0.1", edge.listeners.tls_port))
        with capture_logs() as logged:
            await wait_until(lambda: logged)
        assert logged[0]["event"] == "can't accept"
        assert edge.listeners.entering == 0
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for descriptor in taken:
            os.close(descriptor)
    await wait_until(lambda: edge.listeners.entering == 1)
    client.close()
    await wait_until(lambda: edge.listeners.entering == 0)


@pytest.mark.parametrize("tls", [False, True], ids=["plain", "tls"])
async def test_a_socket_that_cannot_be_watched_holds_nothing_and_accepting_resumes(edges, tls):
    class Full(Poller):
        """As when fs.epoll.max_user_watches is reached."""

        def adopt(self, fd, polled):
            os.close(fd)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    # Of networks that have no proxy, so that each connection is accepted here.
    edge = await edges(proxy_protocol=True, trusted_proxies=("10.0.0.0/8",))
    listeners, worker = edge.listeners, edge.worker
    full, poller = Full(asyncio.get_running_loop()), listeners.poller
    with capture_logs() as logged:
        listeners.poller = full
        reader, writer = await asyncio.open_connection("127.0.0.1", listeners.tls_port if tls else listeners.port)
        assert await until_end(reader) == b""
        listeners.poller = poller
        writer.close()
    assert worker.gate.entering == listeners.entering == len(worker.gate.strangers) == 0
    assert worker.statistics.loop_exceptions_total == 0
    assert [line["event"] for line in logged] == ["can't accept"]
    _, writer = await edge.connect(tls=tls)
    full.close()


async def test_a_connection_without_room_does_not_close_itself_to_make_some(edges, wait_until):
    edge = await edges()
    gate = edge.worker.gate
    reader, writer = await asyncio.open_connection("127.0.0.1", edge.listeners.tls_port)
    await wait_until(lambda: edge.listeners.entering == 1)
    gate.max_connections = -48
    with contextlib.suppress(ConnectionError):
        await asyncio.wait_for(writer.start_tls(edge.trusting(), server_hostname="localhost"), 60)
    assert await until_end(reader) == b""
    await wait_until(lambda: gate.connections_total == 1 and gate.connections == 0)
    assert gate.strangers.closed_total == 0
    assert not gate.strangers.newcomers
    writer.close()


async def test_without_a_certificate_there_is_nothing_to_reload(edges):
    edge = await edges(tls=False)
    assert edge.listeners.tls_port is None
    assert not edge.listeners.reload()
