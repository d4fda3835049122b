"""`redpoll fake`, as a suite in another language uses it."""

import asyncio
import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest
from click.testing import CliRunner

from helpers.wire import Api, Socket
from redpoll.cli import main


@pytest.fixture
def fake() -> Iterator[Any]:
    command = [sys.executable, "-m", "redpoll", "fake", "--port", "0", "--app", "7:the-key:the:secret", "--json"]
    with subprocess.Popen([*command, "--set", "client_events=false"], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        ready = json.loads(process.stdout.readline())
        assert ready["pusher_url"].startswith("http://the-key:the%3Asecret@127.0.0.1:")
        yield SimpleNamespace(port=ready["port"], app_id="7", app_key="the-key", app_secret="the:secret")
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0


async def test_it_serves_clients_back_ends_and_the_suite(fake: Any) -> None:
    client = await Socket.connect(fake)
    await client.subscribe("private-a")
    client.send({"event": "client-x", "channel": "private-a", "data": {}})
    assert (await client.next("pusher:error"))["data"]["code"] == 4301
    async with Api(fake) as api, aiohttp.ClientSession(f"http://127.0.0.1:{fake.port}") as http:
        await api.publish(["private-a", "b"], "paid", '{"id":1}')
        assert (await client.next("paid"))["data"] == '{"id":1}'
        async with http.get("/fake/published", params={"channel": "b"}) as answer:
            (event,) = (await answer.json())["published"]
            assert (event["name"], event["data"], event["sender"]) == ("paid", '{"id":1}', None)
        async with http.post("/fake/reset") as answer:
            assert await answer.json() == {}
        async with http.get("/fake/published") as answer:
            assert await answer.json() == {"published": []}
    await client.close()
    await asyncio.sleep(0)


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["--host", "0.0.0.0"], 2, "with --expose"),
        (["--app", "1:key"], 2, "ID:KEY:SECRET"),
        (["--expose", "--host", "a..b"], 1, "host must be an address or a host name, not 'a..b'"),
        (["--set", "nothing=1"], 1, "there is no setting 'nothing'"),
        (["--set", "watchlist"], 1, "NAME=VALUE"),
        (["--app", "1:key:"], 1, "app_secret must be"),
    ],
)
def test_what_cannot_be_meant_is_refused(arguments: list[str], code: int, said: str) -> None:
    result = CliRunner().invoke(main, ["fake", "--port", "0", *arguments])
    assert (result.exit_code, said in result.output) == (code, True), result.output
