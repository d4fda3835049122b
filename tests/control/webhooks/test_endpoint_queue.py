"""One endpoint's deliveries in memory."""

from redpoll.control.webhooks.endpoint_queue import ChangesDuringRead, EndpointQueue
from redpoll.store.deliveries import Waiting


def waiting(number: int) -> Waiting:
    return Waiting(
        **{
            **dict.fromkeys(Waiting._fields),
            "number": number,
            "id": f"d{number}",
            "endpoint_id": "e",
            "event": "client_event",
            "channel": "news",
            "body": b"{}",
            "attempts": 0,
            "cycle_from": 0,
        }
    )


def test_what_the_store_tells_twice_stands_in_line_once():
    queue = EndpointQueue("e")
    queue.load(waiting(1))
    queue.load(waiting(1))
    assert len(queue.ready) == 1
    assert queue.ready.take() == waiting(1)
    # It is under way, and waits in the store still.
    queue.load(waiting(1))
    assert queue.ready.take() is None


def test_what_is_over_while_the_store_is_read_is_remembered_until_then():
    queue = EndpointQueue("e")
    queue.load(waiting(1))
    queue.withdrawn.add(1)
    queue.during_read = ChangesDuringRead()
    queue.release(1)
    assert (queue.loaded, queue.withdrawn, queue.during_read.removed) == (set(), set(), {1})
