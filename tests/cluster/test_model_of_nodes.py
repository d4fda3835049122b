"""Random histories of several nodes: joins, leaves, cut and killed workers, killed, paused and new nodes, failovers of
Redis that lose the last writes, and slots of a Redis Cluster that move.

Each node has a supervisor's heartbeat, a reaper and a reader of webhook rows, as they run in production; the one that
leads uses them. Nodes become more or less fit to lead. At the end of each history exactly one node leads and no other
is fitter, Redis, workers and clients agree, nothing of a dead node is left, and what was announced of each member and
channel alternates and is right. The seed of a failing history is in the test's name. Of three histories, one has no
failovers, one has them, and one runs on a Cluster of two masters, where the slots in use move, too.

`pytest --long` runs more of them, and `FIRST=300` begins with that seed.
"""

import asyncio
import random
import time
from binascii import crc_hqx
from contextlib import suppress

import hiredis
import pytest
import redis as redis_py

from cluster.links import quick_link, transports
from cluster.random_history import NEWS, ROOMS, RandomHistory
from helpers.lengths import seeds
from helpers.sentinel import redis_cluster
from helpers.unkeyed import shard
from redpoll.cluster.directory import DirectoryWriter
from redpoll.cluster.membership.reaper import Reaper
from redpoll.cluster.nodes import Fitness
from redpoll.cluster.nodes import Node as Entry
from redpoll.cluster.outbox import Outbox
from redpoll.cluster.redis.keys import SHARDS, TAGS, Keys
from redpoll.cluster.redis.link import LinkDown
from redpoll.control.webhooks.announced import Announced
from redpoll.host.heartbeat import Heartbeat
from redpoll.ipc.messages import NodesChanged
from redpoll.store.deliveries import Announcement
from redpoll.store.webhooks import Endpoint

SEEDS = seeds(4)
KINDS = ("no failover", "failovers", "cluster")
# A node is dead after four heartbeats and at most five. Those that are read later than after twice the time restart the
# counts.
BEAT_S = 0.1
PAUSE_S = 7 * BEAT_S
# When the leader compares what it announced with Redis, after each connection.
COMPARE_AFTER_S = (0.5, 1.0, 2.0, 3.0)
ENDPOINT = Endpoint(
    id="e", app_id="7", url="https://e.com", secret="s", events=("all",), channels=(), format="service", created_at=0.0
)


class Records:
    """The record store that all nodes share: the greatest term, and the rows that leaders committed."""

    def __init__(self) -> None:
        self.term = 0
        self.rows = {}
        self.refused = 0

    def commit(self, term: int | None, rows, announced: Announced) -> bool:
        """False: another node leads, so the transaction is rolled back."""
        if term is None or term != self.term:
            self.refused += 1
            return False
        new = [(row, {"id": f"{row.shard}:{row.stamp}", "endpoint_id": ENDPOINT.id}) for row in rows]
        kept, states = announced.without_repeats(new, {f"{at}:{stamp}" for at, stamp in self.rows})
        for row, _ in kept:
            self.rows[row.shard, row.stamp] = row
        announced.stored(states)
        return True

    def newest_first(self) -> list[Announcement]:
        return [Announcement(ENDPOINT.id, row.event, row.channel, row.user) for row in reversed(self.rows.values())]

    def changes(self) -> dict[tuple[str, str], list[str]]:
        """What was announced of each member and channel, in order."""
        changes: dict[tuple[str, str], list[str]] = {}
        for row in self.rows.values():
            changes.setdefault((row.channel, row.user), []).append(row.event)
        return changes


class Node:
    """A supervisor and a control plane, with `workers`. It is its heartbeat's listener."""

    def __init__(self, history: "History", number: int) -> None:
        self.run = f"{number:012x}"
        self.history = history
        self.records = history.records
        self.workers: dict[int, object] = {}
        self.greatest = 0
        self.term: int | None = None
        self.fitness = Fitness.FIT
        self.started = time.time()
        self.link = quick_link(history.server.url)
        self.heartbeat = Heartbeat(history.server.url, "rp", self.run, self.describe, self, every_s=BEAT_S)
        self.reaper = Reaper(
            self.link,
            history.keys,
            self.run,
            hooks_of=lambda app_id: history.app.hooks,
            debounce_s=0,
            read_s=BEAT_S,
            gap_s=2 * BEAT_S,
        )
        self.reaper.look_for_orphans_after_s = 10 * BEAT_S
        self.work: list[asyncio.Task] = []

    def start(self) -> None:
        self.link.start()
        self.heartbeat.start()
        self.heartbeat.know_store("store", self.records.term)

    def describe(self, store: str, beat: int) -> Entry:
        return Entry(
            name=self.run,
            version="1",
            store=store,
            started=self.started,
            workers=sorted(self.workers),
            greatest=self.greatest,
            control=True,
            beat=beat,
            fitness=self.fitness,
        )

    async def add_worker(self) -> None:
        # The supervisor lists a worker before its process starts.
        self.greatest += 1
        k = self.greatest
        self.workers[k] = None
        self.list_changed()
        worker = await self.history.start_worker(
            k, server=self.history.server, run=self.run, second_look_s=0.3, debounce_s=0
        )
        worker.app = self.history.app
        self.workers[k] = worker

    async def kill_worker(self, k: int) -> None:
        worker = self.workers.pop(k)
        self.history.forget(worker)
        await worker.kill()
        self.list_changed()

    def list_changed(self) -> None:
        self.reaper.set_alive(set(self.workers), self.greatest)
        self.heartbeat.beat_now()

    async def kill(self) -> None:
        """The whole node, without a word to Redis."""
        for k in list(self.workers):
            worker = self.workers.pop(k)
            self.history.forget(worker)
            await worker.kill()
        await self.heartbeat.link.close()
        await self.end_leading()
        await self.link.close()

    async def pause(self) -> None:
        """Its supervisor and control plane stop reading, as after SIGSTOP. What they have sent is carried out."""
        for transport in self.transports():
            transport.pause_reading()

    def resume(self) -> None:
        for transport in self.transports():
            transport.resume_reading()

    def transports(self) -> list:
        return transports(self.link) + transports(self.heartbeat.link)

    # -- the heartbeat's listener

    def joined(self) -> None:
        pass

    def refused(self, sentence: str) -> None:
        raise AssertionError(sentence)

    def drain_changed(self, within_s: float | None) -> None:
        raise AssertionError("no node is drained here")

    def nodes_changed(self, message: NodesChanged) -> None:
        self.reaper.set_nodes({node.run: node for node in message.nodes if node.run != self.run})

    def term_changed(self, term: int | None) -> None:
        for task in self.work:
            task.cancel()
        self.work, self.term = [], None
        if term is None:
            return
        if term < self.records.term:
            # Redis lost a term that was used.
            self.heartbeat.know_store("store", self.records.term)
            return
        self.records.term = self.term = term
        loop = asyncio.get_running_loop()
        self.work = [loop.create_task(self.reaper.run()), loop.create_task(self.read_rows())]

    async def read_rows(self) -> None:
        outbox = Outbox(self.link, self.history.keys, 0.0)
        announced = Announced(outbox, lambda _: ENDPOINT, COMPARE_AFTER_S)
        while True:
            await asyncio.sleep(BEAT_S / 5)
            with suppress(LinkDown, hiredis.ReplyError):
                taken = await outbox.take()
                if announced.is_due():
                    announced.begin(outbox.connects, self.records.newest_first())
                if self.records.commit(self.term, taken.rows, announced):
                    outbox.committed(taken.rows)
                else:
                    # A paused leader whose term Redis restored.
                    self.heartbeat.know_store("store", self.records.term)
                await announced.compare()

    async def end_leading(self) -> None:
        work, self.work, self.term = self.work, [], None
        for task in work:
            task.cancel()
        await asyncio.gather(*work, return_exceptions=True)


class SingleRedis:
    """The session's Redis, which may fail over: what was written since `save` is lost then."""

    # A key of the test, not of redpoll.
    SAVED = b"saved:{%b}:all"
    SAVE = """local saved = {}
        for _, key in ipairs(redis.call('KEYS', 'rp:*')) do
            saved[#saved + 1] = {key, redis.call('DUMP', key), math.max(0, redis.call('PTTL', key))}
        end
        redis.call('SET', KEYS[1], cmsgpack.pack(saved))"""
    # What it saved of a slot that was moved away meanwhile belongs to another master.
    RESTORE = """local saved = redis.call('GET', KEYS[1])
        redis.call('FLUSHALL')
        redis.call('SET', KEYS[1], saved)
        for _, entry in ipairs(cmsgpack.unpack(saved)) do redis.pcall('RESTORE', entry[1], entry[3], entry[2]) end"""

    def __init__(self, server) -> None:
        self.url = server.url
        self._clients = {self.SAVED % TAGS[0]: redis_py.Redis(unix_socket_path=server.path)}

    def save(self) -> None:
        """What the replicas have at this moment."""
        for key, client in self._clients.items():
            client.eval(self.SAVE, 1, key)

    def fail_over(self, random: random.Random) -> None:
        """A replica becomes the master: all connections to the old one end."""
        key = random.choice(list(self._clients))
        pipe = self._clients[key].pipeline(transaction=False)
        # Redis executes the three without others in between.
        pipe.execute_command("CLIENT", "KILL", "TYPE", "pubsub")
        pipe.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
        pipe.eval(self.RESTORE, 1, key)
        pipe.execute()

    def move_slot(self, random: random.Random) -> None:
        raise NotImplementedError

    def flush(self) -> None:
        for client in self._clients.values():
            client.flushall()

    def close(self) -> None:
        for client in self._clients.values():
            client.close()


class MovingCluster(SingleRedis):
    """A Redis Cluster with two masters. The slots of the histories' keys move between them."""

    def __init__(self, cluster) -> None:
        self.url = cluster.url
        self._cluster = cluster
        used = {shard("7", channel) for channel in (*ROOMS, *NEWS)} | {0}
        self._slots = [crc_hqx(TAGS[at], 0) % 16384 for at in used]
        unused = [at for at in range(64) if at not in used]
        tags = (TAGS[unused[0]], TAGS[unused[-1]])
        self._clients = {
            self.SAVED % tag: redis_py.Redis(port=node.port) for tag, node in zip(tags, cluster.nodes, strict=True)
        }

    def move_slot(self, random: random.Random) -> None:
        self._cluster.move_slot(random.choice(self._slots))


class History(RandomHistory):
    def __init__(self, seed: int, start_worker, server: SingleRedis, link, keys, app) -> None:
        super().__init__(seed, link, keys)
        self.kind = KINDS[seed % len(KINDS)]
        self.start_worker = start_worker
        self.server = server
        self.app = app
        self.records = Records()
        self.nodes: list[Node] = []
        self.paused: list[Node] = []
        self.numbers = 0
        self.failovers = 0

    async def add_node(self) -> None:
        self.numbers += 1
        node = Node(self, self.numbers)
        self.nodes.append(node)
        node.start()
        for _ in range(self.random.choice((1, 2))):
            await node.add_worker()

    @property
    def workers(self) -> list:
        return [worker for node in self.nodes for worker in node.workers.values() if worker is not None]

    def random_info(self) -> bytes:
        return b""

    async def mishap(self) -> None:
        node = self.random.choice(self.nodes)
        worker = self.random.choice(self.workers)
        chance = self.random.random()
        if chance < 0.1:
            # It can't do the leader's work any more, or can again.
            node.fitness = self.random.choice(list(Fitness))
        elif chance < 0.2:
            # One connection of several in a Cluster, or all.
            if self.kind == "cluster" and worker.link.up and self.random.random() < 0.5:
                worker.link.drop_connection(self.random.randrange(SHARDS), "cut")
            else:
                worker.link.drop("cut")
        elif chance < 0.35:
            self.lose_replies(worker)
        elif chance < 0.5:
            await node.kill_worker(self.random.choice(list(node.workers)))
            await node.add_worker()
        elif chance < 0.65:
            if len(self.nodes) > 1 and node not in self.paused:
                self.nodes.remove(node)
                await node.kill()
            await self.add_node()
        elif chance < 0.8:
            await node.pause()
            self.paused.append(node)
            await asyncio.sleep(self.random.random() * 2 * PAUSE_S)
            self.resume_all()
        elif chance < 0.87:
            for link in (node.link, node.heartbeat.link):
                link.drop("cut")
        elif chance < 0.93 and self.kind == "cluster":
            # The workers go on meanwhile.
            await asyncio.to_thread(self.server.move_slot, self.random)
        elif self.kind != "no failover":
            await self.fail_over()

    def resume_all(self) -> None:
        for node in self.paused:
            node.resume()
        self.paused.clear()

    async def fail_over(self) -> None:
        self.failovers += 1
        await asyncio.to_thread(self.server.fail_over, self.random)

    async def run(self, steps: int) -> None:
        await asyncio.to_thread(self.server.save)
        for _ in range(steps):
            if self.random.random() < 0.62 - 0.03 * len(self.sockets):
                self.join()
            else:
                self.leave()
            if self.kind != "no failover" and self.random.random() < 0.2:
                await asyncio.to_thread(self.server.save)
            if self.random.random() < 0.08:
                await self.mishap()
            await self.let_others_run()
        if self.kind == "cluster":
            await asyncio.to_thread(self.server.move_slot, self.random)
        if self.kind != "no failover" and not self.failovers:
            await self.fail_over()

    async def end(self, truth, wait_until) -> None:
        await self.only_the_living()
        await truth.settled(self.workers)
        await wait_until(self.one_leads, timeout_s=60, what="exactly one leader, and none is fitter")
        for worker in self.workers:
            worker.leave_all()
        await truth.settled(self.workers)
        assert await truth.channel_keys() == []

    def one_leads(self) -> bool:
        leading = [node for node in self.nodes if node.term is not None]
        fittest = max(node.fitness for node in self.nodes)
        return [(node.term, node.fitness) for node in leading] == [(self.records.term, fittest)]

    async def only_the_living(self) -> None:
        """Waits until the nodes have removed everything of those that died."""
        deadline = time.monotonic() + 60
        while True:
            living = {worker.registry.worker_id for worker in self.workers}
            await self.link.wait_up()
            beats, listed = set(), set()
            with suppress(LinkDown):
                beats = {name.decode() for name in await self.link.ask(b"HKEYS", self.keys.beat)}
                listed = {name.decode() for name in await self.link.ask(b"HKEYS", self.keys.nodes)}
            if beats == living and listed == {node.run for node in self.nodes}:
                return
            assert time.monotonic() < deadline, (beats ^ living, listed, [node.run for node in self.nodes])
            await asyncio.sleep(0.02)


@pytest.fixture(scope="module")
def cluster():
    # A node that stops for a moment doesn't take the cluster down.
    with redis_cluster(2, replicated=False, node_timeout_ms=60_000) as cluster:
        yield cluster


@pytest.fixture
async def begin(start_worker, make_app, make_truth, request):
    histories: list[History] = []

    async def make(seed: int):
        if KINDS[seed % len(KINDS)] == "cluster":
            server = MovingCluster(request.getfixturevalue("cluster"))
        else:
            server = SingleRedis(request.getfixturevalue("redis"))
        await asyncio.to_thread(server.flush)
        truth = await make_truth(server)
        keys = Keys(sharded=truth.link.sharded)
        app = make_app(hooks="om", max_presence_members=0)
        await DirectoryWriter(truth.link, keys).fill([app], 1)
        history = History(seed, start_worker, server, truth.link, keys, app)
        histories.append(history)
        for _ in range(3):
            await history.add_node()
        return history, truth

    yield make
    for history in histories:
        history.resume_all()
        for node in history.nodes:
            await node.kill()
        history.server.close()


@pytest.mark.parametrize("seed", SEEDS)
async def test_random_history_of_nodes_ends_in_agreement(seed, begin, wait_until):
    history, truth = await begin(seed)
    await history.run(150)
    await history.end(truth, wait_until)
    records = history.records
    # All have left, so the last row of each member and channel says so.
    complete = ["member.added", "member.removed"], ["channel.occupied", "channel.vacated"]
    await wait_until(
        lambda: all(names in (pair * (len(names) // 2) for pair in complete) for names in records.changes().values()),
        timeout_s=60,
        what=f"rows that alternate: {records.changes()}",
    )
