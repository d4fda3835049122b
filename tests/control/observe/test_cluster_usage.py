"""What apps used on several nodes, added up: on real files and a real Redis, and over HTTP."""

import asyncio

import pytest

from control.conftest import OTHER_ID, OTHER_KEY, OTHER_SECRET, request_bytes, signed
from helpers.known_nodes import RUNS, AskingNode, introduce, known
from redpoll.cluster.redis.keys import Keys
from redpoll.cluster.survey import Answerers
from redpoll.control.observe.cluster_usage import PAGE, ClusterUsage
from redpoll.control.observe.usage import Usage
from redpoll.store.charts import Charts, Day

# 2023-11-14 22:13:20 UTC.
NOW_S = 1_700_000_000.0


class Node(AskingNode):
    def __init__(self, charts: Charts, redis_url: str, name: str):
        super().__init__(redis_url, name)
        self.charts = charts
        self.own = Usage(charts, clock=lambda: NOW_S)
        self.usage = ClusterUsage(self.own, self.survey)


@pytest.fixture
async def nodes(redis, tmp_path):
    nodes = [Node(await Charts.open(tmp_path / f"{name}.sqlite"), redis.url, name) for name in RUNS]
    await introduce(nodes)
    yield nodes
    for node in nodes:
        await node.finish()
        await node.charts.close()


async def test_every_node_answers_with_the_sum_of_all_days(nodes):
    one, two = nodes
    await one.charts.add(days=[Day("3", "2023-11-13", 1, 2, 3, 4), Day("3", "2023-10-01", 9, 9, 9, 9)])
    one.own.count("3", 10, 20, 5, 100)
    two.own.count("3", 7, 5, 1, 50)
    two.own.count("4", 1, 1, 1, 1)
    for node in nodes:
        found = await node.usage.find("3", 2)
        assert found.days == [Day("3", "2023-11-13", 1, 2, 3, 4), Day("3", "2023-11-14", 17, 25, 6, 150)]
        assert found.missing == []
        assert [(day.app_id, day.published) for day in (await node.usage.find("", 1)).days] == [("3", 25), ("4", 1)]


async def test_pages_of_nodes_with_different_apps_have_every_day_once(nodes):
    one, two = nodes
    await one.charts.add(days=[Day(str(app), "2023-11-14", 1, 1, 0, 0) for app in range(10, 30)])
    await two.charts.add(days=[Day(str(app), f"2023-11-{day}", 1, 1, 0, 0) for app in (8, 25, 40) for day in (13, 14)])
    whole = await one.usage.find("", 2)
    assert (len(whole.days), sum(day.published for day in whole.days), whole.next) == (25, 26, None)
    pages = [await one.usage.find("", 2, limit=3)]
    while pages[-1].next is not None:
        pages.append(await one.usage.find("", 2, pages[-1].next, limit=3))
    assert [day for page in pages for day in page.days] == whole.days
    assert max(len(page.days) for page in pages) <= 3 * len(nodes)


async def test_usage_of_all_apps_is_a_page(nodes):
    one, two = nodes
    used = [Day(f"{app:05}", "2023-11-14", 1, 1, 0, 0) for app in range(PAGE + 1)]
    await two.charts.add(days=used)
    page = await one.usage.find("", 1)
    assert (page.days, page.next) == (used[:PAGE], (used[PAGE - 1].app_id, "2023-11-14"))
    assert (await one.usage.find("", 1, page.next)).days == used[PAGE:]


async def test_node_that_does_not_answer_is_named(nodes):
    one, two = nodes
    one.own.count("3", 1, 2, 0, 0)
    two.own.count("3", 1, 2, 0, 0)
    two.survey.answerers = Answerers(two.link, Keys(), lambda: "")
    one.survey.answer_s = 0.2
    assert await one.usage.find("3", 1) == ([Day("3", "2023-11-14", 1, 2, 0, 0)], ["two"], None)


async def test_usage_over_http_counts_what_was_published(plane):
    sampler = plane.plane.dashboard.sampler
    # Otherwise its own timer could take a sample between the publish and ours.
    await sampler.finish()
    await plane.trigger()
    await sampler.sample()
    reply = await plane.call("GET", "/apps/3/usage")
    assert reply.status == 200
    assert set(reply.json()) == {"days"}
    (day,) = reply.json()["days"]
    assert (day["published"], day["peak_connections"], day["sent"]) == (1, 0, 0)
    assert set(day) == {"day", "peak_connections", "published", "client_events", "sent"}


async def test_usage_over_http_names_the_nodes_that_did_not_answer(plane):
    plane.plane.view.update([known("bbbbbbbbbbbb", "far")], None)
    plane.plane.node_survey.answer_s = 0.1
    assert (await plane.call("GET", "/apps/3/usage")).json() == {"days": [], "unanswered": ["far"]}


async def test_requests_of_an_app_that_wait_leave_the_others_room(plane, connect, monkeypatch):
    usage = plane.plane.observation.cluster_usage
    find, may_end = usage.find, asyncio.Event()

    async def slow(app_id, days):
        if app_id != OTHER_ID:
            await may_end.wait()
        return await find(app_id, days)

    monkeypatch.setattr(usage, "find", slow)
    wires = [await connect(plane.port) for _ in range(18)]
    request = request_bytes("GET", signed("GET", "/apps/3/usage"))
    asked = [asyncio.create_task(wire.ask(request)) for wire in wires]
    answered, waiting = await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
    assert [task.result().status for task in answered] == [429]
    assert (await plane.call("GET", "/apps/4/usage", key=OTHER_KEY, secret=OTHER_SECRET)).status == 200
    may_end.set()
    assert {reply.status for reply in await asyncio.gather(*waiting)} == {200}


@pytest.mark.parametrize("days", ["0", "401", "x", "-1", "", pytest.param("9" * 5_000, id="long")])
async def test_number_of_days_is_checked(plane, days):
    reply = await plane.call("GET", "/apps/3/usage", params={"days": days})
    assert (reply.status, reply.json()["code"]) == (400, "bad_request")
