"""The deliveries of one endpoint in memory."""

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


def test_delivery_loaded_twice_is_queued_once():
    queue = EndpointQueue("e")
    queue.load(waiting(1))
    queue.load(waiting(1))
    assert len(queue.ready) == 1
    assert queue.ready.take() == waiting(1)
    # It is under way, but in the store it still waits.
    queue.load(waiting(1))
    assert queue.ready.take() is None


def test_delivery_finished_during_a_read_is_remembered_for_that_read():
    queue = EndpointQueue("e")
    queue.load(waiting(1))
    queue.withdrawn.add(1)
    queue.during_read = ChangesDuringRead()
    queue.release(1)
    assert (queue.loaded, queue.withdrawn, queue.during_read.removed) == (set(), set(), {1})
