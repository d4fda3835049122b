"""What a worker answers over `sys`. Other questions are tested with what they do, such as closing a user."""

from redpoll.cluster.questions import Count, ListConnections, Move
from redpoll.cluster.redis.keys import Keys
from redpoll.cluster.redis.link import Link
from redpoll.cluster.survey import Survey


async def test_worker_counts_lists_and_moves_its_connections(bench):
    worker, other = await bench.start(), await bench.start()
    clients = [await bench.client(worker) for _ in range(3)]
    link = Link(bench.redis.url)
    link.start()
    survey = Survey(link, Keys(), answer_s=60)
    names = worker.registry.worker_id, other.registry.worker_id
    assert await survey.ask(Count()) == dict(zip(names, (3, 0), strict=True))
    page = (await survey.ask(ListConnections("1", clients[1].socket_id)))[names[0]]
    assert [row["socket"] for row in page["connections"]] == [clients[1].socket_id]
    # A node that is drained closes all anyway.
    other.evacuate(60.0)
    assert await survey.ask(Move({names[0]: 1, names[1]: 2}, 0.1)) == dict(zip(names, (1, 2), strict=True))
    await bench.settled(worker, lambda: worker.gate.connections == 2)
    await link.close()
