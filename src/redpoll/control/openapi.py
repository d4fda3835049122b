"""The OpenAPI document, rendered from the route table and from the types that the handlers use.

It tells every status that a route can answer, and holds no app's data, so that anybody may read it. What it adds to
the tables are sentences.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from http import HTTPStatus
from typing import Any, Final

import msgspec

from redpoll import __version__
from redpoll.control.request import Request
from redpoll.control.response import Response
from redpoll.control.router import API_PREFIX, Access, Route, Routes
from redpoll.protocol.apps import App
from redpoll.protocol.channels import MAX_NAME_CHARS
from redpoll.protocol.errors import HTTP_STATUS
from redpoll.protocol.messages import MAX_CORRELATION_ID_CHARS
from redpoll.protocol.presence import MAX_USER_ID_CHARS

__all__ = ["Document"]

# The codes of the front (middleware.py): of every request, and of one that needs a credential.
_OF_ALL: Final = ("bad_request", "not_found", "payload_too_large", "internal")
_OF_CREDENTIALS: Final = (
    "unauthorized",
    "invalid_signature",
    "timestamp_out_of_range",
    "body_md5_mismatch",
    "token_expired",
    "token_revoked",
    "app_disabled",
    "insufficient_scope",
    "unknown_app",
    "unsupported_media_type",
    "unavailable",
)
# A body that doesn't come: `bad_request` with the status that HTTP has for it.
_BODY_TIMEOUT: Final = 408

_TEXT: Final = """\
Wire-compatible with the Pusher Channels HTTP API. Everything under `/api/v1/apps` exists under `/apps` as well, where
Pusher's server libraries call it. The first credential present decides alone, in the order bearer token, header pair,
signed query. Limits named "of the app" are settings of each app; the default is shown.
"""

_SECURITY: Final[Mapping[str, Mapping[str, str]]] = {
    "token": {"type": "http", "scheme": "bearer", "description": "An app token; the operation names its scope."},
    "key": {"type": "apiKey", "in": "header", "name": "X-Service-Key"},
    "secret": {"type": "apiKey", "in": "header", "name": "X-Service-Secret"},
    "auth_key": {"type": "apiKey", "in": "query", "name": "auth_key"},
    "auth_timestamp": {"type": "apiKey", "in": "query", "name": "auth_timestamp", "description": "Unix time, ±600 s."},
    "auth_version": {"type": "apiKey", "in": "query", "name": "auth_version", "description": "`1.0`."},
    "body_md5": {"type": "apiKey", "in": "query", "name": "body_md5", "description": "Where there is a body."},
    "auth_signature": {
        "type": "apiKey",
        "in": "query",
        "name": "auth_signature",
        "description": "HMAC-SHA256 in hex of METHOD, path and sorted query, joined by line breaks.",
    },
}
_SIGNED: Final = ("auth_key", "auth_timestamp", "auth_version", "auth_signature")
_WAYS: Final[list[dict[str, list[str]]]] = [{"token": []}, {"key": [], "secret": []}, {name: [] for name in _SIGNED}]

_PATH: Final = {
    "app_id": {"description": "The app's id, decimal digits.", "schema": {"type": "string", "pattern": "^[0-9]+$"}},
    "channel": {
        "description": "The channel's name, percent-encoded where need be.",
        "schema": {"type": "string", "minLength": 1, "maxLength": MAX_NAME_CHARS},
    },
    "user_id": {
        "description": "The id that the user signed in with.",
        "schema": {"type": "string", "minLength": 1, "maxLength": MAX_USER_ID_CHARS},
    },
    "trace_id": {
        "description": "What `X-Service-Trace-Id` of the trigger's answer said.",
        "schema": {"type": "string", "pattern": "^[0-9a-f]{32}$"},
    },
}
_COUNTS: Final = "Comma list of `subscription_count` and `user_count`; what doesn't apply to a channel is left out."
_QUERY: Final = {
    "log_trace_id": ("trace_id", "The call with this trace id."),
    "log_correlation_id": ("correlation_id", "Calls with this correlation id."),
    "log_channel": ("channel", "Calls to this channel."),
    "log_name": ("name", "Calls with an event of this name."),
    "log_since": ("since", "Calls not before this time, Unix ms."),
    "log_until": ("until", "Calls not after this time, Unix ms."),
    "log_limit": ("limit", "How many, 1 to 1,000; 100 where it isn't given."),
    "log_cursor": ("cursor", "`next` of an earlier answer: the older ones."),
    "history_limit": (
        "limit",
        "How many, 1 to 1,000; 100 where it isn't given. Large messages may leave room for fewer.",
    ),
    "history_direction": (
        "direction",
        "`forwards`: oldest first, as without it; `backwards`: newest first, from the newest one on also with `since`.",
    ),
    "history_cursor": ("cursor", "`next` of an earlier answer; the other parameters as they were."),
    "history_since": (
        "since",
        "Only messages behind this place, `EPOCH:OFFSET`, or not before this time, Unix ms; the oldest of them.",
    ),
    "history_until": ("until", "Only messages up to this place, `EPOCH:OFFSET`, or not after this time, Unix ms."),
    "filter_by_prefix": ("filter_by_prefix", "Only channels whose names begin so."),
    "info": ("info", _COUNTS),
    "channel_info": (
        "info",
        "Comma list of `subscription_count`, `user_count` (presence channels only) and `cache` (cache channels only).",
    ),
}


def _default(name: str) -> int:
    value: int = App.__struct_defaults__[App.__struct_fields__.index(name) - len(App.__struct_fields__)]
    return value


# What the types don't say, by type and field: which fields must be there, and a sentence each.
_REQUIRED: Final = {
    "Trigger": ["name", "data"],
    "Item": ["name", "channel", "data"],
    "Auth": ["socket_id", "channel_name"],
}
_FIELDS: Final = {
    "name": f"1 to {_default('max_event_name_chars')} characters (of the app), not beginning with `pusher:`, "
    "`pusher_internal:` or `svc:`.",
    "data": f"At most {_default('max_data_bytes')} bytes (of the app). Never parsed.",
    "channels": f"1 to {_default('max_channels')} names (of the app), or `channel`. An encrypted channel stands alone.",
    "channel": f"1 to {MAX_NAME_CHARS} of letters, digits and `_-=@,.;`, or `#server-to-user-ID`.",
    "socket_id": "Like `123.456`. In a trigger: the connection that doesn't get the event.",
    "info": _COUNTS,
    "correlation_id": f"At most {MAX_CORRELATION_ID_CHARS} printable ASCII characters, echoed in a header. Where the "
    "app has idempotency on, a repetition within 120 s gets the same answer and publishes nothing.",
    "batch": f"At most {_default('max_batch')} events (of the app).",
    "channel_name": "A private, presence or encrypted channel.",
    "channel_data": "Presence channels: JSON text with `user_id` and, if wanted, `user_info`.",
}


class Document:
    """GET openapi.json. `render` it once from the whole table, which it is part of."""

    def __init__(self) -> None:
        self._json = b"{}"

    async def show(self, call: Request) -> Response:
        """The document, without credentials."""
        return call.answer(self._json)

    def render(self, routes: Routes) -> None:
        self._json = msgspec.json.encode(_document(list(_described(routes))), order="sorted")


def _described(routes: Routes) -> Iterator[tuple[str, Route]]:
    for route in routes.all:
        if route.about is not None:
            yield (API_PREFIX + route.pattern if route.pattern.startswith("/apps/") else route.pattern), route


def _document(described: list[tuple[str, Route]]) -> dict[str, Any]:
    schemas = _Schemas(route for _, route in described)
    paths: dict[str, dict[str, Any]] = {}
    for path, route in described:
        paths.setdefault(path, {})[route.method.lower()] = _operation(route, schemas)
    return {
        "openapi": "3.1.0",
        "info": {"title": "redpoll", "version": __version__, "description": _TEXT},
        "servers": [{"url": "/"}],
        "paths": paths,
        "components": {"securitySchemes": _SECURITY, "schemas": schemas.components},
    }


class _Schemas:
    """The JSON Schemas of all bodies and answers."""

    def __init__(self, routes: Iterable[Route]) -> None:
        types: list[type] = []
        for route in routes:
            assert route.about is not None
            types += [each for each in (route.about.body, route.about.answer) if each is not None and each not in types]
        shapes, found = msgspec.json.schema_components(types, ref_template="#/components/schemas/{name}")
        self._of: dict[type, dict[str, Any]] = dict(zip(types, shapes, strict=True))
        self.components: dict[str, Any] = found
        for name, schema in self.components.items():
            _explain(name, schema)
        self.components["Error"] = _ERROR

    def of(self, type_: type) -> dict[str, Any]:
        return self._of[type_]


def _explain(name: str, schema: dict[str, Any]) -> None:
    """Adds what the type doesn't say. Schemas are named and made by msgspec."""
    schema["title"] = name
    required = _REQUIRED.get(name)
    if required is None and name != "Batch":
        return
    for field, about in schema["properties"].items():
        about["description"] = _FIELDS[field]
        if field in (required or ()):
            # None stands in the type for a field that is missing, which is refused with a sentence of its own.
            about.update(type="string")
            about.pop("anyOf", None)
            about.pop("default", None)
    if required:
        schema["required"] = required


_ERROR: Final = {
    "title": "Error",
    "type": "object",
    "required": ["error", "code", "status", "trace_id"],
    "properties": {
        "error": {"type": "string", "description": "For people."},
        "code": {"type": "string", "enum": list(HTTP_STATUS)},
        "status": {"type": "integer"},
        "trace_id": {"type": "string", "pattern": "^[0-9a-f]{32}$"},
    },
}
_TRACE: Final = {
    "X-Service-Trace-Id": {"schema": {"type": "string"}, "description": "32 hex digits; `traceparent`'s if sent."}
}
_LIMITS: Final = {
    "X-RateLimit-Policy": {
        "schema": {"type": "string", "enum": ["ip", "daily"]},
        "description": "Which limit is told.",
    },
    "X-RateLimit-Limit": {"schema": {"type": "integer"}},
    "X-RateLimit-Remaining": {"schema": {"type": "integer"}},
    "X-RateLimit-Reset": {"schema": {"type": "integer"}, "description": "Unix time."},
}
_CORRELATION: Final = {
    "X-Service-Correlation-Id": {"schema": {"type": "string"}, "description": "The `correlation_id`, if it was sent."}
}
_RETRY: Final = {"Retry-After": {"schema": {"type": "integer"}, "description": "Seconds."}}


def _operation(route: Route, schemas: _Schemas) -> dict[str, Any]:
    about = route.about
    assert about is not None
    told: dict[str, Any] = {
        "operationId": route.name,
        "summary": about.summary,
        "parameters": list(_parameters(route)),
        "responses": _responses(route, schemas),
        "security": [] if route.access is Access.OPEN else _WAYS,
    }
    if route.scope:
        told["description"] = f"A token needs the scope `{route.scope}`."
    if about.body is not None:
        content = {"application/json": {"schema": schemas.of(about.body)}}
        if about.form:
            content["application/x-www-form-urlencoded"] = content["application/json"]
        told["requestBody"] = {"required": bool(getattr(about.body, "__struct_fields__", ())), "content": content}
    return told


def _parameters(route: Route) -> Iterator[dict[str, Any]]:
    assert route.about is not None
    for name in re.findall(r"\{(\w+)\}", route.pattern):
        yield {"name": name, "in": "path", "required": True, **_PATH[name]}
    for each in route.about.query:
        name, text = _QUERY[each]
        yield {"name": name, "in": "query", "description": text, "schema": {"type": "string"}}


def _responses(route: Route, schemas: _Schemas) -> dict[str, Any]:
    about = route.about
    assert about is not None
    limits = _LIMITS if route.limited else {}
    success: dict[str, Any] = {"description": HTTPStatus(about.success).phrase}
    if about.answer is not None:
        correlation = _CORRELATION if route.limited else {}
        success["headers"] = {**_TRACE, **limits, **correlation}
        success["content"] = {"application/json": {"schema": schemas.of(about.answer)}}
    told = {str(about.success): success}
    codes: dict[int, list[str]] = {_BODY_TIMEOUT: ["bad_request"]}
    for code in dict.fromkeys((*_OF_ALL, *_codes(route), *about.faults)):
        codes.setdefault(HTTP_STATUS[code], []).append(code)
    for status, names in sorted(codes.items()):
        told[str(status)] = {
            "description": ", ".join(f"`{name}`" for name in names),
            "headers": {**_TRACE, **limits, **(_RETRY if status in (429, 503) else {})},
            "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}},
        }
    return told


def _codes(route: Route) -> tuple[str, ...]:
    """What follows from the route's access."""
    if route.access is Access.OPEN:
        return ()
    return (*_OF_CREDENTIALS, "rate_limited") if route.limited else _OF_CREDENTIALS
