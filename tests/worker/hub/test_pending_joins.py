"""Whose turn it is to subscribe."""

import random
from types import SimpleNamespace

from redpoll.cluster.membership.local_channel import Ticket
from redpoll.worker.hub.pending_joins import MAX_IN_TURN, PendingJoins


class Registry:
    """Notes what it is given. Calls with the subscribes in `sent` are in flight: those can't be taken back."""

    def __init__(self):
        # In order.
        self.joined = {}
        self.sent = set()
        self.withdrawn = []

    def join(self, app, channel, ticket):
        self.joined[ticket.owner, channel] = None

    def cancel(self, ticket):
        in_flight = ticket in self.sent
        if in_flight:
            self.withdrawn.append(ticket)
        return in_flight


def connection():
    # Without equality, as the real one.
    class Connection:
        session = SimpleNamespace(app="app")

    return Connection()


def start():
    registry = Registry()
    return PendingJoins(registry), registry


def add(pending, client, count, first=0):
    tickets = {f"c{number}": Ticket(client) for number in range(first, first + count)}
    for channel, ticket in tickets.items():
        pending.add(client, channel, ticket)
    return tickets


def test_a_client_with_many_subscribes_leaves_room_for_another():
    pending, registry = start()
    many, other = connection(), connection()
    add(pending, many, 100)
    add(pending, other, 1)
    assert list(registry.joined) == [(many, f"c{number}") for number in range(MAX_IN_TURN)] + [(other, "c0")]


def test_each_answer_lets_the_next_go():
    pending, registry = start()
    client = connection()
    add(pending, client, 100)
    for number in range(100):
        assert len(registry.joined) == min(number + MAX_IN_TURN, 100)
        pending.answered(client, f"c{number}")
    assert [channel for _, channel in registry.joined] == [f"c{number}" for number in range(100)]
    assert not pending


def test_those_that_wait_are_withdrawn_without_redis():
    pending, registry = start()
    client = connection()
    add(pending, client, 20)
    assert pending.withdraw(client, "c18")
    assert not pending.withdraw(client, "c18")
    assert not pending.withdraw(client, "unknown")
    for number in range(20):
        if number != 18:
            pending.answered(client, f"c{number}")
    assert (client, "c18") not in registry.joined
    assert len(registry.joined) == 19


def test_withdrawn_in_flight_takes_room_until_it_is_answered():
    pending, registry = start()
    client = connection()
    registry.sent.update(add(pending, client, MAX_IN_TURN).values())
    for number in range(MAX_IN_TURN):
        pending.withdraw(client, f"c{number}")
    add(pending, client, 1, first=100)
    assert (client, "c100") not in registry.joined
    pending.withdrawn_answered(client)
    assert list(registry.joined)[-1] == (client, "c100")


def test_what_is_withdrawn_before_its_call_makes_room_at_once():
    pending, registry = start()
    client = connection()
    add(pending, client, MAX_IN_TURN + 1)
    pending.withdraw(client, "c0")
    assert list(registry.joined)[-1] == (client, f"c{MAX_IN_TURN}")


def test_nothing_more_goes_to_redis_when_the_connection_ends():
    pending, registry = start()
    client = connection()
    add(pending, client, 100)
    pending.stop(client)
    for number in range(100):
        assert pending.withdraw(client, f"c{number}")
    assert len(registry.joined) == MAX_IN_TURN
    assert not pending


def test_in_any_order_each_turn_is_used_and_none_is_exceeded():
    for seed in range(20):
        chance = random.Random(seed)
        pending, registry = start()
        clients = [connection() for _ in range(3)]
        # What each client waits for: in order, with its ticket.
        wanted = {client: {} for client in clients}
        number = 0
        for _ in range(300):
            client = chance.choice(clients)
            given = [channel for channel in wanted[client] if (client, channel) in registry.joined]
            if chance.random() < 0.5:
                wanted[client] |= add(pending, client, 1, first=number)
                number += 1
            elif given and chance.random() < 0.4:
                channel = chance.choice(given)
                pending.answered(client, channel)
                del wanted[client][channel]
            elif wanted[client] and chance.random() < 0.5:
                channel = chance.choice(list(wanted[client]))
                if channel in given and chance.random() < 0.5:
                    registry.sent.add(wanted[client][channel])
                pending.withdraw(client, channel)
                del wanted[client][channel]
            elif registry.withdrawn:
                pending.withdrawn_answered(registry.withdrawn.pop(chance.randrange(len(registry.withdrawn))).owner)
            for client in clients:
                given = sum((client, channel) in registry.joined for channel in wanted[client])
                in_turn = given + sum(ticket.owner is client for ticket in registry.withdrawn)
                assert in_turn <= MAX_IN_TURN
                assert in_turn == MAX_IN_TURN or given == len(wanted[client])
        for client in clients:
            channels = [int(channel[1:]) for owner, channel in registry.joined if owner is client]
            assert channels == sorted(channels)
