"""Checks from outside whether webhooks can be pulled, through every proxy in between. Takes no delivery: with `limit=0`
a request waits, or begins a stream, as one that takes some does."""

from __future__ import annotations

import asyncio
import time
from typing import Final

import aiohttp

from redpoll.doctor.report import Finding, failed, ok, skipped, warning
from redpoll.doctor.target import Target

__all__ = ["examine_pulls"]

# As long as requests wait without `wait`, and those of `redpoll webhook listen`.
_WAIT_S: Final = 30
# What a proxy adds.
_GRACE_S: Final = 10.0
_BEGIN_S: Final = 5.0
_CHECK: Final = "Pull"
_EVENTS: Final = {"Accept": "text/event-stream"}


async def examine_pulls(
    session: aiohttp.ClientSession, target: Target, patience_s: float, *, begin_s: float = _BEGIN_S
) -> Finding:
    """Whether the app's webhooks can be pulled; skipped if none is. A request waits for at most `patience_s`."""
    if not target.app_id:
        return skipped(_CHECK, "no secret: give http://KEY:SECRET@HOST:PORT/apps/ID to check webhooks by pull too")
    try:
        async with session.get(_url(target, 0)) as response:
            if response.status != 200:
                return _refused(response.status, await response.text())
        if not await _streams(session, target, begin_s):
            return warning(
                _CHECK,
                f"a stream doesn't begin within {begin_s:g} s",
                "a proxy in between collects the answer instead of passing it on; requests without a stream work",
                "nginx: leave proxy_buffering on or turn it off, but don't ignore X-Accel-Buffering",
                "other proxies: turn off buffering and compression of text/event-stream",
            )
    except (aiohttp.ClientError, TimeoutError) as error:
        return failed(_CHECK, f"no response ({type(error).__name__})", "the path /apps/ doesn't reach redpoll")
    wait_s = min(_WAIT_S, int(patience_s))
    return await _wait(session, target, wait_s) if wait_s else ok(_CHECK, "answers; a waiting request wasn't tried")


async def _streams(session: aiohttp.ClientSession, target: Target, begin_s: float) -> bool:
    """Whether the stream's first bytes come in time."""
    try:
        async with asyncio.timeout(begin_s), session.get(_url(target, 0), headers=_EVENTS) as response:
            return bool(await response.content.readline())
    except TimeoutError:
        return False


async def _wait(session: aiohttp.ClientSession, target: Target, wait_s: int) -> Finding:
    began = time.monotonic()
    cause = "a proxy in between ends requests that wait"
    remedy = (
        f"let it wait for more than {wait_s} s for an answer (nginx: proxy_read_timeout, which is 60 s)",
        "or ask with a shorter wait",
    )
    timeout = aiohttp.ClientTimeout(total=wait_s + _GRACE_S)
    try:
        async with session.get(_url(target, wait_s), timeout=timeout) as response:
            status, text = response.status, await response.text()
    except (aiohttp.ClientError, TimeoutError) as error:
        seen = f"a request that waits ended after {time.monotonic() - began:.0f} s ({type(error).__name__})"
        return failed(_CHECK, seen, cause, *remedy)
    took_s = time.monotonic() - began
    if status in (408, 502, 504, 524):
        return failed(_CHECK, f"a request that waits got {status} after {took_s:.0f} s", cause, *remedy)
    if status != 200:
        return _refused(status, text)
    return ok(_CHECK, f"a request waited for {took_s:.0f} s, and a stream began; no delivery was taken")


def _url(target: Target, wait_s: int) -> str:
    params = {"limit": "0", "wait": str(wait_s)}
    return target.origin + target.signed_path(None, method="GET", path="/webhooks/stream", params=params)


def _refused(status: int, text: str) -> Finding:
    if status == 404:
        # redpoll's answer says how to make one.
        missing = "no webhook of this app is pulled" if "--pull" in text else "this server has no webhooks by pull"
        return skipped(_CHECK, missing)
    if status == 429:
        return warning(
            _CHECK,
            f"{status}: {text[:200]}",
            "as many requests of the app wait as may, or the server limits requests",
            "end back ends that aren't needed",
        )
    return failed(_CHECK, f"{status}: {text[:200]}", "the server refuses to hand out webhooks to this key")
