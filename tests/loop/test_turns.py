"""Turns by app: who waits for whom, and what is left after a cancellation."""

import asyncio
from itertools import product

import pytest

from redpoll.loop.turns import TooManyWaiting, Turns


class Crowd:
    """Requests that take their turn and then the common lock, and stay until `go_on` lets one of them go."""

    def __init__(self, turns):
        self.turns = turns
        self.lock = asyncio.Lock()
        self.entered = []
        self._may_leave = asyncio.Semaphore(0)

    def enter(self, *names):
        """A task for each of these requests; the first letter of a name is its app."""
        return [asyncio.create_task(self._enter(name)) for name in names]

    async def _enter(self, name):
        async with self.turns.of(name[0]), self.lock:
            self.entered.append(name)
            await self._may_leave.acquire()

    def go_on(self, count=1):
        for _ in range(count):
            self._may_leave.release()


async def passes():
    """Enough passes of the loop for all that can go on."""
    for _ in range(20):
        await asyncio.sleep(0)


async def test_another_app_waits_for_one_request_of_an_app_not_for_all():
    crowd = Crowd(Turns(1_000))
    tasks = crowd.enter(*(f"a{number}" for number in range(1_000)))
    await passes()
    tasks += crowd.enter("b0", "c0", "b1")
    crowd.go_on(len(tasks))
    await asyncio.gather(*tasks)
    assert crowd.entered[:5] == ["a0", "b0", "c0", "a1", "b1"]
    # Those of one app keep their order.
    assert [name for name in crowd.entered if name[0] == "a"] == [f"a{number}" for number in range(1_000)]


async def test_request_beyond_the_bound_is_refused_at_once_until_there_is_room():
    turns = Turns(2)
    crowd = Crowd(turns)
    tasks = crowd.enter("a0", "a1", "a2")
    await passes()
    (refused,) = crowd.enter("a3")
    with pytest.raises(TooManyWaiting, match="2 such requests of this app wait"):
        await refused
    tasks += crowd.enter("b0")
    crowd.go_on()
    await passes()
    tasks += crowd.enter("a4")
    crowd.go_on(4)
    await asyncio.gather(*tasks)
    assert crowd.entered == ["a0", "b0", "a1", "a2", "a4"]


async def test_app_without_requests_leaves_nothing_also_after_an_error():
    turns = Turns(1)

    async def fail():
        async with turns.of("a"):
            async with turns.of("b"):
                assert len(turns) == 2
            assert len(turns) == 1
            raise LookupError

    with pytest.raises(LookupError):
        await fail()
    assert len(turns) == 0


@pytest.mark.parametrize("cancelled", list(product((False, True), repeat=3)))
@pytest.mark.parametrize("when", ["before it began", "while it waits", "just woken", "in its turn"])
async def test_cancelled_request_keeps_no_other_from_its_turn(cancelled, when):
    turns = Turns(3)
    entered, go_on = [], asyncio.Event()

    async def enter(number):
        async with turns.of("a"):
            entered.append(number)
            await go_on.wait()

    def cancel(moment):
        if moment == when:
            for task, is_cancelled in zip(tasks, cancelled, strict=True):
                if is_cancelled:
                    task.cancel()

    async with turns.of("a"):
        tasks = [asyncio.create_task(enter(number)) for number in range(3)]
        cancel("before it began")
        await passes()
        cancel("while it waits")
    # The turn is free, and the first of those that wait hasn't run yet.
    cancel("just woken")
    await passes()
    cancel("in its turn")
    go_on.set()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert tuple(task.cancelled() for task in tasks) == cancelled
    assert set(entered) >= {number for number, is_cancelled in enumerate(cancelled) if not is_cancelled}
    assert len(turns) == 0
    async with turns.of("a"):
        assert len(turns) == 1
