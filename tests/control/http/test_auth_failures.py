"""The limit of failed authentications: buckets on a clock that the test sets, and requests over sockets."""

import itertools

import pytest
from structlog.testing import capture_logs

from redpoll.control.http.auth_failures import AuthFailures

BODY = b'{"name":"e","channels":["c"],"data":"{}"}'


class Clock:
    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


def failures_until_limited(failures, address="a"):
    for number in itertools.count():
        if failures.wait_s(address):
            return number
        failures.count(address)


@pytest.mark.parametrize("per_minute", [1, 3, 7, 60, 300])
def test_a_minutes_worth_of_failures_is_free_at_once_and_then_they_come_back_steadily(clock, per_minute):
    failures = AuthFailures(per_minute, clock=clock)
    assert failures_until_limited(failures) == per_minute
    assert failures.wait_s("b") == 0
    clock.now += 30
    assert failures_until_limited(failures) == per_minute // 2
    clock.now += 60
    assert failures_until_limited(failures) == per_minute


def test_the_wait_is_the_time_until_the_next_failure_is_free(clock):
    failures = AuthFailures(6, clock=clock)
    failures_until_limited(failures)
    assert failures.wait_s("a") == 10
    clock.now += 4.5
    assert failures.wait_s("a") == 6
    clock.now += 5.5
    assert failures.wait_s("a") == 0


def test_an_address_is_logged_once_a_minute(clock):
    failures = AuthFailures(60, clock=clock)
    with capture_logs() as lines:
        for _ in range(59):
            failures_until_limited(failures, "2001:db8::1")
            clock.now += 1
        assert lines == [
            {
                "log_level": "warning",
                "event": "authentication failures limited",
                "address": "2001:db8::/64",
                "per_minute": 60,
            }
        ]
        clock.now += 2
        failures_until_limited(failures, "2001:db8::1")
    assert len(lines) == 2


def test_addresses_of_one_ipv6_network_share_a_bucket(clock):
    failures = AuthFailures(2, clock=clock)
    for host in range(2):
        failures.count(f"2001:db8::{host:x}")
    assert failures.wait_s("2001:db8::ffff:1:2:3")
    assert not failures.wait_s("2001:db8:0:1::1")


def test_table_is_bounded_and_forgets_full_buckets(clock):
    failures = AuthFailures(60, clock=clock, max_addresses=10)
    for number in range(1000):
        failures.count(str(number))
    assert len(failures) == 10
    clock.now += 60
    for number in range(6):
        failures.count(f"new {number}")
    assert len(failures) == 6


# -- over sockets -----------------------------------------------------------------------------------------------


async def test_failures_above_the_rate_are_429_and_right_credentials_are_accepted(make_plane, redis, sign):
    plane = await make_plane(redis.url, auth_failures_per_minute=3)
    # Otherwise a failure is free again after 20 s.
    plane.plane.auth_failures.clock = lambda: 1000.0
    wrong = sign("POST", "/apps/3/events", BODY, secret="no")
    replies = [await plane.ask("POST", wrong, BODY) for _ in range(5)]
    assert [reply.status for reply in replies] == [401, 401, 401, 429, 429]
    assert replies[-1].json()["code"] == "rate_limited"
    assert 1 <= int(replies[-1].headers["retry-after"]) <= 20
    assert "REDPOLL_AUTH_FAILURES_PER_MINUTE" in replies[-1].json()["error"]
    for target, headers in (
        (sign("POST", "/apps/3/events", BODY), {}),
        (sign("POST", "/api/v1/apps/3/events", BODY, signed_path="/apps/3/events"), {}),
        ("/apps/3/events", {"X-Service-Key": "278d425bdf160c739803", "X-Service-Secret": "7ad3773142a6692b25b8"}),
    ):
        assert (await plane.ask("POST", target, BODY, headers)).status == 200
    # Each kind of wrong credential is limited.
    for target, headers in (
        ("/apps/3/events", {}),
        ("/apps/3/events", {"Authorization": "Bearer no"}),
        ("/apps/999/events", {"X-Service-Key": "278d425bdf160c739803", "X-Service-Secret": "no"}),
        (sign("POST", "/apps/3/events", BODY, timestamp="1"), {}),
    ):
        assert (await plane.ask("POST", target, BODY, headers)).status == 429
    assert plane.plane.auth_failures.limited_total == 6
    metrics = (await plane.ask("GET", "/metrics")).body
    assert b'redpoll_auth_failures_limited_total{worker="control"} 6' in metrics


async def test_other_refusals_are_no_failures(make_plane, redis, sign):
    plane = await make_plane(redis.url, auth_failures_per_minute=1)
    for _ in range(3):
        assert (await plane.ask("GET", "/nothing")).status == 404
        assert (await plane.ask("POST", sign("POST", "/apps/3/events", b"{"), b"{")).status == 400
    assert (await plane.ask("GET", "/apps/3/channels")).status == 401


async def test_the_address_is_the_one_that_a_trusted_proxy_reports(make_plane, redis):
    plane = await make_plane(redis.url, auth_failures_per_minute=1, trusted_proxies=("127.0.0.0/8",))
    clients = ("192.0.2.1", "192.0.2.2", "192.0.2.1", "2001:db8::1", "2001:db8::2")
    replies = [await plane.ask("GET", "/apps/3/channels", b"", {"X-Forwarded-For": client}) for client in clients]
    assert [reply.status for reply in replies] == [401, 401, 429, 401, 429]


async def test_at_the_limit_a_large_body_is_refused_by_its_head(make_plane, redis, sign, connect):
    plane = await make_plane(redis.url, auth_failures_per_minute=1)
    wrong = sign("POST", "/apps/3/events", BODY, secret="no")
    head = f"POST {wrong} HTTP/1.1\r\nHost: test\r\nContent-Length: 100000\r\n\r\n".encode()
    for status in (401, 429):
        wire = await connect(plane.port)
        assert (await wire.ask(head)).status == status
        wire.writer.close()


async def test_0_turns_the_limit_off(make_plane, redis):
    plane = await make_plane(redis.url, auth_failures_per_minute=0)
    assert {(await plane.ask("GET", "/apps/3/channels")).status for _ in range(310)} == {401}
