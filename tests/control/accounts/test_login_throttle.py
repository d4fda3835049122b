"""How long logins wait after failed ones, by address and by name, on a clock that the test sets."""

import asyncio
from contextlib import AsyncExitStack

import pytest

from redpoll.control.accounts.login_throttle import MAX_WAIT_S, LoginThrottle

ADDRESS, OTHER = "10.0.0.1", "10.9.9.9"


class Time:
    """`sleep` advances the clock at once."""

    def __init__(self):
        self.now = 1000.0
        self.waits = []

    def clock(self):
        return self.now

    async def sleep(self, seconds):
        self.waits.append(seconds)
        self.now += seconds


async def admit(throttle, address, name):
    """An attempt whose password is checked in no time."""
    async with throttle.attempt(address, name) as wait_s:
        return wait_s


@pytest.fixture
def time():
    return Time()


@pytest.fixture
def throttle(time):
    return LoginThrottle(time.clock, time.sleep)


async def test_failures_with_a_name_wait_longer_and_longer_but_are_always_checked(throttle, time):
    for _ in range(30):
        assert await admit(throttle, ADDRESS, "admin") == 0
    assert time.waits[:5] == [0.5, 1, 2, 4, 8]
    assert max(time.waits) == 8 < MAX_WAIT_S


async def test_right_password_waits_only_for_the_present_interval(throttle, time):
    for _ in range(100):
        await admit(throttle, ADDRESS, "admin")
    time.waits.clear()
    assert await admit(throttle, ADDRESS, "admin") == 0
    assert sum(time.waits) <= MAX_WAIT_S
    throttle.succeeded(ADDRESS, "admin")
    assert await admit(throttle, ADDRESS, "admin") == 0
    assert len(time.waits) == 1


async def test_failures_with_another_name_or_at_another_address_slow_down_less(throttle, time):
    for _ in range(30):
        await admit(throttle, ADDRESS, "admin")
    time.waits.clear()
    assert await admit(throttle, ADDRESS, "vera") == 0
    assert await admit(throttle, OTHER, "admin") == 0
    assert all(wait <= 4 for wait in time.waits)


async def test_known_address_does_not_wait_for_the_failures_of_others(throttle, time):
    throttle.succeeded(ADDRESS, "admin")
    for number in range(200):
        await admit(throttle, f"10.0.{number}.1", "admin")
        await admit(throttle, ADDRESS, f"name {number}")
    time.waits.clear()
    assert await admit(throttle, ADDRESS, "admin") == 0
    assert time.waits == []


async def test_beyond_the_first_of_each_address_guesses_at_one_name_have_a_maximum_rate(throttle, time):
    addresses = [f"10.0.{number}.1" for number in range(200)]
    for address in addresses:
        for _ in range(5):
            assert await admit(throttle, address, "admin") == 0
    assert time.waits == []
    began, guesses = time.now, 0
    for address in addresses:
        guesses += await admit(throttle, address, "admin") == 0
    assert guesses / (time.now - began) < 0.3


async def test_owner_of_a_name_that_others_attack_gets_in_at_once(time):
    never = asyncio.Event()
    throttle = LoginThrottle(time.clock, lambda _seconds: never.wait())
    addresses = [f"10.0.{number}.1" for number in range(10)]
    tasks = [asyncio.create_task(admit(throttle, address, "admin")) for _ in range(12) for address in addresses]
    await asyncio.sleep(0)
    # The name has no place left for them.
    assert await admit(throttle, addresses[0], "admin") > MAX_WAIT_S
    for _ in range(5):
        assert await asyncio.wait_for(admit(throttle, OTHER, "admin"), 60) == 0
    never.set()
    await asyncio.gather(*tasks)


async def test_attempts_that_wait_for_their_own_name_delay_no_other_at_the_address(time):
    never = asyncio.Event()
    throttle = LoginThrottle(time.clock, lambda _seconds: never.wait())
    tasks = [asyncio.create_task(admit(throttle, ADDRESS, "admin")) for _ in range(9)]
    await asyncio.sleep(0)
    assert sum(not task.done() for task in tasks) == 4
    assert await asyncio.wait_for(admit(throttle, ADDRESS, "vera"), 60) == 0
    never.set()
    await asyncio.gather(*tasks)


async def test_addresses_of_one_ipv6_network_are_one_address(throttle, time):
    for number in range(30):
        await admit(throttle, f"2001:db8::{number:x}", f"name {number}")
    assert max(time.waits) == 4
    time.waits.clear()
    assert await admit(throttle, "2001:db8:0:1::1", "other") == 0
    assert time.waits == []


async def test_parallel_attempts_wait_for_each_other_and_the_excess_is_refused_uncounted(time):
    over = asyncio.Event()
    throttle = LoginThrottle(time.clock, lambda _seconds: over.wait())
    attempts = [asyncio.create_task(admit(throttle, ADDRESS, "admin")) for _ in range(50)]
    await asyncio.sleep(0)
    refused = [task.result() for task in attempts if task.done() and task.result() > 0]
    # Five are free. The next four wait 0.5, 1.5, 3.5 and 7.5 s, and 15.5 s is too long.
    assert len(refused) == 50 - 5 - 4
    assert all(MAX_WAIT_S < wait_s <= MAX_WAIT_S + 8 for wait_s in refused)
    over.set()
    assert sum(await asyncio.gather(*attempts)) == sum(refused)
    time.now += refused[-1]
    assert await admit(throttle, ADDRESS, "admin") == 0


async def test_waiting_attempts_are_bounded(time):
    never = asyncio.Event()
    throttle = LoginThrottle(time.clock, lambda _seconds: never.wait(), max_attempts=3)
    tasks = []
    for number in range(10):
        for _ in range(6):
            tasks.append(asyncio.create_task(admit(throttle, f"10.0.0.{number}", f"name {number}")))
    for _ in range(10):
        tasks.append(asyncio.create_task(admit(throttle, "10.0.0.0", "name 0")))
    await asyncio.sleep(0)
    assert sum(not task.done() for task in tasks) == 3
    never.set()
    await asyncio.gather(*tasks)


async def test_addresses_that_are_slowed_down_take_no_places_from_others(time):
    never = asyncio.Event()
    throttle = LoginThrottle(time.clock, lambda _seconds: never.wait(), max_attempts=3)
    for _ in range(5):
        await admit(throttle, ADDRESS, "admin")
    tasks = [asyncio.create_task(admit(throttle, ADDRESS, "admin")) for _ in range(3)]
    await asyncio.sleep(0)
    assert await admit(throttle, ADDRESS, "admin") == MAX_WAIT_S
    # Even when it needn't wait.
    time.now += 60
    assert await admit(throttle, ADDRESS, "admin") == MAX_WAIT_S
    async with AsyncExitStack() as checked:
        for number in range(3):
            assert await checked.enter_async_context(throttle.attempt(OTHER, f"name {number}")) == 0
        assert await admit(throttle, OTHER, "name 3") == MAX_WAIT_S
    never.set()
    await asyncio.gather(*tasks)


async def test_attempts_that_are_checked_are_bounded_but_for_those_of_known_addresses(throttle, time):
    throttle = LoginThrottle(time.clock, time.sleep, max_attempts=3)
    throttle.succeeded(ADDRESS, "admin")
    async with AsyncExitStack() as checked:
        for number in range(3):
            assert await checked.enter_async_context(throttle.attempt(f"10.0.0.{number + 2}", f"name {number}")) == 0
        assert await admit(throttle, OTHER, "admin") == MAX_WAIT_S
        # Another name at the known address is a stranger's.
        assert await admit(throttle, ADDRESS, "vera") == MAX_WAIT_S
        assert await admit(throttle, ADDRESS, "admin") == 0
    # The refused ones weren't counted.
    for _ in range(5):
        assert await admit(throttle, OTHER, "admin") == 0
    assert time.waits == []


async def test_failures_are_forgotten(throttle, time):
    for _ in range(30):
        await admit(throttle, ADDRESS, "admin")
    time.waits.clear()
    time.now += 1_000
    assert await admit(throttle, ADDRESS, "admin") == 0
    assert time.waits == []


async def test_memory_is_bounded(time):
    throttle = LoginThrottle(time.clock, time.sleep, max_keys=50)
    for number in range(1_000):
        await admit(throttle, f"10.0.{number // 250}.{number % 250}", "x" * number)
        throttle.succeeded(f"10.1.{number // 250}.{number % 250}", f"name {number}")
    assert len(throttle._attempts) <= 50
    assert len(throttle._known) <= 5
