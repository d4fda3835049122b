"""What a password must be like, and how it is checked."""

import pytest
from argon2 import PasswordHasher

from redpoll.control.dashboard.passwords import Passwords, fault_of_password, one_time_password


@pytest.mark.parametrize(
    ("password", "fault"),
    [
        ("short", "at least 10 characters"),
        ("x" * 201, "at most 200"),
        ("aaaaaaaaaaaa", "easy to guess"),
        ("adminadmin", "easy to guess"),
        ("correct horse battery", None),
    ],
)
def test_a_password_that_is_too_short_or_too_plain_is_refused_with_a_sentence(password, fault):
    told = fault_of_password(password, "admin")
    assert told is None if fault is None else fault in told


def test_one_time_passwords_are_of_characters_that_nobody_mistakes_and_never_the_same():
    made = {one_time_password() for _ in range(100)}
    assert len(made) == 100
    assert not set("".join(made)) & set("01ilo")
    assert all(fault_of_password(each, "admin") is None for each in made)


async def test_only_the_right_password_matches_and_nobody_has_none():
    passwords = Passwords(PasswordHasher(time_cost=1, memory_cost=8, parallelism=1))
    known = await passwords.hash("correct horse")
    assert known.startswith("$argon2id$")
    assert await passwords.matches("correct horse", known)
    assert not await passwords.matches("correct house", known)
    assert not await passwords.matches("correct horse", None)
    assert not await passwords.matches("correct horse", "no hash at all")
