"""Tasks that end in time, that begin others, and that don't end."""

import asyncio

from redpoll.loop.ending import finish_tasks


def begin(tasks, work):
    task = asyncio.get_running_loop().create_task(work)
    tasks.add(task)
    task.add_done_callback(tasks.discard)
    return task


async def test_tasks_that_end_in_time_are_not_cancelled_and_neither_are_those_that_they_begin():
    tasks, ended = set(), []

    async def work(name, following):
        await asyncio.sleep(0)
        if following:
            begin(tasks, work(following[0], following[1:]))
        ended.append(name)

    begin(tasks, work("a", "bc"))
    await finish_tasks(tasks, 60)
    assert ended == ["a", "b", "c"]
    assert not tasks


async def test_a_task_that_takes_longer_is_cancelled_and_has_ended():
    tasks, ended = set(), []

    async def work():
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            ended.append("cleaned up")

    task = begin(tasks, work())
    await finish_tasks(tasks, 0.01)
    assert ended == ["cleaned up"]
    assert task.cancelled()


async def test_without_tasks_it_returns_at_once():
    await finish_tasks(set(), 60)
