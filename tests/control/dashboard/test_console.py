"""The console: which channel it may join, what it publishes, and what it shows."""

import asyncio
import contextlib
import json
import sqlite3
import time

import pytest
import sqlalchemy as sa
from structlog.testing import capture_logs

from redpoll.cluster.nodes import NodesView
from redpoll.cluster.questions import Unsubscribe
from redpoll.cluster.redis.keys import Keys
from redpoll.cluster.redis.link import Link
from redpoll.control.records.records import RecordError
from redpoll.ipc.messages import NodesChanged
from redpoll.protocol.auth import channel_fault
from redpoll.protocol.channels import CONSOLE


async def test_page_has_the_console_key_and_marks_the_app_as_watched(plane, browser):
    reply = await browser.get("/dashboard/apps/3/console?channel=%3Cscript%3E")
    app = plane.records.apps["3"]
    page = reply.body.decode()
    assert app.console_key.key in page
    assert app.console_key.secret not in page
    assert all(key.key not in page for key in app.keys)
    assert app.console_until > time.time() + 30
    assert "connect-src 'self' ws://test:" in reply.headers["content-security-policy"]
    assert 'value="&lt;script&gt;"' in page
    assert (await browser.post("/dashboard/apps/3/console/watch")).status == 204


async def test_page_opens_for_an_app_whose_record_is_full(plane, browser):
    """The console's key made it larger than a record may be: an internal error."""

    async def add_keys():
        while True:
            await plane.records.add_key("3")

    with pytest.raises(RecordError, match="the maximum is 16384"):
        await add_keys()
    assert (await browser.get("/dashboard/apps/3/console")).status == 200


async def test_page_that_subscribes_again_after_a_minute_is_sent_events_at_once(plane, browser):
    """A computer has slept, or the page took long to load: it said "Live" and got nothing until its next renewal."""
    await browser.get("/dashboard/apps/3/console")
    await plane.records.watch_console("3", time.time() - 1)
    reply = await browser.post("/dashboard/apps/3/console/auth", socket_id="1.1", channel_name=CONSOLE)
    assert reply.status == 200
    assert plane.records.apps["3"].console_until > time.time()


async def test_hidden_page_that_renews_once_a_minute_gets_all_events(plane, browser, monkeypatch):
    now = time.time()
    monkeypatch.setattr("redpoll.control.dashboard.console.time.time", lambda: now)
    await browser.get("/dashboard/apps/3/console")
    for _ in range(3):
        now += 61
        assert plane.records.apps["3"].console_until > now
        assert (await browser.post("/dashboard/apps/3/console/watch")).status == 204


async def test_only_subscriptions_to_the_console_channel_are_signed(plane, browser):
    await browser.get("/dashboard/apps/3/console")
    reply = await browser.post("/dashboard/apps/3/console/auth", socket_id="1.2", channel_name=CONSOLE)
    app = plane.records.apps["3"]
    assert channel_fault(app, "1.2", CONSOLE, reply.json()["auth"], None) is None
    other = await browser.post("/dashboard/apps/3/console/auth", socket_id="1.2", channel_name="private-orders")
    assert other.status == 403


async def test_only_socket_ids_are_signed_and_remembered(browser):
    """A signature for SOCKET:private-redpoll.console:x was one for SOCKET with channel_data."""
    await browser.get("/dashboard/apps/3/console")
    for forged in ("1.2:private-redpoll.console:x", "1.2:", "1", "x.y", "٣.٤"):
        for fields in ({"path": "auth", "channel_name": CONSOLE}, {"path": "watch"}):
            path = fields.pop("path")
            reply = await browser.post(f"/dashboard/apps/3/console/{path}", socket_id=forged, **fields)
            assert reply.status == 403, forged
    assert (await browser.post("/dashboard/apps/3/console/auth", socket_id="", channel_name=CONSOLE)).status == 403


@pytest.fixture
async def asked(redis, monkeypatch):
    """Whose console control asks the workers to end: sets of (app id, socket id) by `asked()`."""
    monkeypatch.setattr("redpoll.control.dashboard.console._CHECK_EVERY_S", 0.01)
    link = Link(redis.url)
    heard = []
    link.on_push = lambda _topic, payload: heard.append(json.loads(payload))
    link.start()
    await link.wait_up()
    done = asyncio.get_running_loop().create_future()
    link.subscribe((Keys("rp").sys,), done.set_result)
    await done
    # It asks again if the answers don't arrive in time.
    yield lambda: {
        (message["app"], message["socket"])
        for message in heard
        if message["type"] == "Unsubscribe" and message["channel"] == CONSOLE and message["at_s"]
    }
    await link.close()


async def test_connection_that_others_displace_is_closed(browser, viewer, asked, wait_until):
    """A viewer's own console was forgotten after a thousand renewals for others, and stayed open."""
    await viewer.get("/dashboard/apps/3/console")
    await viewer.post("/dashboard/apps/3/console/auth", socket_id="1.1", channel_name=CONSOLE)
    await browser.get("/dashboard/apps/3/console")
    await browser.post("/dashboard/apps/3/console/auth", socket_id="2.1", channel_name=CONSOLE)
    for number in range(20):
        assert (await browser.post("/dashboard/apps/3/console/watch", socket_id=f"3.{number}")).status == 204
    await wait_until(asked)
    # Its own oldest one, and no other user's.
    assert asked() == {("3", "2.1")}
    assert (await viewer.post("/dashboard/apps/3/console/watch", socket_id="2.1")).status == 204
    assert (await viewer.post("/dashboard/apps/3/console/watch", socket_id="3.1")).status == 403


async def test_connections_of_ended_sessions_do_not_wait_until_displaced_ones_are_closed(
    plane, browser, viewer, wait_until, monkeypatch
):
    """While a worker hangs, each close takes 2 s."""
    closing = set()

    async def ask(question):
        if isinstance(question, Unsubscribe):
            closing.add((question.app, question.socket))
        await asyncio.Event().wait()

    monkeypatch.setattr(plane.plane.dashboard.survey, "ask", ask)
    await viewer.get("/dashboard/apps/3/console")
    await viewer.post("/dashboard/apps/3/console/auth", socket_id="1.1", channel_name=CONSOLE)
    await browser.get("/dashboard/apps/3/console")
    for number in range(20):
        assert (await browser.post("/dashboard/apps/3/console/watch", socket_id=f"3.{number}")).status == 204
    # The check of the sessions doesn't run before these two.
    plane.plane.dashboard._console._wake.clear()
    await viewer.post("/dashboard/logout")
    for number in (20, 21):
        assert (await browser.post("/dashboard/apps/3/console/watch", socket_id=f"3.{number}")).status == 204
    await wait_until(lambda: closing >= {("3", "1.1")})


@pytest.fixture
async def open_consoles(plane, monkeypatch):
    """A list of (app id, socket id): the connections that workers show. `asked` counts the questions."""
    monkeypatch.setattr("redpoll.control.dashboard.console._CHECK_EVERY_S", 0.01)
    monkeypatch.setattr("redpoll.control.dashboard.console._SWEEP_EVERY_S", 0.01)

    class Consoles(list):
        asked = 0

    consoles = Consoles()

    async def ask(question):
        if isinstance(question, Unsubscribe):
            consoles.remove((question.app, question.socket))
            return {"w": {}}
        consoles.asked += 1
        return {"w": {"connections": [{"app": app_id, "socket": socket} for app_id, socket in consoles]}}

    monkeypatch.setattr(plane.plane.dashboard.survey, "ask", ask)
    # Begins again, because the first round takes 3 s.
    console = plane.plane.dashboard._console
    await console.finish()
    console.start()
    return consoles


async def test_console_of_a_signature_by_a_dead_process_is_ended_while_somebody_watches(
    browser, open_consoles, wait_until
):
    """A removed user who subscribed after the start, or at a node that died, saw the events of the others' console."""
    await wait_until(lambda: open_consoles.asked)
    await browser.get("/dashboard/apps/3/console")
    await browser.post("/dashboard/apps/3/console/auth", socket_id="1.1", channel_name=CONSOLE)
    open_consoles += [("3", "1.1"), ("3", "6.6")]
    await wait_until(lambda: open_consoles == [("3", "1.1")])


async def test_consoles_that_another_node_may_know_stay_until_it_dies(
    plane, browser, open_consoles, wait_until, node, monkeypatch
):
    rounds, several = 0, NodesView.several.fget

    def counted(nodes):
        nonlocal rounds
        rounds += 1
        return several(nodes)

    await wait_until(lambda: open_consoles.asked)
    run = plane.plane.dashboard._console._nodes.run
    plane.plane.receive(NodesChanged([node(run, "here"), node("ba9876543210", "there")], run))
    await browser.get("/dashboard/apps/3/console")
    open_consoles.append(("3", "6.6"))
    monkeypatch.setattr(NodesView, "several", property(counted))
    await wait_until(lambda: rounds > 3)
    assert open_consoles == [("3", "6.6")]
    plane.plane.receive(NodesChanged([node(run, "here"), node("ba9876543210", "there", alive=False)], run))
    await wait_until(lambda: not open_consoles)


async def test_renewals_have_a_rate_and_change_the_record_seldom(plane, browser):
    await browser.get("/dashboard/apps/3/console")
    until = plane.records.apps["3"].console_until
    statuses = [(await browser.post("/dashboard/apps/3/console/watch")).status for _ in range(70)]
    assert statuses[:40] == [204] * 40
    assert 429 in statuses[40:]
    assert plane.records.apps["3"].console_until == until


@pytest.mark.parametrize("end", ["removed", "reset", "logged out"])
async def test_console_connection_is_closed_when_its_session_ends(browser, viewer, asked, wait_until, end):
    for session, socket_id in ((browser, "1.1"), (viewer, "2.2")):
        await session.get("/dashboard/apps/3/console")
        reply = await session.post("/dashboard/apps/3/console/auth", socket_id=socket_id, channel_name=CONSOLE)
        assert reply.status == 200
        assert (await session.post("/dashboard/apps/3/console/watch", socket_id=socket_id)).status == 204
    if end == "logged out":
        await viewer.post("/dashboard/logout")
    else:
        await browser.get("/dashboard/users")
        await browser.post(f"/dashboard/users/{'remove' if end == 'removed' else end}", user="vera")
    await wait_until(asked)
    assert asked() == {("3", "2.2")}


async def test_event_is_published_as_with_the_api(plane, browser, hear, wait_until):
    listener = await hear("news")
    reply = await browser.post("/dashboard/apps/3/console/publish", channel="news", name="hello", data='{"a": " <b> "}')
    assert reply.status == 200
    # The listener has a connection of its own.
    await wait_until(lambda: listener.heard)
    (payload,) = listener.heard
    assert payload.endswith(b'hello{"a": " <b> "}')
    assert ">publish<" in (await browser.get("/dashboard/audit")).body.decode()


async def test_event_is_published_though_the_audit_log_cannot_be_written(plane, browser, hear, tmp_path, wait_until):
    listener = await hear("news")
    async with plane.plane.dashboard.accounts.store.reading() as connection:
        await connection.execute(sa.text("PRAGMA busy_timeout=0"))
    with contextlib.closing(sqlite3.connect(tmp_path / "redpoll.sqlite", isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        with capture_logs() as logged:
            reply = await browser.post("/dashboard/apps/3/console/publish", channel="news", name="hello", data="{}")
    assert (reply.status, list(json.loads(reply.body))) == (200, ["trace_id"])
    await wait_until(lambda: listener.heard)
    (line,) = [line for line in logged if line["event"] == "not in the audit log"]
    noted = {"who": "admin", "action": "publish", "app": "3", "target": "news", "detail": "hello"}
    assert line.items() >= {**noted, "reason": "database is locked"}.items()


async def test_published_event_is_in_the_event_trace_with_the_users_name(plane, browser, hear):
    await hear("news")
    reply = await browser.post("/dashboard/apps/3/console/publish", channel="news", name="hello", data="{}")
    await plane.write_log()
    trace_id = json.loads(reply.body)["trace_id"]
    trace = (await plane.call("GET", f"/apps/3/trace/{trace_id}")).json()
    assert (trace["name"], trace["channels"], trace["size"], trace["status"]) == ("hello", ["news"], 2, 200)
    assert trace["caller"] == "dashboard user admin from 127.0.0.1"
    assert [span["stage"] for span in trace["spans"]][:2] == ["authenticated", "accepted"]


async def test_refused_event_is_in_the_event_log_too(plane, browser):
    await browser.post("/dashboard/apps/3/console/publish", channel="news", name="pusher:x", data="{}")
    await browser.post("/dashboard/apps/3/console/publish", channel="news", name="e", data="x" * 20_000)
    await plane.write_log()
    log = (await plane.call("GET", "/apps/3/events/log", params={"channel": "news"})).json()
    assert [(row["name"], row["status"]) for row in log["events"]] == [("e", 413), ("pusher:x", 400)]


async def test_publishing_counts_against_the_daily_limit(plane, browser):
    await plane.records.set_app("3", {"plan": "free"})
    await browser.post("/dashboard/apps/3/console/publish", channel="news", name="e", data="{}")
    reply = await plane.trigger()
    assert reply.headers["x-ratelimit-remaining"] == str(200_000 - 2)


async def test_disabled_app_is_reported(plane, browser):
    await plane.records.set_app("3", {"enabled": False})
    reply = await browser.post("/dashboard/apps/3/console/publish", channel="news", name="e", data="{}")
    assert (reply.status, json.loads(reply.body)) == (403, {"fault": {"": "This app is disabled."}})


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"channel": "a b", "name": "e", "data": ""}, "channel"),
        ({"channel": CONSOLE, "name": "e", "data": ""}, "channel"),
        ({"channel": "c", "name": "pusher:x", "data": ""}, "name"),
        ({"channel": "c", "name": "e", "data": "x" * 20_000}, "data"),
    ],
)
async def test_refusals_are_reported_at_their_field(browser, fields, field):
    reply = await browser.post("/dashboard/apps/3/console/publish", **fields)
    assert reply.status == 422
    assert list(json.loads(reply.body)["fault"]) == [field]
