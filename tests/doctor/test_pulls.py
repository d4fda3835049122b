"""`redpoll doctor URL` checks webhooks by pull, through proxies too, and takes no delivery."""

import asyncio

import aiohttp
import pytest

from helpers.broken_proxy import BrokenProxy
from helpers.pulled_server import acknowledge, occupying, pull, pulled_server
from helpers.server import Server
from helpers.wire import Api
from redpoll.doctor.pulls import examine_pulls
from redpoll.doctor.report import Finding, Verdict
from redpoll.doctor.target import Target, parse
from redpoll.worker.streams.pulls import MAX_PULLS_OF_APP


@pytest.fixture(scope="module")
def server():
    with pulled_server(lease_s=600) as running:
        yield running


async def examine(target: Target, patience_s: float = 1, begin_s: float = 60) -> Finding:
    # As the doctor's: each request has its own connection.
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True)) as session:
        return await examine_pulls(session, target, patience_s, begin_s=begin_s)


async def test_good_server_keeps_its_deliveries(server):
    async with Api(server) as api, occupying(server) as occupy:
        channel = await occupy()
        for patience_s, seen in ((1, "waited"), (0, "wasn't tried")):
            found = await examine(parse(server.pusher_url), patience_s)
            assert found.verdict is Verdict.OK
            assert seen in found.seen
        (delivery,) = await pull(api, wait="60")
        assert (delivery["channel"], delivery["attempt"]) == (channel, 1)
        assert await acknowledge(api, [delivery]) == 1


async def test_proxy_that_ends_waiting_requests_is_named(server):
    # Long enough that a slow machine makes no such pause in the other steps.
    async with BrokenProxy(server.port, idle_s=12) as proxy:
        found = await examine(parse(server.pusher_url)._replace(port=proxy.port), 30)
    assert found.verdict is Verdict.FAILED
    assert "waits ended" in found.seen
    assert "proxy" in found.cause


async def test_proxy_that_collects_answers_is_named(server):
    async with BrokenProxy(server.port, collects=b"event-stream") as proxy:
        found = await examine(parse(server.pusher_url)._replace(port=proxy.port), begin_s=0.5)
    assert found.verdict is Verdict.WARNING
    assert "proxy" in found.cause


async def test_what_cannot_be_checked_is_skipped(server):
    target = parse(f"ws://127.0.0.1:{server.port}/app/{server.app_key}")
    assert (await examine(target)).verdict is Verdict.SKIPPED
    # Other servers than redpoll answer 404.
    assert "this server" in (await examine(parse(server.pusher_url)._replace(prefix="/elsewhere"))).seen
    with Server(workers=1) as other:
        found = await examine(parse(other.pusher_url))
        assert (found.verdict, found.seen) == (Verdict.SKIPPED, "no webhook of this app is pulled")


async def test_wrong_secret_is_shown(server):
    found = await examine(parse(server.pusher_url)._replace(secret="wrong"))
    assert found.verdict is Verdict.FAILED
    assert found.seen.startswith("401")


async def test_bound_of_waiting_requests_is_no_fault(server):
    async with Api(server, connections=100) as api:
        asked = [api.ask("GET", "/webhooks/stream", params={"wait": "60"}) for _ in range(MAX_PULLS_OF_APP + 1)]
        waiting = [asyncio.create_task(one) for one in asked]
        assert (await next(asyncio.as_completed(waiting)))[0] == 429
        found = await examine(parse(server.pusher_url))
        assert (found.verdict, "429" in found.seen) == (Verdict.WARNING, True)
        for one in waiting:
            one.cancel()
