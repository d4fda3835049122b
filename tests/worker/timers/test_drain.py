"""Draining a worker: which connections close, in which order and how fast."""

import asyncio
import math

import pytest

from redpoll.cluster.questions import Move
from redpoll.cluster.redis.keys import Keys
from redpoll.cluster.redis.link import Link
from redpoll.cluster.survey import Survey
from redpoll.worker.hub.connection import Connection
from redpoll.worker.timers.drain import Drain
from redpoll.worker.timers.paced_close import PacedClose


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


class Paces:
    """What a drain orders from PacedClose: the connections, their number, the seconds and the least rate."""

    def __init__(self) -> None:
        self.ordered = []

    def close(self, connections, count, code, message, within_s, *, min_rate=None) -> None:
        self.ordered.append((count, within_s, min_rate))

    def cancel(self) -> None:
        pass


async def test_pace_is_what_the_others_accept(crowd, wait_until):
    worker, _ = crowd
    paces = Paces()
    drain = Drain(worker.hub.open_connections, worker.janitor.spawn, paces)
    # Six connections at three per second, though half a second was asked for.
    drain.begin("", 0.5, max_per_s=3.0)
    # At least 1,000 per second when there is no other node.
    drain.begin("", 30.0)
    await wait_until(lambda: paces.ordered)
    # The first one was replaced before it began.
    assert paces.ordered == [(6, 30.0, None)]
    drain.begin("", 0.5, max_per_s=3.0)
    await wait_until(lambda: len(paces.ordered) == 2)
    assert paces.ordered[1] == (6, 2.0, 0)


async def test_cancelled_drain_leaves_connections_open(crowd, bench):
    worker, clients = crowd
    now, paced = 0.0, PacedClose()
    paced.clock = lambda: now
    drain = Drain(worker.hub.open_connections, worker.janitor.spawn, paced)
    drain.begin("", 1000.0, max_per_s=math.inf)
    await bench.settled(worker, lambda: len(worker.hub.open_connections) == 5)
    drain.cancel()
    now, tick = 1000.0, worker.janitor.tick
    # The next close would have come 10 ms later.
    await bench.settled(worker, lambda: worker.janitor.tick > tick + 1)
    assert len(worker.hub.open_connections) == 5
    (left,) = [client for count, client in clients if count == 3]
    await left.send("pusher:ping")
    await left.until("pusher:pong")
