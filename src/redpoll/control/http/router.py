"""Routes of the control plane, and how a path finds its route.

A pattern such as `/apps/{app_id}/events` has parameters in braces; each is one segment of the path, percent-decoded.
The API's routes exist twice: under `/api/v1/apps/…`, and under `/apps/…`, which Pusher's libraries call.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Coroutine, Iterable, Mapping
from enum import Enum
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from urllib.parse import unquote

from redpoll.control.http.response import header_line
from redpoll.http.messages import MAX_BODY_BYTES
from redpoll.protocol.errors import ApiError

if TYPE_CHECKING:
    from redpoll.control.http.request import Request
    from redpoll.control.http.response import Response

__all__ = [
    "API_PREFIX",
    "About",
    "Access",
    "Handler",
    "NoRoute",
    "Place",
    "Route",
    "Routes",
    "no_times",
    "slot_bound_s",
    "time_slot",
]

API_PREFIX: Final = "/api/v1"
# The second to last slot ends at 2^24 µs, about 17 s, which is longer than any deadline here.
_SLOTS: Final = 26
# No route has more segments, and no parameter that exists is longer, each of its characters as `%XX`. These bound the
# work for paths that nobody has signed.
_MAX_SEGMENTS: Final = 16
_MAX_SEGMENT_CHARS: Final = 2048

_WITH_BODY: Final = ("POST", "PUT", "PATCH")

# A coroutine runs as a task. None: the handler calls Front.conclude when the response is known.
Handler = Callable[["Request"], "Coroutine[Any, Any, Response] | Response | None"]


class Place(Enum):
    """The ports of a route: public routes also exist on the control port, those of MANAGEMENT on the public port only
    with the setting `manage_on_public_port`."""

    PUBLIC = "public"
    CONTROL = "control"
    MANAGEMENT = "management"


class Access(Enum):
    """The credential that a request to a route needs."""

    # None.
    OPEN = "open"
    # One of the app in the path.
    APP = "app"
    # One of any app, which is then the request's app: one library leaves the app out of the path.
    ANY_APP = "any_app"
    # A session of the dashboard, which the dashboard checks.
    SESSION = "session"
    # A token with the scope `manage`; the request has no app.
    MANAGE = "manage"


class About(NamedTuple):
    """The description of a route in the OpenAPI document (openapi.py).

    `answer` and `body` are the types of response and request. `form`: the body may also be form-urlencoded. `query`
    are names of query parameters. `faults` are the error codes besides those that follow from the route's access.
    `success` is the status of a successful response. `tagged`: a successful response has an ETag. `conditional`: the
    request needs If-Match. `patch`: the body may also be `application/merge-patch+json` (RFC 7396). `streamed`: the
    response may be `text/event-stream`. `empty` are other statuses of success, without a body, and when they come.
    """

    summary: str
    answer: type | None
    body: type | None = None
    form: bool = False
    query: tuple[str, ...] = ()
    faults: tuple[str, ...] = ()
    success: int = 200
    tagged: bool = False
    conditional: bool = False
    patch: bool = False
    streamed: bool = False
    empty: tuple[tuple[int, str], ...] = ()


class Route:
    """One route, and the counts of its responses.

    `scope`: the scope that a token needs (protocol.tokens.SCOPES); empty if the route needs no app credential.
    `limited`: the rate limit of triggers applies. `cross_origin`: pages of the app's allowed origins may call it.
    `takes_grants`: a grant that opens the channel in its path is a credential too, if a worker asks.
    `about`: None if the route isn't in the OpenAPI document.

    `takes_body`: its requests have a body, of at most `max_body_bytes`; that of others isn't waited for.
    `wants_credential`: the front authenticates the request before it calls the handler. `answers` counts responses by
    status. `times` counts them by duration: slot k has those of at least 2^(k-1) µs and less than 2^k µs, the last slot
    all longer ones. `microseconds` is the sum of durations.
    """

    __slots__ = (
        "about",
        "access",
        "answers",
        "cross_origin",
        "handler",
        "limited",
        "max_body_bytes",
        "method",
        "microseconds",
        "name",
        "pattern",
        "place",
        "scope",
        "takes_body",
        "takes_grants",
        "times",
        "wants_credential",
    )

    def __init__(
        self,
        method: str,
        pattern: str,
        name: str,
        handler: Handler,
        access: Access = Access.APP,
        place: Place = Place.PUBLIC,
        *,
        scope: str = "",
        limited: bool = False,
        cross_origin: bool = False,
        takes_grants: bool = False,
        max_body_bytes: int = MAX_BODY_BYTES,
        about: About | None = None,
    ) -> None:
        self.method = method
        self.max_body_bytes = max_body_bytes
        self.takes_body = method in _WITH_BODY
        self.pattern = pattern
        self.name = name
        self.handler = handler
        self.access = access
        self.wants_credential = access in (Access.APP, Access.ANY_APP, Access.MANAGE)
        self.place = place
        self.scope = scope
        self.limited = limited
        self.about = about
        self.cross_origin = cross_origin
        self.takes_grants = takes_grants
        self.answers: dict[int, int] = {}
        self.times = no_times()
        self.microseconds = 0

    def count(self, status: int, seconds: float) -> int:
        """Counts a response; returns the slot of its duration."""
        microseconds = int(seconds * 1e6)
        slot = time_slot(microseconds)
        self.count_many(status, 1, ((slot, 1),), microseconds)
        return slot

    def count_many(self, status: int, count: int, slots: Iterable[tuple[int, int]], microseconds: int) -> None:
        """Counts responses; `slots` are pairs of a slot (`time_slot`) and a count, `microseconds` is the sum."""
        self.answers[status] = self.answers.get(status, 0) + count
        self.microseconds += microseconds
        for slot, responses in slots:
            self.times[slot] += responses


class NoRoute(ApiError):
    """No route has this path and method. `headers`: header lines of the answer."""

    def __init__(self, by_method: Mapping[str, Route]) -> None:
        self.headers = b""
        if not by_method:
            super().__init__("not_found", "no such path")
            return
        allowed = ", ".join(sorted(by_method))
        super().__init__("method_not_allowed", f"method not allowed; use {allowed}")
        self.headers = header_line("Allow", allowed)


class _Node:
    """A node of the tree of patterns: children by word, one child for a parameter, and the routes that end here."""

    __slots__ = ("any", "routes", "words")

    def __init__(self) -> None:
        self.words: dict[str, _Node] = {}
        self.any: _Node | None = None
        self.routes: dict[str, Route] = {}


async def _unmatched(request: Request) -> Response:
    raise LookupError(request.path)


class Routes:
    """All routes, and the lookup of a path."""

    def __init__(self, routes: Iterable[Route]) -> None:
        self.all = tuple(routes)
        # Counts requests that match no route.
        self.unmatched = Route("", "", "unmatched", _unmatched, Access.OPEN)
        self._root = _Node()
        # Clients repeat few paths. The cache is small because they choose them: a path may have 16 KiB.
        self.find = lru_cache(maxsize=512)(self._find)
        for route in self.all:
            self._add(route.pattern, route)
            if route.pattern.startswith("/apps/"):
                self._add(API_PREFIX + route.pattern, route)

    def _add(self, pattern: str, route: Route) -> None:
        node = self._root
        for segment in pattern.split("/")[1:]:
            if re.fullmatch(r"\{\w+\}", segment):
                node.any = node.any or _Node()
                node = node.any
            else:
                node = node.words.setdefault(segment, _Node())
        if route.method in node.routes:
            raise ValueError(f"two routes for {route.method} {pattern}")
        node.routes[route.method] = route

    def _find(self, path: str) -> tuple[Mapping[str, Route], tuple[str, ...]]:
        """The routes of an undecoded path by method, and its decoded parameters in order.

        The mapping is empty if no route matches. Raises UnicodeDecodeError if a parameter isn't UTF-8.
        """
        node = self._root
        parameters: list[str] = []
        for segment in path.split("/", _MAX_SEGMENTS)[1:]:
            following = node.words.get(segment)
            if following is None:
                following = node.any
                if following is None or not segment or len(segment) > _MAX_SEGMENT_CHARS:
                    return {}, ()
                parameters.append(unquote(segment, errors="strict") if "%" in segment else segment)
            node = following
        return node.routes, tuple(parameters)


def no_times() -> list[int]:
    """`Route.times` before the first response."""
    return [0] * _SLOTS


def time_slot(microseconds: int) -> int:
    """The slot of `Route.times` that counts a duration."""
    return min(microseconds.bit_length(), _SLOTS - 1)


def slot_bound_s(slot: int) -> float:
    """The upper bound of a slot of `Route.times` in seconds; infinite for the last one."""
    return float("inf") if slot >= _SLOTS - 1 else 2.0**slot / 1e6
