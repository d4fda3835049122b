"""Which workers are taken out of service, by ticks: heartbeats, processes and messages are said by the test."""

import signal

import pytest

from redpoll.cluster.membership.connection_state import Reach
from redpoll.host import cut_off
from redpoll.host.cut_off import CutOffWorkers
from redpoll.ipc.messages import EndService, ReturnToService, TellReach


class Child:
    """Records what the supervisor sends and signals."""

    def __init__(self, number: int) -> None:
        self.name = f"worker {number}"
        self.process = 10 + number
        self.sent: list[dict] = []
        self.signals: list[int] = []
        self.ended = self
        self.is_set = lambda: False

    def send(self, message: dict) -> None:
        self.sent.append(message)

    def signal(self, number: int) -> None:
        self.signals.append(number)


class Heartbeat:
    answered_s_ago = 0.1
    connects = 1


class Node:
    """Two workers that are subscribed, and what their supervisor learned."""

    def __init__(self) -> None:
        self.first, self.second = self.children = [Child(0), Child(1)]
        self.heartbeat = Heartbeat()
        self.changes = 0
        self.workers = CutOffWorkers(self.children, self.heartbeat, self.changed)
        self.ticks(1)
        for child in self.children:
            assert child.sent == [TellReach()]
            child.sent.clear()
            self.workers.said(child, Reach.SUBSCRIBED)

    def changed(self) -> None:
        self.changes += 1

    def ticks(self, count: int) -> None:
        for _ in range(count):
            self.workers.tick()

    def leave(self) -> None:
        """The second worker is down, is asked to close its clients, and has closed them."""
        self.workers.said(self.second, Reach.DOWN)
        self.ticks(cut_off.MAX_DOWN)
        self.workers.left(self.second, True)
        self.second.sent.clear()


@pytest.fixture
def node():
    return Node()


def test_worker_that_stays_down_is_asked_to_close_its_clients_and_then_holds_nobody_up(node):
    node.workers.said(node.second, Reach.DOWN)
    node.ticks(cut_off.MAX_DOWN - 1)
    assert not node.second.sent
    node.ticks(1)
    assert node.second.sent == [EndService()]
    # Until its clients are closed, publishes wait for it.
    assert (node.workers.numbers, node.workers.without_clients) == ([1], [])
    node.workers.left(node.second, True)
    assert (node.workers.numbers, node.workers.without_clients) == ([1], [11])
    assert (node.changes, node.first.sent) == (2, [])


def test_worker_counts_as_down_from_its_word_on_until_it_says_something_else_or_ends(node):
    for child in node.children:
        node.workers.said(child, Reach.DOWN)
    assert node.workers.message().down == [10, 11]
    node.heartbeat.connects += 1
    node.ticks(1)
    # Redis is back, and nobody has said yet that it is connected again.
    assert node.workers.message().down == [10, 11]
    node.workers.said(node.first, Reach.CONNECTING)
    node.workers.process_ended(node.second)
    assert node.workers.message().down == []


def test_it_admits_clients_only_when_all_nodes_know_that_publishes_wait_for_it_again(node):
    node.leave()
    node.workers.said(node.second, Reach.SUBSCRIBED)
    node.ticks(1)
    assert (node.workers.numbers, node.workers.without_clients, node.second.sent) == ([1], [], [])
    node.ticks(cut_off.RETURN_TICKS - 1)
    assert not node.second.sent
    node.ticks(1)
    assert (node.workers.numbers, node.second.sent) == ([], [ReturnToService()])


def test_it_is_out_again_if_it_loses_redis_before_that(node):
    node.leave()
    node.workers.said(node.second, Reach.SUBSCRIBED)
    node.ticks(5)
    node.workers.said(node.second, Reach.CONNECTING)
    node.ticks(1)
    assert (node.workers.without_clients, node.second.sent) == ([11], [])


def test_while_redis_is_away_for_the_whole_node_nothing_counts(node):
    for child in node.children:
        node.workers.said(child, Reach.DOWN)
    node.ticks(cut_off.MAX_DOWN - 1)
    node.heartbeat.answered_s_ago = float("inf")
    node.ticks(500)
    node.heartbeat.answered_s_ago = 0.1
    node.ticks(cut_off.MAX_DOWN - 1)
    assert not node.first.sent
    assert not node.second.sent


def test_worker_that_is_connected_may_take_longer_to_subscribe_and_longest_if_no_other_is_faster(node):
    node.workers.said(node.second, Reach.CONNECTING)
    node.ticks(cut_off.MAX_CONNECTING - 1)
    assert not node.second.sent
    node.ticks(1)
    assert node.second.sent == [EndService()]
    alone = Node()
    for child in alone.children:
        alone.workers.said(child, Reach.CONNECTING)
    alone.ticks(cut_off.MAX_CONNECTING_ALONE - 1)
    assert not alone.second.sent


def test_worker_that_connected_meanwhile_keeps_its_clients(node):
    node.workers.said(node.second, Reach.DOWN)
    node.ticks(cut_off.MAX_DOWN)
    node.workers.said(node.second, Reach.SUBSCRIBED)
    node.workers.left(node.second, False)
    assert (node.workers.numbers, node.workers.without_clients) == ([], [])


def test_worker_that_does_not_close_its_clients_in_time_is_killed_and_its_successor_is_in_service(node):
    node.workers.said(node.second, Reach.DOWN)
    node.ticks(cut_off.MAX_DOWN + cut_off.MAX_LEAVING)
    assert node.second.signals == [signal.SIGKILL]
    node.workers.process_ended(node.second)
    assert node.workers.numbers == []
    # The successor says at its start that it is down. If it stays down, publishes needn't wait for it either.
    node.workers.said(node.second, Reach.DOWN)
    node.second.sent.clear()
    node.ticks(cut_off.MAX_DOWN)
    assert node.second.sent == [EndService()]


def test_worker_that_says_nothing_since_redis_came_back_is_killed(node):
    """It hangs, so it can't say that its connection broke; publishes on all nodes wait for it."""
    node.heartbeat.connects += 1
    node.ticks(1)
    assert node.second.sent == [TellReach()]
    node.workers.said(node.first, Reach.SUBSCRIBED)
    node.ticks(cut_off.MAX_SILENT)
    assert (node.first.signals, node.second.signals) == ([], [signal.SIGKILL])


def test_worker_that_has_never_spoken_starts_and_is_not_killed():
    node = Node()
    node.workers.process_ended(node.second)
    node.heartbeat.connects += 1
    node.ticks(1)
    node.workers.said(node.first, Reach.SUBSCRIBED)
    node.ticks(500)
    assert not node.second.signals
