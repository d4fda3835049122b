"""Finds the app that an HTTP request authenticates for, and limits the requests of an address that fail.

protocol.credentials decides, and protocol.auth checks signatures; _http checks those in the usual layout.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from redpoll._http import signed_params
from redpoll.config.proxies import network_of
from redpoll.control.http.ratelimit import WINDOW_S
from redpoll.control.http.response import header_line
from redpoll.control.http.router import Access, Route
from redpoll.http.messages import STREAM
from redpoll.protocol import auth
from redpoll.protocol.access import is_grant, reading_grant
from redpoll.protocol.credentials import (
    Records,
    bearer_of,
    check_admitted,
    check_uncompressed,
    granted,
    has_pair,
    has_token,
    manager,
)
from redpoll.protocol.errors import ApiError, ClientError
from redpoll.protocol.grants import AppGrants
from redpoll.protocol.tokens import Token

if TYPE_CHECKING:
    from redpoll.control.http.auth_failures import AuthFailures
    from redpoll.control.http.request import Request
    from redpoll.protocol.apps import App
    from redpoll.protocol.grants import RevokedGrants

__all__ = ["Authentication", "Credentials"]


class Credentials(Records, Protocol):
    """The part of control/records/records.py that authentication uses."""

    @property
    def is_current(self) -> Callable[[], bool]: ...
    def token_used(self, token: Token, now_s: float) -> None: ...


class Authentication:
    """Authenticates requests whose route wants a credential. It reads `records` on each request, so changes take effect
    at once.

    `grants` has the revoked ones. `failures`: None if failed authentications have no limit. `clock` returns Unix time,
    for timestamps of signatures. `path_prefix`: the setting of this name. A reload may replace the limit and the
    prefix.
    """

    def __init__(
        self,
        records: Credentials,
        grants: RevokedGrants,
        failures: AuthFailures | None,
        clock: Callable[[], float],
        path_prefix: str,
    ) -> None:
        self.failures = failures
        self.path_prefix = path_prefix
        self._grants = grants
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
        if wait_s and not signed and not has_token(request.headers) and not has_pair(request.headers):
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
        if route.access is Access.MANAGE:
            self._authenticate_manager(request)
            return
        may_be_reader = route.takes_grants and request.flags & STREAM and has_token(request.headers)
        if may_be_reader and is_grant(bearer_of(request.headers)):
            self._authenticate_reader(request)
            return
        prefix = self._prefix_of(request.path)
        app_id = request.parameters[0] if route.access is Access.APP else None
        now_s = self._clock()
        grant = granted(
            self._records,
            request.headers,
            (request.method, request.path, request.query, body),
            route.scope,
            app_id,
            now_s,
            prefix,
        )
        if grant.token is not None:
            self._records.token_used(grant.token, now_s)
            request.token = grant.token
        request.params = grant.params
        request.app, request.caller_known = grant.app, True
        check_admitted(grant.app, request.headers)

    def _authenticate_manager(self, request: Request) -> None:
        now_s = self._clock()
        request.token = manager(self._records, request.headers, now_s)
        self._records.token_used(request.token, now_s)
        request.params, request.caller_known = auth.parse_query(request.query), True
        check_uncompressed(request.headers)

    def _authenticate_reader(self, request: Request) -> None:
        """A grant opens a channel to readers, as it does to subscribers, and nothing else."""
        app_id, channel = request.parameters
        app = self._apps.get(app_id)
        # Apps that don't exist have no table: it would stay.
        revoked = self._grants.of(app_id) if app is not None else AppGrants(self._clock)
        try:
            reading_grant(app, revoked, channel, bearer_of(request.headers))
        except ClientError as error:
            raise ApiError("unauthorized", error.message) from None
        assert app is not None
        request.params = auth.parse_query(request.query)
        request.app, request.caller_known = app, True
        check_admitted(app, request.headers)

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
