"""Clients of the Durable Streams protocol read channels, and the reading tests of its conformance package pass.

The conformance package writes what it reads. tests/clients/durable_adapter.py turns its writes into publishes.
"""

import asyncio
import json
from pathlib import Path

import httpx
import pytest
from click.testing import CliRunner
from durable_streams import astream

from clients.durable_adapter import adapter
from clients.durable_readers import NODE, javascript
from helpers.reading import keep, read_token
from helpers.server import Server
from helpers.wire import Api
from redpoll.cli import main

HERE = Path(__file__).parent
PACKAGE = HERE / "node_modules" / "@durable-streams"

pytestmark = pytest.mark.skipif(not PACKAGE.is_dir(), reason="run `npm ci` in tests/clients first")

_WRITES = "it tests writing: redpoll publishes events, by Pusher's API"
_EXISTS = "channels always exist, so they are not 404; the adapter would be tested"
_BINARY = "data of events is text, so there are no binary streams"
_TEXT = "in JSON mode the text is a string within JSON, which the test doesn't expect"
# The reading tests that don't apply, or groups of tests, and why. Names are those of the package.
NOT_FOR_US = {
    "Basic Stream Operations": _WRITES,
    "Append Operations": _WRITES,
    "TTL and Expiry Validation": "redpoll stores messages by the app's rules, not by a stream's header",
    "TTL and Expiry Edge Cases": "as above",
    "TTL Expiration Behavior": "as above",
    "Case-Insensitivity": _WRITES,
    "Content-Type Validation": _WRITES,
    "Idempotent Producer Operations": _WRITES,
    "Reserved subscription APIs": "webhooks are those of Pusher's protocol",
    "HTTP Protocol > should return correct headers on PUT": _WRITES,
    "HTTP Protocol > should return 200 on idempotent PUT": _WRITES,
    "HTTP Protocol > should return 409 on PUT": _WRITES,
    "HTTP Protocol > should return correct headers on POST": _WRITES,
    "HTTP Protocol > should return 404 on POST": _WRITES,
    "HTTP Protocol > should return 409 on content-type": _WRITES,
    "HTTP Protocol > should return 404 on DELETE": _WRITES,
    "HTTP Protocol > should return 204 on successful DELETE": _WRITES,
    "HTTP Protocol > should enforce": _WRITES,
    "HTTP Protocol > should allow lexicographic seq": _WRITES,
    "HTTP Protocol > should reject duplicate seq": _WRITES,
    "Browser Security Headers > should include X-Content-Type-Options: nosniff on PUT": _WRITES,
    "Browser Security Headers > should include X-Content-Type-Options: nosniff on POST": _WRITES,
    "Browser Security Headers > should include security headers on error responses": _EXISTS,
    "HEAD Metadata > should return 404": _EXISTS,
    "Offset Validation and Resumability > should return 404": _EXISTS,
    "HEAD Metadata Edge Cases": "redpoll stores messages by the app's rules, not by a stream's header",
    "Protocol Edge Cases > should reject empty POST": _WRITES,
    "Protocol Edge Cases > should handle PUT": _WRITES,
    "Protocol Edge Cases > should enforce case-sensitive seq": _WRITES,
    "Protocol Edge Cases > should handle binary data": _BINARY,
    "Protocol Edge Cases > should return Location": _WRITES,
    "Protocol Edge Cases > should reject missing Content-Type": _WRITES,
    "Protocol Edge Cases > should accept PUT": _WRITES,
    "Chunking and Large Payloads": _BINARY,
    "SSE Mode > should handle newlines in text/plain": _TEXT,
    "SSE Mode > should prevent CRLF injection in payloads": _TEXT,
    "SSE Mode > base64 SSE catch-up": _BINARY,
    "SSE Mode > should auto-detect": _BINARY,
    "SSE Mode > should include Stream-SSE-Data-Encoding": _BINARY,
    "SSE Mode > should base64 encode": _BINARY,
    "SSE Mode > should handle empty binary": _BINARY,
    "SSE Mode > should handle large binary": _BINARY,
    "SSE Mode > should handle binary": _BINARY,
    "SSE Mode > should handle offset=now with auto-detected base64": _BINARY,
    "JSON Mode > should reject": _WRITES,
    "JSON Mode > should allow PUT": _WRITES,
    "Property-Based Tests (fast-check) > Byte-Exactness Property": _BINARY,
    "Property-Based Tests (fast-check) > Operation Sequence Properties": _BINARY,
    "Property-Based Tests (fast-check) > Sequence Ordering Properties": _WRITES,
    "Property-Based Tests (fast-check) > Concurrent Writer Stress Tests": _WRITES,
    "Stream Closure > Create with Stream-Closed": _WRITES,
    "Stream Closure > Close Operations": _WRITES,
    "Stream Closure > Idempotent Producers with Stream Closure": _WRITES,
    "Stream Closure > Edge Cases > 409": _WRITES,
    "Stream Closure > Edge Cases > close": _WRITES,
    "Stream Closure > Edge Cases > producer": _WRITES,
    "Stream Closure > Edge Cases > empty": _WRITES,
    "Stream Closure > Edge Cases > delete": _WRITES,
    "Fork": "redpoll has no copies of streams",
}


@pytest.fixture(scope="module")
def server():
    """Two workers; the app keeps 10,000 messages of `kept-…`."""
    with Server(workers=2) as running:
        keep(running, "kept-", keep=10_000)
        settings = ["max_data_bytes=262144", "max_history_channels=100000"]
        words = ["app", "set", running.app_id, *settings, "--data-dir", str(running.folder / "data")]
        assert CliRunner().invoke(main, words).exit_code == 0
        running.token = read_token(running)
        yield running


async def conformance(url: str, names: list[str] | None = None) -> list[dict]:
    """Runs these tests, or lists all."""
    process = await asyncio.create_subprocess_exec(
        NODE, HERE / "conformance.mjs", url, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
    )
    async with asyncio.timeout(200):
        output, _ = await process.communicate(b"" if names is None else json.dumps(names).encode())
    return [json.loads(line) for line in output.decode().splitlines()]


async def test_reading_tests_of_the_conformance_package_pass(server):
    async with adapter(server, server.token, "kept-") as url:
        names = [found["name"] for found in await conformance(url)]
        unused = [begin for begin in NOT_FOR_US if not any(name.startswith(begin) for name in names)]
        assert unused == []
        ours = [name for name in names if not name.startswith(tuple(NOT_FOR_US))]
        assert len(ours) > 80
        outcomes = await conformance(url, ours)
    assert [found["error"] for found in outcomes if not found["ok"]] == []
    assert {found["name"] for found in outcomes} == set(ours)


def address(server: Server, channel: str) -> str:
    return f"{server.public_url}/apps/{server.app_id}/channels/{channel}/stream"


@pytest.mark.parametrize("live", ["sse", "long-poll"])
async def test_javascript_client_reads_and_resumes(server, live):
    channel = f"kept-js-{live}"
    async with Api(server) as api:
        await api.publish(channel, "n", "1")
        reader = javascript(address(server, channel), server.token, "-1", live)
        first = await anext(reader)
        assert first["item"]["data"] == "1"
        for number in range(2, 5):
            await api.publish(channel, "n", str(number))
        assert [(await anext(reader))["item"]["data"] for _ in range(3)] == ["2", "3", "4"]
        await reader.aclose()
        await api.publish(channel, "n", "5")
        # From where the first batch ended, to the end of the channel.
        again = javascript(address(server, channel), server.token, first["offset"], live)
        assert [(await anext(again))["item"]["data"] for _ in range(4)] == ["2", "3", "4", "5"]
        await api.publish(channel, "n", "6", end=True)
        assert (await anext(again))["item"]["data"] == "6"
        assert await anext(again) == {"closed": True}


@pytest.mark.parametrize("live", ["sse", "long-poll"])
async def test_python_client_reads_and_resumes(server, live):
    channel = f"kept-py-{live}"
    url = address(server, channel)
    headers = {"Authorization": f"Bearer {server.token}"}
    # Without certificates, which it would load at once (tests/conftest.py).
    async with Api(server) as api, httpx.AsyncClient(verify=False, timeout=60) as client:
        for number in range(3):
            await api.publish(channel, "n", str(number))
        async with astream(url, client=client, headers=headers, offset="-1", live=False) as found:
            stored = await found.read_json()
            position = found.offset
        assert [message["data"] for message in stored] == ["0", "1", "2"]
        await api.publish(channel, "n", "3")
        async with astream(url, client=client, headers=headers, offset=position, live=live) as found:
            items = aiter(found.iter_json())
            assert (await asyncio.wait_for(anext(items), 60))["data"] == "3"
            await api.publish(channel, "n", "4")
            assert (await asyncio.wait_for(anext(items), 60))["data"] == "4"
