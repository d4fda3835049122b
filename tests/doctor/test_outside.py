"""`redpoll doctor URL` names the right cause: against a good server, and through proxies broken in known ways."""

import asyncio
import functools
import re
import ssl
import time

import aiohttp
import pytest

from helpers.broken_proxy import BrokenProxy
from helpers.certs import authority, issued
from helpers.ports import reserved_ports
from helpers.reading import keep
from helpers.server import Server
from helpers.walk import command
from helpers.wire import Socket, eventually
from redpoll.doctor import outside
from redpoll.doctor.idle import examine_idle
from redpoll.doctor.report import Finding, Verdict, as_text, worst
from redpoll.doctor.target import Target, parse


@pytest.fixture(scope="module")
def server():
    # The doctor waits 12 s for an answer to TLS on the plain port, which comes after this time; by default 10 s.
    with Server(workers=1, head_timeout_s=5, public_url="https://ws.example.com") as running:
        keep(running, "doctor-")
        yield running


def address(server, port: int | None = None, secret: bool = True) -> Target:
    host = f"127.0.0.1:{port or server.port}"
    if not secret:
        return parse(f"ws://{host}/app/{server.app_key}")
    return parse(f"http://{server.app_key}:{server.app_secret}@{host}/apps/{server.app_id}")


async def examine(target: Target, patience_s: float = 0) -> dict[str, Finding]:
    async with asyncio.timeout(60):
        return {finding.check: finding async for finding in outside.examine(target, patience_s)}


def failure(findings: dict[str, Finding]) -> Finding:
    failures = [finding for finding in findings.values() if finding.verdict is Verdict.FAILED]
    assert len(failures) == 1, findings
    return failures[0]


async def test_a_good_server_passes_every_check(server, monkeypatch):
    # A busy machine is no proxy that collects answers.
    monkeypatch.setattr(outside, "examine_stream", functools.partial(outside.examine_stream, wait_s=60))
    monkeypatch.setattr(outside, "examine_pulls", functools.partial(outside.examine_pulls, begin_s=60))
    findings = await examine(address(server), patience_s=0.2)
    assert list(findings) == [
        "DNS", "TCP", "HTTP", "Clock", "Ready", "Fallback", "Upgrade", "Connect", "Subscribe", "Publish", "Receive",
        "Stream", "Idle", "Pull",
    ]  # fmt: skip
    assert worst(list(findings.values())) is Verdict.OK


async def test_without_a_secret_publishing_is_skipped(server):
    findings = await examine(address(server, secret=False))
    assert findings["Publish"].verdict is Verdict.SKIPPED
    assert findings["Subscribe"].verdict is Verdict.OK


@pytest.fixture
async def only_shop(server):
    """Only pages of one shop may connect, and the server's own address."""

    async def answer(origin: str) -> int | None:
        socket = await Socket.connect(server, extra=f"Origin: {origin}\r\n", established=False)
        await socket.until(lambda: socket.frames, what="a first frame")
        if socket.frames[0]["event"] == "pusher:error":
            return await socket.until_closed()
        await socket.close()
        return None

    command(server, "app", "set", server.app_id, "allowed_origins=shop.example")
    await eventually(lambda: answer("https://other.example"), 4009)
    yield answer
    command(server, "app", "set", server.app_id, "allowed_origins=")
    await eventually(lambda: answer("https://other.example"), None)


async def test_a_server_that_allows_some_pages_only_passes(server, only_shop):
    findings = await examine(address(server))
    assert findings["Connect"].verdict is Verdict.OK
    assert findings["Fallback"].verdict is Verdict.OK
    assert "Receive" in findings


async def test_clients_that_send_the_servers_own_address_may_connect(server, only_shop):
    assert await only_shop("https://ws.example.com") is None
    assert await only_shop("https://shop.example") is None
    assert await only_shop(f"http://127.0.0.1:{server.port}") == 4009


async def test_the_fallback_takes_the_servers_own_address_as_origin(server, only_shop):
    url = f"http://127.0.0.1:{server.port}/pusher/app/{server.app_key}/1/abcdefgh/xhr"
    async with aiohttp.ClientSession() as session:

        async def first(origin: str, name: str) -> str:
            headers = {"Origin": origin, "Content-Type": "application/json"}
            async with session.post(url.replace("abcdefgh", name), headers=headers) as response:
                return await response.text()

        assert "connection_established" in await first("https://ws.example.com", "abcdefg1")
        assert "4009" in await first("https://other.example", "abcdefg2")
        headers = {"Origin": "https://ws.example.com", "Access-Control-Request-Method": "POST"}
        async with session.options(url.replace("/xhr", "/xhr_send"), headers=headers) as response:
            assert (response.status, response.headers["Access-Control-Allow-Origin"]) == (204, headers["Origin"])


async def test_a_proxy_that_drops_upgrade_is_named(server):
    async with BrokenProxy(server.port, drops_upgrade=True) as proxy:
        finding = failure(await examine(address(server, proxy.port)))
    assert finding.check == "Upgrade"
    assert "drops the Upgrade header" in finding.cause
    assert any("proxy_set_header Upgrade" in line for line in finding.remedy)


async def test_a_proxy_with_an_idle_timeout_is_named_with_its_time(server):
    # Long enough that a slow machine makes no such pause in the other steps.
    async with BrokenProxy(server.port, idle_s=12.0) as proxy:
        finding = failure(await examine(address(server, proxy.port), patience_s=40))
    assert finding.check == "Idle"
    seen = re.search(r"idle for (\d+) s", finding.cause)
    assert seen is not None
    assert int(seen[1]) >= 1
    assert any("proxy_read_timeout" in line for line in finding.remedy)


@pytest.mark.parametrize(
    ("change", "back", "verdict", "text"),
    [
        ("user_authentication_timeout_s=0.5", "user_authentication_timeout_s=0", Verdict.SKIPPED, "wants a sign-in"),
        ("enabled=false", "enabled=true", Verdict.FAILED, "enabled=true"),
    ],
)
async def test_why_the_server_closes_a_quiet_connection_is_said(server, change, back, verdict, text):
    url = f"http://127.0.0.1:{server.port}/app/{server.app_key}?protocol=7"
    async with aiohttp.ClientSession() as session, session.ws_connect(url) as websocket:
        assert (await websocket.receive_json())["event"] == "pusher:connection_established"
        command(server, "app", "set", server.app_id, change)
        finding = await examine_idle(websocket, 60, "")
        command(server, "app", "set", server.app_id, back)
    assert finding.verdict is verdict
    assert text in as_text(finding)


@pytest.mark.parametrize(
    ("hosts", "days", "cause"),
    [(["127.0.0.1"], -1, "renewed"), (["example.com"], 2, "issued for other names than 127.0.0.1")],
)
async def test_a_bad_certificate_is_distinguished_from_a_wrong_name(server, tmp_path, monkeypatch, hosts, days, cause):
    ca = authority(tmp_path)
    cert, key = issued(tmp_path, ca, hosts=hosts, days=days)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert, key)
    monkeypatch.setenv("SSL_CERT_FILE", str(ca[0]))
    async with BrokenProxy(server.port, tls=context) as proxy:
        target = address(server, proxy.port)._replace(secure=True)
        finding = failure(await examine(target))
    assert finding.check == "TLS"
    assert cause in finding.cause


async def test_a_certificate_of_an_unknown_authority_is_named(server, tmp_path):
    cert, key = issued(tmp_path, authority(tmp_path))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert, key)
    async with BrokenProxy(server.port, tls=context) as proxy:
        finding = failure(await examine(address(server, proxy.port)._replace(secure=True)))
    assert finding.check == "TLS"
    assert "intermediate" in finding.cause


async def test_tls_on_the_plain_port_is_named(server):
    finding = failure(await examine(address(server)._replace(secure=True)))
    assert finding.check == "TLS"
    assert "plain HTTP" in finding.cause


async def test_a_closed_port_is_named(server):
    with reserved_ports(1) as (port,):
        finding = failure(await examine(address(server, port)))
    assert finding.check == "TCP"
    assert "nothing listens" in finding.cause


async def test_a_wrong_key_is_named(server):
    finding = failure(await examine(address(server)._replace(key="nosuchkey")))
    assert finding.check == "Connect"
    assert "4001" in finding.seen
    assert "no app has this key" in finding.cause


async def test_a_wrong_secret_is_named(server):
    finding = failure(await examine(address(server)._replace(secret="wrong")))
    assert finding.check == "Publish"
    assert "the secret is wrong" in finding.cause


async def test_a_clock_an_hour_off_is_named(server, monkeypatch):
    now = time.time
    monkeypatch.setattr("redpoll.doctor.outside.time.time", lambda: now() + 3600)
    findings = await examine(address(server))
    assert findings["Clock"].verdict is Verdict.FAILED
    assert "behind this machine's" in findings["Clock"].seen
    assert findings["Publish"].verdict is Verdict.FAILED
    assert "a clock is wrong" in findings["Publish"].cause


async def test_a_name_that_does_not_exist_is_named():
    finding = failure(await examine(Target("no-such-host.invalid", 6001, False, "key")))
    assert finding.check == "DNS"
