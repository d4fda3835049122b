"""`redpoll doctor URL` names the right cause: against a good server, and through proxies broken in known ways."""

import asyncio
import contextlib
import ssl
import time

import pytest

from certs import authority, issued
from redpoll.doctor import outside
from redpoll.doctor.report import Finding, Verdict, worst
from redpoll.doctor.target import Target, parse
from server import Server


@pytest.fixture(scope="module")
def server():
    with Server(workers=1) as running:
        yield running


class Proxy:
    """A reverse proxy for one server. It relays bytes and breaks what the test wants broken."""

    def __init__(self, port: int, *, drops_upgrade: bool = False, idle_s: float | None = None, tls=None) -> None:
        self.upstream_port = port
        self.drops_upgrade = drops_upgrade
        self.idle_s = idle_s
        self.tls = tls
        self.port = 0

    async def __aenter__(self):
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0, ssl=self.tls)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *error):
        self._server.close()

    async def _serve(self, reader, writer):
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            if self.drops_upgrade:
                lines = head.split(b"\r\n")
                hop_by_hop = (b"upgrade:", b"connection:")
                head = b"\r\n".join(line for line in lines if not line.lower().startswith(hop_by_hop))
            up_reader, up_writer = await asyncio.open_connection("127.0.0.1", self.upstream_port)
            up_writer.write(head)
            ways = [asyncio.ensure_future(self._pump(*way)) for way in ((reader, up_writer), (up_reader, writer))]
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
            for way in ways:
                way.cancel()
            up_writer.close()
        except (asyncio.IncompleteReadError, OSError):
            pass
        finally:
            writer.close()

    async def _pump(self, reader, writer):
        with contextlib.suppress(OSError, TimeoutError):
            while data := await asyncio.wait_for(reader.read(65_536), self.idle_s):
                writer.write(data)
                await writer.drain()


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


async def test_a_good_server_passes_every_check(server):
    findings = await examine(address(server), patience_s=0.2)
    assert list(findings) == [
        "DNS", "TCP", "HTTP", "Clock", "Upgrade", "Connect", "Subscribe", "Publish", "Receive", "Idle",
    ]  # fmt: skip
    assert worst(list(findings.values())) is Verdict.OK


async def test_without_a_secret_publishing_is_skipped(server):
    findings = await examine(address(server, secret=False))
    assert findings["Publish"].verdict is Verdict.SKIPPED
    assert findings["Subscribe"].verdict is Verdict.OK


async def test_a_proxy_that_drops_upgrade_is_named(server):
    async with Proxy(server.port, drops_upgrade=True) as proxy:
        finding = failure(await examine(address(server, proxy.port)))
    assert finding.check == "Upgrade"
    assert "drops the Upgrade header" in finding.cause
    assert any("proxy_set_header Upgrade" in line for line in finding.remedy)


async def test_a_proxy_with_an_idle_timeout_is_named_with_its_time(server):
    async with Proxy(server.port, idle_s=1.0) as proxy:
        finding = failure(await examine(address(server, proxy.port), patience_s=20))
    assert finding.check == "Idle"
    assert "idle for 1 s" in finding.cause
    assert any("proxy_read_timeout" in line for line in finding.remedy)


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
    async with Proxy(server.port, tls=context) as proxy:
        target = address(server, proxy.port)._replace(secure=True)
        finding = failure(await examine(target))
    assert finding.check == "TLS"
    assert cause in finding.cause


async def test_a_certificate_of_an_unknown_authority_is_named(server, tmp_path):
    cert, key = issued(tmp_path, authority(tmp_path))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert, key)
    async with Proxy(server.port, tls=context) as proxy:
        finding = failure(await examine(address(server, proxy.port)._replace(secure=True)))
    assert finding.check == "TLS"
    assert "intermediate" in finding.cause


async def test_tls_on_the_plain_port_is_named(server):
    finding = failure(await examine(address(server)._replace(secure=True)))
    assert finding.check == "TLS"
    assert "plain HTTP" in finding.cause


async def test_a_closed_port_is_named(server):
    reserved = await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", 0)
    port = reserved.sockets[0].getsockname()[1]
    reserved.close()
    await reserved.wait_closed()
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
