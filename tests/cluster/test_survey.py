import asyncio

import msgspec
import pytest

from redpoll.cluster.bus import Unavailable
from redpoll.cluster.membership.reaper import Reaper
from redpoll.cluster.nodes import Node
from redpoll.cluster.redis.link import Link
from redpoll.cluster.survey import Survey


def answers_with(worker, value):
    """Makes the worker answer every question with what `value` gives."""
    mine = Survey(worker.link, worker.keys)

    def asked(message):
        worker.sys.append(message)
        if "ask" in message:
            mine.answer(message["id"], worker.registry.w, value(message))

    worker.registry.on_sys = asked


@pytest.fixture
async def workers(start_worker):
    workers = [await start_worker(k) for k in range(3)]
    for n, worker in enumerate(workers):
        answers_with(worker, lambda message, n=n: n)
    return workers


async def test_every_worker_is_asked_and_every_answer_is_returned(workers, link, keys):
    answers = await Survey(link, keys, answer_s=60).ask("terminate", app="7", user="ü 1")
    assert answers == {worker.registry.w: n for n, worker in enumerate(workers)}
    message = workers[0].sys[-1]
    assert (message["ask"], message["app"], message["user"]) == ("terminate", "7", "ü 1")
    assert await link.ask(b"TTL", keys.answers(message["id"])) <= 10


async def test_without_workers_the_survey_ends_at_once(link, keys):
    assert await Survey(link, keys, answer_s=60).ask("terminate") == {}


async def test_silent_worker_makes_the_answer_unavailable_and_is_named(workers, link, keys):
    workers[1].registry.on_sys = workers[1].sys.append
    process = workers[1].registry.w.rpartition(".")[0]
    with pytest.raises(Unavailable, match=process):
        # Long enough to read the answers of the others once: before that, nobody is named.
        await Survey(link, keys).ask("terminate")


async def test_worker_without_clients_that_can_not_reach_redis_is_not_waited_for(workers, link, keys):
    workers[1].registry.on_sys = workers[1].sys.append
    run, k = workers[1].registry.w.split(".")[:2]
    about = {"name": "a", "version": "1", "store": "s", "started": 0.0, "workers": [int(k)], "greatest": int(k)}
    out = Node(**about, control=True, draining=False, beat=1, without_clients=[int(k)])
    asking = asyncio.ensure_future(Survey(link, keys, answer_s=60).ask("terminate"))
    # Its supervisor says so while the question waits; an entry that can't be read says nothing.
    await link.ask(b"HSET", keys.nodes, run, msgspec.json.encode(out), "b" * 12, "{}")
    assert set(await asking) == {workers[0].registry.w, workers[2].registry.w}


async def test_worker_that_is_reaped_meanwhile_is_not_waited_for(workers, link, keys):
    await workers[1].kill()
    asking = asyncio.ensure_future(Survey(link, keys, answer_s=60).ask("terminate"))
    await asyncio.sleep(0.1)
    assert not asking.done()
    await Reaper(link, keys, "ffffffffffff").reap(workers[1].registry.w)
    assert len(await asking) == 2


async def test_worker_that_was_given_up_and_lives_on_is_asked_by_its_newest_name(workers, link, keys, wait_until):
    await link.ask(b"HSET", keys.beat, workers[1].registry.w, -1)
    await wait_until(lambda: workers[1].registry.w.endswith(".1"))
    while not await link.ask(b"HEXISTS", keys.beat, workers[1].registry.w):
        await asyncio.sleep(0.005)
    answers = await Survey(link, keys, answer_s=60).ask("terminate")
    assert answers == {worker.registry.w: n for n, worker in enumerate(workers)}


async def test_worker_that_is_given_up_is_not_waited_for(workers, link, keys):
    await workers[1].kill()
    await link.ask(b"HSET", keys.beat, workers[1].registry.w, -1)
    assert len(await Survey(link, keys, answer_s=60).ask("terminate")) == 2


async def test_question_while_redis_is_away_is_unavailable(keys):
    link = Link("unix:///nowhere/redis.sock")
    link.start()
    with pytest.raises(Unavailable):
        await Survey(link, keys, answer_s=0.1).ask("terminate")
    await link.close()
