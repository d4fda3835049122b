"""The handlers of the HTTP API (protocol/README.md "HTTP API").

They publish events, read channels and users, sign subscriptions and close a user's connections. middleware.py
authenticates the request before a handler runs; redpoll.protocol decodes and checks the body. A handler waits only for
Redis, for at most 2 s; after that the response is 503.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from functools import partial
from typing import Any, Final

import msgspec

from redpoll.cluster.bus import Outgoing, Unavailable
from redpoll.cluster.idempotency import Claim, Idempotency, Outcome
from redpoll.cluster.survey import Survey
from redpoll.control.daily_limit import DailyLimit
from redpoll.control.occupancy import Occupancy
from redpoll.control.publisher import Publisher
from redpoll.control.request import Request
from redpoll.control.response import EMPTY_OBJECT, Response, header_line
from redpoll.control.schemas import (
    Attributes,
    AuthAnswer,
    BatchAnswer,
    CachedEvent,
    ChannelAnswer,
    ChannelsAnswer,
    TriggerAnswer,
    User,
    UsersAnswer,
)
from redpoll.control.tracing import Tracer
from redpoll.protocol.apps import App
from redpoll.protocol.auth import AUTH_NAMES, encryption_secret, sign_channel
from redpoll.protocol.channels import Kind, is_encrypted, kind_of
from redpoll.protocol.errors import ApiError
from redpoll.protocol.messages import (
    EVENT_INFO,
    Event,
    check_channel,
    decode_auth,
    decode_batch,
    decode_event,
    parse_channel_info,
    parse_info,
)
from redpoll.protocol.presence import MAX_USER_ID_CHARS

__all__ = ["Api"]

_encode: Final = msgspec.json.Encoder().encode
_PREFLIGHT_HEADERS: Final = b"Access-Control-Allow-Methods: POST\r\nAccess-Control-Max-Age: 600\r\n"
_FORM: Final = "application/x-www-form-urlencoded"
# For a publish and the steps before it. The client gets its response within 2 s.
_PUBLISHED_WITHIN_S: Final = 1.9

# The result of a handler that doesn't always need a task (router.Handler).
Handling = Coroutine[Any, Any, Response] | None
# Renders the response's body, with the attributes that `info` asked for.
_RenderBody = Callable[[], Awaitable[bytes]]


class Api:
    """The handlers. Each takes an authenticated `Request` and returns a response, or raises ApiError or Unavailable.

    `master_key`: 32 bytes, from which the secrets of encrypted channels are derived; None if the operator set none.
    `tracer`: None if the event log is off.
    """

    def __init__(
        self,
        publisher: Publisher,
        occupancy: Occupancy,
        daily: DailyLimit,
        idempotency: Idempotency,
        questions: Survey,
        master_key: bytes | None = None,
        tracer: Tracer | None = None,
    ) -> None:
        self._publisher = publisher
        self._occupancy = occupancy
        self._daily = daily
        self._idempotency = idempotency
        self._questions = questions
        self._master_key = master_key
        self._tracer = tracer
        # Front.conclude, set by ControlPlane.
        self.conclude: Callable[[Request, Response | Exception], None]

    # -- publishing

    def trigger(self, call: Request) -> Handling:
        """POST events. Responds with `{}`, or with `info` `{"channels": {name: {…}}}`, each channel once."""
        app = call.app
        call.said = event = decode_event(call.body, call.params, app)
        correlation_id = event.correlation_id
        if correlation_id is not None:
            call.more_headers += header_line("X-Service-Correlation-Id", correlation_id)
        if event.info or not self._is_plain(app, correlation_id):
            return self.publish(call, event)
        name, data, skip = event.name, event.data, event.socket_id
        self._publish_plainly(call, [(channel, name, data, skip, None) for channel in event.channels])
        return None

    def _is_plain(self, app: App, correlation_id: str | None) -> bool:
        """Whether the publish needs no other Redis command and nothing to await first."""
        return self._publisher.open and app.daily_limit is None and (correlation_id is None or not app.idempotency)

    def _publish_plainly(self, call: Request, items: Sequence[tuple[str, str, str, str | None, None]]) -> None:
        """The path of nearly all requests: no task, no future. Redis' last reply triggers the response."""
        trace = self._sample(call)
        self._publisher.publish(call.app, items, trace, partial(self._published, call, trace))

    def _published(self, call: Request, trace: str | None, fault: Unavailable | None) -> None:
        if fault is not None:
            self.conclude(call, fault)
            return
        if trace is not None:
            self._accepted(call, trace)
        self.conclude(call, call.answer(EMPTY_OBJECT))

    async def publish(self, call: Request, event: Event) -> Response:
        """Publish any event: count it, trace it, wait for Redis' confirmation.

        The dashboard's console also calls this, with a request of which only `app` is used.
        """
        items = [Outgoing(channel, event.name, event.data, event.socket_id) for channel in event.channels]

        async def render_body() -> bytes:
            if not event.info:
                return EMPTY_OBJECT
            attributes = await self._attributes(call.app.id, [(channel, event.info) for channel in event.channels])
            return _encode(TriggerAnswer(dict(zip(event.channels, attributes, strict=True))))

        return call.answer(await self._publish(call, "events", items, event.correlation_id, render_body))

    def trigger_batch(self, call: Request) -> Handling:
        """POST batch_events. Responds with `{}`, or with any `info` `{"batch": [{…}, …]}`, in order of the events."""
        app = call.app
        call.said = events = decode_batch(call.body, app)
        correlation_id = events[0].correlation_id if events else None
        if correlation_id is not None:
            call.more_headers += header_line("X-Service-Correlation-Id", correlation_id)
        if events and not any(event.info for event in events) and self._is_plain(app, correlation_id):
            plain = [(event.channels[0], event.name, event.data, event.socket_id, None) for event in events]
            self._publish_plainly(call, plain)
            return None
        return self._publish_batch(call, events, correlation_id)

    async def _publish_batch(self, call: Request, events: Sequence[Event], correlation_id: str | None) -> Response:
        app = call.app
        items = [Outgoing(event.channels[0], event.name, event.data, event.socket_id) for event in events]

        async def render_body() -> bytes:
            if not any(event.info for event in events):
                return EMPTY_OBJECT
            wanted = [(event.channels[0], event.info) for event in events]
            return _encode(BatchAnswer(await self._attributes(app.id, wanted)))

        return call.answer(await self._publish(call, "batch_events", items, correlation_id, render_body))

    async def _publish(
        self,
        call: Request,
        endpoint: str,
        items: Sequence[Outgoing],
        correlation_id: str | None,
        render_body: _RenderBody,
    ) -> bytes:
        """Claim the id, count against the daily limit, publish; returns the response's body.

        For why the order matters see cluster/README.md "Idempotency and quotas".
        """
        try:
            async with asyncio.timeout(_PUBLISHED_WITHIN_S):
                if correlation_id is None or not call.app.idempotency:
                    await self._spend(call, len(items))
                    await self._publish_traced(call, items)
                    return await render_body()
                request = _fingerprint(endpoint, call)
                claim = await self._idempotency.claim(call.app.id, correlation_id, request)
                return await self._publish_once(call, claim, items, render_body)
        except TimeoutError:
            self._publisher.unconfirmed += len(items)
            raise Unavailable(f"no answer from Redis within {_PUBLISHED_WITHIN_S:g} s") from None

    async def _publish_once(
        self, call: Request, claim: Claim, items: Sequence[Outgoing], render_body: _RenderBody
    ) -> bytes:
        if claim.outcome is Outcome.CONFLICT:
            raise ApiError(
                "idempotency_conflict",
                "nothing was published: another request used this correlation_id within the last 120 s",
            )
        if claim.answer is not None:
            return claim.answer
        try:
            await self._spend(call, len(items))
        except ApiError:
            # If the claim stays, a repeated request is counted again, and refused again.
            with contextlib.suppress(Unavailable):
                await self._idempotency.withdraw(claim)
            raise
        await self._publish_traced(call, items, claim.once)
        body = await render_body()
        # The events are published. If the body can't be stored, a repeated request doesn't publish them again: it
        # renders the body again.
        with contextlib.suppress(Unavailable):
            await self._idempotency.settle(claim, body)
        return body

    async def _publish_traced(self, call: Request, items: Sequence[Outgoing], once: str | None = None) -> None:
        trace = self._sample(call)
        await self._publisher.publish_all(call.app, items, trace, once)
        if trace is not None:
            self._accepted(call, trace)

    def _sample(self, call: Request) -> str | None:
        """The trace id that goes with the events; None if they aren't traced."""
        return None if self._tracer is None else self._tracer.sample(call)

    def _accepted(self, call: Request, trace: str) -> None:
        assert self._tracer is not None
        self._tracer.span(trace, call.app.id, "accepted")

    async def _spend(self, call: Request, messages: int) -> None:
        """Count the messages against the app's daily limit, if any. Raises ApiError `daily_limit_exceeded`."""
        app, daily = call.app, self._daily
        limit = app.daily_limit
        if limit is None:
            return
        spent = await daily.spend(app, messages, limit)
        if spent.ok:
            if b"X-RateLimit-" not in call.more_headers:
                call.more_headers += daily.headers(spent, limit)
            return
        left_s = daily.left_s()
        # These replace the headers of the rate limit, which wasn't the limit that was exceeded.
        other_lines = [line for line in call.more_headers.splitlines(True) if not line.startswith(b"X-RateLimit-")]
        call.more_headers = (
            b"".join(other_lines) + daily.headers(spent, limit) + header_line("Retry-After", str(left_s))
        )
        raise ApiError(
            "daily_limit_exceeded",
            f"{messages} more messages would exceed the daily limit of the app's plan {app.plan}: {spent.used} of "
            f"{limit} messages are used. The count restarts at midnight UTC, in {left_s} s",
        )

    # -- channels

    async def list_channels(self, call: Request) -> Response:
        """GET channels. Responds with `{"channels": {name: {…}}}`: the occupied channels, sorted by name."""
        info = parse_info(call.param("info") or "", EVENT_INFO)
        prefix = call.param("filter_by_prefix") or ""
        channels = await self._occupancy.channels(call.app.id, prefix)
        attributes = await self._attributes(call.app.id, [(channel, info) for channel in channels])
        return call.answer(_encode(ChannelsAnswer(dict(zip(channels, attributes, strict=True)))))

    async def show_channel(self, call: Request) -> Response:
        """GET channels/NAME. Responds with `occupied`, `subscription_count`, and `user_count` of a presence channel.

        With `info=cache` also `cache`. A channel without subscribers has zeros; it is never 404.
        """
        app_id, channel = call.app.id, call.parameters[1]
        check_channel(channel)
        info = parse_channel_info(channel, call.param("info") or "")
        wanted = ("subscription_count", "user_count")
        (attributes,) = await self._attributes(app_id, [(channel, wanted)])
        subscriptions = attributes.subscription_count or 0
        answer = ChannelAnswer(subscriptions > 0, subscriptions, attributes.user_count)
        if "cache" in info:
            cached = await self._occupancy.cached(app_id, channel)
            answer.cache = None if cached is None else CachedEvent(cached.data, cached.ttl_s)
        return call.answer(_encode(answer))

    async def list_users(self, call: Request) -> Response:
        """GET channels/NAME/users. Responds with `{"users": [{"id": …}, …]}`; presence channels only."""
        channel = call.parameters[1]
        check_channel(channel)
        if kind_of(channel) is not Kind.PRESENCE:
            raise ApiError("not_presence_channel", "only presence channels have a list of users")
        users = await self._occupancy.user_ids(call.app.id, channel)
        return call.answer(_encode(UsersAnswer([User(user) for user in users])))

    # -- users

    async def terminate(self, call: Request) -> Response:
        """POST users/ID/terminate_connections. Closes the user's connections with 4009; responds with `{}`.

        The response waits for every worker. If one doesn't answer in time it is 503, and some of the connections may
        be closed.
        """
        user_id = call.parameters[-1]
        if len(user_id) > MAX_USER_ID_CHARS:
            raise ApiError("bad_request", f"a user id has at most {MAX_USER_ID_CHARS} characters")
        await self._questions.ask("terminate", app=call.app.id, user=user_id)
        return call.answer(EMPTY_OBJECT)

    async def authorize(self, call: Request) -> Response:
        """POST auth. Responds with `{"auth": "KEY:HEX"}`, and for a presence channel with the signed `channel_data`.

        The body is JSON, or a form as pusher-js sends it. The signature is made with the key of the request; a request
        with a token uses the app's oldest enabled key. With a master key, the response for an encrypted channel has
        its `shared_secret`.
        """
        form = call.headers.get("Content-Type", "").partition(";")[0].strip().lower() == _FORM
        asked = decode_auth(call.body, call.app, form=form)
        key, channel = call.key, asked.channel_name
        secret = call.app.secret_of(key)
        if secret is None:
            raise ApiError("app_disabled", "all keys of this app are disabled; enable one to sign subscriptions")
        # Only the signature of a presence channel covers member data. A page may send it with every request; pusher-js
        # forwards to the server only what this response has.
        channel_data = asked.channel_data if kind_of(channel) is Kind.PRESENCE else None
        answer = AuthAnswer(f"{key}:{sign_channel(secret, asked.socket_id, channel, channel_data)}")
        if channel_data is not None:
            answer.channel_data = channel_data
        if self._master_key is not None and is_encrypted(channel):
            answer.shared_secret = encryption_secret(self._master_key, channel)
        return call.answer(_encode(answer))

    async def preflight(self, call: Request) -> Response:
        """OPTIONS auth: the preflight of browsers (protocol/README.md "CORS")."""
        if b"Access-Control-Allow-Origin" not in call.more_headers:
            return Response(204, b"", call.more_headers)
        headers = call.more_headers + _PREFLIGHT_HEADERS
        wanted = call.headers.get("Access-Control-Request-Headers", "")
        if wanted and wanted.isascii():
            headers += header_line("Access-Control-Allow-Headers", wanted)
        return Response(204, b"", headers)

    async def _attributes(self, app_id: str, wanted: Sequence[tuple[str, tuple[str, ...]]]) -> list[Attributes]:
        """The wanted attributes of each (channel, info), without those that don't apply to the channel's kind."""
        counted = [name for name, info in wanted if "subscription_count" in info and kind_of(name) is not Kind.USER]
        presence = [name for name, info in wanted if "user_count" in info and kind_of(name) is Kind.PRESENCE]
        subscriptions: Mapping[str, int] = {}
        users: Mapping[str, int] = {}
        if counted:
            found = await self._occupancy.subscription_counts(app_id, counted)
            subscriptions = dict(zip(counted, found, strict=True))
        if presence:
            users = dict(zip(presence, await self._occupancy.user_counts(app_id, presence), strict=True))
        result = []
        for channel, info in wanted:
            attributes = Attributes()
            if "subscription_count" in info and channel in subscriptions:
                attributes.subscription_count = subscriptions[channel]
            if "user_count" in info and channel in users:
                attributes.user_count = users[channel]
            result.append(attributes)
        return result


def _fingerprint(endpoint: str, call: Request) -> bytes:
    """Equal for a repeated request, whatever its path prefix, signature and credential."""
    query = sorted((name, value) for name, value in call.params if name not in AUTH_NAMES)
    return b"%b\n%b\n%b" % (endpoint.encode(), _encode(query), call.body)
