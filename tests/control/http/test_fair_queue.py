"""Addresses take turns in the queue of requests."""

import pytest

from redpoll.control.http.fair_queue import FairQueue


def test_addresses_take_turns_and_each_keeps_its_order():
    queue = FairQueue()
    for number in range(4):
        queue.add("192.0.2.1", f"a{number}")
    queue.add("192.0.2.2", "b0")
    assert [queue.pop() for _ in range(2)] == ["a0", "b0"]
    queue.add("192.0.2.3", "c0")
    queue.add("192.0.2.2", "b1")
    assert [queue.pop() for _ in range(len(queue))] == ["a1", "c0", "b1", "a2", "a3"]
    with pytest.raises(IndexError):
        queue.pop()


def test_addresses_of_one_ipv6_network_share_their_turns():
    queue = FairQueue()
    for host in range(3):
        queue.add(f"2001:db8::{host}", host)
    queue.add("2001:db8:0:1::1", "other")
    assert [queue.pop() for _ in range(2)] == [0, "other"]
