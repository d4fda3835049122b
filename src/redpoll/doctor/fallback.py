"""Checks the HTTP fallback as pusher-js uses it where WebSockets are blocked: the preflight, a stream, a poll.

A proxy that buffers responses lets no stream through; pusher-js polls then, which costs more requests.
"""

from __future__ import annotations

import asyncio
import secrets
from typing import Final

import aiohttp

from redpoll.config.remedies import remedy_for_buffering
from redpoll.doctor.report import Finding, ok, skipped, warning
from redpoll.doctor.target import Target

__all__ = ["check_fallback"]

_CHECK: Final = "Fallback"
# A proxy that buffers passes nothing on before it has several KiB, which takes minutes. (pusher-js waits 4 s.)
_LINES_S: Final = 12.0
_MAX_BYTES: Final = 65_536
# A client that is refused gets an error instead; the check of a WebSocket says why.
_FIRST: Final = (b"pusher:connection_established", b"pusher:error")
_FAULTS = (aiohttp.ClientError, TimeoutError, OSError)


async def check_fallback(
    session: aiohttp.ClientSession, target: Target, proxy: str, *, is_redpoll: bool, stream_s: float = _LINES_S
) -> Finding:
    """What a page without WebSockets would meet. `is_redpoll`: the server has a fallback, unless it is switched off."""
    # Where pusher-js' httpPath isn't set, it asks below /pusher.
    prefix = target.prefix or "/pusher"
    refused = await _preflight(session, target, prefix)
    if refused is not None:
        status, allowed = refused
        if status in (200, 204) and allowed:
            pass
        elif is_redpoll and status < 500:
            return warning(
                _CHECK,
                f"OPTIONS {prefix}/app/{target.key}/…: {status}, pages may {'' if allowed else 'not '}ask",
                f"a proxy doesn't forward {prefix}/, or http_fallback is off",
                f"forward {prefix}/ (or everything) to redpoll's port, or set pusher-js' httpPath",
            )
        else:
            return skipped(_CHECK, f"{status} for {prefix}/app/KEY/…: this server has no HTTP fallback here")
    if await _opens(session, target, prefix, "xhr_streaming", stream_s):
        return ok(_CHECK, "xhr_streaming: a session opens, and lines come at once")
    if await _opens(session, target, prefix, "xhr", _LINES_S):
        return warning(
            _CHECK,
            f"xhr_streaming: nothing came within {stream_s:g} s; xhr_polling works",
            f"{proxy or 'a proxy in between'} buffers responses; pages without WebSockets poll instead",
            *remedy_for_buffering(proxy),
        )
    return warning(
        _CHECK,
        "neither xhr_streaming nor xhr_polling opens a session",
        f"{proxy or 'a proxy in between'} doesn't forward POST {prefix}/app/KEY/…",
        f"forward {prefix}/ (or everything) to redpoll's port",
    )


def _url(target: Target, prefix: str, action: str) -> str:
    name = f"{secrets.randbelow(1000)}/{secrets.token_hex(4)}"
    query = target.socket_path.partition("?")[2]
    return f"{target.origin}{prefix}/app/{target.key}/{name}/{action}?{query}&n=1"


async def _preflight(session: aiohttp.ClientSession, target: Target, prefix: str) -> tuple[int, bool] | None:
    """The status, and whether pages of this origin may ask; None without an answer."""
    headers = {
        "Origin": target.origin,
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "content-type",
    }
    try:
        async with session.options(_url(target, prefix, "xhr"), headers=headers) as response:
            return response.status, "Access-Control-Allow-Origin" in response.headers
    except _FAULTS:
        return None


async def _opens(session: aiohttp.ClientSession, target: Target, prefix: str, action: str, within_s: float) -> bool:
    """Whether a session's first message comes in time. The session ends with the request."""
    # No Origin: the doctor is no page, and a page's may be refused. For a preflight, any will do.
    headers = {"Content-Type": "application/json"}
    received = b""
    try:
        async with (
            asyncio.timeout(within_s),
            session.post(_url(target, prefix, action), headers=headers) as response,
        ):
            while not _has_begun(received) and len(received) < _MAX_BYTES:
                part = await response.content.readany()
                if not part:
                    break
                received += part
    except _FAULTS:
        return False
    return _has_begun(received)


def _has_begun(received: bytes) -> bool:
    return any(event in received for event in _FIRST)
