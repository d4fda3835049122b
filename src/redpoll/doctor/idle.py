"""Checks from outside whether a quiet WebSocket stays open, through every proxy in between."""

from __future__ import annotations

import time
from typing import Final

import aiohttp

from redpoll.config.remedies import REFUSALS, remedy_for_idle
from redpoll.doctor.report import Finding, failed, ok, skipped

__all__ = ["examine_idle"]

# The close code for a client that was let in but didn't sign in. The doctor has no user.
_NOT_SIGNED_IN: Final = 4009


async def examine_idle(websocket: aiohttp.ClientWebSocketResponse, patience_s: float, proxy: str) -> Finding:
    """Sends nothing and waits for something in between to close the connection."""
    if patience_s <= 0:
        return skipped("Idle", "not waited for (--patience 0)")
    began = time.monotonic()
    deadline = began + patience_s
    while (left_s := deadline - time.monotonic()) > 0:
        try:
            message = await websocket.receive(timeout=left_s)
        except TimeoutError:
            break
        if message.type in (aiohttp.WSMsgType.CLOSE, aiohttp.WSMsgType.CLOSING, aiohttp.WSMsgType.CLOSED):
            silent_s = time.monotonic() - began
            code = websocket.close_code
            seen = f"closed with {code} after {silent_s:.0f} s"
            if code == _NOT_SIGNED_IN:
                wants = "the app wants a sign-in (user_authentication_timeout_s)"
                return skipped("Idle", f"{seen}: {wants}; longer silences weren't tried")
            if code is not None and 4000 <= code < 5000:
                return failed("Idle", seen, *REFUSALS.get(code, ("the server closed the connection",)))
            return failed(
                "Idle",
                f"closed without a reason after {silent_s:.0f} s of silence",
                f"{proxy or 'a proxy or firewall in between'} closes connections that are idle for {silent_s:.0f} s",
                *remedy_for_idle(proxy),
            )
        if message.type is aiohttp.WSMsgType.TEXT and "pusher:ping" in message.data:
            return ok("Idle", f"open after {time.monotonic() - began:.0f} s, when the server sent its own ping")
    return ok("Idle", f"still open after {patience_s:.0f} s of silence")
