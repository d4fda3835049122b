"""The doctor's check of the HTTP fallback, through proxies that do what real ones do."""

import asyncio
import ssl
from collections.abc import Callable
from contextlib import asynccontextmanager

import aiohttp
import pytest
from aiohttp import web

from helpers.server import Server
from redpoll.config.remedies import remedy_for_buffering
from redpoll.doctor.fallback import check_fallback
from redpoll.doctor.report import Finding, Verdict
from redpoll.doctor.target import Target


@pytest.fixture(scope="module")
def server():
    with Server(workers=1) as running:
        yield running


async def check(port: int, key: str, *, is_redpoll: bool = True, prefix: str = "", stream_s: float = 60.0) -> Finding:
    target = Target("127.0.0.1", port, False, key, prefix=prefix)
    connector = aiohttp.TCPConnector(force_close=True, ssl=ssl.create_default_context())
    async with asyncio.timeout(60), aiohttp.ClientSession(connector=connector) as session:
        return await check_fallback(session, target, "nginx", is_redpoll=is_redpoll, stream_s=stream_s)


Change = Callable[[web.Request], bool]


@asynccontextmanager
async def proxy(server: Server, *, holds: Change = lambda request: False, hides: Change = lambda request: False):
    """Passes requests on, and answers 404 to those that it `hides`. Of those that it `holds`, the answer comes when it
    is whole."""

    async def pass_on(request: web.Request) -> web.StreamResponse:
        if hides(request):
            return web.Response(status=404)
        async with (
            aiohttp.ClientSession() as session,
            session.request(
                request.method,
                f"http://127.0.0.1:{server.port}{request.path_qs}",
                headers=request.headers,
                data=await request.read(),
            ) as response,
        ):
            kept = ("Content-Type", "Access-Control-Allow-Origin")
            headers = {name: response.headers[name] for name in kept if name in response.headers}
            if holds(request):
                return web.Response(status=response.status, headers=headers, body=await response.read())
            answer = web.StreamResponse(status=response.status, headers=headers)
            await answer.prepare(request)
            async for part in response.content.iter_any():
                await answer.write(part)
            return answer

    application = web.Application()
    application.router.add_route("*", "/{path:.*}", pass_on)
    runner = web.AppRunner(application, shutdown_timeout=0.1)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield runner.addresses[0][1]
    finally:
        await runner.cleanup()


async def test_server_passes(server):
    assert (await check(server.port, server.app_key)).verdict is Verdict.OK
    assert (await check(server.port, server.app_key, prefix="/a/prefix")).verdict is Verdict.OK
    async with proxy(server) as port:
        assert (await check(port, server.app_key)).verdict is Verdict.OK


async def test_refused_client_reaches_it_all_the_same(server):
    assert (await check(server.port, "unknown")).verdict is Verdict.OK


async def test_proxy_that_buffers_is_named_with_its_lines(server):
    async with proxy(server, holds=lambda request: request.path.endswith("xhr_streaming")) as port:
        # However long it waits, nothing comes.
        finding = await check(port, server.app_key, stream_s=0.5)
    assert finding.verdict is Verdict.WARNING
    assert "nginx buffers responses" in finding.cause
    assert finding.remedy == remedy_for_buffering("nginx")
    assert any("proxy_buffering off" in line for line in finding.remedy)


async def test_path_that_is_not_forwarded_is_named(server):
    async with proxy(server, hides=lambda request: request.path.startswith("/pusher/")) as port:
        finding = await check(port, server.app_key)
        assert finding.verdict is Verdict.WARNING
        assert "doesn't forward /pusher/" in finding.cause
        assert (await check(port, server.app_key, is_redpoll=False)).verdict is Verdict.SKIPPED


async def test_posts_that_are_not_forwarded_are_named(server):
    async with proxy(server, hides=lambda request: request.method == "POST") as port:
        finding = await check(port, server.app_key)
    assert finding.verdict is Verdict.WARNING
    assert "doesn't forward POST /pusher/" in finding.cause
