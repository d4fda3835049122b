"""Every address that the control plane answers: one table, read by the front, by the metrics and by the docs.

A pattern's `{name}` is one segment of the path, percent-decoded. The API is mounted twice: `/api/v1/apps/…` (the
spec) and `/apps/…` (what existing server libraries call).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Coroutine, Iterable, Mapping
from enum import Enum
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from urllib.parse import unquote

if TYPE_CHECKING:
    from redpoll.control.request import Request
    from redpoll.control.response import Response

__all__ = ["API_PREFIX", "About", "Access", "Handler", "Place", "Route", "Routes", "slot_bound_s"]

API_PREFIX: Final = "/api/v1"
# The last but one slot ends at 2^24 µs, about 17 s: longer than any deadline of ours.
_SLOTS: Final = 26

# A coroutine runs as a task. None: the handler calls Front.conclude when the response is known.
Handler = Callable[["Request"], "Coroutine[Any, Any, Response] | Response | None"]


class Place(Enum):
    """Which port an address exists on. What is public exists on the control port too."""

    PUBLIC = "public"
    CONTROL = "control"


class Access(Enum):
    """Who may call it: anybody, the holder of a credential of the app in the path, or of any app, which is then the
    one that is meant (one library leaves it out of the path, protocol.md 14.9); or somebody who is logged in to the
    dashboard, whom its door judges."""

    OPEN = "open"
    APP = "app"
    ANY_APP = "any_app"
    SESSION = "session"


class About(NamedTuple):
    """What the OpenAPI document says of a route, beyond what follows from its access (openapi.py).

    `answer` and `body` are types, whose schemas are shown; `form`: the body may be urlencoded, too. `query` are its
    query parameters. `faults` are the error codes of its own; `success` is the status where all went well.
    """

    summary: str
    answer: type | None
    body: type | None = None
    form: bool = False
    query: tuple[str, ...] = ()
    faults: tuple[str, ...] = ()
    success: int = 200


class Route:
    """One line of the table, and what has been counted of it.

    `scope`: what a token must be made for (protocol.tokens.SCOPES); empty where the access is open. `limited`: the
    rate limit of triggers holds here. `cross_origin`: pages of the app's allowed origins may call it. `about`: None
    where it is no part of the API.

    `wants_credential`: of an app, before the handler is called. `answers` is answers by status. `times` counts answers
    by duration: slot k holds those that took less than 2^k µs and no less than 2^(k-1); the last slot holds the rest.
    """

    __slots__ = (
        "about",
        "access",
        "answers",
        "cross_origin",
        "handler",
        "limited",
        "method",
        "microseconds",
        "name",
        "pattern",
        "place",
        "scope",
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
        about: About | None = None,
    ) -> None:
        self.method = method
        self.pattern = pattern
        self.name = name
        self.handler = handler
        self.access = access
        self.wants_credential = access in (Access.APP, Access.ANY_APP)
        self.place = place
        self.scope = scope
        self.limited = limited
        self.about = about
        self.cross_origin = cross_origin
        self.answers: dict[int, int] = {}
        self.times = no_times()
        self.microseconds = 0

    def count(self, status: int, seconds: float) -> None:
        self.answers[status] = self.answers.get(status, 0) + 1
        self.times[slot_of(seconds)] += 1
        self.microseconds += int(seconds * 1e6)


class _Node:
    """What may stand at one place of a path: a word, or any segment."""

    __slots__ = ("any", "routes", "words")

    def __init__(self) -> None:
        self.words: dict[str, _Node] = {}
        self.any: _Node | None = None
        self.routes: dict[str, Route] = {}


async def _unmatched(call: Request) -> Response:
    raise LookupError(call.path)


class Routes:
    """The table, and how a path finds its line."""

    def __init__(self, routes: Iterable[Route]) -> None:
        self.all = tuple(routes)
        # What no line answers is counted here.
        self.unmatched = Route("", "", "unmatched", _unmatched, Access.OPEN)
        self._root = _Node()
        # Few paths are asked for again and again. A path may have 16 KiB, so a flood of them must find it small.
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
        """The routes by method at a path as it stands in the request, and its decoded parameters in order.

        No routes: there is no such address. UnicodeDecodeError where a parameter isn't UTF-8.
        """
        node = self._root
        parameters: list[str] = []
        for segment in path.split("/")[1:]:
            following = node.words.get(segment)
            if following is None:
                following = node.any
                if following is None or not segment:
                    return {}, ()
                parameters.append(unquote(segment, errors="strict") if "%" in segment else segment)
            node = following
        return node.routes, tuple(parameters)


def no_times() -> list[int]:
    """`Route.times` before the first answer."""
    return [0] * _SLOTS


def slot_of(seconds: float) -> int:
    """The slot of `Route.times` that counts an answer which took so long."""
    return min(int(seconds * 1e6).bit_length(), _SLOTS - 1)


def slot_bound_s(slot: int) -> float:
    """The upper bound in seconds of a slot of `Route.times`; infinite for the last one."""
    return float("inf") if slot >= _SLOTS - 1 else 2.0**slot / 1e6
