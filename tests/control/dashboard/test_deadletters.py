"""The page of dead letters: looked at, retried or discarded: one, some or all."""

import asyncio
import json

import pytest

from helpers.receiver import Receiver, status
from redpoll.store import deliveries as rows

SETTINGS = {"webhook_allow_http": True, "webhook_allow_addresses": ("127.0.0.0/8",), "webhook_retry_after_s": (300.0,)}


@pytest.fixture
async def plane(make_plane, redis):
    return await make_plane(redis.url, **SETTINGS)


@pytest.fixture
async def dead(plane):
    """`await dead(count, url)`: so many failed deliveries of a new endpoint of app 3; their ids."""
    webhooks = plane.plane.webhooks

    async def made(count, url="http://127.0.0.1:9/hook", app_id="3"):
        endpoint = await webhooks.endpoints.create(app_id, url)
        async with plane.plane.dashboard.accounts.store.change() as connection:
            written = await rows.add(
                connection,
                [
                    {
                        "id": f"{endpoint.id}-{at}",
                        "endpoint_id": endpoint.id,
                        "event": "channel.occupied",
                        "channel": f"c-{at}",
                        "user": "<script>alert(1)",
                        "stamp": at,
                        "time_ms": 1_000,
                        "trace": None,
                        "body": b'{"text":"<script>alert(2)"}',
                        "at": 1_000.0 + at,
                        "created_at": 1_000.0,
                    }
                    for at in range(count)
                ],
            )
            failed = [
                rows.Result(
                    row.number,
                    row.id,
                    "failed",
                    2_000.0,
                    rows.AttemptRow(1, 1_500.0, 503, 5, "status", "503", b"<b>no"),
                )
                for row in written
            ]
            await rows.put_results(connection, failed)
        return [row.id for row in written]

    return made


def newest_of(page):
    """What the page's forms say of the newest dead letter."""
    return page.decode().split('name="newest" value="')[1].split('"')[0]


async def states(plane, app_id="3"):
    found = await plane.plane.webhooks.deliveries(app_id, limit=2_000)
    return sorted(delivery.state for delivery in found)


async def test_payload_and_attempts_are_shown_escaped(plane, browser, dead):
    (delivery_id,) = await dead(1)
    page = (await browser.get("/dashboard/apps/3/dead-letters")).body.decode()
    assert "1 dead letter<" in page
    assert "<script>alert" not in page
    page = (await browser.get(f"/dashboard/apps/3/deliveries/{delivery_id}")).body.decode()
    assert "&lt;script&gt;alert(2)" in page
    assert "&lt;b&gt;no" in page
    assert "<script>alert" not in page
    assert (await browser.get(f"/dashboard/apps/4/deliveries/{delivery_id}")).status == 404


async def test_retried_delivery_arrives_when_the_receiver_works_again(plane, browser, dead):
    async with Receiver(status(200)) as receiver:
        (delivery_id,) = await dead(1, receiver.url)
        reply = await browser.post("/dashboard/apps/3/dead-letters", do="retry", id=delivery_id, back="delivery")
        assert reply.headers["location"].endswith(f"/deliveries/{delivery_id}")
        async with asyncio.timeout(60):
            while await states(plane) != ["delivered"]:
                await asyncio.sleep(0.01)
        assert receiver.requests[0].body == b'{"text":"<script>alert(2)"}'
    assert "No dead letters" in (await browser.get("/dashboard/apps/3/dead-letters")).body.decode()


async def test_selected_dead_letters_are_discarded_all_or_none(plane, browser, dead):
    ids = await dead(3)
    refused = await browser.post("/dashboard/apps/3/dead-letters", do="discard", id=[ids[0], "none"])
    assert refused.status == 422
    assert await states(plane) == ["failed"] * 3
    assert (await browser.post("/dashboard/apps/3/dead-letters", do="discard")).status == 422
    assert (await browser.post("/dashboard/apps/3/dead-letters", do="discard", id=ids[:2])).status == 303
    assert await states(plane) == ["discarded", "discarded", "failed"]


async def test_dead_letters_of_another_app_are_not_touched(plane, browser, dead):
    (other,) = await dead(1, app_id="4")
    assert (await browser.post("/dashboard/apps/3/dead-letters", do="discard", id=other)).status == 422
    assert await states(plane, "4") == ["failed"]


async def test_all_dead_letters_are_discarded_in_a_job_with_progress(plane, browser, dead, wait_until):
    await dead(1_200)
    # A page of an earlier version says nothing of what it showed.
    assert (await browser.post("/dashboard/apps/3/dead-letters/all", do="discard", endpoint="")).status == 422
    newest = newest_of((await browser.get("/dashboard/apps/3/dead-letters")).body)
    reply = await browser.post("/dashboard/apps/3/dead-letters/all", do="discard", endpoint="", newest=newest)
    (job,) = plane.plane.dashboard.jobs._jobs.values()
    assert job.progress.total == 1_200
    await wait_until(lambda: job.state != "running")
    assert "1,200 dead letters were discarded." in (await browser.get(reply.headers["location"])).body.decode()
    assert set(await states(plane)) == {"discarded"}


async def test_all_are_those_of_the_page_not_those_that_failed_later(plane, browser, dead, wait_until):
    """Who confirmed "Discard 12 dead letters?" in a page of yesterday discarded 5,012."""
    await dead(60)
    first = (await browser.get("/dashboard/apps/3/dead-letters")).body.decode()
    older = first.split('href="/dashboard/apps/3/dead-letters?')[1].split('"')[0].replace("&amp;", "&")
    second = (await browser.get(f"/dashboard/apps/3/dead-letters?{older}")).body.decode()
    newest = newest_of(first.encode())
    assert newest_of(second.encode()) == newest
    await dead(3)
    await browser.post("/dashboard/apps/3/dead-letters/all", do="discard", endpoint="", newest=newest)
    (job,) = plane.plane.dashboard.jobs._jobs.values()
    await wait_until(lambda: job.state != "running")
    assert await states(plane) == ["discarded"] * 60 + ["failed"] * 3


async def test_export_has_the_dead_letters_of_the_chosen_webhook(browser, dead):
    await dead(2)
    (chosen,) = await dead(1)
    endpoint_id = chosen.rpartition("-")[0]
    page = (await browser.get(f"/dashboard/apps/3/dead-letters?endpoint={endpoint_id}")).body.decode()
    form = page.split("/dead-letters/export")[1].split("</form>")[0]
    assert f'name="endpoint" value="{endpoint_id}"' in form
    job = await browser.post("/dashboard/apps/3/dead-letters/export", format="json", endpoint=endpoint_id)
    assert [row["id"] for row in json.loads((await browser.file_of(job.headers["location"])).body)] == [chosen]


async def test_list_has_pages_of_fifty_and_the_export_has_all(browser, dead):
    await dead(60)
    page = (await browser.get("/dashboard/apps/3/dead-letters")).body.decode()
    assert page.count('name="id"') == 50
    older = page.split('href="/dashboard/apps/3/dead-letters?')[1].split('"')[0].replace("&amp;", "&")
    assert (await browser.get(f"/dashboard/apps/3/dead-letters?{older}")).body.decode().count('name="id"') == 10
    job = (await browser.post("/dashboard/apps/3/dead-letters/export", format="json")).headers["location"]
    assert len(json.loads((await browser.file_of(job)).body)) == 60


@pytest.mark.parametrize("before", ["", "x", "1_2_3", "inf_99999999999999999999", "nan_-99999999999999999999", "1_"])
async def test_invalid_position_shows_the_newest(browser, before):
    assert (await browser.get(f"/dashboard/apps/3/dead-letters?before={before}")).status == 200
