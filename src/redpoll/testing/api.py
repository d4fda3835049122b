"""The HTTP API of a fake server: the routes of `control/api/routes.py` that need no record store.

Signatures and credentials, bodies, queries and errors are decided by the functions that the server uses. What the fake
doesn't have, such as the event log, is answered 404.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from redpoll.control.api.answers import (
    attributes_of,
    cursor_of,
    fingerprint,
    idempotency_conflict,
    page_limit,
    parse_cursor,
    signed,
)
from redpoll.control.api.browser_module import BrowserModule
from redpoll.control.api.history_query import PARAMETERS, answer, parse_query
from redpoll.control.http.cross_origin import allowed_to_read, preflight
from redpoll.control.http.response import EMPTY_OBJECT, Response, header_line
from redpoll.control.http.router import API_PREFIX, Access, NoRoute, Route, Routes
from redpoll.control.http.schemas import (
    Attributes,
    BatchResponse,
    CachedEvent,
    ChannelResponse,
    ChannelsResponse,
    ClearedResponse,
    Message,
    RevokedResponse,
    TriggerResponse,
    UnsubscribedResponse,
    User,
    UsersResponse,
)
from redpoll.protocol import auth
from redpoll.protocol.apps import App
from redpoll.protocol.channels import Kind, kind_of
from redpoll.protocol.credentials import check_admitted, granted
from redpoll.protocol.errors import ApiError
from redpoll.protocol.history import InvalidOffset, UnknownEpoch
from redpoll.protocol.messages import (
    EVENT_INFO,
    Call,
    check_channel,
    decode_auth,
    decode_batch,
    decode_event,
    decode_revoke,
    decode_unsubscribe,
    parse_channel_info,
    parse_info,
)
from redpoll.protocol.presence import MAX_USER_ID_CHARS
from redpoll.protocol.tokens import Token
from redpoll.testing.clock import Clock
from redpoll.testing.failures import Failures
from redpoll.testing.hub import Hub
from redpoll.testing.request import Request
from redpoll.testing.revocations import revoke, unsubscribe

__all__ = ["Api"]

# A repeated correlation_id within this time gets the first answer (protocol/README.md "Idempotency").
ONCE_S: Final = 120.0
MAX_REMEMBERED: Final = 10_000
_FORM: Final = "application/x-www-form-urlencoded"
_encode: Final = msgspec.json.Encoder().encode


@dataclass
class _Remembered:
    """A request with a correlation id. `published`: its events, by index and channel. `answer` is None while it was
    carried out in part only: a repetition publishes the rest."""

    fingerprint: bytes
    until: float
    published: set[tuple[int, str]] = field(default_factory=set)
    answer: bytes | None = None


class Api:
    """`answer` answers a request. `tokens`: bearer tokens by their hash. `master_key`: as in `answers.signed`. `more`
    are further routes."""

    def __init__(self, hub: Hub, clock: Clock, master_key: bytes | None, more: Sequence[Route] = ()) -> None:
        self.tokens: dict[str, Token] = {}
        self._hub = hub
        self._clock = clock
        self._master_key = master_key
        self.failures = Failures()
        self._remembered: dict[tuple[str, str], _Remembered] = {}
        self.routes = Routes([*self._table(), *more])

    def _table(self) -> list[Route]:
        channels, script = "/apps/{app_id}/channels", BrowserModule()
        terminate = "/users/{user_id}/terminate_connections"

        def route(method: str, path: str, name: str, handler: Any, access: Access = Access.APP, **more: Any) -> Route:
            return Route(method, path, name, handler, access, **more)

        def show_script(request: Request) -> Response:
            return script.answer(request.headers.get("If-None-Match", ""))

        return [
            route("POST", "/apps/{app_id}/events", "events", self._trigger, scope="publish"),
            route("POST", "/apps/{app_id}/batch_events", "batch_events", self._batch, scope="publish"),
            route("GET", channels, "channels", self._channels, scope="read"),
            route("GET", channels + "/{channel}", "channel", self._channel, scope="read"),
            route("GET", channels + "/{channel}/users", "users", self._users, scope="read"),
            route("GET", channels + "/{channel}/history", "history", self._history, scope="read"),
            route("DELETE", channels + "/{channel}/history", "clear_history", self._clear, scope="publish"),
            route("POST", "/apps/{app_id}" + terminate, "terminate_connections", self._terminate, scope="publish"),
            route("POST", terminate, "terminate_connections_of_key", self._terminate, Access.ANY_APP, scope="publish"),
            route("POST", channels + "/{channel}/unsubscribe", "unsubscribe", self._unsubscribe, scope="publish"),
            route("POST", "/apps/{app_id}/grants/revoke", "revoke_grants", self._revoke, scope="publish"),
            route("POST", "/apps/{app_id}/auth", "auth", self._authorize, scope="auth", cross_origin=True),
            route("OPTIONS", "/apps/{app_id}/auth", "auth_preflight", self._preflight, Access.OPEN, cross_origin=True),
            route("GET", API_PREFIX + "/redpoll.js", "browser_module", show_script, Access.OPEN),
            route("GET", "/healthz", "healthz", lambda request: request.plain(b'{"status":"ok"}'), Access.OPEN),
            route("GET", "/readyz", "readyz", lambda request: request.plain(b'{"status":"ready"}'), Access.OPEN),
            route(
                "GET", "/", "root", lambda request: request.plain(b"OK", b"Content-Type: text/plain\r\n"), Access.OPEN
            ),
        ]

    # -- credentials.Records

    @property
    def apps(self) -> Mapping[str, App]:
        return {app_id: space.app for app_id, space in self._hub.spaces.items()}

    @property
    def by_key(self) -> Mapping[str, App]:
        return {key.key: space.app for space in self._hub.spaces.values() for key in space.app.keys}

    # -- from request to answer

    def reset(self) -> None:
        self.failures.reset()
        self._remembered.clear()

    def answer(self, request: Request) -> Response:
        try:
            route = self._find(request)
            if route.wants_credential and (failure := self.failures.answer(request)) is not None:
                return failure
            if route.wants_credential:
                self._admit(request, route)
            handler: Any = route.handler
            response: Response = handler(request)
            return response
        except ApiError as error:
            return request.error(error)
        except UnicodeError:
            return request.error(ApiError("bad_request", "a header or the query is not UTF-8"))

    def _find(self, request: Request) -> Route:
        auth.check_size(request.query)
        try:
            by_method, request.parameters = self.routes.find(request.path)
        except UnicodeDecodeError:
            raise ApiError("bad_request", "the percent-encoded path is not UTF-8") from None
        route = by_method.get("GET" if request.method == "HEAD" else request.method)
        if route is None:
            fault = NoRoute(by_method)
            request.more_headers = fault.headers
            raise fault
        if route.cross_origin:
            request.more_headers = allowed_to_read(request.headers.get("Origin"), self.apps.get(request.parameters[0]))
        return route

    def _admit(self, request: Request, route: Route) -> None:
        app_id = request.parameters[0] if route.access is Access.APP else None
        signed_parts = (request.method, request.path, request.query, request.body)
        # By the real time: publishers sign with it, whatever a test advanced the clock by.
        now_s = self._clock.real_time_s()
        grant = granted(self, request.headers, signed_parts, route.scope, app_id, now_s)
        request.params, request.token = grant.params, grant.token
        request.space = self._hub.spaces[grant.app.id]
        check_admitted(grant.app, request.headers)

    # -- publishing

    def _trigger(self, request: Request) -> Response:
        return self._publish(request, decode_event(request.body, request.params, request.app))

    def _batch(self, request: Request) -> Response:
        return self._publish(request, decode_batch(request.body, request.app))

    def _publish(self, request: Request, call: Call) -> Response:
        def publish(published: set[tuple[int, str]]) -> bytes:
            histories, ended = request.space.histories, False
            for at, (name, data, channels, excluded) in enumerate(call.events_of()):
                for channel in channels:
                    if (at, channel) in published:
                        continue
                    if histories.has_ended(channel):
                        ended = True
                        continue
                    self._hub.publish(request.space, channel, name, data, excluded, call.correlation_id)
                    published.add((at, channel))
                    if at in call.ends:
                        histories.end(channel)
            if ended:
                raise ApiError("channel_ended", "the channel has ended: clear its history to publish on it again")
            return self._published(request, call)

        return self._once(request, call, publish)

    def _published(self, request: Request, call: Call) -> bytes:
        """The answer's body, with the attributes that `info` asked for."""
        if not call.infos:
            return EMPTY_OBJECT
        names = [channels for _, _, channels, _ in call.events_of()]
        if call.is_batch:
            wanted = zip(names, call.infos, strict=True)
            return _encode(BatchResponse([self._attributes(request, one[0], info) for one, info in wanted]))
        (info,) = call.infos
        return _encode(TriggerResponse({channel: self._attributes(request, channel, info) for channel in names[0]}))

    def _once(self, request: Request, call: Call, publish: Callable[[set[tuple[int, str]]], bytes]) -> Response:
        """Publishes, unless the app compares correlation ids and this one was used."""
        correlation_id = call.correlation_id
        if correlation_id is not None:
            request.more_headers += header_line("X-Service-Correlation-Id", correlation_id)
        if correlation_id is None or not request.app.idempotency:
            return request.ok(publish(set()))
        known_by = fingerprint(call.is_batch, request.params, request.body)
        key, now = (request.app.id, correlation_id), self._clock.now()
        known = self._remembered.get(key)
        if known is None or known.until <= now:
            known = _Remembered(known_by, now + ONCE_S)
        elif known.fingerprint != known_by:
            raise idempotency_conflict()
        if known.answer is None:
            try:
                known.answer = publish(known.published)
            finally:
                # The id of a refused request can be used again, unless some of its events were published.
                if known.published:
                    self._remember(key, known)
        return request.ok(known.answer)

    def _remember(self, key: tuple[str, str], known: _Remembered) -> None:
        if key not in self._remembered and len(self._remembered) >= MAX_REMEMBERED:
            del self._remembered[next(iter(self._remembered))]
        self._remembered[key] = known

    # -- channels

    def _attributes(self, request: Request, name: str, info: tuple[str, ...]) -> Attributes:
        channel = request.space.channels.get(name)

        def subscriptions() -> int:
            return 0 if channel is None else len(channel.subscribers)

        def users() -> int:
            return 0 if channel is None or channel.roster is None else len(channel.roster)

        return attributes_of(name, info, subscriptions, users)

    def _channels(self, request: Request) -> Response:
        info = parse_info(request.param("info") or "", EVENT_INFO)
        prefix = request.param("filter_by_prefix") or ""
        names = [name for name in request.space.occupied if name.startswith(prefix)]
        limit, cursor = request.param("limit"), request.param("cursor")
        body = ChannelsResponse({})
        if limit is not None or cursor is not None:
            count, after = page_limit(limit), parse_cursor(cursor, 1)
            names = [name for name in names if after is None or name > after[1]]
            body.next = cursor_of(0, names[count - 1]) if len(names) > count else None
            names = names[:count]
        body.channels = {name: self._attributes(request, name, info) for name in names}
        return request.ok(_encode(body))

    def _channel(self, request: Request) -> Response:
        name = request.parameters[1]
        check_channel(name)
        info = parse_channel_info(name, request.param("info") or "")
        counts = self._attributes(request, name, ("subscription_count", "user_count"))
        subscriptions = counts.subscription_count or 0
        body = ChannelResponse(subscriptions > 0, subscriptions, counts.user_count)
        if "cache" in info:
            cached = self._hub.cached(request.space, name)
            body.cache = None if cached is None else CachedEvent(*cached)
        return request.ok(_encode(body))

    def _users(self, request: Request) -> Response:
        name = request.parameters[1]
        check_channel(name)
        if kind_of(name) is not Kind.PRESENCE:
            raise ApiError("not_presence_channel", "only presence channels have a list of users")
        channel = request.space.channels.get(name)
        users = sorted(channel.roster or ()) if channel is not None else []
        return request.ok(_encode(UsersResponse([User(user) for user in users])))

    def _history(self, request: Request) -> Response:
        name = request.parameters[1]
        check_channel(name)
        selected = parse_query({key: value for key, value in request.params if key in PARAMETERS})
        histories = request.space.histories
        try:
            for position in selected.positions:
                histories.check(request.app, name, position)
            page = histories.read(
                request.app,
                name,
                limit=selected.limit,
                since=selected.since,
                until=selected.until,
                before=selected.before,
                newest=selected.newest,
            )
        except UnknownEpoch as error:
            raise ApiError("unknown_epoch", f"{error}: the earlier history was lost or cleared") from None
        except InvalidOffset as error:
            raise ApiError("invalid_offset", f"this history has no such offset yet: {error}") from None
        messages = [Message(row.offset, row.event, row.data, row.offset // 1000) for row in page.rows]
        return request.ok(_encode(answer(page.epoch, messages, page.more, selected)))

    def _clear(self, request: Request) -> Response:
        name = request.parameters[1]
        check_channel(name)
        return request.ok(_encode(ClearedResponse(self._hub.clear_history(request.space, name))))

    # -- users and signatures

    def _terminate(self, request: Request) -> Response:
        user_id = request.parameters[-1]
        if len(user_id) > MAX_USER_ID_CHARS:
            raise ApiError("bad_request", f"a user id has at most {MAX_USER_ID_CHARS} characters")
        self._hub.terminate(request.space, user_id)
        return request.ok(EMPTY_OBJECT)

    def _revoke(self, request: Request) -> Response:
        at_s = int(self._clock.real_time_s())
        ended = revoke(self._hub, request.space, decode_revoke(request.body), at_s)
        return request.ok(_encode(RevokedResponse(at_s, ended)))

    def _unsubscribe(self, request: Request) -> Response:
        channel = request.parameters[1]
        user, socket = decode_unsubscribe(request.body, channel)
        ended = unsubscribe(self._hub, request.space, channel, user, socket, int(self._clock.real_time_s()))
        return request.ok(_encode(UnsubscribedResponse(ended)))

    def _authorize(self, request: Request) -> Response:
        is_form = request.headers.get("Content-Type", "").partition(";")[0].strip().lower() == _FORM
        asked = decode_auth(request.body, request.app, form=is_form)
        return request.ok(_encode(signed(asked, request.app, request.key, self._master_key)))

    @staticmethod
    def _preflight(request: Request) -> Response:
        return preflight(request.more_headers, request.headers.get("Access-Control-Request-Headers", ""))
