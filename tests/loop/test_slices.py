"""Paced work: what one pass of the loop does, by a clock of the test."""

import asyncio

import pytest

from redpoll.loop.slices import SLICE_S, Cursor, Queue, Slices, walk


def test_queue_has_each_item_once_in_the_order_of_arrival():
    queue = Queue()
    for item in "abcab":
        queue.add(item)
    queue.discard("b")
    assert len(queue) == 2
    queue.add("b")
    assert [queue.pop() for _ in range(3)] == ["a", "b", "c"]
    assert not queue
    with pytest.raises(IndexError):
        queue.pop()


def test_cursor_ends_with_the_part_that_is_shorter():
    cursor = Cursor(range(5))
    assert (cursor.next(3), cursor.done) == ([0, 1, 2], False)
    assert (cursor.next(3), cursor.done) == ([3, 4], True)
    cursor = Cursor([])
    assert (cursor.next(3), cursor.done) == ([], True)


async def test_slice_ends_when_its_time_is_over_and_the_next_pass_goes_on():
    now, done, others, slices = 0.0, [], [], None

    def step():
        nonlocal now
        now += SLICE_S / 4
        done.append(len(done))
        return len(done) < 10

    slices = Slices(step, after=lambda: others.append(len(done)))
    slices.clock = lambda: now
    slices.start()
    slices.start()
    assert done == []
    for _ in range(5):
        await asyncio.sleep(0)
    assert others == [4, 8, 10]


async def test_step_that_raises_does_not_stop_the_next():
    done, errors = [], []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: errors.append(str(context["exception"])))

    def step():
        done.append(len(done))
        if len(done) == 2:
            raise ValueError("one channel")
        return len(done) < 4

    Slices(step).start()
    for _ in range(4):
        await asyncio.sleep(0)
    assert done == [0, 1, 2, 3]
    assert errors == ["one channel"]


async def test_walk_lets_other_work_in_between(monkeypatch):
    # The clock says that each look comes after the end of the slice.
    monkeypatch.setattr("redpoll.loop.slices.monotonic", iter(range(1_000)).__next__)
    done, turns = [], 0

    async def other_work():
        nonlocal turns
        while len(done) < 120:
            turns += 1
            await asyncio.sleep(0)

    await asyncio.gather(walk(range(120), done.append), other_work())
    assert done == list(range(120))
    assert turns == 5
