"""The deliveries of one endpoint in memory."""

from redpoll.control.webhooks.endpoint_queue import ChangesDuringRead, EndpointQueue, Memory
from redpoll.store.deliveries import Waiting


def waiting(number: int, body: bytes = b"{}") -> Waiting:
    return Waiting(
        **{
            **dict.fromkeys(Waiting._fields),
            "number": number,
            "id": f"d{number}",
            "endpoint_id": "e",
            "event": "client_event",
            "channel": "news",
            "body": body,
            "attempts": 0,
            "cycle_from": 0,
        }
    )


def test_delivery_loaded_twice_is_queued_once():
    queue = EndpointQueue("e", Memory())
    queue.load(waiting(1))
    queue.load(waiting(1))
    assert len(queue.ready) == 1
    assert queue.ready.take() == waiting(1)
    # It is under way, but in the store it still waits.
    queue.load(waiting(1))
    assert queue.ready.take() is None


def test_delivery_finished_during_a_read_is_remembered_for_that_read():
    queue = EndpointQueue("e", Memory())
    queue.load(waiting(1))
    queue.withdrawn.add(1)
    queue.during_read = ChangesDuringRead()
    queue.release(1)
    assert (queue.loaded, queue.withdrawn, queue.during_read.removed) == ({}, set(), {1})


def test_large_bodies_fill_a_queue_sooner_while_all_together_have_many():
    memory = Memory()
    queue, other = EndpointQueue("e", memory), EndpointQueue("other", memory)
    queue.load(waiting(1, bytes(100_000)))
    assert queue.wants_more
    memory.size += 100_000_000
    assert (queue.is_full, queue.wants_more) == (True, False)
    # Each has at least one.
    assert not other.is_full
    other.load_read([waiting(2, bytes(100_000)), waiting(3)], ChangesDuringRead())
    assert (list(other.loaded), other.more_in_store, other.is_full) == ([2], True, True)
    memory.size -= 100_000_000
    for number, loaded_by in ((1, queue), (2, other)):
        assert loaded_by.wants_more
        loaded_by.release(number)
        assert (loaded_by.loaded, loaded_by.size) == ({}, 0)
    assert memory.size == 0


def test_failing_endpoint_has_a_smaller_part_of_the_memory():
    """It has few attempts at a time. Many endpoints that hang would leave the others little."""
    queue = EndpointQueue("e", Memory())
    room = queue.room
    queue.failures = 20
    assert queue.is_failing
    assert 0 < queue.room < room
    queue.failures = 0
    assert queue.room == room


def test_queue_leaves_some_only_if_it_has_no_room_for_what_the_store_has():
    queue = EndpointQueue("e", Memory())
    queue.more_in_store = True
    assert not queue.leaves_some
    queue.load(waiting(1, bytes(queue.room)))
    assert queue.leaves_some
    queue.more_in_store = False
    assert not queue.leaves_some
