"""The event trace: the search, and the page of one publish request."""

import re

import msgspec
import pytest

from control.conftest import signed
from redpoll.control.dashboard.pages import _elapsed
from redpoll.control.dashboard.trace import steps_of
from redpoll.store.call_batch import CallRow
from redpoll.store.eventlog import SpanRow

TRACE = "018c2f3a9b10" + "a" * 20
CALL = CallRow(TRACE, "3", None, 1_000, "order", ["room"], 2, "key k from 192.0.2.1", 200, True, 1_000_000)


def span(stage, after_ms, **detail):
    return SpanRow(TRACE, "3", CALL.time_ms + after_ms, stage, detail, (CALL.time_ms + after_ms) * 1000)


async def triggered(plane, **event):
    reply = await plane.trigger(**event)
    await plane.write_log()
    return reply.headers["x-service-trace-id"]


async def test_request_is_found_by_each_filter(plane, browser):
    trace_id = await triggered(plane, name="order", channels=["room-7"], correlation_id="support-1")
    await triggered(plane, name="other", channels=["elsewhere"])
    for mark in (f"trace_id={trace_id}", "correlation_id=support-1", "channel=room-7", "name=order"):
        page = (await browser.get(f"/dashboard/apps/3/trace?{mark}")).body.decode()
        assert f"/dashboard/apps/3/trace/{trace_id}" in page, mark
        assert "elsewhere" not in page, mark
    assert "Nothing matches" in (await browser.get("/dashboard/apps/3/trace?name=ord")).body.decode()
    await plane.records.set_app("3", {"max_event_name_chars": 1_000})
    long = "n" * 1_000
    trace_id = await triggered(plane, name=long)
    assert trace_id in (await browser.get(f"/dashboard/apps/3/trace?name={long}")).body.decode()


async def test_page_shows_the_caller_and_the_timeline(plane, browser):
    trace_id = await triggered(plane, name="order", channels=["a", "b"], data="12345")
    page = (await browser.get(f"/dashboard/apps/3/trace/{trace_id}")).body.decode()
    for text in ("Authenticated", "Accepted by Redis", "5 B", "127.0.0.1", trace_id):
        assert text in page


async def test_requests_that_share_a_trace_id_have_pages_of_their_own(plane, browser):
    given = {"traceparent": "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"}
    for name in ("first", "second"):
        body = f'{{"name": "{name}", "channels": ["of-{name}"], "data": "{{}}"}}'.encode()
        assert (await plane.ask("POST", signed("POST", "/apps/3/events", body), body, given)).status == 200
    await plane.write_log()
    links = re.findall(
        r'href="(/dashboard/apps/3/trace/[^"]*)"', (await browser.get("/dashboard/apps/3/trace")).body.decode()
    )
    pages = [(await browser.get(link)).body.decode() for link in links]
    assert [re.search("of-(first|second)", page)[1] for page in pages] == ["second", "first"]
    assert [page.count("Authenticated") for page in pages] == [1, 1]


async def test_refused_request_is_shown_with_its_status(plane, browser):
    trace_id = await triggered(plane, name="pusher:no", channels=["a"])
    assert trace_id in (await browser.get("/dashboard/apps/3/trace")).body.decode()
    page = (await browser.get(f"/dashboard/apps/3/trace/{trace_id}")).body.decode()
    assert "refused with 400" in page


async def test_only_channels_that_have_a_page_are_links(plane, browser):
    for channels, linked in ((["room", "#server-to-user-1"], ["room"]), (["#bad"], [])):
        trace_id = await triggered(plane, channels=channels)
        page = (await browser.get(f"/dashboard/apps/3/trace/{trace_id}")).body.decode()
        assert all(name in page for name in channels)
        links = re.findall(r'href="(/dashboard/apps/3/channels/[^"]*)"', page)
        assert [link.rpartition("/")[2] for link in links] == linked
        assert {(await browser.get(link)).status for link in links} <= {200}


async def test_request_without_recorded_stages_says_so(make_plane, redis, log_in_to):
    plane = await make_plane(redis.url, trace_calls_per_second=0)
    browser = await log_in_to(plane)
    trace_id = await triggered(plane)
    page = (await browser.get(f"/dashboard/apps/3/trace/{trace_id}")).body.decode()
    assert "trace_calls_per_second" in page


async def test_older_requests_are_on_the_next_page(plane, browser):
    for number in range(60):
        await plane.trigger(name=f"n{number:02}")
    await plane.write_log()
    first = (await browser.get("/dashboard/apps/3/trace?channel=c")).body.decode()
    assert "n59" in first
    assert "n05" not in first
    older = first.split('href="/dashboard/apps/3/trace?channel=c&amp;')[1].split('"')[0].replace("&amp;", "&")
    assert "n05" in (await browser.get(f"/dashboard/apps/3/trace?channel=c&{older}")).body.decode()


async def test_invalid_filters_are_reported_at_their_field(plane, browser):
    reply = await browser.get("/dashboard/apps/3/trace?trace_id=xyz")
    assert reply.status == 422
    assert 'id="fault-trace_id"' in reply.body.decode()
    assert (await browser.get("/dashboard/apps/3/trace?within=7")).status == 422
    assert (await browser.get("/dashboard/apps/3/trace?cursor=x")).status == 422


async def test_request_of_another_app_is_not_shown(plane, browser):
    trace_id = await triggered(plane)
    assert (await browser.get(f"/dashboard/apps/4/trace/{trace_id}")).status == 404
    assert trace_id not in (await browser.get("/dashboard/apps/4/trace")).body.decode()


async def test_text_from_callers_is_escaped(plane, browser):
    trace_id = await triggered(plane, name="<script>alert(1)</script>", correlation_id="<script>alert(2)</script>")
    for path in ("trace", f"trace/{trace_id}", "trace?name=<script>alert(3)</script>"):
        page = (await browser.get(f"/dashboard/apps/3/{path}".replace("<", "%3C").replace(">", "%3E"))).body.decode()
        assert "<script>alert" not in page
    assert "&lt;script&gt;alert(1)" in (await browser.get("/dashboard/apps/3/trace")).body.decode()


@pytest.mark.parametrize(
    ("stage", "detail", "title", "kind"),
    [
        ("received", {"worker": "r.1.0"}, "Received by a worker", "ok"),
        ("written", {"worker": "r.1.0", "channel": "room", "sockets": 1}, "Written to 1 connection", "ok"),
        ("written", {"worker": "r.1.0", "channel": "room", "sockets": 0}, "Written to 0 connections", ""),
        (
            "written",
            {"worker": "r.1.0", "channel": "room", "sockets": 2, "frame": "r.1.0.9", "parts": 50},
            "Written to 2 connections",
            "ok",
        ),
        ("replaced", {"worker": "r.1.0", "channel": "room", "frame": "r.1.0.9"}, "Replaced by a newer event", ""),
        ("dropped", {"worker": "r.1.0", "channel": "room", "socket_id": "1.2"}, "Not delivered to 1.2", "bad"),
        ("webhook", {"event": "client_event", "delivery": "d"}, "Webhook", "ok"),
        ("of a later version", {}, "of a later version", ""),
    ],
)
def test_each_stage_has_a_title(stage, detail, title, kind):
    (step,) = steps_of(CALL, [span(stage, 12, **detail)])
    assert (step.title, step.kind, step.after_us) == (title, kind, 12_000)


def test_a_stage_names_the_frame_into_which_the_event_was_joined():
    joined = {"worker": "r.1.0", "channel": "room", "sockets": 2, "frame": "r.1.0.9", "parts": 50}
    (step,) = steps_of(CALL, [span("written", 1, **joined)])
    assert step.detail == "room, worker r.1.0; joined with 49 others into frame r.1.0.9"


def test_slow_worker_clock_makes_no_negative_time():
    (step,) = steps_of(CALL, [span("received", -5, worker="r.1.0")])
    assert step.after_us == 0


def test_times_are_exact_to_the_microsecond():
    call = msgspec.structs.replace(CALL, time_us=1_000_250)
    (step,) = steps_of(call, [SpanRow(TRACE, "3", 1_003, "received", {"worker": "r.1.0"}, 1_003_430)])
    assert step.after_us == 3_180


@pytest.mark.parametrize(
    ("after_us", "text"),
    [
        (0, "0 µs"),
        (180, "180 µs"),
        (3_240, "3.2 ms"),
        (250_000, "250 ms"),
        (1_400_000, "1.4 s"),
        (90_000_000, "90.0 s"),
    ],
)
def test_times_have_a_suitable_unit(after_us, text):
    assert _elapsed(after_us) == text


async def test_search_filters_by_time_and_reports_invalid_times(plane, browser):
    await triggered(plane, name="order")
    (row,) = (await plane.call("GET", "/apps/3/events/log")).json()["events"]
    at = row["time_ms"]

    async def found(query):
        return row["trace_id"] in (await browser.get(f"/dashboard/apps/3/trace?{query}")).body.decode()

    assert await found(f"since={at}&until={at}")
    assert not await found(f"since={at + 1}")
    assert not await found(f"until={at - 1}")
    assert await found(f"since={at - 90_000_000}&within=3600")
    for query, field in (("since=x", "since"), ("until=-1", "until"), (f"since={at}&until={at - 1}", "until")):
        reply = await browser.get(f"/dashboard/apps/3/trace?{query}")
        assert (reply.status, f'id="fault-{field}"' in reply.body.decode()) == (422, True), query
