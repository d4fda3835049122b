"""What a redpoll says of itself before a client comes: whether it takes clients, and at which port they are wrong."""

from __future__ import annotations

import aiohttp

from redpoll.doctor.report import Finding, failed, ok
from redpoll.doctor.target import Target

__all__ = ["check_readiness"]


async def check_readiness(session: aiohttp.ClientSession, target: Target) -> Finding | None:
    """GET /readyz: what the server itself says. None if it isn't redpoll, or a proxy doesn't forward this path."""
    try:
        async with session.get(f"{target.origin}{target.prefix}/readyz") as response:
            status, answer = response.status, await response.json(content_type=None)
    except (aiohttp.ClientError, TimeoutError, ValueError, RecursionError):
        return None
    if status == 200 and await _is_control_port(session, target):
        return failed(
            "Ready",
            "GET /readyz: 200, GET /app/KEY: 404, GET /: to /dashboard",
            "this is redpoll's control port, which has the dashboard and takes no clients",
            "use the public port (port, by default 6001, or tls_port)",
        )
    if status == 200:
        return ok("Ready", "GET /readyz: 200")
    reason = answer.get("error") if isinstance(answer, dict) else None
    if status != 503 or not isinstance(reason, str):
        return None
    if "redis" in reason.lower():
        return failed(
            "Ready",
            f"503: {reason}",
            "redpoll runs, but can't reach its Redis",
            "on the server: redpoll doctor    (checks redis_url), and look at the log",
        )
    return failed("Ready", f"503: {reason}", "redpoll runs, but takes no clients now", "look at the server's log")


async def _is_control_port(session: aiohttp.ClientSession, target: Target) -> bool:
    """Whether this port of a redpoll takes no clients. A proxy may have the dashboard at its root and take them."""
    origin = f"{target.origin}{target.prefix}"
    try:
        async with session.get(f"{origin}/app/{target.key}", allow_redirects=False) as response:
            if response.status != 404:
                return False
        async with session.get(f"{origin}/", allow_redirects=False) as response:
            return response.headers.get("Location") == "/dashboard"
    except (aiohttp.ClientError, TimeoutError, OSError):
        return False
