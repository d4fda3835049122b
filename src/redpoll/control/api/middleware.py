"""The steps that every HTTP request takes before and after its handler.

The front finds the route, reads the body, authenticates the request, applies the rate limit, runs the handler, turns
exceptions into error responses, and counts the request.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Final

import structlog

from redpoll.cluster.bus import Unavailable
from redpoll.cluster.traces import new_trace_id
from redpoll.control.http.auth_failures import AuthFailures
from redpoll.control.http.authentication import Authentication, Credentials
from redpoll.control.http.cross_origin import allowed_to_read
from redpoll.control.http.host_names import HostNames
from redpoll.control.http.ratelimit import WINDOW_S, RateLimit, Window
from redpoll.control.http.request import Request
from redpoll.control.http.response import Response, error_response, header_line
from redpoll.control.http.router import NoRoute, Place, Route, Routes, no_times
from redpoll.control.observe.debugging import ControlDebugging
from redpoll.control.tracing.tracing import Tracer
from redpoll.http.messages import HEAD_ONLY
from redpoll.loop.ending import finish_tasks
from redpoll.loop.turns import TooManyWaiting
from redpoll.protocol import auth
from redpoll.protocol.apps import App
from redpoll.protocol.errors import ApiError
from redpoll.protocol.grants import RevokedGrants
from redpoll.store.errors import StoreUnavailable

__all__ = ["Front"]

log = structlog.get_logger(__name__)

# Error code and text by status, for a body that isn't read to its end.
_BODY_REFUSALS: Final = {
    408: ("bad_request", "the body was not complete in time"),
    413: ("payload_too_large", "the body is larger than {} bytes"),
}
# Failures of the store with less time in between are one period.
_EPISODE_S: Final = 10.0
# Requests whose clients are gone, and those that took longer than their clients may wait, get this long at shutdown.
_FINISH_WITHIN_S: Final = 0.5


class CutOff(Exception):
    """The rest of the body can't be distinguished from the next request, so the connection closes after this error."""

    def __init__(self, status: int, route: Route) -> None:
        super().__init__(status)
        self.status = status
        self.code, text = _BODY_REFUSALS[status]
        self.text = text.format(route.max_body_bytes)


def _no_page(request: Request, error: ApiError, status: int) -> None:
    return None


class Front:
    """Receives every request of the API. It reads `records` on each request, so changes take effect at once.

    `grants` has the revoked ones; None: there are none. `host_names`: None if requests to the control port may name any
    host. `rate`: None if triggers have no rate limit. `failures`: None if failed authentications have no limit.
    `tracer`: None if triggers aren't logged. `clock` returns Unix time, for timestamps of signatures. `fault_page`
    renders an error as a page of the dashboard; it returns None for requests of the API, which get JSON. `debugging`:
    None if no app can be debugged. `manage_publicly`: the management of apps is on the public port too.
    """

    def __init__(
        self,
        routes: Routes,
        records: Credentials,
        *,
        grants: RevokedGrants | None = None,
        host_names: HostNames | None = None,
        rate: RateLimit | None = None,
        failures: AuthFailures | None = None,
        tracer: Tracer | None = None,
        clock: Callable[[], float] = time.time,
        path_prefix: str = "",
        fault_page: Callable[[Request, ApiError, int], Response | None] = _no_page,
        debugging: ControlDebugging | None = None,
        manage_publicly: bool = False,
    ) -> None:
        self._routes = routes
        self._apps = records.apps
        revoked = RevokedGrants(self.now_s) if grants is None else grants
        self._authentication = Authentication(records, revoked, failures, self.now_s, path_prefix)
        self._host_names = host_names
        self._rate = rate
        self._tracer = tracer
        self.clock = clock
        self._loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        # Durations of triggers by app, counted like Route.times.
        self.times_by_app: dict[str, list[int]] = {}
        self._fault_page = fault_page
        self._debugging = debugging
        self._manage_publicly = manage_publicly
        self._store_failed_at = -_EPISODE_S

    def settings_changed(
        self, host_names: HostNames, failures: AuthFailures | None, path_prefix: str, manage_publicly: bool
    ) -> None:
        """Replaces what a reload may change. A new limit counts from 0."""
        self._host_names, self._manage_publicly = host_names, manage_publicly
        self._authentication.failures, self._authentication.path_prefix = failures, path_prefix

    async def finish(self) -> None:
        """Ends the requests that are handled still: nobody waits for their answers, but they use the store."""
        await finish_tasks(self._tasks, _FINISH_WITHIN_S)

    # -- from request to response --------------------------------------------------------------------------

    def received(self, request: Request) -> None:
        """Handle a request: decide from a head alone (HEAD_ONLY) whether its body may be read.

        With a `refusal`, the body couldn't be read; count and log the request. `began` is set: it waited since then.
        """
        request.route = self._routes.unmatched
        try:
            if request.refusal:
                self._find(request)
                raise CutOff(request.refusal, request.route)
            if not request.flags & HEAD_ONLY:
                self._execute(request)
                return
            self._check_head(request, request.announced)
            if request.route.takes_body:
                request.let_body_in()
            else:
                self._execute_without_body(request)
        except Exception as error:
            self._end(request, self._rendered(request, error))

    def conclude(self, request: Request, result: Response | Exception) -> None:
        """End a request whose handler returned None, with its response or its error."""
        self._end(request, self._rendered(request, result) if isinstance(result, Exception) else result)

    def _check_head(self, request: Request, announced: int | None) -> None:
        """Refuse a request by its head, before its body is read. Raises ApiError or CutOff."""
        self._find(request)
        if announced is not None and announced > request.route.max_body_bytes:
            raise CutOff(413, request.route)
        if request.route.wants_credential:
            self._authentication.admit(request, request.route, None)
            request.caller_known = False

    def _execute_without_body(self, request: Request) -> None:
        """Call the handler of a request that should have no body, of which only the checked head was read. The
        connection closes after the answer."""
        request.caller_known = request.route.wants_credential
        self._run_handler(request)

    def _execute(self, request: Request) -> None:
        """Call the handler of a complete request. Errors of a handler that needs no task are raised."""
        self._find(request)
        route = request.route
        if len(request.body) > route.max_body_bytes:
            raise ApiError("payload_too_large", f"the body is larger than {route.max_body_bytes} bytes")
        if route.wants_credential:
            self._authentication.admit(request, route, request.body)
            rate = self._rate
            if route.limited and rate is not None:
                if (lines := rate.take_room(request.remote)) is not None:
                    request.more_headers = lines
                elif not rate.is_shared:
                    self._limit(request, rate, rate.take(request.remote))
                else:
                    self._spawn(self._execute_if_shared_limit_allows(request, rate))
                    return
        self._run_handler(request)

    async def _execute_if_shared_limit_allows(self, request: Request, rate: RateLimit) -> None:
        try:
            self._limit(request, rate, await rate.take_shared(request.remote))
            self._run_handler(request)
        except Exception as error:
            self._end(request, self._rendered(request, error))

    def _run_handler(self, request: Request) -> None:
        result = request.route.handler(request)
        if result is None:
            return
        if isinstance(result, Response):
            self._end(request, result)
            return
        self._spawn(self._finish(request, result))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _finish(self, request: Request, handling: Coroutine[Any, Any, Response]) -> None:
        try:
            response = await handling
        except Exception as error:
            response = self._rendered(request, error)
        self._end(request, response)

    def _end(self, request: Request, response: Response) -> None:
        """Count and log the request, and send its response."""
        route, status = request.route, response.status
        took_s = time.perf_counter() - request.began
        slot = route.count(status, took_s)
        if route.limited and request.caller_known:
            self._count_calls(request.app, ((slot, 1),))
            if self._tracer is not None:
                self._tracer.ended(request, status, took_s)
        if self._debugging is not None and self._debugging.any:
            self._debugging.request(request, response, took_s)
        request.respond(response)

    def count(
        self, route: Route, app: App, status: int, count: int, slots: Sequence[tuple[int, int]], microseconds: int
    ) -> None:
        """Count an app's triggers that are answered by fast_publish.py; the arguments are those of Route.count_many."""
        route.count_many(status, count, slots, microseconds)
        self._count_calls(app, slots)

    def _count_calls(self, app: App, slots: Sequence[tuple[int, int]]) -> None:
        times = self.times_by_app.get(app.id)
        if times is None:
            times = self.times_by_app[app.id] = no_times()
        for slot, responses in slots:
            times[slot] += responses

    def now_s(self) -> float:
        """Unix time, for timestamps of signatures."""
        return self.clock()

    def _rendered(self, request: Request, error: Exception) -> Response:
        """The response for an error."""
        if isinstance(error, ApiError):
            return self._fault(request, error)
        if isinstance(error, CutOff):
            if request.route.limited:
                self._authentication.recognise(request, request.route)
            response = self._fault(request, ApiError(error.code, error.text), error.status)
            response.keep_alive = False
            return response
        if isinstance(error, Unavailable):
            return self._fault(request, ApiError("unavailable", str(error)))
        if isinstance(error, TooManyWaiting):
            request.more_headers += header_line("Retry-After", "1")
            return self._fault(request, ApiError("rate_limited", str(error)))
        if isinstance(error, StoreUnavailable):
            self._log_unavailable(error)
            # The reason names the database's host and user, and pages without a login show this too.
            reason = str(error) if request.caller_known else "the record store is not available at present"
            return self._fault(request, ApiError("unavailable", f"not confirmed: {reason}"))
        if isinstance(error, UnicodeError):
            return self._fault(request, ApiError("bad_request", "a header or the query is not UTF-8"))
        log.error("request failed", route=request.route.name, trace_id=request.trace_id, exc_info=error)
        return self._fault(request, ApiError("internal", "internal error; search the server's log for this trace id"))

    def _log_unavailable(self, error: StoreUnavailable) -> None:
        """Log one line per period in which requests fail for the record store."""
        now = self._loop.time()
        if now - self._store_failed_at >= _EPISODE_S:
            log.warning("record store not available for a request", reason=str(error))
        self._store_failed_at = now

    def _fault(self, request: Request, error: ApiError, status: int = 0) -> Response:
        page = self._fault_page(request, error, status)
        return page or request.error(error, status)

    def error_page(self, status: int, code: str, text: str) -> Response:
        """An error response for bytes that never became a request: malformed, or incomplete at the deadline."""
        self._routes.unmatched.count(status, 0.0)
        return error_response(ApiError(code, text), new_trace_id(), status)

    def _find(self, request: Request) -> None:
        """Set the request's route and its parameters."""
        if request.path[:1] != "/":
            # The absolute form, http://host/path (RFC 9112 section 3.2.2).
            _, scheme_end, rest = request.path.partition("://")
            request.path = "/" + rest.partition("/")[2] if scheme_end else request.path
        auth.check_size(request.query)
        try:
            by_method, request.parameters = self._routes.find(self._authentication.without_prefix(request.path))
        except UnicodeDecodeError:
            raise ApiError("bad_request", "the percent-encoded path is not UTF-8") from None
        if request.from_worker and not self._manage_publicly:
            by_method = {name: route for name, route in by_method.items() if route.place is not Place.MANAGEMENT}
        route = by_method.get("GET" if request.method == "HEAD" else request.method)
        if route is None:
            fault = NoRoute(by_method)
            request.more_headers = fault.headers
            raise fault
        if route.place is Place.CONTROL:
            if request.from_worker:
                raise ApiError("not_found", "no such path")
            self._check_host(request)
        request.route = route
        if route.cross_origin:
            request.more_headers = self._cross_origin(request)

    def _check_host(self, request: Request) -> None:
        host = request.headers.get("Host")
        if self._host_names is None or self._host_names.allow(host):
            return
        raise ApiError(
            "forbidden",
            f"the control port isn't known by the host name {(host or '')[:256]!r}; if this name is yours, add it to "
            "the server's setting control_names (REDPOLL_CONTROL_NAMES), or use an IP address",
        )

    def _limit(self, request: Request, rate: RateLimit, window: Window) -> None:
        """Add the rate limit's headers after a trigger of this client address was counted. Raises ApiError
        `rate_limited`."""
        address = request.remote
        request.more_headers = window.headers(rate.per_minute)
        if window.passed:
            left_s = rate.left_s(window)
            request.more_headers += header_line("Retry-After", str(left_s))
            raise ApiError(
                "rate_limited",
                f"more than {rate.per_minute} triggers within {WINDOW_S:.0f} s from the address {address}; try again "
                f"in {left_s} s. The server's setting is trigger_rate_per_minute "
                "(REDPOLL_TRIGGER_RATE_PER_MINUTE); 0 turns the limit off",
            )

    def _cross_origin(self, request: Request) -> bytes:
        """The header lines that let a page of an allowed origin read the response (protocol/README.md "CORS")."""
        return allowed_to_read(request.headers.get("Origin"), self._apps.get(request.parameters[0]))
