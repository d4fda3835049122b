"""Whose turn it is to subscribe, and who has waited too long."""

import random
from types import SimpleNamespace

from msgspec import structs

from redpoll.cluster.membership.join import Join, JoinState
from redpoll.cluster.membership.join_queue import MAX_IN_TURN, JoinQueue
from redpoll.cluster.membership.local_channels import LocalChannels
from redpoll.cluster.membership.timings import Timings
from redpoll.cluster.redis.keys import Keys
from redpoll.protocol.apps import App

RECORD = App(id="7", name="test", keys=())


class Worker:
    """A queue without Redis. `begun` are the joins that had their turn, in order; `sent` those that a call carries."""

    def __init__(self):
        self.begun = []
        self.sent = {}
        self.refused = []
        self.now = 0.0
        events = SimpleNamespace(opened=lambda _: None, dropped=lambda _: None, still_waiting=list, refused=self.refuse)
        self.channels = LocalChannels(Keys(), events, self.note)
        self.directory = SimpleNamespace(by_id={})
        self.joins = JoinQueue(self.channels, self.directory, events, Timings(), lambda: self.now)

    def note(self, local_channel):
        self.begun += [join for join in local_channel.queued or () if join not in self.begun]

    def refuse(self, local_channel, join, reason):
        self.refused.append((join, reason))

    def add(self, owner, count, first=0):
        joins = {f"c{number}": Join(owner, RECORD, f"c{number}") for number in range(first, first + count)}
        for join in joins.values():
            self.joins.add(join)
        return joins

    def send(self, join):
        """Its channel's call is made. It can't be taken back."""
        self.sent[join] = join.local_channel.plan()

    def answer(self, join):
        if join not in self.sent:
            self.send(join)
        joined, _ = join.local_channel.accept(self.sent.pop(join), b"1")
        self.joins.answered(joined)
        if not joined:
            self.joins.withdrawn_answered(join)


def test_a_client_with_many_joins_leaves_room_for_another():
    worker = Worker()
    many, other = worker.add("many", 100), worker.add("other", 1, first=200)
    assert worker.begun == [*list(many.values())[:MAX_IN_TURN], *other.values()]


def test_each_answer_lets_the_next_go():
    worker = Worker()
    joins = list(worker.add("client", 100).values())
    for number, join in enumerate(joins):
        assert len(worker.begun) == min(number + MAX_IN_TURN, 100)
        worker.answer(join)
    assert worker.begun == joins
    assert not worker.joins


def test_a_join_follows_the_record_that_is_present_at_its_turn():
    worker = Worker()
    joins = list(worker.add("client", MAX_IN_TURN + 1).values())
    worker.directory.by_id["7"] = structs.replace(RECORD, subscription_count=True)
    worker.answer(joins[0])
    assert joins[0].local_channel.tally is None
    assert joins[-1].local_channel.tally is not None


def test_those_that_wait_are_withdrawn_without_redis():
    worker = Worker()
    joins = worker.add("client", 20)
    assert worker.joins.withdraw("client", "c18")
    assert not worker.joins.withdraw("client", "c18")
    assert not worker.joins.withdraw("client", "unknown")
    gone = joins.pop("c18")
    for join in joins.values():
        worker.answer(join)
    assert gone not in worker.begun
    assert len(worker.begun) == 19


def test_withdrawn_in_flight_takes_room_until_it_is_answered():
    worker = Worker()
    joins = worker.add("client", MAX_IN_TURN)
    for channel, join in joins.items():
        worker.send(join)
        worker.joins.withdraw("client", channel)
    (late,) = worker.add("client", 1, first=100).values()
    assert late.state is JoinState.WAITING_TURN
    worker.answer(joins["c3"])
    assert late.state is JoinState.QUEUED


def test_what_is_withdrawn_before_its_call_makes_room_at_once():
    worker = Worker()
    joins = worker.add("client", MAX_IN_TURN + 1)
    worker.joins.withdraw("client", "c0")
    assert worker.begun[-1] is joins[f"c{MAX_IN_TURN}"]


def test_nothing_more_goes_to_redis_when_the_connection_ends():
    worker = Worker()
    worker.add("client", 100)
    worker.joins.stop("client")
    for number in range(100):
        assert worker.joins.withdraw("client", f"c{number}")
    assert len(worker.begun) == MAX_IN_TURN
    assert not worker.joins


def test_in_any_order_each_turn_is_used_and_none_is_exceeded():
    for seed in range(20):
        chance = random.Random(seed)
        worker = Worker()
        wanted = {client: {} for client in "abc"}
        withdrawn = []
        number = 0
        for _ in range(300):
            client = chance.choice("abc")
            begun = [channel for channel, join in wanted[client].items() if join.unanswered]
            if chance.random() < 0.5:
                wanted[client] |= worker.add(client, 1, first=number)
                number += 1
            elif begun and chance.random() < 0.4:
                worker.answer(wanted[client].pop(chance.choice(begun)))
            elif wanted[client] and chance.random() < 0.5:
                channel = chance.choice(list(wanted[client]))
                join = wanted[client].pop(channel)
                if join.state is JoinState.QUEUED and chance.random() < 0.5:
                    worker.send(join)
                    withdrawn.append(join)
                assert worker.joins.withdraw(client, channel)
            elif withdrawn:
                worker.answer(withdrawn.pop(chance.randrange(len(withdrawn))))
            for client, joins in wanted.items():
                in_turn = sum(join.unanswered for join in joins.values()) + sum(
                    join.owner == client for join in withdrawn
                )
                assert in_turn <= MAX_IN_TURN
                assert in_turn == MAX_IN_TURN or all(join.unanswered for join in joins.values())
        for client in wanted:
            channels = [int(join.channel[1:]) for join in worker.begun if join.owner == client]
            assert channels == sorted(channels)


async def test_late_joins_are_refused_in_order_and_others_stay():
    worker = Worker()
    joins = []
    for number in range(10):
        worker.now = float(number)
        joins += worker.add(f"client {number}", 1, first=number).values()
    worker.send(joins[1])
    worker.answer(joins[2])
    worker.now = worker.joins.wait_s + 4.5
    worker.joins.start()
    worker.joins.close()
    assert worker.refused == [(joins[number], "unavailable") for number in (0, 1, 3, 4)]
    assert [join.state for join in joins[:3]] == [JoinState.WITHDRAWN, JoinState.WITHDRAWN, JoinState.ATTACHED]
    # Redis accepted it nevertheless: it leaves in the next call.
    worker.answer(joins[1])
    assert joins[1].local_channel.plan().base == 0


async def test_more_late_joins_than_a_pass_may_refuse_are_refused_in_the_next(wait_until):
    worker = Worker()
    for number in range(250):
        worker.add(f"client {number}", 1, first=number)
    worker.now = worker.joins.wait_s + 1
    worker.joins.start()
    worker.joins.close()
    assert len(worker.refused) == 100
    await wait_until(lambda: len(worker.refused) == 250)
    assert not worker.joins
