"""Heartbeats of several nodes on a real Redis, ten times as often as in a server."""

import asyncio
import math
from typing import Any

import pytest
import redis as redis_py
from structlog.testing import capture_logs

from helpers.sentinel import redis_cluster
from redpoll.cluster.lifecycle import Lifecycle
from redpoll.cluster.nodes import UNDRAINED, Fitness, Node
from redpoll.cluster.redis.keys import SHARDS, Keys
from redpoll.cluster.redis.link import Link
from redpoll.host.heartbeat import Heartbeat
from redpoll.ipc.messages import NodesChanged

# Answers that come later than after twice the time restart the counts of silent nodes.
EVERY_S = 0.1


@pytest.fixture(autouse=True)
def _patient_with_redis(monkeypatch):
    monkeypatch.setattr("redpoll.host.heartbeat._ANSWER_WITHIN_S", 60.0)


class Supervisor:
    """A node's supervisor: what it says about its node, and what it heard of the others."""

    def __init__(
        self,
        url: str,
        run: str,
        name: str,
        *,
        store: str = "s",
        term: int = 0,
        started: float = 100.0,
        every_s: float = EVERY_S,
        alone: bool = False,
    ):
        self.run, self.name, self.store, self.stored_term, self.started = run, name, store, term, started
        self.workers = [1, 2]
        self.beat = 0
        self.lifecycle = Lifecycle.SERVING
        self.fitness = Fitness.FIT
        self.is_joined = False
        self.sentences: list[str] = []
        self.messages: list[NodesChanged] = []
        self.terms: list[int | None] = []
        self.drains: list[float | None] = []
        self.heartbeat = Heartbeat(url, "rp", run, self.describe, self, every_s=every_s, alone=alone)

    def start(self) -> None:
        self.heartbeat.start()
        self.heartbeat.know_store(self.store, self.stored_term)

    async def kill(self) -> None:
        """As a killed process does, sends nothing any more."""
        await self.heartbeat.link.close()

    def describe(self, store: str, beat: int) -> Node:
        self.beat = beat
        return Node(
            name=self.name,
            version="1",
            store=store,
            started=self.started,
            workers=self.workers,
            greatest=2,
            control=True,
            lifecycle=self.lifecycle,
            beat=beat,
            fitness=self.fitness,
        )

    def joined(self) -> None:
        self.is_joined = True

    def refused(self, sentence: str) -> None:
        self.sentences.append(sentence)

    def nodes_changed(self, message: NodesChanged) -> None:
        self.messages.append(message)

    def term_changed(self, term: int | None) -> None:
        self.terms.append(term)

    def drain_changed(self, within_s: float | None) -> None:
        self.drains.append(within_s)

    @property
    def leads(self) -> bool:
        return bool(self.terms) and self.terms[-1] is not None

    def sees(self, **alive: bool) -> bool:
        nodes = self.messages[-1].nodes if self.messages else ()
        return {node.name: node.alive for node in nodes} == alive


@pytest.fixture
async def make(redis):
    """`make(run, name, …)`: a Supervisor on the session's Redis, emptied."""
    made: list[Supervisor] = []

    def make(run: str, name: str, **more) -> Supervisor:
        made.append(Supervisor(redis.url, run * 12, name, **more))
        return made[-1]

    yield make
    for supervisor in made:
        await supervisor.heartbeat.leave()


async def test_single_node_joins_and_leads_with_its_first_heartbeat(make, wait_until):
    one = make("a", "one")
    one.start()
    await wait_until(lambda: one.leads)
    assert one.is_joined
    assert one.terms == [1]
    assert one.sees(one=True)
    assert one.messages[-1].leader == one.run


async def test_nothing_is_written_before_the_record_store_is_known(make, redis, wait_until):
    one = make("a", "one")
    one.heartbeat.start()
    link = Link(redis.url)
    link.start()
    await link.wait_up()
    await wait_until(lambda: one.heartbeat.link.up)
    assert await link.ask(b"EXISTS", Keys().nodes) == 0
    one.heartbeat.know_store("s", 0)
    await wait_until(lambda: one.is_joined)
    await link.close()


async def test_another_node_leads_when_the_leader_is_killed(make, wait_until):
    one, two = make("a", "one"), make("b", "two")
    one.start()
    await wait_until(lambda: one.leads)
    two.start()
    await wait_until(lambda: one.sees(one=True, two=True) and two.sees(one=True, two=True))
    assert not two.leads
    await one.kill()
    await wait_until(lambda: two.leads)
    assert two.terms == [2]
    # After a stall of this process, its counts begin again.
    await wait_until(lambda: two.sees(one=False, two=True))


async def test_another_node_leads_at_once_when_the_leader_ends(make, wait_until):
    one, two = make("a", "one"), make("b", "two")
    one.start()
    await wait_until(lambda: one.leads)
    two.start()
    await wait_until(lambda: two.is_joined)
    await one.heartbeat.leave()
    await wait_until(lambda: two.leads)
    assert two.sees(two=True)


async def test_leader_that_stalled_stops_when_it_finds_another_one(make, redis, wait_until):
    one, two = make("a", "one"), make("b", "two")
    one.start()
    await wait_until(lambda: one.leads)
    # While it stalls, its task doesn't run.
    one.heartbeat._task.cancel()
    two.start()
    await wait_until(lambda: two.leads)
    assert one.leads
    one.heartbeat.start()
    await wait_until(lambda: one.terms == [1, None])
    await wait_until(lambda: two.sees(one=True, two=True))
    assert two.leads


async def test_restarted_node_leads_at_once_with_a_greater_term(make, wait_until):
    first = make("a", "one", started=100.0)
    first.start()
    await wait_until(lambda: first.leads)
    await first.kill()
    again = make("b", "one", started=200.0, term=1)
    again.start()
    await wait_until(lambda: again.leads)
    # It didn't wait until the first one counts as dead.
    assert again.sees(one=True)
    assert again.terms == [2]


async def test_killed_run_in_an_own_redis_is_dead_at_the_first_reply(make, wait_until):
    """Its members stayed listed for 4 s beside those who had come back. A container has another name at each start."""
    first = make("a", "one")
    first.start()
    await wait_until(lambda: first.leads)
    await first.kill()
    again = make("b", "two", term=1, alone=True)
    again.start()
    await wait_until(lambda: again.leads)
    said = [{node.run: node.alive for node in message.nodes} for message in again.messages]
    assert said[0] == {first.run: False, again.run: True}
    assert all(alive == said[0] for alive in said)


async def test_live_node_with_another_record_store_is_refused_and_the_first_is_unaffected(make, wait_until):
    one, two = make("a", "one", started=0.0), make("b", "two", store="t")
    one.start()
    await wait_until(lambda: one.leads)
    two.start()
    await wait_until(lambda: two.sentences)
    assert "the server one, up since 1970-01-01 00:00:00 UTC, has another record store" in two.sentences[0]
    assert "database_url" in two.sentences[0]
    assert "redis_prefix" in two.sentences[0]
    assert not two.is_joined
    assert one.sees(one=True)
    assert one.terms == [1]


async def test_killed_node_with_another_record_store_is_in_the_way_only_until_it_counts_as_dead(make, wait_until):
    one, two = make("a", "one"), make("b", "two", store="t")
    one.start()
    await wait_until(lambda: one.leads)
    await one.kill()
    two.start()
    await wait_until(lambda: two.leads)
    assert two.sentences == []
    assert two.is_joined


async def test_change_is_told_at_once_and_only_once(make, wait_until):
    one, two = make("a", "one"), make("b", "two")
    one.start()
    two.start()
    await wait_until(lambda: one.sees(one=True, two=True) and two.sees(one=True, two=True))
    told = len(two.messages)
    one.workers = [2]
    one.heartbeat.beat_now()
    await wait_until(lambda: len(two.messages) > told)
    (node,) = [node for node in two.messages[-1].nodes if node.name == "one"]
    assert node.workers == [2]
    assert node.beat == 0
    assert len(two.messages) == told + 1


async def test_change_of_another_node_is_read_at_once(make, wait_until):
    patient, other = make("a", "one", every_s=3_600), make("b", "two", every_s=3_600)
    patient.start()
    await wait_until(lambda: patient.leads)
    other.start()
    await wait_until(lambda: other.sees(one=True, two=True))
    other.workers = [1]
    other.heartbeat.beat_now()
    await wait_until(
        lambda: {node.name: node.workers for node in patient.messages[-1].nodes} == {"one": [1, 2], "two": [1]}
    )


async def test_draining_node_does_not_become_the_leader(make, wait_until):
    one, two = make("a", "one"), make("b", "two")
    one.lifecycle = Lifecycle.EVACUATING
    one.start()
    await wait_until(lambda: one.is_joined)
    two.start()
    await wait_until(lambda: two.leads)
    assert one.terms == []


async def test_terms_do_not_repeat_after_redis_lost_its_data(make, redis, wait_until):
    one, two = make("a", "one", term=41), make("b", "two")
    one.start()
    await wait_until(lambda: one.terms == [42])
    two.start()
    await wait_until(lambda: two.is_joined)
    await one.kill()
    redis.flush()
    await wait_until(lambda: two.terms == [43])


async def test_drained_node_learns_it_from_its_heartbeat_until_it_ends(make, redis, wait_until):
    one, two = make("a", "one"), make("b", "two")
    one.start()
    two.start()
    await wait_until(lambda: one.is_joined and two.is_joined)
    with redis_py.Redis(unix_socket_path=redis.path) as client:
        client.hset(Keys().drained, one.run, "30")
        await wait_until(lambda: one.drains == [30.0])
        client.hset(Keys().drained, one.run, UNDRAINED)
        await wait_until(lambda: one.drains == [30.0, None])
        client.hset(Keys().drained, one.run, "0.5")
        await wait_until(lambda: one.drains == [30.0, None, 0.5])
        await one.heartbeat.leave()
        assert client.hgetall(Keys().drained) == {}
    assert two.drains == []


async def test_drained_node_stays_so_when_redis_has_lost_it_and_can_be_undrained(make, redis, wait_until):
    """Its data is gone, or another node counted it as dead, and the answer to the next heartbeat may be lost, too."""
    one = make("a", "one")
    one.start()
    await wait_until(lambda: one.is_joined)
    keys = Keys()
    with redis_py.Redis(unix_socket_path=redis.path) as client:
        client.hset(keys.drained, one.run, "30")
        await wait_until(lambda: one.drains == [30.0])
        for lose in (
            client.flushall,
            lambda: client.delete(keys.nodes, keys.drained),
            lambda: client.hdel(keys.drained, one.run),
        ):
            lose()
            await wait_until(lambda: client.hget(keys.drained, one.run) == b"30")
        assert one.drains == [30.0]
        client.hset(keys.drained, one.run, UNDRAINED)
        await wait_until(lambda: one.drains == [30.0, None])


async def test_term_that_the_record_store_has_seen_is_replaced_by_a_greater_one(make, wait_until):
    one = make("a", "one")
    one.start()
    await wait_until(lambda: one.terms == [1])
    one.heartbeat.know_store("s", 7)
    await wait_until(lambda: one.terms == [1, 8])
    # The same term again: control was restarted.
    one.heartbeat.know_store("s", 8)
    await asyncio.wait_for(beats(one, 3), 60)
    assert one.terms == [1, 8]


async def beats(supervisor: Supervisor, count: int) -> None:
    until = supervisor.beat + count
    while supervisor.beat < until:
        await asyncio.sleep(EVERY_S / 10)


async def test_nodes_with_one_name_are_both_shown_and_do_not_take_turns(make, wait_until, capsys):
    one, two = make("a", "same", started=100.0), make("b", "same", started=200.0)
    one.start()
    await wait_until(lambda: one.leads)
    two.start()
    await wait_until(lambda: two.is_joined)
    await asyncio.wait_for(beats(two, 10), 60)
    assert [one.leads, two.leads].count(True) == 1
    assert len(one.terms) + len(two.terms) <= 3


async def test_hanging_redis_costs_the_lead_but_no_restart(make, own_redis, wait_until):
    one = Supervisor(own_redis.url, "a" * 12, "one")
    one.start()
    await wait_until(lambda: one.leads)
    own_redis.kill()
    await wait_until(lambda: not one.heartbeat.link.up)
    own_redis.start()
    await asyncio.wait_for(beats(one, 2), 60)
    await one.heartbeat.leave()


async def test_lead_moves_to_a_fitter_node_and_stays_with_equal_ones(make, wait_until):
    one, two = make("a", "one"), make("b", "two")
    one.fitness = two.fitness = Fitness.WITHOUT_STORE
    one.start()
    await wait_until(lambda: one.leads)
    two.start()
    await wait_until(lambda: one.sees(one=True, two=True))
    await asyncio.wait_for(beats(one, 10), 60)
    # The record store is away for both, so somebody still leads.
    assert one.terms == [1]
    two.fitness = Fitness.FIT
    await wait_until(lambda: two.leads)
    await wait_until(lambda: one.terms == [1, None])
    assert two.terms == [2]
    one.fitness = Fitness.FIT
    await asyncio.wait_for(beats(two, 10), 60)
    assert (one.terms, two.terms) == ([1, None], [2])
    with capture_logs() as logs:
        two.fitness = Fitness.UNFIT
        await wait_until(lambda: one.terms == [1, None, 3])
    assert [line["fitness"] for line in logs if "fitness" in line] == ["UNFIT"]


async def test_less_fit_node_does_not_take_a_free_lead_while_a_fitter_one_lives(make, wait_until):
    one, two, three = make("a", "one"), make("b", "two"), make("c", "three")
    two.fitness = Fitness.UNFIT
    one.start()
    await wait_until(lambda: one.leads)
    two.start()
    three.start()
    await wait_until(lambda: one.sees(one=True, two=True, three=True))
    await one.heartbeat.leave()
    await wait_until(lambda: three.leads)
    assert two.terms == []
    await three.kill()
    # Nobody else is left.
    await wait_until(lambda: two.leads)


@pytest.fixture
async def make_in_cluster():
    """As `make`, on a Redis Cluster. `lose(supervisor)`: it can't reach one of the masters, which isn't that of the
    heartbeats; `await find(supervisor)`: it can again."""
    made: list[Supervisor] = []
    reads: dict[Supervisor, Any] = {}
    # A node that stops for a moment isn't replaced.
    with redis_cluster(node_timeout_ms=60_000) as cluster:

        def make(run: str, name: str) -> Supervisor:
            made.append(Supervisor(cluster.url, run * 12, name))
            return made[-1]

        async def no_map() -> None:
            raise OSError("can't be reached")

        def lose(supervisor: Supervisor) -> None:
            link = supervisor.heartbeat.link
            reads[supervisor] = link._connect_all
            link._connect_all = no_map
            link.drop_connection(SHARDS - 1, "for the test")
            assert not link.up
            assert link.is_usable(0)

        async def find(supervisor: Supervisor) -> None:
            supervisor.heartbeat.link._connect_all = reads[supervisor]
            await supervisor.heartbeat.link.wait_up()

        yield make, lose, find
        for supervisor in made:
            await supervisor.heartbeat.leave()


async def test_node_that_lacks_a_master_stays_alive_and_counts_as_cut_off_if_others_reach_it(
    make_in_cluster, wait_until
):
    """Its heartbeat stopped, so its members left everywhere, and its clients stayed where they got nothing."""
    make, lose, find = make_in_cluster
    one, two = make("a", "one"), make("b", "two")
    for node in (one, two):
        node.start()
    await wait_until(lambda: one.sees(one=True, two=True) and two.sees(one=True, two=True))
    assert one.heartbeat.answered_s_ago < math.inf
    # While all lack it, none of them counts as cut off.
    for node in (one, two):
        lose(node)
    await asyncio.wait_for(beats(one, 60), 60)
    assert one.heartbeat.answered_s_ago == two.heartbeat.answered_s_ago == math.inf
    await find(two)
    await wait_until(lambda: one.heartbeat.answered_s_ago < math.inf)
    assert not one.heartbeat.link.up
    await wait_until(lambda: two.sees(one=True, two=True))
    await find(one)
    assert one.heartbeat.answered_s_ago < math.inf
