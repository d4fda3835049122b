"""Passwords of the dashboard's users: what one must be like, and argon2 kept off the event loop.

A hash takes 64 MiB and a quarter of a second of a core, on purpose. Two at a time, so that a flood of logins takes
no more than that from the control plane.
"""

import asyncio
import secrets
from typing import Final

from argon2 import PasswordHasher
from argon2.exceptions import InvalidHashError, VerificationError

__all__ = ["MAX_CHARS", "MIN_CHARS", "Passwords", "fault_of_password", "one_time_password"]

MIN_CHARS: Final = 10
MAX_CHARS: Final = 200
_AT_A_TIME: Final = 2
# Without the characters that are read as one another; 20 of these 31 are 99 bits.
_CHARACTERS: Final = "abcdefghjkmnpqrstuvwxyz23456789"


def one_time_password() -> str:
    """Four groups of five characters, to be typed off a terminal."""
    return "-".join("".join(secrets.choice(_CHARACTERS) for _ in range(5)) for _ in range(4))


def fault_of_password(password: str, name: str) -> str | None:
    """Why a user of this name can't have this password, a sentence; None where nothing is wrong."""
    if len(password) < MIN_CHARS:
        return f"A password has at least {MIN_CHARS} characters."
    if len(password) > MAX_CHARS:
        return f"A password has at most {MAX_CHARS} characters."
    if len(set(password)) < 4 or password.casefold() in (name.casefold() * 20)[: len(password)]:
        return "That one is too easy to guess."
    return None


class Passwords:
    """Makes and checks hashes, each in a thread."""

    def __init__(self, hasher: PasswordHasher | None = None) -> None:
        self._hasher = hasher or PasswordHasher()
        self._slots = asyncio.Semaphore(_AT_A_TIME)
        self._of_nobody = ""

    async def hash(self, password: str) -> str:
        async with self._slots:
            return await asyncio.to_thread(self._hasher.hash, password)

    async def matches(self, password: str, known: str | None) -> bool:
        """Whether this is the password behind the hash `known`. None, for a user that there isn't, takes as long and
        is False: nobody learns from the time taken which names exist."""
        if known is None:
            self._of_nobody = self._of_nobody or await self.hash(one_time_password())
        async with self._slots:
            right = await asyncio.to_thread(self._check, known or self._of_nobody, password)
        return right and known is not None

    def _check(self, known: str, password: str) -> bool:
        try:
            return self._hasher.verify(known, password)
        except (VerificationError, InvalidHashError):
            return False
