"""What is checked of a credential while its address is at the limit of failures.

The limit itself: test_auth_failures.py. Who may do what: test_isolation.py.
"""

import urllib.parse

import pytest

from redpoll.http.messages import CLOSES, HEAD_ONLY

LIMITED = {"auth_failures_per_minute": 1}
PAIR = {"X-Service-Key": "278d425bdf160c739803", "X-Service-Secret": "7ad3773142a6692b25b8"}


@pytest.fixture
async def limited(make_plane, redis):
    """A Plane on which this client has no failures left."""
    plane = await make_plane(redis.url, **LIMITED)
    # Otherwise a failure is free again after a minute.
    plane.plane.auth_failures.clock = lambda: 1000.0
    assert (await plane.ask("GET", "/apps/3/channels")).status == 401
    return plane


@pytest.mark.parametrize(
    "params", [{}, {"info": "user_count,subscription_count", "filter_by_prefix": "presence-"}, {"a": "x" * 3000}]
)
async def test_usual_signatures_are_accepted_at_the_limit(limited, sign, params):
    for target in (
        sign("GET", "/apps/3/channels", params=params),
        sign("GET", "/api/v1/apps/3/channels", params=params),
        sign("GET", "/api/v1/apps/3/channels", params=params, signed_path="/apps/3/channels"),
    ):
        # Header fields don't matter.
        for headers in ({}, {"traceparent": "x"}):
            assert (await limited.ask("GET", target, b"", headers)).status in (200, 400)
    assert limited.plane.auth_failures.limited_total == 0


async def test_at_the_limit_unusual_layouts_are_refused_unchecked(sign, limited):
    spaced = sign("GET", "/apps/3/channels", params={"a": "x y"})
    assert "+" in spaced
    arrays = urllib.parse.unquote(sign("GET", "/apps/3/channels", params={"a[]": "1"}))
    assert "a[]=1" in arrays
    for target in (spaced, arrays, sign("GET", "/apps/3/channels", params={"a": "x" * 5000})):
        assert (await limited.ask("GET", target)).status == 429
        # Without the limit they are right.
        limited.plane.auth_failures._buckets.clear()
        assert (await limited.ask("GET", target)).status == 200
        assert (await limited.ask("GET", "/apps/3/channels")).status == 401
    assert (await limited.ask("GET", "/apps/3/channels", b"", PAIR)).status == 200


async def test_a_wrong_signature_of_an_unread_body_is_a_failure(plane, workers_request, sign):
    wrong = sign("POST", "/apps/3/events", b"x", secret="no")
    workers_request.send("POST", wrong, flags=HEAD_ONLY | CLOSES, refusal=413)
    assert (await workers_request.next()).response.startswith(b"HTTP/1.1 413 ")
    assert len(plane.plane.auth_failures) == 1


async def test_credentials_are_refused_with_503_while_revocations_are_not_known(plane, sign):
    token, plain = await plane.records.create_token("3", "CI", ["all"])
    bearer = {"Authorization": f"Bearer {plain}"}
    plane.records.is_current = lambda: False
    for target, headers in (
        ("/apps/3/channels", bearer),
        ("/apps/3/channels", PAIR),
        (sign("GET", "/apps/3/channels"), {}),
    ):
        reply = await plane.ask("GET", target, b"", headers)
        assert (reply.status, reply.json()["code"]) == (503, "unavailable")
        assert "can't know whether this key or token was revoked" in reply.json()["error"]
    plane.records.is_current = lambda: True
    assert (await plane.ask("GET", "/apps/3/channels", b"", bearer)).status == 200
    # What Redis says of a revoked one.
    plane.records.forget_revoked([token.hash, "another"])
    assert (await plane.ask("GET", "/apps/3/channels", b"", bearer)).json()["code"] == "token_revoked"
