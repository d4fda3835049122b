"""The page of connections asks every worker and shows the answers."""

import re

import pytest

from redpoll.cluster.questions import CloseSocket, ListConnections
from redpoll.cluster.redis.keys import Keys
from redpoll.cluster.redis.link import Link
from redpoll.cluster.survey import Answerers
from redpoll.ipc.messages import LivingWorkers

W = "0123456789ab.1.1"


@pytest.fixture
async def worker(redis, plane):
    """A worker that answers surveys: `answers` has its answers by question, `asked` the questions it got."""

    class Worker:
        def __init__(self):
            self.answers = {ListConnections: {"total": 0, "connections": []}, CloseSocket: 0}
            self.asked = []

        def answer(self, question):
            self.asked.append(question)
            return self.answers[type(question)]

    keys, link, made = Keys("rp"), Link(redis.url), Worker()
    answerers = Answerers(link, keys, lambda: W)
    for kind in made.answers:
        answerers.answer(kind, made.answer)
    link.on_push = lambda _topic, payload: answerers.received(payload)
    link.start()
    await link.wait_up()
    await link.ask(b"HSET", keys.beat, W, 1)
    plane.plane.receive(LivingWorkers([1], 1))
    link.subscribe((keys.sys,), lambda _: None)
    await link.ask(b"PING")
    yield made
    await link.close()


def connection(**changed):
    row = {"socket": "1.2", "app": "3", "address": "10.0.0.1", "library": "js 8.6.0", "since": 1_000_000}
    return {**row, "channels": 1, "named": ["news"], "user": None, "unsent": 2048, **changed}


async def test_connections_are_shown_escaped(browser, worker):
    bad = "<script>alert(1)"
    rows = [connection(), connection(socket="3.4", user=bad, library=bad, address=bad, named=[bad], transport=bad)]
    worker.answers[ListConnections] = {"total": 2, "connections": rows}
    page = (await browser.get("/dashboard/apps/3/connections?find=a&channel=news")).body.decode()
    assert "js 8.6.0" in page
    assert "2.0 KiB" in page
    assert "<script>alert" not in page
    assert "by</span> &lt;script&gt;alert(1)" in page
    (question,) = [question for question in worker.asked if question.app]
    assert (question.app, question.find, question.channel) == ("3", "a", "news")


async def test_the_channel_of_a_user_has_no_page_and_is_no_link(browser, worker):
    rows = [connection(channels=2, named=["news", "#server-to-user-1"], user="1")]
    worker.answers[ListConnections] = {"total": 1, "connections": rows}
    page = (await browser.get("/dashboard/apps/3/connections")).body.decode()
    assert "<li>#server-to-user-1</li>" in page
    assert re.findall(r'href="/dashboard/apps/3/channels/([^"]*)"', page) == ["news"]


async def test_connection_is_closed_and_the_audit_log_has_it(browser, worker):
    worker.answers[CloseSocket] = 1
    reply = await browser.post("/dashboard/apps/3/connections/close", socket="1.2")
    assert reply.status == 303
    (question,) = [question for question in worker.asked if isinstance(question, CloseSocket)]
    assert question.socket == "1.2"
    assert "connections kick" in (await browser.get("/dashboard/audit")).body.decode()


async def test_export_says_how_many_connections_are_missing(browser, worker):
    for total, sentence in (
        # One of two may be the other in another place of the worker's list.
        (2, "The file has all rows: 1."),
        (75_000, "The file has only 1 of 75,000 rows. These are the newest 500 of each worker."),
    ):
        worker.answers[ListConnections] = {"total": total, "connections": [connection()]}
        job = (await browser.post("/dashboard/apps/3/connections/export", format="csv")).headers["location"]
        assert b"10.0.0.1" in (await browser.file_of(job)).body
        page = (await browser.get(job)).body.decode()
        assert sentence in page
        assert ("Search for a channel" in page) is (total > 2)


async def test_worker_that_does_not_answer_is_reported(browser, redis, plane):
    plane.plane.dashboard.survey.answer_s = 0.05
    link = plane.plane.link
    await link.ask(b"HSET", Keys("rp").beat, W, 1)
    plane.plane.receive(LivingWorkers([1], 1))
    page = (await browser.get("/dashboard/apps/3/connections")).body.decode()
    assert "Not all workers answered" in page
