import asyncio

import msgspec
import pytest
import structlog

from redpoll.cluster.debug_log import MAX_LINES, DebugLog, debug_text
from redpoll.protocol.apps import App


class Clock:
    now_s = 1_000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def debug_log(link, keys, clock):
    return DebugLog(link, keys, "web-1", "worker 0", clock=clock, steady=clock)


async def lines_of(link, keys, app_id="7"):
    return [msgspec.json.decode(fields[1]) for _, fields in await link.ask(b"XRANGE", keys.debug(app_id), b"-", b"+")]


async def begin(link, keys):
    await link.ask(b"XADD", keys.debug("7"), b"*", b"line", b'{"what":"debugging began"}')


def debugged(until=1_060.0, socket=""):
    return App(id="7", name="demo", keys=(), debug_until=until, debug_socket=socket)


async def test_lines_go_to_the_log_and_to_the_stream(debug_log, link, keys):
    await begin(link, keys)
    debug_log.app_changed("7", debugged())
    assert debug_log.any
    with structlog.testing.capture_logs() as logged:
        debug_log.line("7", "1.2", "message received", message="{}")
    assert logged == [
        {
            "event": "debug",
            "log_level": "info",
            "what": "message received",
            "app": "7",
            "socket": "1.2",
            "message": "{}",
        }
    ]
    _, line = await lines_of(link, keys)
    assert line == {
        "time_ms": 1_000_000,
        "origin": "web-1 worker 0",
        "socket": "1.2",
        "what": "message received",
        "message": "{}",
    }


async def test_nothing_is_written_to_redis_without_a_reader(debug_log, link, keys):
    debug_log.app_changed("7", debugged())
    debug_log.line("7", "", "message received")
    assert await lines_of(link, keys) == []


async def test_it_ends_by_itself(debug_log, clock):
    debug_log.app_changed("7", debugged())
    assert debug_log.covers("7", "1.2")
    clock.now_s = 1_060.0
    assert not debug_log.covers("7", "1.2")
    assert not debug_log.any


async def test_only_the_chosen_connection_is_covered_and_only_of_its_app(debug_log):
    debug_log.app_changed("7", debugged(socket="1.2"))
    assert [debug_log.covers(*one) for one in (("7", "1.2"), ("7", "1.3"), ("8", "1.2"))] == [True, False, False]
    debug_log.app_changed("7", None)
    assert not debug_log.any


async def test_lines_are_bounded_and_those_left_out_are_counted(debug_log, link, keys, clock):
    await begin(link, keys)
    debug_log.app_changed("7", debugged())
    for _ in range(700):
        debug_log.line("7", "", "message received")
    clock.now_s += 1.0
    debug_log.line("7", "", "message received")
    await asyncio.sleep(0)
    lines = await lines_of(link, keys)
    assert len(lines) == 1 + 500 + 1
    assert lines[-1]["lines_left_out"] == 200


async def test_the_stream_is_bounded(debug_log, link, keys, clock):
    await begin(link, keys)
    debug_log.app_changed("7", debugged(until=9_999.0))
    for _ in range(MAX_LINES + 500):
        clock.now_s += 0.1
        debug_log.line("7", "", "message received")
    assert len(await lines_of(link, keys)) <= MAX_LINES + 200


def test_signatures_are_left_out_and_data_is_cut():
    key = '{"event":"pusher:subscribe","data":{"channel":"private-a","auth":"278d:0123abcd"}}'
    assert debug_text(key.encode()).endswith('"auth":"278d:…"}}')
    nested = '{"data":"{\\"auth\\":\\"278d:0123abcd\\",\\"channel\\":\\"a\\"}"}'
    assert "0123abcd" not in debug_text(nested)
    # Who reads the log could use a grant on any connection.
    grant = '{"data":"{\\"auth\\":\\"278d:eyJhbGci.eyJzdWIi.c2ln-_x\\",\\"channel\\":\\"a\\"}"}'
    assert debug_text(grant) == '{"data":"{\\"auth\\":\\"278d:…\\",\\"channel\\":\\"a\\"}"}'
    assert debug_text("x" * 1_001) == "x" * 1_000 + "… (1001 in all)"
    assert debug_text(b"\xff") == "�"
