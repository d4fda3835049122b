"""A server that says it isn't ready, or is no server for clients, ends the check there."""

import asyncio

import aiohttp

from helpers.proxy import Proxy as RedisProxy
from helpers.server import Server
from helpers.wire import eventually
from redpoll.doctor.readiness import check_readiness
from redpoll.doctor.report import Finding, Verdict
from redpoll.doctor.target import Target


async def readiness(port: int) -> Finding:
    async with asyncio.timeout(60), aiohttp.ClientSession() as session:
        finding = await check_readiness(session, Target("127.0.0.1", port, False, "app-key"))
        assert finding is not None
        return finding


async def test_the_control_port_is_named():
    """The newcomer has it in the browser's address line."""
    with Server(workers=1) as server:
        assert "control port" in (await readiness(server.control_port)).cause
        assert (await readiness(server.port)).verdict is Verdict.OK


async def test_an_unreachable_redis_is_named(redis_server):
    with (
        RedisProxy(redis_server.path) as redis,
        Server(workers=1, redis_url=redis.url, redis_prefix="doctor") as server,
    ):
        redis.stall()
        async with aiohttp.ClientSession() as session:

            async def status() -> int:
                async with session.get(f"http://127.0.0.1:{server.port}/readyz") as response:
                    return response.status

            await eventually(status, 503)
        finding = await readiness(server.port)
        redis.resume()
    assert finding.verdict is Verdict.FAILED
    assert "503" in finding.seen
    assert "can't reach its Redis" in finding.cause
