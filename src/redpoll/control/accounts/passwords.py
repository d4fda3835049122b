"""Password rules and hashing for dashboard users.

An argon2 hash takes 64 MiB and a quarter of a second of CPU on purpose, so it runs in a thread. At most two run at a
time, so that many logins can't take more than that from the control plane.
"""

import asyncio
import secrets
from typing import Final

from argon2 import PasswordHasher
from argon2.exceptions import InvalidHashError, VerificationError

__all__ = ["MAX_CHARS", "MIN_CHARS", "Passwords", "fault_of_password", "one_time_password"]

MIN_CHARS: Final = 10
MAX_CHARS: Final = 200
_MAX_PARALLEL: Final = 2
# Without characters that look alike. 20 of these characters have about 98 bits.
_CHARACTERS: Final = "abcdefghjkmnpqrstuvwxyz23456789"


def one_time_password() -> str:
    """A random password: four groups of five characters, easy to type."""
    return "-".join("".join(secrets.choice(_CHARACTERS) for _ in range(5)) for _ in range(4))


def fault_of_password(password: str, name: str) -> str | None:
    """Why the user `name` can't have this password, as a sentence; None if it is fine."""
    if len(password) < MIN_CHARS:
        return f"A password has at least {MIN_CHARS} characters."
    if len(password) > MAX_CHARS:
        return f"A password has at most {MAX_CHARS} characters."
    if len(set(password)) < 4 or password.casefold() in (name.casefold() * 20)[: len(password)]:
        return "This password is too easy to guess."
    return None


class Passwords:
    """Computes and verifies hashes in threads."""

    def __init__(self, hasher: PasswordHasher | None = None) -> None:
        self._hasher = hasher or PasswordHasher()
        self._slots = asyncio.Semaphore(_MAX_PARALLEL)
        self._dummy_hash = ""

    async def hash(self, password: str) -> str:
        async with self._slots:
            return await asyncio.to_thread(self._hasher.hash, password)

    async def matches(self, password: str, hashed: str | None) -> bool:
        """Whether `hashed` is the hash of this password. None, for a user that doesn't exist, returns False after the
        same time, so that response times don't reveal which names exist."""
        if hashed is None:
            self._dummy_hash = self._dummy_hash or await self.hash(one_time_password())
        async with self._slots:
            is_right = await asyncio.to_thread(self._check, hashed or self._dummy_hash, password)
        return is_right and hashed is not None

    def _check(self, hashed: str, password: str) -> bool:
        try:
            return self._hasher.verify(hashed, password)
        except (VerificationError, InvalidHashError):
            return False
