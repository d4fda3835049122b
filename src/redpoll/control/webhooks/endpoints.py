"""The webhook endpoints of every app: in memory to read, through the store to change, and what workers hear of them.

Says which endpoint wants which transition. What is sent, and when, is others'.
"""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import Final

import msgspec
from sqlalchemy.ext.asyncio import AsyncConnection

from redpoll.control.records import RecordError, Records
from redpoll.control.webhooks.payloads import EVENTS, FORMATS, STANDARD
from redpoll.control.webhooks.sender import PinUnavailable, Sender
from redpoll.protocol.channels import valid_name
from redpoll.store import deliveries as delivery_rows
from redpoll.store import webhooks as endpoint_rows
from redpoll.store.store import Store
from redpoll.store.webhooks import Endpoint

__all__ = ["ALL", "OVERLAP_S", "Endpoints", "hooks_of", "wants"]

ALL: Final = "all"
# How long the old secret is still good: a day to bring the new one to every receiver.
OVERLAP_S: Final = 86_400.0
_MOST_ENDPOINTS: Final = 50
_MOST_PREFIXES: Final = 50
# The letter in App.hooks that has workers write rows of an event.
_LETTERS: Final = {
    "channel.occupied": "o",
    "channel.vacated": "o",
    "member.added": "m",
    "member.removed": "m",
    "client_event": "c",
    "cache.miss": "x",
    "subscription.count": "s",
}


def wants(endpoint: Endpoint, event: str, channel: str) -> bool:
    """Its types, and its prefixes. `all` are the spec's five (6.2), the others are sent to who names them."""
    chosen = event in endpoint.events or (ALL in endpoint.events and event in STANDARD)
    return chosen and (not endpoint.channels or channel.startswith(endpoint.channels))


def hooks_of(endpoints: Iterable[Endpoint]) -> str:
    """The letters of an app's enabled endpoints (protocol.apps.App.hooks)."""
    chosen = {name for each in endpoints if each.enabled for name in each.events}
    chosen |= set(STANDARD) if ALL in chosen else set()
    return "".join(dict.fromkeys(letter for event, letter in _LETTERS.items() if event in chosen))


class Endpoints:
    """Every endpoint by id. `sender` gives what checks URLs and captures certificates; `clock` tells Unix seconds.

    `on_change(endpoint)` is told after each commit. Changes of an app's endpoints are in one transaction with the
    directory's version, under the lock of the records. All that can't be done raises RecordError.
    """

    def __init__(
        self, store: Store, records: Records, sender: Callable[[], Sender], clock: Callable[[], float]
    ) -> None:
        self.on_change: Callable[[Endpoint], None] | None = None
        self._store = store
        self._records = records
        self._sender = sender
        self._clock = clock
        # Deleted ones too, while there are deliveries to them.
        self._all: dict[str, Endpoint] = {}
        self._by_app: dict[str, tuple[Endpoint, ...]] = {}

    async def load(self) -> None:
        """Reads everything, behind the records."""
        async with self._store.reading() as connection:
            self._all = await endpoint_rows.every(connection)
        by_app: dict[str, list[Endpoint]] = {}
        for each in self._all.values():
            of_app = by_app.setdefault(each.app_id, [])
            if each.deleted_at is None:
                of_app.append(each)
        self._by_app = {app_id: tuple(found) for app_id, found in by_app.items()}
        self._records.know_hooks({app_id: hooks_of(each) for app_id, each in self._by_app.items()})

    def _index(self, app_id: str) -> None:
        of_app = tuple(each for each in self._all.values() if each.app_id == app_id and each.deleted_at is None)
        self._by_app[app_id] = of_app

    # -- reading

    def of_app(self, app_id: str) -> tuple[Endpoint, ...]:
        """Oldest first, without deleted ones. Of an app that there isn't: none."""
        return self._by_app.get(app_id, ())

    def ids_of(self, app_id: str) -> list[str]:
        """Deleted ones too."""
        return [each.id for each in self._all.values() if each.app_id == app_id]

    def known(self, endpoint_id: str) -> Endpoint | None:
        """A deleted one too."""
        return self._all.get(endpoint_id)

    def one(self, endpoint_id: str) -> Endpoint:
        endpoint = self._all.get(endpoint_id)
        if endpoint is None or endpoint.deleted_at is not None:
            raise RecordError(f"there is no webhook with the id {endpoint_id}")
        return endpoint

    def any_enabled(self) -> bool:
        return any(each.enabled for each in self._all.values())

    def every(self) -> list[Endpoint]:
        """Deleted ones too."""
        return list(self._all.values())

    # -- changing

    async def create(
        self, app_id: str, url: str, events: Sequence[str], format: str, channels: Sequence[str], pin: bool
    ) -> Endpoint:
        """A new one, enabled, with a secret of 40 hex digits."""
        endpoint = Endpoint(
            id=secrets.token_hex(6),
            app_id=app_id,
            url=url,
            secret=secrets.token_hex(20),
            events=tuple(dict.fromkeys(events)),
            channels=tuple(dict.fromkeys(channels)),
            format=format,
            created_at=self._clock(),
        )
        self._check(endpoint)
        if app_id not in self._records.apps:
            raise RecordError(f"there is no app with the id {app_id}")
        if pin:
            endpoint = msgspec.structs.replace(endpoint, pin=await self._captured(url))
        async with self._changing(app_id, endpoint.id) as connection:
            if len(self.of_app(app_id)) >= _MOST_ENDPOINTS:
                raise RecordError(f"app {app_id} has {_MOST_ENDPOINTS} webhooks, and more are not allowed")
            await endpoint_rows.add(connection, endpoint)
            self._know(endpoint)
        return endpoint

    async def change(
        self,
        endpoint_id: str,
        url: str | None,
        events: Sequence[str] | None,
        channels: Sequence[str] | None,
        format: str | None,
    ) -> Endpoint:
        """None: as it is. Deliveries that wait go to the new URL, as they were rendered. A pinned endpoint's
        certificate is captured anew where the URL changes."""
        before = self.one(endpoint_id)
        values: dict[str, object] = {}
        if url is not None:
            values["url"] = url
        if events is not None:
            values["events"] = tuple(dict.fromkeys(events))
        if channels is not None:
            values["channels"] = tuple(dict.fromkeys(channels))
        if format is not None:
            values["format"] = format
        self._check(msgspec.structs.replace(before, **values))
        if url is not None and before.pin and url != before.url:
            values["pin"] = await self._captured(url)
        return await self._put(endpoint_id, values)

    async def set_enabled(self, endpoint_id: str, enabled: bool) -> Endpoint:
        """Disabled, it is told of nothing that happens from now on, and what waits for it waits on."""
        before = self.one(endpoint_id)
        if before.enabled == enabled:
            return before
        return await self._put(endpoint_id, {"disabled_at": None if enabled else self._clock()})

    async def rotate(self, endpoint_id: str) -> Endpoint:
        """A new secret; the one that it replaces is good for a day more."""
        before = self.one(endpoint_id)
        until = self._clock() + OVERLAP_S
        values = {"secret": secrets.token_hex(20), "previous_secret": before.secret, "previous_until": until}
        return await self._put(endpoint_id, values)

    async def pin(self, endpoint_id: str) -> Endpoint:
        """From now on only the certificate that is shown now is taken."""
        url = self.one(endpoint_id).url
        pinned = await self._captured(url)
        if self.one(endpoint_id).url != url:
            raise RecordError("the webhook's URL was changed meanwhile, so nothing is pinned")
        return await self._put(endpoint_id, {"pin": pinned})

    async def unpin(self, endpoint_id: str) -> Endpoint:
        self.one(endpoint_id)
        return await self._put(endpoint_id, {"pin": ""})

    async def delete(self, endpoint_id: str) -> Endpoint:
        """It is told of nothing any more. Its row stays, without its secrets, for as long as there are deliveries."""
        self.one(endpoint_id)
        now_s = self._clock()
        return await self._put(
            endpoint_id,
            {"deleted_at": now_s, "disabled_at": now_s, "secret": "", "previous_secret": "", "previous_until": 0.0},
        )

    async def _put(self, endpoint_id: str, values: dict[str, object]) -> Endpoint:
        async with self._changing(self.one(endpoint_id).app_id, endpoint_id) as connection:
            # Others may have changed it while the lock was theirs.
            endpoint = msgspec.structs.replace(self.one(endpoint_id), **values)
            await endpoint_rows.put(connection, endpoint)
            self._know(endpoint)
        if self.on_change is not None:
            self.on_change(endpoint)
        return endpoint

    @asynccontextmanager
    async def _changing(self, app_id: str, endpoint_id: str) -> AsyncIterator[AsyncConnection]:
        """A transaction for this endpoint, which is known as changed when the block is left: before workers hear of it,
        since what they write for it a moment later would be nobody's otherwise."""
        try:
            async with self._records.changing_hooks(app_id) as change:
                yield change.connection
                change.hooks = hooks_of(self.of_app(app_id))
        except BaseException:
            # It may have been undone, or be done for all that.
            async with self._store.reading() as connection:
                stored = await endpoint_rows.one(connection, endpoint_id)
            if stored is not None:
                self._know(stored)
            elif endpoint_id in self._all:
                del self._all[endpoint_id]
                self._index(app_id)
            raise

    def _know(self, endpoint: Endpoint) -> None:
        self._all[endpoint.id] = endpoint
        self._index(endpoint.app_id)

    def set_failing_since(self, endpoint_id: str, since: float | None) -> None:
        """What the deliveries say, which their schedule has written."""
        endpoint = self._all.get(endpoint_id)
        if endpoint is not None:
            self._know(msgspec.structs.replace(endpoint, failing_since=since))

    async def forget_deleted(self) -> None:
        """Lets go of deleted ones that no delivery is left to."""
        if not any(each.deleted_at is not None for each in self._all.values()):
            return
        async with self._store.change() as connection:
            gone = await endpoint_rows.forget_deleted(connection)
        for endpoint_id in gone:
            del self._all[endpoint_id]

    async def discard_waiting(self, endpoint_id: str) -> None:
        """Gives up what waits for a deleted endpoint, in pieces: there may be very much of it."""
        async with self._store.reading() as connection:
            found = await delivery_rows.numbers(connection, (endpoint_id,), ("waiting",))
        for at in range(0, len(found), delivery_rows.AT_ONCE):
            some = found[at : at + delivery_rows.AT_ONCE]
            async with self._store.change() as connection:
                await delivery_rows.discard(connection, some, self._clock(), ("waiting",))

    # -- checking

    def _check(self, endpoint: Endpoint) -> None:
        fault = self._sender().check_url(endpoint.url)
        if fault is not None:
            raise RecordError(fault)
        wrong = [each for each in endpoint.events if each != ALL and each not in EVENTS]
        if wrong or not endpoint.events:
            given = ", ".join(map(repr, wrong)) or "nothing"
            raise RecordError(f"a webhook's events are {ALL}, or some of {', '.join(EVENTS)}, not {given}")
        if endpoint.format not in FORMATS:
            raise RecordError(f"a webhook's format is {' or '.join(FORMATS)}, not {endpoint.format!r}")
        wrong = [each for each in endpoint.channels if not valid_name(each)]
        if wrong:
            raise RecordError(f"{wrong[0]!r} is not how a channel's name begins")
        if len(endpoint.channels) > _MOST_PREFIXES:
            raise RecordError(f"a webhook has at most {_MOST_PREFIXES} channel prefixes")

    async def _captured(self, url: str) -> str:
        try:
            return await self._sender().fingerprint(url)
        except PinUnavailable as error:
            raise RecordError(f"the certificate can't be pinned: {error}") from error
