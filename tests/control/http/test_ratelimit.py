"""The rate limit by address: windows, headers and the bounded table, on a clock that the test sets."""

import pytest

from redpoll.control.http.ratelimit import RateLimit


class Clock:
    def __init__(self, now=1000.0):
        self.now = now

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


def headers_of(window):
    lines = (line.split(": ") for line in window.headers(window.room).decode().splitlines())
    return {name.removeprefix("X-RateLimit-"): value for name, value in lines}


def test_window_lasts_a_minute_from_the_first_trigger(clock):
    rate = RateLimit(3, clock=clock)
    passed = []
    for at in (0.0, 30.0, 59.9, 59.95, 60.0, 119.9):
        clock.now = 1000.0 + at
        passed.append(rate.take("a").passed)
    assert passed == [False, False, False, True, False, False]


def test_addresses_do_not_share_a_window(clock):
    rate = RateLimit(1, clock=clock)
    assert [rate.take(address).passed for address in "abab"] == [False, False, True, True]


def test_addresses_of_one_ipv6_network_share_a_window(clock):
    rate = RateLimit(1, clock=clock)
    addresses = ["2001:db8::1", "2001:db8::ffff:1", "2001:db8:0:1::1", "::ffff:192.0.2.1", "192.0.2.1", "192.0.2.2"]
    assert [rate.take(address).passed for address in addresses] == [False, True, False, False, True, False]


def test_headers_show_the_rest_and_the_end_of_the_window(clock):
    rate = RateLimit(2, clock=clock, wall_clock=lambda: 1_700_000_000.4)
    assert headers_of(rate.take("a")) == {"Policy": "ip", "Limit": "2", "Remaining": "1", "Reset": "1700000061"}
    clock.now += 10.5
    assert headers_of(rate.take("a"))["Remaining"] == "0"
    refused = rate.take("a")
    assert headers_of(refused) == {"Policy": "ip", "Limit": "2", "Remaining": "0", "Reset": "1700000061"}
    assert rate.left_s(refused) == 50
    clock.now += 49.4
    assert rate.left_s(rate.take("a")) == 1


def test_clock_change_does_not_lengthen_a_window(clock):
    wall = Clock(1_700_000_000.0)
    rate = RateLimit(1, clock=clock, wall_clock=wall)
    rate.take("a")
    wall.now -= 3600
    assert rate.take("a").passed
    clock.now += 60
    assert not rate.take("a").passed


def test_ended_windows_are_removed_when_new_ones_start(clock):
    rate = RateLimit(1, clock=clock)
    for number in range(1000):
        rate.take(f"old {number}")
    clock.now += 60
    for number in range(999):
        rate.take(f"new {number}")
    assert len(rate) == 999


def test_table_is_bounded_and_drops_the_oldest_windows_first(clock):
    rate = RateLimit(1, clock=clock, max_addresses=10)
    for number in range(1000):
        clock.now += 0.001
        rate.take(str(number))
    assert len(rate) <= 10
    assert rate.take("999").passed
    assert not rate.take("0").passed
