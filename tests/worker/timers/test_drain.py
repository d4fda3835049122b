"""Draining a worker: which connections close, in which order and how fast."""

import asyncio
import math

import pytest

from redpoll.cluster.questions import Move
from redpoll.cluster.redis.keys import Keys
from redpoll.cluster.redis.link import Link
from redpoll.cluster.survey import Survey
from redpoll.worker.hub.connection import Connection


@pytest.fixture
async def crowd(bench):
    """A worker with six clients in 0, 0, 1, 1, 2 and 3 presence channels, by their number; they arrive mixed."""
    worker = await bench.start()
    memberships = [2, 0, 3, 1, 0, 1]
    clients = []
    for number, count in enumerate(memberships):
        client = await bench.client(worker)
        await client.subscribe("news")
        for room in range(count):
            await client.subscribe(f"presence-{room}", {"user_id": str(number)})
        clients.append((count, client))
    return worker, clients


async def test_members_of_most_presence_channels_are_closed_last(crowd, monkeypatch):
    worker, clients = crowd
    counts = {client.socket_id: count for count, client in clients}
    order, shut = [], Connection.shut

    # Noted where they are closed: after a stall several are closed in one pass, and clients may see it in any order.
    def note(connection, code, message):
        order.append(counts[connection.session.socket_id])
        shut(connection, code, message)

    monkeypatch.setattr(Connection, "shut", note)
    worker.evacuate(0.5, math.inf)
    assert await asyncio.gather(*(client.closed_with() for _, client in clients)) == [4200] * 6
    assert order == [0, 0, 1, 1, 2, 3]


async def test_part_is_moved_and_the_others_stay(crowd, bench):
    worker, clients = crowd
    link = Link(bench.redis.url)
    link.start()
    survey = Survey(link, Keys(), answer_s=60)
    assert await survey.ask(Move({worker.registry.worker_id: 3, "other.1.0": 9}, 0.1)) == {worker.registry.worker_id: 3}
    await bench.settled(worker, lambda: len(worker.hub.open_connections) == 3)
    stayed = [client for count, client in clients if count > 1]
    for client in stayed:
        await client.send("pusher:ping")
        await client.until("pusher:pong")
    # New clients are admitted.
    await bench.client(worker)
    assert await survey.ask(Move({}, 0.1)) == {worker.registry.worker_id: 0}
    await link.close()


async def test_pace_is_what_the_others_accept(crowd):
    worker, _ = crowd
    paces = []
    worker._drain._paced.close = lambda *args, **changed: paces.append((args[1], args[4], changed))
    # Six connections at three per second, though half a second was asked for.
    worker.evacuate(0.5, 3.0)
    # At least 1,000 per second when there is no other node.
    worker.evacuate(30.0)
    while len(paces) < 1:
        await asyncio.sleep(0.005)
    # The first one was replaced before it began.
    assert paces == [(6, 30.0, {})]
    worker.evacuate(0.5, 3.0)
    while len(paces) < 2:
        await asyncio.sleep(0.005)
    assert paces[1] == (6, 2.0, {"min_rate": 0})


async def test_cancelled_drain_leaves_connections_open(crowd, bench):
    worker, clients = crowd
    worker.evacuate(1000.0, math.inf)
    await bench.settled(worker, lambda: len(worker.hub.open_connections) == 5)
    assert worker._drain._paced._batches
    worker.serve()
    assert not worker._drain._paced._batches
    (left,) = [client for count, client in clients if count == 3]
    await left.send("pusher:ping")
    await left.until("pusher:pong")
    assert not worker._drain._paced._batches
