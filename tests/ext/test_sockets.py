"""Plain sockets: accepting, partial writes, half-closes, resets, HTTP on the same socket, many at once."""

import asyncio
import errno
import gc
import os
import random
import resource
import socket
import struct
import threading

import pytest

from redpoll._engine import CLOSED, HTTP, OPEN
from redpoll._fanout import Audience, Flusher, Sink
from redpoll._sockets import Listener, Poller

# Poller.places
QUICK, REQUESTS, BULK, LEAVING = range(4)


class Client(Sink):
    """A sink on a plain socket; the test decides what is written."""

    __slots__ = ()


@pytest.fixture
async def poller():
    poller = Poller(asyncio.get_running_loop())
    yield poller
    poller.close()


@pytest.fixture
def flusher(poller):
    flusher = Flusher(lambda: poller.loop.call_soon(flusher.flush), poller=poller)
    yield flusher
    flusher.flush()


def socket_pair(buffer_bytes: int = 0) -> tuple[int, socket.socket]:
    """A connected pair over loopback TCP: our descriptor and the peer's socket. `buffer_bytes` makes both buffers
    small."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        if buffer_bytes:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, buffer_bytes)
        theirs = socket.socket()
        if buffer_bytes:
            theirs.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer_bytes)
        theirs.connect(listening.getsockname())
        ours, _ = listening.accept()
    ours.setblocking(False)
    theirs.setblocking(False)
    return ours.detach(), theirs


async def read(sock: socket.socket, size: int) -> bytes:
    loop = asyncio.get_running_loop()
    data = b""
    while len(data) < size:
        part = await asyncio.wait_for(loop.sock_recv(sock, min(65536, size - len(data))), 60)
        assert part, f"end of stream after {len(data)} of {size} bytes"
        data += part
    return data


# -- accepting -----------------------------------------------------------------------------------------------


async def test_all_clients_that_wait_are_accepted(served, wait_until):
    clients = [socket.create_connection(("127.0.0.1", served.port)) for _ in range(300)]
    served.clients += clients
    await wait_until(lambda: len(served.connections) == 300, what="300 connections")


async def test_many_are_accepted_in_one_loop_pass(poller, flusher, wait_until):
    """With one accept per loop pass, a flush that takes 4 ms of each would let in 250 clients per second."""
    loop = asyncio.get_running_loop()
    passes = 0

    def count_passes():
        nonlocal passes, handle
        passes += 1
        handle = loop.call_soon(count_passes)

    handle = loop.call_soon(count_passes)
    accepted, accepted_in = [], set()

    def make():
        accepted_in.add(passes)
        accepted.append(Client(flusher))
        return accepted[-1]

    listening = socket.create_server(("127.0.0.1", 0), backlog=512)
    port = listening.getsockname()[1]
    clients = [socket.create_connection(("127.0.0.1", port)) for _ in range(200)]
    listener = Listener(poller, listening.detach(), make, pytest.fail)
    await wait_until(lambda: len(accepted) == 200, what="200 connections")
    assert listener.accepted == 200
    assert len(accepted_in) < 100
    handle.cancel()
    listener.close()
    for client in clients:
        client.close()
    await wait_until(lambda: poller.sockets == 0, what="all connections closed")


async def test_without_descriptors_accepting_pauses_and_resumes(poller, flusher, wait_until):
    errors, accepted = [], []
    listening = socket.create_server(("127.0.0.1", 0))
    port = listening.getsockname()[1]

    def make():
        accepted.append(Client(flusher))
        return accepted[-1]

    client = socket.create_connection(("127.0.0.1", port))
    # A collection below would close sockets that earlier tests left, and the listener would get a descriptor.
    gc.collect()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    last = os.dup(client.fileno())
    os.close(last)
    resource.setrlimit(resource.RLIMIT_NOFILE, (last, hard))
    try:
        listener = Listener(poller, listening.detach(), make, errors.append)
        await wait_until(lambda: errors, what="an error")
        assert errors == [errno.EMFILE]
        assert not accepted
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    await wait_until(lambda: accepted, what="the client accepted after all")
    listener.close()
    client.close()
    await wait_until(lambda: poller.sockets == 0, what="the connection closed")


async def test_an_error_for_one_client_affects_no_other(poller, flusher, wait_until):
    accepted, faults = [], []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _loop, context: faults.append(context["exception"]))

    def make():
        if not faults:
            raise LookupError("the first")
        accepted.append(Client(flusher))
        return accepted[-1]

    listening = socket.create_server(("127.0.0.1", 0))
    clients = [socket.create_connection(listening.getsockname()) for _ in range(3)]
    listener = Listener(poller, listening.detach(), make, pytest.fail)
    await wait_until(lambda: len(accepted) == 2, what="the two others")
    assert [type(fault) for fault in faults] == [LookupError]
    assert clients[0].recv(1) == b""
    listener.close()
    for client in clients:
        client.close()
    await wait_until(lambda: poller.sockets == 0, what="all connections closed")
    loop.set_exception_handler(None)


async def test_a_closed_listener_accepts_no_client(poller, flusher):
    listening = socket.create_server(("127.0.0.1", 0))
    address = listening.getsockname()
    listener = Listener(poller, listening.detach(), lambda: Client(flusher), pytest.fail)
    listener.close()
    listener.close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(address)


async def test_a_socket_is_adopted_once(poller, flusher, wait_until):
    ours, theirs = socket_pair()
    sink = Client(flusher)
    poller.adopt(ours, sink)
    more, theirs_too = socket_pair()
    with pytest.raises(RuntimeError):
        poller.adopt(more, sink)
    # The listener owns the descriptor nevertheless.
    assert await asyncio.get_running_loop().sock_recv(theirs_too, 1) == b""
    with pytest.raises(RuntimeError):
        poller.adopt(socket_pair()[0], Client(Flusher(lambda: None)))
    assert poller.sockets == 1
    theirs.close()
    theirs_too.close()
    await wait_until(lambda: poller.sockets == 0, what="closed")


# -- writing -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(6))
async def test_frames_arrive_whole_and_in_order_through_a_narrow_socket(poller, recorder, head, flusher, seed):
    """Random sizes, urgent ones in between, a reader that takes a little at a time."""
    chance = random.Random(seed)
    ours, theirs = socket_pair(4096)
    ws = recorder(flusher)
    poller.adopt(ours, ws)
    theirs.send(head)
    loop = asyncio.get_running_loop()
    answer = b""
    while not answer.endswith(b"\r\n\r\n"):
        answer += await loop.sock_recv(theirs, 1)
    expected = {"u": [], "o": []}
    sent = received = 0
    got = b""
    while sent < 300 or received < total_of(expected):
        for _ in range(chance.randrange(4)):
            if sent < 300 and ws.unsent_bytes < 500_000:
                kind = chance.choice("uooo")
                frame = f"<{kind}{sent}:".encode() + b"x" * chance.choice([0, 10, 3000, 20_000]) + b">"
                expected[kind].append(frame)
                assert ws.send_urgent(frame) if kind == "u" else ws.send(frame)
                sent += 1
        await asyncio.sleep(0)
        try:
            got += theirs.recv(chance.choice([1, 500, 9000]))
        except BlockingIOError:
            await asyncio.sleep(0)
        received = len(got)
    frames = [part + b">" for part in got.split(b">")[:-1]]
    assert [frame for frame in frames if frame[1:2] == b"u"] == expected["u"]
    assert [frame for frame in frames if frame[1:2] == b"o"] == expected["o"]
    assert ws.unsent_bytes == 0
    theirs.close()
    while ws.state != CLOSED:
        await asyncio.sleep(0)


def total_of(expected: dict[str, list[bytes]]) -> int:
    return sum(len(frame) for frames in expected.values() for frame in frames)


async def test_one_client_of_a_crowd_waits_for_a_few_messages_of_each_other(poller, recorder, head, flusher, reference):
    """With one read of everything from each, it would wait for all that the crowd has sent."""
    crowd = []
    for _ in range(20):
        ours, theirs = socket_pair()
        ws = recorder(flusher)
        poller.adopt(ours, ws)
        theirs.sendall(head)
        crowd.append((ws, theirs))
    while not all(ws.state == OPEN for ws, _ in crowd):
        poller.turn()
    burst = reference.client_frame(1, b"x" * 44) * 400
    for _, theirs in crowd:
        theirs.sendall(burst)
    ours, late = socket_pair()
    last = recorder(flusher)
    poller.adopt(ours, last)
    late.sendall(head)
    poller.slice_s = 60.0
    turns = 0
    while last.state != OPEN:
        poller.turn()
        turns += 1
    heard = [len(ws.heard) for ws, _ in crowd]
    assert turns == 1
    assert sum(count < 20 for count in heard) >= 10
    assert max(heard) < 200
    while not all(len(ws.heard) == 400 for ws, _ in crowd):
        poller.turn()
    assert {message for ws, _ in crowd for message in ws.heard} == {("text", b"x" * 44)}
    late.close()
    for _, theirs in crowd:
        theirs.close()
    flusher.flush()
    while poller.sockets:
        poller.turn()


async def test_clients_that_stay_come_before_those_that_leave(poller, recorder, head, flusher, reference):
    """Each that leaves a worker leaves its channels, and thousands may go at once."""
    clients = connected_pairs(poller, recorder, head, flusher, reference, 30)
    message = reference.client_frame(1, b"hello")
    stayed = []
    clients[-1][0].on["text"] = lambda text: stayed.append((text, poller.sockets))
    for _, theirs in clients[:-1]:
        theirs.close()
    clients[-1][1].sendall(message)
    poller.slice_s = 60.0
    while poller.sockets > 1:
        poller.turn()
    assert stayed == [(b"hello", 30)]
    clients[-1][0].abort()
    clients[-1][1].close()


async def test_newcomers_come_before_those_that_leave(poller, recorder, head, flusher, reference):
    """Also those that arrive after the others have gone."""
    clients = connected_pairs(poller, recorder, head, flusher, reference, 30)
    ours, newcomer = socket_pair()
    served = []

    def meet(_text):
        ws = recorder(flusher)

        def serve(_head):
            served.append(poller.sockets)
            ws.abort()

        ws.on["head"] = serve
        poller.adopt(ours, ws)
        newcomer.sendall(head)

    clients[-1][0].on["text"] = meet
    for _, theirs in clients[:-1]:
        theirs.close()
    clients[-1][1].sendall(reference.client_frame(1, b"hello"))
    poller.slice_s = 60.0
    while not served:
        poller.turn()
    assert served == [31]
    newcomer.close()
    clients[-1][1].close()
    while poller.sockets:
        poller.turn()
    assert poller.places[BULK] == poller.places[LEAVING] == 0


async def test_a_client_that_stays_waits_one_turn_however_many_leave(poller, recorder, head, flusher, reference):
    clients = connected_pairs(poller, recorder, head, flusher, reference, 300)
    for _, theirs in clients[:-1]:
        theirs.close()
    ws, theirs = clients[-1]
    theirs.sendall(reference.client_frame(1, b"at once"))
    poller.slice_s = 60.0
    poller.turn()
    assert ("text", b"at once") in ws.heard
    theirs.close()
    while poller.sockets:
        poller.turn()


def connected_pairs(poller, recorder, head, flusher, reference, count):
    """WebSockets that are no newcomers any more, and their clients."""
    clients = []
    for _ in range(count):
        ours, theirs = socket_pair()
        ws = recorder(flusher)
        poller.adopt(ours, ws)
        theirs.sendall(head)
        clients.append((ws, theirs))
    while not all(ws.state == OPEN for ws, _ in clients):
        poller.turn()
    for _, theirs in clients:
        theirs.sendall(reference.client_frame(1, b"hello"))
    while poller.places[BULK]:
        poller.turn()
    return clients


async def test_clients_come_before_many_requests_and_these_before_newcomers(poller, recorder, head, flusher, reference):
    """Also when the requests are on connections that are kept open, and have arrived before."""
    served = []
    [(client, theirs)] = connected_pairs(poller, recorder, head, flusher, reference, 1)
    client.on["text"] = lambda message: served.append("client")
    callers = []
    for _ in range(100):
        ours, caller = socket_pair()
        ws = recorder(flusher)
        ws.on["post"] = lambda data: True
        poller.adopt(ours, ws)
        caller.sendall(b"POST / HTTP/1.1\r\n\r\n")
        callers.append((ws, caller))
    while not all(ws.state == HTTP for ws, _ in callers):
        poller.turn()
    poller.slice_s = 60.0
    # A few are served among the clients.
    for _, caller in callers[:10]:
        caller.sendall(b"one request")
    poller.turn()
    assert poller.places == [11, 0, 90, 0]
    # Of many at once, all but 64 come after the clients from then on.
    for _ in range(2):
        for _, caller in callers:
            caller.sendall(b"one request")
        poller.turn()
    late = poller.places[REQUESTS]
    assert poller.places == [101 - late, late, 0, 0]
    assert 100 - 65 <= late < 100
    for ws, caller in callers:
        ws.on["data"] = lambda data: served.append("request")
        caller.sendall(b"another")
    ours, newcomer = socket_pair()
    ws = recorder(flusher)
    ws.on["head"] = lambda _head: (served.append("newcomer"), ws.abort())
    poller.adopt(ours, ws)
    newcomer.sendall(head)
    theirs.sendall(reference.client_frame(1, b"ping"))
    poller.turn()
    assert served[served.index("client") + 1 :][-late - 1 :] == ["request"] * late + ["newcomer"]
    assert len(served) == 102
    for ws, caller in callers:
        ws.abort()
        caller.close()
    theirs.close()
    newcomer.close()
    while poller.sockets:
        poller.turn()
    assert poller.places == [0, 0, 0, 0]


async def test_http_is_read_in_slices_while_a_crowd_waits(poller, recorder, flusher):
    """2,400 small requests fit into one read of 64 KiB, and take milliseconds."""
    crowd = []
    for _ in range(12):
        ours, theirs = socket_pair()
        ws = recorder(flusher)
        ws.on["post"] = lambda data: True
        poller.adopt(ours, ws)
        theirs.sendall(b"POST / HTTP/1.1\r\n\r\n")
        crowd.append((ws, theirs))
    while not all(ws.state == HTTP for ws, _ in crowd):
        poller.turn()
    for _, theirs in crowd:
        theirs.sendall(b"x" * 60_000)
    poller.slice_s = 60.0
    while not all(sum(len(data) for _, data in ws.heard) == 60_000 for ws, _ in crowd):
        poller.turn()
    # They are newcomers, in bulk. The last of a turn are no crowd.
    sizes = [[len(data) for _, data in ws.heard] for ws, _ in crowd]
    assert max(size for of_one in sizes for size in of_one) == 16_384
    assert sum(of_one[0] == 8_192 for of_one in sizes) >= 3
    for ws, theirs in crowd:
        ws.abort()
        theirs.close()


async def test_established_clients_come_before_newcomers_and_those_that_send_much(
    poller, recorder, head, flusher, reference
):
    def connect():
        ours, theirs = socket_pair()
        ws = recorder(flusher)
        poller.adopt(ours, ws)
        return ws, theirs

    def turn_until(done):
        while not done():
            poller.turn()

    message = reference.client_frame(1, b"hello")
    ws, established = connect()
    established.sendall(head)
    turn_until(lambda: ws.state == OPEN)
    assert poller.places[BULK] == 1
    established.sendall(message)
    turn_until(lambda: ("text", b"hello") in ws.heard)
    assert poller.places[BULK] == 0

    busy = []
    for _ in range(20):
        busy.append(connect())
        busy[-1][1].sendall(head)
    turn_until(lambda: all(one.state == OPEN for one, _ in busy))
    newcomers = [connect() for _ in range(20)]
    for _, theirs in busy:
        theirs.sendall(message * 500)
    for _, theirs in newcomers:
        theirs.sendall(head)
    established.sendall(reference.client_frame(1, b"again"))
    # Its message, and what the others had been served before it.
    served = []
    ws.on["text"] = lambda message: served.append(
        (message, sum(len(one.heard) for one, _ in busy), sum(one.state == OPEN for one, _ in newcomers))
    )
    poller.slice_s = 60.0
    poller.turn()
    assert served == [(b"again", 0, 0)]
    assert all(one.state == OPEN for one, _ in newcomers)
    turn_until(lambda: all(len(one.heard) == 500 for one, _ in busy))
    turn_until(lambda: all(one.state == OPEN for one, _ in newcomers))
    # They are read out, and sent nothing since: the next message brings them to the others.
    for _, theirs in busy:
        theirs.sendall(message)
    turn_until(lambda: all(len(one.heard) == 501 for one, _ in busy))
    assert poller.places[BULK] == 20
    for theirs in (established, *(theirs for _, theirs in busy + newcomers)):
        theirs.close()
    flusher.flush()
    turn_until(lambda: poller.sockets == 0)
    assert poller.places[BULK] == 0


async def test_a_reset_while_bytes_wait_closes_that_one(served, wait_until):
    client = await served.client(receive_buffer_bytes=4096)
    [ws] = served.connections
    audience = Audience(served.flusher)
    audience.add(ws)
    audience.post(b"x" * 900_000)
    await wait_until(lambda: served.flusher.bytes_written > 4096, what="the first bytes written")
    served.reset(client)
    await wait_until(lambda: ws.state == CLOSED, what="the reset noticed")
    assert ws.heard == [("closed", 1006, "")]
    assert len(audience) == 0


async def test_a_reset_is_noticed_while_reading_is_paused(poller, recorder, flusher, head, wait_until):
    ours, theirs = socket_pair()
    ws = recorder(flusher)
    ws.on["head"] = lambda _head: None
    poller.adopt(ours, ws)
    theirs.send(head)
    await wait_until(lambda: ws.buffered == len(head), what="the head")
    theirs.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    theirs.close()
    await wait_until(lambda: ws.state == CLOSED, what="the reset noticed")
    assert ws.heard == [("gone",)]


async def test_a_reset_is_noticed_while_a_newcomer_that_was_read_at_once_is_paused(
    poller, flusher, recorder, head, wait_until
):
    ws = recorder(flusher)
    ws.on["head"] = lambda _head: None
    listening = socket.create_server(("127.0.0.1", 0))
    client = socket.create_connection(listening.getsockname())
    # There when it is accepted. It is answered later.
    client.sendall(head)
    listener = Listener(poller, listening.detach(), lambda: ws, print)
    await wait_until(lambda: ws.buffered == len(head), what="the head")
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    client.close()
    await wait_until(lambda: ws.state == CLOSED, what="the reset noticed")
    assert poller.sockets == 0
    listener.close()


async def test_queued_frames_are_written_after_the_peer_has_ended(served, wait_until):
    client = await served.client(receive_buffer_bytes=4096)
    [ws] = served.connections
    ws.send(b"y" * 700_000)
    client.shutdown(socket.SHUT_WR)
    assert await served.read_to_end(client) == b"y" * 700_000
    await wait_until(lambda: ws.state == CLOSED, what="closed")


@pytest.mark.parametrize("served", ["sockets"], indirect=True)
async def test_the_server_ends_the_connection_after_both_closes(served, reference, wait_until):
    """RFC 6455 7.1.1: a client that doesn't close its socket costs no descriptor."""
    client = await served.client()
    [ws] = served.connections
    await asyncio.get_running_loop().sock_sendall(client, reference.client_frame(8, b"\x03\xe8"))
    assert await served.read_to_end(client) == b"\x88\x02\x03\xe8"
    await wait_until(lambda: ws.state == CLOSED, what="closed by the server alone")


# -- HTTP on the same socket ---------------------------------------------------------------------------------


@pytest.fixture
def http(served):
    """`served`, where each connection speaks HTTP and records what it receives."""

    def prepare(ws):
        ws.on["head"] = lambda _head: ws.heard.append(("http", ws.serve_http()))

    served.prepare = prepare
    return served


async def test_http_stays_on_the_same_socket(http, wait_until):
    client = await http.client(upgrade=False)
    loop = asyncio.get_running_loop()
    await loop.sock_sendall(client, b"POST / HTTP/1.1\r\n\r\nbody")
    await wait_until(lambda: http.connections and http.connections[0].heard, what="the request")
    [ws] = http.connections
    assert ws.state == HTTP
    assert ws.heard == [("http", b"POST / HTTP/1.1\r\n\r\nbody")]
    await loop.sock_sendall(client, b"more")
    await wait_until(lambda: len(ws.heard) == 2, what="more bytes")
    assert ws.heard[1] == ("data", b"more")
    # Beyond the bound of what a WebSocket may have unsent: a response may be large.
    response = os.urandom(3_000_000)
    ws.write_http(response[:1000])
    ws.write_http(response[1000:])
    assert await http.read(client, len(response)) == response
    assert not ws.send(b"no frames")
    ws.end_http(b"last")
    assert await http.read_to_end(client) == b"last"
    client.close()
    await wait_until(lambda: ws.state == CLOSED, what="closed")
    assert ws.heard[-1] == ("gone",)


async def test_an_http_client_that_half_closes_gets_its_response(http, wait_until):
    client = await http.client(upgrade=False)
    loop = asyncio.get_running_loop()
    await loop.sock_sendall(client, b"GET / HTTP/1.1\r\n\r\n")
    client.shutdown(socket.SHUT_WR)
    await wait_until(lambda: http.connections and ("end",) in http.connections[0].heard, what="the end of the stream")
    [ws] = http.connections
    assert ws.state == HTTP
    ws.end_http(b"response")
    assert await http.read_to_end(client) == b"response"
    await wait_until(lambda: ws.state == CLOSED, what="closed")


async def test_an_http_connection_may_become_a_websocket(http, head, reference, wait_until):
    client = await http.client(upgrade=False)
    loop = asyncio.get_running_loop()
    await loop.sock_sendall(client, b"GET / HTTP/1.1\r\n\r\n")
    await wait_until(lambda: http.connections and http.connections[0].heard, what="the request")
    [ws] = http.connections
    ws.write_http(b"HTTP/1.1 204 No Content\r\n\r\n")
    del ws.on["head"]
    ws.upgrade(head + reference.client_frame(1, b"early"))
    assert ws.heard[-1] == ("text", b"early")
    await loop.sock_sendall(client, reference.client_frame(1, b"later"))
    await wait_until(lambda: ws.heard[-1] == ("text", b"later"), what="a message")
    answer = await http.read(client, len(b"HTTP/1.1 204 No Content\r\n\r\nHTTP/1.1 101 "))
    assert answer == b"HTTP/1.1 204 No Content\r\n\r\nHTTP/1.1 101 "


async def test_what_a_peer_takes_from_a_full_kernel_shows_as_delivered(poller, flusher, wait_until):
    ours, theirs = socket_pair(buffer_bytes=65536)
    sink = Client(flusher)
    poller.adopt(ours, sink)
    size = 1_000_000
    sink.send(b"x" * size)
    await wait_until(lambda: 0 < sink.unsent_bytes < size, what="a full kernel")
    assert sink.unsent_bytes < sink.undelivered_bytes <= size
    await read(theirs, 500_000)
    await wait_until(lambda: sink.undelivered_bytes <= 500_000)
    await read(theirs, 500_000)
    await wait_until(lambda: sink.undelivered_bytes == 0)
    theirs.close()
    await wait_until(lambda: poller.sockets == 0, what="the connection closed")


# -- one request, one connection -----------------------------------------------------------------------------


POST = b"POST / HTTP/1.1\r\n\r\nbody"


@pytest.fixture
async def single(poller, flusher, recorder, wait_until):
    """`ws, client = await single(POST)`: a connection whose first bytes came before it was accepted. As the server, it
    takes a POST; `ended`: as its last request."""
    clients, listeners, connections = [], [], []

    async def accept(first, *, ended):
        made = []

        def began(ws, data):
            ws.heard.append(("post", data, ws.peer))
            if ended:
                ws.end_reading()
            return True

        def make():
            ws = recorder(flusher)
            ws.on["post"] = lambda data: began(ws, data)
            made.append(ws)
            connections.append(ws)
            return ws

        listening = socket.create_server(("127.0.0.1", 0))
        client = socket.create_connection(listening.getsockname())
        clients.append(client)
        if first:
            client.sendall(first)
        client.setblocking(False)
        listeners.append(Listener(poller, listening.detach(), make, pytest.fail))
        await wait_until(lambda: made, what="a connection")
        await asyncio.sleep(0)
        return made[0], client

    yield accept
    for listener in listeners:
        listener.close()
    for client in clients:
        client.close()
    while connections:
        ws = connections.pop()
        ws.abort()
        # A cycle, which the collector can't break: it doesn't visit sinks.
        ws.on.clear()
    # pytest holds this fixture, which holds the listeners and what they made.
    listeners.clear()
    await wait_until(lambda: poller.sockets == 0, what="all connections closed")


async def read_to_end(client):
    loop = asyncio.get_running_loop()
    found = b""
    while part := await asyncio.wait_for(loop.sock_recv(client, 65536), 60):
        found += part
    return found


async def test_a_last_request_is_read_as_it_is_accepted_and_its_connection_closes_with_the_answer(
    poller, single, wait_until
):
    ws, client = await single(POST, ended=True)
    assert ws.heard == [("post", POST, client.getsockname())]
    # There is nothing to wait for.
    assert (poller.sockets, poller.places) == (1, [0, 0, 0, 0])
    assert ws.peer == client.getsockname()
    # What the client sends nevertheless doesn't turn the end into a reset.
    client.send(b"\r\n")
    ws.end_http(b"answer")
    assert await read_to_end(client) == b"answer"
    await wait_until(lambda: poller.sockets == 0, what="the connection closed")
    assert ws.heard[1:] == [("gone",)]


async def test_a_large_answer_to_a_last_request_arrives_whole(poller, single, wait_until):
    ws, client = await single(POST, ended=True)
    answer = os.urandom(10_000_000)
    ws.end_http(answer)
    await wait_until(lambda: poller.places[BULK] == 1, what="a full kernel")
    assert await read_to_end(client) == answer
    await wait_until(lambda: poller.sockets == 0, what="the connection closed")


@pytest.mark.parametrize("size", [10, 10_000_000], ids=["unwritten", "unread"])
async def test_a_last_request_that_comes_while_an_earlier_answer_waits_is_answered_too(
    poller, single, wait_until, size
):
    ws, client = await single(POST, ended=False)
    earlier = os.urandom(size)
    ws.write_http(earlier)
    if size > 10:
        await wait_until(lambda: poller.places[BULK] == 1 and ws.unsent_bytes < size, what="a full kernel")
    ws.end_reading()
    assert await read(client, size) == earlier
    ws.end_http(b"answer")
    assert await read_to_end(client) == b"answer"
    client.close()
    await wait_until(lambda: poller.sockets == 0, what="the connection closed")


async def test_a_client_that_resets_before_the_answer_to_its_last_request_is_lost_with_the_answer(
    poller, single, wait_until
):
    ws, client = await single(POST, ended=True)
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    client.close()
    ws.end_http(b"answer")
    await wait_until(lambda: poller.sockets == 0, what="the connection closed")
    assert ws.state == CLOSED


@pytest.mark.parametrize("first", [b"", POST])
async def test_whoever_may_send_more_is_watched(poller, single, wait_until, first):
    ws, client = await single(first, ended=False)
    await wait_until(lambda: poller.places == [0, 0, 1, 0], what="among the newcomers")
    assert ws.heard == [("post", POST, client.getsockname())][: bool(first)]
    client.send(POST)
    await wait_until(lambda: len(ws.heard) == 1 + bool(first), what="a request")
    assert ws.heard[-1] == (("data", POST) if first else ("post", POST, client.getsockname()))


async def test_a_newcomer_is_read_once_more_before_it_is_watched(poller, flusher, recorder, wait_until):
    """Its bytes come after it was accepted, and in the pass of the loop in which that was done."""
    listening = socket.create_server(("127.0.0.1", 0))
    client = socket.create_connection(listening.getsockname())
    places, connections = [], []

    def make():
        ws = recorder(flusher)
        ws.on["post"] = lambda data: places.append(poller.places) or ws.end_reading() or True
        # The loop calls this after the poller has accepted and read.
        poller.loop.call_soon(client.send, POST)
        connections.append(ws)
        return ws

    listener = Listener(poller, listening.detach(), make, pytest.fail)
    await wait_until(lambda: places, what="the request")
    assert (places, poller.places, poller.sockets) == ([[0, 0, 0, 0]], [0, 0, 0, 0], 1)
    connections[0].end_http(b"answer")
    client.setblocking(False)
    assert await read_to_end(client) == b"answer"
    listener.close()
    client.close()
    await wait_until(lambda: poller.sockets == 0, what="the connection closed")


async def test_a_fault_while_a_newcomer_is_read_closes_it(poller, flusher, recorder, wait_until):
    """A callback of the base class is no callback of the engine: its exceptions reach the poller."""

    class Broken(Client):
        __slots__ = ()

        def __init__(self):
            pass

    faults = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _loop, context: faults.append(type(context["exception"])))
    listening = socket.create_server(("127.0.0.1", 0))
    client = socket.create_connection(listening.getsockname())
    client.setblocking(False)
    listener = Listener(poller, listening.detach(), Broken, pytest.fail)
    assert await read_to_end(client) == b""
    assert (faults, poller.sockets) == ([RuntimeError], 0)
    listener.close()
    client.close()
    loop.set_exception_handler(None)


# -- many ----------------------------------------------------------------------------------------------------


async def test_many_clients_come_and_go_and_nothing_stays(served, head, reference, wait_until):
    """Clients connect, send and leave in every way, from a separate thread."""
    count = 400

    def storm():
        for number in range(count):
            with socket.create_connection(("127.0.0.1", served.port)) as client:
                if number % 4 == 0:
                    continue
                client.sendall(head)
                if number % 4 == 1:
                    client.recv(4096)
                elif number % 4 == 2:
                    client.sendall(reference.client_frame(8, b"\x03\xe8"))
                    client.recv(4096)

    thread = threading.Thread(target=storm)
    thread.start()
    await wait_until(lambda: len(served.connections) == count and served.lost == count, what="all gone", timeout_s=60)
    thread.join()
    assert all(ws.state == CLOSED for ws in served.connections)
