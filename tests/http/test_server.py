"""What the connections of a port share. test_connection.py tests one connection."""

import asyncio

import pytest
from structlog.testing import capture_logs

from redpoll.http import server
from redpoll.http.head import FieldTable
from redpoll.http.messages import FIELDS
from redpoll.http.server import HttpServer


@pytest.fixture
async def http():
    return HttpServer(FieldTable(FIELDS), ("connections", "requests", "bodies"))


async def test_a_limit_is_logged_once_for_each_time_it_is_reached(http):
    with capture_logs() as logs:
        for _ in range(100):
            http.limit_reached("bodies")
        http.limit_reached("requests")
    assert http.refused == {"connections": 0, "requests": 1, "bodies": 100}
    assert [(entry["event"], entry["limit"]) for entry in logs] == [
        ("limit reached", "HTTP bodies"),
        ("limit reached", "HTTP requests"),
    ]


async def test_what_connections_have_yet_to_do_shares_the_time_of_a_pass(http, monkeypatch):
    """What is left after the time of a pass has the next one, in order; an error stops only its own."""
    monkeypatch.setattr(server, "SLICE_S", -1.0)
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


async def test_a_stream_that_is_gone_is_no_longer_late_and_may_go_twice(http):
    calls = []

    class Connection:
        def late(self):
            calls.append("late")

        def gone(self):
            calls.append("gone")

    http.connections["stream"] = Connection()
    http.late("stream")
    for _ in range(2):
        http.gone("stream")
        http.late("stream")
    assert calls == ["late", "gone"]
