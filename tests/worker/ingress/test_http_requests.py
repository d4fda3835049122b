"""What the HTTP connections of a worker share. test_http_connection.py tests what clients see."""

import asyncio

import pytest

from redpoll._fanout import Flusher
from redpoll.config import Settings
from redpoll.worker.drained import DrainSignal
from redpoll.worker.ingress import http_requests
from redpoll.worker.ingress.http_requests import HttpRequests


class FakeJanitor:
    head_timeout_s = 10.0

    def __init__(self):
        self.loop = asyncio.get_running_loop()


@pytest.fixture
async def http(tmp_path):
    return HttpRequests(
        Settings(trusted_proxies=["10.0.0.0/8"]),
        FakeJanitor(),
        DrainSignal(Flusher(lambda: None)),
        str(tmp_path / "none.sock"),
        10,
    )


async def test_a_limit_is_logged_once_for_each_time_it_is_reached(http, monkeypatch):
    logged = []
    monkeypatch.setattr(http_requests.log, "warning", lambda event, **fields: logged.append((event, fields)))
    for _ in range(100):
        http.limit_reached("bodies")
    http.limit_reached("requests")
    assert http.refused == {"connections": 0, "requests": 1, "bodies": 100}
    assert logged == [("limit reached", {"limit": "HTTP bodies"}), ("limit reached", {"limit": "HTTP requests"})]


async def test_without_control_only_the_health_check_is_answered_200(http):
    assert http.refusal(b"/healthz").startswith(b"HTTP/1.1 200 ")
    assert http.refusal(b"/").startswith(b"HTTP/1.1 200 ")
    assert http.refusal(b"/readyz").startswith(b"HTTP/1.1 503 ")


async def test_the_client_is_the_one_that_a_trusted_proxy_names(http):
    assert http.client_of("10.0.0.1", ["198.51.100.7"]) == "198.51.100.7"
    assert http.client_of("192.0.2.1", ["198.51.100.7"]) == "192.0.2.1"


async def test_make_room_closes_nothing_if_no_connection_is_idle(http):
    assert not http.make_room()


async def test_many_connections_in_one_loop_pass_each_get_room_of_their_own(http):
    """An aborted connection reports its end in a later pass. Closing the same one again would make no room."""

    class Idle:
        def __init__(self):
            self.connection = self
            self.aborted = 0

        def abort(self):
            self.aborted += 1

    idle = [Idle() for _ in range(3)]
    http.idle = dict.fromkeys(idle)
    assert [http.make_room() for _ in range(4)] == [True, True, True, False]
    assert [connection.aborted for connection in idle] == [1, 1, 1]
