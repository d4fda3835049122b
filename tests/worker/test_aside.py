"""A worker that its supervisor takes out of service, and back."""

import asyncio

import pytest
import websockets

from redpoll.cluster.membership.connection_state import Reach
from redpoll.ipc.messages import FROM_CHILD, ClientsLeft, EndService, ReturnToService, encode


async def clients_left(worker) -> ClientsLeft:
    """What the worker says of its clients to its supervisor."""
    worker.supervisor.setblocking(False)
    heard = b""
    async with asyncio.timeout(60):
        while b"ClientsLeft" not in heard or not heard.endswith(b"\n"):
            heard += await asyncio.get_running_loop().sock_recv(worker.supervisor, 65_536)
    (said,) = (message for message in map(FROM_CHILD.decode, heard.splitlines()) if isinstance(message, ClientsLeft))
    return said


async def test_clients_are_closed_with_4200_and_none_is_admitted_until_the_worker_is_back(
    bench, wait_until, monkeypatch
):
    worker = await bench.start()
    drained = []

    async def drain(within_s):
        drained.append(within_s)

    # Who reads channels over HTTP needs a control plane; tests/worker/streams has its drain.
    monkeypatch.setattr(worker.gate.streams, "drain", drain)
    clients = [await bench.client(worker) for _ in range(3)]
    worker.link.drop("for the test")
    worker.supervisor.sendall(encode(EndService()))
    assert await asyncio.gather(*(client.closed_with() for client in clients)) == [4200] * 3
    assert await clients_left(worker) == ClientsLeft(all=True)
    assert drained == [0.5]
    # Also when it is subscribed again: it doesn't decide that.
    await wait_until(lambda: worker.registry.reach is Reach.SUBSCRIBED)
    with pytest.raises(websockets.InvalidStatus) as refused:
        await bench.client(worker)
    assert refused.value.response.status_code == 503
    worker.supervisor.sendall(encode(ReturnToService()))
    await wait_until(lambda: not worker.aside.on)
    await bench.client(worker)


async def test_worker_that_is_subscribed_keeps_its_clients(bench, wait_until):
    worker = await bench.start()
    client = await bench.client(worker)
    await wait_until(lambda: worker.registry.reach is Reach.SUBSCRIBED)
    worker.supervisor.sendall(encode(EndService()))
    assert await clients_left(worker) == ClientsLeft(all=False)
    await client.nothing_more()
    await bench.client(worker)
