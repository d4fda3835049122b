"""Routes for test suites in other languages, which can't call `FakeServer`.

- `GET /fake/published`: `{"published": [{"name", "channel", "data", …}]}`, in order, with the fields of
  `recorder.Published`; `name` and `channel` in the query select.
- `POST /fake/reset`: forgets them, as `FakeServer.reset`; answers `{}`.

They need no signature: the server listens on loopback.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Any, Final

import msgspec

from redpoll.control.http.response import EMPTY_OBJECT, Response
from redpoll.control.http.router import Access, Route
from redpoll.protocol.auth import parse_query
from redpoll.testing.recorder import Recorder
from redpoll.testing.request import Request

__all__ = ["suite_routes_of"]

_encode: Final = msgspec.json.Encoder().encode


def suite_routes_of(recorder: Recorder, reset: Callable[[], None]) -> list[Route]:
    def published(request: Request) -> Response:
        wanted = dict(parse_query(request.query, plus_is_space=True))
        events = recorder.matching(wanted.get("name"), wanted.get("channel"))
        return request.plain(_encode({"published": [asdict(event) for event in events]}))

    def forget(request: Request) -> Response:
        reset()
        return request.plain(EMPTY_OBJECT)

    # The router's handlers take the control plane's requests, these the fake's.
    handlers: tuple[Any, Any] = (published, forget)
    return [
        Route("GET", "/fake/published", "published", handlers[0], Access.OPEN),
        Route("POST", "/fake/reset", "reset", handlers[1], Access.OPEN),
    ]
