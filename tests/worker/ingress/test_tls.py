"""TLS with real sockets and certificates made for the test, one of them changed while connections are open."""

import asyncio
import contextlib
import ctypes
import inspect
import json
import os
import resource
import select
import socket
import ssl
import time
from pathlib import Path

import pytest
import websockets
from structlog.testing import capture_logs

from helpers.bus_publishing import publish_all
from helpers.certs import authority, issued, ocsp_response, self_signed
from redpoll import _openssl
from redpoll.worker.ingress.tls import CertificateError, Certificates, give_memory_back
from worker.ingress.edge import Edge, first_frame, upgrade

KEY = "278d425bdf160c739803"
PATH = f"/app/{KEY}?protocol=7"
PING, PONG = b"\x89\x80\0\0\0\0", b"\x8a\0"


@pytest.fixture
async def edge(bench, tmp_path):
    """A TLS port of a worker that queues no more than 256 KiB for one client."""
    # Two hundred clients may take longer to connect than the usual 10 s.
    edge = Edge(await bench.start(max_unsent_bytes=262_144), tmp_path, head_timeout_s=60.0)
    await edge.listeners.open()
    yield edge
    edge.close()


async def secure_client(bench, edge, path: str = PATH):
    """A client over wss: greeted, or with nothing read yet if another path is given."""
    url = f"wss://localhost:{edge.listeners.tls_port}{path}"
    connection = await websockets.connect(
        url, ssl=edge.trusting(), ping_interval=None, compression=None, max_queue=None, open_timeout=60
    )
    bench.stack.push_async_callback(connection.close)
    client = inspect.getmodule(bench).Client(connection)
    if path == PATH:
        established = await client.next()
        assert established["event"] == "pusher:connection_established"
        client.socket_id = json.loads(established["data"])["socket_id"]
    return client


def shown(client) -> bytes:
    """The certificate that the server showed this client."""
    return client.socket.transport.get_extra_info("ssl_object").getpeercert(binary_form=True)


async def test_clients_over_wss_and_ws_hear_each_other(bench, edge):
    secure, plain = await secure_client(bench, edge), await bench.client(edge.worker)
    await secure.subscribe("private-room")
    await plain.subscribe("private-room")
    for sender, hearer in ((plain, secure), (secure, plain)):
        await sender.send("client-hello", {"from": sender.socket_id}, channel="private-room")
        heard = await hearer.until("client-hello")
        assert json.loads(heard["data"]) == {"from": sender.socket_id}


async def test_large_events_arrive_whole_and_in_order(bench, edge):
    client = await secure_client(bench, edge)
    await client.subscribe("news")
    for batch in range(20):
        data = [f"{batch}.{number}." + "x" * 10_000 for number in range(10)]
        await publish_all(bench.bus, bench.app, [("news", "n", text, None) for text in data])
        for text in data:
            assert (await client.until("n"))["data"] == text
    await client.nothing_more()


async def test_a_refusal_is_sent_over_tls_too(bench, edge):
    client = await secure_client(bench, edge, "/app/no")
    assert await client.closed_with() == 4001


async def test_a_certificate_is_changed_while_connections_are_open(bench, edge):
    before = await secure_client(bench, edge)
    await before.subscribe("news")
    old = shown(before)
    new = edge.certify("second")
    assert edge.listeners.reload()
    after = await secure_client(bench, edge)
    await after.subscribe("news")
    assert shown(after) == new != old
    await bench.publish("news", "n", "to both")
    for client in (before, after):
        assert (await client.until("n"))["data"] == "to both"


async def test_a_certificate_that_cannot_be_used_changes_nothing(bench, edge):
    old = shown(await secure_client(bench, edge))
    trusting = edge.trusting()
    for content in (b"", b"no PEM", edge.key.read_bytes()):
        edge.bundle.write_bytes(content)
        assert not edge.listeners.reload()
    edge.bundle.unlink()
    assert not edge.listeners.reload()
    reader, writer = await asyncio.open_connection(
        "127.0.0.1", edge.listeners.tls_port, ssl=trusting, server_hostname="localhost"
    )
    edge.writers.append(writer)
    assert writer.get_extra_info("ssl_object").getpeercert(binary_form=True) == old
    writer.write(upgrade(PATH))
    assert b"connection_established" in await first_frame(reader)


async def test_a_client_that_does_not_read_is_closed_and_its_frames_are_freed(bench, edge, wait_until):
    """Bytes in TLS's own buffers count as unsent (deploy/failures.md "Slow clients")."""
    reading, stalled = await secure_client(bench, edge), await secure_client(bench, edge)
    await reading.subscribe("news")
    await stalled.subscribe("news")
    worker = edge.worker
    (connection,) = (c for c in worker.hub.open_connections if f"{c.sid_hi}.{c.sid_lo}" == stalled.socket_id)
    stalled.socket.transport.pause_reading()
    posted = 0
    while worker.flushing.flusher.overruns == 0:
        await publish_all(bench.bus, bench.app, [("news", "n", "x" * 10_000, None)] * 10)
        posted += 100_000
        assert posted < 60_000_000, "never closed"
        for _ in range(10):
            await reading.until("n")
    assert connection.unsent_bytes <= 262_144
    await wait_until(lambda: len(worker.hub.open_connections) == 1)
    await reading.nothing_more()
    stalled.socket.transport.resume_reading()
    await asyncio.wait_for(stalled.socket.wait_closed(), 60)
    assert stalled.socket.close_code == 4100


async def test_a_slow_client_that_goes_on_reading_misses_nothing(bench, edge):
    client = await secure_client(bench, edge)
    await client.subscribe("news")
    for _ in range(5):
        client.socket.transport.pause_reading()
        # As much as may be unsent, and what kernels buffer on the way.
        await publish_all(bench.bus, bench.app, [("news", "n", "x" * 10_000, None)] * 10)
        await publish_all(bench.bus, bench.app, [("news", "n", "y" * 10_000, None)] * 10)
        client.socket.transport.resume_reading()
        assert [(await client.until("n"))["data"][0] for _ in range(20)] == ["x"] * 10 + ["y"] * 10
    assert edge.worker.flushing.flusher.overruns == 0


@pytest.mark.parametrize("tls", [True, False], ids=["tls", "plain"])
async def test_a_slow_reader_of_a_last_answer_gets_all_of_it(bench, control, tmp_path, tls):
    size, part = 8_000_000, 1_000_000
    answer = b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: %d\r\n\r\n" % size
    control.answer = lambda request: answer + bytes(size)
    worker = await bench.start()
    edge = Edge(worker, tmp_path)
    await edge.listeners.open()
    # The test has the clock: it looks after each part that was read.
    worker.janitor.stop()
    worker.janitor.close_timeout_s = 0.25
    sock = socket.socket()
    sock.setblocking(False)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)
    port = edge.listeners.tls_port if tls else edge.listeners.port
    await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", port))
    how = {"ssl": edge.trusting(), "server_hostname": "localhost"} if tls else {}
    reader, writer = await asyncio.open_connection(sock=sock, **how)
    edge.writers.append(writer)
    writer.write(b"GET /a HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n")
    assert await asyncio.wait_for(reader.readexactly(len(answer)), 60) == answer
    for _ in range(size // part):
        assert await asyncio.wait_for(reader.readexactly(part), 60) == bytes(part)
        worker.janitor.advance()
    edge.close()


async def test_a_close_does_not_wait_for_close_notify(bench, edge, wait_until):
    """A client that sends none would hold its descriptor."""
    edge.worker.janitor.close_timeout_s = 0.5
    reader, writer = await edge.connect()
    writer.write(upgrade("/app/unknown"))
    await first_frame(reader)
    writer.transport.pause_reading()
    # The janitor waits for its Close frame, and nothing waits longer than 5 s for its close_notify. asyncio would wait
    # for 30 s. Ticks are counted, so that a stall is one.
    tick = edge.worker.janitor.tick
    await wait_until(lambda: edge.worker.gate.connections == 0)
    assert edge.worker.janitor.tick - tick < 25 * 4


async def test_tls_before_1_2_is_refused(edge):
    context = edge.trusting()
    with pytest.warns(DeprecationWarning, match="TLSv1_1"):
        context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_1
    context.set_ciphers("DEFAULT:@SECLEVEL=0")
    with pytest.raises((ssl.SSLError, ConnectionResetError)):
        await asyncio.open_connection("127.0.0.1", edge.listeners.tls_port, ssl=context, server_hostname="localhost")


@pytest.mark.parametrize(
    ("cipher", "is_taken"),
    [
        ("ECDHE-ECDSA-AES128-GCM-SHA256", True),
        ("ECDHE-ECDSA-CHACHA20-POLY1305", True),
        ("ECDHE-ECDSA-AES128-SHA256", False),
        ("ECDHE-ECDSA-AES128-SHA", False),
    ],
)
async def test_tls_1_2_has_authenticated_encryption_only(edge, cipher, is_taken):
    context = edge.trusting()
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    context.set_ciphers(f"{cipher}:@SECLEVEL=0")
    asked = asyncio.open_connection("127.0.0.1", edge.listeners.tls_port, ssl=context, server_hostname="localhost")
    if is_taken:
        _, writer = await asked
        assert writer.get_extra_info("cipher")[0] == cipher
        writer.transport.abort()
    else:
        with pytest.raises((ssl.SSLError, ConnectionResetError)):
            await asked


def bundle_of(cert: Path, key: Path) -> str:
    path = cert.with_name("tls.pem")
    path.write_bytes(key.read_bytes() + cert.read_bytes())
    return str(path)


@pytest.fixture
def linked_in(monkeypatch):
    """As where Python has OpenSSL linked in."""
    monkeypatch.setattr(_openssl, "load", lambda: False)
    monkeypatch.setattr(_openssl, "missing", lambda: "OpenSSL is linked into Python itself")


async def test_where_openssl_cannot_be_called_pythons_module_does_it_and_the_log_says_so(bench, tmp_path, linked_in):
    with capture_logs() as logs:
        edge = Edge(await bench.start(), tmp_path)
    (line,) = [line for line in logs if "TLS" in line["event"]]
    assert line["reason"] == "OpenSSL is linked into Python itself"
    await edge.listeners.open()
    client = await secure_client(bench, edge)
    await client.subscribe("news")
    await bench.publish("news", "n", "hello")
    assert (await client.until("n"))["data"] == "hello"
    edge.close()


def test_no_cipher_of_tls_1_2_is_without_forward_secrecy(tmp_path, linked_in):
    """Whatever certificate it is: the list of the Python build doesn't count."""
    ciphers = Certificates(bundle_of(*self_signed(tmp_path))).newest().get_ciphers()
    assert {(one["kea"], one["aead"]) for one in ciphers if one["protocol"] == "TLSv1.2"} == {("kx-ecdhe", True)}


async def test_a_plain_clients_ping_is_answered_amid_a_storm_of_handshakes(bench, edge, wait_until):
    """A handshake takes about a millisecond, so all of a storm in one pass would stop the worker."""
    reader, writer = await edge.connect(tls=False)
    writer.write(upgrade(PATH))
    assert b"connection_established" in await first_frame(reader)
    writer.write(PING)
    assert await reader.readexactly(2) == PONG
    hello = ssl.MemoryBIO()
    with pytest.raises(ssl.SSLWantReadError):
        edge.trusting().wrap_bio(ssl.MemoryBIO(), hello, server_hostname="localhost").do_handshake()
    word = hello.read()
    waiting = select.poll()
    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(socket.socket()) for _ in range(200)]
        for client in clients:
            await asyncio.to_thread(client.connect, ("127.0.0.1", edge.listeners.tls_port))
            waiting.register(client, select.POLLIN)
        await wait_until(lambda: edge.listeners.entering == 200)
        # The loop sees all of it at once.
        for client in clients:
            client.send(word)
        os.write(writer.get_extra_info("socket").fileno(), PING)
        assert await reader.readexactly(2) == PONG
        assert len(waiting.poll(0)) < 200


async def test_a_client_that_offers_http_2_gets_http_1_1(edge):
    context = edge.trusting()
    context.set_alpn_protocols(["h2", "http/1.1"])
    _, writer = await asyncio.open_connection(
        "127.0.0.1", edge.listeners.tls_port, ssl=context, server_hostname="localhost"
    )
    assert writer.get_extra_info("ssl_object").selected_alpn_protocol() == "http/1.1"
    writer.transport.abort()


def test_a_key_of_another_certificate_is_refused(tmp_path):
    cert, _ = self_signed(tmp_path, "one")
    _, key = self_signed(tmp_path, "two")
    with pytest.raises(CertificateError, match=r"tls\.pem"):
        Certificates(bundle_of(cert, key))


# -- several certificates --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    """Certificates and keys by name."""
    folder = tmp_path_factory.mktemp("pairs")
    return {
        name: self_signed(folder, name, hosts=hosts, kind=kind)
        for name, hosts, kind in (
            ("first", ["a.example.com"], "ECDSA"),
            ("first-rsa", ["a.example.com", "*.wild.example.com"], "RSA"),
            ("other", ["b.example.com"], "ECDSA"),
        )
    }


@pytest.fixture(params=["openssl", "python"])
async def several(request, bench, tmp_path, pairs):
    """A TLS port with certificates for names, both ways of doing TLS. The first one is for a.example.com."""
    if request.param == "python":
        request.getfixturevalue("linked_in")
    elif _openssl.missing():
        pytest.skip(_openssl.missing())
    edge = Edge(await bench.start(), tmp_path)
    edge.pairs = dict(pairs)
    edge.install(*(path for pair in edge.pairs.values() for path in pair))
    assert edge.listeners.reload()
    await edge.listeners.open()
    yield edge
    edge.close()


async def shown_to(edge, name, *, ciphers="", version=None):
    """Which of `edge.pairs` a client gets that asks for this name."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    if ciphers:
        context.set_ciphers(ciphers)
    if version is not None:
        context.maximum_version = version
    _, writer = await asyncio.open_connection(
        "127.0.0.1", edge.listeners.tls_port, ssl=context, server_hostname=name or ""
    )
    edge.writers.append(writer)
    found = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    return next(name for name, (cert, _) in edge.pairs.items() if ssl.PEM_cert_to_DER_cert(cert.read_text()) == found)


async def test_the_name_that_a_client_asks_for_chooses_the_certificate(several):
    for name, certificate in (
        ("a.example.com", "first"),
        ("B.Example.com", "other"),
        ("x.wild.example.com", "first-rsa"),
        ("x.y.wild.example.com", "first"),
        ("unknown.example.org", "first"),
        (None, "first"),
    ):
        assert await shown_to(several, name) == certificate, name


async def test_a_client_gets_the_kind_of_key_and_the_suites_that_it_can_use(several):
    """An old client may know RSA only; for others ECDSA costs us less."""
    for cipher, certificate in (
        ("ECDHE-ECDSA-AES128-GCM-SHA256", "first"),
        ("ECDHE-RSA-AES256-GCM-SHA384", "first-rsa"),
        # Without forward secrecy, or without authenticated encryption.
        ("AES128-GCM-SHA256", None),
        ("AES128-SHA", None),
        ("DHE-RSA-AES128-GCM-SHA256", None),
        ("ECDHE-RSA-AES128-SHA256", None),
    ):
        asked = shown_to(several, "a.example.com", ciphers=f"{cipher}:@SECLEVEL=0", version=ssl.TLSVersion.TLSv1_2)
        if certificate is not None:
            assert await asked == certificate, cipher
        else:
            with pytest.raises((ssl.SSLError, ConnectionResetError)):
                await asked


async def test_a_reload_changes_all_certificates_and_no_client_is_cut(bench, several):
    """200 clients stay; those that come later get the new certificates."""
    path = upgrade(PATH)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE

    async def connect():
        reader, writer = await asyncio.open_connection("127.0.0.1", several.listeners.tls_port, ssl=context)
        several.writers.append(writer)
        writer.write(path)
        assert b"connection_established" in await first_frame(reader)
        return reader, writer

    clients = []
    for _ in range(20):
        clients += await asyncio.gather(*(connect() for _ in range(10)))
    for name, hosts in (("first", ["a.example.com"]), ("other", ["b.example.com"])):
        several.pairs[name] = self_signed(several.folder, f"new-{name}", hosts=hosts)
    several.install(*several.pairs["first"], *several.pairs["other"])
    assert several.listeners.reload()
    assert await shown_to(several, "b.example.com") == "other"
    assert await shown_to(several, None) == "first"
    # No certificate has this name any more.
    assert await shown_to(several, "x.wild.example.com") == "first"
    for reader, writer in clients:
        writer.write(PING)
        assert await asyncio.wait_for(reader.readexactly(2), 60) == PONG


# -- what is refused -------------------------------------------------------------------------------------------


async def test_nothing_is_compressed(several):
    """Lengths of compressed records tell what was compressed (CRIME)."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    context.options &= ~ssl.OP_NO_COMPRESSION
    _, writer = await asyncio.open_connection("127.0.0.1", several.listeners.tls_port, ssl=context)
    several.writers.append(writer)
    assert writer.get_extra_info("ssl_object").compression() is None


async def test_a_second_handshake_on_a_connection_is_refused(several):
    """A client could have us do the expensive half of a handshake at will."""
    client = await asyncio.create_subprocess_exec(
        "openssl", "s_client", "-tls1_2", "-connect", f"127.0.0.1:{several.listeners.tls_port}",
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
    )  # fmt: skip
    shown = b""
    async with asyncio.timeout(60):
        # The last line about the first handshake.
        while b"Extended master secret" not in shown:
            shown += await client.stdout.read(4096)
        client.stdin.write(b"R\n")
        await client.stdin.drain()
        while part := await client.stdout.read(4096):
            shown += part
        await client.wait()
    assert b"RENEGOTIATING" in shown
    assert b"no renegotiation" in shown or b"no_renegotiation" in shown


# -- OCSP ------------------------------------------------------------------------------------------------------


async def status_of(edge, ca):
    """The exit code of curl, which demands a good OCSP response and checks it."""
    curl = await asyncio.create_subprocess_exec(
        "curl", "--silent", "--output", "/dev/null", "--noproxy", "*", "--cacert", str(ca[0]), "--cert-status",
        f"https://localhost:{edge.listeners.tls_port}/healthz",
    )  # fmt: skip
    return await asyncio.wait_for(curl.wait(), 60)


async def test_an_ocsp_response_is_given_until_it_expires(bench, tmp_path):
    if _openssl.missing():
        pytest.skip(_openssl.missing())
    edge = Edge(await bench.start(), tmp_path)
    await edge.listeners.open()
    ca = authority(tmp_path)
    pair = issued(tmp_path, ca)
    # curl looks for the issuer among what the server sends.
    pair[0].write_bytes(pair[0].read_bytes() + ca[0].read_bytes())
    edge.install(*pair)
    assert edge.listeners.reload()
    # CURLE_SSL_INVALIDCERTSTATUS
    assert await status_of(edge, ca) == 91
    staple = pair[0].with_suffix(".ocsp")
    staple.write_bytes(ocsp_response(ca, pair[0]))
    edge.install(*pair)
    assert edge.listeners.reload()
    assert await status_of(edge, ca) == 0
    # The clock that counts is the engine's, so this one expires by what the worker has read.
    contexts = edge.listeners.certificates.newest()
    contexts.set_staple(0, staple.read_bytes(), time.time() - 1)
    assert await status_of(edge, ca) == 91
    edge.close()


def test_memory_that_was_freed_goes_back_to_the_system():
    """As thousands of handshakes leave it: small pieces between some that stay in use."""

    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

    pieces = [ctypes.create_string_buffer(16_384) for _ in range(4_000)]
    stay = pieces[::100]
    full = resident()
    del pieces
    give_memory_back()
    assert resident() < full - 40_000_000
    assert len(stay) == 40
