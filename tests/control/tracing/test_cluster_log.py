"""The event logs of several nodes, searched as one: on real files and a real Redis."""

import asyncio
import base64

import msgspec
import pytest

from helpers.known_nodes import RUNS, AskingNode, introduce
from redpoll.cluster.redis.keys import Keys
from redpoll.cluster.survey import Answerers
from redpoll.control.tracing import cluster_log
from redpoll.control.tracing.cluster_log import ClusterLog
from redpoll.loop.turns import TooManyWaiting
from redpoll.store.call_batch import CallBatch, CallRow
from redpoll.store.eventlog import EventLog, Query, SpanRow

BASE_MS = 1_700_000_000_000


def call(at_ms: int, trace_id: str | None = None, channel: str = "c", caller: str = "key k") -> CallRow:
    time_ms = BASE_MS + at_ms
    trace_id = trace_id or f"{time_ms:012x}{at_ms:020x}"
    return CallRow(trace_id, "3", None, time_ms, "e", [channel], 1, caller, 200, True, time_ms * 1000)


class Node(AskingNode):
    def __init__(self, event_log: EventLog, redis_url: str, name: str):
        super().__init__(redis_url, name)
        self.event_log = event_log
        self.log = ClusterLog(event_log, self.survey, name)

    async def write(self, *calls: CallRow, spans=()):
        # One batch for each call, because a search finds batches.
        for row in calls:
            await self.event_log.write([CallBatch([row])], [])
        await self.event_log.write([], list(spans))

    async def times(self, limit=100, cursor=None, **query):
        """The times of what a search finds, all pages together, and the sizes of the pages."""
        found, sizes = [], []
        while True:
            page = await self.log.find("3", Query(**query), limit, cursor)
            assert page.missing == []
            found += [row.time_ms - BASE_MS for row in page.calls]
            sizes.append(len(page.calls))
            if page.next is None:
                return found, sizes
            cursor = page.next


@pytest.fixture
async def nodes(redis, tmp_path):
    nodes = [Node(await EventLog.open(tmp_path / f"{name}.sqlite", 10_000, 1e9), redis.url, name) for name in RUNS]
    await introduce(nodes)
    yield nodes
    for node in nodes:
        await node.finish()
        await node.event_log.close()


async def test_newest_call_of_a_trace_id_has_its_own_spans_whichever_node_has_it(nodes):
    one, two = nodes
    calls = [call(at, "a" * 32) for at in (100, 300, 200)]
    spans = [
        SpanRow("a" * 32, "3", 0, f"of {row.time_ms - BASE_MS}", {}, row.time_us + 1, row.time_us) for row in calls
    ]
    common = SpanRow("a" * 32, "3", 0, "webhook", {}, calls[1].time_us + 2)
    await one.write(calls[0], calls[2], spans=[spans[0], spans[2]])
    # A repeat, which is answered from the claim of the one before it.
    repeat = msgspec.structs.replace(call(400, "a" * 32), sampled=False)
    await two.write(calls[1], repeat, spans=[spans[1], common])
    for node in nodes:
        assert await node.log.trace("3", "a" * 32) == (calls[1], [spans[1], common], [])
        assert await node.log.trace("3", "a" * 32, repeat.time_us) == (repeat, [common], [])
        assert await node.log.trace("3", "a" * 32, calls[0].time_us) == (calls[0], [spans[0], common], [])


@pytest.mark.parametrize("limit", [1, 2, 3, 100])
async def test_pages_of_a_search_have_the_calls_of_all_nodes_by_time_each_once(nodes, limit):
    one, two = nodes
    client_event = call(500, "c" * 32, caller="client 1.2")
    await one.write(call(100), call(300), client_event, call(900))
    await two.write(call(50), call(200), client_event, call(600), call(700))
    expected = [900, 700, 600, 500, 300, 200, 100, 50]
    for node in nodes:
        found, sizes = await node.times(limit)
        assert found == expected
        assert all(size == limit for size in sizes[:-1])
    assert (await one.times(limit, since_ms=BASE_MS + 200, until_ms=BASE_MS + 600))[0] == [600, 500, 300, 200]


async def test_large_answers_are_cut_and_the_rest_comes_with_the_next_page(nodes, monkeypatch):
    monkeypatch.setattr(cluster_log, "_MAX_ANSWER_BYTES", 500)
    one, two = nodes
    await one.write(*(call(at) for at in range(0, 20, 2)))
    await two.write(*(call(at) for at in range(1, 20, 2)))
    found, sizes = await one.times(10)
    assert found == list(range(19, -1, -1))
    assert max(sizes) < 10


async def test_node_that_does_not_answer_is_named_and_its_newer_calls_come_on_no_later_page(nodes):
    one, two = nodes
    await one.write(call(100), call(300))
    await two.write(call(50), call(400))
    answerers, two.survey.answerers = two.survey.answerers, Answerers(two.link, Keys(), lambda: "")
    one.survey.answer_s = 0.5
    first = await one.log.find("3", Query(), 1)
    assert ([row.time_ms - BASE_MS for row in first.calls], first.missing) == ([300], ["two"])
    two.survey.answerers = answerers
    one.survey.answer_s = 60
    assert (await one.times(1, cursor=first.next))[0] == [100, 50]


async def test_cursor_of_a_node_that_was_alone_goes_on_with_its_own_log(nodes):
    one, two = nodes
    await one.write(call(100), call(300))
    two.view.update([], None)
    await two.write(call(50), call(200), call(400))
    first = await two.log.find("3", Query(), 1)
    assert first.next.isdigit()
    assert (await two.times(1, cursor=first.next))[0] == [200, 50]
    forged = (b'{"before":{},"until_ms":9223372036854775808}', b'{"before":{"two":-1}}')
    for wrong in ("x", "9" * 16, "e30", "-1", "ü", *(base64.urlsafe_b64encode(one).decode() for one in forged)):
        with pytest.raises(ValueError, match="not a cursor"):
            await two.log.find("3", Query(), 1, wrong)


async def test_trace_has_the_spans_of_all_nodes_each_once(nodes):
    one, two = nodes
    row = call(100, "a" * 32)

    def span(at_us, stage, **detail):
        return SpanRow("a" * 32, "3", BASE_MS + 100, stage, detail, row.time_us + at_us)

    received = span(30, "received", worker="w")
    await one.write(row, spans=[span(10, "authenticated"), received])
    # The leader adds the span of a webhook, also if another node has the call.
    await two.write(spans=[received, span(40, "webhook")])
    for node in nodes:
        found = await node.log.trace("3", "a" * 32)
        assert [part.stage for part in found.spans] == ["authenticated", "received", "webhook"]
        assert found.call == row
    assert await one.log.trace("3", "b" * 32) is None
    assert await one.log.trace("4", "a" * 32) is None


class StallingLog:
    """An event log whose searches wait until `go_on` lets one of them go."""

    def __init__(self, event_log: EventLog):
        self._event_log = event_log
        self._may_go_on = asyncio.Semaphore(0)
        self._searches = asyncio.Lock()
        self.begun: list[str] = []

    async def find(self, app_id: str, query: Query, limit: int):
        async with self._searches:
            self.begun.append(app_id)
            await self._may_go_on.acquire()
            return await self._event_log.find(app_id, query, limit)

    def go_on(self, count: int):
        for _ in range(count):
            self._may_go_on.release()


async def test_apps_take_turns_and_an_app_has_few_searches_that_wait(redis, tmp_path):
    event_log = await EventLog.open(tmp_path / "event_log.sqlite", 10_000, 1e9)
    stalling = StallingLog(event_log)
    node = Node(stalling, redis.url, "one")
    try:
        searches = [asyncio.create_task(node.log.find(app_id, Query(), 10)) for app_id in 17 * ["a"] + ["b"]]
        refused = asyncio.create_task(node.log.find("a", Query(), 10))
        with pytest.raises(TooManyWaiting, match="16 such requests of this app wait"):
            await refused
        stalling.go_on(len(searches))
        await asyncio.gather(*searches)
        assert stalling.begun == ["a", "b", *16 * ["a"]]
    finally:
        await node.finish()
        await event_log.close()
