"""Both ways into control."""

import asyncio

import pytest


async def test_the_public_port_has_the_api_and_health_but_no_metrics(plane, workers_request, sign):
    for path, status in (("/healthz", 200), ("/", 200), ("/readyz", 200), ("/metrics", 404), ("/dashboard", 404)):
        assert (await workers_request("GET", path)).status == status
    body = b'{"name":"e","channel":"c","data":""}'
    reply = await workers_request("POST", sign("POST", "/api/v1/apps/3/events", body), body)
    assert (reply.status, reply.body) == (200, b"{}")


async def test_after_finish_neither_way_takes_a_request(plane, connect, workers_request, tmp_path):
    await plane.plane.entrance.finish()
    with pytest.raises(ConnectionRefusedError):
        await connect(plane.port)
    with pytest.raises(OSError, match=r"No such file|refused"):
        await asyncio.open_unix_connection(str(tmp_path / "requests.sock"))
