"""The app records as workers see them: a versioned copy of what the record store holds (cluster.md 7).

The control process writes, workers read. A change comes as a message on `sys` that carries the next version;
any other version, there or in a beat, means that something was missed, and the whole is read again.
"""

import asyncio
from collections.abc import Callable, Iterable
from typing import Any, Final

import hiredis
import msgspec
import structlog

from redpoll.cluster.keys import Keys
from redpoll.cluster.link import Link, LinkDown
from redpoll.cluster.scripts import DIR_PUT
from redpoll.protocol.apps import App, Key

__all__ = ["Change", "Directory", "DirectoryWriter", "read_app"]

log = structlog.get_logger(__name__)

_SCAN_COUNT: Final = 200
_FILL_COUNT: Final = 200
_ENCODER: Final = msgspec.json.Encoder()
_DECODER: Final = msgspec.json.Decoder(App)


class Change(msgspec.Struct, frozen=True, omit_defaults=True):
    """What `sys` carries under `dir`: the version reached, and the app it is about.

    `record` None: the app is gone. `app` None: the whole was written anew.
    """

    version: int
    app: str | None = None
    record: App | None = None


def _announcement(change: Change) -> bytes:
    return _ENCODER.encode({"dir": change})


async def read_app(link: Link, keys: Keys, app_id: str) -> App | None:
    """One record as Redis has it, for who keeps no copy. Raises LinkDown or hiredis.ReplyError."""
    record = await link.ask(b"HGET", keys.directory, app_id)
    try:
        return None if record is None else _DECODER.decode(record)
    except msgspec.DecodeError:
        return None


class Directory:
    """The records that this worker goes by. `complete` says that they were read whole at least once, and are not
    older than `want` said.

    `on_change(app_id, old, new)` is called for every record that changed, appeared (old None) or went
    (new None), after `by_id` and `by_key` say the new state.
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
        self.by_id: dict[str, App] = {}
        self.by_key: dict[str, App] = {}
        self.on_change = on_change
        self._link = link
        self._keys = keys
        self._again_s = again_s
        self._reading: asyncio.Task[None] | None = None
        self._told = 0
        self._known = False
        self._wanted: int | None = 0

    def find(self, key: str) -> App | None:
        """The app that `key` opens. A disabled key opens nothing; a disabled app is found, and says so."""
        return self.by_key.get(key)

    def saw(self, version: bytes | None) -> None:
        """Told by every beat what Redis' version is; None: there is none, so control has yet to fill it."""
        if version is None or not self._known or int(version) != self.version:
            self.read()

    def want(self, version: int | None) -> None:
        """The store's version as this server's start found it: what Redis kept of an earlier one may be older,
        and is not complete until control has filled it anew. None: not known yet, so nothing is."""
        self._wanted = version
        self._judge()

    def _judge(self) -> None:
        self.complete = self._known and self._wanted is not None and self.version >= self._wanted

    def heard(self, change: dict[str, Any]) -> None:
        """Takes the `dir` part of a message on `sys`."""
        told = msgspec.convert(change, Change)
        if self._reading is not None:
            # The reading may have got its last answer already, and only not been resumed yet.
            self._told = max(self._told, told.version)
        elif told.app is not None and told.version == self.version + 1:
            self.version = told.version
            self._put(told.app, told.record)
            self._judge()
        elif told.version != self.version:
            self.read()

    def read(self) -> None:
        """Begins to read the whole, unless that is being done; what is known stays in force meanwhile."""
        if self._reading is None:
            self._told = 0
            self._reading = asyncio.get_running_loop().create_task(self._read(), name="directory")

    def close(self) -> None:
        if self._reading is not None:
            self._reading.cancel()
            self._reading = None

    async def _read(self) -> None:
        try:
            while True:
                try:
                    found = await self._read_once()
                except LinkDown:
                    # The beat of the next connection asks again.
                    return
                except hiredis.ReplyError as error:
                    log.warning("directory unreadable", reason=str(error))
                    found = None
                if found is not None and found[0] >= self._told:
                    self._take(*found)
                    return
                await asyncio.sleep(self._again_s)
        finally:
            self._reading = None

    async def _read_once(self) -> tuple[int, dict[str, App]] | None:
        before = await self._link.ask(b"GET", self._keys.directory_version)
        if before is None:
            return None
        apps: dict[str, App] = {}
        cursor: bytes | int = 0
        while True:
            cursor, flat = await self._link.ask(b"HSCAN", self._keys.directory, cursor, b"COUNT", _SCAN_COUNT)
            for app_id, record in zip(flat[::2], flat[1::2], strict=True):
                try:
                    apps[app_id.decode()] = _DECODER.decode(record)
                except msgspec.DecodeError as error:
                    # One app's bad record must not keep the others out.
                    log.error("app record unreadable", app=app_id.decode(), reason=str(error))
            if int(cursor) == 0:
                break
        after = await self._link.ask(b"GET", self._keys.directory_version)
        return (int(before), apps) if after == before else None

    def _take(self, version: int, apps: dict[str, App]) -> None:
        self.version = version
        self._known = True
        for app_id in [app_id for app_id in self.by_id if app_id not in apps]:
            self._put(app_id, None)
        for app_id, app in apps.items():
            self._put(app_id, app)
        self._judge()

    def _put(self, app_id: str, app: App | None) -> None:
        old = self.by_id.get(app_id)
        if old == app:
            return
        if old is not None:
            del self.by_id[app_id]
            for each in _opening(old):
                if self.by_key.get(each.key) is old:
                    del self.by_key[each.key]
        if app is not None:
            self.by_id[app_id] = app
            for each in _opening(app):
                if each.enabled:
                    self.by_key[each.key] = app
        if self.on_change is not None:
            self.on_change(app_id, old, app)


def _opening(app: App) -> tuple[Key, ...]:
    """The keys by which a connection finds the app: its own, and the one of its console."""
    return app.keys if app.console_key is None else (*app.keys, app.console_key)


class DirectoryWriter:
    """Control's side. Raises LinkDown or hiredis.ReplyError where Redis did not take a change."""

    def __init__(self, link: Link, keys: Keys) -> None:
        self._link = link
        self._keys = keys

    async def put(self, app_id: str, app: App | None, version: int) -> None:
        """Writes one record (None: the app is gone) and tells the workers; `version` is the store's, made by
        this change."""
        keys = self._keys
        record = b"" if app is None else _ENCODER.encode(app)
        told = _announcement(Change(version, app_id, app))
        args = (app_id, record, version, keys.publish, keys.sys, told)
        await self._link.execute(DIR_PUT, (keys.directory, keys.directory_version), args)

    async def version(self) -> int | None:
        """The version that Redis has; None: none, it was emptied or never filled."""
        found = await self._link.ask(b"GET", self._keys.directory_version)
        return None if found is None else int(found)

    async def fill(self, apps: Iterable[App], version: int) -> None:
        """Writes the whole. Without a version while it lasts, so that nobody takes half of it."""
        keys, link = self._keys, self._link
        records = {app.id: _ENCODER.encode(app) for app in apps}
        await link.ask(b"DEL", keys.directory_version)
        stale = [each for each in await link.ask(b"HKEYS", keys.directory) if each.decode() not in records]
        flat = [part for record in records.items() for part in record]
        for at in range(0, len(flat), 2 * _FILL_COUNT):
            await link.ask(b"HSET", keys.directory, *flat[at : at + 2 * _FILL_COUNT])
        for at in range(0, len(stale), _FILL_COUNT):
            await link.ask(b"HDEL", keys.directory, *stale[at : at + _FILL_COUNT])
        await link.ask(b"SET", keys.directory_version, version)
        await link.ask(keys.publish, keys.sys, _announcement(Change(version)))
