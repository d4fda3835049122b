"""The pages of webhooks: creating, changing, testing and deleting endpoints, and their deliveries."""

import json
import re
import time

import pytest

from helpers.receiver import Receiver, status
from redpoll.control.dashboard import webhooks
from redpoll.store import deliveries
from redpoll.store.deliveries import AttemptRow, Result

SETTINGS = {"webhook_allow_http": True, "webhook_allow_addresses": ("127.0.0.0/8",)}
GOOD = {"url": "http://127.0.0.1:9/hook", "event": ["all"], "format": "service"}


@pytest.fixture
async def plane(make_plane, redis):
    return await make_plane(redis.url, **SETTINGS)


def endpoints(plane, app_id="3"):
    return plane.plane.webhooks.endpoints.of_existing_app(app_id)


async def test_endpoint_is_created_and_its_secret_is_shown_to_admins_only(plane, browser, viewer):
    fields = {**GOOD, "event": ["member.added", "cache.miss"], "channels": "presence-\nchat-", "format": "pusher"}
    reply = await browser.post("/dashboard/apps/3/webhooks/new", **fields)
    assert reply.status == 303
    (made,) = endpoints(plane)
    assert (made.events, made.channels, made.format) == (
        ("member.added", "cache.miss"),
        ("presence-", "chat-"),
        "pusher",
    )
    path = reply.headers["location"]
    assert made.secret in (await browser.get(path)).body.decode()
    assert made.secret not in (await viewer.get(path)).body.decode()
    assert "127.0.0.1:9" in (await viewer.get("/dashboard/apps/3/webhooks")).body.decode()


@pytest.mark.parametrize(
    ("changed", "field"),
    [
        ({"url": ""}, "url"),
        ({"url": "ftp://<script>alert(1)"}, "url"),
        ({"url": "http://10.0.0.1/"}, "url"),
        ({"event": []}, "event"),
        ({"event": ["none"]}, "event"),
        ({"channels": "a b <script>"}, "channels"),
        ({"format": "xml"}, "format"),
        ({"pin": "1"}, "pin"),
        ({"batch": "1"}, "batch"),
    ],
)
async def test_invalid_fields_are_reported_and_the_form_keeps_its_values(plane, browser, changed, field):
    reply = await browser.post("/dashboard/apps/3/webhooks/new", **{**GOOD, "channels": "typed-", **changed})
    page = reply.body.decode()
    assert reply.status == 422
    assert f'id="fault-{field}"' in page
    assert "<script>alert" not in page
    assert "typed-" in page or field == "channels"
    assert not endpoints(plane)


async def test_events_of_a_second_are_batched_as_the_form_says(plane, browser):
    here = (await browser.post("/dashboard/apps/3/webhooks/new", **GOOD | {"format": "pusher"}, batch="1")).headers[
        "location"
    ]
    assert endpoints(plane)[0].batch
    assert "the events of a second in one request" in (await browser.get(here)).body.decode()
    assert 'name="batch" value="1" checked' in (await browser.get(f"{here}/edit")).body.decode()
    assert (await browser.post(f"{here}/edit", **GOOD | {"format": "pusher"})).status == 303
    assert not endpoints(plane)[0].batch
    assert "the events of a second" not in (await browser.get(here)).body.decode()


async def test_endpoint_is_changed_switched_rotated_and_deleted(plane, browser):
    here = (await browser.post("/dashboard/apps/3/webhooks/new", **GOOD)).headers["location"]
    (before,) = endpoints(plane)
    assert before.url in (await browser.get(f"{here}/edit")).body.decode()
    changed = {"url": "http://127.0.0.1:9/other", "event": ["client_event"], "format": "service", "channels": ""}
    assert (await browser.post(f"{here}/edit", **changed)).status == 303
    assert (await browser.post(f"{here}/edit", **{**changed, "url": "nowhere"})).status == 422
    await browser.post(f"{here}/rotate")
    (now,) = endpoints(plane)
    assert (now.url, now.events) == ("http://127.0.0.1:9/other", ("client_event",))
    assert now.previous_secret == before.secret
    assert "previous secret is used until" in (await browser.get(here)).body.decode()
    await browser.post(f"{here}/disable")
    assert not endpoints(plane)[0].enabled
    await browser.post(f"{here}/enable")
    assert endpoints(plane)[0].enabled
    # Plain http has no certificate: the page says so, and nothing is pinned.
    await browser.post(f"{here}/pin")
    assert not endpoints(plane)[0].pin
    await browser.post(f"{here}/delete")
    assert not endpoints(plane)
    assert (await browser.get(here)).status == 404
    noted = (await browser.get("/dashboard/audit")).body.decode()
    assert all(f"webhook {action}" in noted for action in ("create", "change", "rotate", "disable", "delete"))
    assert before.secret not in noted


async def test_what_another_operator_has_saved_meanwhile_stays(plane, browser):
    here = (await browser.post("/dashboard/apps/3/webhooks/new", **GOOD)).headers["location"]
    page = (await browser.get(f"{here}/edit")).body.decode()
    shown = dict(re.findall(r'name="(was_\w+)" value="([^"]*)"', page))
    (endpoint,) = endpoints(plane)
    await plane.plane.webhooks.endpoints.change(
        endpoint.id, events=["cache.miss"], channels=["a-", "b-"], format="pusher"
    )
    changed = {**GOOD, **shown, "url": "http://127.0.0.1:9/other"}
    assert (await browser.post(f"{here}/edit", **changed)).status == 303
    (now,) = endpoints(plane)
    assert (now.url, now.events, now.channels) == ("http://127.0.0.1:9/other", ("cache.miss",), ("a-", "b-"))
    assert now.format == "pusher"


async def test_test_shows_the_result_and_the_response(plane, browser):
    async with Receiver(status(503, "Unavailable", b"<script>alert(1)")) as receiver:
        reply = await browser.post("/dashboard/apps/3/webhooks/new", **{**GOOD, "url": receiver.url})
        here = reply.headers["location"]
        page = (await browser.post(f"{here}/test")).body.decode()
        assert "Test failed" in page
        assert "503" in page
        assert "&lt;script&gt;alert(1)" in page
        assert len(receiver.requests) == 1


async def test_export_has_the_deliveries_that_are_delivered_meanwhile(plane, browser, monkeypatch):
    here = (await browser.post("/dashboard/apps/3/webhooks/new", **GOOD)).headers["location"]
    await browser.post(f"{here}/disable")
    (endpoint,) = endpoints(plane)
    waiting = [
        {
            "id": f"d{at}",
            "endpoint_id": endpoint.id,
            "event": "channel.occupied",
            "channel": "c",
            "user": None,
            "stamp": at,
            "time_ms": 1_000,
            "trace": None,
            "body": b"{}",
            "at": 1_000.0 + at,
            "created_at": 1_000.0,
        }
        for at in range(5)
    ]
    store = plane.plane.dashboard.accounts.store
    async with store.change() as connection:
        await deliveries.add(connection, waiting)
        (oldest,) = await deliveries.find_by_ids(connection, ["d0"])
    added = plane.plane.webhooks.added

    async def added_while_the_oldest_is_delivered(*args, **more):
        page = await added(*args, **more)
        attempt = AttemptRow(1, time.time(), 200, 1, "delivered", "200 OK", b"")
        async with store.change() as connection:
            await deliveries.put_results(connection, [Result(oldest.number, "d0", "delivered", time.time(), attempt)])
        return page

    monkeypatch.setattr(plane.plane.webhooks, "added", added_while_the_oldest_is_delivered)
    monkeypatch.setattr(webhooks, "_CHUNK", 2)
    job = (await browser.post(f"{here}/export", format="json")).headers["location"]
    exported = json.loads((await browser.file_of(job)).body)
    assert [(row["id"], row["state"]) for row in exported] == [
        *((f"d{at}", "waiting") for at in (4, 3, 2, 1)),
        ("d0", "delivered"),
    ]
    job = (await browser.post(f"{here}/export", format="json", state="delivered")).headers["location"]
    assert [row["id"] for row in json.loads((await browser.file_of(job)).body)] == ["d0"]


async def test_endpoint_of_another_app_is_not_found(plane, browser):
    here = (await browser.post("/dashboard/apps/4/webhooks/new", **GOOD)).headers["location"]
    other = here.replace("/apps/4/", "/apps/3/")
    assert (await browser.get(other)).status == 404
    assert (await browser.post(f"{other}/delete")).status == 404
    assert len(endpoints(plane, "4")) == 1
