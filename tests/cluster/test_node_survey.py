"""Questions to the control planes of other nodes, on a real Redis."""

import asyncio

import msgspec
import pytest

from redpoll.cluster.node_survey import NodeSurvey
from redpoll.cluster.redis.link import Link

NAMES = {"aaaaaaaaaaaa": "one", "bbbbbbbbbbbb": "two", "cccccccccccc": "three"}


@pytest.fixture
async def surveys(redis, keys, link, wait_until):
    """The surveys of three nodes, by name. Each answers the question `who` with its name and the question's `x`."""
    links, surveys = [], {}
    for run, name in NAMES.items():
        node_link = Link(redis.url)
        links.append(node_link)
        survey = surveys[name] = NodeSurvey(node_link, keys, run, answer_s=60)
        node_link.on_push, node_link.on_up = survey.received, survey.link_up
        survey.set_others({run: other for run, other in NAMES.items() if other != name})
        survey.answerers["who"] = lambda question, name=name: asyncio.sleep(0, [name, question["x"]])
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
    answers, missing = await surveys["one"].ask("who", x=5)
    assert decoded(answers) == {"two": ["two", 5], "three": ["three", 5]}
    assert missing == []


async def test_node_that_is_silent_fails_or_is_slow_is_named(surveys):
    async def fail(question):
        raise OSError("disk full")

    surveys["two"].answerers["who"] = fail
    surveys["three"].answerers["who"] = lambda question: asyncio.sleep(60)
    surveys["one"]._answer_s = 0.5
    answers, missing = await surveys["one"].ask("who", x=5)
    assert (answers, missing) == ({}, ["three", "two"])
    # They go on to answer others.
    surveys["two"].answerers["who"] = lambda question: asyncio.sleep(0, "back")
    surveys["three"].answerers["who"] = lambda question: asyncio.sleep(0, "quick")
    surveys["one"]._answer_s = 60
    answers, missing = await surveys["one"].ask("who", x=5)
    assert (decoded(answers), missing) == ({"two": "back", "three": "quick"}, [])


async def test_without_redis_all_nodes_are_named(keys):
    survey = NodeSurvey(Link("unix:///nowhere/redis.sock"), keys, "aaaaaaaaaaaa", answer_s=0.05)
    assert survey.alone
    survey.set_others({"bbbbbbbbbbbb": "two"})
    assert not survey.alone
    assert await survey.ask("who") == ({}, ["two"])


async def test_node_without_others_subscribes_nothing(redis, link, keys):
    survey = NodeSurvey(link, keys, "aaaaaaaaaaaa")
    survey.link_up()
    assert (await link.ask(b"PUBSUB", b"NUMSUB", keys.controls))[1] == 0
    assert await survey.ask("who") == ({}, [])
