"""Checks a server from outside, step by step as a browser connects: DNS, TCP, TLS, HTTP, Upgrade, subscribe, publish.

Each step needs the one before it; the first that fails ends the check, and says the likely cause. Works against any
Pusher-compatible server. Sends at most a handful of requests.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import socket
import ssl
import time
from collections.abc import AsyncIterator
from email.utils import parsedate_to_datetime
from typing import Any, Final

import aiohttp

from redpoll.config.remedies import REFUSALS, recognise, remedy_for_upgrade
from redpoll.doctor.fallback import check_fallback
from redpoll.doctor.idle import examine_idle
from redpoll.doctor.pulls import examine_pulls
from redpoll.doctor.readiness import check_readiness
from redpoll.doctor.report import Finding, failed, ok, skipped, warning
from redpoll.doctor.streams import examine_stream
from redpoll.doctor.target import Target

__all__ = ["DEFAULT_PATIENCE_S", "examine"]

DEFAULT_PATIENCE_S: Final = 65.0  # nginx and many load balancers close a connection after 60 s without data.
# More than head_timeout_s, after which redpoll answers TLS on its plain port.
_STEP_TIMEOUT_S: Final = 12.0
# Signed requests are refused beyond this difference (`protocol/README.md "Request signing"`).
_MAX_SKEW_S: Final = 600
_NOTICEABLE_SKEW_S: Final = 60


async def examine(
    target: Target, patience_s: float = DEFAULT_PATIENCE_S, stream: str | None = None
) -> AsyncIterator[Finding]:
    """Yields each finding as soon as it is known. `patience_s`: how long to wait in silence for an idle timeout.
    `stream`: the channel to read over HTTP; None: the doctor's own."""
    resolved = await _resolve(target)
    yield resolved
    if resolved.cause:
        return
    connected = await _connect(target)
    yield connected
    if connected.cause:
        return
    if target.secure:
        encrypted = await _encrypt(target)
        yield encrypted
        if encrypted.cause:
            return
    # A connection for each request: a browser's WebSocket doesn't share one with other requests.
    # aiohttp's own context was made at its import.
    connector = aiohttp.TCPConnector(force_close=True, ssl=ssl.create_default_context())
    timeout = aiohttp.ClientTimeout(total=_STEP_TIMEOUT_S)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        async for finding in _speak(session, target, patience_s, stream):
            yield finding


async def _resolve(target: Target) -> Finding:
    loop = asyncio.get_running_loop()
    try:
        entries = await loop.getaddrinfo(target.host, target.port, type=socket.SOCK_STREAM)
    except OSError as error:
        return failed(
            "DNS",
            f"{target.host}: {error.strerror}",
            "the name doesn't exist, or this machine can't reach its name server",
            f"check the spelling, then: getent hosts {target.host}",
        )
    addresses = sorted({str(entry[4][0]) for entry in entries})
    return ok("DNS", f"{target.host} is {', '.join(addresses)}")


async def _connect(target: Target) -> Finding:
    began = time.perf_counter()
    place = f"{target.host} port {target.port}"
    try:
        async with asyncio.timeout(_STEP_TIMEOUT_S):
            _, writer = await asyncio.open_connection(target.host, target.port)
    except ConnectionRefusedError:
        return failed(
            "TCP",
            f"{place} refused the connection",
            "nothing listens on this port, or a firewall rejects it",
            "on the server: ss -ltnp | grep :" + str(target.port),
            "redpoll listens on port 6001 (setting port); browsers on an https page need wss, usually port 443",
        )
    except TimeoutError:
        return failed(
            "TCP",
            f"no answer from {place} within {_STEP_TIMEOUT_S:g} s",
            "a firewall or a cloud security group drops packets to this port",
            f"open TCP port {target.port} to the clients",
        )
    except OSError as error:
        return failed("TCP", f"{place}: {error.strerror or error}", "the machine can't be reached from here")
    took_ms = (time.perf_counter() - began) * 1000
    writer.close()
    return ok("TCP", f"connected to {place} in {took_ms:.1f} ms")


async def _encrypt(target: Target) -> Finding:
    context = ssl.create_default_context()
    try:
        async with asyncio.timeout(_STEP_TIMEOUT_S):
            _, writer = await asyncio.open_connection(target.host, target.port, ssl=context)
    except ssl.SSLCertVerificationError as error:
        return _certificate_fault(target, error)
    except ssl.SSLError as error:
        return failed(
            "TLS",
            f"no TLS on this port ({error.reason or error})",
            "the port speaks plain HTTP, or TLS older than 1.2",
            "use the TLS port, or give redpoll tls_port, tls_cert and tls_key, or let a proxy end TLS",
        )
    except (TimeoutError, OSError) as error:
        return failed("TLS", f"the handshake ended: {error or 'no answer'}", "the port doesn't speak TLS")
    session = writer.get_extra_info("ssl_object")
    certificate: dict[str, Any] = session.getpeercert() or {}
    version = session.version()
    writer.close()
    days = (ssl.cert_time_to_seconds(certificate["notAfter"]) - time.time()) / 86_400
    names = ", ".join(str(value) for _, value in certificate.get("subjectAltName", ())) or "no names"
    seen = f"{version}, certificate for {names}, {days:.0f} days left"
    if days < 7:
        return warning("TLS", seen, "", "renew the certificate, then send SIGHUP to redpoll (or reload the proxy)")
    return ok("TLS", seen)


def _certificate_fault(target: Target, error: ssl.SSLCertVerificationError) -> Finding:
    """The OpenSSL verify codes that people meet (X509_V_ERR_… in openssl/x509_vfy.h)."""
    renew = "after replacing it: systemctl reload redpoll (SIGHUP), or reload the proxy that ends TLS"
    if error.verify_code == 10:
        return failed("TLS", "the certificate has expired", "it wasn't renewed, or not reloaded after renewal", renew)
    if error.verify_code == 9:
        return failed("TLS", "the certificate isn't valid yet", "a clock is wrong: the server's, or this machine's")
    if error.verify_code in (62, 64):
        return failed(
            "TLS",
            error.verify_message,
            f"the certificate was issued for other names than {target.host}",
            "connect by a name in the certificate, or issue one that has this name",
            renew,
        )
    if error.verify_code in (18, 19):
        return failed(
            "TLS",
            "the certificate is self-signed",
            "browsers refuse it",
            "use a certificate of a public CA (certbot, or Caddy in front)",
        )
    if error.verify_code in (20, 21):
        return failed(
            "TLS",
            error.verify_message,
            "the intermediate certificate is missing, or this machine doesn't know the CA",
            "put the full chain into tls_cert: the certificate first, then the intermediates",
        )
    return failed("TLS", error.verify_message or str(error), "the certificate isn't accepted", renew)


# -- HTTP and WebSocket


async def _speak(
    session: aiohttp.ClientSession, target: Target, patience_s: float, stream: str | None
) -> AsyncIterator[Finding]:
    answered, proxy = await _http(session, target)
    for finding in answered:
        yield finding
    if any(finding.check == "HTTP" and finding.cause for finding in answered):
        return
    readiness = await check_readiness(session, target)
    if readiness is not None:
        yield readiness
        if readiness.cause:
            return
    yield await check_fallback(session, target, proxy, is_redpoll=readiness is not None)
    try:
        # No Origin: the doctor is no page, and apps may allow some pages only.
        websocket = await session.ws_connect(
            target.origin + target.socket_path, timeout=aiohttp.ClientWSTimeout(ws_close=2.0)
        )
    except aiohttp.WSServerHandshakeError as refusal:
        yield _upgrade_fault(refusal, proxy)
        return
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        yield failed(
            "Upgrade",
            f"the connection ended during the Upgrade ({type(error).__name__})",
            "a proxy or firewall in between doesn't let WebSockets through",
            *remedy_for_upgrade(proxy),
        )
        return
    async with websocket:
        yield ok("Upgrade", "101 Switching Protocols" + (f", through {proxy}" if proxy else ""))
        greeting = await _frame(websocket)
        if greeting.get("event") != "pusher:connection_established":
            yield _refusal(greeting)
            return
        socket_id = _data(greeting).get("socket_id", "?")
        yield ok("Connect", f"connection_established, socket id {socket_id}")
        async for finding in _use(session, target, websocket, patience_s, stream, proxy):
            yield finding


async def _use(
    session: aiohttp.ClientSession,
    target: Target,
    websocket: aiohttp.ClientWebSocketResponse,
    patience_s: float,
    stream: str | None,
    proxy: str,
) -> AsyncIterator[Finding]:
    """What a connected client does, and what its back end does meanwhile."""
    channel = f"doctor-{secrets.token_hex(6)}"
    began = time.perf_counter()
    await websocket.send_str(json.dumps({"event": "pusher:subscribe", "data": {"channel": channel}}))
    succeeded = await _until(websocket, "pusher_internal:subscription_succeeded")
    if succeeded is None:
        yield failed(
            "Subscribe",
            f"no subscription_succeeded within {_STEP_TIMEOUT_S:g} s",
            "the worker can't reach Redis",
            "look at /readyz on the control port, and at redis_url",
        )
        return
    yield ok("Subscribe", f"{channel}: succeeded in {(time.perf_counter() - began) * 1000:.1f} ms")
    async for finding in _publish(session, target, websocket, channel):
        yield finding
    if finding.cause:
        yield await examine_idle(websocket, patience_s, proxy)
        return
    yield await examine_stream(session, target, stream or channel, chosen=stream is not None)
    # Both wait.
    pulls = asyncio.create_task(examine_pulls(session, target, patience_s))
    try:
        yield await examine_idle(websocket, patience_s, proxy)
        yield await pulls
    finally:
        pulls.cancel()


async def _http(session: aiohttp.ClientSession, target: Target) -> tuple[list[Finding], str]:
    """GET /healthz: whether HTTP answers, which proxy is in front, and whether the clocks agree."""
    began = time.time()
    try:
        async with session.get(f"{target.origin}{target.prefix}/healthz", allow_redirects=False) as response:
            status, headers = response.status, response.headers
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        seen = f"no HTTP response ({type(error).__name__}: {error})"
        if target.secure:
            return [failed("HTTP", seen, "the port speaks TLS, but not HTTP in it")], ""
        cause = "the port speaks something else: TLS where http:// or ws:// was given, or another protocol"
        return [failed("HTTP", seen, cause, "try https:// or wss://")], ""
    proxy = recognise(headers)
    through = f" from {proxy}" if proxy else ""
    if status in (502, 503, 504) and proxy:
        return [
            failed(
                "HTTP",
                f"{status}{through}",
                f"{proxy} can't reach redpoll",
                "check that redpoll runs, and the address and port that the proxy forwards to",
            )
        ], proxy
    findings = [ok("HTTP", f"GET /healthz: {status}{through}")]
    date = headers.get("Date")
    if date is None:
        # A worker of redpoll answers /healthz itself, without this header; control answers /readyz.
        began = time.time()
        try:
            async with session.get(f"{target.origin}{target.prefix}/readyz", allow_redirects=False) as response:
                date = response.headers.get("Date")
        except (aiohttp.ClientError, TimeoutError, OSError):
            pass
    if date is not None:
        try:
            findings.append(_clock(parsedate_to_datetime(date).timestamp() - began))
        except (ValueError, OverflowError):
            findings.append(warning("Clock", f"the Date header is no date: {date}", "the server, or a proxy, wrote it"))
    return findings, proxy


def _clock(skew_s: float) -> Finding:
    """`skew_s`: by how much the server's clock is ahead of ours. Date has a resolution of a second."""
    seen = f"the server's clock is {abs(skew_s):.0f} s {'ahead of' if skew_s > 0 else 'behind'} this machine's"
    cause = f"a clock is wrong: the server's, or this machine's; signed requests are refused beyond {_MAX_SKEW_S} s"
    sync = "set the clock of whichever is wrong: timedatectl set-ntp true"
    if abs(skew_s) > _MAX_SKEW_S:
        return failed("Clock", seen, cause, sync)
    if abs(skew_s) > _NOTICEABLE_SKEW_S:
        return warning("Clock", seen, cause, sync)
    return ok("Clock", "agrees with this machine's")


def _upgrade_fault(refusal: aiohttp.WSServerHandshakeError, proxy: str) -> Finding:
    status = refusal.status
    proxy = recognise(refusal.headers or {}) or proxy
    if status == 503:
        return failed(
            "Upgrade",
            "503 instead of 101",
            "the server takes no clients now: it is full, starting or stopping",
            "look at the server's log",
        )
    if status in (404, 301, 302, 307, 308):
        return failed(
            "Upgrade",
            f"{status} instead of 101",
            "the path /app/KEY doesn't reach redpoll",
            "forward /app/ and /apps/ (or everything) to redpoll's port",
            *remedy_for_upgrade(proxy),
        )
    if status in (502, 504):
        return failed("Upgrade", f"{status} instead of 101", f"{proxy or 'the proxy'} can't reach redpoll")
    return failed(
        "Upgrade",
        f"{status} instead of 101",
        "a proxy in between drops the Upgrade header, so redpoll sees a plain request"
        if status in (200, 400, 426)
        else "the server, or a proxy in front of it, refuses WebSockets",
        *remedy_for_upgrade(proxy),
    )


def _refusal(frame: dict[str, Any]) -> Finding:
    data = _data(frame)
    code = data.get("code")
    cause, remedy = REFUSALS.get(code if isinstance(code, int) else 0, ("the server refuses this client", ""))
    return failed("Connect", f"{code}: {data.get('message') or 'no greeting'}", cause, *([remedy] if remedy else []))


async def _publish(
    session: aiohttp.ClientSession, target: Target, websocket: aiohttp.ClientWebSocketResponse, channel: str
) -> AsyncIterator[Finding]:
    if not target.app_id:
        yield skipped("Publish", "no secret: give http://KEY:SECRET@HOST:PORT/apps/ID to publish too")
        return
    body = json.dumps({"name": "doctor", "channels": [channel], "data": "{}"}).encode()
    began = time.perf_counter()
    try:
        async with session.post(
            target.origin + target.signed_path(body), data=body, headers={"Content-Type": "application/json"}
        ) as response:
            status, text = response.status, await response.text()
    except (aiohttp.ClientError, TimeoutError) as error:
        yield failed("Publish", f"no response ({type(error).__name__})", "the path /apps/ doesn't reach redpoll")
        return
    if status != 200:
        yield _publish_fault(status, text)
        return
    yield ok("Publish", f"200 in {(time.perf_counter() - began) * 1000:.1f} ms")
    if await _until(websocket, "doctor") is None:
        yield failed(
            "Receive",
            f"the event didn't arrive within {_STEP_TIMEOUT_S:g} s",
            "publishing and subscribing reach different servers, or different Redis databases",
            "check that every node has the same redis_url and redis_prefix",
        )
        return
    yield ok("Receive", f"round trip {(time.perf_counter() - began) * 1000:.1f} ms")


def _publish_fault(status: int, text: str) -> Finding:
    try:
        error = json.loads(text)
    except (ValueError, RecursionError):
        error = {}
    said = str(error.get("error", text))[:300] if isinstance(error, dict) else text[:300]
    code = error.get("code", "") if isinstance(error, dict) else ""
    cause, remedy = {
        "timestamp_out_of_range": ("a clock is wrong: the server's, or this machine's", "timedatectl set-ntp true"),
        "invalid_signature": ("the secret is wrong", "compare it with `redpoll app show APP_ID`"),
        "unauthorized": ("the key isn't an enabled key of this app", "compare app id and key"),
        "unavailable": ("the control plane can't reach Redis", "look at /readyz and redis_url"),
    }.get(str(code), ("the server refuses this publish", ""))
    if status == 404:
        cause, remedy = "the path /apps/ doesn't reach redpoll", "forward /apps/ to redpoll's port"
    return failed("Publish", f"{status}: {said}", cause, *([remedy] if remedy else []))


async def _frame(websocket: aiohttp.ClientWebSocketResponse) -> dict[str, Any]:
    """The next frame as a dict; empty if none came or it isn't a JSON object."""
    try:
        message = await websocket.receive(timeout=_STEP_TIMEOUT_S)
    except TimeoutError:
        return {}
    if message.type is not aiohttp.WSMsgType.TEXT:
        return {}
    try:
        frame = json.loads(message.data)
    except (ValueError, RecursionError):
        return {}
    return frame if isinstance(frame, dict) else {}


async def _until(websocket: aiohttp.ClientWebSocketResponse, event: str) -> dict[str, Any] | None:
    """The next frame of this event; None if the connection ends or it doesn't come in time."""
    try:
        async with asyncio.timeout(_STEP_TIMEOUT_S):
            while frame := await _frame(websocket):
                if frame.get("event") == event:
                    return frame
    except TimeoutError:
        pass
    return None


def _data(frame: dict[str, Any]) -> dict[str, Any]:
    """The frame's data, which Pusher servers send as an object or as a string that holds one."""
    data = frame.get("data")
    if isinstance(data, str):
        try:
            data = json.loads(data)
        except (ValueError, RecursionError):
            return {}
    return data if isinstance(data, dict) else {}
