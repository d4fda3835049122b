"""What workers learn about a caller who wants to read a channel. tests/worker/streams has the readers themselves."""

import json
import time

import pytest

from helpers.granting import mint
from redpoll.control.http.auth_failures import AuthFailures
from redpoll.http.messages import AUTHENTICATED, STREAM
from redpoll.protocol.apps import HistoryRule
from redpoll.protocol.grants import of_user

STREAMED = "/apps/3/channels/{}/stream"
KEY, SECRET = "278d425bdf160c739803", "7ad3773142a6692b25b8"


@pytest.fixture
async def token(plane) -> str:
    """A token to read; the app keeps messages of `kept-…`."""
    await plane.records.add_history_rule("3", HistoryRule(id="", name="kept-", prefix=True, keep=10, seconds=60))
    _, plain = await plane.records.create_token("3", "t", ("read",), None)
    return plain


async def ask(workers_request, token: str, channel: str, flags: int = STREAM, method: str = "GET"):
    fields = {"Authorization": f"Bearer {token}", "Origin": "https://a.example"}
    workers_request.send(method, STREAMED.format(channel), fields=fields, flags=flags)
    return await workers_request.next()


@pytest.mark.parametrize("method", ["GET", "HEAD"])
async def test_worker_learns_which_channel_may_be_read(workers_request, token, method):
    answer = await ask(workers_request, token, "kept-a%3Db", method=method)
    head = answer.response.partition(b"\r\n\r\n")[0].split(b"\r\n")
    assert head[0] == b"HTTP/1.1 200 OK"
    assert {b"X-Stream-App: 3", b"X-Stream-Channel: kept-a=b"} <= set(head)
    assert b"Access-Control-Allow-Origin: https://a.example" in head
    assert answer.flags & AUTHENTICATED


async def test_channel_without_history_is_refused(workers_request, token):
    answer = await ask(workers_request, token, "other")
    assert answer.response.startswith(b"HTTP/1.1 400 ")
    assert b'"code":"no_history"' in answer.response


async def test_invalid_name_is_refused(workers_request, token):
    assert b'"code":"invalid_channel"' in (await ask(workers_request, token, "kept-%20")).response


async def test_wrong_token_is_refused(workers_request, token):
    answer = await ask(workers_request, token + "x", "kept-a")
    assert answer.response.startswith(b"HTTP/1.1 401 ")
    assert not answer.flags & AUTHENTICATED


async def test_only_workers_that_stream_are_answered(workers_request, token):
    """A path that a worker doesn't recognise, such as one with %2f, must not show what is for workers."""
    assert b'"code":"not_found"' in (await ask(workers_request, token, "kept-a", flags=0)).response


async def test_grant_opens_the_stream_and_no_other_path(plane, workers_request, token):
    await plane.records.set_app("3", {"grants": True})
    grant = mint(KEY, SECRET, "kept-*", sub="7")
    answer = await ask(workers_request, grant, "kept-a%3Db")
    assert answer.response.startswith(b"HTTP/1.1 200 ")
    assert answer.flags & AUTHENTICATED
    for path in (STREAMED.format("kept-a"), "/apps/3/channels", "/apps/3/channels/kept-a/history"):
        assert (await plane.ask("GET", path, b"", {"Authorization": f"Bearer {grant}"})).status == 401


async def test_grant_that_does_not_open_the_channel_is_refused_and_counted(plane, workers_request, token, monkeypatch):
    counted = []
    monkeypatch.setattr(AuthFailures, "count", lambda _self, address: counted.append(address))
    await plane.records.set_app("3", {"grants": True})
    plane.plane.grants.table.put("3", of_user("8"), int(time.time()))
    bodies = []
    for grant, text in (
        (mint(KEY, SECRET, "other"), b"no pattern of its channels"),
        (mint(KEY, SECRET, "kept-*", sub="8"), b"access was revoked"),
        (mint("nokey", SECRET, "kept-*"), b"is not an enabled key"),
    ):
        counted.clear()
        answer = await ask(workers_request, grant, "kept-a")
        assert answer.response.startswith(b"HTTP/1.1 401 ")
        assert not answer.flags & AUTHENTICATED
        bodies.append(json.loads(answer.response.partition(b"\r\n\r\n")[2]))
        assert (bodies[-1]["code"], text in answer.response) == ("unauthorized", True)
        assert len(counted) == 1
    # An app that doesn't exist is answered like a wrong key.
    workers_request.send(
        "GET",
        "/apps/9/channels/kept-a/stream",
        fields={"Authorization": f"Bearer {mint('nokey', SECRET, 'kept-*')}"},
        flags=STREAM,
    )
    unknown = json.loads((await workers_request.next()).response.partition(b"\r\n\r\n")[2])
    assert unknown["error"] == bodies[-1]["error"]
    assert "9" not in plane.plane.grants.table._by_app
