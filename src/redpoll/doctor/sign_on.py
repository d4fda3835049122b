"""Checks the OpenID Connect provider of `oidc_issuer`: its document, and the difference of the clocks."""

from __future__ import annotations

import time
from email.utils import parsedate_to_datetime
from typing import Final

import aiohttp
import msgspec

from redpoll.config.settings import Settings
from redpoll.config.single_sign_on import MAX_BYTES, WITHIN_S, document_faults, document_url
from redpoll.doctor.report import Finding, failed, ok, skipped

__all__ = ["examine"]

_CHECK: Final = "Sign-on"
# An ID token that is older or younger is refused (control/accounts/sign_on.py).
_CLOCKS_WITHIN_S: Final = 120.0


async def examine(settings: Settings) -> Finding:
    """Asks the provider for its document, as a login does."""
    issuer = settings.oidc_issuer
    if not issuer:
        return skipped(_CHECK, "oidc_issuer isn't set")
    url = document_url(issuer)
    timeout = aiohttp.ClientTimeout(total=WITHIN_S)
    try:
        async with (
            aiohttp.ClientSession(timeout=timeout, trust_env=True) as session,
            session.get(url, allow_redirects=False) as answer,
        ):
            status, date = answer.status, answer.headers.get("Date", "")
            text = await answer.content.read(MAX_BYTES)
            while len(text) < MAX_BYTES and (more := await answer.content.read(MAX_BYTES - len(text))):
                text += more
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        seen = f"no answer within {WITHIN_S:g} s" if isinstance(error, TimeoutError) else f"{error}"
        return failed(
            _CHECK,
            f"{url}: {seen}",
            "this machine doesn't reach the provider, or its certificate isn't trusted here",
            f"curl -v {url}",
            "local users can log in meanwhile",
        )
    return judged(issuer, status, text, _difference_s(date))


def judged(issuer: str, status: int, text: bytes, difference_s: float) -> Finding:
    """What the answer says. `difference_s`: by how much this machine's clock is ahead of the provider's."""
    try:
        document: object = msgspec.json.decode(text) if status == 200 else None
    except msgspec.DecodeError:
        document = None
    faults = [f"the provider answers {status}"] if status != 200 else document_faults(document, issuer)
    if faults:
        return failed(
            _CHECK,
            "; ".join(faults),
            "oidc_issuer isn't exactly the provider's issuer, or the provider is set up differently",
            f"compare oidc_issuer with the line `issuer` of {document_url(issuer)}",
        )
    if abs(difference_s) > _CLOCKS_WITHIN_S:
        ahead = "ahead of" if difference_s > 0 else "behind"
        return failed(
            _CHECK,
            f"this machine's clock is {abs(difference_s):.0f} s {ahead} the provider's",
            "one of the two clocks isn't set by NTP; logins are refused",
            "timedatectl",
        )
    return ok(_CHECK, f"{issuer}: authorization code with PKCE, clocks {abs(difference_s):.0f} s apart")


def _difference_s(date: str) -> float:
    """From a Date header; 0 without one."""
    try:
        return time.time() - parsedate_to_datetime(date).timestamp()
    except (TypeError, ValueError):
        return 0.0
