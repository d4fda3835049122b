"""Webhooks that a back end pulls, from a whole server: requests wait, are bounded, and end."""

import asyncio
import itertools
import json
import os
import signal
import sys

import pytest
from click.testing import CliRunner

from reading import read_token
from redpoll.cli import main
from redpoll.worker.streams.pulls import MAX_PULLS_OF_APP
from server import Server
from wire import Api, Socket, signed_path

CHANNELS = iter(f"pulled-{n}" for n in range(10_000))


@pytest.fixture(scope="module")
def server():
    """One worker; the app's webhook has no URL, and what isn't acknowledged within a second comes again."""
    settings = {"webhook_acknowledge_within_s": 1, "webhook_retry_after_s": ",".join(["0.5"] * 20)}
    with Server(workers=1, webhook_debounce_s=0, **settings) as running:
        words = ["webhook", "create", running.app_id, "--pull", "--events", "channel.occupied", "--json"]
        made = CliRunner().invoke(main, [*words, "--data-dir", str(running.folder / "data")])
        assert made.exit_code == 0, made.output
        running.webhook = json.loads(made.stdout)
        running.token = read_token(running, "webhooks")
        yield running


@pytest.fixture
async def api(server):
    async with Api(server, connections=100) as opened:
        yield opened


@pytest.fixture
async def occupy(server):
    """`await occupy()`: occupies another channel, and returns its name."""
    socket = await Socket.connect(server)

    async def subscribe() -> str:
        channel = next(CHANNELS)
        await socket.subscribe(channel)
        return channel

    yield subscribe
    await socket.close()


async def acknowledge(api, deliveries) -> int:
    status, body = await api.ask("POST", "/webhooks/ack", {"ids": [one["id"] for one in deliveries]})
    assert status == 200, body
    return body["acknowledged"]


async def pull(api, **params) -> list:
    status = 429
    while status == 429:
        status, body = await api.ask("GET", "/webhooks/stream", params=params)
    assert status == 200, body
    return body["deliveries"]


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


async def test_listen_runs_a_command_until_it_ends_well_and_stops_at_a_signal(server, occupy, tmp_path):
    number = "$HTTP_X_SERVICE_ATTEMPT"
    script = f"cat > {tmp_path}/$HTTP_X_SERVICE_DELIVERY.{number}; test {number} != 1 || exit 3"
    url = f"http://127.0.0.1:{server.port}/apps/{server.app_id}"
    listener = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "redpoll", "webhook", "listen", "--url", url, "--json", "--", "sh", "-c", script),
        env={**os.environ, "REDPOLL_TOKEN": server.token},
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(100):
            channel = await occupy()
            lines = [json.loads(await listener.stdout.readline()) for _ in range(2)]
            listener.send_signal(signal.SIGINT)
            assert await listener.wait() == 0
    finally:
        if listener.returncode is None:
            listener.kill()
    assert [(line["channel"], line["attempt"], line["exit"]) for line in lines] == [(channel, 1, 3), (channel, 2, 0)]
    body = json.loads((tmp_path / f"{lines[0]['id']}.2").read_text())
    assert (body["event"], body["data"]["channel"]) == ("channel.occupied", channel)


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
