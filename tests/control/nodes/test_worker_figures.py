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
        Stats(link, keys).write(f"{run}.1.0", {"connections": 7}, {})
    read, ask = [], link.ask

    def noted(*command):
        read.append(command)
        return ask(*command)

    link.ask = noted
    view = NodesView("0123456789ab")
    figures = WorkerFigures(Stats(link, keys), view)
    assert await figures.own() == {}
    view.alive = [1]
    assert await figures.own() == {"0123456789ab.1.0": {"connections": 7, "by_app": {}}}
    assert read[-1] == (b"MGET", keys.stats("0123456789ab.1"), keys.stats_by_app("0123456789ab.1"))
    assert (await figures.all()).keys() == {"0123456789ab.1.0", "ba9876543210.1.0"}


async def test_last_figures_of_a_process_that_has_ended_are_read_if_they_are_asked_for(link):
    keys, view = Keys("rp"), NodesView("0123456789ab")
    # It is neither alive nor in the beat table.
    Stats(link, keys).write("0123456789ab.1.0", {"connections": 0}, {"3": [0, 9, 80]})
    figures = WorkerFigures(Stats(link, keys), view)
    assert await figures.all() == {}
    assert await figures.all(["0123456789ab.1", "0123456789ab.2"]) == {
        "0123456789ab.1.0": {"connections": 0, "by_app": {"3": [0, 9, 80]}}
    }


async def test_without_redis_there_are_no_figures():
    link = Link("unix:///nowhere/redis.sock")
    assert await WorkerFigures(Stats(link, Keys()), NodesView("0123456789ab")).all() == {}


async def test_workers_that_lost_redis_are_shown_as_down_under_their_last_name(link):
    keys, run = Keys("rp"), "0123456789ab"
    stats = Stats(link, keys)
    view = NodesView(run)
    view.alive = [1, 2, 3]
    figures = WorkerFigures(stats, view)
    stats.write(f"{run}.1.4", {"redis_connection_state": "open"}, {})
    stats.write(f"{run}.2.0", {"redis_connection_state": "open"}, {})
    written = await figures.own()
    assert written.keys() == {f"{run}.1.4", f"{run}.2.0"}
    # The first two are down, and the figures of the first have expired. The third hasn't connected yet.
    view.down = [1, 2, 3]
    await link.ask(b"DEL", keys.stats(f"{run}.1"))
    down = {"redis_connection_state": "down"}
    assert await figures.own() == {
        f"{run}.1.4": down,
        f"{run}.2.0": {"redis_connection_state": "open", "by_app": {}},
        f"{run}.3.0": down,
    }
    view.alive = [2]
    assert (await figures.own()).keys() == {f"{run}.2.0"}


async def test_without_redis_only_workers_that_say_so_are_down():
    """Control alone may have lost Redis."""
    view = NodesView("0123456789ab")
    view.alive, view.down = [1, 2], [2]
    figures = WorkerFigures(Stats(Link("unix:///nowhere/redis.sock"), Keys()), view)
    assert await figures.own() == {"0123456789ab.2.0": {"redis_connection_state": "down"}}
