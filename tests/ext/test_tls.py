"""TLS on the poller's sockets: handshakes, records of all sizes, closing, slow readers, and many clients at once."""

import asyncio
import contextlib
import ctypes
import os
import select
import socket
import ssl
import struct
import time
from functools import partial

import pytest

from helpers.certs import self_signed
from redpoll import _engine, _openssl
from redpoll._engine import OPEN
from redpoll._fanout import Flusher
from redpoll._openssl import KEY_BYTES, Context, set_ticket_keys
from redpoll._sockets import Poller
from redpoll._tls import OpenSslSocket, PythonTlsSocket


@pytest.fixture(scope="session")
def certificate(tmp_path_factory):
    return self_signed(tmp_path_factory.mktemp("certificate"))


class Client:
    """The other end: a socket and an SSLObject. `word()` is what is to be sent."""

    def __init__(self, sock, context, session=None):
        self.sock = sock
        self.incoming, self.outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self.tls = context.wrap_bio(self.incoming, self.outgoing, server_hostname="localhost", session=session)
        self.step(self.tls.do_handshake)

    @staticmethod
    def step(call, *arguments):
        """None if it has to receive more."""
        with contextlib.suppress(ssl.SSLWantReadError):
            return call(*arguments) or True
        return None

    def word(self):
        return self.outgoing.read()

    async def send(self):
        await asyncio.wait_for(asyncio.get_running_loop().sock_sendall(self.sock, self.word()), 60)

    async def receive(self, size=65536):
        """Whether there was something to receive."""
        data = await asyncio.wait_for(asyncio.get_running_loop().sock_recv(self.sock, size), 60)
        self.incoming.write(data)
        return bool(data)

    async def shake(self):
        await self.send()
        while not self.step(self.tls.do_handshake):
            await self.send()
            assert await self.receive()
        await self.send()

    async def write(self, *records):
        for record in records:
            self.tls.write(record)
        await self.send()

    async def read(self, size):
        data = b""
        while len(data) < size:
            part = self.step(self.tls.read, size - len(data))
            if part is None:
                assert await self.receive(), f"end of stream after {len(data)} of {size} bytes"
            else:
                assert part is not True, f"close_notify after {len(data)} of {size} bytes"
                data += part
        return data


class Served:
    """TLS connections of one poller, made by `accept`, of the type `of`."""

    def __init__(self, recorder, certificate, of):
        loop = asyncio.get_running_loop()
        self.recorder = recorder
        self.poller = Poller(loop)
        self.flusher = flusher = Flusher(lambda: loop.call_soon(flusher.flush), poller=self.poller)
        self.of = of
        if of is OpenSslSocket:
            self.context = Context(certificate[1].read_bytes() + certificate[0].read_bytes())
        else:
            self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            self.context.load_cert_chain(*certificate)
        self.trusting = ssl.create_default_context(cafile=certificate[0])
        self.settled = []
        self.sockets = []
        self.clients = []

    def accept(self, buffer_bytes=0, session=None):
        """A connection of which nothing has been sent yet: its WebSocket and the client."""
        with socket.create_server(("127.0.0.1", 0)) as listening:
            theirs = socket.socket()
            self.clients.append(theirs)
            if buffer_bytes:
                listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, buffer_bytes)
                theirs.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer_bytes)
            theirs.connect(listening.getsockname())
            theirs.setblocking(False)
            ours, _ = listening.accept()
        ws = self.recorder(self.flusher)
        tls = self.of(self.poller, lambda: self.context, ws, lambda tls, fault: self.settled.append(fault))
        self.sockets.append(tls)
        self.poller.adopt(ours.detach(), tls)
        return ws, Client(theirs, self.trusting, session)

    async def connect(self, head, buffer_bytes=0, session=None):
        """An open WebSocket and its client."""
        ws, client = self.accept(buffer_bytes, session)
        await client.shake()
        await client.write(head)
        assert (await client.read(129)).startswith(b"HTTP/1.1 101 ")
        assert ws.state == OPEN
        return ws, client


def kinds():
    """What a server may use here: where Python has OpenSSL linked in, only Python's module."""
    return [PythonTlsSocket] if _openssl.missing() else [OpenSslSocket, PythonTlsSocket]


@pytest.fixture(params=kinds(), ids=lambda of: of.__name__)
async def served(request, recorder, certificate, wait_until):
    served = Served(recorder, certificate, request.param)
    yield served
    await end(served, wait_until)


async def end(served, wait_until):
    for client in served.clients:
        client.close()
    for tls in served.sockets:
        tls.abort()
    await wait_until(lambda: served.poller.sockets == 0)
    # Those that are lost are told by the loop.
    await wait_until(lambda: len(served.settled) == len(served.sockets))
    for _ in range(3):
        await asyncio.sleep(0)
    served.poller.close()


def texts(ws):
    return [heard[1] for heard in ws.heard if heard[0] == "text"]


async def test_frames_pass_in_both_directions(served, head, reference):
    ws, client = await served.connect(head)
    assert ws.peer == client.sock.getsockname()
    await client.write(reference.client_frame(1, b"hello"), reference.client_frame(9, b"ping"))
    assert await client.read(6) == b"\x8a\x04ping"
    assert texts(ws) == [b"hello"]
    ws.send(b"\x81\x02hi")
    assert await client.read(4) == b"\x81\x02hi"
    assert served.settled == [None]


async def test_bytes_of_the_handshakes_last_packet_are_read(served, head):
    _, client = served.accept()
    await client.send()
    while not client.step(client.tls.do_handshake):
        assert await client.receive()
    client.tls.write(head)
    await client.send()
    assert (await client.read(129)).startswith(b"HTTP/1.1 101 ")


@pytest.mark.parametrize("cut", [1, 5, 100, 16_000])
async def test_records_are_read_whole_however_they_arrive(served, head, reference, wait_until, cut):
    """Also what one read leaves of a record, for which the socket isn't readable."""
    ws, client = await served.connect(head)
    messages = [bytes([65 + number % 26]) * (number * 7 % 900) for number in range(60)]
    for message in messages[:-1]:
        client.tls.write(reference.client_frame(1, message))
    client.tls.write(b"".join(reference.client_frame(1, b"%d" % number) for number in range(2000)))
    stream = client.word()
    for at in range(0, min(len(stream), 40 * cut), cut):
        client.sock.send(stream[at : at + cut])
        await asyncio.sleep(0)
    await asyncio.get_running_loop().sock_sendall(client.sock, stream[40 * cut :])
    await wait_until(lambda: len(texts(ws)) == 2059)
    assert texts(ws) == messages[:-1] + [b"%d" % number for number in range(2000)]


async def test_nothing_is_passed_on_while_reading_is_paused(served, head, reference, wait_until):
    ws, client = await served.connect(head)

    def pause(message):
        ws.heard.append(("text", message))
        if len(ws.heard) == 1:
            ws.pause_reading()

    ws.on["text"] = pause
    # More than one read takes, in one record: the rest is decrypted later.
    await client.write(reference.client_frame(1, b"x" * 8000), reference.client_frame(1, b"x" * 120) * 100)
    await wait_until(lambda: ws.heard)
    for _ in range(20):
        await asyncio.sleep(0)
    paused_at = len(ws.heard)
    assert paused_at < 101
    ws.resume_reading()
    await wait_until(lambda: len(ws.heard) == 101)


async def test_a_slow_reader_gets_everything_in_order(served, head):
    ws, client = await served.connect(head, buffer_bytes=8192)
    frame = b"\x82\x7e\x40\x00" + b"".join(b"%07d\n" % number for number in range(2048))
    for _ in range(40):
        ws.send(frame)
        await asyncio.sleep(0)
    assert ws.unsent_bytes > 100_000
    assert await client.read(40 * len(frame)) == frame * 40
    assert ws.unsent_bytes == 0


async def test_what_a_slow_reader_takes_of_one_large_frame_is_no_longer_unsent(served, head):
    ws, client = await served.connect(head, buffer_bytes=8192)
    payload = os.urandom(1_000_000)
    ws.send(b"\x82\x7f" + len(payload).to_bytes(8, "big") + payload)
    await asyncio.sleep(0)
    unsent, undelivered = ws.unsent_bytes, ws.undelivered_bytes
    assert 900_000 < unsent < undelivered
    assert (await client.read(500_010))[10:] == payload[:500_000]
    assert unsent - ws.unsent_bytes > 400_000
    assert undelivered - ws.undelivered_bytes > 400_000
    assert await client.read(500_000) == payload[500_000:]
    assert ws.unsent_bytes == 0


async def test_close_notify_closes_and_is_answered(served, head, wait_until):
    ws, client = await served.connect(head)
    client.step(client.tls.unwrap)
    await client.send()
    await wait_until(lambda: ws.heard)
    assert ws.heard == [("closed", 1006, "")]
    while not client.step(client.tls.unwrap):
        assert await client.receive()


async def test_an_end_without_close_notify_closes(served, head, wait_until):
    ws, client = await served.connect(head)
    client.sock.shutdown(socket.SHUT_WR)
    await wait_until(lambda: ws.heard)
    assert ws.heard == [("closed", 1006, "")]


async def test_our_close_sends_close_notify_and_drops_what_comes_later(served, head, reference, wait_until):
    ws, client = await served.connect(head)
    ws.close(4009, "bye")
    assert await client.read(7) == b"\x88\x05\x0f\xa9bye"
    await client.write(reference.client_frame(8, b"\x0f\xa9"))
    while (last := client.step(client.tls.read, 1)) is None:
        await client.receive()
    assert last is True, "no close_notify"
    assert ws.heard == [("closed", 4009, "")]
    client.sock.send(b"\x17\x03\x03\x00\x05more")
    client.sock.close()
    await wait_until(lambda: served.poller.sockets == 0)


@pytest.mark.parametrize("first", [b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01\x00\x05\x01\x00\x00\x01\x00", b"\0"])
async def test_what_is_no_handshake_never_becomes_a_connection(served, wait_until, first):
    ws, client = served.accept()
    client.sock.send(first)
    if first != b"\0":
        while await client.receive():
            pass
    client.sock.close()
    await wait_until(lambda: served.settled)
    assert served.settled[0]
    assert ws.heard == []
    await wait_until(lambda: served.poller.sockets == 0)


async def test_the_alert_of_a_failed_handshake_is_followed_by_the_end_not_by_a_reset(served, wait_until):
    """Though the client has sent more than one read takes, and goes on."""
    _, client = served.accept()
    # A record of a handshake, with nothing that is one.
    client.sock.send(b"\x16\x03\x01\x02\x00" + b"x" * 60_000)
    while await client.receive():
        client.sock.send(b"x" * 1000)
    alert = client.incoming.read()
    assert (alert[0], len(alert)) == (21, 7)
    # It counts until the client has closed, too.
    assert served.settled == []
    client.sock.close()
    await wait_until(lambda: served.settled)
    assert "SSL" in served.settled[0]


async def test_nothing_is_made_for_less_than_the_first_message(served, head, wait_until):
    """Also in pieces of one byte; then it is a handshake like others."""
    _, client = served.accept()
    (tls,) = served.sockets
    word = client.word()
    for at in range(len(word) - 1):
        client.sock.send(word[at : at + 1])
        await asyncio.sleep(0)
    for _ in range(20):
        await asyncio.sleep(0.001)
        assert tls.context is None
    client.outgoing.write(word[-1:])
    await client.shake()
    await client.write(head)
    assert (await client.read(129)).startswith(b"HTTP/1.1 101 ")
    assert tls.context is served.context


@pytest.mark.parametrize("first", [b"\x16", b"\x16\x03\x01\x02\x00" + b"x" * 200])
async def test_the_beginning_of_a_first_message_can_be_given_up(served, wait_until, first):
    _, client = served.accept()
    client.sock.send(first)
    await asyncio.sleep(0.01)
    client.sock.close()
    await wait_until(lambda: served.settled == ["closed before its handshake was complete"])


async def test_a_handshake_can_be_given_up(served, wait_until):
    ws, client = served.accept()
    await client.send()
    assert await client.receive()
    served.sockets[0].abort()
    await wait_until(lambda: served.settled == ["closed before its handshake was complete"])
    assert ws.heard == []


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
async def test_a_client_that_resets_with_the_handshakes_last_bytes_is_not_lost_without_having_been_made(
    served, wait_until, version
):
    """As HAProxy's checks do. Each made the worker's count of connections one too small, for ever."""
    served.trusting.maximum_version = version
    ws, client = served.accept()
    told = []
    ws.on = {name: partial(told.append, name) for name in ("connected", "released")}
    await client.send()
    last = b""
    while not last:
        assert await client.receive()
        client.step(client.tls.do_handshake)
        last = client.word()
    client.sock.send(last)
    client.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    client.sock.close()
    await wait_until(lambda: served.settled and served.poller.sockets == 0)
    for _ in range(3):
        await asyncio.sleep(0)
    # Whether something is sent after the client's last bytes depends on the version and on who keeps the ticket.
    made = ["connected", "released"] if served.settled == [None] else []
    assert told == made


async def test_a_tampered_record_closes(served, head, wait_until):
    ws, client = await served.connect(head)
    client.tls.write(b"x" * 100)
    word = bytearray(client.word())
    word[-1] ^= 1
    client.sock.send(word)
    await wait_until(lambda: ws.heard)
    assert ws.heard == [("closed", 1006, "")]


# -- hostile peers ---------------------------------------------------------------------------------------------


async def test_no_byte_of_the_handshake_may_be_wrong(served, head, wait_until):
    """Each of the client's last message is damaged in turn: no connection comes of it, and none leaks."""
    _, first = served.accept()
    await first.send()
    while not first.step(first.tls.do_handshake):
        assert await first.receive()
    size = len(first.word())
    for at in range(0, size, 5):
        ws, client = served.accept()
        await client.send()
        while not client.step(client.tls.do_handshake):
            assert await client.receive()
        word = bytearray(client.word())
        word[at % len(word)] ^= 0x41
        client.sock.send(word)
        client.sock.shutdown(socket.SHUT_WR)
        count = len(served.sockets) - 1
        await wait_until(lambda count=count: len(served.settled) == count)
        assert served.settled[-1]
        assert ws.heard == []


async def test_records_that_are_cut_at_each_byte_are_read(served, head, reference, wait_until):
    ws, client = await served.connect(head)
    client.tls.write(reference.client_frame(1, b"hello"))
    client.tls.write(reference.client_frame(1, b"x" * 100))
    stream = client.word()
    for at in range(len(stream)):
        client.sock.send(stream[at : at + 1])
        await asyncio.sleep(0)
    await wait_until(lambda: len(texts(ws)) == 2)
    assert texts(ws) == [b"hello", b"x" * 100]


async def test_a_record_that_is_too_long_closes(served, head, wait_until):
    ws, client = await served.connect(head)
    client.sock.send(b"\x17\x03\x03\x50\x00" + b"x" * 20_480)
    await wait_until(lambda: ws.heard)
    assert ws.heard == [("closed", 1006, "")]


async def test_plain_bytes_after_the_handshake_close(served, head, wait_until):
    ws, client = await served.connect(head)
    client.sock.send(b"GET / HTTP/1.1\r\n\r\n")
    await wait_until(lambda: ws.heard)
    assert ws.heard == [("closed", 1006, "")]


async def test_an_older_protocol_is_refused(served, wait_until):
    # Debian's Python offers older ones too, and the place of them all is looked for below.
    served.trusting.minimum_version = ssl.TLSVersion.TLSv1_2
    _, client = served.accept()
    hello = bytearray(client.word())
    # A ClientHello of TLS 1.1 has no supported_versions; an unknown extension takes its place (RFC 8446 4.2.1).
    at = hello.index(b"\x00\x2b\x00\x05\x04\x03\x04\x03\x03")
    hello[at : at + 2] = b"\xfa\xfa"
    hello[9:11] = b"\x03\x02"
    client.sock.send(hello)
    while await client.receive():
        pass
    client.sock.close()
    await wait_until(lambda: served.settled)
    assert "SSL" in served.settled[0]


@pytest.mark.skipif(bool(_openssl.missing()), reason="OpenSSL counts no key updates for Python's module")
@pytest.mark.parametrize("asks", [0, 1], ids=["alone", "asking for ours"])
async def test_a_client_may_renew_its_keys_but_not_without_end(recorder, certificate, head, wait_until, asks):
    """OpenSSL takes all that come with one read: 600 cost 7 ms."""
    served = Served(recorder, certificate, OpenSslSocket)
    ws, client = served.accept()
    client.sock.setblocking(True)
    library = ctypes.CDLL("libssl.so.3")
    for name in ("TLS_client_method", "SSL_CTX_new", "SSL_new"):
        getattr(library, name).restype = ctypes.c_void_p
    context = ctypes.c_void_p(library.SSL_CTX_new(ctypes.c_void_p(library.TLS_client_method())))
    tls = ctypes.c_void_p(library.SSL_new(context))

    def renew(count):
        for _ in range(count):
            assert library.SSL_key_update(tls, asks) == 1
            if library.SSL_do_handshake(tls) != 1:
                return False
        return True

    def begin():
        assert library.SSL_set_fd(tls, client.sock.fileno()) == 1
        assert library.SSL_connect(tls) == 1
        assert library.SSL_write(tls, head, len(head)) == len(head)
        return renew(100)

    assert await asyncio.wait_for(asyncio.to_thread(begin), 60)
    await wait_until(lambda: ws.state == OPEN)
    text = b"\x81\x82\0\0\0\0hi"
    assert await asyncio.to_thread(library.SSL_write, tls, text, len(text)) == len(text)
    await wait_until(lambda: texts(ws) == [b"hi"])
    assert not await asyncio.wait_for(asyncio.to_thread(renew, 100_000), 60)
    await wait_until(lambda: served.poller.sockets == 0)
    library.SSL_free(tls)
    library.SSL_CTX_free(context)
    await end(served, wait_until)


# -- session tickets -------------------------------------------------------------------------------------------


@pytest.fixture
def keys():
    """Three ticket keys; the first is in use."""
    if _openssl.missing():
        pytest.skip(_openssl.missing())
    made = [os.urandom(KEY_BYTES) for _ in range(3)]
    set_ticket_keys(made[:1])
    yield made
    set_ticket_keys([])


@pytest.fixture(params=[ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3], ids=lambda version: version.name)
async def direct(request, keys, recorder, certificate, wait_until):
    """Connections of OpenSSL called by us, in both versions of TLS."""
    served = Served(recorder, certificate, OpenSslSocket)
    served.trusting.minimum_version = served.trusting.maximum_version = request.param
    yield served
    await end(served, wait_until)


async def resumes(served, head, session):
    """Whether a client with this session is resumed; and its next session."""
    _, client = await served.connect(head, session=session)
    assert client.tls.session_reused == served.sockets[-1].resumed
    return client.tls.session_reused, client.tls.session


async def test_a_ticket_is_accepted(direct, head):
    _, session = await resumes(direct, head, None)
    resumed, later = await resumes(direct, head, session)
    assert resumed
    assert (await resumes(direct, head, later))[0]


async def test_a_resumed_client_of_tls_1_3_gets_the_next_ticket(direct, head):
    """Browsers use each ticket once (RFC 8446 C.4). Without the next one, a full handshake follows."""
    _, session = await resumes(direct, head, None)
    resumed, later = await resumes(direct, head, session)
    assert resumed
    assert (later.id != session.id) == (direct.trusting.minimum_version == ssl.TLSVersion.TLSv1_3)


@pytest.mark.parametrize("whole", [True, False], ids=["whole", "beginning"])
async def test_a_ticket_comes_with_the_answer_to_a_request_and_without_one(
    keys, recorder, certificate, wait_until, head, whole
):
    """The request comes with the last message of the handshake."""
    served = Served(recorder, certificate, OpenSslSocket)
    served.trusting.minimum_version = ssl.TLSVersion.TLSv1_3
    _, client = served.accept()
    await client.send()
    while not client.step(client.tls.do_handshake):
        assert await client.receive()
    client.tls.write(head if whole else head[:50])
    await client.send()
    assert await client.receive()
    answer = client.step(client.tls.read, 65536)
    assert client.tls.session.has_ticket
    assert answer.startswith(b"HTTP/1.1 101 ") if whole else answer is None
    if not whole:
        client.tls.write(head[50:])
        await client.send()
        assert (await client.read(129)).startswith(b"HTTP/1.1 101 ")
    await end(served, wait_until)


async def test_a_ticket_of_the_key_before_is_accepted_and_replaced(direct, head, keys):
    _, session = await resumes(direct, head, None)
    set_ticket_keys([keys[1], keys[0]])
    resumed, later = await resumes(direct, head, session)
    assert resumed
    set_ticket_keys([keys[2], keys[1]])
    assert (await resumes(direct, head, later))[0]


async def test_a_ticket_of_an_older_key_costs_a_full_handshake(direct, head, keys):
    _, session = await resumes(direct, head, None)
    set_ticket_keys([keys[2], keys[1]])
    resumed, later = await resumes(direct, head, session)
    assert not resumed
    assert (await resumes(direct, head, later))[0]


async def test_a_ticket_with_the_name_of_our_key_and_another_secret_costs_a_full_handshake(direct, head, keys):
    _, session = await resumes(direct, head, None)
    set_ticket_keys([keys[0][:16] + keys[1][16:]])
    assert not (await resumes(direct, head, session))[0]


async def test_another_worker_with_the_same_keys_accepts_a_ticket(direct, head, recorder, certificate, wait_until):
    """It has the certificate and the keys, and nothing else in common."""
    _, session = await resumes(direct, head, None)
    # A session belongs to the client's context.
    other = Served(recorder, certificate, OpenSslSocket)
    other.trusting = direct.trusting
    assert (await resumes(other, head, session))[0]
    await end(other, wait_until)


async def test_a_ticket_is_accepted_for_a_name_with_a_context_of_its_own(direct, head, certificate):
    made = []

    def make(number):
        made.append(number)
        return Context(certificate[1].read_bytes() + certificate[0].read_bytes())

    direct.context.serve_names({"localhost": 3, "other": 4}, make)
    _, session = await resumes(direct, head, None)
    resumed, later = await resumes(direct, head, session)
    assert resumed
    assert (await resumes(direct, head, later))[0]
    # Once, when the first client asked for the name.
    assert made == [3]


async def test_without_keys_no_session_is_resumed(direct, head):
    set_ticket_keys([])
    _, session = await resumes(direct, head, None)
    if session is not None:
        assert not (await resumes(direct, head, session))[0]


# -- many at once ----------------------------------------------------------------------------------------------


def answered(clients):
    """How many of them have something to read."""
    poll = select.poll()
    for client in clients:
        poll.register(client.sock, select.POLLIN)
    return len(poll.poll(0))


PING, PONG = b"\x89\x80\0\0\0\0", b"\x8a\0"


async def established(served, head):
    """A client that is no newcomer any more."""
    _, client = await served.connect(head)
    await client.write(PING)
    assert await client.read(2) == PONG
    return client


async def test_a_ping_isnt_answered_after_all_handshakes_of_a_storm(served, head):
    other = await established(served, head)
    clients = [served.accept()[1] for _ in range(200)]
    other.tls.write(PING)
    words = [client.word() for client in clients]
    # The loop sees all of it at once.
    for client, word in zip(clients, words, strict=True):
        client.sock.send(word)
    other.sock.send(other.word())
    assert await other.read(2) == PONG
    assert answered(clients) < 200


async def test_a_ping_isnt_answered_after_all_messages_of_a_storm(served, head):
    other = await established(served, head)
    clients = [(await served.connect(head))[1] for _ in range(60)]
    before = _engine.counters()["frames_received"]
    for client in clients:
        client.tls.write(PING * 2600)
    other.tls.write(PING)
    for client in clients:
        client.sock.send(client.word())
    other.sock.send(other.word())
    assert await other.read(2) == PONG
    assert _engine.counters()["frames_received"] - before < 60 * 2600


async def test_all_of_a_record_is_read_though_turns_are_too_short_for_all_who_wait(served, head, reference, wait_until):
    pairs = [await served.connect(head) for _ in range(8)]
    received = []

    def take(message):
        # Longer than a turn may last.
        until = time.monotonic() + 0.006
        while time.monotonic() < until:
            pass
        received.append(message)

    for ws, client in pairs:
        ws.on["text"] = take
        # One record, of which a turn reads a part. The rest is where epoll doesn't see it.
        client.tls.write(reference.client_frame(1, b"x" * 3000) * 5)
    for _, client in pairs:
        client.sock.send(client.word())
    await wait_until(lambda: len(received) == 8 * 5)
