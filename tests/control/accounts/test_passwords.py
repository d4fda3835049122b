"""Rules for passwords, and how they are checked."""

import pytest
from argon2 import PasswordHasher

from redpoll.control.accounts.passwords import Passwords, fault_of_password, one_time_password


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
def test_short_or_simple_password_is_refused(password, fault):
    text = fault_of_password(password, "admin")
    assert text is None if fault is None else fault in text


def test_one_time_passwords_are_unambiguous_and_unique():
    made = {one_time_password() for _ in range(100)}
    assert len(made) == 100
    assert not set("".join(made)) & set("01ilo")
    assert all(fault_of_password(password, "admin") is None for password in made)


async def test_only_the_right_password_matches():
    passwords = Passwords(PasswordHasher(time_cost=1, memory_cost=8, parallelism=1))
    known = await passwords.hash("correct horse")
    assert known.startswith("$argon2id$")
    assert await passwords.matches("correct horse", known)
    assert not await passwords.matches("correct house", known)
    assert not await passwords.matches("correct horse", None)
    assert not await passwords.matches("correct horse", "no hash at all")


async def test_one_time_passwords_have_a_fast_hash_and_checking_one_takes_as_long_as_any_other():
    checked = []

    class Counting(PasswordHasher):
        def verify(self, hashed, password):
            checked.append(hashed)
            return super().verify(hashed, password)

    passwords = Passwords(Counting(time_cost=2, memory_cost=16, parallelism=1))
    password = one_time_password()
    own, once = await passwords.hash("correct horse"), passwords.hash_one_time(password)
    assert await passwords.matches(password, once)
    assert not await passwords.matches("correct horse", once)
    # Whichever user is named, and whether or not there is one, one slow hash is checked.
    for hashed in (own, once, None, ""):
        checked.clear()
        await passwords.matches("wrong password", hashed)
        assert ["t=2" in one for one in checked].count(True) == 1, hashed
