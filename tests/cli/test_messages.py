"""`redpoll publish`, `channels`, `trace` and `tail` against a server."""

import asyncio
import itertools
import json
import threading
import time

import pytest
from click.testing import CliRunner

from helpers.answering import Answering, reply
from helpers.wire import Socket, eventually
from redpoll.cli import main


async def test_a_published_event_arrives_and_has_a_trace(on_server_async, server):
    client = await Socket.connect(server)
    await client.subscribe("a,b;c")
    shown = json.loads(
        (await on_server_async("publish", "a,b;c", "greeting", '{"x":1}', "--also", "d", "--json")).stdout
    )
    assert (await client.next("greeting"))["data"] == '{"x":1}'

    # The command waits for the log for three seconds, which may be too short on a busy machine.
    async def is_accepted() -> bool:
        return "accepted" in (await on_server_async("trace", shown["trace_id"])).stdout

    await eventually(is_accepted, True)
    trace = json.loads((await on_server_async("trace", shown["trace_id"], "--json")).stdout)
    assert (trace["channels"], trace["name"], trace["size"]) == (["a,b;c", "d"], "greeting", 7)
    client.abort()


async def test_data_is_read_from_standard_input_and_a_connection_can_be_left_out(background, server):
    with_id, without = await Socket.connect(server), await Socket.connect(server)
    for client in (with_id, without):
        await client.subscribe("input")
    publishing = background("publish", "input", "big", "-", "--socket-id", with_id.socket_id)
    await asyncio.to_thread(publishing.communicate, "from a pipe")
    assert (await without.next("big"))["data"] == "from a pipe"
    await with_id.settle()
    assert with_id.all("big") == []
    for client in (with_id, without):
        client.abort()


def test_a_refused_publish_ends_with_1_and_says_why(on_server):
    result = on_server("publish", "no spaces", "x")
    assert (result.exit_code, "400" in result.stderr, result.stdout) == (1, True, "")


async def test_channels_are_listed_and_shown(on_server_async, server):
    client = await Socket.connect(server)
    await client.subscribe("presence-list;1", user_id="7")
    await client.subscribe("list-2")
    assert (await on_server_async("channels", "--prefix", "list-")).stdout == "list-2\n"
    shown = (await on_server_async("channels", "--prefix", "presence-list", "--info", "user_count", "--json")).stdout
    assert json.loads(shown) == {"channels": {"presence-list;1": {"user_count": 1}}}
    assert (await on_server_async("channels", "presence-list;1", "--users")).stdout == "7\n"
    assert "occupied=true" in (await on_server_async("channels", "presence-list;1")).stdout
    client.abort()


@pytest.mark.parametrize("words", [("--users",), ("a", "--prefix", "b")])
def test_contradictory_options_end_with_2(on_server, words):
    assert on_server("channels", *words).exit_code == 2


def test_an_unknown_trace_ends_with_1_after_the_time_to_wait(on_server, monkeypatch):
    seconds = itertools.count()
    monkeypatch.setattr("redpoll.cli.messages.monotonic", lambda: next(seconds))
    result = on_server("trace", "0" * 32, "--wait", "9")
    assert (result.exit_code, result.stderr.startswith("not logged yet; waiting up to 9 s\n")) == (1, True)
    assert "404" in result.stderr
    at_once = on_server("trace", "0" * 32, "--wait", "0")
    assert (at_once.exit_code, "not logged yet" in at_once.stderr) == (1, False)


def test_tail_prints_events_as_they_pass(on_server, background):
    following = background("tail", "--channel", "tailed", "--lines", "0", "--json")
    assert following.stdout is not None
    on_server("publish", "tailed", "first")
    # What is logged before the first page was read isn't followed, so events are published until one appears.
    deadline = time.monotonic() + 60
    reading = threading.Thread(target=lambda: lines.append(following.stdout.readline()))
    lines: list[str] = []
    reading.start()
    while reading.is_alive():
        on_server("publish", "tailed", "another")
        reading.join(0.2)
        assert time.monotonic() < deadline, "tail printed nothing"
    assert json.loads(lines[0])["channels"] == ["tailed"]
    earlier = on_server("tail", "--channel", "tailed", "--no-follow", "--lines", "1000").stdout.splitlines()
    assert "tailed  first  2 bytes" in earlier[0]


def logged(time_ms: int, trace_id: str, **more) -> dict:
    call = {"correlation_id": None, "name": "e", "channels": ["c"], "size": 1, "caller": "k", "status": 200}
    return {**call, "trace_id": trace_id, "time_ms": time_ms, "time_us": 1_000 * time_ms, "sampled": False, **more}


@pytest.mark.parametrize("lines", [0, 3])
def test_tail_prints_no_events_that_were_logged_before_and_each_call_of_a_trace(typed, monkeypatch, lines):
    monkeypatch.setattr("redpoll.cli.messages._POLL_EVERY_S", 0)
    earlier = [logged(1_700_000_000_000 - 100 * age, f"earlier {age}") for age in range(20)]
    new = [logged(1_700_000_000_500, "one", name=name) for name in "ba"]
    pages = [
        {"events": earlier[: max(lines, 1)], "next": "rest"},
        {"events": earlier[max(lines, 1) :], "next": None},
        {"events": earlier, "next": None},
        {"events": new + earlier, "next": None},
    ]
    with Answering(*(reply(200, page) for page in pages), reply(404, {"error": "it ends"})) as server:
        result = typed("tail", "--lines", str(lines), "--json", "--url", server.url)
        asked = [request.target for request in server.asked]
    shown = [json.loads(line) for line in result.stdout.splitlines()]
    assert shown == [*earlier[:lines][::-1], *new[::-1]]
    assert ["cursor=rest" in target for target in asked[:4]] == [False, True, False, False]


@pytest.mark.parametrize(
    ("body", "printed"),
    [({"channels": []}, ""), ({"channels": {"b": [], "a": {"user_count": 1}}}, "a  user_count=1\nb\n")],
)
def test_objects_without_members_may_be_empty_arrays(typed, body, printed):
    """PHP, and so Reverb, writes them so."""
    with Answering(reply(200, body)) as reverb:
        result = typed("channels", "--url", reverb.url)
    assert (result.exit_code, result.stdout, result.stderr) == (0, printed, "")


def test_standard_input_that_is_no_text_is_refused():
    words = ("publish", "news", "big", "-", "--url", "http://K:S@127.0.0.1:9/apps/1")
    result = CliRunner().invoke(main, words, input=b"caf\xe9")
    assert (result.exit_code, result.stderr) == (2, "standard input is not a text in UTF-8\n")
