"""Three servers on one Redis and one PostgreSQL under load, while something fails.

Clients connect again by themselves and recover. In each case, no event of a channel with history is lost or repeated,
no member is missing or left over, and webhooks announce joins and leaves by turns (deploy/failures.md "Several
servers").
"""

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from failures.crowd import ADDED, REMOVED, Crowd, visitors
from helpers.leading import command, leader, leading_name, rows
from helpers.lengths import is_long
from helpers.ports import reserved_ports
from helpers.proxy import Proxy
from helpers.receiver import Receiver
from helpers.server import Server
from helpers.wire import Socket

HEADING = "Several servers"
LONG = is_long()
CLIENTS = 2_000 if LONG else 45
PER_S = 2.0 if LONG else 8.0
CHANNELS = 20 if LONG else 5


def signal_all(node: Server, number: int) -> None:
    """Sends a signal to all processes of a node."""
    os.killpg(node.pid, number)


@pytest.fixture(scope="module")
def proxy(redis_of_module) -> Iterator[Proxy]:
    """Between the node `three` and Redis."""
    with Proxy(redis_of_module.path) as proxy:
        yield proxy


@pytest.fixture(scope="module")
def nodes(redis_of_module, own_postgres, proxy) -> Iterator[list[Server]]:
    database_url = own_postgres.url(own_postgres.create_database())
    settings = {
        "workers": 1,
        "database_url": database_url,
        "shutdown_grace_s": 20 if LONG else 2,
        "webhook_allow_http": 1,
        "webhook_allow_addresses": "127.0.0.0/8",
        "webhook_debounce_s": 1,
        # Of 10 and 60 s, one late answer of the receiver would take more than the time that the tests allow.
        "webhook_retry_after_s": "0.5,0.5,1,1,2,5,5,5",
    }
    redis_url = redis_of_module.url
    nodes = [Server(redis_url=redis_url, node_name=name, **settings) for name in ("one", "two")]
    nodes.append(Server(redis_url=proxy.url, node_name="three", **settings))
    with contextlib.ExitStack() as stack:
        # While a node is stopped, its clients must not come to a server of another test that got its port.
        ports = stack.enter_context(reserved_ports(len(nodes)))
        for node, port in zip(nodes, ports, strict=True):
            node.public_port = port
        with ThreadPoolExecutor(3) as pool:
            for node in pool.map(lambda node: node.__enter__(), nodes):
                stack.push(node.__exit__)
        app = nodes[0].app_id
        command(nodes[0], "app", "set", app, "idempotency=true")
        command(nodes[0], "history", "rule", "add", app, "--prefix", "stored-", "--keep", "10000", "--seconds", "3600")
        yield nodes


@pytest.fixture
async def crowd(nodes, receiver) -> AsyncIterator[Crowd]:
    async with Crowd(nodes, CLIENTS, channels=CHANNELS, per_s=PER_S) as crowd:
        yield crowd


@pytest.fixture
async def receiver(nodes) -> AsyncIterator[Receiver]:
    """Gets the webhooks of joins and leaves on all nodes."""
    async with Receiver() as receiver:
        words = ("--events", "member.added,member.removed")
        made = await asyncio.to_thread(command, nodes[0], "webhook", "create", nodes[0].app_id, receiver.url, *words)
        await asyncio.gather(*(until_announced(node, receiver) for node in nodes))
        yield receiver
        await asyncio.to_thread(command, nodes[0], "webhook", "delete", made["id"])


async def until_announced(node: Server, receiver: Receiver) -> None:
    """Waits until the workers of a node know the new webhook: until the join of a probe is announced."""
    for attempt in range(30):
        room = f"presence-probe-{node.settings['node_name']}-{attempt}-{receiver.port}"
        probe = await Socket.connect(node)
        await probe.subscribe(room, "probe")
        deadline = time.monotonic() + 2
        while not any(room.encode() in request.body for request in receiver.requests) and time.monotonic() < deadline:
            await asyncio.sleep(0.01)
        probe.abort()
        if time.monotonic() < deadline:
            return
    raise AssertionError("a webhook isn't in effect after a minute")


def announced_wrongly(receiver: Receiver, crowd: Crowd) -> list[str]:
    """The members of the crowd's rooms whose webhooks don't alternate, or don't end with whether they are present."""
    present = {(client.room, client.user) for client in crowd.clients}
    bodies = {request.headers["x-service-delivery"]: request.json() for request in receiver.requests}
    events = sorted(bodies.values(), key=lambda body: body["data"]["seq"])
    by_member: dict[tuple[str, str], list[str]] = {}
    for event in events:
        member = event["data"]["channel"], event["data"]["user_id"]
        if member[0].startswith(crowd.rooms):
            by_member.setdefault(member, []).append(event["event"])
    faults = []
    for member in present | by_member.keys():
        names = by_member.get(member, [])
        expected = ["member.added", "member.removed"] * (len(names) // 2 + 1)
        if names != expected[: len(names)] or (names[-1:] == ["member.added"]) != (member in present):
            faults.append(f"{member}: {names}")
    return faults


def waiting(crowd: Crowd) -> float:
    """Deliveries whose attempts failed, because the receiver was late."""
    return sum(node.metrics().get(("redpoll_webhook_deliveries_waiting", ""), 0) for node in crowd.nodes)


async def everything_is_right(crowd: Crowd, receiver: Receiver, figures, what: str) -> None:
    deliveries = await crowd.check()
    deadline = time.monotonic() + 60
    while faults := announced_wrongly(receiver, crowd):
        assert time.monotonic() < deadline, f"{faults}; deliveries that wait for another attempt: {waiting(crowd)}"
        await asyncio.sleep(0.05)
    figures.note(HEADING, f"{what}: deliveries, none missing or repeated", deliveries, "", "0 missing")
    figures.note(HEADING, f"{what}: longest publish until 200", crowd.longest_s, "s")


async def all_alive(nodes: list[Server]) -> None:
    """Waits until all nodes list all of them with the same starts. After a restart, the others list the earlier start
    for up to a second."""

    def agree() -> bool:
        lists = [rows(node) for node in nodes]
        starts = [{name: row["up_since"] for name, row in listed.items() if not row["draining"]} for listed in lists]
        return all(one == starts[0] for one in starts) and len(starts[0]) == len(nodes)

    while not await asyncio.to_thread(agree):
        await asyncio.sleep(0.05)


async def all_back(crowd: Crowd, connects: int, wait_until) -> None:
    """Waits until the clients of a stopped node have connected again. The test may notice the end of the node before
    the end of their connections, so that they are all inside is not enough."""
    await wait_until(lambda: crowd.connects() >= connects and all(client.inside.is_set() for client in crowd.clients))


async def until_gone(watcher: Socket, count: int, within_s: float) -> None:
    """Waits until so many visitors have left."""
    gone = len(watcher.all(REMOVED)) + count
    await watcher.until(lambda: len(watcher.all(REMOVED)) >= gone, within_s, f"{count} member_removed")


async def test_worker_control_plane_and_supervisor_killed(nodes, crowd, receiver, wait_until, within_s, figures):
    leading = leader(nodes)
    other, third = (node for node in nodes if node is not leading)
    watcher = await Socket.connect(other)
    await watcher.subscribe(f"{crowd.rooms}watched", "watcher")
    # With the watcher, as many as a presence channel takes.
    count = 99 if LONG else 10

    # Its own supervisor alone knows of its death at once, the leader removes the members, and a third node sees it.
    async with visitors(third, f"{crowd.rooms}watched", count):
        await watcher.until(lambda: len(watcher.all(ADDED)) == count)
        began = time.monotonic()
        third.kill_worker(0)
        await until_gone(watcher, count, within_s(1))
        figures.note(HEADING, "worker killed: its members gone on another node", time.monotonic() - began, "s", "1 s")

    leading_control = leading.control_pid
    os.kill(leading_control, signal.SIGKILL)
    await wait_until(lambda: leading.control_pids() not in ([], [leading_control]))

    async with visitors(leading, f"{crowd.rooms}watched", count):
        await watcher.until(lambda: len(watcher.all(ADDED)) == 2 * count)
        began = time.monotonic()
        # Its children end with it.
        leading.signal(signal.SIGKILL)
        leading.wait()
        await until_gone(watcher, count, within_s(6))
        figures.note(HEADING, "leader killed: its members gone on another node", time.monotonic() - began, "s", "6 s")
    # It comes back, and doesn't take the lead from the other one.
    await asyncio.to_thread(leading.start)
    await all_alive(nodes)
    assert leading_name(leading) not in (None, leading.settings["node_name"])
    watcher.abort()
    await everything_is_right(crowd, receiver, figures, "worker, control plane and leader killed")


async def test_leader_that_is_paused_and_resumed_does_no_harm(nodes, crowd, receiver, wait_until, within_s, figures):
    paused = leader(nodes)
    others = [node for node in nodes if node is not paused]
    began = time.monotonic()
    signal_all(paused, signal.SIGSTOP)
    try:
        crowd.avoid(paused)
        while await asyncio.to_thread(leading_name, others[0]) in (None, paused.settings["node_name"]):
            await asyncio.sleep(0.05)
            crowd.avoid(paused)
        led_after_s = time.monotonic() - began
        figures.note(HEADING, "leader paused: another leads", led_after_s, "s", "6 s")
        assert led_after_s < within_s(6)
        while time.monotonic() - began < (20 if LONG else led_after_s + 1):
            await asyncio.sleep(0.05)
            crowd.avoid(paused)
    finally:
        signal_all(paused, signal.SIGCONT)
    await all_alive(nodes)
    # Until its first heartbeat is answered, it takes itself for the leader.
    paused_name = paused.settings["node_name"]
    await wait_until(lambda: all(leading_name(node) not in (None, paused_name) for node in nodes))
    await everything_is_right(crowd, receiver, figures, "leader paused")


async def test_clients_of_a_node_that_is_cut_off_from_redis_stay_and_catch_up(
    nodes, proxy, crowd, receiver, wait_until, figures
):
    cut_off = nodes[2]
    watcher = next(client for client in crowd.clients if client.node is nodes[0])
    room = [client for client in crowd.clients if client.room == watcher.room]
    mates = {client.user for client in room if client.node is cut_off}
    await wait_until(lambda: watcher.roster == {client.user for client in room})
    held = {client: client.connects for client in crowd.of(cut_off)}
    before = len(watcher.changes)
    began = time.monotonic()
    proxy.stall()
    try:
        while time.monotonic() - began < (20 if LONG else 1) or watcher.roster & mates:
            crowd.avoid(cut_off)
            await asyncio.sleep(0.05)
    finally:
        # What the proxy held back is lost.
        proxy.cut()
        proxy.resume()
    resumed = time.monotonic()
    reached = list(crowd.published)
    for client in held:
        await wait_until(lambda client=client: len(client.seen) >= reached[client.number])
    figures.note(HEADING, "cut off from Redis: its clients have everything again", time.monotonic() - resumed, "s")
    await all_alive(nodes)
    await everything_is_right(crowd, receiver, figures, "cut off from Redis")
    assert {client: client.connects for client in held} == held
    # The others saw one leave and one return of each.
    changes = watcher.changes[before:]
    for user in mates:
        assert [event for name, event in changes if name == user] == [REMOVED, ADDED], user
    assert len(changes) == 2 * len(mates)


async def test_postgres_is_gone_for_a_time(nodes, own_postgres, crowd, receiver, wait_until, figures):
    processes = [(node.control_pid, *node.worker_pids()) for node in nodes]
    repeated = crowd.repeated
    await asyncio.to_thread(own_postgres.kill)
    await asyncio.sleep(30 if LONG else 1)
    before = list(crowd.published)
    await wait_until(lambda: all(now > then for now, then in zip(crowd.published, before, strict=True)))
    await asyncio.to_thread(own_postgres.start)
    began = time.monotonic()
    app = await asyncio.to_thread(command, nodes[0], "app", "create", "after the outage")
    while app["id"] not in [row["id"] for row in await asyncio.to_thread(command, nodes[2], "app", "list")]:
        await asyncio.sleep(0.01)
    figures.note(
        HEADING, "PostgreSQL is back: a change is made and known on another node", time.monotonic() - began, "s"
    )
    # Restarted at once.
    await asyncio.to_thread(own_postgres.kill)
    await asyncio.to_thread(own_postgres.start)
    await everything_is_right(crowd, receiver, figures, "PostgreSQL gone")
    # In CI, Redis may be late by 1.9 s because the machine is busy.
    assert not LONG or crowd.repeated == repeated
    assert [(node.control_pid, *node.worker_pids()) for node in nodes] == processes


async def test_nodes_restarted_one_after_another_under_load(nodes, crowd, receiver, wait_until, figures):
    grace_s = int(nodes[0].settings["shutdown_grace_s"])
    for node in nodes if LONG else nodes[:2]:
        held, before = len(crowd.of(node)), crowd.connects()
        began = time.monotonic()
        await asyncio.to_thread(node.stop)
        figures.note(HEADING, "rolling restart: a node's stop", time.monotonic() - began, "s", f"{grace_s} s")
        await all_back(crowd, before + held, wait_until)
        # Each of its clients came back once, and others not at all.
        assert crowd.connects() - before == held
        await asyncio.to_thread(node.start)
        await all_alive(nodes)
        operated = await asyncio.to_thread(command, node, "balance", "--within", "10" if LONG else "0.5")
        await wait_until(lambda: crowd.connects() - before == held + operated["moved"])  # noqa: B023
        await wait_until(lambda: all(client.inside.is_set() for client in crowd.clients))
    await everything_is_right(crowd, receiver, figures, "rolling restart")


async def test_new_node_gets_its_share_by_balance(nodes, crowd, receiver, wait_until, figures):
    one, _, three = nodes
    held, before = len(crowd.of(three)), crowd.connects()
    await asyncio.to_thread(three.stop)
    await all_back(crowd, before + held, wait_until)
    await asyncio.to_thread(three.start)
    await all_alive(nodes)
    # The load balancer gives it clients again.
    await wait_until(lambda: crowd.choose() is three)
    before = crowd.connects()
    within_s = 10.0 if LONG else 1.0
    moved, began = 0, time.monotonic()
    # A client that can't connect to node three in a moment goes to another one, and is moved again.
    while count := (await asyncio.to_thread(command, one, "balance", "--within", str(within_s)))["moved"]:
        moved += count
        await wait_until(lambda: crowd.connects() - before >= moved)  # noqa: B023
        await wait_until(lambda: all(client.inside.is_set() for client in crowd.clients))
    figures.note(HEADING, f"balance of {CLIENTS} clients", time.monotonic() - began, "s", f"{within_s:g} s")
    mean = CLIENTS / len(nodes)
    worst = max(abs(crowd.per_node()[node] / mean - 1) for node in nodes)
    figures.note(HEADING, "balance: farthest from even", 100 * worst, "%", "5 %")
    assert worst <= 0.05
    assert crowd.connects() - before == moved
    await everything_is_right(crowd, receiver, figures, "scale-out")


async def test_each_node_shows_its_own_workers_in_its_metrics(nodes, wait_until):
    """Prometheus adds up what the nodes show, so no worker may be shown by two of them."""

    def workers() -> list[set[str]]:
        return [{labels for name, labels in node.metrics() if name == "redpoll_connections"} for node in nodes]

    await wait_until(lambda: [len(shown) for shown in workers()] == [1] * len(nodes))
    assert len(set.union(*workers())) == len(nodes)
