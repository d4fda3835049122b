"""How often a login may fail, by address and by name."""

from redpoll.control.dashboard import login_throttle
from redpoll.control.dashboard.login_throttle import LoginThrottle


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def test_address_has_ten_failures_in_five_minutes():
    clock = Clock()
    throttle = LoginThrottle(clock)
    for at in range(10):
        assert throttle.wait_s("10.0.0.1", f"name-{at}") == 0
        throttle.attempt("10.0.0.1", f"name-{at}")
    assert throttle.wait_s("10.0.0.1", "other") == login_throttle.WINDOW_S
    assert throttle.wait_s("10.0.0.2", "other") == 0
    clock.now = login_throttle.WINDOW_S
    assert throttle.wait_s("10.0.0.1", "other") == 0


def test_name_tried_from_many_addresses_must_wait():
    throttle = LoginThrottle(Clock())
    for at in range(login_throttle.MAX_PER_NAME):
        throttle.attempt(f"10.0.0.{at}", "admin")
    assert throttle.wait_s("10.9.9.9", "admin") > 0
    assert throttle.wait_s("10.9.9.9", "vera") == 0


def test_success_resets_the_count():
    throttle = LoginThrottle(Clock())
    for _ in range(10):
        throttle.attempt("10.0.0.1", "admin")
    throttle.succeeded("10.0.0.1", "admin")
    assert throttle.wait_s("10.0.0.1", "admin") == 0


def test_memory_is_bounded(monkeypatch):
    monkeypatch.setattr(login_throttle, "_MAX_WINDOWS", 50)
    throttle = LoginThrottle(Clock())
    for at in range(1_000):
        throttle.attempt(f"10.0.{at // 250}.{at % 250}", "x")
    assert len(throttle._windows) <= 52
