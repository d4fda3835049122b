"""The connections of a worker by app, and what is known of them without a look at each."""

import time

import pytest

from redpoll._fanout import Flusher, Sink
from redpoll.protocol.apps import App
from redpoll.protocol.grants import RevokedGrants
from redpoll.protocol.session import Session
from redpoll.worker.hub.open_connections import _PART, OpenConnections, UnsentBytes


class Connection(Sink):
    """A sink with a session: the connection as `OpenConnections` sees it."""

    def __init__(self, flusher, open_connections, app, number):
        super().__init__(flusher)
        self.set_sid(number, number)
        self.session = Session((number, number), open_connections.current(app))
        open_connections.add(self)


@pytest.fixture
def flusher():
    return Flusher(lambda: None)


@pytest.fixture
def open_connections(flusher):
    return OpenConnections(flusher, RevokedGrants(time.time))


@pytest.fixture
def make(flusher, open_connections):
    numbers = iter(range(1, 100_000))

    def make(app_id="1"):
        return Connection(flusher, open_connections, App(id=app_id, name="test", keys=()), next(numbers))

    return make


def test_connections_are_counted_and_found_by_app(open_connections, make):
    first, second, other = make(), make(), make("2")
    assert len(open_connections) == 3
    assert set(open_connections) == {first, second, other}
    assert set(open_connections.each_of_app("1")) == {first, second}
    assert list(open_connections.each_of_app("3")) == []
    assert (open_connections.count_of_app("1"), open_connections.count_of_app("3")) == (2, 0)
    assert open_connections.counts() == {"1": 2, "2": 1}
    assert open_connections.find("1", 2, 2) is second
    assert open_connections.find("1", 3, 3) is None
    assert open_connections.find("3", 1, 1) is None


def test_removed_members_are_known_while_a_connection_may_be_older(open_connections, make):
    open_connections.remove_member("1", "presence-a", "7")
    assert len(open_connections.removed) == 0
    first, second = make(), make()
    other = make("2")
    for app_id in "12":
        open_connections.remove_member(app_id, "presence-a", "7")
    for connection in (first, other):
        open_connections.discard(connection)
    assert len(open_connections.removed) == 1
    open_connections.discard(second)
    assert len(open_connections.removed) == 0


def test_connection_that_left_is_nowhere(open_connections, make):
    first, second = make(), make()
    assert open_connections.discard(first)
    assert not open_connections.discard(first)
    assert (len(open_connections), list(open_connections.each()), open_connections.find("1", 1, 1)) == (
        1,
        [second],
        None,
    )
    assert open_connections.discard(second)
    assert not open_connections.discard(second)
    assert (len(open_connections), open_connections.counts()) == (0, {})


def test_each_comes_although_others_leave_and_arrive_meanwhile(open_connections, make):
    connections = [make(str(number % 2)) for number in range(500)]
    seen = []
    for number, connection in enumerate(open_connections.each()):
        seen.append(connection)
        if number < 500 and number % 3 == 0:
            open_connections.discard(connections[number])
            make()
    stayed = {connection for connection in connections if connection in set(open_connections)}
    assert len(stayed) > 300
    assert stayed <= set(seen)


def test_changed_record_is_that_of_all_sessions_of_the_app_at_once(open_connections, make):
    connections, other = [make() for _ in range(3)], make("2")
    changed = App(id="1", name="changed", keys=())
    open_connections.app_changed(changed)
    open_connections.app_changed(App(id="3", name="unknown", keys=()))
    connections.append(make())
    assert [connection.session.app for connection in connections] == [changed] * 4
    assert other.session.app.name == "test"


def test_unsent_bytes_are_added_up_a_part_at_a_time(open_connections, make, flusher):
    sums = UnsentBytes(open_connections, 3)
    sums.advance()
    assert sums.total == 0
    connections = [make(str(number % 2)) for number in range(3 * _PART)]
    for connection in connections:
        connection.attach_to(Full())
        connection.send(b"x" * 10)
    looks = 0
    while not sums.total:
        sums.advance()
        looks += 1
        assert looks < 10
    assert sums.total == 10 * len(connections)
    # Three parts, and a call that sees that the round is complete.
    assert looks == 4
    for connection in connections:
        open_connections.discard(connection)
    for _ in range(4):
        sums.advance()
    assert sums.total == 0


class Full:
    """A transport without a socket, which is never written here."""

    def get_extra_info(self, name):
        return None
