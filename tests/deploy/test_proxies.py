"""Real proxies in front of redpoll, with the files of deploy/proxies: WebSocket, API, the client's address and scheme.

Only ports, paths of certificates and what keeps a proxy in the test's folder are replaced in the files.
"""

import asyncio
import csv
import functools
import json
import os
import re
import shutil
import socket
import ssl
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import pytest
import websockets
from click.testing import CliRunner

from helpers.certs import authority, issued
from helpers.fallback_wire import FallbackSocket
from helpers.ports import reserved_ports
from helpers.reading import keep
from helpers.server import Server
from helpers.wire import channel_auth, eventually, signed_path
from redpoll.cli import main
from redpoll.doctor import outside
from redpoll.doctor.report import Finding, Verdict
from redpoll.doctor.streams import examine_stream
from redpoll.doctor.target import Target, parse

FILES = Path(__file__).parents[2] / "deploy" / "proxies"
# The name in the files, and the one in the tests.
NAME, HOST = "ws.example.com", "localhost"
RATE = 5


class Running(NamedTuple):
    """A proxy in front of a server. `name` is what the doctor calls it, "" if it doesn't show itself. `clients` are
    addresses of this machine that only this proxy's clients have, and that aren't trusted proxies."""

    server: Server
    port: int
    trust: ssl.SSLContext
    name: str
    ca: Path
    clients: list[str]

    async def websocket(self, client: str) -> tuple[Any, str]:
        """A WebSocket from this address, and its socket id."""
        url = f"wss://{HOST}:{self.port}/app/{self.server.app_key}?protocol=7&client=test&version=1"
        raw = socket.create_connection(("127.0.0.1", self.port), source_address=(client, 0))
        connection = await websockets.connect(url, sock=raw, ssl=self.trust, proxy=None, open_timeout=60)
        return connection, json.loads((await next_frame(connection))["data"])["socket_id"]

    async def request(self, client: str, method: str, path: str, body: bytes = b"", **params: str) -> tuple[int, bytes]:
        """The status and the body of the answer to a signed request from this address."""
        target = signed_path(self.server, method, f"/apps/{self.server.app_id}{path}", body, params)
        reader, writer = await asyncio.open_connection(
            "127.0.0.1", self.port, ssl=self.trust, server_hostname=HOST, local_addr=(client, 0)
        )
        writer.write(
            f"{method} {target} HTTP/1.1\r\nHost: {HOST}\r\nContent-Type: application/json\r\nConnection: close\r\n"
            f"Content-Length: {len(body)}\r\n\r\n".encode()
            + body
        )
        async with asyncio.timeout(60):
            answer = await reader.read(-1)
        writer.close()
        head, _, content = answer.partition(b"\r\n\r\n")
        return int(head.split(b" ")[1]), content

    async def publish(self, client: str, channel: str) -> int:
        body = json.dumps({"name": "greeting", "channels": [channel], "data": "hello"}).encode()
        return (await self.request(client, "POST", "/events", body))[0]


async def next_frame(connection: Any) -> dict[str, Any]:
    frame: dict[str, Any] = json.loads(await asyncio.wait_for(connection.recv(), 60))
    return frame


def program(name: str) -> str | None:
    return shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin:/usr/local/sbin")


def filled(name: str, **values: object) -> str:
    """The text of a file of deploy/proxies. `values`: what is replaced, each of which the file must have."""
    text = (FILES / name).read_text()
    for old, new in values.items():
        assert old in text, (name, old)
        text = text.replace(old, str(new))
    return text.replace(NAME, HOST)


def nginx(folder: Path, port: int, upstream: int, cert: Path, key: Path) -> tuple[list[str], list[str], str]:
    paths = "\n".join(
        f"{kind}_temp_path {folder}/{kind};" for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    part = filled(
        "nginx.conf",
        **{
            "listen 443": f"listen 127.0.0.1:{port}",
            "127.0.0.1:6001": f"127.0.0.1:{upstream}",
            f"/etc/letsencrypt/live/{NAME}/fullchain.pem": cert,
            f"/etc/letsencrypt/live/{NAME}/privkey.pem": key,
        },
    )
    # Otherwise its worker, started by root, becomes a user who may not read the folder.
    user = "" if os.geteuid() else "user root;"
    config = folder / "nginx.conf"
    config.write_text(
        f"daemon off; worker_processes 1; {user} pid {folder}/pid; error_log {folder}/log;\n"
        f"events {{ worker_connections 256; }}\nhttp {{ access_log off; {paths}\n{part}\n}}\n"
    )
    command = [str(program("nginx")), "-e", f"{folder}/log", "-c", str(config)]
    return [*command, "-t"], command, "nginx"


def haproxy(folder: Path, port: int, upstream: int, cert: Path, key: Path) -> tuple[list[str], list[str], str]:
    return _haproxy("haproxy.cfg", folder, port, upstream, cert, key)


def haproxy_tcp(folder: Path, port: int, upstream: int, cert: Path, key: Path) -> tuple[list[str], list[str], str]:
    return _haproxy("haproxy-tcp.cfg", folder, port, upstream, cert, key)


def _haproxy(
    name: str, folder: Path, port: int, upstream: int, cert: Path, key: Path
) -> tuple[list[str], list[str], str]:
    both = folder / "both.pem"
    both.write_text(cert.read_text() + key.read_text())
    config = folder / "haproxy.cfg"
    config.write_text(
        filled(
            name,
            **{
                "bind :443": f"bind 127.0.0.1:{port}",
                f"/etc/haproxy/{NAME}.pem": both,
                "127.0.0.1:6001": f"127.0.0.1:{upstream}",
                "maxconn 100000": f"maxconn 100\n    stats socket {folder}/stats",
            },
        )
    )
    command = [str(program("haproxy")), "-db", "-f", str(config)]
    return [*command, "-c"], command, ""


def caddy(folder: Path, port: int, upstream: int, cert: Path, key: Path) -> tuple[list[str], list[str], str]:
    config = folder / "Caddyfile"
    config.write_text(
        # No administration port, and nothing on port 80.
        "{\n\tadmin off\n\tauto_https disable_redirects\n}\n"
        + filled(
            "Caddyfile",
            **{
                f"{NAME} {{": f"{NAME}:{port} {{\n\tbind 127.0.0.1",
                f"/etc/caddy/{NAME}.crt": cert,
                f"/etc/caddy/{NAME}.key": key,
                "127.0.0.1:6001": f"127.0.0.1:{upstream}",
            },
        )
    )
    command = [str(program("caddy"))]
    options = ["--config", str(config), "--adapter", "caddyfile"]
    return [*command, "validate", *options], [*command, "run", *options], "Caddy"


def apache(folder: Path, port: int, upstream: int, cert: Path, key: Path) -> tuple[list[str], list[str], str]:
    modules = Path("/usr/lib/apache2/modules")
    names = ("mpm_event", "authz_core", "headers", "socache_shmcb", "ssl", "proxy", "proxy_http", "proxy_wstunnel")
    loads = "\n".join(f"LoadModule {name}_module {modules}/mod_{name}.so" for name in names)
    part = filled(
        "apache.conf",
        **{
            "*:443": f"127.0.0.1:{port}",
            f"/etc/letsencrypt/live/{NAME}/fullchain.pem": cert,
            f"/etc/letsencrypt/live/{NAME}/privkey.pem": key,
            "127.0.0.1:6001": f"127.0.0.1:{upstream}",
        },
    )
    config = folder / "apache.conf"
    config.write_text(
        f"{loads}\nServerRoot {folder}\nDefaultRuntimeDir {folder}\nPidFile {folder}/pid\nErrorLog {folder}/log\n"
        f"ServerName {HOST}\nListen 127.0.0.1:{port}\n{part}"
    )
    command = [str(program("apache2")), "-D", "FOREGROUND", "-f", str(config)]
    return [*command, "-t"], command, "Apache"


def traefik(folder: Path, port: int, upstream: int, cert: Path, key: Path) -> tuple[list[str], list[str], str]:
    config = folder / "traefik-dynamic.yml"
    certificates = f"tls:\n  certificates:\n    - certFile: {cert}\n      keyFile: {key}\n\nhttp:"
    issuer = "tls:\n        certResolver: letsencrypt"
    config.write_text(
        filled(
            "traefik-dynamic.yml",
            **{"http:\n": f"{certificates}\n", issuer: "tls: {}", "127.0.0.1:6001": f"127.0.0.1:{upstream}"},
        )
    )
    command = [str(program("traefik"))]
    options = [f"--entryPoints.websecure.address=127.0.0.1:{port}", f"--providers.file.filename={config}"]
    return [*command, "version"], [*command, *options], ""


Make = Callable[[Path, int, int, Path, Path], tuple[list[str], list[str], str]]
PROGRAMS: dict[Make, str] = {
    nginx: "nginx",
    haproxy: "haproxy",
    haproxy_tcp: "haproxy",
    caddy: "caddy",
    apache: "apache2",
    # Not in Debian: skipped in CI.
    traefik: "traefik",
}


@pytest.fixture(scope="module")
def servers() -> Iterator[dict[bool, Server]]:
    """By whether the proxy speaks the PROXY protocol."""
    common: dict[str, Any] = {"workers": 1, "trusted_proxies": "127.0.0.1", "trigger_rate_per_minute": RATE}
    with Server(**common) as plain, Server(**common, proxy_protocol=True) as introduced:
        for server in (plain, introduced):
            run(server, "app", "set", server.app_id, "tls_required=true")
            # The doctor reads its channel over HTTP.
            keep(server, "doctor-")
            # And it asks for webhooks, whose requests wait.
            run(server, "webhook", "create", server.app_id, "--pull")
        yield {False: plain, True: introduced}


@pytest.fixture(params=PROGRAMS, ids=lambda make: make.__name__, scope="module")
def proxy(request: pytest.FixtureRequest, servers: dict[bool, Server]) -> Iterator[Running]:
    with running(request.param, servers) as proxy:
        yield proxy


@contextmanager
def running(make: Make, servers: dict[bool, Server], *, without: str = "", instead: str = "") -> Iterator[Running]:
    """A proxy with its file, in which `instead` replaces what matches `without`."""
    if program(PROGRAMS[make]) is None:
        pytest.skip(f"{PROGRAMS[make]} isn't installed")
    server = servers[make is haproxy_tcp]
    # These programs can't be given an open socket in the same way.
    with tempfile.TemporaryDirectory(prefix="rp") as name, reserved_ports(1) as (port,):
        folder = Path(name)
        ca = authority(folder)
        cert, key = issued(folder, ca, hosts=[HOST], days=90)
        check, command, shown = make(folder, port, server.port, cert, key)
        environment = {**os.environ, "HOME": name, "XDG_DATA_HOME": name, "XDG_CONFIG_HOME": name}
        if without:
            (config,) = {Path(word) for word in command if word.startswith(name)} - {folder / "log"}
            changed, count = re.subn(without, instead, config.read_text())
            assert count
            config.write_text(changed)
        checked = subprocess.run(check, capture_output=True, text=True, env=environment, timeout=60)
        assert checked.returncode == 0, checked.stdout + checked.stderr
        with (folder / "output").open("wb") as output:
            process = subprocess.Popen(
                command, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
            )
        try:
            trust = ssl.create_default_context(cafile=ca[0])
            _wait_serving(port, trust, process)
            at = list(PROGRAMS).index(make)
            clients = [f"127.0.{10 + at}.{number}" for number in range(2, 7)]
            yield Running(server, port, trust, shown, ca[0], clients)
            assert process.poll() is None, (process.returncode, (folder / "output").read_text())
        finally:
            process.terminate()
            process.wait(60)


def _wait_serving(port: int, trust: ssl.SSLContext, process: subprocess.Popen[bytes]) -> None:
    """Waits until the proxy has its certificate: Traefik listens before it has read its file."""
    deadline = time.monotonic() + 60
    while True:
        assert process.poll() is None
        try:
            with socket.create_connection(("127.0.0.1", port)) as raw, trust.wrap_socket(raw, server_hostname=HOST):
                return
        except (ConnectionError, ssl.SSLError):
            assert time.monotonic() < deadline
            time.sleep(0.01)


async def test_websocket_and_api_with_the_clients_address_and_scheme(proxy: Running) -> None:
    server = proxy.server
    client = proxy.clients[0]
    connection, socket_id = await proxy.websocket(client)
    # Names and signatures pass unchanged, also where they are percent-encoded.
    channel = "private-a,b;c=d@e"
    auth = channel_auth(server, socket_id, channel)
    await connection.send(json.dumps({"event": "pusher:subscribe", "data": {"channel": channel, "auth": auth}}))
    assert (await next_frame(connection))["event"] == "pusher_internal:subscription_succeeded"
    assert await proxy.publish(client, channel) == 200
    assert (await next_frame(connection))["event"] == "greeting"
    status, content = await proxy.request(client, "GET", "/channels/private-a%2Cb%3Bc%3Dd%40e")
    assert (status, json.loads(content)["occupied"]) == (200, True)
    shown = json.loads(await asyncio.to_thread(run, server, "connections", "show", server.app_id, socket_id, "--json"))
    assert shown["address"] == client

    async def caller() -> str:
        _, content = await proxy.request(client, "GET", "/events/log", channel=channel)
        rows = json.loads(content)["events"]
        return rows[0]["caller"].rpartition(" ")[2] if rows else ""

    await eventually(caller, client)
    await connection.close()


@pytest.mark.parametrize("kind", ["xhr_streaming", "xhr"])
async def test_pages_without_websockets_get_events_through_the_proxy(proxy: Running, kind: str) -> None:
    """By both transports of pusher-js: no proxy buffers a stream, because it is asked not to."""
    await _use_fallback(proxy, kind, proxy.clients[3 if kind == "xhr" else 4])


async def _use_fallback(proxy: Running, kind: str, client: str) -> None:
    how = {"ssl": proxy.trust, "server_hostname": HOST, "local_addr": (client, 0)}
    session = FallbackSocket([("127.0.0.1", proxy.port)], proxy.server.app_key, kind, headers={"Host": HOST}, **how)
    await session.open()
    try:
        greeting = await next_frame(session)
        socket_id = json.loads(greeting["data"])["socket_id"]
        channel = f"private-by-{kind}"
        auth = channel_auth(proxy.server, socket_id, channel)
        await session.send(json.dumps({"event": "pusher:subscribe", "data": {"channel": channel, "auth": auth}}))
        assert (await next_frame(session))["event"] == "pusher_internal:subscription_succeeded"
        batch = [{"name": "n", "channel": channel, "data": str(number)} for number in range(10)]
        assert (await proxy.request(client, "POST", "/batch_events", json.dumps({"batch": batch}).encode()))[0] == 200
        assert [json.loads((await next_frame(session))["data"]) for _ in range(10)] == list(range(10))
        words = ("connections", "show", proxy.server.app_id, socket_id, "--json")
        assert json.loads(await asyncio.to_thread(run, proxy.server, *words))["address"] == client
    finally:
        await session.close()


async def test_proxy_that_buffers_lets_polls_through(servers: dict[bool, Server]) -> None:
    """A stream comes late or never, so pusher-js polls."""
    ignored = "proxy_set_header Host $host;\n proxy_buffering on;\n proxy_ignore_headers X-Accel-Buffering;"
    with running(nginx, servers, without=r"proxy_set_header Host \$host;", instead=ignored) as proxy:
        await _use_fallback(proxy, "xhr", "127.0.30.1")
    off = "proxy_set_header Host $host;\n proxy_buffering off;\n proxy_ignore_headers X-Accel-Buffering;"
    with running(nginx, servers, without=r"proxy_set_header Host \$host;", instead=off) as proxy:
        await _use_fallback(proxy, "xhr_streaming", "127.0.30.2")


async def test_the_rate_limit_counts_the_clients_address(proxy: Running) -> None:
    _, limited, other, *_ = proxy.clients
    assert [await proxy.publish(limited, "limited") for _ in range(RATE + 1)] == [200] * RATE + [429]
    assert await proxy.publish(other, "limited") == 200


async def test_doctor_finds_nothing_wrong_and_names_the_proxy(proxy: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(proxy.ca))
    server = proxy.server
    target = parse(f"https://{server.app_key}:{server.app_secret}@{HOST}:{proxy.port}/apps/{server.app_id}")
    # A busy machine is no proxy that collects answers.
    monkeypatch.setattr(outside, "examine_stream", functools.partial(outside.examine_stream, wait_s=60))
    monkeypatch.setattr(outside, "examine_pulls", functools.partial(outside.examine_pulls, begin_s=60))
    findings = {finding.check: finding async for finding in outside.examine(target, 1.0)}
    assert "a request waited" in findings["Pull"].seen
    assert {finding.verdict for finding in findings.values()} == {Verdict.OK}, findings
    if proxy.name:
        assert f"through {proxy.name}" in findings["Upgrade"].seen


@pytest.mark.parametrize("make", [haproxy, haproxy_tcp])
async def test_haproxy_asks_whether_the_server_is_ready(servers: dict[bool, Server], make: Make) -> None:
    with running(make, servers) as proxy:
        # Next to the authority's certificate.
        stats = proxy.ca.parent / "stats"

        async def check() -> str:
            reader, writer = await asyncio.open_unix_connection(stats)
            writer.write(b"show stat\n")
            table = csv.DictReader((await reader.read()).decode().removeprefix("# ").splitlines())
            writer.close()
            (row,) = (row for row in table if row["svname"] == "one")
            return f"{row['check_status']} {row['check_code']}"

        await eventually(check, "L7OK 200")


@pytest.mark.parametrize("buffering", ["on", "off"])
async def test_streams_pass_nginx_with_buffering_on_and_off(
    servers: dict[bool, Server], buffering: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    buffers = f"proxy_set_header Host $host;\n proxy_buffering {buffering};"
    with running(nginx, servers, without=r"proxy_set_header Host \$host;", instead=buffers) as proxy:
        assert (await _stream_through(proxy, monkeypatch)).verdict is Verdict.OK


async def test_doctor_names_a_proxy_that_collects_streams(
    servers: dict[bool, Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    ignored = "proxy_set_header Host $host;\n proxy_buffering on;\n proxy_ignore_headers X-Accel-Buffering;"
    with running(nginx, servers, without=r"proxy_set_header Host \$host;", instead=ignored) as proxy:
        found = await _stream_through(proxy, monkeypatch, wait_s=1)
    assert found.verdict is Verdict.FAILED
    assert "collects" in found.cause


async def _stream_through(proxy: Running, monkeypatch: pytest.MonkeyPatch, wait_s: float = 60) -> Finding:
    monkeypatch.setenv("SSL_CERT_FILE", str(proxy.ca))
    server = proxy.server
    target = parse(f"https://{server.app_key}:{server.app_secret}@{HOST}:{proxy.port}/apps/{server.app_id}")
    connector = aiohttp.TCPConnector(ssl=proxy.trust)
    async with aiohttp.ClientSession(connector=connector) as session:
        return await examine_stream(session, target, "doctor-stream", chosen=True, wait_s=wait_s)


@pytest.fixture
def plain_target(monkeypatch: pytest.MonkeyPatch) -> Callable[[Running], Target]:
    def target(proxy: Running) -> Target:
        monkeypatch.setenv("SSL_CERT_FILE", str(proxy.ca))
        return parse(f"wss://{HOST}:{proxy.port}/app/{proxy.server.app_key}")

    return target


@pytest.mark.parametrize(
    ("make", "lines"), [(nginx, "proxy_set_header (Upgrade|Connection).*"), (haproxy, "option forwardfor")]
)
async def test_doctor_names_a_proxy_that_does_not_forward_upgrade(
    servers: dict[bool, Server], plain_target: Callable[[Running], Target], make: Make, lines: str
) -> None:
    dropped = "http-request del-header Upgrade" if make is haproxy else ""
    with running(make, servers, without=lines, instead=dropped) as proxy:
        findings = [finding async for finding in outside.examine(plain_target(proxy), 0)]
    assert findings[-1].check == "Upgrade"
    assert "drops the Upgrade header" in findings[-1].cause
    assert "in nginx:" in findings[-1].remedy
    assert ("in HAProxy:" in findings[-1].remedy) == (make is haproxy), "nginx names itself"


@pytest.mark.parametrize(
    ("make", "lines"), [(nginx, r"proxy_(read|send)_timeout 180s"), (haproxy, r"timeout (tunnel|client|server)  ?180s")]
)
async def test_doctor_names_a_proxy_that_closes_idle_connections_and_after_how_long(
    servers: dict[bool, Server], plain_target: Callable[[Running], Target], make: Make, lines: str
) -> None:
    # Long enough that a slow machine makes no such pause in the other steps.
    setting = r"proxy_\1_timeout 12s" if make is nginx else r"timeout \1 12s"
    with running(make, servers, without=lines, instead=setting) as proxy:
        findings = {finding.check: finding async for finding in outside.examine(plain_target(proxy), 40)}
    assert re.search(r"closes connections that are idle for \d+ s", findings["Idle"].cause)
    assert any("180s" in line for line in findings["Idle"].remedy)


def run(server: Server, *words: str) -> str:
    """The output of a command on this server."""
    result = CliRunner().invoke(main, [*words, "--data-dir", str(server.folder / "data")])
    assert result.exit_code == 0, result.stderr
    return result.stdout
