"""The app records that workers use: a versioned copy of the record store, in Redis.

Control writes it, workers read it. A change comes as a message on the topic `sys` with the next version. Any other
version, in a message or in a beat, means that a change was missed; then the whole directory is read again. Changes that
come during a reading are applied to what it read, so that it ends however often records change. Each version has a
random id, because a record store that lost changes uses its number again, and says how many records there are
(cluster/README.md "Directory").
"""

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final, NamedTuple

import hiredis
import msgspec
import structlog

from redpoll.cluster.app_data import remove_app_data
from redpoll.cluster.questions import TopicMessage, encode
from redpoll.cluster.redis.keys import Keys
from redpoll.cluster.redis.link import Link, LinkDown
from redpoll.cluster.redis.scripts import DIR_FILL, DIR_PUT
from redpoll.loop.slices import walk
from redpoll.protocol.apps import App, Key

__all__ = ["Directory", "DirectoryChanged", "DirectoryVersion", "DirectoryWriter", "read_apps", "read_directory"]

log = structlog.get_logger(__name__)

_SCAN_COUNT: Final = 200
_FILL_COUNT: Final = 200
_ENCODER: Final = msgspec.json.Encoder()
_DECODER: Final = msgspec.json.Decoder(App)


class DirectoryVersion(NamedTuple):
    """`number` grows with each change; `id` is random. Two directories are equal if both are."""

    number: int
    id: str = "-"


class _Stored(NamedTuple):
    """What Redis has under `dirver`. `apps` None: written by a test, or an earlier redpoll."""

    version: DirectoryVersion
    apps: int | None

    @classmethod
    def parse(cls, text: bytes) -> "_Stored":
        number, *rest = text.decode().split(" ")
        return cls(DirectoryVersion(int(number), *rest[1:]), int(rest[0]) if rest else None)


class DirectoryChanged(TopicMessage, frozen=True, omit_defaults=True):
    """On `sys`: the new version with its id and the one before, and the app that changed.

    `record` None: the app was deleted. `app` None: the whole directory was written again.
    """

    version: int
    id: str = "-"
    before: str = "-"
    app: str | None = None
    record: App | None = None

    @property
    def version_after(self) -> DirectoryVersion:
        return DirectoryVersion(self.version, self.id)

    def follows(self, version: DirectoryVersion) -> bool:
        """Whether it changes one record of the directory of this version."""
        return self.app is not None and (self.version - 1, self.before) == version


async def read_apps(link: Link, keys: Keys, app_ids: Sequence[str]) -> list[App | None]:
    """Some records, read from Redis in one call; None where there is none. Raises LinkDown or hiredis.ReplyError."""
    records = await link.ask(b"HMGET", keys.directory, *app_ids) if app_ids else ()
    return [_decoded(record) for record in records]


def _decoded(record: bytes | None) -> App | None:
    try:
        return None if record is None else _DECODER.decode(record)
    except msgspec.DecodeError:
        return None


async def read_directory(
    link: Link, keys: Keys, changes: deque[DirectoryChanged] | None = None
) -> tuple[DirectoryVersion, dict[str, App]] | None:
    """The whole directory, at the version that it has after the last page. None if it has no version, lacks records, as
    after an eviction, or was changed meanwhile otherwise than `changes` say. Raises LinkDown or hiredis.ReplyError.

    `changes` are the messages that the caller gets meanwhile, over the same link. Those up to the returned version are
    removed.
    """
    before = await link.ask(b"GET", keys.directory_version)
    if before is None:
        return None
    apps: dict[str, App] = {}
    unreadable: set[str] = set()
    cursor: bytes | int = 0
    while True:
        cursor, flat = await link.ask(b"HSCAN", keys.directory, cursor, b"COUNT", _SCAN_COUNT)
        # Each part as it comes, so that clients are served in between.
        for app_id, record in zip(map(bytes.decode, flat[::2]), flat[1::2], strict=True):
            try:
                apps[app_id] = _DECODER.decode(record)
            except msgspec.DecodeError as error:
                # One unreadable record must not disable the other apps.
                unreadable.add(app_id)
                log.error("app record unreadable", app=app_id, reason=str(error))
        if int(cursor) == 0:
            break
    # Redis sends the messages of all changes up to this version before this reply.
    after = await link.ask(b"GET", keys.directory_version)
    if after is None:
        return None
    stored = _Stored.parse(after)
    between = _take_between(_Stored.parse(before).version, stored.version, changes or deque())
    if between is None:
        return None
    # A page has some of these changes or none. After all of them, the record of an app is at least as new as its page.
    for app_id, record in between:
        unreadable.discard(app_id)
        if record is None:
            apps.pop(app_id, None)
        else:
            apps[app_id] = record
    if stored.apps not in (None, len(apps) + len(unreadable)):
        return None
    return stored.version, apps


def _take_between(
    version: DirectoryVersion, after: DirectoryVersion, changes: deque[DirectoryChanged]
) -> list[tuple[str, App | None]] | None:
    # The changed apps and their records. None: `changes` don't lead from `version` to `after`.
    if any(change.app is None for change in changes):
        # Pages may be of the time when the directory was emptied or half written.
        return None
    between: list[tuple[str, App | None]] = []
    while changes and changes[0].version <= after.number:
        change = changes.popleft()
        if change.version <= version.number:
            # It came before the reading began, so all pages have it.
            continue
        if change.app is None or not change.follows(version):
            return None
        version = change.version_after
        between.append((change.app, change.record))
    return between if version == after else None


class Directory:
    """The records that this worker uses. `complete`: they were read completely at least once, and are not older than
    the version that `require` named.

    `on_change(app_id, old, new)` is called for every record that changed, was created (`old` None) or deleted (`new`
    None), after `by_id` and `by_key` have the new state.
    """

    def __init__(
        self,
        link: Link,
        keys: Keys,
        *,
        on_change: Callable[[str, App | None, App | None], None] | None = None,
        again_s: float = 0.2,
    ) -> None:
        self.complete = False
        self.version = 0
        self.id = ""
        self.by_id: dict[str, App] = {}
        self.by_key: dict[str, App] = {}
        self.on_change = on_change
        self._link = link
        self._keys = keys
        self._again_s = again_s
        self._reading: asyncio.Task[None] | None = None
        # Those that came during a reading and aren't applied yet.
        self._changes: deque[DirectoryChanged] = deque()
        self._known = False
        self._required: int | None = 0
        self._changed = asyncio.Event()

    def find(self, key: str) -> App | None:
        """The app of a key, disabled apps included. None if the key is unknown or disabled."""
        return self.by_key.get(key)

    def check_version(self, version: bytes | None) -> None:
        """Takes the version that a beat brought. None: Redis has no directory yet; control will fill it."""
        if version is None or not self._known or _Stored.parse(version).version != (self.version, self.id):
            self.read()

    def require(self, version: int | None) -> None:
        """Sets the record store's version at the start of this server. Redis may still have an older directory, whose
        records must not admit clients. None: the version is not known yet, so the directory is not complete."""
        self._required = version
        self._update_complete()

    async def reached(self, version: int) -> bool:
        """Waits until these are the records of this version, or of a later one, and returns True. What is being read
        counts when it has been read: the present version may be one that the record store has lost."""
        while self._reading is not None or self.version < version:
            await self._changed.wait()
        return True

    def _wake(self) -> None:
        # Those that wait now; later ones wait for the next change.
        self._changed.set()
        self._changed.clear()

    def _update_complete(self) -> None:
        self._wake()
        self.complete = self._known and self._required is not None and self.version >= self._required

    def apply(self, change: DirectoryChanged) -> None:
        if self._reading is not None:
            self._changes.append(change)
        elif not self._follow(change):
            self.read()

    def _follow(self, change: DirectoryChanged) -> bool:
        # False: changes before it are missing.
        version = DirectoryVersion(self.version, self.id)
        if change.follows(version):
            assert change.app is not None
            self.version, self.id = change.version_after
            self._put(change.app, change.record)
            self._update_complete()
            return True
        return change.version_after == version

    def read(self) -> None:
        """Starts to read the whole directory, unless that is happening already. The present records stay in use
        meanwhile."""
        if self._reading is None:
            self._reading = asyncio.get_running_loop().create_task(self._read(), name="directory")

    def close(self) -> None:
        if self._reading is not None:
            self._reading.cancel()
            self._reading = None

    async def _read(self) -> None:
        try:
            while True:
                # What came before the first question is older than its answer.
                self._changes.clear()
                try:
                    result = await read_directory(self._link, self._keys, self._changes)
                except LinkDown:
                    # The beat of the next connection asks again.
                    return
                except hiredis.ReplyError as error:
                    log.warning("directory read failed", reason=str(error))
                    result = None
                if result is not None:
                    await self._adopt(*result)
                    if await self._follow_changes():
                        return
                await asyncio.sleep(self._again_s)
        finally:
            self._reading = None
            self._wake()

    async def _adopt(self, version: DirectoryVersion, apps: dict[str, App]) -> None:
        # In slices, because all workers do this at the same moment.
        deleted = [app_id for app_id in self.by_id if app_id not in apps]
        await walk(deleted, lambda app_id: self._put(app_id, None))
        await walk(apps.items(), lambda item: self._put(*item))
        self.version, self.id = version
        self._known = True
        self._update_complete()

    async def _follow_changes(self) -> bool:
        # In slices, too. It returns in the pass in which none is left, so none can come between it and its caller.
        complete = True

        def follow(change: DirectoryChanged) -> None:
            nonlocal complete
            complete = complete and self._follow(change)

        def changes() -> Iterator[DirectoryChanged]:
            while self._changes:
                yield self._changes.popleft()

        await walk(changes(), follow)
        return complete

    def _put(self, app_id: str, app: App | None) -> None:
        old = self.by_id.get(app_id)
        if old == app:
            return
        if old is not None:
            del self.by_id[app_id]
            for key in _connection_keys(old):
                if self.by_key.get(key.key) is old:
                    del self.by_key[key.key]
        if app is not None:
            self.by_id[app_id] = app
            for key in _connection_keys(app):
                if key.enabled:
                    self.by_key[key.key] = app
        if self.on_change is not None:
            self.on_change(app_id, old, app)


def _connection_keys(app: App) -> tuple[Key, ...]:
    """The keys with which clients connect to the app: its own, and the one of the dashboard's console."""
    return app.keys if app.console_key is None else (*app.keys, app.console_key)


class DirectoryWriter:
    """Control's side. Methods raise LinkDown or hiredis.ReplyError if Redis did not carry out the change."""

    def __init__(self, link: Link, keys: Keys) -> None:
        self._link = link
        self._keys = keys

    async def put(self, app_id: str, app: App | None, number: int, id: str = "-", before: str = "-") -> bool:
        """Writes one record (None: the app was deleted). `number` and `id` are the record store's version after this
        change, `before` is the id of the version before. False: nothing was written, because Redis doesn't have that
        version with all its records."""
        keys = self._keys
        record = b"" if app is None else _ENCODER.encode(app)
        message = encode(DirectoryChanged(number, id, before, app_id, app))
        args = (app_id, record, number, keys.publish, keys.sys, message, number - 1, id, before)
        return bool(await self._link.execute(DIR_PUT, (keys.directory, keys.directory_version), args))

    async def forget(self, app_id: str) -> None:
        """Removes what else Redis stores for a deleted app."""
        await remove_app_data(self._link, self._keys, app_id)

    async def version(self) -> DirectoryVersion | None:
        """The version that Redis has; None if it was emptied, never filled, or has lost records."""
        keys = self._keys
        version, count = await self._link.ask_all([(b"GET", keys.directory_version), (b"HLEN", keys.directory)])
        if version is None:
            return None
        stored = _Stored.parse(version)
        return stored.version if stored.apps in (None, count) else None

    async def fill(self, apps: Iterable[App], number: int, id: str = "-", *, leads_with: str = "") -> bool:
        """Writes the whole directory. There is no version meanwhile, so that no worker reads half of it.

        `leads_with` is `<run> <term> ` of the node that leads. False: another node leads now, and fills it.
        """
        keys = self._keys
        names = (keys.directory, keys.directory_version, keys.leader)

        async def step(*args: bytes | str | int) -> Any:
            return await self._link.execute(DIR_FILL, names, (leads_with, *args))

        records = {app.id: app for app in apps}
        present = await step(b"begin")
        if present is None:
            return False
        stale = [app_id for app_id in present if app_id.decode() not in records]

        def steps() -> Iterator[tuple[bytes | str | int, ...]]:
            # Each is encoded when its turn comes, so that publishes are served in between.
            ids = list(records)
            for at in range(0, len(ids), _FILL_COUNT):
                part = ids[at : at + _FILL_COUNT]
                yield b"put", *(text for app_id in part for text in (app_id, _ENCODER.encode(records[app_id])))
            for at in range(0, len(stale), _FILL_COUNT):
                yield b"drop", *stale[at : at + _FILL_COUNT]
            yield b"end", number, id, keys.publish, keys.sys, encode(DirectoryChanged(number, id))

        for one in steps():
            if await step(*one) is None:
                return False
        return True
