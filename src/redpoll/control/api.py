"""The HTTP API's endpoints: publish, ask who is there, sign a subscription (protocol.md 14, spec 4).

Who calls, and with which body, is settled before (control.middleware); what a body may say is redpoll.protocol's.
Everything that waits here waits for Redis, at most 2 s, and then says 503.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from redpoll.cluster.bus import Outgoing
from redpoll.control.answers import EMPTY_OBJECT, Answer, header_line
from redpoll.control.call import Call
from redpoll.control.occupancy import Occupancy
from redpoll.control.publisher import Publisher
from redpoll.protocol.auth import sign_channel
from redpoll.protocol.channels import Kind, kind_of
from redpoll.protocol.errors import ApiError
from redpoll.protocol.messages import (
    EVENT_INFO,
    check_channel,
    decode_auth,
    decode_batch,
    decode_event,
    parse_info,
)

__all__ = ["Api"]

_encode: Final = msgspec.json.Encoder().encode
# `cache` is allowed everywhere and told where something is cached.
_CHANNEL_INFO: Final = EVENT_INFO | {"cache"}
_PREFLIGHT_HEADERS: Final = b"Access-Control-Allow-Methods: POST\r\nAccess-Control-Max-Age: 600\r\n"
_FORM: Final = "application/x-www-form-urlencoded"


class Api:
    """The handlers. Each takes a `Call` with its app and returns the answer, or raises ApiError or Unavailable."""

    def __init__(self, publisher: Publisher, occupancy: Occupancy) -> None:
        self._publisher = publisher
        self._occupancy = occupancy

    async def trigger(self, call: Call) -> Answer:
        """POST events: `{}`, or with `info` `{"channels": {name: {…}}}`, one entry per distinct channel."""
        app, publisher = call.app, self._publisher
        event = decode_event(call.body, call.params, app)
        if publisher.open and len(event.channels) == 1:
            publisher.confirmed(
                await publisher.publish(
                    app.id, event.channels[0], event.name, event.data, event.socket_id, call.trace_id
                )
            )
        else:
            items = [Outgoing(channel, event.name, event.data, event.socket_id) for channel in event.channels]
            await publisher.publish_all(app.id, items, call.trace_id)
        more_headers = b""
        if event.correlation_id is not None:
            more_headers = header_line("X-Service-Correlation-Id", event.correlation_id)
        if not event.info:
            return call.answer(EMPTY_OBJECT, more_headers)
        asked = [(channel, event.info) for channel in event.channels]
        told = await self._attributes(app.id, asked)
        return call.answer(_encode({"channels": dict(zip(event.channels, told, strict=True))}), more_headers)

    async def trigger_batch(self, call: Call) -> Answer:
        """POST batch_events: `{}`, or with any `info` `{"batch": [{…}, …]}`, by index."""
        events = decode_batch(call.body, call.app)
        items = [Outgoing(event.channels[0], event.name, event.data, event.socket_id) for event in events]
        await self._publisher.publish_all(call.app.id, items, call.trace_id)
        if not any(event.info for event in events):
            return call.answer(EMPTY_OBJECT)
        told = await self._attributes(call.app.id, [(event.channels[0], event.info) for event in events])
        return call.answer(_encode({"batch": told}))

    async def list_channels(self, call: Call) -> Answer:
        """GET channels: `{"channels": {name: {…}}}` of the occupied ones, in order of name."""
        info = parse_info(call.param("info") or "", EVENT_INFO)
        prefix = call.param("filter_by_prefix") or ""
        channels = await self._occupancy.channels(call.app.id, prefix)
        told = await self._attributes(call.app.id, [(channel, info) for channel in channels])
        return call.answer(_encode({"channels": dict(zip(channels, told, strict=True))}))

    async def show_channel(self, call: Call) -> Answer:
        """GET channels/NAME: `occupied` and `subscription_count`, on presence channels `user_count`.

        A channel that nobody is in has zeros; it is never 404 (protocol.md 14.7).
        """
        channel = call.parameters[1]
        check_channel(channel)
        info = parse_info(call.param("info") or "", _CHANNEL_INFO)
        is_presence = kind_of(channel) is Kind.PRESENCE
        if "user_count" in info and not is_presence:
            text = "Cannot retrieve the user count unless the channel is a presence channel"
            raise ApiError("not_presence_channel", text)
        wanted = ("subscription_count", "user_count") if is_presence else ("subscription_count",)
        (told,) = await self._attributes(call.app.id, [(channel, wanted)])
        return call.answer(_encode({"occupied": told["subscription_count"] > 0, **told}))

    async def list_users(self, call: Call) -> Answer:
        """GET channels/NAME/users: `{"users": [{"id": …}, …]}`, presence channels only."""
        channel = call.parameters[1]
        check_channel(channel)
        if kind_of(channel) is not Kind.PRESENCE:
            raise ApiError("not_presence_channel", "users are known of presence channels only")
        users = await self._occupancy.user_ids(call.app.id, channel)
        return call.answer(_encode({"users": [{"id": user} for user in users]}))

    async def authorize(self, call: Call) -> Answer:
        """POST auth: `{"auth": "KEY:HEX"}`, on presence channels with the `channel_data` that was signed.

        The body is JSON (the spec) or a form (pusher-js). Signed with the key that the call was made with.
        """
        form = call.headers.get("Content-Type", "").partition(";")[0].strip().lower() == _FORM
        asked = decode_auth(call.body, call.app, form=form)
        secret = call.app.secret_of(call.key)
        assert secret is not None
        digest = sign_channel(secret, asked.socket_id, asked.channel_name, asked.channel_data)
        told = {"auth": f"{call.key}:{digest}"}
        if kind_of(asked.channel_name) is Kind.PRESENCE and asked.channel_data is not None:
            told["channel_data"] = asked.channel_data
        return call.answer(_encode(told))

    async def preflight(self, call: Call) -> Answer:
        """OPTIONS auth, which browsers ask before they let a page send its headers (decisions.md)."""
        if b"Access-Control-Allow-Origin" not in call.more_headers:
            return Answer(204, b"", call.more_headers)
        headers = call.more_headers + _PREFLIGHT_HEADERS
        wanted = call.headers.get("Access-Control-Request-Headers", "")
        if wanted and wanted.isascii():
            headers += header_line("Access-Control-Allow-Headers", wanted)
        return Answer(204, b"", headers)

    async def _attributes(self, app_id: str, asked: Sequence[tuple[str, tuple[str, ...]]]) -> list[dict[str, int]]:
        """What was asked of each channel, in one round; what doesn't apply to a channel is left out."""
        counted = [channel for channel, info in asked if "subscription_count" in info]
        peopled = [channel for channel, info in asked if "user_count" in info and kind_of(channel) is Kind.PRESENCE]
        subscriptions: Mapping[str, int] = {}
        users: Mapping[str, int] = {}
        if counted:
            found = await self._occupancy.subscription_counts(app_id, counted)
            subscriptions = dict(zip(counted, found, strict=True))
        if peopled:
            users = dict(zip(peopled, await self._occupancy.user_counts(app_id, peopled), strict=True))
        told: list[dict[str, Any]] = []
        for channel, info in asked:
            attributes = {}
            if "subscription_count" in info:
                attributes["subscription_count"] = subscriptions[channel]
            if "user_count" in info and channel in users:
                attributes["user_count"] = users[channel]
            told.append(attributes)
        return told
