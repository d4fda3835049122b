"""Makes requests repeatable: the same correlation id within 120 s gets the same answer and publishes nothing twice.

A request is claimed before it is carried out, and settled with its answer. The claim has a nonce under which each of
its events is published only once (bus.py). So the repetition of a request whose answer was lost completes it. After 120
s the same id is a new request (cluster/README.md "Idempotency and quotas").
"""

import hashlib
import secrets
from enum import Enum
from typing import Any, NamedTuple

from redpoll.cluster.bus import CONFIRM_S, ONCE_S, ask_within
from redpoll.cluster.redis.keys import Keys
from redpoll.cluster.redis.link import Link

__all__ = ["Claim", "Idempotency", "Outcome"]


class Outcome(Enum):
    NEW = "new"
    """A new request: carry it out, then `settle`, or `withdraw` if it is refused."""
    AGAIN = "again"
    """A repetition without a stored answer: carry it out with the same `once`, then `settle`."""
    ANSWERED = "answered"
    """A repetition with a stored answer: return `answer` and do nothing."""
    CONFLICT = "conflict"
    """Another request used this id."""


class Claim(NamedTuple):
    """`once` goes to the publishes of this request. `answer` is set if the outcome is ANSWERED."""

    outcome: Outcome
    once: str
    answer: bytes | None
    key: bytes
    fingerprint: bytes


class Idempotency:
    """Every method raises Unavailable if Redis doesn't confirm. A repetition finds out what was done."""

    def __init__(self, link: Link, keys: Keys, *, confirm_s: float = CONFIRM_S) -> None:
        self._link = link
        self._keys = keys
        self._confirm_s = confirm_s

    async def claim(self, app_id: str, correlation_id: str, request: bytes) -> Claim:
        """`request` has everything that makes two requests the same: method, path, parameters without `auth_…`,
        body."""
        hashed_id = hashlib.sha256(correlation_id.encode()).hexdigest()[:32]
        key = self._keys.request(app_id, hashed_id)
        fingerprint = hashlib.sha256(request).hexdigest().encode()
        once = secrets.token_hex(8)
        value = _value(fingerprint, once)
        stored: bytes | None = await self._confirmed(b"SET", key, value, b"NX", b"GET", b"EX", ONCE_S)
        if stored is None:
            return Claim(Outcome.NEW, once, None, key, fingerprint)
        known, _, rest = stored.partition(b" ")
        nonce, answered, answer = rest.partition(b" ")
        if known != fingerprint:
            return Claim(Outcome.CONFLICT, "", None, key, fingerprint)
        outcome = Outcome.ANSWERED if answered else Outcome.AGAIN
        return Claim(outcome, nonce.decode(), answer if answered else None, key, fingerprint)

    async def settle(self, claim: Claim, answer: bytes) -> None:
        """Stores the answer for repetitions within the next 120 s."""
        value = _value(claim.fingerprint, claim.once) + b" " + answer
        await self._confirmed(b"SET", claim.key, value, b"EX", ONCE_S)

    async def withdraw(self, claim: Claim) -> None:
        """The request was refused and did nothing: the next one with its id is a new one."""
        if claim.outcome is Outcome.NEW:
            await self._confirmed(b"DEL", claim.key)

    async def _confirmed(self, *command: Any) -> Any:
        return await ask_within(self._link, lambda: self._link.ask(*command), self._confirm_s)


def _value(fingerprint: bytes, once: str) -> bytes:
    return fingerprint + b" " + once.encode()
