"""The pages of history: rules, and the messages of a channel."""

import json

import pytest
from redis.asyncio import Redis

from redpoll.cluster.redis.keys import Keys
from redpoll.protocol.apps import HistoryRule

PREFIX = {"match": "prefix", "name": "stored-", "keep": "100", "lasts": "2", "unit": "hours", "replay": "none"}


@pytest.fixture
async def publish_stored(plane):
    """App 3 stores the messages of `stored-…`; `await publish_stored(n)` publishes n to stored-a."""
    await plane.records.add_history_rule(
        "3", HistoryRule(id="000000", name="stored-", prefix=True, keep=1_000, seconds=600)
    )

    async def publish(count, data='{"n": "<script>alert(1)"}'):
        for at in range(count):
            assert (await plane.trigger(name=f"event-{at}", channels=["stored-a"], data=data)).status == 200

    return publish


async def test_rule_is_added_and_removed(plane, browser):
    assert (await browser.post("/dashboard/apps/3/history", **PREFIX, client_events="1")).status == 303
    (rule,) = plane.records.apps["3"].history
    assert (rule.name, rule.prefix, rule.keep, rule.seconds, rule.client_events) == ("stored-", True, 100, 7_200, True)
    page = (await browser.get("/dashboard/apps/3/history")).body.decode()
    assert "100 messages, 2 hours" in page
    assert (await browser.post("/dashboard/apps/3/remove-history-rule", rule=rule.id)).status == 303
    assert plane.records.apps["3"].history == ()
    assert (await browser.post("/dashboard/apps/3/remove-history-rule", rule="<script>")).status == 422


async def test_replay_is_a_number_or_a_period(plane, browser):
    await browser.post("/dashboard/apps/3/history", **{**PREFIX, "replay": "count", "replay_count": "5"})
    by_time = {"name": "b-", "replay": "seconds", "replay_lasts": "1", "replay_unit": "minutes"}
    await browser.post("/dashboard/apps/3/history", **{**PREFIX, **by_time})
    await browser.post("/dashboard/apps/3/history", match="channel", name="stored-not", keep="0", replay="none")
    rules = [(rule.replay, rule.replay_seconds, rule.keep) for rule in plane.records.apps["3"].history]
    assert rules == [(5, 0, 100), (0, 60, 100), (0, 0, 0)]


async def test_a_rule_may_have_a_rate(plane, browser):
    paths = {"join": "delta", "by": "message_id"}
    await browser.post("/dashboard/apps/3/history", **PREFIX, rate="join", max_rate="20", **paths)
    newest = {**PREFIX, "name": "b-", "keep": "0"}
    # The fields of a choice that wasn't made are left out.
    await browser.post("/dashboard/apps/3/history", **newest, rate="latest", max_rate="5", **paths)
    await browser.post("/dashboard/apps/3/history", **{**PREFIX, "name": "c-"}, rate="none", max_rate="5", **paths)
    rules = [(rule.max_rate, rule.latest, rule.join, rule.by) for rule in plane.records.apps["3"].history]
    assert rules == [(20, False, "delta", "message_id"), (5, True, "", ""), (None, False, "", "")]
    page = (await browser.get("/dashboard/apps/3/history")).body.decode()
    assert "20 a second, <code>delta</code> joined by <code>message_id</code>" in page
    assert "5 a second, the latest" in page
    assert "every event" in page


@pytest.mark.parametrize(
    ("changed", "field"),
    [
        ({"rate": "latest"}, "max_rate"),
        ({"rate": "latest", "max_rate": "0"}, "max_rate"),
        ({"rate": "join", "max_rate": "5"}, "join"),
        ({"rate": "join", "max_rate": "5", "join": "a..b"}, "join"),
        ({"rate": "often"}, "rate"),
        ({"name": "<script>"}, "name"),
        ({"keep": "10001"}, "keep"),
        ({"keep": ""}, "keep"),
        ({"lasts": "0"}, "lasts"),
        ({"lasts": "99999"}, "lasts"),
        ({"unit": "years"}, "unit"),
        ({"replay": "count", "replay_count": "500"}, "replay"),
        ({"replay": "seconds", "replay_lasts": ""}, "replay_lasts"),
        ({"replay": "count"}, "replay_count"),
    ],
)
async def test_invalid_rule_is_reported_and_the_form_keeps_its_values(plane, browser, changed, field):
    reply = await browser.post("/dashboard/apps/3/history", **{**PREFIX, **changed})
    page = reply.body.decode()
    assert reply.status == 422
    assert plane.records.apps["3"].history == ()
    assert "<script>" not in page.replace('<script src="', "")
    if field != "unit":
        assert f'id="fault-{field}"' in page
    assert 'value="prefix" selected' in page


async def test_messages_are_shown_escaped_in_pages_newest_first(browser, publish_stored):
    await publish_stored(60)
    page = (await browser.get("/dashboard/apps/3/history/stored-a")).body.decode()
    assert "event-59" in page
    assert "event-9<" not in page
    assert "<script>alert" not in page
    assert "&lt;script&gt;alert(1)" in page
    older = page.split('href="/dashboard/apps/3/history/stored-a?')[1].split('"')[0].replace("&amp;", "&")
    assert "event-9<" in (await browser.get(f"/dashboard/apps/3/history/stored-a?{older}")).body.decode()
    assert "stored-a" in (await browser.get("/dashboard/apps/3/history")).body.decode()


async def test_cursor_of_deleted_messages_is_reported(browser, publish_stored):
    await publish_stored(1)
    gone = await browser.get("/dashboard/apps/3/history/stored-a?cursor=other%3A5")
    assert gone.status == 400
    assert "lost or cleared" in gone.body.decode()
    assert "No stored messages" in (await browser.get("/dashboard/apps/3/history/none")).body.decode()
    assert (await browser.get("/dashboard/apps/3/history/%3Cb%3E")).status == 400


async def test_messages_are_exported_oldest_first_and_cleared(redis, browser, publish_stored):
    await publish_stored(3)
    job = (await browser.post("/dashboard/apps/3/history/stored-a/export", format="json")).headers["location"]
    exported = json.loads((await browser.file_of(job)).body)
    assert [row["event"] for row in exported] == ["event-0", "event-1", "event-2"]
    assert (await browser.post("/dashboard/apps/3/history/stored-a/clear")).status == 303
    async with Redis(unix_socket_path=redis.path) as client:
        assert await client.xlen(Keys("rp").history("3", "stored-a")) == 0
