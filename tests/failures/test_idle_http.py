"""As many idle HTTP connections as there are descriptors (deploy/failures.md "Out of descriptors")."""

import asyncio
import contextlib
import json
import resource
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any

from helpers.server import Server
from helpers.wire import Api, connect_patiently, eventually

HEALTH = b"GET /healthz HTTP/1.1\r\nHost: h\r\n\r\n"


class Idle(asyncio.Protocol):
    """A keep-alive connection that sent one request and then does nothing."""

    def __init__(self, answered: Callable[[], None]) -> None:
        self._answered = answered
        self.answer = b""
        self.lost = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport
        transport.write(HEALTH)  # type: ignore[attr-defined]

    def data_received(self, data: bytes) -> None:
        self.answer += data
        if self.answer.endswith((b"}", b"OK")):
            self._answered()

    def connection_lost(self, error: Exception | None) -> None:
        self.lost = True


@contextlib.contextmanager
def as_many_files_as_allowed() -> Iterator[None]:
    """In this process, and in no test after this one."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (before[1], before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


async def test_idle_http_connections_take_nothing_from_the_api_the_dashboard_or_redis(
    size: Callable[[int, int], int], figures: Any
) -> None:
    """Under a limit of as many descriptors as connections come, for every process of the server."""
    limit = size(600, 20_000)
    with Server(workers=1, files=(limit, limit)) as server, as_many_files_as_allowed():
        held: list[Idle] = []
        loop = asyncio.get_running_loop()
        source = 0

        async def come() -> None:
            nonlocal source
            source += 1
            answered = asyncio.Event()
            # Each address of the client has its own range of ports.
            local = (f"127.0.0.{2 + source % 8}", 0)
            with contextlib.suppress(OSError, TimeoutError):
                async with asyncio.timeout(60):
                    _, idle = await loop.create_connection(
                        lambda: Idle(answered.set), "127.0.0.1", server.port, local_addr=local
                    )
                    held.append(idle)
                    await answered.wait()

        async def works(channel: str) -> None:
            """A publish reaches a new client; the dashboard and the metrics answer."""
            client = await connect_patiently(server)
            await client.subscribe(channel)
            async with Api(server, connections=1) as api:
                await api.publish(channel, "word", "{}")
                assert await api.subscription_count(channel) == 1
            await client.next("word", channel)
            await client.close()
            assert server.metrics()
            page = await asyncio.to_thread(urllib.request.urlopen, f"{server.control_url}/dashboard", timeout=60)
            assert page.status == 200
            page.close()
            ready = await asyncio.to_thread(urllib.request.urlopen, f"{server.control_url}/readyz", timeout=60)
            assert json.loads(ready.read())["status"] == "ready"
            ready.close()

        for start in range(0, limit, 200):
            await asyncio.gather(*(come() for _ in range(min(200, limit - start))))
        staying = sum(not idle.lost for idle in held)
        await works("crowded")
        # All processes connect to Redis again while the descriptors are taken.
        with server.redis() as client:
            client.client_kill_filter(_type="normal", skipme=True)
            client.client_kill_filter(_type="pubsub", skipme=True)

        async def is_back() -> bool:
            async with Api(server, connections=1) as api:
                status, _ = await api.ask("POST", "/events", {"name": "e", "channels": ["c"], "data": ""})
            return status == 200

        await eventually(is_back, True)
        await works("after-redis")
        figures.note("Out of descriptors", f"limit {limit}: idle HTTP connections that came", len(held), "")
        figures.note("Out of descriptors", f"limit {limit}: of these, left open", staying, "")
        assert staying > 0
        for idle in held:
            if not idle.lost:
                idle.transport.abort()  # type: ignore[attr-defined]
