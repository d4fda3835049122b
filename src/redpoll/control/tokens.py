"""The tokens of all apps: in memory to judge calls by, through the store to change. Only the control plane reads them.

A part of the records (records.py), which makes it whole: the apps that tokens are of, and the lock of all changes.
"""

import asyncio
import secrets
import string
from collections.abc import Callable, Collection, Sequence
from typing import Final

import msgspec
import structlog
from sqlalchemy.exc import SQLAlchemyError

from redpoll.control.record_checks import RecordError, check_name
from redpoll.protocol.apps import App
from redpoll.protocol.auth import token_hash
from redpoll.protocol.tokens import SCOPES, Token
from redpoll.store import tokens as token_rows
from redpoll.store.sqlite import reason_of
from redpoll.store.store import Store

__all__ = ["TOKEN_USE_EVERY_S", "TokenRecords"]

log = structlog.get_logger(__name__)

_TOKEN_CHARACTERS: Final = string.ascii_letters + string.digits
_TOKEN_PREFIX_CHARS: Final = 8
# `last_used_at` is for people who wonder whether a token is still in use: a minute is near enough.
TOKEN_USE_EVERY_S: Final = 60.0
# Who calls with a token that ended longer ago is told that there is none, not when it ended.
_FORGET_TOKEN_AFTER_S: Final = 90 * 86_400


class TokenRecords:
    """Every token by the hash of its plain form. Changes wait for `changing`, one for all of a store's records."""

    def __init__(self, store: Store, clock: Callable[[], float], changing: asyncio.Lock) -> None:
        self.apps: dict[str, App] = {}
        self.tokens: dict[str, Token] = {}
        self._store = store
        self._clock = clock
        self._changing = changing
        # Token id -> when it was used, not yet written.
        self._used: dict[str, float] = {}
        self._writing_used: asyncio.Task[None] | None = None

    async def create_token(
        self, app_id: str, name: str, scopes: Sequence[str], lasts_s: float | None = None
    ) -> tuple[Token, str]:
        """A new token and its plain form, `rp_` and 40 letters and digits, which is kept nowhere.

        `lasts_s` None: until it is revoked. Raises RecordError.
        """
        check_name("a token's", name)
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
                    log.warning("last use of tokens not written", tokens=len(times), reason=reason_of(error))

    async def finish(self) -> None:
        """Waits for what is written behind the calls; call it before the store is closed."""
        if self._writing_used is not None:
            await self._writing_used

    def _app(self, app_id: str) -> App:
        app = self.apps.get(app_id)
        if app is None:
            raise RecordError(f"there is no app with the id {app_id}")
        return app


def _ended_at(token: Token) -> float:
    """When it opened something for the last time; infinite while it still does, or may."""
    ends = [at for at in (token.expires_at, token.revoked_at) if at is not None]
    return min(ends, default=float("inf"))
