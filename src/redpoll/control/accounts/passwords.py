"""Password rules and hashing for dashboard users.

An argon2 hash takes 64 MiB and a quarter of a second of CPU on purpose, so it runs in a thread. At most two run at a
time, so that many logins can't take more than that from the control plane. This slows guessing of passwords that people
choose. One-time passwords are random and get a fast hash, because a server makes one at its first start.
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
# Of 2^98 passwords, none is found by trying, however fast the hash is.
_FAST: Final = PasswordHasher(time_cost=1, memory_cost=8, parallelism=1)
_FAST_PREFIX: Final = "$argon2id$v=19$m=8,t=1,p=1$"


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

    @staticmethod
    def hash_one_time(password: str) -> str:
        """The hash of a password that `one_time_password` made."""
        return _FAST.hash(password)

    @staticmethod
    def matches_one_time(password: str, hashed: str) -> bool:
        """Whether `hashed` is what `hash_one_time` made of this password. It takes no time, and may show by that
        whether the user has such a password."""
        return hashed.startswith(_FAST_PREFIX) and _is_hash(_FAST, hashed, password)

    async def matches(self, password: str, hashed: str | None) -> bool:
        """Whether `hashed` is the hash of this password. Takes the same time for a one-time password, and for None,
        which is a user that doesn't exist, so that response times don't reveal which names exist."""
        hashed = hashed or ""
        slow = hashed
        if not hashed or hashed.startswith(_FAST_PREFIX):
            slow = self._dummy_hash = self._dummy_hash or await self.hash(one_time_password())
        async with self._slots:
            is_right = await asyncio.to_thread(_is_hash, self._hasher, slow, password)
        return is_right if slow is hashed else _is_hash(self._hasher, hashed, password)


def _is_hash(hasher: PasswordHasher, hashed: str, password: str) -> bool:
    try:
        return hasher.verify(hashed, password)
    except (VerificationError, InvalidHashError):
        return False
