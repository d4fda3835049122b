"""Dashboard users, their roles and passwords, and their sessions.

A session is a random id in the browser's cookie; the store has only its SHA-256. This module does no HTTP. `by` is who
makes a change: its row in the audit log is part of the same transaction.
"""

import hashlib
import hmac
import math
import re
import secrets
import time
from collections.abc import Callable
from typing import Final, NamedTuple

import msgspec
import structlog
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncConnection

from redpoll.control.accounts.identity import Identity
from redpoll.control.accounts.passwords import Passwords, fault_of_password, one_time_password
from redpoll.store import accounts as rows
from redpoll.store import audit
from redpoll.store.accounts import ROLES, User
from redpoll.store.audit import Actor
from redpoll.store.errors import StoreUnavailable, reason_of
from redpoll.store.store import Store, raise_version

__all__ = ["ABSOLUTE_S", "FIRST_USER", "IDLE_S", "AccountError", "Accounts", "Session"]

log = structlog.get_logger(__name__)

# A session ends when it was not used for the first time span, and at the latest after the second.
IDLE_S: Final = 12 * 3_600.0
ABSOLUTE_S: Final = 7 * 86_400.0
# How often the time of last use is written for a session that is in use.
_TOUCH_EVERY_S: Final = 300.0
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}").fullmatch
FIRST_USER: Final = "admin"


class AccountError(Exception):
    """A change was refused. The text is a sentence for the user. `field` is the form input it is about, "" for none."""

    def __init__(self, text: str, field: str = "") -> None:
        super().__init__(text)
        self.text = text
        self.field = field

    def __str__(self) -> str:
        return self.text


class Session(NamedTuple):
    """A logged-in user. `csrf` is the token that every form of this session must send."""

    user: User
    hash: str
    csrf: str

    @property
    def is_admin(self) -> bool:
        return self.user.role == "admin"

    @property
    def apps(self) -> frozenset[str] | None:
        """The ids of the apps that this user may see; None for all."""
        if self.is_admin or self.user.apps is None:
            return None
        return frozenset(msgspec.json.decode(self.user.apps, type=list[str]))


class Accounts:
    """The users and sessions in a store. `clock` returns Unix time in seconds."""

    def __init__(
        self, store: Store, *, passwords: Passwords | None = None, clock: Callable[[], float] = time.time
    ) -> None:
        self.store = store
        self._passwords = passwords or Passwords()
        self._clock = clock
        self._touch_failed_at_s = -math.inf

    def now_s(self) -> float:
        """Unix time."""
        return self._clock()

    # -- users

    async def first_admin(self, password: str) -> str | None:
        """Creates the user `admin` in a store without users; called at every start.

        An empty `password` generates a one-time password, which is returned. Otherwise returns None.
        """
        if await self.users():
            return None
        first_password = password or one_time_password()
        try:
            await self._add(FIRST_USER, "admin", first_password, must_change=not password)
        except AccountError:
            # Another server with the same store has started at the same time.
            return None
        return None if password else first_password

    async def users(self) -> list[User]:
        """All users, sorted by name."""
        async with self.store.reading() as connection:
            return await rows.list_users(connection)

    async def create(self, name: str, role: str, *, by: Actor | None = None) -> str:
        """Creates a user and returns the one-time password, of which only a hash is stored. Raises AccountError."""
        if not _NAME(name):
            raise AccountError(
                "A name is 1 to 64 letters, digits and `.` `_` `@` `-`, and begins with a letter or digit.", "name"
            )
        _check_role(role)
        password = one_time_password()
        await self._add(name, role, password, must_change=True, by=by)
        return password

    async def _add(self, name: str, role: str, password: str, *, must_change: bool, by: Actor | None = None) -> None:
        user = User(
            name=name,
            password_hash=(
                self._passwords.hash_one_time(password) if must_change else await self._passwords.hash(password)
            ),
            role=role,
            must_change=must_change,
            created_at=self._clock(),
        )
        try:
            async with self.store.change() as connection:
                await rows.add(connection, user)
                await raise_version(connection)
                await audit.add(connection, by, "user create", target=name, detail=role)
        except IntegrityError:
            raise AccountError(f"The user {name} already exists.", "name") from None

    async def reset(self, name: str, *, by: Actor | None = None) -> str:
        """Gives a user a new one-time password and ends the user's sessions. Returns the password, of which only a hash
        is stored. Raises AccountError."""
        _check_local(await self.user(name), "has no password here")
        password = one_time_password()
        hashed = self._passwords.hash_one_time(password)
        async with self.store.change() as connection:
            await rows.set_password(connection, name, hashed, must_change=True)
            await rows.end_matching_sessions(connection, user_name=name)
            await raise_version(connection)
            await audit.add(connection, by, "user reset", target=name)
        return password

    async def is_one_time(self, name: str, password: str) -> bool:
        """Whether this is the one-time password of a user who has not chosen another one."""
        async with self.store.reading() as connection:
            user = await rows.find_user(connection, name)
        return user is not None and user.must_change and self._passwords.matches_one_time(password, user.password_hash)

    async def set_role(self, name: str, role: str, *, by: Actor | None = None) -> None:
        """Applies from the user's next request. Raises AccountError, also for the last admin."""
        _check_role(role)
        async with self.store.change() as connection:
            _check_local(await _user(connection, name), "has the role that the provider says")
            await _check_not_last_admin(connection, name, "stays an admin", but_if=role == "admin")
            await rows.set_role(connection, name, role)
            await raise_version(connection)
            await audit.add(connection, by, "user role", target=name, detail=role)

    async def remove(self, name: str, *, by: Actor | None = None) -> None:
        """Removes a user and the user's sessions. Raises AccountError, also for the last admin."""
        async with self.store.change() as connection:
            await _check_not_last_admin(connection, name, "can't be removed")
            await rows.remove(connection, name)
            await raise_version(connection)
            await audit.add(connection, by, "user remove", target=name)

    async def user(self, name: str) -> User:
        """The user with this name. Raises AccountError."""
        async with self.store.reading() as connection:
            return await _user(connection, name)

    # -- sessions

    async def log_in(self, name: str, password: str, address: str = "", former: str = "") -> str | None:
        """Checks name and password and returns the id of a new session, for the cookie; None if they are wrong. Either
        way the audit log has an entry. `former`: the id of the browser's session until now, which ends."""
        by = Actor(name, address)
        async with self.store.reading() as connection:
            user = await rows.find_user(connection, name)
        is_right = await self._passwords.matches(password, None if user is None else user.password_hash)
        if user is not None and is_right:
            async with self.store.change() as connection:
                plain = await self._begin_session(connection, user, former=former)
                if plain is not None:
                    await audit.add(connection, by, "logged in")
                    return plain
        await self.store.note(by, "login failed")
        return None

    async def sign_on(self, identity: Identity, address: str = "", former: str = "") -> str:
        """Begins a session of a user who logged in at the provider, and returns its id for the cookie. The user's
        record is created, or gets the rights that the provider says. `former`: as of `log_in`."""
        apps = None if identity.apps is None else msgspec.json.encode(sorted(identity.apps)).decode()
        async with self.store.change() as connection:
            user = await rows.find_subject(connection, identity.subject)
            if user is None:
                user = User(
                    name=await _free_name(connection, identity),
                    password_hash="",
                    role=identity.role,
                    must_change=False,
                    created_at=self._clock(),
                    subject=identity.subject,
                    apps=apps,
                )
                await rows.add(connection, user)
            elif (user.role, user.apps) != (identity.role, apps):
                await rows.set_rights(connection, user.name, identity.role, apps)
            plain = await self._begin_session(connection, user, identity.id_token, former)
            assert plain is not None  # Such users have no password.
            await raise_version(connection)
            await audit.add(
                connection, Actor(user.name, address), "logged in", detail=f"single sign-on: {identity.role}"
            )
        return plain

    async def withdraw(self, subject: str, address: str = "") -> None:
        """The provider gives this user no role, or none any more: ends the user's sessions, if there is a record."""
        async with self.store.change() as connection:
            user = await rows.find_subject(connection, subject)
            if user is not None:
                await rows.end_matching_sessions(connection, user_name=user.name)
                await raise_version(connection)
            by = Actor(subject if user is None else user.name, address)
            await audit.add(connection, by, "login failed", detail="single sign-on: no role")

    async def _begin_session(
        self, connection: AsyncConnection, user: User, id_token: str | None = None, former: str = ""
    ) -> str | None:
        """The id of a new session, which replaces `former`; None: the user was removed, or got another password, since
        it was checked."""
        now_s = self._clock()
        if not await rows.set_login(connection, user, now_s):
            return None
        plain = secrets.token_urlsafe(32)
        await rows.end_matching_sessions(connection, used_before=now_s - IDLE_S, begun_before=now_s - ABSOLUTE_S)
        if former:
            await rows.end_sessions(connection, (_hash(former),))
        await rows.add_session(connection, _hash(plain), user.name, now_s, id_token)
        return plain

    async def id_token(self, session: Session) -> str | None:
        """The ID token of a session that began at the provider."""
        async with self.store.reading() as connection:
            return await rows.find_id_token(connection, session.hash)

    async def session(self, plain: str) -> Session | None:
        """The session with the id `plain`; None if it doesn't exist or has expired."""
        if not plain or len(plain) > 100:
            return None
        async with self.store.reading() as connection:
            row = await rows.find_session(connection, _hash(plain))
        now_s = self._clock()
        if row is None or now_s - row.used_at > IDLE_S or now_s - row.created_at > ABSOLUTE_S:
            return None
        if now_s - max(row.used_at, self._touch_failed_at_s) > _TOUCH_EVERY_S:
            await self._touch(row.hash, now_s)
        csrf = hmac.new(plain.encode(), b"csrf", hashlib.sha256).hexdigest()
        return Session(row.user, row.hash, csrf)

    async def _touch(self, session_hash: str, now_s: float) -> None:
        """Writes the time of last use. While that fails the session is as valid, so pages can still be read. Each
        attempt may take seconds, so it isn't repeated for every page."""
        try:
            async with self.store.change() as connection:
                await rows.touch_session(connection, session_hash, now_s)
        except StoreUnavailable as error:
            self._touch_failed_at_s = now_s
            log.warning("use of a session not written", reason=reason_of(error))

    async def is_open(self, session_hash: str) -> bool:
        """Whether this session still exists: its user wasn't removed or reset, and didn't log out."""
        async with self.store.reading() as connection:
            return await rows.find_session(connection, session_hash) is not None

    async def log_out(self, session: Session, address: str = "") -> None:
        async with self.store.change() as connection:
            await rows.end_sessions(connection, (session.hash,))
            await raise_version(connection)
            await audit.add(connection, Actor(session.user.name, address), "logged out")

    async def change_password(self, session: Session, old: str, new: str, address: str = "") -> str:
        """Changes the user's own password, ends all sessions of the user, and returns the id of a new one: somebody may
        have read the present cookie. Raises AccountError."""
        user, by = session.user, Actor(session.user.name, address)
        _check_local(user, "has no password here")
        if not await self._passwords.matches(old, user.password_hash):
            await self.store.note(by, "login failed", detail="wrong current password")
            raise AccountError("This is not your current password.", "old_password")
        if hmac.compare_digest(old.encode(), new.encode()):
            raise AccountError("This is your current password. Choose a new one.", "new_password")
        fault = fault_of_password(new, user.name)
        if fault is not None:
            raise AccountError(fault, "new_password")
        hashed = await self._passwords.hash(new)
        async with self.store.change() as connection:
            if not await rows.replace_password(connection, user, hashed):
                raise AccountError("Your password was changed meanwhile. Log in again.", "old_password")
            await rows.end_matching_sessions(connection, user_name=user.name)
            plain = await self._begin_session(connection, msgspec.structs.replace(user, password_hash=hashed))
            assert plain is not None
            await raise_version(connection)
            await audit.add(connection, by, "user password", target=user.name)
        return plain


async def _user(connection: AsyncConnection, name: str) -> User:
    user = await rows.find_user(connection, name)
    if user is None:
        raise AccountError(f"There is no user {name}.")
    return user


async def _check_not_last_admin(connection: AsyncConnection, name: str, what: str, *, but_if: bool = False) -> None:
    user = await _user(connection, name)
    # Users of a provider can't log in while it is away, so they don't count.
    others = [
        other
        for other in await rows.list_users(connection)
        if other.role == "admin" and other.subject is None and other.name != name
    ]
    if user.role == "admin" and user.subject is None and not others and not but_if:
        raise AccountError(f"{name} is the only admin, and {what}.")


def _check_local(user: User, what: str) -> None:
    if user.subject is not None:
        raise AccountError(f"{user.name} logs in by single sign-on and {what}.")


async def _free_name(connection: AsyncConnection, identity: Identity) -> str:
    """A name for a new user of the provider. Local names have no colon, so that none can be taken over."""
    name = free = f"sso:{identity.name}"
    subject = identity.subject.encode()
    number = 0
    while await rows.find_user(connection, free) is not None:
        # Somebody at the provider may have chosen the name that this one would get.
        free = f"{name}-{hashlib.sha256(subject + b' ' * number).hexdigest()[:8]}"
        number += 1
    return free


def _check_role(role: str) -> None:
    if role not in ROLES:
        raise AccountError(f"The role must be {' or '.join(ROLES)}.", "role")


def _hash(plain: str) -> str:
    return hashlib.sha256(plain.encode()).hexdigest()
