"""The records that a control plane has in memory, how they follow the record store, and how one change is made.

Other control planes may share the store. Their changes are the rows with a greater version than ours; if the store
lost changes that we had read, all records are read again (store/README.md "Changes"). tokens.py and records.py make
changes, each in an `edit`.
"""

import asyncio
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping
from contextlib import asynccontextmanager, suppress
from enum import Enum
from typing import Final

import msgspec
import structlog
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncConnection

from redpoll.cluster.directory import DirectoryVersion
from redpoll.control.records.checks import RecordError
from redpoll.protocol.apps import App
from redpoll.protocol.tokens import Token
from redpoll.store import apps as app_rows
from redpoll.store import audit
from redpoll.store import tokens as token_rows
from redpoll.store import webhooks as endpoint_rows
from redpoll.store.audit import Actor
from redpoll.store.store import Store, Versions, has_version, raise_version, versions
from redpoll.store.webhooks import Endpoint

__all__ = ["Edit", "LoadedRecords", "Origin"]

log = structlog.get_logger(__name__)

# Tokens that ended longer ago are removed; requests with them then get `unauthorized` instead of `token_expired`.
_FORGET_TOKEN_AFTER_S: Final = 90 * 86_400
# So are, of more expired tokens of one app, the oldest. A page may get a token of some minutes for each visitor.
MAX_EXPIRED: Final = 1_000


def _ignore(hashes: Collection[str]) -> None:
    pass


def _nothing() -> None:
    pass


def _always() -> bool:
    return True


class Origin(Enum):
    """Where endpoints that memory takes come from."""

    HERE = "changed by this control plane"
    OTHERS = "changed by others"
    STORE = "all that the store has"


class Edit:
    """A change that is being made in the transaction `connection`.

    Its block writes the rows and says here what changed: `app`, or several `apps` by id, as memory and the directory
    get them, `deleted` apps by id, the app ids of `tokens` by token id, and webhook `endpoints`. If it sets none of
    these, nothing has changed. `note` adds a row to the audit log.
    """

    __slots__ = ("_by", "app", "apps", "connection", "deleted", "endpoints", "tokens")

    def __init__(self, connection: AsyncConnection, by: Actor | None) -> None:
        self.connection = connection
        self.app: App | None = None
        self.apps: Mapping[str, App] = {}
        self.deleted: Collection[str] = ()
        self.tokens: Mapping[str, str | None] = {}
        self.endpoints: Collection[Endpoint] = ()
        self._by = by

    async def note(self, action: str, app_id: str, target: str, detail: str = "") -> None:
        await audit.add(self.connection, self._by, action, app_id, target, detail)


class LoadedRecords:
    """Apps by id and by key, tokens by hash, and by app: None for those of no app.

    `directory` is the version that the app directory in Redis should have. `on_change(app_id, app, before, after)` is
    awaited after each commit of this process, in order, with that version before and after; `app` None: it was deleted.
    It must not raise, because the change is committed already.
    """

    def __init__(self, store: Store, clock: Callable[[], float]) -> None:
        self.apps: dict[str, App] = {}
        self.by_key: dict[str, App] = {}
        self.tokens: dict[str, Token] = {}
        # The same ones: to look for those of an app among all would hold up the publishes.
        self.tokens_by_app: dict[str | None, dict[str, Token]] = {}
        # No token of `tokens` has ended before this time.
        self._first_end = math.inf
        # The store's versions up to which memory has all changes.
        self.known = Versions(0, 0, "", "")
        self.directory = DirectoryVersion(0)
        # Takes webhook endpoints that were changed.
        self.on_endpoints: Callable[[Mapping[str, Endpoint], Origin], None] | None = None
        self.on_change: Callable[[str, App | None, DirectoryVersion, DirectoryVersion], Awaitable[None]] | None = None
        # Called after a commit of this process that changed several apps.
        self.on_changes: Callable[[], None] = _nothing
        # Takes each app that was created or changed, by another control plane too; None: it was deleted.
        self.on_put: Callable[[str, App | None], None] | None = None
        # Takes the hashes of tokens that were revoked, or went with their app, by another control plane too.
        self.on_revoked: Callable[[Collection[str]], None] = _ignore
        # Takes the directory's version after the store lost changes, because it may be lower than before.
        self.on_rewound: Callable[[int], None] | None = None
        # Whether revocations by other control planes are known here.
        self.is_current: Callable[[], bool] = _always
        # The store may have less than we, or more: Redis has brought changes that it may have lost when it answers
        # again, or a commit has failed. Then all is read from it.
        self._has_more = False
        self._store = store
        self._clock = clock
        # Changes are made one at a time, and memory has each before the next begins.
        self._changing = asyncio.Lock()

    @property
    def version(self) -> int:
        """The number of the directory's version."""
        return self.directory.number

    async def load(self) -> None:
        """Reads all records. Call it once, before anything else."""
        async with self._store.reading() as connection:
            self.apps.update(await app_rows.all_by_id(connection))
            for token in (await token_rows.all_by_hash(connection)).values():
                self._keep_token(token)
            self._set_versions(await versions(connection))
        self.by_key.update({key.key: app for app in self.apps.values() for key in app.keys})

    @asynccontextmanager
    async def edit(self, by: Actor | None) -> AsyncIterator[Edit]:
        """One change of records by this person; None: by the server itself, which the audit log doesn't show.

        What the block writes, the versions and the rows of the audit log are one transaction. It begins with what other
        control planes have changed, and is rolled back if the block raises. When the `async with` ends, the change is
        committed, memory has its apps and endpoints, and `on_change` was called. What the caller does next, before it
        waits for anything, no other change can come before.
        """
        async with self._changing:
            ends = False
            try:
                async with self._store.change() as connection:
                    if self._store.shared or self._has_more:
                        await self._catch_up(connection)
                    if by is not None and by.condition is not None:
                        by.condition()
                    edit = Edit(connection, by)
                    yield edit
                    apps: dict[str, App | None] = {**edit.apps} if edit.app is None else {edit.app.id: edit.app}
                    apps |= dict.fromkeys(edit.deleted)
                    endpoints = {endpoint.id: endpoint for endpoint in edit.endpoints}
                    if not apps and not edit.tokens and not endpoints:
                        return
                    if edit.tokens:
                        await self._remove_ended(connection, set(edit.tokens.values()))
                    stored = await raise_version(
                        connection, apps=apps, tokens=edit.tokens, webhooks=endpoints, for_workers=bool(apps)
                    )
                    ends = True
            except BaseException:
                if ends:
                    await self._find_out()
                raise
            await self._take(apps, endpoints, stored)

    async def _take(self, apps: Mapping[str, App | None], endpoints: Mapping[str, Endpoint], stored: Versions) -> None:
        """Takes a committed change into memory, before workers see it: what they do then needs the endpoints."""
        before = self.directory
        removed = self._remove([app_id for app_id, app in apps.items() if app is None])
        for app in apps.values():
            if app is not None:
                self._put(app)
        if endpoints and self.on_endpoints is not None:
            self.on_endpoints(endpoints, Origin.HERE)
        if not apps:
            self.known = stored
            return
        self._set_versions(stored)
        if removed:
            self.on_revoked(removed)
        if len(apps) > 1:
            self.on_changes()
        elif self.on_change is not None:
            ((app_id, app),) = apps.items()
            await self.on_change(app_id, app, before, self.directory)

    async def _find_out(self) -> None:
        """The end of a transaction failed, or was cancelled. It may be committed: takes what the store has, now if it
        answers, else before the next change."""
        self._has_more = True
        before = self.directory
        with suppress(SQLAlchemyError):
            async with self._store.reading() as connection:
                await self._catch_up(connection)
        if self.directory != before:
            self.on_changes()

    async def sync(self) -> bool:
        """Takes what other control planes have changed. Returns whether there was anything. Raises SQLAlchemyError."""
        if not self._store.shared:
            return False
        async with self._changing, self._store.reading() as connection:
            return await self._catch_up(connection)

    def adopt_directory(self, version: DirectoryVersion, apps: Mapping[str, App]) -> None:
        """Takes the app records, all that there are, from Redis, which has newer ones, while the store doesn't answer.
        Everything is read from the store later, which may have lost them in a fail-over."""
        self._remove(self.apps.keys() - apps.keys())
        for app in apps.values():
            if app != self.apps.get(app.id):
                self._put(app)
        self.directory = version
        self._has_more = True

    def forget_revoked(self, hashes: Collection[str]) -> None:
        """Takes revocations from Redis, while the store doesn't answer."""
        for one in hashes:
            token = self.tokens.get(one)
            if token is not None and token.revoked_at is None:
                self._keep_token(msgspec.structs.replace(token, revoked_at=self._clock()))
                self._has_more = True

    async def _catch_up(self, connection: AsyncConnection) -> bool:
        stored = await versions(connection)
        if stored == self.known and not self._has_more:
            return False
        # An earlier redpoll stores no ids, so all is read after its changes.
        follows = not self._has_more and await has_version(connection, self.known)
        since = self.known.records if follows else None
        apps = await app_rows.all_by_id(connection, since)
        tokens = await token_rows.all_by_hash(connection, since)
        endpoints = await endpoint_rows.all_by_id(connection, since)
        deleted = [] if since is None else await app_rows.deleted_since(connection, since)
        is_older = stored.directory < self.version
        # All at once: readers of memory see one state.
        revoked = self._remove(self.apps.keys() - apps.keys() if since is None else deleted)
        if since is None:
            for token_hash in self.tokens.keys() - tokens.keys():
                self._drop_token(token_hash)
        for app in apps.values():
            known = self.apps.get(app.id, app)
            self._put(msgspec.structs.replace(app, hooks=known.hooks))
        revoked += [token.hash for token in tokens.values() if self._put_token(token)]
        if tokens:
            self._forget_ended({token.app_id for token in tokens.values()})
        if self.on_endpoints is not None:
            self.on_endpoints(endpoints, Origin.STORE if since is None else Origin.OTHERS)
        self._set_versions(stored)
        self._has_more = False
        if revoked:
            self.on_revoked(revoked)
        if since is None:
            log.warning(
                "the record store was away, or its changes can't be followed: all records read", version=self.version
            )
        if is_older and self.on_rewound is not None:
            self.on_rewound(self.version)
        return True

    def _keep_token(self, token: Token) -> None:
        self.tokens[token.hash] = token
        self.tokens_by_app.setdefault(token.app_id, {})[token.hash] = token
        self._first_end = min(self._first_end, token.ends_at)

    def _drop_token(self, token_hash: str) -> None:
        app_id = self.tokens.pop(token_hash).app_id
        del self.tokens_by_app[app_id][token_hash]
        if not self.tokens_by_app[app_id]:
            del self.tokens_by_app[app_id]

    def _put_token(self, token: Token) -> bool:
        """Takes a token that another control plane has changed. Returns whether it has revoked it."""
        known = self.tokens.get(token.hash, token)
        used_at = max(known.last_used_at or 0.0, token.last_used_at or 0.0) or None
        self._keep_token(msgspec.structs.replace(token, last_used_at=used_at))
        return token.revoked_at is not None and (known is token or known.revoked_at is None)

    def kept_tokens(self, app_id: str | None) -> list[Token]:
        """The app's tokens without those that are to be forgotten."""
        tokens = self.tokens_by_app.get(app_id, {}).values()
        before, expired_before = self._forgotten_before(), self._expired_before(app_id)
        return [token for token in tokens if token.ends_at >= before and token.lasts_until >= expired_before]

    def _forgotten_before(self) -> float:
        return self._clock() - _FORGET_TOKEN_AFTER_S

    def _expired_before(self, app_id: str | None) -> float:
        """Tokens of the app that expired before this time are forgotten. That is safe at any time: a control plane that
        reads no changes knows itself when they expire. Revocations it must read, so they stay in the store longer."""
        now_s, before = self._clock(), self._forgotten_before()
        tokens = self.tokens_by_app.get(app_id, {}).values()
        expired = sorted(one.lasts_until for one in tokens if one.lasts_until <= now_s and one.ends_at >= before)
        return expired[-MAX_EXPIRED] if len(expired) > MAX_EXPIRED else -math.inf

    async def _remove_ended(self, connection: AsyncConnection, app_ids: Collection[str | None]) -> None:
        await token_rows.remove_ended(connection, self._forgotten_before())
        for app_id in app_ids:
            before = self._expired_before(app_id)
            if before > -math.inf:
                await token_rows.remove_expired(connection, app_id, before)

    def _forget_ended(self, app_ids: Collection[str | None]) -> None:
        """Call it when tokens of these apps were added. All control planes forget by these rules alone, because rows
        that are gone have no version that would tell them."""
        for app_id in app_ids:
            forgotten = self.tokens_by_app.get(app_id, {}).keys() - {one.hash for one in self.kept_tokens(app_id)}
            for token_hash in forgotten:
                self._drop_token(token_hash)
        before = self._forgotten_before()
        if self._first_end >= before:
            return
        for token in [token for token in self.tokens.values() if token.ends_at < before]:
            self._drop_token(token.hash)
        self._first_end = min((token.ends_at for token in self.tokens.values()), default=math.inf)

    def _set_versions(self, stored: Versions) -> None:
        self.known = stored
        self.directory = DirectoryVersion(stored.directory, stored.directory_id)

    def _app(self, app_id: str) -> App:
        """The app in memory. Raises RecordError."""
        app = self.apps.get(app_id)
        if app is None:
            raise RecordError(f"there is no app with the id {app_id}")
        return app

    def _put(self, app: App) -> None:
        self._remove_keys(self.apps.get(app.id))
        self.apps[app.id] = app
        self.by_key.update({key.key: app for key in app.keys})
        if self.on_put is not None:
            self.on_put(app.id, app)

    def _remove(self, app_ids: Collection[str]) -> list[str]:
        """Forgets these apps, if they are known, with their keys and tokens: a new app may get the id. Returns the
        hashes of the tokens that weren't revoked."""
        app_ids = set(app_ids)
        for app_id in app_ids:
            if app_id in self.apps:
                self._remove_keys(self.apps.pop(app_id))
                if self.on_put is not None:
                    self.on_put(app_id, None)
        ended = [token for app_id in app_ids for token in self.tokens_by_app.get(app_id, {}).values()]
        for token in ended:
            self._drop_token(token.hash)
        return [token.hash for token in ended if token.revoked_at is None]

    def _remove_keys(self, app: App | None) -> None:
        for key in () if app is None else app.keys:
            # A key that has moved may have been put for its new app already.
            if self.by_key.get(key.key) is app:
                del self.by_key[key.key]
