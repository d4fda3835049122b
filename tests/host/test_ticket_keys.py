"""Keys of TLS session tickets on a real Redis: several nodes, periods that end, and Redis away."""

import socket
import ssl

import pytest

from helpers.certs import self_signed
from helpers.server import Server
from redpoll import _openssl
from redpoll.host.ticket_keys import KEY_BYTES, PERIOD_S, TicketKeyring


class Worker:
    """A child that notes what it was sent."""

    def __init__(self):
        self.sent = []

    def send(self, message):
        self.sent.append(message)

    @property
    def keys(self):
        return list(self.sent[-1].keys) if self.sent else []


class Clock:
    def __init__(self):
        self.now = PERIOD_S * 1000.0 + 5

    def __call__(self):
        return self.now


@pytest.fixture
async def node():
    """Makes keyrings of further nodes, each with one worker."""
    made = []

    def make(url, clock, answer_within_s=60.0):
        worker = Worker()
        ring = TicketKeyring(url, "rp", [worker], clock=clock, answer_within_s=answer_within_s)
        made.append(ring)
        ring.tell(worker)
        ring.start()
        return ring, worker

    yield make
    for ring in made:
        await ring.close()


def is_key(text):
    return len(bytes.fromhex(text)) == KEY_BYTES == _openssl.KEY_BYTES


async def test_nodes_share_one_key(redis, node, wait_until):
    clock = Clock()
    _, first = node(redis.url, clock)
    (own,) = first.keys
    assert is_key(own)
    _, second = node(redis.url, clock)
    await wait_until(lambda: len(first.sent) == len(second.sent) == 2)
    assert first.keys == second.keys
    assert all(is_key(key) for key in first.keys)
    # What each had before it knew Redis' key is used no more.
    assert own not in first.keys


async def test_a_node_that_starts_again_has_the_key_of_before(redis, node, wait_until):
    clock = Clock()
    ring, before = node(redis.url, clock)
    await wait_until(lambda: len(before.sent) == 2)
    await ring.close()
    _, after = node(redis.url, clock)
    await wait_until(lambda: len(after.sent) == 2)
    assert after.keys == before.keys


async def test_the_next_period_has_a_new_key_and_keeps_the_last_one(redis, node, wait_until):
    clock = Clock()
    _, worker = node(redis.url, clock)
    await wait_until(lambda: len(worker.sent) == 2)
    (old,) = worker.keys
    clock.now += PERIOD_S
    _, later = node(redis.url, clock)
    await wait_until(lambda: len(later.sent) == 2)
    new, kept = later.keys
    assert kept == old != new
    clock.now += PERIOD_S
    _, last = node(redis.url, clock)
    await wait_until(lambda: len(last.sent) == 2)
    assert last.keys[1:] == [new]


async def test_a_running_node_changes_its_key_when_the_period_ends(redis, node, wait_until):
    clock = Clock()
    clock.now = PERIOD_S * 1001 - 0.02
    _, worker = node(redis.url, clock)
    await wait_until(lambda: len(worker.sent) == 2)
    (old,) = worker.keys
    clock.now = PERIOD_S * 1001 + 0.01
    await wait_until(lambda: len(worker.sent) == 3)
    assert worker.keys[1:] == [old]


@pytest.mark.parametrize("found", ["no hex", "00" * (KEY_BYTES - 1), b"\xff"])
async def test_a_node_goes_on_with_its_own_key_where_redis_has_something_else(redis, node, wait_until, found):
    ring, worker = node(redis.url, Clock())
    await wait_until(lambda: ring.is_settled)
    (name,) = redis.call("KEYS", "*tickets*")
    redis.call("SET", name, found)
    other, worker = node(redis.url, Clock())
    await wait_until(lambda: other.is_settled)
    (own,) = worker.keys
    assert is_key(own)


async def test_redis_forgets_keys(redis, node, wait_until):
    _, worker = node(redis.url, Clock())
    await wait_until(lambda: len(worker.sent) == 2)
    (name,) = redis.call("KEYS", "*tickets*")
    assert 2 * PERIOD_S < redis.call("TTL", name) <= 3 * PERIOD_S


async def test_without_redis_a_node_changes_its_key_by_itself_and_shares_again_later(own_redis, node, wait_until):
    clock = Clock()
    clock.now = PERIOD_S * 1001 - 0.02
    _, worker = node(own_redis.url, clock, answer_within_s=0.5)
    await wait_until(lambda: len(worker.sent) == 2)
    (shared,) = worker.keys
    own_redis.kill()
    clock.now = PERIOD_S * 1001 + 0.01
    await wait_until(lambda: len(worker.sent) == 3)
    own, kept = worker.keys
    assert kept == shared != own
    own_redis.start()
    await wait_until(lambda: len(worker.sent) == 4)
    stored, kept = worker.keys
    assert kept == shared
    assert stored not in (own, shared)


def connect(server, context, session):
    """Whether a client with this session is resumed, and its next session."""
    with (
        socket.create_connection(("127.0.0.1", int(server.tls_url.rpartition(":")[2])), 60) as raw,
        context.wrap_socket(raw, server_hostname="localhost", session=session) as client,
    ):
        client.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
        # A ticket of TLS 1.3 comes before the answer.
        assert client.recv(4096).startswith(b"HTTP/1.1 200 ")
        return client.session_reused, client.session


@pytest.mark.skipif(not _openssl.load(), reason=str(_openssl.missing()))
def test_tickets_are_accepted_by_all_workers_and_after_a_restart(tmp_path):
    cert, key = self_signed(tmp_path)
    context = ssl.create_default_context(cafile=cert)
    with Server(workers=2, tls_port=0, tls_cert=cert, tls_key=key) as server:
        resumed, session = connect(server, context, None)
        assert not resumed
        # The kernel spreads connections over the workers.
        for _ in range(12):
            resumed, session = connect(server, context, session)
            assert resumed
        server.stop()
        server.start()
        for _ in range(12):
            resumed, session = connect(server, context, session)
            assert resumed
