"""What the HTTP connections of a worker share. test_http_connection.py tests what clients see."""

import types

import pytest

from redpoll._fanout import Flusher
from redpoll.config.config import Settings
from redpoll.config.proxies import NO_PROXIES
from redpoll.http.reader import ParsedRequest
from redpoll.loop.writable import WritableSignal
from redpoll.worker.ingress.credentials import Credentials
from redpoll.worker.ingress.http_requests import HttpRequests
from redpoll.worker.ingress.strangers import Strangers


class FakeJanitor:
    head_timeout_s = 10.0

    def silent_s(self, connection):
        return connection.silent_s


@pytest.fixture
async def http(tmp_path):
    return HttpRequests(
        Settings(trusted_proxies=["10.0.0.0/8"]),
        FakeJanitor(),
        WritableSignal(Flusher(lambda: None)),
        str(tmp_path / "none.sock"),
        10,
        Strangers(0, NO_PROXIES),
        Credentials({}),
        types.SimpleNamespace(answer=lambda http, request: None),
        types.SimpleNamespace(serve_by=lambda when_read, wait: None),
    )


async def test_the_client_is_the_one_that_a_trusted_proxy_names(http):
    request = ParsedRequest(0, b"GET", b"/", [], ["198.51.100.7"], b"")
    for peer, client in (("10.0.0.1", "198.51.100.7"), ("192.0.2.1", "192.0.2.1")):
        assert http.client_of(types.SimpleNamespace(peer=peer), request) == client


async def test_long_lists_of_proxies_are_read_and_not_remembered(http):
    """A client may send thousands of them, of 16 KiB each."""
    client_of = http.client_addresses.reader("10.0.0.1")
    long = b"203.0.113.1, " * 1000 + b"198.51.100.7"
    assert client_of(long) == client_of(b"198.51.100.7") == b"198.51.100.7"
    assert http.client_addresses._remembered.cache_info().currsize == 1


async def test_authenticated_callers_make_room_only_after_they_have_been_idle_for_long(http):
    """An aborted connection reports its end in a later pass. Closing the same one again would make no room."""

    class Idle:
        def __init__(self, silent_s):
            self.silent_s = silent_s
            self.aborted = 0

        def abort(self):
            self.aborted += 1

    assert not http.close_idle()
    idle = [Idle(silent_s) for silent_s in (30, 20, 5)]
    http.idle = dict.fromkeys(idle)
    assert [http.close_idle() for _ in range(3)] == [True, True, False]
    assert [connection.aborted for connection in idle] == [1, 1, 0]
    assert http.strangers.leaving == set(idle[:2])
