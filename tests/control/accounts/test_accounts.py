"""Users, roles, passwords and sessions, on a real store."""

import asyncio
import contextlib
import hashlib
import sqlite3

import pytest
import sqlalchemy as sa
from argon2 import PasswordHasher
from structlog.testing import capture_logs

from redpoll.control.accounts import accounts as module
from redpoll.control.accounts.accounts import AccountError, Accounts
from redpoll.control.accounts.identity import Identity
from redpoll.control.accounts.passwords import Passwords
from redpoll.store import audit
from redpoll.store.schema import sessions
from redpoll.store.store import Store, database_url

OLD, NEW = "correct horse battery", "another horse battery"


class Clock:
    def __init__(self):
        self.now = 1_000_000.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
async def accounts(tmp_path, clock):
    store = await Store.open(database_url(tmp_path))
    cheap = Passwords(PasswordHasher(time_cost=1, memory_cost=8, parallelism=1))
    yield Accounts(store, passwords=cheap, clock=clock)
    await store.close()


async def test_empty_store_gets_an_admin_with_a_one_time_password(accounts):
    made_up = await accounts.first_admin("")
    (user,) = await accounts.users()
    assert (user.name, user.role, user.must_change) == ("admin", "admin", True)
    assert await accounts.log_in("admin", made_up)
    # A user exists now, so neither a generated nor a configured password counts.
    assert await accounts.first_admin("") is None
    assert await accounts.first_admin(OLD) is None
    assert await accounts.log_in("admin", OLD) is None


async def test_configured_first_password_is_permanent(accounts):
    assert await accounts.first_admin(OLD) is None
    assert (await accounts.user("admin")).must_change is False


async def test_only_the_hash_of_a_session_is_stored(accounts):
    await accounts.first_admin(OLD)
    plain = await accounts.log_in("admin", OLD)
    async with accounts.store.reading() as connection:
        (stored,) = (await connection.execute(sa.select(sessions.c.hash))).scalars()
    assert stored == hashlib.sha256(plain.encode()).hexdigest()
    session = await accounts.session(plain)
    assert session.is_admin
    assert plain not in session.csrf
    assert await accounts.session(stored) is None
    assert await accounts.session("") is None


async def test_session_is_valid_while_the_store_can_be_read_only(accounts, clock, tmp_path):
    await accounts.first_admin(OLD)
    plain = await accounts.log_in("admin", OLD)
    async with accounts.store.reading() as connection:
        await connection.execute(sa.text("PRAGMA busy_timeout=0"))
    with contextlib.closing(sqlite3.connect(tmp_path / "redpoll.sqlite", isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        clock.now += 301
        with capture_logs() as logged:
            assert await accounts.session(plain)
            # Each attempt to write might take seconds.
            assert await accounts.session(plain)
    assert [(line["event"], line["reason"]) for line in logged] == [
        ("use of a session not written", "database is locked")
    ]
    clock.now += 301
    assert await accounts.session(plain)
    clock.now += module.IDLE_S - 1
    assert await accounts.session(plain)


async def test_session_lasts_while_it_is_used_and_at_most_a_week(accounts, clock):
    await accounts.first_admin(OLD)
    plain = await accounts.log_in("admin", OLD)
    for _ in range(int(module.ABSOLUTE_S // (module.IDLE_S / 2)) - 1):
        clock.now += module.IDLE_S / 2
        assert await accounts.session(plain)
    clock.now += module.IDLE_S
    assert await accounts.session(plain) is None
    idle = await accounts.log_in("admin", OLD)
    clock.now += module.IDLE_S + 1
    assert await accounts.session(idle) is None


async def test_password_change_ends_all_sessions_and_begins_a_new_one(accounts):
    await accounts.first_admin(OLD)
    here, there = await accounts.log_in("admin", OLD), await accounts.log_in("admin", OLD)
    plain = await accounts.change_password(await accounts.session(here), OLD, NEW)
    assert not (await accounts.session(plain)).user.must_change
    assert await accounts.session(here) is None
    assert await accounts.session(there) is None
    assert await accounts.log_in("admin", OLD) is None
    assert await accounts.log_in("admin", NEW)


async def test_login_ends_the_former_session_of_the_browser(accounts):
    await accounts.first_admin(OLD)
    former, other = await accounts.log_in("admin", OLD), await accounts.log_in("admin", OLD)
    assert await accounts.log_in("admin", "wrong", former=former) is None
    assert await accounts.session(former)
    plain = await accounts.log_in("admin", OLD, former=former)
    assert await accounts.session(former) is None
    assert await accounts.session(plain)
    assert await accounts.session(other)


@pytest.mark.parametrize(
    ("old", "new", "field"),
    [("wrong", NEW, "old_password"), (OLD, OLD, "new_password"), (OLD, "short", "new_password")],
)
async def test_refused_password_change_names_the_field(accounts, old, new, field):
    await accounts.first_admin(OLD)
    session = await accounts.session(await accounts.log_in("admin", OLD))
    with pytest.raises(AccountError) as caught:
        await accounts.change_password(session, old, new)
    assert caught.value.field == field
    async with accounts.store.reading() as connection:
        actions = [entry.action for entry in await audit.find(connection)]
    assert ("login failed" in actions) == (field == "old_password")


async def test_reset_ends_sessions_and_returns_a_one_time_password(accounts):
    await accounts.first_admin(OLD)
    plain = await accounts.log_in("admin", OLD)
    one_time = await accounts.reset("admin")
    assert await accounts.session(plain) is None
    session = await accounts.session(await accounts.log_in("admin", one_time))
    assert session.user.must_change


async def test_login_with_a_password_that_is_reset_meanwhile_fails(accounts, monkeypatch):
    await accounts.first_admin(OLD)
    matches = Passwords.matches

    async def matches_before_the_reset(*args) -> bool:
        is_right = await matches(*args)
        monkeypatch.setattr(Passwords, "matches", matches)
        await accounts.reset("admin")
        return is_right

    monkeypatch.setattr(Passwords, "matches", matches_before_the_reset)
    assert await accounts.log_in("admin", OLD) is None
    async with accounts.store.reading() as connection:
        assert (await connection.scalar(sa.select(sa.func.count()).select_from(sessions))) == 0


async def test_password_change_does_not_undo_a_reset(accounts, monkeypatch):
    await accounts.first_admin(OLD)
    session = await accounts.session(await accounts.log_in("admin", OLD))
    hash_, given = Passwords.hash, []

    async def hash_before_the_reset(*args) -> str:
        hashed = await hash_(*args)
        given.append(await accounts.reset("admin"))
        return hashed

    monkeypatch.setattr(Passwords, "hash", hash_before_the_reset)
    with pytest.raises(AccountError, match="changed meanwhile"):
        await accounts.change_password(session, OLD, NEW)
    assert await accounts.log_in("admin", NEW) is None
    assert await accounts.log_in("admin", *given)


async def test_last_admin_can_not_be_removed_or_demoted(accounts):
    await accounts.first_admin(OLD)
    for what in (accounts.remove("admin"), accounts.set_role("admin", "viewer")):
        with pytest.raises(AccountError, match="only admin"):
            await what
    await accounts.create("vera", "admin")
    await accounts.set_role("admin", "viewer")
    await accounts.remove("admin")
    assert [user.name for user in await accounts.users()] == ["vera"]


async def test_removed_users_sessions_end_at_once(accounts):
    await accounts.first_admin(OLD)
    one_time = await accounts.create("vera", "viewer")
    plain = await accounts.log_in("vera", one_time)
    await accounts.remove("vera")
    assert await accounts.session(plain) is None


@pytest.mark.parametrize(
    ("name", "role", "field"), [("", "viewer", "name"), ("<b>", "viewer", "name"), ("ok", "king", "role")]
)
async def test_refused_user_names_the_field(accounts, name, role, field):
    with pytest.raises(AccountError) as caught:
        await accounts.create(name, role)
    assert caught.value.field == field


async def test_user_names_are_unique(accounts):
    await accounts.create("vera", "viewer")
    with pytest.raises(AccountError, match="already"):
        await accounts.create("vera", "viewer")
    with pytest.raises(AccountError, match="no user"):
        await accounts.reset("nobody")


def identity(subject="https://login.example.com 1", name="ann", role="admin", apps=None):
    return Identity(subject, name, role, apps, "a token")


async def test_user_of_a_provider_has_the_rights_of_the_last_login(accounts):
    session = await accounts.session(await accounts.sign_on(identity()))
    assert (session.user.name, session.is_admin, session.apps) == ("sso:ann", True, None)
    assert await accounts.id_token(session) == "a token"
    # The record is found by its subject, not by a name that may change or be somebody else's.
    plain = await accounts.sign_on(identity(name="anna", role="viewer", apps=frozenset({"3", "4"})))
    again = await accounts.session(plain)
    assert (again.user.name, again.is_admin, again.apps) == ("sso:ann", False, {"3", "4"})
    other = await accounts.session(await accounts.sign_on(identity(subject="https://login.example.com 2")))
    assert other.user.name.startswith("sso:ann-")
    assert {user.name for user in await accounts.users()} >= {"sso:ann", other.user.name}


async def test_name_that_another_user_of_the_provider_would_get_stays_free_for_nobody(accounts):
    first, second = "https://login.example.com 1", "https://login.example.com 2"
    chosen = f"ann-{hashlib.sha256(second.encode()).hexdigest()[:8]}"
    await accounts.sign_on(identity(first))
    await accounts.sign_on(identity("https://login.example.com 3", chosen))
    session = await accounts.session(await accounts.sign_on(identity(second)))
    names = {user.name for user in await accounts.users()}
    assert {"sso:ann", f"sso:{chosen}", session.user.name} <= names
    assert len(names) == 3


@pytest.fixture(params=["sqlite", "postgres"])
def urls(request, tmp_path):
    """The store of one node, or of two."""
    if request.param == "sqlite":
        return [database_url(tmp_path)]
    return [request.getfixturevalue("postgres_url")] * 2


async def test_first_logins_at_once_are_one_user_each(urls, clock):
    """At two nodes, in several windows, and by three users with one name."""
    stores = [await Store.open(url) for url in urls]
    try:
        nodes = [Accounts(store, clock=clock) for store in stores]
        subjects = [f"https://login.example.com {number % 3}" for number in range(12)]
        logins = [nodes[number % len(nodes)].sign_on(identity(one)) for number, one in enumerate(subjects)]
        plains = await asyncio.gather(*logins)
        sessions = [await nodes[0].session(plain) for plain in plains]
        names = {one: session.user.name for one, session in zip(subjects, sessions, strict=True)}
        assert len(set(names.values())) == 3
        assert [session.user.name for session in sessions] == [names[one] for one in subjects]
        assert len(await nodes[0].users()) == 3
    finally:
        for store in stores:
            await store.close()


async def test_sessions_end_when_the_provider_gives_no_role_any_more(accounts):
    plain, other = await accounts.sign_on(identity()), await accounts.sign_on(identity(subject="another subject"))
    await accounts.withdraw("unknown subject")
    assert await accounts.session(plain) is not None
    await accounts.withdraw(identity().subject)
    assert await accounts.session(plain) is None
    assert await accounts.session(other) is not None


async def test_user_of_a_provider_is_not_changed_here_and_is_not_the_last_admin(accounts):
    await accounts.first_admin("correct horse battery")
    await accounts.sign_on(identity())
    for change in (accounts.reset("sso:ann"), accounts.set_role("sso:ann", "viewer")):
        with pytest.raises(AccountError, match="sso:ann logs in by single sign-on"):
            await change
    # While the provider is away, nobody could log in.
    with pytest.raises(AccountError, match="admin is the only admin"):
        await accounts.remove("admin")
    await accounts.remove("sso:ann")
    assert [user.name for user in await accounts.users()] == ["admin"]
