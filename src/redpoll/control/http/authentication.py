"""Finds the app that an HTTP request authenticates for, and limits the requests of an address that fail.

protocol.auth checks signatures, _http those in the usual layout. If a request has several credentials, only the first
one counts, in the order: token, header pair, signature (protocol/README.md "HTTP API").
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

from redpoll._http import signed_params
from redpoll.config.proxies import network_of
from redpoll.control.http.ratelimit import WINDOW_S
from redpoll.control.http.response import header_line
from redpoll.control.http.router import Access, Route
from redpoll.protocol import auth
from redpoll.protocol.errors import ApiError
from redpoll.protocol.tokens import Token, fault_of_token

if TYPE_CHECKING:
    from redpoll.control.http.auth_failures import AuthFailures
    from redpoll.control.http.request import Request
    from redpoll.protocol.apps import App

__all__ = ["Authentication", "Credentials"]


class Credentials(Protocol):
    """The part of control/records/records.py that authentication uses: apps by id and by key, tokens by their hash."""

    @property
    def apps(self) -> Mapping[str, App]: ...
    @property
    def by_key(self) -> Mapping[str, App]: ...
    @property
    def tokens(self) -> Mapping[str, Token]: ...
    @property
    def is_current(self) -> Callable[[], bool]: ...
    def token_used(self, token: Token, now_s: float) -> None: ...


class Authentication:
    """Authenticates requests whose route wants a credential. It reads `records` on each request, so changes take effect
    at once.

    `failures`: None if failed authentications have no limit. `clock` returns Unix time, for timestamps of signatures.
    `path_prefix`: the setting of this name. A reload may replace both.
    """

    def __init__(
        self, records: Credentials, failures: AuthFailures | None, clock: Callable[[], float], path_prefix: str
    ) -> None:
        self.failures = failures
        self.path_prefix = path_prefix
        self._records = records
        # Not copies: Records changes these tables in place.
        self._apps = records.apps
        self._by_key = records.by_key
        self._clock = clock

    def without_prefix(self, path: str) -> str:
        """The path without the setting's prefix, as the table of routes knows it."""
        prefix = self.path_prefix
        return path[len(prefix) :] if prefix and path.startswith(f"{prefix}/apps/") else path

    def admit(self, request: Request, route: Route, body: bytes | None) -> None:
        """Set the request's app, and count its failure. Raises ApiError: 401, or 429 at the limit of its address.

        `body` None: it hasn't been read, and its digest isn't checked. 503 if nobody here knows what was revoked.
        """
        if not self._records.is_current():
            raise ApiError(
                "unavailable",
                "neither the record store nor Redis answers this server, so it can't know whether this key or token "
                "was revoked; repeat the request later",
            )
        signed = None
        if not request.headers and route.access is Access.APP:
            # Nearly all requests: no other credential is possible.
            signed = self._signed(request, route, body)
            if self._took(request, signed):
                return
        failures = self.failures
        if failures is None:
            self.authenticate(request, route, body)
            return
        wait_s = failures.wait_s(request.remote)
        if wait_s and not signed and not _has_token(request) and not _has_pair(request):
            is_checked = not request.headers and route.access is Access.APP
            if is_checked or not self._signed(request, route, body):
                raise _limited(request, failures, wait_s)
        try:
            self.authenticate(request, route, body)
        except ApiError as error:
            if error.status != 401:
                raise
            if wait_s:
                raise _limited(request, failures, wait_s) from None
            failures.count(request.remote)
            raise

    def recognise(self, request: Request, route: Route) -> None:
        """Find the app of a request that was refused before its body was read, for its row in the event log. At the
        limit of its address only a signature in the usual layout is checked."""
        failures = self.failures
        if failures is not None and failures.wait_s(request.remote):
            if not request.headers and route.access is Access.APP:
                self._took(request, self._signed(request, route, None))
            return
        try:
            self.authenticate(request, route, None)
        except ApiError as error:
            if error.status == 401 and failures is not None:
                failures.count(request.remote)

    def authenticate(self, request: Request, route: Route, body: bytes | None) -> None:
        """Set the request's app. Raises ApiError 401 if the request has no valid credential of the app.

        An unknown app gets the same response as a wrong key, so that clients can't find out which ids exist. Only a
        token for every app gets 404 (protocol/README.md "Tokens").
        """
        headers = request.headers
        app: App | None
        if _has_token(request):
            app = self._app_of_token(request, route)
        elif _has_pair(request):
            key = headers.get("X-Service-Key", "")
            app = self._apps.get(request.parameters[0]) if route.access is Access.APP else self._by_key.get(key)
            auth.check_pair(app, key, headers.get("X-Service-Secret", ""))
            request.params = auth.parse_query(request.query)
        else:
            app = self._apps.get(request.parameters[0]) if route.access is Access.APP else self._app_of_query(request)
            path, prefix = request.path, self._prefix_of(request.path)
            request.params = auth.check_query(app, request.method, path, request.query, body, self._clock(), prefix)
        assert app is not None
        request.app, request.caller_known = app, True
        if not app.enabled:
            raise ApiError("app_disabled", "this app is disabled")
        if "Content-Encoding" in headers and headers["Content-Encoding"].lower() != "identity":
            raise ApiError("unsupported_media_type", "the body is compressed; send it without Content-Encoding")

    def _took(self, request: Request, signed: tuple[str, bool] | None) -> bool:
        """Sets the app of a request that is signed in the usual layout. False: protocol.auth decides, and says what is
        wrong."""
        app = self._apps.get(request.parameters[0])
        # Decided after the signature, so that the time of a refusal doesn't tell which apps exist.
        if signed is None or app is None or not app.enabled:
            return False
        request.found_key, more = signed
        if not more:
            request.found_params = []
        request.app, request.caller_known = app, True
        return True

    def _signed(self, request: Request, route: Route, body: bytes | None) -> tuple[str, bool] | None:
        """As _http.signed_params: the usual layout, of the path and of the path without its prefix."""
        path = request.path
        prefix = self._prefix_of(path)
        short_path = path[len(prefix) :] if prefix and path.startswith(f"{prefix}/") else None
        now_s = self._clock()
        if route.access is Access.APP:
            app = self._apps.get(request.parameters[0])
            return signed_params(
                request.method, path, request.query, body, app, auth.hashes_of, now_s, auth.MAX_SKEW_S, short_path
            )
        return signed_params(
            request.method, path, request.query, body, None, self._hashes_by_key, now_s, auth.MAX_SKEW_S, short_path
        )

    def _hashes_by_key(self, _: App | None, key: str) -> tuple[Any, Any, bool]:
        return auth.hashes_of(self._by_key.get(key), key)

    def _prefix_of(self, path: str) -> str:
        """The prefix that libraries leave out of the path that they sign."""
        return auth.PREFIX if self.without_prefix(path) is path else self.path_prefix

    def _app_of_token(self, request: Request, route: Route) -> App:
        now_s = self._clock()
        plain = request.headers["Authorization"].partition(" ")[2].strip()
        token = self._records.tokens.get(auth.token_hash(plain))
        if route.access is Access.APP:
            app_id = request.parameters[0]
        else:
            app_id = (token.app_id if token is not None else None) or ""
        fault = fault_of_token(token, route.scope, app_id, now_s)
        if fault is not None:
            raise fault
        assert token is not None
        if not app_id:
            raise ApiError("bad_request", "this token is for every app; name the app in the path: /apps/ID/…")
        app = self._apps.get(app_id)
        if app is None:
            raise ApiError("unknown_app", "there is no app with this id")
        self._records.token_used(token, now_s)
        request.params = auth.parse_query(request.query)
        request.token = token
        return app

    def _app_of_query(self, request: Request) -> App | None:
        # If auth_key is repeated, any of its values will do: check_query refuses the request.
        return self._by_key.get(dict(auth.parse_query(request.query)).get("auth_key", ""))


def _has_token(request: Request) -> bool:
    headers = request.headers
    return "Authorization" in headers and headers["Authorization"].partition(" ")[0].lower() == "bearer"


def _has_pair(request: Request) -> bool:
    return "X-Service-Key" in request.headers or "X-Service-Secret" in request.headers


def _limited(request: Request, failures: AuthFailures, wait_s: int) -> ApiError:
    failures.limited_total += 1
    request.more_headers += header_line("Retry-After", str(wait_s))
    return ApiError(
        "rate_limited",
        f"more than {failures.per_minute} failed authentications within {WINDOW_S:.0f} s from the address "
        f"{network_of(request.remote)}, and this request's credential is wrong, or signed in a layout that isn't "
        "checked now. The server's setting is auth_failures_per_minute (REDPOLL_AUTH_FAILURES_PER_MINUTE); 0 turns "
        "the limit off",
    )
