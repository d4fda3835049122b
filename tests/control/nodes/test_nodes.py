"""The rows of the list of nodes, and what the other nodes mean for publishing and reaping."""

import pytest
from msgspec.structs import replace

from redpoll.cluster.lifecycle import Lifecycle
from redpoll.cluster.nodes import UNDRAINED, Fitness, NodesView
from redpoll.cluster.redis.keys import Keys
from redpoll.config.settings import Settings
from redpoll.control.commands import commands
from redpoll.control.commands.context import Context
from redpoll.control.nodes.nodes import NodeList
from redpoll.ipc.command_socket import CommandError
from redpoll.ipc.messages import Evacuate, Lead, LivingWorkers, NodesChanged, Serve, WorkersCutOff, WorkersReady

ONE, TWO, THREE = "1" * 12, "2" * 12, "3" * 12


async def test_rows_have_connections_of_living_workers_and_are_sorted_by_name(node):
    async def read_workers():
        return {f"{ONE}.1.0": {"connections": 3}, f"{ONE}.2.1": {"connections": 4}, f"{TWO}.1.0": {"connections": 9}}

    nodes = NodeList(NodesView(ONE), read_workers)
    assert await nodes.rows() == []
    found = [
        node(THREE, "c", lifecycle=Lifecycle.EVACUATING),
        node(TWO, "b", workers=[1], alive=False),
        node(ONE, "a", workers=[1, 2], started=5.0),
    ]
    nodes.view.update(found, ONE)
    rows = [(row.name, row.workers, row.connections, row.leader, row.draining, row.alive) for row in await nodes.rows()]
    assert rows == [
        ("a", 2, 7, True, False, True),
        ("b", 0, 0, False, False, False),
        ("c", 0, 0, False, True, True),
    ]
    assert (await nodes.rows())[0].up_since == 5.0


async def test_rows_say_how_much_of_the_leaders_work_a_node_can_do(node):
    async def read_workers():
        return {}

    nodes = NodeList(NodesView(ONE), read_workers)
    found = [
        node(run, run[0], fitness=fitness) for run, fitness in zip((ONE, TWO, THREE), reversed(Fitness), strict=True)
    ]
    nodes.view.update(found, ONE)
    assert [row.fitness for row in await nodes.rows()] == ["fit", "no record store", "unfit"]


async def test_publishing_waits_for_a_worker_until_the_supervisor_says_that_it_has_no_clients(plane, wait_until):
    control = plane.plane
    control.receive(LivingWorkers([1], 1))
    control.link.drop("for the test")
    await wait_until(lambda: control.link.connects == 2)
    assert not control.publishing.publisher.open
    control.receive(WorkersCutOff([0], [1], [1]))
    await wait_until(lambda: control.publishing.publisher.open)
    assert control.health.obstacle() == "worker 0 can't reach Redis"


async def test_workers_of_dead_nodes_and_those_that_a_live_node_no_longer_lists_are_reaped(plane, node, wait_until):
    link, keys = plane.plane.link, Keys("rp")
    for w in (f"{ONE}.1.0", f"{ONE}.2.0", f"{ONE}.3.0", f"{TWO}.1.0"):
        await link.ask(b"HSET", keys.beat, w, 5)
    await link.ask(b"HSET", keys.nodes, ONE, '{"beat":5}', TWO, '{"beat":7}')
    await link.ask(b"HSET", keys.drained, TWO, 30)
    one, two = node(ONE, "a", workers=[2], greatest=2), node(TWO, "b", workers=[1], greatest=1)
    plane.plane.receive(NodesChanged([one, two], "0123456789ab"))
    await wait_until(lambda: plane.plane.reaper.reaped == 1 and f"{TWO}.1.0" in plane.plane.reaper._beats.table)
    # It has beaten since it was found dead, so it is there again, and still drained.
    beats = plane.plane.reaper._beats
    plane.plane.receive(NodesChanged([one, replace(two, alive=False, beat=6)], "0123456789ab"))
    await wait_until(lambda: plane.plane.reaper.reaped == 2 and beats.forgotten())
    table = beats.table
    await wait_until(lambda: beats.table is not table)
    assert await link.ask(b"HKEYS", keys.drained) == [TWO.encode()]
    plane.plane.receive(NodesChanged([one, replace(two, alive=False, beat=7)], "0123456789ab"))
    # 3 is a process that started after that heartbeat.
    left = {name.decode() for name in await link.ask(b"HKEYS", keys.beat)}
    assert left == {f"{ONE}.2.0", f"{ONE}.3.0"}
    names = [TWO]
    while names != [ONE]:
        names = [name.decode() for name in await link.ask(b"HKEYS", keys.nodes)]
    while await link.ask(b"EXISTS", keys.drained):
        pass


async def test_node_that_does_not_lead_reaps_nobody_and_another_writes_the_directory(plane, wait_until):
    link, keys, control = plane.plane.link, Keys("rp"), plane.plane
    control.receive(WorkersReady())
    control.receive(Lead(None))
    await wait_until(lambda: control.leadership.term is None)
    assert control.leadership.work._reaping is None
    await link.ask(b"HSET", keys.beat, "0123456789ab.1.0", -1)
    await link.ask(b"DEL", keys.directory_version)
    await wait_until(lambda: not control.health.directory_written)
    assert await link.ask(b"EXISTS", keys.directory_version) == 0
    assert control.reaper.reaped == 0
    # It has the records, and its workers had them.
    assert (await plane.ask("GET", "/readyz")).status == 200
    control.receive(Lead(2))
    await wait_until(lambda: control.reaper.reaped == 1 and control.health.directory_written)
    assert (await link.ask(b"GET", keys.directory_version)).startswith(b"%d " % plane.records.version)


async def test_operator_drains_a_live_node_by_name_and_lets_it_serve_again(plane, node):
    control = plane.plane
    nodes = [node(ONE, "a", alive=False), node(TWO, "a", started=1.0), node(THREE, "a", started=2.0)]
    control.receive(NodesChanged(nodes, TWO))
    context = Context(control.dashboard.accounts.store, plane.records, Settings(), None, control.cluster)
    answer = await commands.run(context, "node drain", {"name": "a", "within_s": 12.5})
    assert answer == {"name": "a", "draining": True}
    assert await control.link.ask(b"HGETALL", Keys("rp").drained) == {THREE.encode(): b"12.5"}
    assert await commands.run(context, "node undrain", {"name": "a"}) == {"name": "a", "draining": False}
    assert await control.link.ask(b"HGETALL", Keys("rp").drained) == {THREE.encode(): UNDRAINED}
    with pytest.raises(CommandError, match="there is no live node with the name b"):
        await commands.run(context, "node drain", {"name": "b", "within_s": 1})


async def test_drained_node_is_not_ready_and_goes_on_to_publish(plane):
    plane.plane.receive(Evacuate(30.0, None))
    reply = await plane.ask("GET", "/readyz")
    assert (reply.status, "drains this server" in reply.body.decode()) == (503, True)
    assert (await plane.trigger()).status == 200
    plane.plane.receive(Serve())
    assert (await plane.ask("GET", "/readyz")).status == 200
