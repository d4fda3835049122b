"""What a worker writes of itself to Redis."""

import json

from redpoll.cluster.redis.keys import TAGS, Keys
from redpoll.cluster.stats import Stats


async def test_its_counters_are_in_redis(bench, client_of_redis):
    worker = await bench.start()
    client = await bench.client(worker)
    await client.subscribe("news")
    await bench.change(max_connections=5)
    await client.sign_in("7")
    await bench.publish("news", "headline", "{}")
    await client.next()
    worker.statistics.write()
    await bench.settled(worker, lambda: worker.link.unanswered == 0)
    process = worker.registry.worker_id.rpartition(".")[0]
    w, stats = json.loads(await client_of_redis.get(f"rp:{{{TAGS[0].decode()}}}:stats:{process}"))
    assert w == worker.registry.worker_id
    assert stats["connections"] == 1
    assert stats["subscriptions"] == 1
    assert stats["channels"] == 1
    assert stats["users"] == 1
    # Connections, client events, events sent.
    assert stats["by_app"] == {"1": [1, 0, 1]}
    assert stats["messages_received_total"] >= 1
    await client.socket.close()
    await bench.settled(worker, lambda: worker.gate.connections == 0)
    worker.statistics.write()
    await bench.settled(worker, lambda: worker.link.unanswered == 0)
    _, stats = json.loads(await client_of_redis.get(f"rp:{{{TAGS[0].decode()}}}:stats:{process}"))
    assert stats["by_app"] == {"1": [0, 0, 1]}
    assert stats["loop_exceptions_total"] == 0


async def test_every_app_is_counted_however_many_there_are(bench):
    worker = await bench.start()
    await bench.client(worker)
    sent = {str(number): number for number in range(1, 301)}
    worker.gate.hub.events_sent.update(sent)
    worker.statistics.write()
    name = worker.registry.worker_id
    stats = (await Stats(worker.link, Keys()).read([name.rpartition(".")[0]]))[name]
    assert stats["by_app"] == {app_id: [int(app_id == "1"), 0, count] for app_id, count in sent.items()}


async def test_deleted_app_is_reported_for_a_minute_and_forgotten(bench):
    worker = await bench.start()
    hub, name = worker.gate.hub, worker.registry.worker_id
    hub.events_sent.update({"1": 5, "gone": 7})
    hub.client_events.received["gone"] = 2
    stats = Stats(worker.link, Keys())
    worker.statistics.write()
    assert (await stats.read([name.rpartition(".")[0]]))[name]["by_app"] == {"1": [0, 0, 5], "gone": [0, 2, 7]}
    for _ in range(12):
        worker.statistics.write()
    assert (await stats.read([name.rpartition(".")[0]]))[name]["by_app"] == {"1": [0, 0, 5]}
    assert (hub.events_sent, hub.client_events.received) == ({"1": 5}, {})


async def test_nothing_is_written_while_redis_is_away(bench, monkeypatch):
    worker = await bench.start()
    written = []
    monkeypatch.setattr(worker.statistics._stats, "write", lambda *figures: written.append(figures))
    worker.link.drop("for the test")
    worker.statistics.write()
    assert (worker.link.up, written) == (False, [])
