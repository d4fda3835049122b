"""Questions to all workers and to the control planes of other nodes, on a real Redis."""

import asyncio

import msgspec
import pytest
from structlog.testing import capture_logs

from helpers.known_nodes import known
from redpoll.cluster.bus import Unavailable
from redpoll.cluster.membership.reaper import Reaper
from redpoll.cluster.nodes import Node, NodesView
from redpoll.cluster.questions import Question, TerminateUser, encode
from redpoll.cluster.redis.link import Link
from redpoll.cluster.survey import NodeSurvey, Survey

QUESTION = TerminateUser("7", "ü 1")


@pytest.fixture
async def workers(start_worker):
    """Workers that answer with their number; `asked` has the questions."""
    workers = [await start_worker(k) for k in range(3)]
    for n, worker in enumerate(workers):
        worker.asked = []

        def answer(question, n=n, worker=worker):
            worker.asked.append(question)
            return n

        worker.answerers.answer(TerminateUser, answer)
    return workers


async def test_every_worker_is_asked_and_every_answer_is_returned(workers, link, keys):
    answers = await Survey(link, keys, answer_s=60).ask(QUESTION)
    assert answers == {worker.registry.worker_id: n for n, worker in enumerate(workers)}
    question = workers[0].asked[-1]
    assert (question.app, question.user) == ("7", "ü 1")
    assert 0 < await link.ask(b"TTL", keys.answers(question.id)) <= 10


async def test_answers_arrive_when_redis_has_no_memory_left(workers, link, keys, full):
    async with full():
        assert len(await Survey(link, keys, answer_s=60).ask(QUESTION)) == len(workers)


async def test_without_workers_the_survey_ends_at_once(link, keys):
    assert await Survey(link, keys, answer_s=60).ask(QUESTION) == {}


async def test_question_waits_until_all_workers_are_subscribed(workers, link, keys):
    ready = asyncio.Event()
    asking = asyncio.ensure_future(Survey(link, keys, answer_s=60, ready=ready.wait).ask(QUESTION))
    for asked in (link, *(worker.link for worker in workers)):
        await asked.ask(b"PING")
    assert not any(worker.asked for worker in workers)
    ready.set()
    assert len(await asking) == len(workers)


async def test_question_that_waits_too_long_for_the_workers_is_unavailable(workers, link, keys):
    with pytest.raises(Unavailable, match="not all workers are subscribed again"):
        await Survey(link, keys, answer_s=0.01, ready=asyncio.Event().wait).ask(QUESTION)
    assert not any(worker.asked for worker in workers)


async def test_silent_worker_makes_the_answer_unavailable_and_is_named(workers, link, keys):
    workers[1].answerers.hear(TerminateUser, workers[1].asked.append)
    process = workers[1].registry.worker_id.rpartition(".")[0]
    # It is named once the answers of the others were read, for which a slow machine needs longer.
    for answer_s in (0.5, 2, 8, 30):
        with pytest.raises(Unavailable) as refused:
            await Survey(link, keys, answer_s=answer_s).ask(QUESTION)
        if process in str(refused.value):
            break
    assert process in str(refused.value)


async def test_worker_without_clients_that_can_not_reach_redis_is_not_waited_for(workers, link, keys):
    workers[1].answerers.hear(TerminateUser, workers[1].asked.append)
    run, k = workers[1].registry.worker_id.split(".")[:2]
    about = {"name": "a", "version": "1", "store": "s", "started": 0.0, "workers": [int(k)], "greatest": int(k)}
    out = Node(**about, control=True, beat=1, without_clients=[int(k)])
    asking = asyncio.ensure_future(Survey(link, keys, answer_s=60).ask(QUESTION))
    # Its supervisor says so while the question waits; an entry that can't be read says nothing.
    await link.ask(b"HSET", keys.nodes, run, msgspec.json.encode(out), "b" * 12, "{}")
    assert set(await asking) == {workers[0].registry.worker_id, workers[2].registry.worker_id}


async def test_worker_that_is_reaped_meanwhile_is_not_waited_for(workers, link, keys):
    await workers[1].kill()
    asking = asyncio.ensure_future(Survey(link, keys, answer_s=60).ask(QUESTION))
    await asyncio.sleep(0.1)
    assert not asking.done()
    await Reaper(link, keys, "ffffffffffff").reap(workers[1].registry.worker_id)
    assert len(await asking) == 2


async def test_worker_that_was_given_up_and_lives_on_is_asked_by_its_newest_name(workers, link, keys, wait_until):
    await link.ask(b"HSET", keys.beat, workers[1].registry.worker_id, -1)
    await wait_until(lambda: workers[1].registry.worker_id.endswith(".1"))
    while not await link.ask(b"HEXISTS", keys.beat, workers[1].registry.worker_id):
        await asyncio.sleep(0.005)
    answers = await Survey(link, keys, answer_s=60).ask(QUESTION)
    assert answers == {worker.registry.worker_id: n for n, worker in enumerate(workers)}


async def test_worker_that_is_given_up_is_not_waited_for(workers, link, keys):
    await workers[1].kill()
    await link.ask(b"HSET", keys.beat, workers[1].registry.worker_id, -1)
    assert len(await Survey(link, keys, answer_s=60).ask(QUESTION)) == 2


async def test_question_while_redis_is_away_is_unavailable(keys):
    link = Link("unix:///nowhere/redis.sock")
    link.start()
    with pytest.raises(Unavailable):
        await Survey(link, keys, answer_s=0.1).ask(QUESTION)
    await link.close()


async def test_malformed_and_unknown_messages_are_refused_and_change_nothing(workers, link, keys):
    with capture_logs() as logs:
        for payload in (b"no JSON", b'{"type":"Sing","id":"1"}', b'{"type":"TerminateUser","id":"1","app":7}'):
            workers[0].answerers.received(payload)
    assert [line["event"] for line in logs] == ["message on a topic refused"] * 3
    assert workers[0].asked == []
    assert len(await Survey(link, keys, answer_s=60).ask(QUESTION)) == 3


# -- the control planes of other nodes


class FindNumber(Question, frozen=True):
    x: int


NAMES = {"aaaaaaaaaaaa": "one", "bbbbbbbbbbbb": "two", "cccccccccccc": "three"}


@pytest.fixture
async def surveys(redis, keys, link, wait_until):
    """The surveys of three nodes, by name. Each answers the question with its name and the question's `x`."""
    links, surveys = [], {}
    for run, name in NAMES.items():
        node_link = Link(redis.url)
        links.append(node_link)
        view = NodesView(run)
        survey = surveys[name] = NodeSurvey(node_link, keys, view, answer_s=60)
        node_link.on_push, node_link.on_up = survey.received, survey.link_up
        survey.answerers.answer_later(FindNumber, lambda question, name=name: asyncio.sleep(0, [name, question.x]))
        view.update([known(run, name) for run, name in NAMES.items()], None)
        node_link.start()
    while (await link.ask(b"PUBSUB", b"NUMSUB", keys.controls))[1] < len(NAMES):
        await asyncio.sleep(0.005)
    yield surveys
    for survey in surveys.values():
        await survey.finish()
    for node_link in links:
        await node_link.close()


def decoded(answers):
    return {name: msgspec.json.decode(answer) for name, answer in answers.items()}


async def test_every_other_node_is_asked_and_answers(surveys):
    answers, missing = await surveys["one"].ask(FindNumber(5))
    assert decoded(answers) == {"two": ["two", 5], "three": ["three", 5]}
    assert missing == []


async def test_node_that_is_silent_fails_or_is_slow_is_named(surveys):
    async def fail(question):
        raise OSError("disk full")

    surveys["two"].answerers.answer_later(FindNumber, fail)
    surveys["three"].answerers.answer_later(FindNumber, lambda question: asyncio.sleep(60))
    surveys["one"].answer_s = 0.5
    answers, missing = await surveys["one"].ask(FindNumber(5))
    assert (answers, missing) == ({}, ["three", "two"])
    # They go on to answer others.
    surveys["two"].answerers.answer_later(FindNumber, lambda question: asyncio.sleep(0, "back"))
    surveys["three"].answerers.answer_later(FindNumber, lambda question: asyncio.sleep(0, "quick"))
    surveys["one"].answer_s = 60
    answers, missing = await surveys["one"].ask(FindNumber(5))
    assert (decoded(answers), missing) == ({"two": "back", "three": "quick"}, [])


async def test_node_that_answers_a_hundred_questions_refuses_more_with_a_log_line(surveys, link, keys):
    asked, may_answer = [], asyncio.Event()

    async def answer(question):
        asked.append(question.x)
        await may_answer.wait()
        return question.x

    answerers = surveys["two"].answerers
    answerers.answer_later(FindNumber, answer)
    with capture_logs() as logs:
        for x in range(101):
            answerers.received(encode(FindNumber(x, id="hundred")))
        await asyncio.sleep(0)
    assert asked == list(range(100))
    assert [(line["event"], line["reason"]) for line in logs] == [
        ("question not answered", "100 others are being answered")
    ]
    may_answer.set()
    while await link.ask(b"LLEN", keys.answers("hundred")) < 100:
        await asyncio.sleep(0.005)
    assert decoded((await surveys["one"].ask(FindNumber(7))).answers)["two"] == 7


async def test_without_redis_all_nodes_are_named(keys):
    view = NodesView("aaaaaaaaaaaa")
    survey = NodeSurvey(Link("unix:///nowhere/redis.sock"), keys, view, answer_s=0.05)
    assert survey.alone
    view.update([known("bbbbbbbbbbbb", "two"), known("cccccccccccc", alive=False)], None)
    assert not survey.alone
    assert await survey.ask(FindNumber(5)) == ({}, ["two"])


async def test_node_without_others_subscribes_nothing(redis, link, keys):
    survey = NodeSurvey(link, keys, NodesView("aaaaaaaaaaaa"))
    survey.link_up()
    assert (await link.ask(b"PUBSUB", b"NUMSUB", keys.controls))[1] == 0
    assert await survey.ask(FindNumber(5)) == ({}, [])
