"""Clients of soketi and Reverb move to redpoll: their configuration is imported, and only the address changes.

The old server is a stand-in that accepts every subscription. A proxy takes the place of the host name: when it points
to redpoll, the libraries reconnect by themselves, with the keys and options that they had.
"""

import asyncio
import contextlib
import json
import re
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from websockets.asyncio.server import ServerConnection, serve

from clients.node import Node, NodeError, auth_endpoint, local_signer
from helpers.proxy import Proxy
from helpers.server import Server

SOKETI = {
    "port": 6001,
    "appManager.array.apps": [
        {"id": "app-id", "key": "app-key", "secret": "app-secret", "enableClientMessages": True, "maxConnections": 100},
        {
            "id": "small",
            "key": "small-key",
            "secret": "small-secret",
            "maxConnections": 2,
            "maxPresenceMembersPerChannel": 1,
            "maxEventPayloadInKb": 1,
        },
    ],
}
REVERB = """
BROADCAST_CONNECTION=reverb
REVERB_APP_ID=my_app.2
REVERB_APP_KEY=nq3k7hx2
REVERB_APP_SECRET=vtz04f8q
REVERB_HOST=localhost
REVERB_PORT=8080
REVERB_SCHEME=http
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A running redpoll that has imported both configurations."""
    folder = tmp_path_factory.mktemp("other servers")
    (folder / "soketi.json").write_text(json.dumps(SOKETI))
    (folder / ".env").write_text(REVERB)
    with Server(workers=2) as running:
        for source, name in (("soketi", "soketi.json"), ("reverb", ".env")):
            outcome = imported(running, source, folder / name)
            assert {app["outcome"] for app in outcome["apps"]} == {"created"}
        yield running


def command(server: Server, *words: str) -> str:
    """What a command of the server's operator prints."""
    command = [sys.executable, "-m", "redpoll", *words, "--data-dir", str(server.folder / "data")]
    done = subprocess.run(command, env=server.environment(), capture_output=True, text=True, timeout=60, check=True)
    return done.stdout


def imported(server: Server, source: str, file: Path) -> dict:
    return json.loads(command(server, "import", source, str(file), "--json"))


@contextlib.asynccontextmanager
async def old_server() -> AsyncIterator[int]:
    """Speaks as much of the protocol as the libraries need to connect and subscribe. Yields its port."""

    async def answer(socket: ServerConnection) -> None:
        hello = json.dumps({"socket_id": "1.1", "activity_timeout": 30})
        await socket.send(json.dumps({"event": "pusher:connection_established", "data": hello}))
        async for message in socket:
            frame = json.loads(message)
            if frame["event"] == "pusher:subscribe":
                channel = frame["data"]["channel"]
                data = '{"presence":{"ids":[],"hash":{},"count":0}}' if channel.startswith("presence-") else "{}"
                succeeded = {"event": "pusher_internal:subscription_succeeded", "channel": channel, "data": data}
                await socket.send(json.dumps(succeeded))

    async with serve(answer, "127.0.0.1", 0) as listening:
        yield next(iter(listening.sockets)).getsockname()[1]


@contextlib.contextmanager
def credentials(server: Server, app_id: str, key: str, secret: str) -> Iterator[None]:
    """Within the block, the tests' helpers use this app."""
    before = server.app_id, server.app_key, server.app_secret
    server.app_id, server.app_key, server.app_secret = app_id, key, secret
    try:
        yield
    finally:
        server.app_id, server.app_key, server.app_secret = before


async def trigger(server: Server, node: Node, channel: str, event: str) -> None:
    """Publishes with Pusher's library for Node, as the back end did, at the new address."""
    options = {"appId": server.app_id, "key": server.app_key, "secret": server.app_secret, "useTLS": False}
    await node.call("server", client="back end", options=options | {"host": "127.0.0.1", "port": server.port})
    await node.call("server_call", client="back end", method="trigger", args=[channel, event, {"n": 1}])


async def test_pusher_js_reconnects_from_soketi_to_redpoll(server: Server, node: Node) -> None:
    with credentials(server, "app-id", "app-key", "app-secret"):
        async with old_server() as port, auth_endpoint(local_signer(server)) as auth_url:
            with Proxy(("127.0.0.1", port)) as host:
                options = node.options(f"{auth_url}?user=anna", wsPort=host.port)
                await node.call("connect", client="page", key="app-key", options=options)
                for channel in ("news", "presence-room"):
                    await node.call("subscribe", client="page", channel=channel, events=["moved"])
                    await node.seen(client="page", channel=channel, event="pusher:subscription_succeeded")
                await asyncio.to_thread(move, host, server)
                for channel in ("news", "presence-room"):
                    await node.seen(2, client="page", channel=channel, event="pusher:subscription_succeeded")
                await trigger(server, node, "presence-room", "moved")
                assert (await node.seen(client="page", event="moved"))["data"] == {"n": 1}


async def test_echo_reconnects_from_reverb_to_redpoll(server: Server, node: Node) -> None:
    with credentials(server, "my_app.2", "nq3k7hx2", "vtz04f8q"):
        async with old_server() as port, auth_endpoint(local_signer(server)) as auth_url:
            with Proxy(("127.0.0.1", port)) as host:
                options = node.options(None, broadcaster="reverb", key="nq3k7hx2", wsPort=host.port)
                await node.call("echo", client="page", options=options | {"authEndpoint": auth_url})
                await node.call("echo_listen", client="page", channel="orders", kind="private", events=["OrderShipped"])
                await node.seen(client="page", event="subscribed")
                await asyncio.to_thread(move, host, server)
                await node.seen(2, client="page", event="subscribed")
                await trigger(server, node, "private-orders", "App\\Events\\OrderShipped")
                assert (await node.seen(client="page", event="OrderShipped"))["data"] == {"n": 1}


async def answers(server: Server) -> list[object]:
    """What two pages and a back end get from the apps that were soketi's, without what differs in each run."""
    seen: list[object] = []
    async with Node(server) as node:
        with credentials(server, "app-id", "app-key", "app-secret"):
            async with auth_endpoint(local_signer(server)) as auth_url:
                for user in ("anna", "bert"):
                    await node.connect(user, f"{auth_url}?user={user}")
                    for channel in ("news", "private-desk", "presence-room"):
                        seen.append(await node.subscribe(user, channel, "said", "client-said"))
                seen.append(await node.seen(client="anna", event="pusher:member_added"))
                await trigger(server, node, "news", "said")
                seen += [await node.seen(client=user, event="said") for user in ("anna", "bert")]
                await node.call("trigger", client="anna", channel="private-desk", event="client-said", data={"n": 2})
                seen.append(await node.seen(client="bert", event="client-said"))
        with credentials(server, "small", "small-key", "small-secret"):
            async with auth_endpoint(local_signer(server)) as auth_url:
                for user in ("cora", "dirk"):
                    await node.connect(user, f"{auth_url}?user={user}")
                seen.append(await node.subscribe("cora", "presence-room"))
                await node.call("subscribe", client="dirk", channel="presence-room", events=[])
                seen.append(await node.seen(client="dirk", event="pusher:subscription_error"))
                await node.call("connect", client="eva", key="small-key", options=node.options(auth_url))
                seen.append(await node.seen(client="eva", error_code=4004))
                seen += [await refused(server, node, key, size) for key, size in (("small-key", 1_025), ("app-key", 1))]
    return seen


async def refused(server: Server, node: Node, key: str, size: int) -> str:
    """The error of Pusher's library for Node at a publish that the app doesn't allow."""
    options = {"appId": "small", "key": key, "secret": "small-secret", "useTLS": False}
    await node.call("server", client=key, options=options | {"host": "127.0.0.1", "port": server.port})
    with pytest.raises(NodeError) as error:
        await node.call("server_call", client=key, method="trigger", args=["news", "said", "x" * size])
    return re.sub(r"[0-9a-f]{32,}|auth_timestamp=[0-9]+", "…", str(error.value))


async def test_records_of_soketi_that_were_exported_and_applied_give_the_same_answers(
    server: Server, tmp_path: Path
) -> None:
    (tmp_path / "apps.toml").write_text(await asyncio.to_thread(command, server, "export"))
    with Server(workers=2) as other:
        applied = await asyncio.to_thread(command, other, "apply", str(tmp_path / "apps.toml"), "--json")
        outcomes = {app["id"]: app["outcome"] for app in json.loads(applied)["apps"]}
        assert outcomes == {"app-id": "created", "small": "created", "my_app.2": "created", server.app_id: "unchanged"}
        there = await answers(other)
    here = await answers(server)
    assert here == there
    assert len(here) == 15
    assert "413" in str(here[-2])
    assert "401" in str(here[-1])


# The .env of a new Laravel 12 application after `php artisan install:broadcasting`.
LARAVEL = """APP_NAME=Laravel
APP_ENV=local
APP_KEY=base64:3l1BvPbWqTj0c2mRZ0mO9o0cX4x3m6mJwq8m6gZ3mJ8=
APP_DEBUG=true
APP_URL=http://localhost:8000

APP_LOCALE=en
APP_MAINTENANCE_DRIVER=file
# PHP_CLI_SERVER_WORKERS=4

LOG_CHANNEL=stack
LOG_DEPRECATIONS_CHANNEL=null

DB_CONNECTION=sqlite
# DB_HOST=127.0.0.1

SESSION_DRIVER=database
SESSION_DOMAIN=null

BROADCAST_CONNECTION=reverb
FILESYSTEM_DISK=local
QUEUE_CONNECTION=database

CACHE_STORE=database
# CACHE_PREFIX=

REDIS_CLIENT=phpredis
REDIS_HOST=127.0.0.1
REDIS_PASSWORD=null
REDIS_PORT=6379

MAIL_FROM_ADDRESS="hello@example.com"
MAIL_FROM_NAME="${APP_NAME}"

VITE_APP_NAME="${APP_NAME}"

REVERB_APP_ID=845120
REVERB_APP_KEY=qdyv3x8h1nbmz5ke0tka
REVERB_APP_SECRET=wq6zrd1tyb0cm9xl4ukp
REVERB_HOST="localhost"
REVERB_PORT=8080
REVERB_SCHEME=http

VITE_REVERB_APP_KEY="${REVERB_APP_KEY}"
VITE_REVERB_HOST="${REVERB_HOST}"
VITE_REVERB_PORT="${REVERB_PORT}"
VITE_REVERB_SCHEME="${REVERB_SCHEME}"
"""
# The request of Laravel's PusherBroadcaster and pusher-php-server 7 for an event, configured as by
# config/broadcasting.php.
BROADCASTS = r"""
[, $file, $channel, $event, $payload] = $argv;
$env = parse_ini_file($file, false, INI_SCANNER_RAW);
$body = json_encode(["name" => $event, "data" => $payload, "channels" => [$channel]]);
$path = "/apps/{$env['REVERB_APP_ID']}/events";
$query = ["auth_key" => $env["REVERB_APP_KEY"], "auth_timestamp" => time(), "auth_version" => "1.0"];
$query["body_md5"] = md5($body);
ksort($query);
$pairs = implode("&", array_map(fn ($name, $value) => "$name=$value", array_keys($query), $query));
$query["auth_signature"] = hash_hmac("sha256", "POST\n$path\n$pairs", $env["REVERB_APP_SECRET"]);
$url = "{$env['REVERB_SCHEME']}://{$env['REVERB_HOST']}:{$env['REVERB_PORT']}$path?" . http_build_query($query);
$headers = "Content-Type: application/json\r\nX-Pusher-Library: pusher-http-php 7.2.7\r\n";
$request = ["method" => "POST", "header" => $headers, "content" => $body, "ignore_errors" => true];
echo file_get_contents($url, false, stream_context_create(["http" => $request]));
"""


@pytest.mark.skipif(shutil.which("php") is None, reason="PHP isn't installed")
async def test_a_new_laravel_application_with_only_host_and_port_changed(
    server: Server, node: Node, tmp_path: Path
) -> None:
    file = tmp_path / ".env"
    file.write_text(LARAVEL)
    outcome = await asyncio.to_thread(imported, server, "reverb", file)
    assert [(app["id"], app["outcome"]) for app in outcome["apps"]] == [("845120", "created")]
    moved = LARAVEL.replace('REVERB_HOST="localhost"', 'REVERB_HOST="127.0.0.1"')
    moved = moved.replace("REVERB_PORT=8080", f"REVERB_PORT={server.port}")
    file.write_text(moved)
    with credentials(server, "845120", "qdyv3x8h1nbmz5ke0tka", "wq6zrd1tyb0cm9xl4ukp"):
        async with auth_endpoint(local_signer(server)) as auth_url:
            # What resources/js/echo.js takes from the VITE_ variables.
            options = {
                "broadcaster": "reverb",
                "key": server.app_key,
                "wsHost": "127.0.0.1",
                "wsPort": server.port,
                "wssPort": server.port,
                "forceTLS": False,
                "enabledTransports": ["ws", "wss"],
                "authEndpoint": auth_url,
            }
            await node.call("echo", client="laravel", options=options)
            await node.call(
                "echo_listen", client="laravel", channel="orders.1", kind="private", events=["OrderShipped"]
            )
            await node.seen(client="laravel", event="subscribed")
            command = [
                "php",
                "-r",
                BROADCASTS,
                "--",
                str(file),
                "private-orders.1",
                "App\\Events\\OrderShipped",
                '{"id":1}',
            ]
            done = await asyncio.to_thread(
                subprocess.run, command, capture_output=True, text=True, timeout=60, check=True
            )
            assert done.stdout == "{}", done
            assert (await node.seen(client="laravel", event="OrderShipped"))["data"] == {"id": 1}


def move(host: Proxy, server: Server) -> None:
    """Points the host name to redpoll, and ends the old server's connections."""
    host.upstream = ("127.0.0.1", server.port)
    host.cut()
