"""The control port with TLS: who has no certificate of the authority is refused; certificates change meanwhile."""

import asyncio
import contextlib
import socket
import ssl

import pytest

from helpers.certs import authority, issued, self_signed
from redpoll.config import certificate_files
from redpoll.config.certificate import PairError, write_private
from redpoll.config.settings import Settings
from redpoll.control.http.control_port import ControlPort
from redpoll.control.http.port_tls import PortTls
from redpoll.control.http.response import Response
from redpoll.ipc.messages import CertificateChanged


def install(folder, pair):
    found = certificate_files.find(Settings(tls_cert=(str(pair[0]),), tls_key=(str(pair[1]),)))
    write_private(certificate_files.bundle(found.certificates), folder / "tls.pem")


class Secured:
    """A plane whose port has TLS, and contexts of clients."""

    def __init__(self, plane, folder, ca):
        self.plane = plane
        self.port = plane.port
        self.folder = folder
        self.ca = ca

    def context(self, pair=None):
        context = ssl.create_default_context(cafile=str(self.ca[0]))
        if pair is not None:
            context.load_cert_chain(*pair)
        return context

    async def ask(self, request, pair=None):
        """Everything that comes until the end of the connection, and the certificate of the server."""
        reader, writer = await asyncio.open_connection(
            "127.0.0.1", self.port, ssl=self.context(pair), server_hostname="localhost"
        )
        try:
            writer.write(request)
            shown = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
            return await asyncio.wait_for(reader.read(), 60), shown
        finally:
            writer.transport.abort()


@pytest.fixture
async def secured(make_plane, redis, tmp_path):
    ca = authority(tmp_path)
    install(tmp_path, issued(tmp_path, ca))
    # The helper's own connection has no TLS and is refused; the tests don't use it.
    plane = await make_plane(redis.url, tls_cert=(str(tmp_path / "tls.pem"),), tls_client_ca=str(ca[0]))
    return Secured(plane, tmp_path, ca)


HEALTH = b"GET /healthz HTTP/1.1\r\nHost: test\r\nConnection: close\r\n\r\n"


async def test_a_client_with_a_certificate_of_the_authority_is_served(secured, tmp_path):
    answer, _ = await secured.ask(HEALTH, issued(tmp_path, secured.ca, "client"))
    assert answer.startswith(b"HTTP/1.1 200 ")


async def test_a_request_that_comes_with_the_handshake_is_read(secured, tmp_path):
    """As clients of TLS 1.3 send it: the last message of their handshake and the request in one packet."""
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = issued(tmp_path, secured.ca, "client")
    tls = secured.context(client).wrap_bio(incoming, outgoing, server_hostname="localhost")
    reader, writer = await asyncio.open_connection("127.0.0.1", secured.port)
    while True:
        try:
            tls.do_handshake()
            break
        except ssl.SSLWantReadError:
            writer.write(outgoing.read())
            incoming.write(await asyncio.wait_for(reader.read(65536), 60))
    tls.write(HEALTH)
    writer.write(outgoing.read())
    received = b""
    while b"HTTP/1.1 200 " not in received:
        incoming.write(await asyncio.wait_for(reader.read(65536), 60))
        with contextlib.suppress(ssl.SSLWantReadError):
            received += tls.read(65536)
    writer.transport.abort()


@pytest.mark.parametrize("kind", ["none", "foreign", "expired"])
async def test_others_are_refused_in_the_handshake(secured, tmp_path, kind):
    other = tmp_path / "other"
    other.mkdir()
    pair = {
        "none": lambda: None,
        "foreign": lambda: issued(other, authority(other), "client"),
        "expired": lambda: issued(other, secured.ca, "client", days=-1),
    }[kind]()
    # A client of TLS 1.3 ends its handshake before the server has looked at its certificate.
    with pytest.raises((ssl.SSLError, ConnectionError)):
        print(await secured.ask(HEALTH, pair))


async def test_a_client_without_tls_gets_no_answer(secured):
    reader, writer = await asyncio.open_connection("127.0.0.1", secured.port)
    writer.write(HEALTH)
    with contextlib.suppress(ConnectionError):
        # An alert at most.
        assert b"HTTP" not in await asyncio.wait_for(reader.read(), 60)
    writer.transport.abort()


async def test_a_new_certificate_is_shown_from_the_next_connection_on(secured, tmp_path):
    client = issued(tmp_path, secured.ca, "client")
    _, before = await secured.ask(HEALTH, client)
    install(tmp_path, issued(tmp_path, secured.ca, "later"))
    secured.plane.plane.receive(CertificateChanged())
    answer, after = await secured.ask(HEALTH, client)
    assert answer.startswith(b"HTTP/1.1 200 ")
    assert after == ssl.PEM_cert_to_DER_cert((tmp_path / "later.crt").read_text()) != before
    (tmp_path / "tls.pem").write_bytes(b"")
    secured.plane.plane.receive(CertificateChanged())
    assert (await secured.ask(HEALTH, client))[1] == after


async def test_handshakes_that_wait_are_bounded_and_given_up(tmp_path, wait_until):
    install(tmp_path, self_signed(tmp_path))
    made, refused = [], []
    tls = PortTls(
        tmp_path / "tls.pem", str(tmp_path / "server.crt"), lambda: made.append(1), lambda: refused.append(1),
        within_s=60.0,
    )  # fmt: skip
    server = await asyncio.get_running_loop().create_server(tls, "127.0.0.1", 0, backlog=256)
    address = server.sockets[0].getsockname()
    with contextlib.ExitStack() as stack:
        stack.enter_context(socket.create_connection(address, source_address=("127.0.0.2", 0)))
        await wait_until(lambda: len(tls.handshakes) == 1)
        (other,) = tls.handshakes
        clients = [stack.enter_context(socket.create_connection(address)) for _ in range(140)]
        await wait_until(lambda: len(refused) == 13)
        # The address with the most loses its oldest. Another one keeps its own, which is older.
        assert (len(tls.handshakes), other in tls.handshakes) == (128, True)
        clients[0].settimeout(60)
        assert clients[0].recv(1) == b""
        tls.close()
        await wait_until(lambda: not tls.handshakes)
    server.close()
    assert made == []


class Answering(asyncio.Protocol):
    """Writes one answer that is larger than what kernels keep, and closes."""

    answer = b"x" * 2**23
    transport: asyncio.Transport

    def connection_made(self, transport):
        self.transport = transport
        transport.write(self.answer)
        transport.close()


def connected(context, port):
    plain = socket.socket()
    plain.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)
    plain.settimeout(60)
    plain.connect(("127.0.0.1", port))
    return context.wrap_socket(plain, server_hostname="localhost")


def read_whole(client):
    """How many bytes come before the server's close_notify."""
    size = 0
    while data := client.recv(65536):
        size += len(data)
    return size


async def test_a_slow_reader_gets_the_whole_of_a_long_answer(tmp_path, wait_until):
    install(tmp_path, self_signed(tmp_path))
    made = []
    tls = PortTls(
        tmp_path / "tls.pem", "", lambda: made.append(Answering()) or made[0], lambda: None, within_s=60.0
    )  # fmt: skip
    server = await asyncio.get_running_loop().create_server(tls, "127.0.0.1", 0)
    context = ssl.create_default_context(cafile=str(tmp_path / "server.crt"))
    port = server.sockets[0].getsockname()[1]
    # Blocking, because asyncio's client loses what it hasn't read when close_notify comes.
    client = await asyncio.to_thread(connected, context, port)
    with client:
        await wait_until(lambda: made)
        transport = made[0].transport
        assert transport.get_write_buffer_size()
        # As its timer does.
        transport._stop_waiting()
        assert await asyncio.to_thread(read_whole, client) == len(Answering.answer)
        transport._stop_waiting()
        await wait_until(transport._raw.is_closing)
    server.close()


async def test_a_client_that_ends_tls_and_reads_nothing_is_cut_off(tmp_path, wait_until):
    install(tmp_path, self_signed(tmp_path))
    port = ControlPort(
        lambda request: request.respond(Response(200, Answering.answer)),
        lambda *_: Response(400, b""),
        head_timeout_s=60.0,
        body_timeout_s=60.0,
    )
    port.stalled_s = 0.05
    tls = PortTls(tmp_path / "tls.pem", "", port, lambda: None, within_s=60.0)
    server = await asyncio.get_running_loop().create_server(tls, "127.0.0.1", 0)
    context = ssl.create_default_context(cafile=str(tmp_path / "server.crt"))
    client = await asyncio.to_thread(connected, context, server.sockets[0].getsockname()[1])
    with client:
        client.sendall(b"GET / HTTP/1.1\r\nHost: h\r\n\r\n")
        await wait_until(lambda: any(stream.unsent_bytes for stream in port.connections))
        # Sends close_notify, and would then wait for the server's.
        client.setblocking(False)
        with pytest.raises(ssl.SSLError):
            client.unwrap()
        await wait_until(lambda: not port.open_streams)
    server.close()


def test_files_that_cannot_be_used_are_named(tmp_path):
    with pytest.raises(PairError, match=r"tls\.pem"):
        PortTls(tmp_path / "tls.pem", str(tmp_path / "ca"), lambda: None, lambda: None, within_s=1.0)
