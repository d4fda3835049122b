"""Changes of the tokens of all apps, and the times of their last use.

This is the base class of Records (records.py), which adds the changes of apps. Only the control plane uses tokens.
"""

import asyncio
import math
import secrets
import string
from collections.abc import Callable, Collection, Sequence
from typing import Final

import msgspec
import structlog
from sqlalchemy.exc import SQLAlchemyError

from redpoll.control.records.checks import RecordConflict, RecordError, check_name
from redpoll.control.records.loaded_records import LoadedRecords
from redpoll.protocol.auth import token_hash
from redpoll.protocol.tokens import MANAGE, SCOPES, Token
from redpoll.store import tokens as token_rows
from redpoll.store.audit import Actor
from redpoll.store.errors import reason_of
from redpoll.store.store import Store

__all__ = ["TOKEN_USE_EVERY_S", "TokenRecords", "check_token", "new_token"]

log = structlog.get_logger(__name__)

_TOKEN_CHARACTERS: Final = string.ascii_letters + string.digits
_TOKEN_PREFIX_CHARS: Final = 8
# `last_used_at` is written at most this often: it only shows people whether a token is still in use.
TOKEN_USE_EVERY_S: Final = 60.0
# How often the uses on other nodes are read, which have no version, and of how long: writes may be late, clocks differ.
READ_USES_EVERY_S: Final = 60.0
_READ_USES_OF_S: Final = 180.0
# Tokens of one app, or for the management, that are valid at a time: each is in the memory of every control plane.
_MAX_TOKENS: Final = 1_000


class TokenRecords(LoadedRecords):
    """Changes of tokens."""

    def __init__(self, store: Store, clock: Callable[[], float]) -> None:
        super().__init__(store, clock)
        # Token id -> time of last use that isn't written yet.
        self._used: dict[str, float] = {}
        self._writing_used: asyncio.Task[None] | None = None
        # When the uses on other nodes were read, on the loop's clock.
        self._uses_read_at = -math.inf

    async def create_token(
        self,
        app_id: str | None,
        name: str,
        scopes: Sequence[str],
        lasts_s: float | None = None,
        *,
        by: Actor | None = None,
    ) -> tuple[Token, str]:
        """Creates a token. Returns it and its plain form, `rp_` and 40 letters and digits, which is not stored.

        `app_id` None: a token for the management of apps, whose one scope is MANAGE. `lasts_s` is its lifetime in
        seconds, None for no end. Raises RecordError.
        """
        if app_id is not None:
            check_token(name, scopes, lasts_s)
        else:
            _check_management_token(name, scopes, lasts_s)
        async with self.edit(by) as edit:
            if app_id is not None:
                self._app(app_id)
            self._check_number(app_id)
            now_s = self._clock()
            token, plain = new_token(app_id, name, scopes, now_s, None if lasts_s is None else now_s + lasts_s)
            await token_rows.add(edit.connection, token)
            edit.tokens = {token.id: app_id}
            await edit.note("token create", app_id or "", name, f"{token.prefix}… {', '.join(token.scopes)}")
        self.take_tokens((token,), (), now_s)
        return token, plain

    def _check_number(self, app_id: str | None) -> None:
        now_s = self._clock()
        valid = sum(1 for token in self.tokens_by_app.get(app_id, {}).values() if now_s < token.ends_at)
        if valid >= _MAX_TOKENS:
            raise RecordConflict(f"there are {valid} valid tokens, the most that there may be: revoke one first")

    def tokens_of(self, app_id: str | None) -> list[Token]:
        """The app's tokens, oldest first, including expired and revoked ones. None: those for the management of apps.
        It is the same list on every node, also while one of them still has a token that is to be forgotten. Raises
        RecordError."""
        if app_id is not None:
            self._app(app_id)
        return sorted(self.kept_tokens(app_id), key=lambda token: (token.created_at, token.id))

    async def revoke_tokens(self, ids: Collection[str], *, by: Actor | None = None) -> list[Token]:
        """Revokes tokens, all or none. A token that was revoked before stays as it is. Raises RecordError."""
        ids = dict.fromkeys(ids)
        async with self.edit(by) as edit:
            by_id = {token.id: token for token in self.tokens.values() if token.id in ids}
            unknown = [token_id for token_id in ids if token_id not in by_id]
            if unknown:
                raise RecordError(f"there is no token with the id {', '.join(unknown)}; nothing was revoked")
            now_s = self._clock()
            await token_rows.revoke(edit.connection, ids, now_s)
            edit.tokens = {token_id: by_id[token_id].app_id for token_id in ids}
            for token_id in ids:
                token = by_id[token_id]
                if token.revoked_at is None:
                    await edit.note("token revoke", token.app_id or "", token.name, f"{token.prefix}…")
        for token_id in ids:
            # Look it up again: its last use may have changed during the write.
            token = self.tokens[by_id[token_id].hash]
            if token.revoked_at is None:
                self._keep_token(msgspec.structs.replace(token, revoked_at=now_s))
        revoked = [self.tokens[by_id[token_id].hash] for token_id in ids]
        self.on_revoked([token.hash for token in revoked])
        return revoked

    def take_tokens(self, added: Collection[Token], revoked: Collection[Token], now_s: float) -> None:
        """Takes tokens into memory that an `edit` has added or revoked at `now_s`. Call it after the commit."""
        for token in added:
            self._keep_token(token)
        for token in revoked:
            self._keep_token(msgspec.structs.replace(self.tokens[token.hash], revoked_at=now_s))
        self._forget_ended({token.app_id for token in added})
        if revoked:
            self.on_revoked([token.hash for token in revoked])

    def token_used(self, token: Token, now_s: float) -> None:
        """Records that a request used the token at Unix time `now_s`. It is written later, at most once a minute."""
        current = self.tokens.get(token.hash)
        if current is None:
            return
        # A negative difference means that the clock was set back; then the time is written too.
        if current.last_used_at is not None and 0 <= now_s - current.last_used_at < TOKEN_USE_EVERY_S:
            return
        self._keep_token(msgspec.structs.replace(current, last_used_at=now_s))
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

    async def sync(self) -> bool:
        changed = await super().sync()
        now_s = asyncio.get_running_loop().time()
        if self._store.shared and now_s - self._uses_read_at >= READ_USES_EVERY_S:
            self._uses_read_at = now_s
            async with self._store.reading() as connection:
                async for used in token_rows.used_since(connection, self._clock() - _READ_USES_OF_S):
                    for hashed, used_at in used:
                        self._take_use(hashed, used_at)
        return changed

    def _take_use(self, hashed: str, used_at: float) -> None:
        token = self.tokens.get(hashed)
        if token is not None and used_at > (token.last_used_at or 0.0):
            self._keep_token(msgspec.structs.replace(token, last_used_at=used_at))

    async def finish(self) -> None:
        """Waits until all times of last use are written. Call it before the store is closed."""
        if self._writing_used is not None:
            await self._writing_used


def check_token(name: str, scopes: Sequence[str], lasts_s: float | None) -> None:
    """Checks a token that is to be created. Raises RecordError."""
    check_name("a token's", name)
    unknown = [repr(scope) for scope in scopes if scope not in SCOPES]
    if unknown or not scopes:
        shown = ", ".join(unknown) or "nothing"
        if MANAGE in scopes:
            shown += f"; a token that manages apps belongs to none of them (redpoll token create --{MANAGE})"
        raise RecordError(f"a token needs one or more of the scopes {', '.join(SCOPES)}, not {shown}")
    _check_lifetime(lasts_s)


def _check_management_token(name: str, scopes: Sequence[str], lasts_s: float | None) -> None:
    check_name("a token's", name)
    if list(scopes) != [MANAGE]:
        raise RecordError(f"a token that belongs to no app has the scope {MANAGE} and no other")
    _check_lifetime(lasts_s)


def _check_lifetime(lasts_s: float | None) -> None:
    if lasts_s is not None and not 0 < lasts_s <= 36_500 * 86_400:
        raise RecordError("a token's lifetime must be more than zero and at most a hundred years")


def new_token(
    app_id: str | None, name: str, scopes: Sequence[str], now_s: float, expires_at: float | None
) -> tuple[Token, str]:
    """A new token and its plain form. Times are Unix seconds."""
    plain = "rp_" + "".join(secrets.choice(_TOKEN_CHARACTERS) for _ in range(40))
    token = Token(
        id=secrets.token_hex(6),
        app_id=app_id,
        name=name,
        hash=token_hash(plain),
        prefix=plain[:_TOKEN_PREFIX_CHARS],
        scopes=tuple(scope for scope in (*SCOPES, MANAGE) if scope in scopes),
        created_at=now_s,
        expires_at=expires_at,
    )
    return token, plain
