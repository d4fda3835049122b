"""POST grants/revoke and POST channels/NAME/unsubscribe."""

import json
import time

import pytest

REVOKE = "/apps/3/grants/revoke"


async def test_a_revocation_says_from_when_new_grants_count(plane):
    before = int(time.time())
    reply = await plane.call("POST", REVOKE, {"sub": 7})
    body = json.loads(reply.body)
    assert (reply.status, body["unsubscribed"]) == (200, 0)
    assert before <= body["revoked_at"] <= time.time()
    assert (await plane.call("POST", "/api/v1" + REVOKE, {"jti": "a"})).status == 200
    assert sorted(subject for _, subject, _ in plane.plane.grants.table) == ["jti a", "sub 7"]


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ({}, "give jti"),
        ({"jti": "a", "sub": "b"}, "give jti"),
        ({"jti": ""}, "jti must have"),
        ({"sub": "x" * 129}, "sub must have"),
        ({"sub": "a\u0000"}, "printable"),
        ({"sub": []}, "the body is not what"),
    ],
)
async def test_a_body_that_names_nothing_to_revoke(plane, body, text):
    reply = await plane.call("POST", REVOKE, body)
    assert (reply.status, json.loads(reply.body)["code"]) == (400, "bad_request")
    assert text in json.loads(reply.body)["error"]


async def test_unsubscribe_answers_how_many_subscriptions_ended(plane):
    for body in ({"user_id": 7}, {"socket_id": "1.1"}):
        reply = await plane.call("POST", "/apps/3/channels/private-a/unsubscribe", body)
        assert (reply.status, json.loads(reply.body)) == (200, {"unsubscribed": 0})


@pytest.mark.parametrize(
    ("channel", "body", "code"),
    [
        ("private-a", {}, "bad_request"),
        ("private-a", {"user_id": "7", "socket_id": "1.1"}, "bad_request"),
        ("private-a", {"socket_id": "x"}, "invalid_socket_id"),
        ("private-a", {"user_id": ""}, "bad_request"),
        ("news", {"user_id": "7"}, "invalid_channel"),
        ("private-redpoll.console", {"user_id": "7"}, "invalid_channel"),
        ("private-%20", {"user_id": "7"}, "invalid_channel"),
    ],
)
async def test_unsubscribe_refuses_what_has_no_signature_or_no_subject(plane, channel, body, code):
    reply = await plane.call("POST", f"/apps/3/channels/{channel}/unsubscribe", body)
    assert (reply.status, json.loads(reply.body)["code"]) == (400, code)


async def test_both_need_the_scope_publish(plane):
    _, reading = await plane.records.create_token("3", "t", ["read"])
    headers = {"Authorization": f"Bearer {reading}", "Content-Type": "application/json"}
    for path in (REVOKE, "/apps/3/channels/private-a/unsubscribe"):
        reply = await plane.ask("POST", path, b"{}", headers)
        assert (reply.status, json.loads(reply.body)["code"]) == (403, "insufficient_scope")
