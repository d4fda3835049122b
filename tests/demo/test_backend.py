import asyncio
import json
import math
import os
import re
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web

from helpers.ports import reserved_ports
from helpers.server import APP_ID, APP_KEY, APP_SECRET, Server
from helpers.wire import Socket
from redpoll.demo.backend import CHAT, Account, AddressError, Backend, PublishError, account_of, listen
from redpoll.protocol import auth
from redpoll.protocol.apps import App, Key

EXAMPLES = Path(__file__).parent.parent.parent / "deploy" / "examples"
ACCOUNT = Account("127.0.0.1", 6001, False, "1001", "0123456789abcdefabcd", "a secret")


@asynccontextmanager
async def served(backend: Backend) -> AsyncIterator[str]:
    runner, port = await listen(backend.application(), "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        await runner.cleanup()


def test_address_of_an_app():
    assert account_of("https://k:a%2Fb@ws.example.com/soketi/apps/42") == Account(
        "ws.example.com", 443, True, "42", "k", "a/b", "/soketi"
    )
    for wrong in (
        "",
        "ws://k:s@h/apps/1",
        "http://h/apps/1",
        "http://k:s@h:x/apps/1",
        "http://k:s@h/1",
        "http://k:s@h/apps/",
    ):
        with pytest.raises(AddressError, match=r"expected http\[s\]://"):
            account_of(wrong)


async def test_subscriptions_are_signed_for_the_examples_channels_only():
    async with served(Backend(ACCOUNT, {})) as url, aiohttp.ClientSession() as http:
        asked = {"socket_id": "12.34", "channel_name": CHAT, "user": "5"}
        async with http.post(f"{url}/auth", data=asked) as reply:
            signed = await reply.json()
        app = App(id="1001", name="demo", keys=(Key(key=ACCOUNT.key, secret=ACCOUNT.secret),))
        assert auth.channel_fault(app, "12.34", CHAT, signed["auth"], signed["channel_data"]) is None
        user = json.loads(signed["channel_data"])
        assert user["user_id"] == user["user_info"]["id"]
        for other in ({"channel_name": "private-other"}, {"socket_id": "1.2:user"}, {"socket_id": ""}):
            async with http.post(f"{url}/auth", data={**asked, **other}) as reply:
                assert reply.status == 403


async def test_pages_of_other_sites_are_refused():
    async with served(Backend(ACCOUNT, {"index.html": b"page"})) as url, aiohttp.ClientSession() as http:
        async with http.get(f"{url}/") as reply:
            assert await reply.text() == "page"
            assert "connect-src 'self' ws://127.0.0.1:6001;" in reply.headers["Content-Security-Policy"]
        # A name of another site that leads here.
        async with http.get(f"{url}/", headers={"Host": "rebound.example.com"}) as reply:
            assert reply.status == 403
        async with http.post(f"{url}/say", data={"text": "x"}, headers={"Origin": "http://other.example.com"}) as reply:
            assert reply.status == 403


@pytest.mark.parametrize("method", ["GET", "POST"])
@pytest.mark.parametrize(
    ("host", "origin"),
    [
        ("[::1", None),
        ("a b", None),
        ("127.0.0.1:port", None),
        ("127.0.0.1:99999", None),
        ("\xff\xfe", None),
        ("", None),
        ("127.0.0.1", "http://[::1"),
        ("127.0.0.1", "http://]"),
        ("127.0.0.1", "http://\u2100.example.com"),
        ("127.0.0.1", "null"),
    ],
)
async def test_header_fields_that_no_browser_sends_are_no_error_of_ours(host, origin, method):
    async with served(Backend(ACCOUNT, {"index.html": b"page"})) as url:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
        lines = [f"{method} / HTTP/1.1", f"Host: {host}", "Content-Length: 0", "Connection: close"]
        lines += [f"Origin: {origin}"] if origin is not None else []
        writer.write("\r\n".join([*lines, "", ""]).encode("utf-8"))
        status = int((await reader.read()).split(b" ")[1])
        writer.close()
    # An address in a form that is nearly right counts, and a GET asks for nothing that an Origin could be refused for.
    assert status in ((200, 400, 403) if method == "GET" else (400, 403, 405))


async def test_publish_is_repeated_with_the_same_correlation_id_until_it_is_accepted():
    app = App(id="1001", name="demo", keys=(Key(key=ACCOUNT.key, secret=ACCOUNT.secret),))
    received = []

    async def events(request: web.Request) -> web.Response:
        body = await request.read()
        auth.check_query(app, "POST", request.path, request.query_string, body, float(request.query["auth_timestamp"]))
        received.append(json.loads(body))
        return web.Response(status=(503, 429, 200, 400)[len(received) - 1], headers={"Retry-After": "0"})

    application = web.Application()
    application.router.add_post("/apps/1001/events", events)
    runner, port = await listen(application, "127.0.0.1", 0)
    backend = Backend(ACCOUNT._replace(port=port), {})
    try:
        async with served(backend):
            await backend.publish("news", "hello", {"a": 1})
            assert len({body["correlation_id"] for body in received}) == 1
            assert received[0] | {"correlation_id": ""} == {
                "name": "hello",
                "channel": "news",
                "data": '{"a": 1}',
                "correlation_id": "",
            }
            with pytest.raises(PublishError, match="answered 400"):
                await backend.publish("news", "hello", {})
    finally:
        await runner.cleanup()


async def test_a_refusal_that_differs_only_in_its_trace_id_is_printed_once(capfd, monkeypatch):
    monkeypatch.setattr("redpoll.demo.backend._TICK_EVERY_S", 0.0)
    refused, enough = [], asyncio.Event()

    async def events(_request: web.Request) -> web.Response:
        refused.append(len(refused))
        if len(refused) > 3:
            enough.set()
        return web.json_response({"error": "no such app", "trace_id": f"{refused[-1]:032x}"}, status=401)

    application = web.Application()
    application.router.add_post("/apps/1001/events", events)
    runner, port = await listen(application, "127.0.0.1", 0)
    try:
        async with served(Backend(ACCOUNT._replace(port=port), {"ticker.js": b""})), asyncio.timeout(60):
            await enough.wait()
    finally:
        await runner.cleanup()
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith(f"not published: 127.0.0.1:{port} answered 401: ")


async def test_a_server_that_was_never_there_is_reported_while_publishing_is_tried(monkeypatch):
    monkeypatch.setattr("redpoll.demo.backend._PUBLISH_WITHIN_S", math.inf)
    with reserved_ports(1) as [port]:
        backend, reported = Backend(ACCOUNT._replace(port=port), {"ticker.js": b""}), asyncio.Queue()
        monkeypatch.setattr(backend, "_report", reported.put_nowait)
        async with served(backend), asyncio.timeout(60):
            error = await reported.get()
    assert str(error).startswith(f"127.0.0.1:{port} can't be reached: ")


async def test_each_example_runs_from_a_copy_of_its_folder():
    with Server(workers=1, trigger_rate_per_minute=0) as server:
        url = f"http://{APP_KEY}:{APP_SECRET}@127.0.0.1:{server.port}/apps/{APP_ID}"
        socket = await Socket.connect(server)
        await socket.subscribe("demo-ticker")
        await socket.subscribe("demo-text")
        for name in ("ticker", "text"):
            # Without redpoll on the path, as on another machine.
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-P",
                EXAMPLES / name / "backend.py",
                url,
                "--port",
                "0",
                stdout=subprocess.PIPE,
                env={"PATH": os.environ["PATH"]},
            )
            assert process.stdout is not None
            try:
                found = re.search(r"open (\S+)", (await process.stdout.readline()).decode())
                assert found is not None
                async with aiohttp.ClientSession() as http, http.get(found[1]) as reply:
                    assert f"{name}.js" in await reply.text()
                event = "price" if name == "ticker" else "begin"
                await socket.next(event)
            finally:
                process.terminate()
                await process.wait()
        await socket.close()
