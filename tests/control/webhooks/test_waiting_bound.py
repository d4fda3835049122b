"""How many deliveries of an endpoint may wait."""

from structlog.testing import capture_logs

from redpoll.control.webhooks.waiting_bound import WaitingBound
from redpoll.store.deliveries import Depth


def deliveries(*channels, endpoint_id="e1", body=b"x"):
    return [{"endpoint_id": endpoint_id, "channel": channel, "body": body} for channel in channels]


def fitting(bound, *channels, **more):
    return [delivery["channel"] for delivery in bound.divide(deliveries(*channels, **more))[0]]


def test_public_channels_have_half_of_the_places_and_each_endpoint_its_own():
    bound = WaitingBound(4)
    assert fitting(bound, "a", "b", "c", "presence-d", "private-e", "private-f") == [
        "a",
        "b",
        "presence-d",
        "private-e",
    ]
    bound.look({"e1": Depth(4, 0, None)})
    assert fitting(bound, "private-e") == []
    assert fitting(bound, "a", endpoint_id="e2") == ["a"]
    bound.look({"e1": Depth(3, 0, None)})
    assert fitting(bound, "a", "private-e", "private-f") == ["private-e"]


def test_large_bodies_fill_the_bound_sooner():
    bound = WaitingBound(10)
    bound.look({"e1": Depth(2, 0, None, waiting_bytes=10 * 1024)})
    assert fitting(bound, "private-a") == []
    bound.look({"e1": Depth(2, 0, None, waiting_bytes=10 * 1024 - 1)})
    assert fitting(bound, "private-a", "private-b", body=bytes(2_000)) == ["private-a"]


def test_what_no_longer_waits_makes_room_at_once():
    bound = WaitingBound(2)
    bound.wrote([("e1", 2_000), ("e1", 10)], {})
    assert fitting(bound, "private-a") == []
    bound.left("e1", 10)
    assert fitting(bound, "private-a", "private-b") == ["private-a"]
    bound.left("e1", 2_000)
    assert fitting(bound, "private-a", "private-b", "private-c") == ["private-a", "private-b"]
    # What a leader before has written, and the tidying hasn't counted yet.
    bound.left("e1", 10)
    bound.left("e2", 10)
    for endpoint_id in ("e1", "e2"):
        assert len(fitting(bound, "private-a", "private-b", "private-c", endpoint_id=endpoint_id)) == 2


def test_what_was_written_counts_at_once_and_what_was_dropped_is_logged_once_a_minute():
    now = [0.0]
    bound = WaitingBound(4, lambda: now[0])
    bound.wrote([("e1", 10)] * 4, {})
    assert fitting(bound, "private-a") == []
    with capture_logs() as lines:
        for now[0] in (0.0, 30.0, 59.0):
            bound.wrote([], {"e1": 5})
        bound.wrote([], {"e2": 1})
    assert [line["endpoint"] for line in lines] == ["e1", "e2"]
    now[0] = 61.0
    with capture_logs() as lines:
        bound.wrote([], {"e1": 1})
    assert len(lines) == 1
    assert bound.dropped_total == 17
