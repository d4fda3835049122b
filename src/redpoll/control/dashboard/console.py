"""The debug console: every event of an app as it goes by, and a box to publish from.

The page subscribes with pusher-js to the server itself, to a channel that only it can join: signed here, with the key
that the app's record has for nothing else (decisions.md "Dashboard and trace"). Publishers copy events to it only while
the record says that somebody watches, so the page says so again and again.
"""

from __future__ import annotations

import time
from typing import Final

import msgspec

from redpoll.cluster.bus import Outgoing, Unavailable
from redpoll.cluster.traces import new_trace_id
from redpoll.control.answers import Answer
from redpoll.control.dashboard.door import Door, Visit
from redpoll.control.dashboard.pages import SECURITY
from redpoll.control.dashboard.setup import PublicAddress
from redpoll.control.publisher import Publisher
from redpoll.control.records import Records
from redpoll.control.routes import Route
from redpoll.protocol.auth import sign_channel
from redpoll.protocol.channels import CONSOLE
from redpoll.protocol.errors import ApiError
from redpoll.protocol.messages import decode_event

__all__ = ["ConsolePages"]

# The page asks each 30 s.
_WATCHED_S: Final = 60.0
_JSON: Final = b"Content-Type: application/json\r\nCache-Control: no-store\r\n" + SECURITY


class ConsolePages:
    def __init__(self, door: Door, records: Records, publisher: Publisher, address: PublicAddress) -> None:
        self._door = door
        self._records = records
        self._publisher = publisher
        self._address = address

    def routes(self) -> list[Route]:
        door = self._door
        return [
            door.route("GET", "/apps/{app_id}/console", "console", self.show),
            door.route("POST", "/apps/{app_id}/console/watch", "console_watch", self.watch),
            door.route("POST", "/apps/{app_id}/console/auth", "console_auth", self.authorize),
            door.route("POST", "/apps/{app_id}/console/publish", "console_publish", self.publish, "admin"),
        ]

    async def show(self, visit: Visit) -> Answer:
        """GET …/console."""
        app = visit.app
        key = await self._records.watch_console(app.id, time.time() + _WATCHED_S)
        address = self._address.of(visit.call)
        channel = visit.query.get("channel", "")
        return visit.page(
            "console.html",
            app=app,
            key=key.key,
            at=address,
            console=CONSOLE,
            channel=channel,
            sockets=(address.sockets,),
        )

    async def watch(self, visit: Visit) -> Answer:
        """POST …/console/watch: the page is still open."""
        await self._records.watch_console(visit.app.id, time.time() + _WATCHED_S)
        return Answer(204, b"", SECURITY)

    async def authorize(self, visit: Visit) -> Answer:
        """POST …/console/auth: socket_id, channel_name, as pusher-js asks."""
        form, key = visit.form, visit.app.console_key
        if form.text("channel_name") != CONSOLE or key is None:
            raise ApiError("forbidden", "This opens the console's channel only.")
        signature = sign_channel(key.secret, form.text("socket_id"), CONSOLE)
        return Answer(200, msgspec.json.encode({"auth": f"{key.key}:{signature}"}), _JSON)

    async def publish(self, visit: Visit) -> Answer:
        """POST …/console/publish: channel, name, data. Answers `{"fault": {field: sentence}}` or `{"trace_id"}`."""
        app, form = visit.app, visit.form
        channel, name, data = form.text("channel"), form.text("name"), form.raw("data")
        body = msgspec.json.encode({"channel": channel, "name": name, "data": data})
        try:
            event = decode_event(body, [], app)
        except ApiError as error:
            field = {"invalid_channel": "channel", "invalid_event_name": "name"}.get(error.code, "data")
            return Answer(
                422, msgspec.json.encode({"fault": {field: f"{error.message[:1].upper()}{error.message[1:]}."}}), _JSON
            )
        trace_id = new_trace_id()
        try:
            await self._publisher.publish_all(app, [Outgoing(event.channels[0], event.name, event.data)], None)
        except Unavailable as error:
            return Answer(503, msgspec.json.encode({"fault": {"": str(error)}}), _JSON)
        await visit.note("event published", app=app, target=channel, detail=event.name)
        return Answer(200, msgspec.json.encode({"trace_id": trace_id}), _JSON)
