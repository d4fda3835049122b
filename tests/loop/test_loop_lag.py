"""Stalls of a loop, which the test causes itself."""

import asyncio
import time

import pytest

from redpoll.loop.loop_lag import LoopLag


async def test_every_stall_shows():
    lag = LoopLag()
    lag.start()
    try:
        for _ in range(3):
            await asyncio.sleep(0.06)
            lag.take_s()
            time.sleep(0.2)  # noqa: ASYNC251 - stalls the very loop that is measured
            await asyncio.sleep(0)
            # Less what passed before the timer was due.
            assert lag.take_s() >= 0.145
    finally:
        lag.stop()


async def test_longest_stall_is_reported_by_a_clock_of_the_test():
    lag = LoopLag()
    now = 100.0
    lag.clock = lambda: now
    lag.start()
    for late_s in (0.002, 0.5, 0.1):
        now += 0.05 + late_s
        lag.stop()
        lag._look()
    assert lag.take_s() == pytest.approx(0.5)
    assert lag.take_s() <= 0
    lag.stop()
    now += 5
    assert lag.take_s() == 0
