"""A model's answer, broadcast by Laravel piece by piece: what pages show that use pusher-js and Laravel Echo."""

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest
from click.testing import CliRunner

from clients.laravel_answers import answer_events, request
from clients.node import Node
from helpers.server import Server
from helpers.wire import Socket, eventually
from redpoll.cli import main

PIECES = [f"Größe {number}/7 – „\\{number}“\n 🐦" for number in range(400)]
TEXT = "".join(PIECES)
RULE = ("--keep", "5000", "--seconds", "3600", "--replay", "50")
RATE = ("--max-rate", "20", "--join", "delta", "--by", "message_id")


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """Two workers, and the rule of deploy/docs/quickstart/laravel.md."""
    with Server(workers=2) as running:
        words = ["history", "rule", "add", running.app_id, "--prefix", "chat.", *RULE, *RATE]
        made = CliRunner().invoke(main, [*words, "--data-dir", str(running.folder / "data")])
        assert made.exit_code == 0, made.output
        yield running


async def broadcast(server: Server, channel: str, part: slice = slice(None)) -> None:
    """Send a part of the answer's events, each when the one before it is answered, as PHP does."""
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    for name, payload in list(answer_events(PIECES))[part]:
        writer.write(request(server, channel, name, payload))
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200 "), head
        assert await reader.readexactly(2) == b"{}"
    writer.close()


def shown(node: Node, client: str) -> str:
    """The text on a page that appends each piece."""
    return "".join(news["data"]["delta"] for news in node.matching(client=client, event="text_delta"))


async def test_pages_show_the_answer_whenever_they_came(server: Server, node: Node) -> None:
    for name in ("early", "late", "reloaded"):
        await node.connect(name)
    await node.subscribe("early", "chat.1")
    await broadcast(server, "chat.1", slice(None, 250))
    await node.subscribe("late", "chat.1")
    await broadcast(server, "chat.1", slice(250, None))
    for client in ("early", "late"):
        await node.seen(client=client, event="stream_end")
        assert shown(node, client) == TEXT
    await node.subscribe("reloaded", "chat.1")
    await node.seen(client="reloaded", event="stream_end")
    names = [news["event"] for news in node.matching(client="reloaded", channel="chat.1")]
    names = [name for name in names if not name.startswith("pusher:")]
    # 24 KB of text in events of at most 10 KB.
    assert names == [
        "stream_start",
        "text_start",
        *["text_delta"] * names.count("text_delta"),
        "text_end",
        "stream_end",
    ]
    assert names.count("text_delta") <= -(-len(json.dumps(TEXT)) // 9_000)
    assert shown(node, "reloaded") == TEXT


async def test_a_cut_reader_gets_each_piece_once(server: Server) -> None:
    position: dict[str, Any] | None = None
    received, offset, cuts = "", 0, 0
    publishing = asyncio.ensure_future(broadcast(server, "chat.2"))
    while True:
        socket = await Socket.connect(server, query="protocol=7&recover=1")
        since = {} if position is None else {"since": {"epoch": position["epoch"], "offset": offset}}
        data = {"channel": "chat.2", **({"rewind": {"count": 900}} if position is None else since)}
        socket.send({"event": "pusher:subscribe", "data": data})
        success = json.loads((await socket.next("pusher_internal:subscription_succeeded"))["data"])
        assert success.get("recovered", True)
        position = position or success
        offset = offset or success["offset"]
        until, over = len(received) + len(TEXT) // 12, False
        while len(received) < until and not over:
            frame = await socket.next()
            # The end may have come already, behind pieces that are still to be read.
            over = frame["event"] == "stream_end"
            if frame.get("channel") == "chat.2" and "offset" in frame:
                offset = frame["offset"]
                if frame["event"] == "text_delta":
                    received += json.loads(frame["data"])["delta"]
        if over or received == TEXT:
            break
        cuts += 1
        socket.abort()
    await publishing
    assert received == TEXT
    assert cuts


async def test_the_413_says_how_to_raise_the_limit(server: Server) -> None:
    async with asyncio.timeout(60):
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(request(server, "chat.3", "tool_result", {"result": "x" * 11_000}))
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 413 ")
        length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
        sentence = (await reader.readexactly(length)).decode()
        assert f"redpoll app set {server.app_id} max_data_bytes=N" in sentence
        done = CliRunner().invoke(
            main, ["app", "set", server.app_id, "max_data_bytes=262144", "--data-dir", str(server.folder / "data")]
        )
        assert done.exit_code == 0

        async def answered() -> bool:
            writer.write(request(server, "chat.3", "tool_result", {"result": "x" * 11_000}))
            head = await reader.readuntil(b"\r\n\r\n")
            length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
            await reader.readexactly(length)
            return head.startswith(b"HTTP/1.1 200 ")

        await eventually(answered, True)
        writer.close()
