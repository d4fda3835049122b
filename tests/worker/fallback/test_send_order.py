import itertools
import random

from redpoll.worker.fallback.send_order import SendOrder


def flat(ready):
    return list(itertools.chain(*ready))


def test_requests_in_order_are_delivered_at_once():
    order = SendOrder(1)
    assert [flat(order.take(number, [str(number)])) for number in (2, 3, 4)] == [["2"], ["3"], ["4"]]
    assert not order.waits(4)


def test_overtaken_request_comes_first():
    order = SendOrder(1)
    assert order.take(4, ["4"]) == []
    assert order.take(3, ["3"]) == []
    assert order.waits(3)
    assert flat(order.take(2, ["2"])) == ["2", "3", "4"]
    assert not order.waits(3)


def test_numbers_of_streams_and_polls_are_no_gap():
    order = SendOrder(1)
    assert order.take(3, ["3"]) == []
    assert flat(order.note(2)) == ["3"]
    assert order.note(4) == []
    assert flat(order.take(5, ["5"])) == ["5"]


def test_gap_that_never_fills_is_given_up():
    order = SendOrder(1)
    order.take(3, ["3"])
    order.take(5, ["5"])
    assert flat(order.give_up()) == ["3", "5"]
    assert order.last == 5
    # A late one is delivered, not lost.
    assert flat(order.take(2, ["2"])) == ["2"]


def test_only_gaps_before_a_number_are_given_up():
    order = SendOrder(1)
    for number in (3, 6, 8):
        order.take(number, [str(number)])
    assert flat(order.give_up(3)) == ["3"]
    assert flat(order.take(5, ["5"])) == []
    # What follows without a gap comes, too.
    order.note(7)
    assert flat(order.give_up(5)) == ["5", "6", "8"]
    assert (order.give_up(5), order.last) == ([], 8)


def test_repeated_request_is_delivered_once():
    order = SendOrder(1)
    assert flat(order.take(2, ["2"])) == ["2"]
    assert order.take(2, ["2"]) == []
    order.take(4, ["4"])
    assert order.take(4, ["4"]) == []
    assert flat(order.take(3, ["3"])) == ["3", "4"]


def test_requests_without_number_are_delivered_at_once():
    order = SendOrder(1)
    order.take(3, ["3"])
    assert flat(order.take(None, ["x"])) == ["x"]


def test_what_waits_is_bounded():
    order = SendOrder(1)
    delivered = [flat(order.take(number, [str(number)])) for number in range(3, 300)]
    assert flat(delivered) == [str(number) for number in range(3, 300)]
    order = SendOrder(1)
    assert flat(order.take(3, ["x" * 300_000])) == ["x" * 300_000]
    order = SendOrder(1)
    for number in range(10_000, 10_300):
        order.note(number)
    assert order.last >= 10_200


def test_any_arrival_delivers_each_once_and_almost_all_in_order():
    rng = random.Random(7)
    for _ in range(200):
        numbers = list(range(2, 60))
        polls = set(rng.sample(numbers, 10))
        # Each is late by at most five places.
        arrival = sorted(numbers, key=lambda number: number + rng.uniform(0, 5))
        order = SendOrder(1)
        seen = []
        for number in arrival:
            seen += flat(order.note(number) if number in polls else order.take(number, [str(number)]))
        assert seen == [str(number) for number in numbers if number not in polls]
