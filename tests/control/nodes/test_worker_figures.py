"""What control reads of the workers' figures."""

from redpoll.cluster.nodes import NodesView
from redpoll.cluster.redis.keys import Keys
from redpoll.cluster.redis.link import Link
from redpoll.cluster.stats import Stats
from redpoll.control.nodes.worker_figures import WorkerFigures


async def test_own_figures_are_read_without_those_of_other_nodes(link):
    """Each node reading all workers' counters costs Redis the square of the workers."""
    keys = Keys("rp")
    for run in ("0123456789ab", "ba9876543210"):
        await link.ask(b"HSET", keys.beat, f"{run}.1.0", 1)
        Stats(link, keys).write(f"{run}.1.0", {"connections": 7})
    read, ask = [], link.ask

    def noted(*command):
        read.append(command)
        return ask(*command)

    link.ask = noted
    view = NodesView("0123456789ab")
    figures = WorkerFigures(Stats(link, keys), view)
    assert await figures.own() == {}
    view.alive = [1]
    assert await figures.own() == {"0123456789ab.1.0": {"connections": 7}}
    assert read[-1] == (b"MGET", keys.stats("0123456789ab.1"))
    assert (await figures.all()).keys() == {"0123456789ab.1.0", "ba9876543210.1.0"}


async def test_without_redis_there_are_no_figures():
    link = Link("unix:///nowhere/redis.sock")
    assert await WorkerFigures(Stats(link, Keys()), NodesView("0123456789ab")).all() == {}
