"""The records as the control plane works with them: in memory to read, through the store to change.

The one place that writes records, so a version is raised with every change and nobody hears of changes out of
order. Knows nothing of Redis: `on_change` carries the news there. Tokens stay here: only the control plane reads them.
"""

import asyncio
import re
import secrets
import string
import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Final

import msgspec
import structlog
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncConnection

from redpoll.protocol.apps import App, Key, Value
from redpoll.protocol.auth import token_hash
from redpoll.protocol.presence import MAX_USER_ID_CHARS
from redpoll.protocol.tokens import SCOPES, Token
from redpoll.settings import Settings
from redpoll.store import apps as app_rows
from redpoll.store import daily
from redpoll.store import tokens as token_rows
from redpoll.store.store import Store, directory_version, raise_directory_version

__all__ = ["TOKEN_USE_EVERY_S", "RecordError", "Records"]

log = structlog.get_logger(__name__)

_FIRST_APP_NAME: Final = "first app"
# What has a meaning in PUSHER_URL (`:` `/` `@`) or in a signature's `KEY:HEX` can't be in a key.
_KEY = re.compile(r"[A-Za-z0-9_-]{1,128}").fullmatch
# What the directory takes of one app (cluster.md 7).
_MAX_RECORD_BYTES: Final = 16 * 1024

# Somebody who changes keys every week must not come to the end of the record.
_KEEP_DISABLED_KEYS: Final = 10

_TOKEN_CHARACTERS: Final = string.ascii_letters + string.digits
_TOKEN_PREFIX_CHARS: Final = 8
# `last_used_at` is for people who wonder whether a token is still in use: a minute is near enough.
TOKEN_USE_EVERY_S: Final = 60.0
# Who calls with a token that ended longer ago is told that there is none, not when it ended.
_FORGET_TOKEN_AFTER_S: Final = 90 * 86_400
_KEEP_DAYS: Final = 31


class RecordError(Exception):
    """A change that can't be made. The text is a sentence for whoever asked for it."""


class Records:
    """Every app, by id and by key, every token by the hash of its plain form, and the version of the apps.

    `max_owed_bytes` is the setting of that name: half of it must hold the roster of a full presence channel.
    `on_change(app_id, app or None where it is gone, version)` is awaited after each commit, one at a time, in
    order. It must not raise: the change is made already, and who can't be told now reads everything later.
    """

    def __init__(
        self,
        store: Store,
        *,
        max_owed_bytes: int = Settings().max_owed_bytes,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.apps: dict[str, App] = {}
        self.by_key: dict[str, App] = {}
        self.tokens: dict[str, Token] = {}
        self.version = 0
        self.on_change: Callable[[str, App | None, int], Awaitable[None]] | None = None
        self._store = store
        self._max_roster_bytes = max_owed_bytes // 2
        self._clock = clock
        self._changing = asyncio.Lock()
        # Token id -> when it was used, not yet written.
        self._used: dict[str, float] = {}
        self._writing_used: asyncio.Task[None] | None = None

    async def load(self) -> None:
        """Reads everything; call it once before anything else."""
        async with self._store.reading() as connection:
            self.apps.update(await app_rows.every(connection))
            self.tokens.update(await token_rows.every(connection))
            self.version = await directory_version(connection)
        self.by_key.update({key.key: app for app in self.apps.values() for key in app.keys})

    async def first_app(self, settings: Settings) -> App | None:
        """What a start does: brings the app of the settings up to date, or fills an empty store with one.

        Returns the app that was made up, for the operator to be told of; None where there was nothing to make
        up. Raises RecordError where the settings' key is another app's.
        """
        if settings.app_id:
            await self.upsert_app(settings.app_id, settings.app_key, settings.app_secret)
            return None
        if self.apps:
            return None
        return await self.create_app(_FIRST_APP_NAME)

    async def create_app(self, name: str) -> App:
        """A new app with a fresh id (7 digits), key (20 hex digits) and secret (40). Raises RecordError."""
        _check_name("an app's", name)
        async with self._changing:
            app_id = str(secrets.randbelow(9_000_000) + 1_000_000)
            while app_id in self.apps:
                app_id = str(secrets.randbelow(9_000_000) + 1_000_000)
            app = App(id=app_id, name=name, keys=(Key(key=secrets.token_hex(10), secret=secrets.token_hex(20)),))
            async with self._store.change() as connection:
                await app_rows.add(connection, app)
                version = await raise_directory_version(connection)
            await self._changed(app, version)
            return app

    async def upsert_app(self, app_id: str, key: str, secret: str) -> App:
        """Makes sure that this app has this key with this secret; nothing is written where it has.

        A key that came this way before and is another now is removed; keys made by command stay.
        Raises RecordError where the key is another app's.
        """
        async with self._changing:
            owner = self.by_key.get(key)
            if owner is not None and owner.id != app_id:
                raise RecordError(f"key {key} belongs to app {owner.id} and can't be given to app {app_id}")
            async with self._store.change() as connection:
                if not await self._write_given(connection, app_id, Key(key=key, secret=secret)):
                    return self.apps[app_id]
                version = await raise_directory_version(connection)
                app = await app_rows.one(connection, app_id)
            assert app is not None
            await self._changed(app, version)
            return app

    async def _write_given(self, connection: AsyncConnection, app_id: str, key: Key) -> bool:
        """The steps of `upsert_app` inside its transaction. Says whether anything was written."""
        known = self.apps.get(app_id)
        if known is None:
            await app_rows.add(connection, App(id=app_id, name=f"app {app_id}", keys=(key,)), given=True)
            return True
        removed = await app_rows.remove_given_keys(connection, app_id, but=key.key)
        held = next((each for each in known.keys if each.key == key.key), None)
        if held is None:
            await app_rows.add_key(connection, app_id, key, given=True)
        elif held != msgspec.structs.replace(held, secret=key.secret):
            await app_rows.set_secret(connection, key.key, key.secret)
        else:
            return removed > 0
        return True

    # -- settings and keys of an app

    async def set_app(self, app_id: str, values: Mapping[str, Value]) -> App:
        """Changes settings of an app, all or none; `values` are what `parse_setting` made. Raises RecordError."""
        async with self._changing:
            before = self._app(app_id)
            app = msgspec.structs.replace(before, **values)
            if app == before:
                return app
            self._check_roster(app)
            _check_size(app)
            async with self._store.change() as connection:
                await app_rows.set_settings(connection, app)
                version = await raise_directory_version(connection)
            await self._changed(app, version)
            return app

    async def add_key(self, app_id: str, key: str | None = None) -> Key:
        """One more key beside those that the app has; 20 hex digits where none is given. Raises RecordError.

        A disabled key of the app is enabled again, with the secret it had: the way back from a rotation. Of those
        that stay disabled, the youngest ten are kept.
        """
        if key is not None and not _KEY(key):
            raise RecordError("a key holds letters, digits, `-` and `_` only, at most 128")
        async with self._changing:
            app = self._app(app_id)
            held = _key_of(app, key) if key is not None else None
            if held is not None and held.enabled:
                raise RecordError(f"app {app_id} has the key {key} already")
            if held is None and key in self.by_key:
                raise RecordError(f"key {key} belongs to app {self.by_key[key].id}")
            made = Key(key=key or secrets.token_hex(10), secret=held.secret if held else secrets.token_hex(20))
            if held is None:
                _check_size(msgspec.structs.replace(app, keys=(*app.keys, made)))
            disabled = [each.key for each in app.keys if not each.enabled and each is not held]
            async with self._store.change() as connection:
                await app_rows.remove_keys(connection, disabled[:-_KEEP_DISABLED_KEYS])
                if held is None:
                    await app_rows.add_key(connection, app_id, made, given=False)
                else:
                    await app_rows.enable_key(connection, made.key, True)
                version = await raise_directory_version(connection)
                changed = await app_rows.one(connection, app_id)
            assert changed is not None
            await self._changed(changed, version)
            return made

    async def disable_key(self, app_id: str, key: str) -> Key:
        """From now on the key opens and signs nothing new; sockets that it opened stay. Raises RecordError.

        The last enabled key stays: an app that nobody can reach is one that is switched off, and says so.
        """
        async with self._changing:
            app = self._app(app_id)
            held = _key_of(app, key)
            if held is None:
                raise RecordError(f"app {app_id} has no key {key}")
            if not held.enabled:
                return held
            if not any(each.enabled for each in app.keys if each is not held):
                raise RecordError(
                    f"{key} is the last enabled key of app {app_id}: add another one first "
                    f"(redpoll key add {app_id}), or switch the app off (redpoll app set {app_id} enabled=false)"
                )
            async with self._store.change() as connection:
                await app_rows.enable_key(connection, key, False)
                version = await raise_directory_version(connection)
                changed = await app_rows.one(connection, app_id)
            assert changed is not None
            await self._changed(changed, version)
            return msgspec.structs.replace(held, enabled=False)

    def _app(self, app_id: str) -> App:
        app = self.apps.get(app_id)
        if app is None:
            raise RecordError(f"there is no app with the id {app_id}")
        return app

    def _check_roster(self, app: App) -> None:
        """A roster goes out as one message, and what is owed beyond the bound costs the client its socket."""
        member_bytes = app.max_user_info_bytes + MAX_USER_ID_CHARS
        if app.max_presence_members * member_bytes > self._max_roster_bytes:
            raise RecordError(
                f"{app.max_presence_members} members of {member_bytes} bytes (max_user_info_bytes and an id of "
                f"{MAX_USER_ID_CHARS}) do not fit into {self._max_roster_bytes} bytes, half of max_owed_bytes"
            )

    # -- tokens

    async def create_token(
        self, app_id: str, name: str, scopes: Sequence[str], lasts_s: float | None = None
    ) -> tuple[Token, str]:
        """A new token and its plain form, `rp_` and 40 letters and digits, which is kept nowhere.

        `lasts_s` None: until it is revoked. Raises RecordError.
        """
        _check_name("a token's", name)
        wrong = [repr(scope) for scope in scopes if scope not in SCOPES]
        if wrong or not scopes:
            given = ", ".join(wrong) or "nothing"
            raise RecordError(f"a token has one scope or more out of {', '.join(SCOPES)}, not {given}")
        if lasts_s is not None and not 0 < lasts_s <= 36_500 * 86_400:
            raise RecordError("a token lasts more than no time, and at most a hundred years")
        plain = "rp_" + "".join(secrets.choice(_TOKEN_CHARACTERS) for _ in range(40))
        async with self._changing:
            self._app(app_id)
            now_s = self._clock()
            token = Token(
                id=secrets.token_hex(6),
                app_id=app_id,
                name=name,
                hash=token_hash(plain),
                prefix=plain[:_TOKEN_PREFIX_CHARS],
                scopes=tuple(scope for scope in SCOPES if scope in scopes),
                created_at=now_s,
                expires_at=None if lasts_s is None else now_s + lasts_s,
            )
            ended = [each for each in self.tokens.values() if _ended_at(each) < now_s - _FORGET_TOKEN_AFTER_S]
            async with self._store.change() as connection:
                await token_rows.add(connection, token)
                await token_rows.forget(connection, [each.id for each in ended])
            for each in ended:
                del self.tokens[each.hash]
            self.tokens[token.hash] = token
            return token, plain

    def tokens_of(self, app_id: str) -> list[Token]:
        """The app's tokens, oldest first, those that ended too. Raises RecordError."""
        self._app(app_id)
        return [token for token in self.tokens.values() if token.app_id == app_id]

    async def revoke_tokens(self, ids: Collection[str]) -> list[Token]:
        """Ends tokens at once, all or none; one that was revoked before stays as it is. Raises RecordError."""
        async with self._changing:
            by_id = {token.id: token for token in self.tokens.values()}
            unknown = [each for each in ids if each not in by_id]
            if unknown:
                raise RecordError(f"there is no token with the id {', '.join(unknown)}; nothing was revoked")
            now_s = self._clock()
            async with self._store.change() as connection:
                await token_rows.revoke(connection, ids, now_s)
            for each in ids:
                # Read anew: it may have been used while the store wrote.
                token = self.tokens[by_id[each].hash]
                if token.revoked_at is None:
                    self.tokens[token.hash] = msgspec.structs.replace(token, revoked_at=now_s)
            return [self.tokens[by_id[each].hash] for each in ids]

    def token_used(self, token: Token, now_s: float) -> None:
        """A call was let in with it at Unix time `now_s`; written behind the call, at most once a minute."""
        held = self.tokens.get(token.hash)
        if held is None:
            return
        # A clock set back must not keep the time of last use in the future.
        if held.last_used_at is not None and 0 <= now_s - held.last_used_at < TOKEN_USE_EVERY_S:
            return
        self.tokens[held.hash] = msgspec.structs.replace(held, last_used_at=now_s)
        self._used[held.id] = now_s
        if self._writing_used is None or self._writing_used.done():
            self._writing_used = asyncio.create_task(self._write_used(), name="token use")

    async def _write_used(self) -> None:
        while self._used:
            async with self._changing:
                times, self._used = self._used, {}
                try:
                    async with self._store.change() as connection:
                        await token_rows.used(connection, times)
                except SQLAlchemyError as error:
                    log.warning("last use of tokens not written", tokens=len(times), reason=str(error))

    # -- daily counters

    async def daily_used(self, day: str) -> dict[str, int]:
        """What each app had used on `day` (YYYYMMDD, UTC) by the copy kept here."""
        async with self._store.reading() as connection:
            return await daily.read(connection, day)

    async def keep_daily(self, day: str, used: Mapping[str, int]) -> None:
        """Keeps counters of `day`, the greater of each and what stands there. Raises SQLAlchemyError."""
        oldest = (datetime.strptime(day, "%Y%m%d") - timedelta(days=_KEEP_DAYS)).strftime("%Y%m%d")
        async with self._changing, self._store.change() as connection:
            await daily.put(connection, day, {app: count for app, count in used.items() if app in self.apps})
            await daily.forget_before(connection, oldest)

    async def finish(self) -> None:
        """Waits for what is written behind the calls; call it before the store is closed."""
        if self._writing_used is not None:
            await self._writing_used

    async def _changed(self, app: App, version: int) -> None:
        before = self.apps.get(app.id)
        for key in before.keys if before is not None else ():
            del self.by_key[key.key]
        self.apps[app.id] = app
        self.by_key.update({key.key: app for key in app.keys})
        self.version = version
        if self.on_change is not None:
            await self.on_change(app.id, app, version)


def _check_name(whose: str, name: str) -> None:
    if not name.strip() or len(name) > 200 or not name.isprintable():
        raise RecordError(f"{whose} name is 1 to 200 printable characters")


def _check_size(app: App) -> None:
    size = len(msgspec.json.encode(app))
    if size > _MAX_RECORD_BYTES:
        raise RecordError(f"with that, app {app.id} would have {size} bytes; every worker keeps {_MAX_RECORD_BYTES}")


def _key_of(app: App, key: str) -> Key | None:
    return next((each for each in app.keys if each.key == key), None)


def _ended_at(token: Token) -> float:
    """When it opened something for the last time; infinite while it still does, or may."""
    ends = [at for at in (token.expires_at, token.revoked_at) if at is not None]
    return min(ends, default=float("inf"))
