"""What the HTTP connections of a worker share. test_http_connection.py tests what clients see."""

import asyncio

import pytest

from redpoll._fanout import Flusher
from redpoll.config.config import Settings
from redpoll.config.proxies import NO_PROXIES
from redpoll.loop.writable import DrainSignal
from redpoll.worker.ingress import http_requests
from redpoll.worker.ingress.credentials import Credentials
from redpoll.worker.ingress.http_requests import HttpRequests
from redpoll.worker.ingress.strangers import Strangers


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
        Strangers(0, NO_PROXIES),
        Credentials({}),
    )


async def test_a_limit_is_logged_once_for_each_time_it_is_reached(http, monkeypatch):
    logged = []
    monkeypatch.setattr(http_requests.log, "warning", lambda event, **fields: logged.append((event, fields)))
    for _ in range(100):
        http.limit_reached("bodies")
    http.limit_reached("requests")
    assert http.refused == {"connections": 0, "requests": 1, "bodies": 100, "address": 0}
    assert logged == [("limit reached", {"limit": "HTTP bodies"}), ("limit reached", {"limit": "HTTP requests"})]


async def test_what_connections_have_yet_to_do_shares_the_time_of_a_pass(http, monkeypatch):
    """What is left after the time of a pass has the next one, in order; an error stops only its own."""
    monkeypatch.setattr(http_requests, "SLICE_S", -1.0)
    loop = asyncio.get_running_loop()
    done, errors, over = [], [], asyncio.Event()
    loop.set_exception_handler(lambda _, context: errors.append(context["exception"]))

    def count_passes():
        done.append("pass")
        if not over.is_set():
            loop.call_soon(count_passes)

    def fail():
        raise RuntimeError("on purpose")

    def more():
        done.append(1)
        http.later(lambda: done.append(3))
        http.later(over.set)

    http.later(more)
    http.later(fail)
    http.later(lambda: done.append(2))
    loop.call_soon(count_passes)
    await over.wait()
    assert done == [1, "pass", "pass", 2, "pass", 3, "pass", "pass"]
    assert [str(error) for error in errors] == ["on purpose"]


async def test_the_client_is_the_one_that_a_trusted_proxy_names(http):
    assert http.client_of("10.0.0.1", ["198.51.100.7"]) == "198.51.100.7"
    assert http.client_of("192.0.2.1", ["198.51.100.7"]) == "192.0.2.1"


async def test_authenticated_callers_make_room_only_after_they_have_been_idle_for_long(http):
    """An aborted connection reports its end in a later pass. Closing the same one again would make no room."""

    class Idle:
        def __init__(self, silent_s):
            self.silent_s = silent_s
            self.aborted = 0

        def abort(self):
            self.aborted += 1

    assert not http.close_idle()
    http._janitor.silent_s = lambda connection: connection.silent_s
    idle = [Idle(silent_s) for silent_s in (30, 20, 5)]
    http.idle = dict.fromkeys(idle)
    assert [http.close_idle() for _ in range(3)] == [True, True, False]
    assert [connection.aborted for connection in idle] == [1, 1, 0]
    assert http.strangers.leaving == set(idle[:2])
