"""The handlers of the HTTP API (protocol/README.md "HTTP API").

They publish events, read channels and users, sign subscriptions and close a user's connections. middleware.py
authenticates the request before a handler runs; redpoll.protocol decodes and checks the body. A handler waits only for
Redis, for at most 2 s; after that the response is 503.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Final

import msgspec

from redpoll._publish import Call
from redpoll.cluster.bus import Unavailable
from redpoll.cluster.idempotency import Claim, Idempotency, Outcome
from redpoll.cluster.questions import TerminateUser
from redpoll.cluster.redis.keys import SHARDS
from redpoll.cluster.survey import Survey
from redpoll.control.api.answers import (
    attributes_of,
    cursor_of,
    fingerprint,
    idempotency_conflict,
    page_limit,
    parse_cursor,
    signed,
)
from redpoll.control.api.occupancy import ChannelPage, Occupancy, TooManyChannels
from redpoll.control.http.cross_origin import preflight
from redpoll.control.http.request import Request
from redpoll.control.http.response import EMPTY_OBJECT, Response, header_line
from redpoll.control.http.schemas import (
    Attributes,
    BatchResponse,
    CachedEvent,
    ChannelResponse,
    TriggerResponse,
    User,
)
from redpoll.control.publish.daily_limit import DailyLimit
from redpoll.control.publish.publisher import NothingPublished, Publisher
from redpoll.control.tracing.tracing import Tracer
from redpoll.protocol.apps import App
from redpoll.protocol.channels import Kind, kind_of
from redpoll.protocol.errors import ApiError
from redpoll.protocol.messages import (
    EVENT_INFO,
    check_channel,
    decode_auth,
    decode_batch,
    decode_event,
    parse_channel_info,
    parse_info,
)
from redpoll.protocol.presence import MAX_USER_ID_CHARS

__all__ = ["MAX_UNPAGED", "Api"]

# Channels of an answer without `limit` and `cursor`.
MAX_UNPAGED: Final = 50_000
# An answer is copied as a whole a few times on its way to the worker; 2 MiB of names are 1 ms.
_MAX_UNPAGED_BYTES: Final = 2 * 1024 * 1024
_RENDERED_AT_ONCE: Final = 500

_encode: Final = msgspec.json.Encoder().encode
_NO_ATTRIBUTES: Final = Attributes()
_FORM: Final = "application/x-www-form-urlencoded"
# For a publish and the steps before it. The client gets its response within 2 s.
_PUBLISHED_WITHIN_S: Final = 1.9

# The result of a handler that doesn't always need a task (router.Handler).
Handling = Coroutine[Any, Any, Response] | None


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
        survey: Survey,
        master_key: bytes | None = None,
        tracer: Tracer | None = None,
    ) -> None:
        self._publisher = publisher
        self._occupancy = occupancy
        self._daily = daily
        self._idempotency = idempotency
        self._survey = survey
        self._master_key = master_key
        self._tracer = tracer
        # Front.conclude, set by ControlPlane.
        self.conclude: Callable[[Request, Response | Exception], None]

    # -- publishing

    def trigger(self, request: Request) -> Handling:
        """POST events. Responds with `{}`, or with `info` `{"channels": {name: {…}}}`, each channel once."""
        return self._trigger(request, decode_event(request.body, request.params, request.app))

    def trigger_batch(self, request: Request) -> Handling:
        """POST batch_events. Responds with `{}`, or with any `info` `{"batch": [{…}, …]}`, in order of the events."""
        return self._trigger(request, decode_batch(request.body, request.app))

    def _trigger(self, request: Request, call: Call) -> Handling:
        request.decoded = call
        if call.correlation_id is not None:
            request.more_headers += header_line("X-Service-Correlation-Id", call.correlation_id)
        if not call.count or call.infos or not self._is_plain(request.app, call.correlation_id):
            return self.publish(request, call)
        trace = self._sample(request)
        # The way of nearly all requests: no task, no future. Redis' last reply triggers the response.
        self._publisher.publish(call, trace, partial(self._published, request, trace))
        return None

    def _is_plain(self, app: App, correlation_id: str | None) -> bool:
        """Whether the publish has nothing to await first."""
        return self._publisher.open and app.daily_limit is None and (correlation_id is None or not app.idempotency)

    def _published(self, request: Request, trace: str | None, fault: Unavailable | ApiError | None) -> None:
        if fault is not None:
            self.conclude(request, fault)
            return
        if trace is not None:
            self._accepted(request)
        self.conclude(request, request.ok(EMPTY_OBJECT))

    async def publish(self, request: Request, call: Call) -> Response:
        """Publish any call: count it, trace it, wait for Redis' confirmation.

        The dashboard's console also calls this, with a request of which only `app` is used.
        """
        return request.ok(await self._publish(request, call))

    async def _render_body(self, app_id: str, call: Call) -> bytes:
        """The response's body, with the attributes that `info` asked for."""
        if not call.infos:
            return EMPTY_OBJECT
        events = call.events_of()
        if call.is_batch:
            wanted = [(channels[0], info) for (*_, channels, _), info in zip(events, call.infos, strict=True)]
            return _encode(BatchResponse(await self._attributes(app_id, wanted)))
        ((*_, channels, _),), (info,) = events, call.infos
        attributes = await self._attributes(app_id, [(channel, info) for channel in channels])
        return _encode(TriggerResponse(dict(zip(channels, attributes, strict=True))))

    async def _publish(self, request: Request, call: Call) -> bytes:
        """Claim the id, count against the daily limit, publish; returns the response's body.

        For why the order matters see cluster/README.md "Idempotency and quotas".
        """
        app_id, correlation_id = request.app.id, call.correlation_id
        try:
            async with asyncio.timeout(_PUBLISHED_WITHIN_S):
                if correlation_id is None or not request.app.idempotency:
                    await self._spend(request, call.count)
                    await self._publish_traced(request, call)
                    return await self._render_body(app_id, call)
                known_by = fingerprint(call.is_batch, request.params, request.body)
                claim = await self._idempotency.claim(app_id, correlation_id, known_by)
                return await self._publish_once(request, claim, call)
        except TimeoutError:
            raise Unavailable(f"no answer from Redis within {_PUBLISHED_WITHIN_S:g} s") from None

    async def _publish_once(self, request: Request, claim: Claim, call: Call) -> bytes:
        if claim.outcome is Outcome.CONFLICT:
            raise idempotency_conflict()
        if claim.answer is not None:
            return claim.answer
        try:
            await self._spend(request, call.count, claim.once)
        except ApiError:
            # If the claim stays, a repeated request is counted again, and refused again.
            await self._withdraw(claim)
            raise
        try:
            await self._publish_traced(request, call, claim.once)
        except NothingPublished:
            await self._withdraw(claim)
            raise
        body = await self._render_body(request.app.id, call)
        # The events are published. If the body can't be stored, a repeated request doesn't publish them again: it
        # renders the body again.
        with contextlib.suppress(Unavailable):
            await self._idempotency.settle(claim, body)
        return body

    async def _withdraw(self, claim: Claim) -> None:
        with contextlib.suppress(Unavailable):
            await self._idempotency.withdraw(claim)

    async def _publish_traced(self, request: Request, call: Call, once: str | None = None) -> None:
        trace = self._sample(request)
        await self._publisher.publish_all(call, trace, once)
        if trace is not None:
            self._accepted(request)

    def _sample(self, request: Request) -> str | None:
        """The text that goes with the events (Tracer.sample); None if they aren't traced."""
        return None if self._tracer is None else self._tracer.sample(request)

    def _accepted(self, request: Request) -> None:
        assert self._tracer is not None
        self._tracer.accepted(request)

    async def _spend(self, request: Request, messages: int, once: str | None = None) -> None:
        """Count the messages against the app's daily limit, if any; with `once`, once. Raises ApiError
        `daily_limit_exceeded`."""
        app, daily = request.app, self._daily
        limit = app.daily_limit
        if limit is None:
            return
        spent = await daily.spend(app, messages, limit, once)
        if spent.ok:
            if b"X-RateLimit-" not in request.more_headers:
                request.more_headers += daily.headers(spent, limit)
            return
        left_s = daily.left_s()
        # These replace the headers of the rate limit, which wasn't the limit that was exceeded.
        other_lines = [line for line in request.more_headers.splitlines(True) if not line.startswith(b"X-RateLimit-")]
        request.more_headers = (
            b"".join(other_lines) + daily.headers(spent, limit) + header_line("Retry-After", str(left_s))
        )
        raise ApiError(
            "daily_limit_exceeded",
            f"{messages} more messages would exceed the daily limit of the app's plan {app.plan}: {spent.used} of "
            f"{limit} messages are used. The count restarts at midnight UTC, in {left_s} s",
        )

    # -- channels

    async def list_channels(self, request: Request) -> Response:
        """GET channels. Responds with `{"channels": {name: {…}}}`: the occupied channels, sorted by name.

        With `limit` or `cursor` a page of them, and `next`. Without, more than MAX_UNPAGED channels are refused.
        """
        info = parse_info(request.param("info") or "", EVENT_INFO)
        prefix = request.param("filter_by_prefix") or ""
        limit, cursor = request.param("limit"), request.param("cursor")
        app_id, parts, end = request.app.id, [], b"}}"
        if limit is None and cursor is None:
            batches = self._occupancy.channels(app_id, prefix, max_count=MAX_UNPAGED, max_bytes=_MAX_UNPAGED_BYTES)
            try:
                async for names in batches:
                    parts.append(await self._channel_items(app_id, names, info))
            except TooManyChannels:
                raise ApiError(
                    "bad_request",
                    f"there are more than {MAX_UNPAGED} occupied channels, or their names are longer than "
                    f"{_MAX_UNPAGED_BYTES} bytes; read them in pages: add limit=1000, and then cursor= with the `next` "
                    "of the answer before",
                ) from None
        else:
            page = await self._occupancy.page(app_id, prefix, page_limit(limit), parse_cursor(cursor, SHARDS))
            for start in range(0, len(page.names), _RENDERED_AT_ONCE):
                parts.append(await self._channel_items(app_id, page.names[start : start + _RENDERED_AT_ONCE], info))
                await asyncio.sleep(0)
            end = b'},"next":%b}' % _encode(_cursor_of(page))
        return request.ok(_joined(b'{"channels":{', parts, end))

    async def _channel_items(self, app_id: str, names: Sequence[str], info: tuple[str, ...]) -> bytes:
        """The members of the JSON object of channels, without its braces."""
        if not info:
            return _encode(dict.fromkeys(names, _NO_ATTRIBUTES))[1:-1]
        attributes = await self._attributes(app_id, [(name, info) for name in names])
        return _encode(dict(zip(names, attributes, strict=True)))[1:-1]

    async def show_channel(self, request: Request) -> Response:
        """GET channels/NAME. Responds with `occupied`, `subscription_count`, and `user_count` of a presence channel.

        With `info=cache` also `cache`. A channel without subscribers has zeros; it is never 404.
        """
        app_id, channel = request.app.id, request.parameters[1]
        check_channel(channel)
        info = parse_channel_info(channel, request.param("info") or "")
        wanted = ("subscription_count", "user_count")
        (attributes,) = await self._attributes(app_id, [(channel, wanted)])
        subscriptions = attributes.subscription_count or 0
        body = ChannelResponse(subscriptions > 0, subscriptions, attributes.user_count)
        if "cache" in info:
            cached = await self._occupancy.cached(app_id, channel)
            body.cache = None if cached is None else CachedEvent(cached.data, cached.ttl_s)
        return request.ok(_encode(body))

    async def list_users(self, request: Request) -> Response:
        """GET channels/NAME/users. Responds with `{"users": [{"id": …}, …]}`; presence channels only."""
        channel = request.parameters[1]
        check_channel(channel)
        if kind_of(channel) is not Kind.PRESENCE:
            raise ApiError("not_presence_channel", "only presence channels have a list of users")
        # The shape of UsersResponse, in slices.
        parts = []
        async for ids in self._occupancy.user_ids(request.app.id, channel):
            parts.append(_encode([User(user) for user in ids])[1:-1])
        return request.ok(_joined(b'{"users":[', parts, b"]}"))

    # -- users

    async def terminate(self, request: Request) -> Response:
        """POST users/ID/terminate_connections. Closes the user's connections with 4009; responds with `{}`.

        The response waits for every worker. If one doesn't answer in time it is 503, and some of the connections may
        be closed.
        """
        user_id = request.parameters[-1]
        if len(user_id) > MAX_USER_ID_CHARS:
            raise ApiError("bad_request", f"a user id has at most {MAX_USER_ID_CHARS} characters")
        await self._survey.ask(TerminateUser(request.app.id, user_id))
        return request.ok(EMPTY_OBJECT)

    async def authorize(self, request: Request) -> Response:
        """POST auth. Responds with `{"auth": "KEY:HEX"}`, and for a presence channel with the signed `channel_data`.

        The body is JSON, or a form as pusher-js sends it. The signature is made with the key of the request; a request
        with a token uses the app's oldest enabled key. With a master key, the response for an encrypted channel has
        its `shared_secret`.
        """
        form = request.headers.get("Content-Type", "").partition(";")[0].strip().lower() == _FORM
        asked = decode_auth(request.body, request.app, form=form)
        return request.ok(_encode(signed(asked, request.app, request.key, self._master_key)))

    async def preflight(self, request: Request) -> Response:
        """OPTIONS auth: the preflight of browsers (protocol/README.md "CORS")."""
        return preflight(request.more_headers, request.headers.get("Access-Control-Request-Headers", ""))

    async def preflight_read(self, request: Request) -> Response:
        """OPTIONS channels/NAME/stream."""
        wanted = request.headers.get("Access-Control-Request-Headers", "")
        return preflight(request.more_headers, wanted, b"GET, HEAD")

    async def _attributes(self, app_id: str, wanted: Sequence[tuple[str, tuple[str, ...]]]) -> list[Attributes]:
        """The wanted attributes of each (channel, info), without those that don't apply to the channel's kind."""
        counted = [name for name, info in wanted if "subscription_count" in info and kind_of(name) is not Kind.USER]
        presence = [name for name, info in wanted if "user_count" in info and kind_of(name) is Kind.PRESENCE]
        subscriptions: Mapping[str, int] = {}
        users: Mapping[str, int] = {}
        if counted:
            counts = await self._occupancy.subscription_counts(app_id, counted)
            subscriptions = dict(zip(counted, counts, strict=True))
        if presence:
            users = dict(zip(presence, await self._occupancy.user_counts(app_id, presence), strict=True))
        return [
            attributes_of(name, info, partial(subscriptions.__getitem__, name), partial(users.__getitem__, name))
            for name, info in wanted
        ]


def _joined(begin: bytes, slices: Iterable[bytes], end: bytes) -> bytes:
    """One JSON value from slices of its members. A body has megabytes, so it is copied only once."""
    pieces = [begin]
    for members in filter(None, slices):
        pieces += (members, b",")
    if len(pieces) > 1:
        pieces.pop()
    return b"".join((*pieces, end))


def _cursor_of(page: ChannelPage) -> str | None:
    return None if page.after is None else cursor_of(*page.after)
