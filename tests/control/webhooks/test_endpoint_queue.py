"""One endpoint's deliveries in memory."""

from redpoll.control.webhooks.endpoint_queue import EndpointQueue, Meanwhile
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
    lane = EndpointQueue("e")
    lane.take_in(waiting(1))
    lane.take_in(waiting(1))
    assert len(lane.line) == 1
    assert lane.line.take() == waiting(1)
    # It is under way, and waits in the store still.
    lane.take_in(waiting(1))
    assert lane.line.take() is None


def test_what_is_over_while_the_store_is_read_is_remembered_until_then():
    lane = EndpointQueue("e")
    lane.take_in(waiting(1))
    lane.withdrawn.add(1)
    lane.reading = Meanwhile()
    lane.release(1)
    assert (lane.held, lane.withdrawn, lane.reading.gone) == (set(), set(), {1})
