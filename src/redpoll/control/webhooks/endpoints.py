"""The webhook endpoints of all apps.

All endpoints are in memory; changes go through the record store. What an endpoint wants decides which transitions it
gets (wanted.py). Together, the enabled endpoints of an app make its hook mask (`App.hooks`), which tells workers which
events to write to the outbox. What is sent, and when, is decided in payloads.py, schedule.py and pulls.py.
"""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Final

import msgspec

from redpoll.control.records.checks import RecordConflict
from redpoll.control.records.loaded_records import Edit, Origin
from redpoll.control.records.records import RecordError, Records
from redpoll.control.webhooks.payloads import FORMATS
from redpoll.control.webhooks.sender import PinUnavailable, Sender
from redpoll.control.webhooks.wanted import ALL, check_has_url, check_wanted, hooks_of, target_of
from redpoll.store import deliveries as delivery_rows
from redpoll.store import old_deliveries
from redpoll.store import webhooks as endpoint_rows
from redpoll.store.audit import Actor
from redpoll.store.store import Store
from redpoll.store.webhooks import Endpoint

__all__ = ["MAX_ENDPOINTS", "OVERLAP_S", "Endpoints", "deleted"]

# How long deliveries are also signed with the old secret after a rotation.
OVERLAP_S: Final = 86_400.0
MAX_ENDPOINTS: Final = 50


def deleted(endpoint: Endpoint, now_s: float) -> Endpoint:
    """The endpoint as a deleted one, without its secrets. Its row stays until its last delivery is removed."""
    return msgspec.structs.replace(
        endpoint, deleted_at=now_s, disabled_at=now_s, secret="", previous_secret="", previous_until=0.0
    )


def _ignore(endpoint: Endpoint) -> None:
    pass


def _age(endpoint: Endpoint) -> tuple[float, str]:
    return endpoint.created_at, endpoint.id


class Endpoints:
    """All endpoints by id.

    `sender()` returns the Sender that checks URLs and captures certificates; `clock()` returns Unix seconds.
    `on_change(endpoint)` is called after each commit. A change is one transaction with the directory's version, under
    the lock of the records, so workers see hook masks in order. Memory has what is committed, and has it before workers
    see the new hook mask: rows that they write at once find their endpoint. `by` is who made a change, for the audit
    log. Methods raise RecordError if a change isn't possible.
    """

    def __init__(
        self,
        store: Store,
        records: Records,
        sender: Callable[[], Sender],
        clock: Callable[[], float],
        on_change: Callable[[Endpoint], None] = _ignore,
    ) -> None:
        self._on_change = on_change
        self._store = store
        self._records = records
        self._sender = sender
        self._clock = clock
        # Includes deleted endpoints that still have deliveries.
        self._all: dict[str, Endpoint] = {}
        self._by_app: dict[str, tuple[Endpoint, ...]] = {}
        # Late: records are loaded without endpoints, which need them.
        records.on_endpoints = self._changed

    async def load(self) -> None:
        """Reads all endpoints and sets the hook mask of each app. Call it after `Records.load`."""
        async with self._store.reading() as connection:
            self._all = await endpoint_rows.all_by_id(connection)
        by_app: dict[str, list[Endpoint]] = {}
        for endpoint in self._all.values():
            of_app = by_app.setdefault(endpoint.app_id, [])
            if endpoint.deleted_at is None:
                of_app.append(endpoint)
        self._by_app = {app_id: tuple(of_app) for app_id, of_app in by_app.items() if of_app}
        self._records.set_hooks({app_id: hooks_of(of_app) for app_id, of_app in by_app.items()})

    def _changed(self, changed: Mapping[str, Endpoint], origin: Origin) -> None:
        """Takes endpoints that were changed."""
        app_ids = {endpoint.app_id for endpoint in changed.values()}
        # The deliveries of a new endpoint come with its first rows: there is nothing to look for.
        waiting = [one for one in changed if origin is not Origin.HERE or one in self._all]
        if origin is Origin.HERE:
            # An attempt may have ended during the change.
            changed = {**changed, **{one: self._with_failing(changed[one]) for one in waiting}}
        elif origin is Origin.STORE:
            app_ids |= self._by_app.keys() & self._records.apps.keys()
            self._all.clear()
            self._by_app.clear()
        self._put(changed)
        self._records.set_hooks({app_id: hooks_of(self.of_app(app_id)) for app_id in app_ids})
        for endpoint_id in waiting:
            self._on_change(changed[endpoint_id])

    def _with_failing(self, endpoint: Endpoint) -> Endpoint:
        return msgspec.structs.replace(endpoint, failing_since=self._all[endpoint.id].failing_since)

    # -- reading

    def of_app(self, app_id: str) -> tuple[Endpoint, ...]:
        """The app's endpoints, oldest first, without deleted ones; empty for an unknown app."""
        return self._by_app.get(app_id, ())

    def of_existing_app(self, app_id: str) -> list[Endpoint]:
        """Like `of_app`. Raises RecordError for an unknown app."""
        self.check_app(app_id)
        return list(self.of_app(app_id))

    def check_app(self, app_id: str) -> None:
        """Raises RecordError for an unknown app."""
        if app_id not in self._records.apps:
            raise RecordError(f"there is no app with the id {app_id}")

    def ids_of(self, app_id: str) -> list[str]:
        """The ids of the app's endpoints, including deleted ones."""
        return [endpoint.id for endpoint in self._all.values() if endpoint.app_id == app_id]

    def known(self, endpoint_id: str) -> Endpoint | None:
        """The endpoint, also if it is deleted; None if the store doesn't have it."""
        return self._all.get(endpoint_id)

    def get(self, endpoint_id: str) -> Endpoint:
        """The endpoint. Raises RecordError if it doesn't exist or is deleted."""
        endpoint = self._all.get(endpoint_id)
        if endpoint is None or endpoint.deleted_at is not None:
            raise RecordError(f"there is no webhook with the id {endpoint_id}")
        return endpoint

    def any_enabled(self) -> bool:
        return any(endpoint.enabled for endpoint in self._all.values())

    def every(self) -> list[Endpoint]:
        """All endpoints, including deleted ones."""
        return list(self._all.values())

    # -- changing

    async def create(
        self,
        app_id: str,
        url: str | None,
        events: Sequence[str] = (ALL,),
        format: str = FORMATS[0],
        channels: Sequence[str] = (),
        pin: bool = False,
        *,
        client_events: Sequence[str] = (),
        batch: bool = False,
        by: Actor | None = None,
    ) -> Endpoint:
        """Creates an enabled endpoint with a new secret of 40 hex digits.

        `url` None: the deliveries are pulled. `events` are event names, or "all" for the five standard ones. `channels`
        are prefixes; empty means every channel. `client_events` are names of client events; empty means each of them.
        `batch`: the events of a second are sent in one request. `pin`: accept only the certificate that the receiver
        shows now.
        """
        endpoint = Endpoint(
            id=secrets.token_hex(6),
            app_id=app_id,
            url=url or "",
            secret=secrets.token_hex(20),
            events=tuple(dict.fromkeys(events)),
            channels=tuple(dict.fromkeys(channels)),
            client_events=tuple(dict.fromkeys(client_events)),
            format=format,
            batch=batch,
            created_at=self._clock(),
        )
        self._check(endpoint, url)
        self.check_app(app_id)
        if pin:
            check_has_url(endpoint)
            endpoint = msgspec.structs.replace(endpoint, pin=await self._capture_pin(endpoint.url))
        async with self._edit(app_id, by) as edit:
            if len(self.of_app(app_id)) >= MAX_ENDPOINTS:
                raise RecordConflict(f"app {app_id} has {MAX_ENDPOINTS} webhooks, the most that an app can have")
            await endpoint_rows.add(edit.connection, endpoint)
            await edit.note("webhook create", app_id, target_of(endpoint), ", ".join(endpoint.events))
            edit.endpoints = (endpoint,)
        return endpoint

    async def change(
        self,
        endpoint_id: str,
        url: str | None = None,
        events: Sequence[str] | None = None,
        channels: Sequence[str] | None = None,
        format: str | None = None,
        enabled: bool | None = None,
        *,
        client_events: Sequence[str] | None = None,
        batch: bool | None = None,
        by: Actor | None = None,
    ) -> Endpoint:
        """Changes the values that are not None; `enabled` as `set_enabled` does.

        Waiting deliveries go to the new URL, in the format in which they were rendered. If the URL of a pinned endpoint
        changes, the new receiver's certificate is pinned. An endpoint whose deliveries are pulled can't get a URL.

        A URL that stays isn't checked: it may have been saved under other settings, and its endpoint must still be
        disabled, and change otherwise. Every attempt checks it.
        """
        before = self.get(endpoint_id)
        values: dict[str, object] = {}
        if url is not None:
            values["url"] = url
            if before.pulled:
                raise RecordError("a webhook that is pulled has no URL: create another")
        for name, words in (("events", events), ("channels", channels), ("client_events", client_events)):
            if words is not None:
                values[name] = tuple(dict.fromkeys(words))
        if format is not None:
            values["format"] = format
        if batch is not None:
            values["batch"] = batch
        new_url = None if url == before.url else url
        self._check(msgspec.structs.replace(before, **values), new_url)
        if new_url is not None and before.pin:
            values["pin"] = await self._capture_pin(new_url)

        def changed(endpoint: Endpoint) -> Endpoint:
            if new_url is not None and endpoint.pin != before.pin:
                raise RecordConflict(
                    "nothing is changed: the webhook was pinned or unpinned at the same time; try again"
                )
            # Together with what another change did meanwhile.
            after = msgspec.structs.replace(endpoint, **values)
            check_wanted(after)
            return after if enabled is None else self._with_enabled(after, enabled)

        return await self._replace(endpoint_id, changed, "webhook change", by)

    async def set_enabled(self, endpoint_id: str, enabled: bool, *, by: Actor | None = None) -> Endpoint:
        """A disabled endpoint gets no transitions from now on. Its waiting deliveries resume when it is enabled."""
        verb = "webhook enable" if enabled else "webhook disable"
        return await self._replace(endpoint_id, lambda endpoint: self._with_enabled(endpoint, enabled), verb, by)

    def _with_enabled(self, endpoint: Endpoint, enabled: bool) -> Endpoint:
        if endpoint.enabled == enabled:
            return endpoint
        return msgspec.structs.replace(endpoint, disabled_at=None if enabled else self._clock())

    async def rotate(self, endpoint_id: str, *, by: Actor | None = None) -> Endpoint:
        """Sets a new secret. Deliveries are also signed with the old one, for a day (OVERLAP_S)."""
        new, until = secrets.token_hex(20), self._clock() + OVERLAP_S

        def rotated(endpoint: Endpoint) -> Endpoint:
            return msgspec.structs.replace(endpoint, secret=new, previous_secret=endpoint.secret, previous_until=until)

        return await self._replace(endpoint_id, rotated, "webhook rotate", by)

    async def pin(self, endpoint_id: str, *, by: Actor | None = None) -> Endpoint:
        """From now on, accepts only the certificate that the receiver shows now."""
        endpoint = self.get(endpoint_id)
        check_has_url(endpoint)
        url = endpoint.url
        pinned = await self._capture_pin(url)

        def with_pin(endpoint: Endpoint) -> Endpoint:
            if endpoint.url != url:
                raise RecordConflict("nothing is pinned: the webhook's URL was changed at the same time; try again")
            return msgspec.structs.replace(endpoint, pin=pinned)

        return await self._replace(endpoint_id, with_pin, "webhook pin", by)

    async def unpin(self, endpoint_id: str, *, by: Actor | None = None) -> Endpoint:
        """Accepts any valid certificate again."""
        self.get(endpoint_id)
        return await self._set(endpoint_id, {"pin": ""}, "webhook unpin", by)

    async def delete(self, endpoint_id: str, *, by: Actor | None = None) -> Endpoint:
        """Deletes the endpoint and discards its waiting deliveries.

        Its row stays, without the secrets, until its last delivery is removed. Its dead letters can still be discarded.
        """
        endpoint = await self.mark_deleted(endpoint_id, by=by)
        # If the process is killed here, tidying.py discards them.
        await self.discard_waiting(endpoint_id)
        return endpoint

    async def mark_deleted(self, endpoint_id: str, *, by: Actor | None = None) -> Endpoint:
        """The first half of `delete`; `discard_waiting` is the second."""
        now_s = self._clock()
        return await self._replace(endpoint_id, lambda endpoint: deleted(endpoint, now_s), "webhook delete", by)

    async def _set(self, endpoint_id: str, values: dict[str, object], verb: str, by: Actor | None) -> Endpoint:
        return await self._replace(endpoint_id, lambda endpoint: msgspec.structs.replace(endpoint, **values), verb, by)

    async def _replace(
        self, endpoint_id: str, change: Callable[[Endpoint], Endpoint], verb: str, by: Actor | None
    ) -> Endpoint:
        async with self._edit(self.get(endpoint_id).app_id, by) as edit:
            # Read it again: it may have changed while we waited for the lock, also on another node.
            before = self.get(endpoint_id)
            endpoint = change(before)
            if endpoint == before:
                return before
            await endpoint_rows.put(edit.connection, endpoint)
            await edit.note(verb, endpoint.app_id, target_of(endpoint))
            edit.endpoints = (endpoint,)
        return self._all.get(endpoint_id, endpoint)

    @asynccontextmanager
    async def _edit(self, app_id: str, by: Actor | None) -> AsyncIterator[Edit]:
        """A change of this app's endpoints, which the block writes and sets in the Edit, and of the app's hook mask."""
        async with self._records.edit(by) as edit:
            self.check_app(app_id)
            yield edit
            after = {endpoint.id: endpoint for endpoint in (*self.of_app(app_id), *edit.endpoints)}
            app = self._records.apps[app_id]
            hooks = hooks_of([endpoint for endpoint in after.values() if endpoint.deleted_at is None])
            if hooks != app.hooks:
                edit.app = msgspec.structs.replace(app, hooks=hooks)

    def _put(self, endpoints: Mapping[str, Endpoint]) -> None:
        self._all |= endpoints
        by_app: dict[str, list[Endpoint]] = {endpoint.app_id: [] for endpoint in endpoints.values()}
        for endpoint in self._all.values():
            if endpoint.app_id in by_app and endpoint.deleted_at is None:
                by_app[endpoint.app_id].append(endpoint)
        for app_id, of_app in by_app.items():
            if of_app:
                # As the store sorts them: nodes may have heard of them in another order.
                self._by_app[app_id] = tuple(sorted(of_app, key=_age))
            else:
                # Its last endpoint was deleted, perhaps with the app.
                self._by_app.pop(app_id, None)

    def set_failing_since(self, endpoint_id: str, since: float | None) -> None:
        """Changes memory only; Results writes it to the store."""
        endpoint = self._all.get(endpoint_id)
        if endpoint is None:
            return
        # In its place, without a look at all endpoints: a receiver may fail and recover a hundred times a second.
        changed = self._all[endpoint_id] = msgspec.structs.replace(endpoint, failing_since=since)
        of_app = self.of_app(endpoint.app_id)
        if of_app:
            self._by_app[endpoint.app_id] = tuple(changed if one.id == endpoint_id else one for one in of_app)

    async def forget_deleted(self) -> None:
        """Removes deleted endpoints that have no deliveries left."""
        if not self._deleted_ids():
            return
        async with self._store.reading() as connection:
            removable = await endpoint_rows.any_removable(connection)
        # A dead letter may keep an endpoint for ever.
        if removable:
            async with self._store.change() as connection:
                await endpoint_rows.remove_deleted(connection)
        await self.forget_removed()

    async def forget_removed(self) -> None:
        """Forgets the deleted endpoints that are no longer in the store. No version tells of their removal."""
        if not (deleted_ids := self._deleted_ids()):
            return
        async with self._store.reading() as connection:
            stored = await endpoint_rows.existing(connection, deleted_ids)
        for endpoint_id in deleted_ids - stored:
            self._all.pop(endpoint_id, None)

    def _deleted_ids(self) -> set[str]:
        return {endpoint.id for endpoint in self._all.values() if endpoint.deleted_at is not None}

    async def discard_waiting(self, endpoint_id: str) -> None:
        """Discards the waiting deliveries of a deleted endpoint, in batches, so that other writers get their turn."""
        await self._discard(endpoint_id, ("waiting",))

    async def remove_deliveries(self, endpoint_id: str) -> None:
        """Removes all deliveries of an endpoint whose app is deleted, also dead letters: they belong to the app, and
        another app may get its id."""
        await self._discard(endpoint_id, ("waiting", "failed"))
        removed = 1
        while removed:
            async with self._store.change() as connection:
                removed = await old_deliveries.remove_finished(
                    connection, endpoint_id, keep=0, older_than=0.0, before=self._clock()
                )

    async def _discard(self, endpoint_id: str, states: Collection[str]) -> None:
        async with self._store.reading() as connection:
            numbers = await delivery_rows.numbers(connection, (endpoint_id,), states)
        for start in range(0, len(numbers), delivery_rows.BATCH):
            batch = numbers[start : start + delivery_rows.BATCH]
            async with self._store.change() as connection:
                await delivery_rows.discard(connection, batch, self._clock(), states)

    # -- checking

    def fault_of(
        self,
        url: str | None,
        events: Sequence[str],
        format: str,
        channels: Sequence[str],
        client_events: Sequence[str] = (),
        batch: bool = False,
    ) -> str | None:
        """Why `create` would refuse these values; None if it wouldn't."""
        try:
            endpoint = Endpoint(
                id="",
                app_id="",
                url=url or "",
                secret="",
                events=tuple(events),
                channels=tuple(channels),
                client_events=tuple(client_events),
                format=format,
                batch=batch,
                created_at=0.0,
            )
            self._check(endpoint, url)
        except RecordError as error:
            return str(error)
        return None

    def _check(self, endpoint: Endpoint, url: str | None) -> None:
        """`url`: the one that it was given. An empty one is refused like any other wrong one."""
        if url is not None and (fault := self._sender().check_url(url)) is not None:
            raise RecordError(fault)
        check_wanted(endpoint)

    async def _capture_pin(self, url: str) -> str:
        try:
            return await self._sender().fingerprint(url)
        except PinUnavailable as error:
            raise RecordError(f"the certificate can't be pinned: {error}") from error
