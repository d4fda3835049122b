"""Beginning and ending the leader's work, and transactions of a leader that was replaced."""

import asyncio

import pytest
import sqlalchemy as sa
from structlog.testing import capture_logs

from redpoll.control.nodes.leadership import Leadership, LeaderStore, introduce
from redpoll.store.errors import StoreUnavailable
from redpoll.store.leadership import NotLeader, check_term, raise_term, stored_term
from redpoll.store.schema import meta
from redpoll.store.store import Store, database_url


@pytest.fixture
async def store(tmp_path):
    store = await Store.open(database_url(tmp_path))
    yield store
    await store.close()


def unavailable():
    raise StoreUnavailable("away")


class Node:
    """The leadership of one node, and what it did."""

    def __init__(self, store: Store) -> None:
        self.did: list[str] = []
        self.told: list[dict] = []
        self.does_without_store = False
        self.leadership = Leadership(store, self.told.append, self)
        self.store = LeaderStore(store, self.leadership)
        self.leadership.start()

    # -- its work

    def begin(self) -> None:
        assert not self.does_without_store
        self.does_without_store = True

    def end(self) -> None:
        assert self.does_without_store
        self.does_without_store = False

    def begin_with_store(self, store: LeaderStore) -> None:
        self.did.append("begin")

    async def end_with_store(self) -> None:
        self.did.append("end")


@pytest.fixture
async def make(store):
    made = []

    def make() -> Node:
        made.append(Node(store))
        return made[-1]

    yield make
    for node in made:
        await node.leadership.finish()


@pytest.fixture
def lead(wait_until):
    async def lead(node: Node, term: int) -> None:
        """Says that this node leads, and waits until it does."""
        node.leadership.set_term(term)
        await wait_until(lambda: node.leadership.term == term)

    return lead


async def raised(store: Store) -> int:
    async with store.reading() as connection:
        return await stored_term(connection)


async def test_work_begins_when_the_term_is_in_the_store_and_ends_with_it(make, store, wait_until):
    one = make()
    one.leadership.set_term(None)
    with pytest.raises(NotLeader):
        async with one.store.change():
            pass
    one.leadership.set_term(5)
    await wait_until(lambda: one.did == ["begin"])
    assert await raised(store) == 5
    async with one.store.change() as connection:
        assert await stored_term(connection) == 5
    one.leadership.set_term(None)
    await wait_until(lambda: one.did == ["begin", "end"])
    with pytest.raises(NotLeader):
        async with one.store.change():
            pass


async def test_greater_term_of_the_same_leader_does_not_interrupt_its_work(make, lead, store):
    one = make()
    await lead(one, 5)
    await lead(one, 6)
    assert one.did == ["begin"]
    assert await raised(store) == 6


async def test_leader_that_was_paused_and_replaced_cannot_write_and_stops(make, lead, store, wait_until):
    one, two = make(), make()
    await lead(one, 1)
    await lead(two, 2)
    with pytest.raises(NotLeader):
        async with one.store.change() as connection:
            await raise_term(connection, 9)
    await wait_until(lambda: one.did == ["begin", "end"])
    assert await raised(store) == 2
    # If Redis still names it as the leader, the supervisor asks for a greater term.
    await wait_until(lambda: one.told)
    assert one.told == [await introduce(store)]
    assert one.told[0].term == 2
    async with two.store.change():
        pass


async def test_two_nodes_never_lead_with_the_same_term(make, lead, store, wait_until):
    one, two = make(), make()
    await lead(one, 7)
    # Redis lost the write that made `one` the leader. Its supervisor will know with its next heartbeat.
    two.leadership.set_term(7)
    await wait_until(lambda: two.told)
    assert two.leadership.term is None
    assert two.told[0].term == 8
    async with one.store.change():
        pass
    two.leadership.set_term(9)
    await wait_until(lambda: two.did == ["begin"])
    with pytest.raises(NotLeader):
        async with one.store.change():
            pass
    # The supervisor may say the same again.
    two.leadership.set_term(None)
    await wait_until(lambda: two.did == ["begin", "end"])
    two.leadership.set_term(9)
    await wait_until(lambda: two.did == ["begin", "end", "begin"])


async def test_leader_whose_term_the_record_store_lost_gets_a_greater_one(make, lead, store, wait_until):
    one = make()
    await lead(one, 7)
    async with store.change() as connection:
        await connection.execute(sa.update(meta).where(meta.c.name == "term").values(value="6"))
    with pytest.raises(NotLeader):
        async with one.store.change():
            pass
    await wait_until(lambda: one.told)
    assert one.told[0].term == 8


async def test_term_refused_while_an_older_one_is_refused_leads_to_a_greater_one(
    make, lead, store, wait_until, monkeypatch
):
    one, two = make(), make()
    await lead(one, 5)
    await lead(two, 6)
    refused, transaction_ended = asyncio.Event(), asyncio.Event()

    async def introduce_later(store):
        refused.set()
        await transaction_ended.wait()
        return await introduce(store)

    monkeypatch.setattr("redpoll.control.nodes.leadership.introduce", introduce_later)
    # Redis lost the write that made `two` the leader. Work that began under term 5 goes on meanwhile.
    one.leadership.set_term(6)
    await refused.wait()
    with pytest.raises(NotLeader):
        async with one.store.change():
            pass
    transaction_ended.set()
    await wait_until(lambda: one.told)
    assert one.told[0].term == 7
    await lead(one, 7)


async def test_term_named_while_a_transaction_of_an_older_one_is_refused_counts(make, lead, wait_until, monkeypatch):
    one, two = make(), make()
    await lead(one, 5)
    await lead(two, 6)

    async def check_late(connection, term):
        one.leadership.set_term(8)
        await check_term(connection, term)

    with monkeypatch.context() as patch:
        patch.setattr("redpoll.control.nodes.leadership.check_term", check_late)
        with pytest.raises(NotLeader):
            async with one.store.change():
                pass
    await wait_until(lambda: one.leadership.term == 8)
    async with one.store.change():
        pass


async def test_term_that_another_leader_used_is_reported(make, lead, store, wait_until):
    one, two = make(), make()
    await lead(one, 7)
    two.leadership.set_term(3)
    await wait_until(lambda: two.told)
    assert two.told == [await introduce(store)]
    assert two.leadership.term is None
    assert two.did == []
    two.leadership.set_term(8)
    await wait_until(lambda: two.did == ["begin"])


async def test_what_needs_no_store_begins_and_ends_while_the_store_is_away(make, store, wait_until):
    one = make()
    await store.close()
    # It fails from now on.
    store._database.change = store._database.reading = unavailable
    with capture_logs() as logs:
        one.leadership.set_term(3)
        assert one.leadership.named == 3
        assert one.does_without_store
        await wait_until(lambda: any(line["event"] == "term not written" for line in logs))
    # The same again, with a greater term.
    one.leadership.set_term(4)
    assert one.does_without_store
    one.leadership.set_term(None)
    assert not one.does_without_store
    assert one.did == []
