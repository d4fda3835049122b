"""Checks from outside whether a channel can be read over HTTP as its messages come, through every proxy in between."""

from __future__ import annotations

import asyncio
import time
from typing import Final

import aiohttp

from redpoll.doctor.report import Finding, failed, ok, skipped
from redpoll.doctor.target import Target

__all__ = ["examine_stream"]

# The first event comes at once. A proxy that collects what it gets shows nothing.
_FIRST_EVENT_S: Final = 5.0
_CHECK: Final = "Stream"


async def examine_stream(
    session: aiohttp.ClientSession, target: Target, channel: str, *, chosen: bool, wait_s: float = _FIRST_EVENT_S
) -> Finding:
    """Whether a stream of this channel begins within `wait_s`. `chosen`: the operator named it; else it is the doctor's
    own channel, which few apps store."""
    if not target.app_id:
        return skipped(_CHECK, "no secret: give http://KEY:SECRET@HOST:PORT/apps/ID to read a channel too")
    began = time.perf_counter()
    path = target.signed_path(
        None, method="GET", path=f"/channels/{channel}/stream", params={"live": "sse", "offset": "now"}
    )
    try:
        async with asyncio.timeout(wait_s), session.get(target.origin + path) as response:
            if response.status != 200:
                return _refused(response.status, await response.text(), channel, chosen)
            while b"streamNextOffset" not in await response.content.readline():
                if response.content.at_eof():
                    return failed(_CHECK, "the stream ended at once", "a proxy in between ends long answers")
    except TimeoutError:
        return failed(
            _CHECK,
            f"nothing came within {wait_s:g} s",
            "a proxy in between collects the answer instead of passing it on",
            "nginx: leave proxy_buffering on or turn it off, but don't ignore X-Accel-Buffering",
            "other proxies: turn off buffering and compression of text/event-stream",
        )
    except aiohttp.ClientError as error:
        return failed(_CHECK, f"no response ({type(error).__name__})", "the path /apps/ doesn't reach redpoll")
    return ok(_CHECK, f"{channel}: began in {(time.perf_counter() - began) * 1000:.1f} ms")


def _refused(status: int, text: str, channel: str, chosen: bool) -> Finding:
    if '"no_history"' in text:
        why = f"{channel} has no history, so it can't be read over HTTP"
        if not chosen:
            return skipped(_CHECK, f"{why}; name a channel that has: --channel NAME")
        return failed(_CHECK, why, "no history rule of the app names it", "redpoll history rule add")
    if status == 404:
        cause = "the path isn't forwarded to redpoll, or this server has no streams"
        return (
            failed(_CHECK, f"404: {text[:200]}", cause, "forward /apps/ to redpoll's port")
            if chosen
            else skipped(_CHECK, "this server has no streams")
        )
    return failed(_CHECK, f"{status}: {text[:200]}", "the server refuses to stream this channel")
