"""The token records of all apps, in memory for checking requests, changed through the record store.

This is the base class of Records (records.py), which adds the apps. Only the control plane uses tokens.
"""

import asyncio
import secrets
import string
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from contextlib import asynccontextmanager
from typing import Final

import msgspec
import structlog
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncConnection

from redpoll.control.records.checks import RecordError, check_name
from redpoll.protocol.apps import App
from redpoll.protocol.auth import token_hash
from redpoll.protocol.tokens import SCOPES, Token
from redpoll.store import tokens as token_rows
from redpoll.store.sqlite import reason_of
from redpoll.store.store import Store, Versions, raise_version

__all__ = ["TOKEN_USE_EVERY_S", "TokenRecords"]

log = structlog.get_logger(__name__)

_TOKEN_CHARACTERS: Final = string.ascii_letters + string.digits
_TOKEN_PREFIX_CHARS: Final = 8
# `last_used_at` is written at most this often: it only shows people whether a token is still in use.
TOKEN_USE_EVERY_S: Final = 60.0
# Tokens that ended longer ago are removed; requests with them then get `unauthorized` instead of `token_expired`.
_FORGET_TOKEN_AFTER_S: Final = 90 * 86_400


def _ignore(hashes: Collection[str]) -> None:
    pass


def _always() -> bool:
    return True


class TokenRecords:
    """All tokens by the hash of their plain form. `changing` is the lock that all changes of records share."""

    def __init__(self, store: Store, clock: Callable[[], float], changing: asyncio.Lock) -> None:
        self.apps: dict[str, App] = {}
        # The store's versions up to which memory has all changes.
        self.known = Versions(0, 0, "", "")
        self.tokens: dict[str, Token] = {}
        # Redis has brought changes that the store may have lost when it answers again: then all is read from it.
        self._has_more = False
        # Takes the hashes of tokens that were revoked, by another control plane too.
        self.on_revoked: Callable[[Collection[str]], None] = _ignore
        # Whether revocations by other control planes are known here.
        self.is_current: Callable[[], bool] = _always
        self._store = store
        self._clock = clock
        self._changing = changing
        # Token id -> time of last use that isn't written yet.
        self._used: dict[str, float] = {}
        self._writing_used: asyncio.Task[None] | None = None

    @asynccontextmanager
    async def _change(self) -> AsyncIterator[AsyncConnection]:
        """A transaction, with memory as the store is. The caller holds `changing`."""
        async with self._store.change() as connection:
            if self._store.shared:
                await self._catch_up(connection)
            yield connection

    async def _catch_up(self, connection: AsyncConnection) -> bool:
        """Takes what other control planes have changed. Returns whether there was anything."""
        raise NotImplementedError

    def _take_token(self, token: Token) -> bool:
        """Takes a token that another control plane has changed. Returns whether it has revoked it."""
        known = self.tokens.get(token.hash, token)
        used_at = max(known.last_used_at or 0.0, token.last_used_at or 0.0) or None
        self.tokens[token.hash] = msgspec.structs.replace(token, last_used_at=used_at)
        return token.revoked_at is not None and (known is token or known.revoked_at is None)

    def take_revoked(self, hashes: Collection[str]) -> None:
        """Takes revocations from Redis, while the store doesn't answer."""
        for one in hashes:
            token = self.tokens.get(one)
            if token is not None and token.revoked_at is None:
                self.tokens[token.hash] = msgspec.structs.replace(token, revoked_at=self._clock())
                self._has_more = True

    async def create_token(
        self, app_id: str, name: str, scopes: Sequence[str], lasts_s: float | None = None
    ) -> tuple[Token, str]:
        """Creates a token. Returns it and its plain form, `rp_` and 40 letters and digits, which is not stored.

        `lasts_s` is its lifetime in seconds, None for no end. Raises RecordError.
        """
        check_name("a token's", name)
        unknown = [repr(scope) for scope in scopes if scope not in SCOPES]
        if unknown or not scopes:
            given = ", ".join(unknown) or "nothing"
            raise RecordError(f"a token needs one or more of the scopes {', '.join(SCOPES)}, not {given}")
        if lasts_s is not None and not 0 < lasts_s <= 36_500 * 86_400:
            raise RecordError("a token's lifetime must be more than zero and at most a hundred years")
        plain = "rp_" + "".join(secrets.choice(_TOKEN_CHARACTERS) for _ in range(40))
        async with self._changing:
            async with self._change() as connection:
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
                ended = [known for known in self.tokens.values() if _ended_at(known) < now_s - _FORGET_TOKEN_AFTER_S]
                await token_rows.add(connection, token)
                await token_rows.remove(connection, [known.id for known in ended])
                version = await raise_version(connection, tokens=(token.id,))
            for known in ended:
                del self.tokens[known.hash]
            self.tokens[token.hash] = token
            self.known = version
            return token, plain

    def tokens_of(self, app_id: str) -> list[Token]:
        """The app's tokens, oldest first, including expired and revoked ones. Raises RecordError."""
        self._app(app_id)
        return [token for token in self.tokens.values() if token.app_id == app_id]

    async def revoke_tokens(self, ids: Collection[str]) -> list[Token]:
        """Revokes tokens, all or none. A token that was revoked before stays as it is. Raises RecordError."""
        async with self._changing:
            async with self._change() as connection:
                by_id = {token.id: token for token in self.tokens.values()}
                unknown = [token_id for token_id in ids if token_id not in by_id]
                if unknown:
                    raise RecordError(f"there is no token with the id {', '.join(unknown)}; nothing was revoked")
                now_s = self._clock()
                await token_rows.revoke(connection, ids, now_s)
                version = await raise_version(connection, tokens=ids)
            self.known = version
            for token_id in ids:
                # Look it up again: its last use may have changed during the write.
                token = self.tokens[by_id[token_id].hash]
                if token.revoked_at is None:
                    self.tokens[token.hash] = msgspec.structs.replace(token, revoked_at=now_s)
            revoked = [self.tokens[by_id[token_id].hash] for token_id in ids]
            self.on_revoked([token.hash for token in revoked])
            return revoked

    def token_used(self, token: Token, now_s: float) -> None:
        """Records that a request used the token at Unix time `now_s`. It is written later, at most once a minute."""
        current = self.tokens.get(token.hash)
        if current is None:
            return
        # A negative difference means that the clock was set back; then the time is written too.
        if current.last_used_at is not None and 0 <= now_s - current.last_used_at < TOKEN_USE_EVERY_S:
            return
        self.tokens[current.hash] = msgspec.structs.replace(current, last_used_at=now_s)
        self._used[current.id] = now_s
        if self._writing_used is None or self._writing_used.done():
            self._writing_used = asyncio.create_task(self._write_used(), name="token use")

    async def _write_used(self) -> None:
        while self._used:
            async with self._changing:
                times, self._used = self._used, {}
                try:
                    async with self._store.change() as connection:
                        await token_rows.set_last_used(connection, times)
                except SQLAlchemyError as error:
                    log.warning("token use not written", tokens=len(times), reason=reason_of(error))

    async def finish(self) -> None:
        """Waits until all times of last use are written. Call it before the store is closed."""
        if self._writing_used is not None:
            await self._writing_used

    def _app(self, app_id: str) -> App:
        app = self.apps.get(app_id)
        if app is None:
            raise RecordError(f"there is no app with the id {app_id}")
        return app


def _ended_at(token: Token) -> float:
    """When the token expired, expires or was revoked; infinity if it has no end."""
    ends = [at for at in (token.expires_at, token.revoked_at) if at is not None]
    return min(ends, default=float("inf"))
