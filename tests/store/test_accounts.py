"""Users and sessions in the record store: written, changed, removed."""

import pytest
import sqlalchemy as sa

from redpoll.store import accounts as rows
from redpoll.store.accounts import User


def user(name="vera", **changed):
    return User(
        **{"name": name, "password_hash": "h", "role": "viewer", "must_change": True, "created_at": 1.0, **changed}
    )


async def test_user_is_read_back_as_written(store):
    async with store.change() as connection:
        await rows.add(connection, user())
        await rows.set_password(connection, "vera", "other", must_change=False)
        await rows.set_role(connection, "vera", "admin")
        assert not await rows.set_login(connection, user(), 1.5)
        assert await rows.set_login(connection, user(password_hash="other"), 2.5)
    expected = user(password_hash="other", must_change=False, role="admin", last_login_at=2.5)
    async with store.reading() as connection:
        assert await rows.list_users(connection) == [expected]
        assert await rows.find_user(connection, "vera") == expected
        assert await rows.find_user(connection, "nobody") is None


async def test_user_names_are_unique(store):
    async with store.change() as connection:
        await rows.add(connection, user())
        with pytest.raises(sa.exc.IntegrityError):
            await rows.add(connection, user())


async def test_sessions_end_by_hash_by_user_by_age_and_with_their_user(store):
    async with store.change() as connection:
        for name in ("vera", "anna"):
            await rows.add(connection, user(name))
        for hash, name, at in (
            ("a", "vera", 1),
            ("b", "vera", 10),
            ("c", "vera", 20),
            ("d", "anna", 30),
            ("e", "anna", 40),
        ):
            await rows.add_session(connection, hash, name, float(at))
        found = await rows.find_session(connection, "b")
        assert (found.user.name, found.created_at, found.used_at) == ("vera", 10.0, 10.0)
        await rows.touch_session(connection, "b", 50.0)
        await rows.end_matching_sessions(connection, used_before=5.0)
        assert await rows.find_session(connection, "a") is None
        await rows.end_matching_sessions(connection, begun_before=15.0)
        assert await rows.find_session(connection, "b") is None
        await rows.end_sessions(connection, ("c",))
        await rows.end_matching_sessions(connection, user_name="anna")
        assert await rows.find_session(connection, "d") is None
        assert await rows.find_session(connection, "e") is None
        await rows.add_session(connection, "f", "anna", 60.0)
        await rows.remove(connection, "anna")
        assert await rows.find_session(connection, "f") is None
