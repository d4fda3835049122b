"""Tests of fastapi_app.py, as its authors would write them: `pytest test_fastapi_app.py`, or with `--redpoll-real`.

They need `pip install redpoll[testing] redpoll-client fastapi httpx2 pytest pytest-asyncio`. The fixture `redpoll` is a
server of each test's own.
"""

import asyncio

import pytest
from fastapi.testclient import TestClient

from redpoll_client import Subscriber
from redpoll_client.examples.fastapi_app import app, current_user, realtime


@pytest.fixture
def client(redpoll, monkeypatch):
    monkeypatch.setenv("REDPOLL_URL", redpoll.pusher_url)
    # Failures of the app become answers, as users get them.
    with TestClient(app, cookies={"user": "anna"}, raise_server_exceptions=False) as client:
        yield client


def auth(client, channel, **more):
    return client.post("/realtime/auth", data={"socket_id": "1.2", "channel_name": channel, **more})


def test_paying_tells_the_order(client, redpoll):
    assert client.post("/orders/7/pay").status_code == 200
    assert redpoll.wait("paid", "private-order-7").json == {"by": "anna"}


def test_paying_tells_nobody_else(client, redpoll):
    client.post("/orders/7/pay")
    redpoll.assert_published("paid", times=1)
    redpoll.assert_not_published("paid", "private-order-8")


def test_a_welcome_goes_to_the_user(client, redpoll):
    client.post("/welcome")
    assert redpoll.wait("welcome", "#server-to-user-anna").json == {"text": "Welcome, anna"}


def test_the_owner_joins_the_order(client):
    answer = auth(client, "private-order-7")
    assert answer.json() == realtime.publisher.authenticate("private-order-7", "1.2")


@pytest.mark.parametrize("channel", ["private-order-8", "private-order-07", "private-encrypted-order-7"])
def test_others_are_refused(client, channel):
    assert auth(client, channel).status_code == 403


def test_nobody_joins_without_a_login(client):
    app.dependency_overrides[current_user] = lambda: None
    try:
        assert auth(client, "private-order-7").status_code == 403
    finally:
        app.dependency_overrides.clear()


def test_a_server_that_is_away_is_an_error_and_no_event(client, redpoll):
    redpoll.fail(503)
    assert client.post("/orders/7/pay").status_code == 500
    redpoll.assert_not_published()


@pytest.mark.redpoll(max_data_bytes=16)
def test_an_event_that_is_too_large_is_an_error(client, redpoll):
    assert client.post("/welcome").status_code == 500
    redpoll.assert_not_published()


@pytest.mark.asyncio
async def test_a_subscriber_hears_what_is_paid(client, redpoll):
    async with (
        Subscriber(url=redpoll.pusher_url) as subscriber,
        subscriber.subscribe("private-order-7") as channel,
    ):
        await asyncio.to_thread(client.post, "/orders/7/pay")
        async with asyncio.timeout(60):
            assert (await anext(channel)).json() == {"by": "anna"}


@pytest.mark.asyncio
async def test_who_loses_the_connection_misses_nothing(client, redpoll):
    redpoll.keep_history("private-order-", keep=10)
    async with (
        Subscriber(url=redpoll.pusher_url) as subscriber,
        subscriber.subscribe("private-order-7") as channel,
    ):
        redpoll.disconnect(4200)
        await asyncio.to_thread(client.post, "/orders/7/pay")
        async with asyncio.timeout(60):
            assert (await anext(channel)).name == "paid"
