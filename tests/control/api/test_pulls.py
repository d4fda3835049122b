"""What control answers to pulls; tests/worker/streams/test_pulls.py has whole servers, with workers that wait."""

import math

import pytest

from redpoll.control.api.pulls import DEFAULT_WAIT_S, MAX_WAIT_S
from redpoll.http.messages import STREAM, PullTerms

PATH = "/apps/3/webhooks/stream"


@pytest.fixture
async def token(plane) -> str:
    """A token with the scope of pulls; the app has a webhook without a URL."""
    await plane.plane.webhooks.endpoints.create("3", None)
    _, plain = await plane.records.create_token("3", "t", ("webhooks",), None)
    return plain


@pytest.mark.parametrize(("query", "waits_s"), [("", DEFAULT_WAIT_S), ("?wait=0", 0), ("?wait=60", MAX_WAIT_S)])
async def test_a_worker_learns_for_how_long_to_wait(workers_request, token, query, waits_s):
    shown = {"Authorization": f"Bearer {token}"}
    reply = await workers_request("GET", PATH + query, fields=shown, flags=STREAM)
    terms = PullTerms.unpack(reply.headers["x-pull-terms"])
    assert (reply.headers["x-stream-app"], terms) == ("3", (waits_s, 10, 60, math.inf))
    # Others are answered at once: nothing is due.
    reply = await workers_request("GET", PATH + query, fields=shown)
    assert (reply.status, reply.json(), "x-pull-terms" in reply.headers) == (200, {"deliveries": []}, False)
    assert reply.headers["cache-control"] == "no-store"


@pytest.mark.parametrize("bearer", ["a:b.c", "key-3:a.b.c"])
async def test_grant_pulls_nothing(workers_request, token, bearer):
    reply = await workers_request("GET", PATH, fields={"Authorization": f"Bearer {bearer}"}, flags=STREAM)
    assert (reply.status, reply.json()["code"]) == (401, "unauthorized")
