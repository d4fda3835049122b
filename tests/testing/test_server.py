"""The real server behind its relay: the same methods as the fake's."""

import asyncio
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator

import aiohttp
import pusher
import pytest

from helpers.fallback_wire import FallbackSocket
from helpers.granting import mint
from helpers.wire import Api, Socket, UpgradeRefused, digest, signed_path
from redpoll.testing import FakeServer, Server


@pytest.fixture(scope="module")
def running() -> Iterator[Server]:
    with Server(activity_timeout_s=60) as server:
        yield server


@pytest.fixture
def real(running: Server) -> Server:
    running.new_app()
    return running


async def test_what_is_published_is_noted(real: Server) -> None:
    backend = pusher.Pusher(
        app_id=real.app_id,
        key=real.app_key,
        secret=real.app_secret,
        host=real.host,
        port=real.port,
        ssl=False,
        timeout=60,
    )
    client, peer = await Socket.connect(real), await Socket.connect(real)
    for one in (client, peer):
        await one.subscribe("private-a")
    assert await asyncio.to_thread(backend.trigger, ["private-a", "b"], "paid", {"id": 1}) == {}
    assert (await client.next("paid"))["data"] == '{"id": 1}'
    assert (await real.wait_for("paid", "b")).json == {"id": 1}
    batch = [{"channel": "b", "name": "more", "data": "x"}]
    await asyncio.to_thread(backend.trigger_batch, batch)
    assert real.wait("more").data == "x"
    client.send({"event": "client-x", "channel": "private-a", "data": {"n": 1}})
    await peer.next("client-x")
    assert (await real.wait_for("client-x")).sender == client.socket_id
    with pytest.raises(ValueError, match="Invalid Channel"):
        await asyncio.to_thread(backend.trigger, "not a name", "refused", "")
    assert [event.name for event in real.published] == ["paid", "paid", "more", "client-x"]
    with pytest.raises(RuntimeError, match="can't be advanced"):
        real.clock.advance(1)


async def test_clients_of_an_earlier_app_are_not_this_tests(real: Server) -> None:
    """A page under test connects again after its test, to the same port."""
    client, peer = await Socket.connect(real), await Socket.connect(real)
    for one in (client, peer):
        await one.subscribe("private-a")
    real.new_app()
    client.send({"event": "client-typing", "channel": "private-a", "data": "d"})
    await peer.next("client-typing")
    assert real.published == []
    assert real.disconnect(None) == real.disconnect(4200, socket_id=client.socket_id) == 0
    await client.settle()


def test_a_server_dies_with_its_process_and_not_with_the_thread_that_started_it() -> None:
    script = (
        "import os, threading\n"
        "from redpoll.testing import Server\n"
        "server = Server()\n"
        "thread = threading.Thread(target=server.start)\n"
        "thread.start()\n"
        "thread.join()\n"
        "server.new_app()\n"
        "print(server._process.pid, flush=True)\n"
        "input()\n"
        "os._exit(1)\n"
    )
    with (
        tempfile.TemporaryDirectory(prefix="rp", ignore_cleanup_errors=True) as folder,
        subprocess.Popen(
            [sys.executable, "-c", script],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "TMPDIR": folder},
        ) as process,
    ):
        assert process.stdout is not None
        server = os.pidfd_open(int(process.stdout.readline()))
        process.communicate(b"\n")
        # A pidfd becomes readable when its process ends.
        readable, _, _ = select.select([server], [], [], 60)
        if not readable:
            signal.pidfd_send_signal(server, signal.SIGTERM)
        os.close(server)
    assert readable


async def test_failures_and_closes_are_provoked(real: Server) -> None:
    clients = [await Socket.connect(real) for _ in range(3)]
    assert real.disconnect(4200, "try again", socket_id=clients[0].socket_id) == 1
    assert (await clients[0].until_closed(), clients[0].close_reason) == (4200, "try again")
    assert real.disconnect(None, socket_id=clients[1].socket_id) == 1
    assert await clients[1].until_closed() is None
    await clients[2].settle()
    async with Api(real) as api:
        real.fail(503, times=2)
        event = {"name": "n", "channel": "c", "data": "d"}
        assert [(await api.ask("POST", "/events", event))[0] for _ in range(3)] == [503, 503, 200]
    real.assert_published("n", times=1)


async def test_settings_and_rules_reach_the_server(real: Server) -> None:
    real.keep_history("kept-", keep=5, replay=2)
    async with Api(real) as api:
        for number in range(3):
            await api.publish("kept-a", "n", str(number))
    client = await Socket.connect(real)
    await client.subscribe("kept-a")
    assert [(await client.next("n"))["data"] for _ in range(2)] == ["1", "2"]
    assert json.loads(client.frames[0]["data"])["activity_timeout"] == 60
    real.set(enabled=False)
    assert await client.until_closed() == 4003
    with pytest.raises(ValueError, match="no setting"):
        real.set(nothing=1)
    with pytest.raises(UpgradeRefused, match="426"):
        await Socket.connect(real, extra="Sec-WebSocket-Version: 8\r\n")


async def test_streams_over_http_come_as_they_are_published(real: Server) -> None:
    real.keep_history("kept-")
    path, params = f"/apps/{real.app_id}/channels/kept-a/stream", {"offset": "-1", "live": "sse"}
    url = f"http://{real.host}:{real.port}{signed_path(real, 'GET', path, params=params)}"
    fallback = FallbackSocket([(real.host, real.port)], real.app_key)
    async with Api(real) as api, aiohttp.ClientSession() as session:
        async with session.get(url) as response:
            for data in ("first", "second"):
                await api.publish("kept-a", "n", data)
                # At the end of a stream, it returns what it has.
                assert (await response.content.readuntil(data.encode())).endswith(data.encode())
        await fallback.open()
        assert json.loads(await fallback.recv())["event"] == "pusher:connection_established"
        await fallback.close()


async def test_settings_of_the_tests_environment_do_not_reach_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    # Applications have this one, and nothing listens there.
    monkeypatch.setenv("REDIS_URL", "redis://127.0.0.1:1")
    monkeypatch.setenv("REVERB_SERVER_PATH", "/elsewhere")
    monkeypatch.setenv("REDPOLL_NO_SETTING", "1")
    with Server(trusted_proxies=["127.0.0.1", "10.0.0.0/8"]) as server:
        client = await Socket.connect(server)
        await client.subscribe("news")


@pytest.mark.parametrize(("name", "why"), [("idempotency", "server.set"), ("activity_timeout", "has no setting")])
def test_a_setting_that_serve_does_not_have_is_refused(name: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        Server(**{name: 1})


async def test_a_repeat_with_its_correlation_id_is_no_second_publish(real: Server) -> None:
    event = {"name": "n", "channel": "c", "data": "d", "correlation_id": "order-7"}
    async with Api(real) as api:
        for times, setting in ((2, None), (3, True), (5, False)):
            if setting is not None:
                real.set(idempotency=setting)
            assert [(await api.ask("POST", "/events", event))[0] for _ in range(2)] == [200, 200]
            real.assert_published("n", times=times)


async def test_client_events_have_the_user_id_that_opened_the_presence_channel(real: Server) -> None:
    first = await Socket.connect(real)
    await first.subscribe("news")
    real.set(grants=True, subscription_count=True)
    # The worker has the settings.
    await first.next("pusher_internal:subscription_count", "news")
    with FakeServer(grants=True) as fake:
        for server in (fake, real):
            client = await Socket.connect(server)
            user = json.dumps({"id": "9"})
            signature = digest(server.app_secret, f"{client.socket_id}::user::{user}")
            client.send(
                {"event": "pusher:signin", "data": {"auth": f"{server.app_key}:{signature}", "user_data": user}}
            )
            await client.next("pusher:signin_success")
            rights = {"sub": "9", "may": ["subscribe", "client_events"]}
            granted = mint(server.app_key, server.app_secret, "presence-granted", **rights)
            bare = f"{server.app_key}:{digest(server.app_secret, f'{client.socket_id}:presence-signed-in')}"
            await client.subscribe("presence-a", 7)
            await client.subscribe("private-a")
            for channel, auth in (("presence-granted", granted), ("presence-signed-in", bare)):
                client.send({"event": "pusher:subscribe", "data": {"channel": channel, "auth": auth}})
                await client.next("pusher_internal:subscription_succeeded", channel)
            client.unsubscribe("presence-a")
            await client.subscribe("presence-a", 8)
            for channel in ("presence-a", "private-a", "presence-granted", "presence-signed-in"):
                client.send({"event": "client-x", "channel": channel, "data": "d"})
            await server.wait_for("client-x", "presence-signed-in")
            assert [event.user_id for event in server.published] == ["8", None, "9", "9"]


async def test_of_a_request_that_is_published_in_part_only_the_fake_knows_which(real: Server) -> None:
    with FakeServer() as fake:
        for server, noted in ((fake, ["kept-a", "b"]), (real, ["kept-a"])):
            server.keep_history("kept-")
            async with Api(server) as api:
                await api.publish("kept-a", "last", "d", end=True)
                event = {"name": "more", "channels": ["kept-a", "b"], "data": "d"}
                status, answer = await api.ask("POST", "/events", event)
            assert (status, answer["code"]) == (409, "channel_ended")
            assert [event.channel for event in server.published] == noted
