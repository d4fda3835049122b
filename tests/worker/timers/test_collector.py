"""The garbage collector's policy: connections are not its business, and no collection walks much."""

import asyncio
import gc

import pytest

from redpoll.protocol.session import Session
from redpoll.worker.hub.connection import Connection
from redpoll.worker.timers.collector import MAX_WALKED_OBJECTS, Collector


@pytest.fixture
def policy():
    thresholds = gc.get_threshold()
    gc.unfreeze()
    yield
    gc.set_threshold(*thresholds)
    # As tests/conftest.py leaves it.
    gc.collect()
    gc.freeze()


async def test_connections_and_sessions_are_not_tracked(bench):
    worker = await bench.start()
    client = await bench.client(worker)
    await client.subscribe("news")
    [connection] = worker.hub.open_connections
    assert isinstance(connection, Connection)
    assert isinstance(connection.session, Session)
    for thing in (connection, connection.session, connection.session.channels):
        assert not gc.is_tracked(thing)


async def test_full_collections_are_not_automatic_while_a_worker_runs(policy):
    collector = Collector(asyncio.get_running_loop())
    collector.start()
    assert gc.get_freeze_count() > 0
    assert gc.get_threshold()[2] > 1_000_000
    collector.stop()
    # Nor when the process ends: the interpreter's last collections would walk all that is frozen.
    assert gc.get_freeze_count() > 0
    assert gc.get_threshold()[2] > 1_000_000


def test_a_collection_that_would_take_long_is_replaced_by_a_freeze(policy):
    gc.collect()
    gc.freeze()
    assert Collector.collect() is True
    many = [[] for _ in range(MAX_WALKED_OBJECTS + 1)]
    # Into the oldest generation.
    gc.collect(1)
    gc.collect(1)
    frozen = gc.get_freeze_count()
    assert Collector.collect() is False
    assert gc.get_freeze_count() > frozen + len(many) // 2
    assert len(gc.get_objects(generation=2)) == 0


def test_a_cycle_is_still_collected(policy):
    class Node:
        pass

    node = Node()
    node.self = node
    gc.collect()
    gc.freeze()
    later = Node()
    later.self = later
    assert sum(type(item) is Node for item in gc.get_objects()) == 1
    del later
    assert Collector.collect() is True
    assert not any(type(item) is Node for item in gc.get_objects())
