"""Webhooks that a back end pulls, from a whole server: requests wait, are bounded, and end."""

import asyncio
import itertools
import json

import aiohttp
import pytest

from helpers.pulled_server import acknowledge, pull, pulled_server
from helpers.wire import signed_path
from redpoll.http.reader import ParsedRequest
from redpoll.worker.streams.pulls import MAX_PULLS_OF_APP, LongPull, Pulls


@pytest.fixture(scope="module")
def server():
    with pulled_server() as running:
        yield running


async def test_request_waits_for_a_delivery_which_comes_until_it_is_acknowledged(server, api, occupy):
    assert await pull(api, wait="0") == []
    assert await pull(api, wait="1") == []
    waiting = asyncio.create_task(pull(api, wait="60"))
    channel = await occupy()
    (first,) = await waiting
    assert (first["channel"], first["event"], first["attempt"]) == (channel, "channel.occupied", 1)
    assert json.loads(first["body"])["data"]["channel"] == channel
    checked = {"payload": first["body"], "signature": first["headers"]["X-Service-Signature"]}
    assert (await api.ask("POST", "/webhooks/verify", checked))[1]["valid"]
    (again,) = await pull(api, wait="60", endpoint=server.webhook["id"])
    assert (again["id"], again["attempt"], again["body"]) == (first["id"], 2, first["body"])
    assert (await acknowledge(api, [first]), await acknowledge(api, [first])) == (1, 0)
    assert await pull(api, wait="2") == []


async def test_empty_answer_has_the_trace_id_of_the_request(server):
    trace = "0af7651916cd43dd8448eb211c80319c"
    headers = {"Authorization": f"Bearer {server.token}", "traceparent": f"00-{trace}-b7ad6b7169203331-01"}
    url = f"http://127.0.0.1:{server.port}/apps/{server.app_id}/webhooks/stream?wait=1&limit=0"
    async with aiohttp.ClientSession() as session, session.get(url, headers=headers) as response:
        assert await response.json() == {"deliveries": []}
        assert response.headers.getall("X-Service-Trace-Id") == [trace]
        assert "X-Pull-Terms" not in response.headers


async def test_client_that_has_left_takes_no_delivery(server, api, occupy):
    _, writer = await asyncio.open_connection("127.0.0.1", server.port)
    path = f"/apps/{server.app_id}/webhooks/stream"
    writer.write(f"GET {signed_path(server, 'GET', path, b'', {'wait': '60'})} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
    # The worker has read the first request when it answers the second.
    await pull(api, wait="0")
    writer.close()
    await writer.wait_closed()
    assert await pull(api, wait="0") == []
    await occupy()
    (delivery,) = await pull(api, wait="60")
    assert delivery["attempt"] == 1
    await acknowledge(api, [delivery])


async def test_waiting_requests_of_an_app_are_bounded_and_share_the_deliveries(api, occupy):
    asked = [api.ask("GET", "/webhooks/stream", params={"wait": "60"}) for _ in range(MAX_PULLS_OF_APP + 8)]
    waiting = [asyncio.create_task(one) for one in asked]
    for refused in itertools.islice(asyncio.as_completed(waiting), 8):
        status, body = await refused
        assert (status, body["code"]) == (429, "too_many_connections")
    assert sum(one.done() for one in waiting) == 8
    for one in waiting:
        one.cancel()
    waiting = [asyncio.create_task(pull(api, wait="60", limit="1")) for _ in range(8)]
    channels = {await occupy() for _ in range(8)}
    taken = [one for answer in await asyncio.gather(*waiting) for one in answer]
    # One that comes again within the second is the same.
    assert {one["channel"] for one in taken} <= channels
    while channels - {one["channel"] for one in taken}:
        taken += await pull(api, wait="60")
    assert await acknowledge(api, taken) == 8


class Asking:
    """The connection of a request: how often it asked control, and that it was told nothing else."""

    def __init__(self):
        self.asked = 0

    def recognised(self):
        pass

    def ask(self, pull):
        self.asked += 1


class Deaf:
    """Hears no topic."""

    def topic(self, app_id, name):
        return name

    def add(self, listener):
        self.listener = listener

    def remove(self, listener):
        pass


async def test_woken_request_whose_client_leaves_wakes_the_next():
    """The delivery waited until the next of them asked by itself, for up to 8 s."""
    pulls = Pulls(deaf := Deaf(), lambda: True)
    request = ParsedRequest(0, b"GET", b"/apps/1/webhooks/stream", [], [], b"")
    nothing = b"HTTP/1.1 200 OK\r\nX-Stream-App: 1\r\nX-Pull-Terms: 60 10 60 inf\r\n\r\n{}"
    peers = [Asking() for _ in range(3)]
    waiting = [LongPull(pulls, peer, request) for peer in peers]
    for one in waiting:
        one.ask()
        # At first, and again once it hears the app's deliveries.
        one.answered(0, nothing)
        one.answered(0, nothing)
    assert [peer.asked for peer in peers] == [2, 2, 2]
    deaf.listener.pushed(b"")
    assert [peer.asked for peer in peers] == [3, 2, 2]
    waiting[0].left()
    assert [peer.asked for peer in peers] == [3, 3, 2]
    # One that nobody has woken takes nothing with it.
    waiting[2].left()
    waiting[1].left()
    assert ([peer.asked for peer in peers], len(pulls)) == ([3, 3, 2], 0)


async def test_what_cannot_be_asked_is_refused(api):
    for path, params, code in (
        ("/webhooks/stream", {"limit": "101"}, "bad_request"),
        ("/webhooks/stream", {"wait": "x"}, "bad_request"),
        ("/webhooks/stream", {"endpoint": "none"}, "not_found"),
    ):
        assert (await api.ask("GET", path, params=params))[1]["code"] == code
    assert (await api.ask("POST", "/webhooks/ack", {"ids": "x"}))[1]["code"] == "bad_request"
    assert (await api.ask("POST", "/webhooks/ack", {"ids": ["x"] * 1_001}))[1]["code"] == "bad_request"


async def test_stopping_server_answers_requests_that_wait(server, api):
    """It is the last test of the file: the server ends here."""
    waiting = asyncio.create_task(pull(api, wait="60"))
    await pull(api, wait="0")
    await asyncio.to_thread(server.stop)
    assert await waiting == []
