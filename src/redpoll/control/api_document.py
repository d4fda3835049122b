"""The OpenAPI document of all routes, without a server."""

from __future__ import annotations

from typing import Any

from redpoll.control.api.openapi import document_of
from redpoll.control.api.routes import routes_of
from redpoll.control.management.routes import management_routes

__all__ = ["document"]


def document() -> bytes:
    """The OpenAPI document as JSON: it depends on the table of routes only."""
    unserved: Any = _Unserved()
    return document_of(
        routes_of(
            unserved,
            unserved,
            unserved,
            unserved,
            unserved,
            unserved,
            unserved,
            unserved,
            unserved,
            unserved,
            management_routes(unserved),
        )
    )


class _Unserved:
    """In place of the parts whose handlers answer requests."""

    def __getattr__(self, name: str) -> Any:
        return self
