"""Publishing as back ends do it: PHP with a connection each, curl, and keep-alive through real nginx and HAProxy."""

import asyncio
import json
import os
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pusher
import pytest

from clients.node import Node
from helpers.server import Server
from helpers.wire import Api, Socket, eventually, signed_path

PROXY = "127.0.0.1"
# An address of this machine that isn't a trusted proxy.
CLIENT = "127.0.0.2"


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server(workers=2, trusted_proxies=PROXY) as running:
        yield running


def event(channel: str, number: int) -> bytes:
    return json.dumps({"name": "n", "channels": [channel], "data": str(number)}).encode()


async def exchange(port: int, request: bytes, client: str = "127.0.0.1") -> bytes:
    """Sends a request on a connection of its own; everything until the server closes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, local_addr=(client, 0))
    try:
        writer.write(request)
        async with asyncio.timeout(60):
            return await reader.read(-1)
    finally:
        writer.close()


async def numbers_seen(listener: Socket, count: int) -> list[int]:
    await listener.until(lambda: len(listener.all("n")) >= count, what=f"{count} events")
    await listener.settle()
    return sorted(int(one["data"]) for one in listener.all("n"))


# -- PHP

# What the PHP library sends by Guzzle and curl, by PHP's own streams, and what other short-lived clients send.
SHAPES = {
    "guzzle": ("1.1", "User-Agent: GuzzleHttp/7\r\nX-Pusher-Library: pusher-http-php 7.2.4\r\nConnection: close\r\n"),
    "streams": ("1.0", "Connection: close\r\n"),
    "http 1.0": ("1.0", ""),
    "lower case": ("1.1", "connection: CLOSE\r\naccept: */*\r\n"),
}


@pytest.mark.parametrize("shape", SHAPES)
async def test_a_connection_for_each_publish_as_php_makes_them(server: Server, shape: str) -> None:
    version, headers = SHAPES[shape]
    channel = f"php-{shape.replace(' ', '-').replace('.', '')}"
    listener = await Socket.connect(server)
    await listener.subscribe(channel)
    turns = asyncio.Semaphore(16)

    async def publish(number: int) -> None:
        body = event(channel, number)
        target = signed_path(server, "POST", f"/apps/{server.app_id}/events", body)
        request = (
            f"POST {target} HTTP/{version}\r\nHost: 127.0.0.1:{server.port}\r\n{headers}"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        async with turns:
            answer = await exchange(server.port, request.encode() + body)
        head, _, content = answer.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200 "), answer
        assert content == b"{}"

    await asyncio.gather(*(publish(number) for number in range(200)))
    assert await numbers_seen(listener, 200) == list(range(200))
    await listener.close()


@pytest.mark.skipif(shutil.which("php") is None, reason="PHP isn't installed; the shapes above are its requests")
async def test_php_itself(server: Server) -> None:
    listener = await Socket.connect(server)
    await listener.subscribe("php")
    body = event("php", 7)
    url = f"http://127.0.0.1:{server.port}" + signed_path(server, "POST", f"/apps/{server.app_id}/events", body)
    script = (
        "echo file_get_contents($argv[1], false, stream_context_create(['http' => ['method' => 'POST', "
        "'header' => 'Content-Type: application/json', 'content' => $argv[2]]]));"
    )
    run = await asyncio.to_thread(
        subprocess.run, ["php", "-r", script, "--", url, body.decode()], capture_output=True, timeout=60, check=True
    )
    assert run.stdout == b"{}", run
    assert await numbers_seen(listener, 1) == [7]
    await listener.close()


# -- curl


async def curl(*arguments: str) -> str:
    run = await asyncio.to_thread(
        subprocess.run, ["curl", "-sS", "--max-time", "60", *arguments], capture_output=True, text=True, timeout=60
    )
    assert run.returncode == 0, run
    return run.stdout


async def test_curl(server: Server, tmp_path: Path) -> None:
    listener = await Socket.connect(server)
    await listener.subscribe("curl")
    base = f"http://127.0.0.1:{server.port}"
    ways = [[], ["--http1.0"], ["--http2"], ["-H", "Expect: 100-continue"], ["-H", "Transfer-Encoding: chunked"]]
    for number, way in enumerate(ways):
        body = event("curl", number)
        url = base + signed_path(server, "POST", f"/apps/{server.app_id}/events", body)
        shown = await curl(*way, "-d", body.decode(), "-w", " %{http_code}", url)
        assert shown == "{} 200", way
    assert await numbers_seen(listener, len(ways)) == list(range(len(ways)))
    # A batch of 600 kB from a file, for which curl asks by Expect; and two requests of one command share a connection.
    batch = {"batch": [{"name": "n", "channel": "curl-large", "data": "\x01" * 10_000}] * 10}
    file = tmp_path / "batch.json"
    file.write_text(json.dumps(batch))
    url = base + signed_path(server, "POST", f"/apps/{server.app_id}/batch_events", file.read_bytes())
    assert await curl("-H", "Expect: 100-continue", "--data-binary", f"@{file}", url) == "{}"
    shown = await curl(
        "-o", os.devnull, "-o", os.devnull, "-w", "%{http_code} %{num_connects}\n", *[base + "/healthz"] * 2
    )
    assert shown == "200 1\n200 0\n"
    head = await curl("-I", base + "/healthz")
    assert head.startswith("HTTP/1.1 200 OK")
    await listener.close()


# -- proxies


def program(name: str) -> str | None:
    return shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin:/usr/local/sbin")


def nginx(server: Server, folder: Path, listener: socket.socket) -> tuple[list[str], dict[str, str]]:
    """Inherits the socket, as from a predecessor that it replaces: nginx can't tell which free port it got."""
    port = listener.getsockname()[1]
    temporary = "\n".join(
        f"{kind}_temp_path {folder}/{kind};" for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    config = folder / "nginx.conf"
    # Otherwise its worker, started by root, becomes a user who may not read the folder.
    user = "" if os.geteuid() else "user root;"
    config.write_text(f"""
daemon off; worker_processes 1; {user} pid {folder}/pid; error_log {folder}/log;
events {{ worker_connections 256; }}
http {{
    access_log off; {temporary}
    map $http_upgrade $connection_upgrade {{ default upgrade; '' ''; }}
    upstream redpoll {{ server 127.0.0.1:{server.port}; keepalive 4; }}
    server {{
        listen 127.0.0.1:{port};
        location / {{
            proxy_pass http://redpoll;
            proxy_http_version 1.1;
            proxy_set_header Host $host;
            proxy_set_header Upgrade $http_upgrade;
            proxy_set_header Connection $connection_upgrade;
            proxy_set_header X-Forwarded-For $proxy_add_x_forwarded_for;
        }}
    }}
}}
""")
    return [str(program("nginx")), "-e", f"{folder}/log", "-c", str(config)], {"NGINX": f"{listener.fileno()};"}


def haproxy(server: Server, folder: Path, listener: socket.socket) -> tuple[list[str], dict[str, str]]:
    config = folder / "haproxy.cfg"
    config.write_text(f"""
global
    maxconn 100
    nbthread 1
defaults
    mode http
    timeout connect 10s
    timeout client 60s
    timeout server 60s
    timeout tunnel 1h
    option forwardfor
    http-reuse always
frontend public
    bind fd@{listener.fileno()}
    default_backend redpoll
backend redpoll
    server one 127.0.0.1:{server.port}
""")
    return [str(program("haproxy")), "-db", "-f", str(config)], {}


@pytest.fixture(params=[nginx, haproxy], ids=lambda proxy: proxy.__name__, scope="module")
def proxy(request: pytest.FixtureRequest, server: Server) -> Iterator[int]:
    """The port of a proxy in front of the server."""
    make: Callable[[Server, Path, socket.socket], tuple[list[str], dict[str, str]]] = request.param
    if program(make.__name__) is None:
        pytest.skip(f"{make.__name__} isn't installed")
    with tempfile.TemporaryDirectory(prefix="rp") as name, socket.create_server((PROXY, 0)) as listener:
        folder = Path(name)
        command, environment = make(server, folder, listener)
        with (folder / "output").open("wb") as output:
            process = subprocess.Popen(
                command,
                env={**os.environ, **environment},
                pass_fds=[listener.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        try:
            yield listener.getsockname()[1]
            assert process.poll() is None, (process.returncode, (folder / "output").read_text())
        finally:
            process.terminate()
            process.wait(60)


async def keep_alive(port: int, requests: list[bytes], client: str) -> list[bytes]:
    """Answers to requests on one connection, one after another."""
    reader, writer = await asyncio.open_connection(PROXY, port, local_addr=(client, 0))
    answers = []
    async with asyncio.timeout(60):
        for request in requests:
            writer.write(request)
            head = await reader.readuntil(b"\r\n\r\n")
            fields = head.lower().split(b"\r\n")
            (length,) = [int(line.partition(b":")[2]) for line in fields if line.startswith(b"content-length:")]
            answers.append(head.split(b"\r\n")[0] + b" " + await reader.readexactly(length))
    writer.close()
    return answers


async def test_keep_alive_through_a_proxy(server: Server, proxy: int) -> None:
    """Clients and the proxy keep their connections: 400 publishes take few connections to redpoll."""
    listener = await Socket.connect(server)
    channel = f"proxied-{proxy}"
    await listener.subscribe(channel)
    before = sum(map(len, server.client_ports().values()))

    def publish(number: int) -> bytes:
        body = event(channel, number)
        target = signed_path(server, "POST", f"/apps/{server.app_id}/events", body)
        return f"POST {target} HTTP/1.1\r\nHost: h\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body

    all_answers = await asyncio.gather(
        *(keep_alive(proxy, [publish(50 * client + at) for at in range(50)], CLIENT) for client in range(8))
    )
    assert {answer for answers in all_answers for answer in answers} == {b"HTTP/1.1 200 OK {}"}
    # At once: HAProxy closes unused ones after 5 s.
    opened = sum(map(len, server.client_ports().values())) - before
    assert await numbers_seen(listener, 400) == list(range(400))
    assert 0 < opened <= 8
    async with Api(server) as api:

        async def callers() -> set[str]:
            rows = (await api.get("/events/log", channel=channel))["events"]
            return {row["caller"].rpartition(" ")[2] for row in rows}

        await eventually(callers, {CLIENT})
    await listener.close()


async def test_a_websocket_and_libraries_through_a_proxy(server: Server, proxy: int) -> None:
    class Proxied:
        port = proxy
        app_id, app_key, app_secret = server.app_id, server.app_key, server.app_secret

    page = await Socket.connect(Proxied())
    channel = f"page-{proxy}"
    await page.subscribe(channel)
    library = pusher.Pusher(
        server.app_id, server.app_key, server.app_secret, host=PROXY, port=proxy, ssl=False, timeout=60
    )
    for number in range(20):
        assert await asyncio.to_thread(library.trigger, channel, "n", str(number)) == {}
    assert await numbers_seen(page, 20) == list(range(20))
    async with Node(server) as node:
        options = {"appId": server.app_id, "key": server.app_key, "secret": server.app_secret}
        options |= {"host": PROXY, "port": str(proxy), "useTLS": False}
        await node.call("server", client="backend", options=options)
        for number in range(20, 40):
            call = {"client": "backend", "method": "trigger", "args": [channel, "n", str(number)]}
            assert (await node.call("server_call", **call))["status"] == 200
    assert await numbers_seen(page, 40) == list(range(40))
    await page.close()
