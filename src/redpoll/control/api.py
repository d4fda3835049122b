"""The HTTP API's endpoints: publish, ask who is there, sign a subscription, end a user's connections (protocol.md 14).

Who calls, and with which body, is settled before (control.middleware); what a body may say is redpoll.protocol's.
Everything that waits here waits for Redis, at most 2 s, and then says 503.
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
# For a publish with all that goes before it; the caller is to have its answer within 2 s.
_PUBLISHED_WITHIN_S: Final = 1.9

# What a handler returns that doesn't always need a task (router.Handler).
Handling = Coroutine[Any, Any, Response] | None
# Tells what `info` asked for, as the answer's body.
_Tell = Callable[[], Awaitable[bytes]]


class Api:
    """The handlers. Each takes a `Request` with its app and returns the answer, or raises ApiError or Unavailable.

    `master_key`: the 32 bytes that encrypted channels' secrets are made of, None where the operator gave none;
    `tracer`: None where no event log is kept.
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
        # Front.conclude.
        self.conclude: Callable[[Request, Response | Exception], None]

    # -- publishing

    def trigger(self, call: Request) -> Handling:
        """POST events: `{}`, or with `info` `{"channels": {name: {…}}}`, one entry per distinct channel."""
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
        """Nothing is asked of Redis but to publish, and nothing has to be awaited before."""
        return self._publisher.open and app.daily_limit is None and (correlation_id is None or not app.idempotency)

    def _publish_plainly(self, call: Request, items: Sequence[tuple[str, str, str, str | None, None]]) -> None:
        """Nearly every call comes this way: no task, no future, and the response follows from Redis' last reply."""
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
        """The trigger's way for any event: counted, traced, confirmed. The dashboard's console goes it too; of the call
        its app is needed."""
        items = [Outgoing(channel, event.name, event.data, event.socket_id) for channel in event.channels]

        async def tell() -> bytes:
            if not event.info:
                return EMPTY_OBJECT
            told = await self._attributes(call.app.id, [(channel, event.info) for channel in event.channels])
            return _encode(TriggerAnswer(dict(zip(event.channels, told, strict=True))))

        return call.answer(await self._publish(call, "events", items, event.correlation_id, tell))

    def trigger_batch(self, call: Request) -> Handling:
        """POST batch_events: `{}`, or with any `info` `{"batch": [{…}, …]}`, by index."""
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

        async def tell() -> bytes:
            if not any(event.info for event in events):
                return EMPTY_OBJECT
            return _encode(BatchAnswer(await self._attributes(app.id, [_asked(event) for event in events])))

        return call.answer(await self._publish(call, "batch_events", items, correlation_id, tell))

    async def _publish(
        self, call: Request, what: str, items: Sequence[Outgoing], correlation_id: str | None, tell: _Tell
    ) -> bytes:
        """The order of cluster.md 7: id, spend, publish. Returns the answer's body."""
        try:
            async with asyncio.timeout(_PUBLISHED_WITHIN_S):
                if correlation_id is None or not call.app.idempotency:
                    await self._spend(call, len(items))
                    await self._publish_traced(call, items)
                    return await tell()
                request = _fingerprint(what, call)
                claim = await self._idempotency.claim(call.app.id, correlation_id, request)
                return await self._publish_once(call, claim, items, tell)
        except TimeoutError:
            self._publisher.unconfirmed += len(items)
            raise Unavailable(f"no answer from Redis within {_PUBLISHED_WITHIN_S:g} s") from None

    async def _publish_once(self, call: Request, claim: Claim, items: Sequence[Outgoing], tell: _Tell) -> bytes:
        if claim.outcome is Outcome.CONFLICT:
            raise ApiError(
                "idempotency_conflict",
                "this correlation_id was used for another request within the last 120 s: nothing was published",
            )
        if claim.answer is not None:
            return claim.answer
        try:
            await self._spend(call, len(items))
        except ApiError:
            # A claim that stays is no harm: its repetition is refused anew.
            with contextlib.suppress(Unavailable):
                await self._idempotency.withdraw(claim)
            raise
        await self._publish_traced(call, items, claim.once)
        body = await tell()
        # It is published: a repetition that finds no answer publishes nothing twice and tells the same.
        with contextlib.suppress(Unavailable):
            await self._idempotency.settle(claim, body)
        return body

    async def _publish_traced(self, call: Request, items: Sequence[Outgoing], once: str | None = None) -> None:
        trace = self._sample(call)
        await self._publisher.publish_all(call.app, items, trace, once)
        if trace is not None:
            self._accepted(call, trace)

    def _sample(self, call: Request) -> str | None:
        """The trace id that goes with the events, where their way is to be followed."""
        return None if self._tracer is None else self._tracer.sample(call)

    def _accepted(self, call: Request, trace: str) -> None:
        assert self._tracer is not None
        self._tracer.span(trace, call.app.id, "accepted")

    async def _spend(self, call: Request, messages: int) -> None:
        """Counts against the daily limit, where the app has one. Raises ApiError `daily_limit_exceeded`."""
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
        # In place of the address' limit, which isn't the one that was hit.
        kept = [line for line in call.more_headers.splitlines(True) if not line.startswith(b"X-RateLimit-")]
        call.more_headers = b"".join(kept) + daily.headers(spent, limit) + header_line("Retry-After", str(left_s))
        raise ApiError(
            "daily_limit_exceeded",
            f"{messages} messages more would pass the limit of the app's plan {app.plan}: {limit} a UTC day, "
            f"{spent.used} are used. The count begins anew in {left_s} s",
        )

    # -- asking

    async def list_channels(self, call: Request) -> Response:
        """GET channels: `{"channels": {name: {…}}}` of the occupied ones, in order of name."""
        info = parse_info(call.param("info") or "", EVENT_INFO)
        prefix = call.param("filter_by_prefix") or ""
        channels = await self._occupancy.channels(call.app.id, prefix)
        told = await self._attributes(call.app.id, [(channel, info) for channel in channels])
        return call.answer(_encode(ChannelsAnswer(dict(zip(channels, told, strict=True)))))

    async def show_channel(self, call: Request) -> Response:
        """GET channels/NAME: `occupied` and `subscription_count`, on presence channels `user_count`; `cache` if asked.

        A channel that nobody is in has zeros; it is never 404 (protocol.md 14.7).
        """
        app_id, channel = call.app.id, call.parameters[1]
        check_channel(channel)
        info = parse_channel_info(channel, call.param("info") or "")
        wanted = ("subscription_count", "user_count")
        (told,) = await self._attributes(app_id, [(channel, wanted)])
        subscriptions = told.subscription_count or 0
        answer = ChannelAnswer(subscriptions > 0, subscriptions, told.user_count)
        if "cache" in info:
            cached = await self._occupancy.cached(app_id, channel)
            answer.cache = None if cached is None else CachedEvent(cached.data, cached.ttl_s)
        return call.answer(_encode(answer))

    async def list_users(self, call: Request) -> Response:
        """GET channels/NAME/users: `{"users": [{"id": …}, …]}`, presence channels only."""
        channel = call.parameters[1]
        check_channel(channel)
        if kind_of(channel) is not Kind.PRESENCE:
            raise ApiError("not_presence_channel", "users are known of presence channels only")
        users = await self._occupancy.user_ids(call.app.id, channel)
        return call.answer(_encode(UsersAnswer([User(user) for user in users])))

    # -- users

    async def terminate(self, call: Request) -> Response:
        """POST users/ID/terminate_connections: `{}` when every worker has answered, which is when all connections of
        the user are being closed with 4009; else 503, and some may be (protocol.md 14.9)."""
        user_id = call.parameters[-1]
        if len(user_id) > MAX_USER_ID_CHARS:
            raise ApiError("bad_request", f"a user's id has at most {MAX_USER_ID_CHARS} characters")
        await self._questions.ask("terminate", app=call.app.id, user=user_id)
        return call.answer(EMPTY_OBJECT)

    async def authorize(self, call: Request) -> Response:
        """POST auth: `{"auth": "KEY:HEX"}`, on presence channels with the `channel_data` that was signed.

        The body is JSON (the spec) or a form (pusher-js). Signed with the key that the call was made with, for one
        with a token with the app's oldest. On encrypted channels with their `shared_secret`, given a master key.
        """
        form = call.headers.get("Content-Type", "").partition(";")[0].strip().lower() == _FORM
        asked = decode_auth(call.body, call.app, form=form)
        key, channel = call.key, asked.channel_name
        secret = call.app.secret_of(key)
        if secret is None:
            raise ApiError("app_disabled", "all keys of this app are disabled: there is none to sign with")
        # Presence channels only (spec 4.6, 5.3): a page's pusher-js may send its member data with every request, and
        # sends on no more than the answer holds.
        channel_data = asked.channel_data if kind_of(channel) is Kind.PRESENCE else None
        answer = AuthAnswer(f"{key}:{sign_channel(secret, asked.socket_id, channel, channel_data)}")
        if channel_data is not None:
            answer.channel_data = channel_data
        if self._master_key is not None and is_encrypted(channel):
            answer.shared_secret = encryption_secret(self._master_key, channel)
        return call.answer(_encode(answer))

    async def preflight(self, call: Request) -> Response:
        """OPTIONS auth, which browsers ask before they let a page send its headers (decisions.md)."""
        if b"Access-Control-Allow-Origin" not in call.more_headers:
            return Response(204, b"", call.more_headers)
        headers = call.more_headers + _PREFLIGHT_HEADERS
        wanted = call.headers.get("Access-Control-Request-Headers", "")
        if wanted and wanted.isascii():
            headers += header_line("Access-Control-Allow-Headers", wanted)
        return Response(204, b"", headers)

    async def _attributes(self, app_id: str, asked: Sequence[tuple[str, tuple[str, ...]]]) -> list[Attributes]:
        """What was asked of each channel, in one round; what doesn't apply to a channel is left out."""
        counted = [each for each, info in asked if "subscription_count" in info and kind_of(each) is not Kind.USER]
        peopled = [each for each, info in asked if "user_count" in info and kind_of(each) is Kind.PRESENCE]
        subscriptions: Mapping[str, int] = {}
        users: Mapping[str, int] = {}
        if counted:
            found = await self._occupancy.subscription_counts(app_id, counted)
            subscriptions = dict(zip(counted, found, strict=True))
        if peopled:
            users = dict(zip(peopled, await self._occupancy.user_counts(app_id, peopled), strict=True))
        told = []
        for channel, info in asked:
            attributes = Attributes()
            if "subscription_count" in info and channel in subscriptions:
                attributes.subscription_count = subscriptions[channel]
            if "user_count" in info and channel in users:
                attributes.user_count = users[channel]
            told.append(attributes)
        return told


def _asked(event: Event) -> tuple[str, tuple[str, ...]]:
    return event.channels[0], event.info


def _fingerprint(what: str, call: Request) -> bytes:
    """All that makes two requests the same: at either mount, signed anew, by whichever credential."""
    query = sorted((name, value) for name, value in call.params if name not in AUTH_NAMES)
    return b"%b\n%b\n%b" % (what.encode(), _encode(query), call.body)
