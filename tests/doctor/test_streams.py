"""`redpoll doctor URL` reads a channel over HTTP, through proxies too."""

import aiohttp
import pytest

from helpers.broken_proxy import BrokenProxy
from helpers.reading import keep
from helpers.server import Server
from redpoll.doctor.report import Finding, Verdict
from redpoll.doctor.streams import examine_stream
from redpoll.doctor.target import Target, parse


@pytest.fixture(scope="module")
def server():
    with Server(workers=1) as running:
        keep(running, "kept-")
        yield running


async def examine(target: Target, channel: str = "kept-a", *, chosen: bool = True, wait_s: float = 60) -> Finding:
    async with aiohttp.ClientSession() as session:
        return await examine_stream(session, target, channel, chosen=chosen, wait_s=wait_s)


async def test_stream_that_begins_is_good(server):
    assert (await examine(parse(server.pusher_url))).verdict is Verdict.OK


async def test_proxy_that_collects_answers_is_named(server):
    async with BrokenProxy(server.port, collects=b"/stream") as proxy:
        found = await examine(parse(server.pusher_url)._replace(port=proxy.port), wait_s=0.5)
    assert found.verdict is Verdict.FAILED
    assert "proxy" in found.cause


async def test_channel_without_history_is_skipped_unless_it_was_named(server):
    assert (await examine(parse(server.pusher_url), "other", chosen=False)).verdict is Verdict.SKIPPED
    found = await examine(parse(server.pusher_url), "other")
    assert found.verdict is Verdict.FAILED
    assert "redpoll history rule add" in " ".join(found.remedy)


async def test_nothing_is_read_without_a_secret(server):
    target = parse(f"ws://127.0.0.1:{server.port}/app/{server.app_key}")
    assert (await examine(target)).verdict is Verdict.SKIPPED


async def test_wrong_secret_is_shown(server):
    found = await examine(parse(server.pusher_url)._replace(secret="wrong"))
    assert found.verdict is Verdict.FAILED
    assert found.seen.startswith("401")


async def test_server_without_streams_is_no_fault(server):
    """Other servers than redpoll answer 404."""
    target = parse(server.pusher_url)._replace(prefix="/elsewhere")
    assert (await examine(target, chosen=False)).verdict is Verdict.SKIPPED
    assert (await examine(target)).verdict is Verdict.FAILED
