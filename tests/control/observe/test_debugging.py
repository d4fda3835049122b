"""What the control plane writes about requests of an app that is being debugged."""

import time

import pytest
import structlog

from redpoll.config.settings import Settings
from redpoll.control.commands.context import Context
from redpoll.control.observe import debugging
from redpoll.ipc.command_socket import CommandError


@pytest.fixture
def context(plane):
    return Context(None, plane.records, Settings(), cluster=plane.plane.cluster)


@pytest.fixture
def lines():
    with structlog.testing.capture_logs() as logged:
        yield logged


def shown(lines):
    return [line for line in lines if line["event"] == "debug"]


async def test_each_request_of_the_app_has_a_line_with_its_answer_if_refused(plane, lines):
    await plane.records.debug("3", time.time() + 60, "")
    assert (await plane.trigger(data="hello")).status == 200
    assert (await plane.trigger(channels=["no spaces"])).status == 400
    refused = await plane.call("POST", "/apps/3/events", {"name": "e", "data": "", "channels": ["c"]}, secret="wrong")
    assert refused.status == 401
    assert (
        await plane.call("GET", "/apps/4/channels", key="1111111111111111aaaa", secret="2222222222222222bbbb")
    ).status == 200
    first, second, third = shown(lines)
    assert (first["app"], first["status"], first["method"], first["path"]) == ("3", 200, "POST", "/apps/3/events")
    assert '"data": "hello"' in first["body"]
    assert "auth_signature=…" in first["query"]
    assert "answer" not in first
    assert (second["status"], "channel" in second["answer"]) == (400, True)
    assert third["status"] == 401


async def test_tokens_in_queries_are_in_no_line(plane, lines, sign):
    """An EventSource can't send headers, so somebody tries it on other paths, and looks why it fails."""
    await plane.records.debug("3", time.time() + 60, "")
    assert (await plane.ask("GET", "/apps/3/channels?Token=S3CRET&limit=1")).status == 401
    assert (
        await plane.ask("GET", sign("GET", "/apps/3/channels", params={"token": "S3CRET"}, secret="no"))
    ).status == 401
    for line in shown(lines):
        assert "oken=…" in line["query"]
        assert "S3CRET" not in str(line)


@pytest.mark.parametrize("host", ["test", "elsewhere.example"])
@pytest.mark.parametrize("method", ["POST", "PUT"])
@pytest.mark.parametrize("path", ["/dashboard/apps/3/webhooks", "/dashboard/static/3/app.css"])
async def test_requests_of_the_dashboard_have_no_line(plane, lines, method, path, host):
    """A line had the form, with its CSRF token and the secrets that were typed."""
    await plane.records.debug("3", time.time() + 60, "")
    head = f"{method} {path}?csrf=S3CRET HTTP/1.1\r\nHost: {host}\r\nContent-Length: 11\r\n\r\n"
    await plane.wire.ask(head.encode() + b"csrf=S3CRET")
    assert shown(lines) == []


async def test_request_with_a_wrong_method_has_a_line_without_its_body(plane, lines):
    """It may be a request to the management API, with secrets."""
    await plane.records.debug("3", time.time() + 60, "")
    for path in ("/apps/3/events", "/api/v1/apps/3/tokens"):
        assert (await plane.ask("PUT", path, b'{"secret": "S3CRET"}')).status == 405
    assert [(line["method"], line["status"], "body" in line) for line in shown(lines)] == [("PUT", 405, False)] * 2


async def test_of_one_connection_only_requests_that_name_it_count(plane, lines):
    await plane.records.debug("3", time.time() + 60, "1.2")
    await plane.trigger()
    await plane.trigger(socket_id="1.2")
    (line,) = shown(lines)
    assert (line["socket"], line["status"]) == ("1.2", 200)


async def test_commands_begin_show_and_end_it(context, plane):
    assert await debugging.COMMANDS["debug list"](context, {}) == []
    begun = await debugging.COMMANDS["debug start"](context, {"app": "3", "socket": "", "for_s": 60})
    assert (begun["app"], begun["socket"]) == ("3", "")
    await plane.trigger()
    page = await debugging.COMMANDS["debug show"](context, {"app": "3", "after": begun["position"]})
    (line,) = page["lines"]
    assert (line["what"], line["status"], line["origin"].endswith(" control")) == ("request answered", 200, True)
    again = await debugging.COMMANDS["debug show"](context, {"app": "3", "after": page["position"]})
    assert again == {"lines": [], "position": page["position"], "until": begun["until"]}
    assert [one["app"] for one in await debugging.COMMANDS["debug list"](context, {})] == ["3"]
    assert [one["app"] for one in await debugging.COMMANDS["debug stop"](context, {"app": ""})] == ["3"]
    assert await debugging.COMMANDS["debug list"](context, {}) == []


async def test_longer_than_a_day_is_cut(context):
    begun = await debugging.COMMANDS["debug start"](context, {"app": "3", "socket": "", "for_s": 1_000_000})
    assert begun["until"] <= time.time() + debugging.MAX_DEBUG_S


@pytest.mark.parametrize(
    ("app_id", "socket_id", "fault"),
    [("9", "", "no app with the id 9"), ("3", "abc", "no socket id"), ("", "1.2", "no connection with the socket id")],
)
async def test_unknown_targets_are_refused(context, app_id, socket_id, fault):
    with pytest.raises(CommandError, match=fault):
        await debugging.COMMANDS["debug start"](context, {"app": app_id, "socket": socket_id, "for_s": 60})
