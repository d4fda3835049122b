"""Beginning and ending the leader's work, and transactions of a leader that was replaced."""

import pytest

from redpoll.control.leadership import Leadership, LeaderStore, introduce
from redpoll.store.leadership import NotLeader, raise_term, stored_term
from redpoll.store.store import Store, database_url


@pytest.fixture
async def store(tmp_path):
    store = await Store.open(database_url(tmp_path))
    yield store
    await store.close()


class Node:
    """The leadership of one node, and what it did."""

    def __init__(self, store: Store) -> None:
        self.did: list[str] = []
        self.told: list[dict] = []
        self.leadership = Leadership(store, self.told.append, lambda: self.did.append("begin"), self._end)
        self.store = LeaderStore(store, self.leadership)
        self.leadership.start()

    async def _end(self) -> None:
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


async def test_greater_term_of_the_same_leader_does_not_interrupt_its_work(make, store, wait_until):
    one = make()
    one.leadership.set_term(5)
    await wait_until(lambda: one.leadership.term == 5)
    one.leadership.set_term(6)
    await wait_until(lambda: one.leadership.term == 6)
    assert one.did == ["begin"]
    assert await raised(store) == 6


async def test_leader_that_was_paused_and_replaced_cannot_write_and_stops(make, store, wait_until):
    one, two = make(), make()
    one.leadership.set_term(1)
    await wait_until(lambda: one.leadership.term == 1)
    two.leadership.set_term(2)
    await wait_until(lambda: two.leadership.term == 2)
    with pytest.raises(NotLeader):
        async with one.store.change() as connection:
            await raise_term(connection, 9)
    await wait_until(lambda: one.did == ["begin", "end"])
    assert await raised(store) == 2
    # If Redis still names it as the leader, the supervisor asks for a greater term.
    await wait_until(lambda: one.told)
    assert one.told == [await introduce(store)]
    assert one.told[0]["term"] == 2
    async with two.store.change():
        pass


async def test_term_that_another_leader_used_is_reported(make, store, wait_until):
    one, two = make(), make()
    one.leadership.set_term(7)
    await wait_until(lambda: one.leadership.term == 7)
    two.leadership.set_term(3)
    await wait_until(lambda: two.told)
    assert two.told == [await introduce(store)]
    assert two.leadership.term is None
    assert two.did == []
    two.leadership.set_term(8)
    await wait_until(lambda: two.did == ["begin"])
