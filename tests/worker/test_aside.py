"""A worker that its supervisor takes out of service, and back."""

import asyncio

import pytest
import websockets

from redpoll.cluster.membership.connection_state import Reach
from redpoll.ipc.messages import ClientsLeft, EndService, ReturnToService


async def test_clients_are_closed_with_4200_and_none_is_admitted_until_the_worker_is_back(
    bench, wait_until, monkeypatch
):
    worker = await bench.start()
    said, drained = [], []

    async def drain(within_s):
        drained.append(within_s)

    # Who reads channels over HTTP needs a control plane; tests/worker/streams has its drain.
    monkeypatch.setattr(worker.gate.streams, "drain", drain)
    worker.aside._tell = said.append
    clients = [await bench.client(worker) for _ in range(3)]
    worker.link.drop("for the test")
    worker._supervisor_message(EndService())
    assert await asyncio.gather(*(client.closed_with() for client in clients)) == [4200] * 3
    await wait_until(lambda: said)
    assert said == [ClientsLeft(all=True)]
    assert drained == [0.5]
    # Also when it is subscribed again: it doesn't decide that.
    await wait_until(lambda: worker.registry.reach is Reach.SUBSCRIBED)
    with pytest.raises(websockets.InvalidStatus) as refused:
        await bench.client(worker)
    assert refused.value.response.status_code == 503
    worker._supervisor_message(ReturnToService())
    await bench.client(worker)


async def test_worker_that_is_subscribed_keeps_its_clients(bench, wait_until):
    worker = await bench.start()
    said = []
    worker.aside._tell = said.append
    client = await bench.client(worker)
    await wait_until(lambda: worker.registry.reach is Reach.SUBSCRIBED)
    worker._supervisor_message(EndService())
    assert said == [ClientsLeft(all=False)]
    await client.nothing_more()
    await bench.client(worker)
