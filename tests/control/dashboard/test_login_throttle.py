"""How often a login may fail, by address and by name."""

from redpoll.control.dashboard import login_throttle
from redpoll.control.dashboard.login_throttle import LoginThrottle


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def test_an_address_has_ten_failures_in_five_minutes():
    clock = Clock()
    tries = LoginThrottle(clock)
    for at in range(10):
        assert tries.wait_s("10.0.0.1", f"name-{at}") == 0
        tries.begun("10.0.0.1", f"name-{at}")
    assert tries.wait_s("10.0.0.1", "other") == login_throttle.WINDOW_S
    assert tries.wait_s("10.0.0.2", "other") == 0
    clock.now = login_throttle.WINDOW_S
    assert tries.wait_s("10.0.0.1", "other") == 0


def test_a_name_tried_from_many_addresses_rests_as_well():
    tries = LoginThrottle(Clock())
    for at in range(login_throttle.OF_NAME):
        tries.begun(f"10.0.0.{at}", "admin")
    assert tries.wait_s("10.9.9.9", "admin") > 0
    assert tries.wait_s("10.9.9.9", "vera") == 0


def test_who_gets_in_is_forgiven():
    tries = LoginThrottle(Clock())
    for _ in range(10):
        tries.begun("10.0.0.1", "admin")
    tries.succeeded("10.0.0.1", "admin")
    assert tries.wait_s("10.0.0.1", "admin") == 0


def test_a_flood_of_addresses_takes_no_more_memory_than_so_much(monkeypatch):
    monkeypatch.setattr(login_throttle, "_MOST_KNOWN", 50)
    tries = LoginThrottle(Clock())
    for at in range(1_000):
        tries.begun(f"10.0.{at // 250}.{at % 250}", "x")
    assert len(tries._windows) <= 52
