"""Subscribes without an answer."""

from redpoll.cluster.membership.local_channel import Ticket
from redpoll.cluster.membership.pending import Pending


def waiting_since(since):
    ticket = Ticket(None)
    ticket.since = since
    return ticket


def test_late_tickets_are_taken_in_order_and_so_many_at_a_time():
    pending = Pending()
    tickets = [waiting_since(number) for number in range(10)]
    for ticket in tickets:
        pending.add(ticket)
    pending.discard(tickets[1:3])
    assert pending.take_late(5, 2) == [tickets[0], tickets[3]]
    assert pending.take_late(5, 100) == [tickets[4], tickets[5]]
    assert pending.take_late(5, 100) == []
    assert len(pending) == 4


async def test_answered_and_withdrawn_subscribes_leave_while_an_earlier_one_waits(start_worker, wait_until):
    worker = await start_worker(join_wait_s=60)
    pending = worker.registry._pending
    run = worker.link.call_packed
    held_back = []

    def hold_back(command, done):
        if b"stuck" in command:
            held_back.append((command, done))
        else:
            run(command, done)

    worker.link.call_packed = hold_back
    stuck = worker.join("stuck")
    for number in range(100):
        await worker.attach(f"news-{number}")
    withdrawn = worker.join("stuck")
    worker.leave(withdrawn)
    assert len(pending) == 1
    run(*held_back[0])
    await wait_until(lambda: stuck.state == "attached")
    assert len(pending) == 0
