"""Webhooks of a fake server: recorded with the bytes and headers that the real server sends, but not sent.

The bodies and signatures are made by `control/webhooks/payloads.py`. A channel that becomes vacant, and a member who
leaves, wait 3 s for a return, as in the server; `FakeServer.clock` shortens that.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal

import msgspec

from redpoll.cluster.transition import Transition
from redpoll.control.webhooks.payloads import headers, render
from redpoll.protocol.apps import App
from redpoll.protocol.effects import Publish
from redpoll.protocol.presence import Member
from redpoll.testing.clock import Clock, Timer
from redpoll.testing.recorder import Recorder

__all__ = ["Format", "Webhook", "Webhooks"]

Format = Literal["service", "pusher"]
# The default of the setting webhook_debounce_s.
_DEBOUNCE_S: Final = 3.0
# A cache miss is reported once in this time, unless something was cached since.
_MISS_AGAIN_S: Final = 60.0
_MAX_RECORDED: Final = 100_000


@dataclass(frozen=True)
class Webhook:
    """One delivery: what the real server would POST. `event` is redpoll's name, such as `channel.occupied`."""

    event: str
    channel: str
    body: bytes
    headers: Mapping[str, str] = field(repr=False)
    user_id: str | None = None

    @property
    def json(self) -> Any:
        return msgspec.json.decode(self.body)


class Webhooks:
    """`deliveries` in the order of their changes. `secret` signs them."""

    def __init__(self, clock: Clock, recorder: Recorder, format: Format, secret: str) -> None:
        self.deliveries: list[Webhook] = []
        self._clock = clock
        self._recorder = recorder
        self._format: Format = format
        self._secret = secret
        self._stamp = 0
        # Leaves that wait for a return.
        self._leaving: dict[tuple[str, str, str | None], Timer] = {}
        self._misses: dict[tuple[str, str], float] = {}

    def occupied(self, app: App, channel: str, count: int) -> None:
        if not self._returned(app, channel, None):
            self._report(app, "channel.occupied", channel, detail=str(count).encode())

    def vacated(self, app: App, channel: str) -> None:
        self._left(app, "channel.vacated", channel, None)

    def member_added(self, app: App, channel: str, member: Member) -> None:
        if not self._returned(app, channel, member.user_id):
            self._report(app, "member.added", channel, member.user_id, member.user_info)

    def member_removed(self, app: App, channel: str, user_id: str) -> None:
        self._left(app, "member.removed", channel, user_id)

    def client_event(self, app: App, event: Publish, socket_id: str) -> None:
        detail = msgspec.json.encode({"event": event.event, "data": event.data, "socket_id": socket_id})
        self._report(app, "client_event", event.channel, event.user_id, detail)

    def counted(self, app: App, channel: str, count: int) -> None:
        self._report(app, "subscription.count", channel, detail=str(count).encode())

    def cache_miss(self, app: App, channel: str) -> None:
        now = self._clock.now()
        if self._misses.get((app.id, channel), float("-inf")) <= now:
            self._misses[app.id, channel] = now + _MISS_AGAIN_S
            self._report(app, "cache.miss", channel)

    def cached(self, app: App, channel: str) -> None:
        self._misses.pop((app.id, channel), None)

    def reset(self) -> None:
        self.deliveries.clear()

    def _left(self, app: App, event: str, channel: str, user_id: str | None) -> None:
        key, left_s = (app.id, channel, user_id), self._clock.time_s()

        def report() -> None:
            del self._leaving[key]
            self._report(app, event, channel, user_id, time_s=left_s)

        self._leaving[key] = self._clock.call_later(_DEBOUNCE_S, report)

    def _returned(self, app: App, channel: str, user_id: str | None) -> bool:
        timer = self._leaving.pop((app.id, channel, user_id), None)
        if timer is not None:
            timer.cancel()
        return timer is not None

    def _report(
        self,
        app: App,
        event: str,
        channel: str,
        user_id: str | None = None,
        detail: bytes = b"",
        time_s: float | None = None,
    ) -> None:
        if len(self.deliveries) >= _MAX_RECORDED:
            return
        now_s = self._clock.time_s()
        self._stamp = max(self._stamp + 1, int(now_s * 1_000_000))
        time_ms = int((now_s if time_s is None else time_s) * 1000)
        transition = Transition(0, self._stamp, event, app.id, channel, user_id, time_ms, detail, None)
        body = render(self._format, transition)
        lines = headers(
            self._format,
            event,
            body,
            delivery_id=secrets.token_hex(16),
            attempt=1,
            now_s=now_s,
            secret=self._secret,
            key=app.signing_key(),
        )
        self.deliveries.append(Webhook(event, channel, body, lines, user_id))
        self._recorder.changed()
