"""The OpenAPI document, rendered from the route table and from the types that the handlers use.

It lists every status that a route can answer. It contains no app's data and needs no credentials. This module adds the
descriptions to what routes and types define.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from http import HTTPStatus
from typing import Any, Final

import msgspec

from redpoll import __version__
from redpoll.config.app_names import APP_ID_RULE, APP_KEY_RULE, MAX_APP_ID_CHARS
from redpoll.control.api.answers import DEFAULT_PAGE, MAX_PAGE
from redpoll.control.api.api import MAX_UNPAGED
from redpoll.control.http.request import Request
from redpoll.control.http.response import Response
from redpoll.control.http.router import API_PREFIX, Access, Route, Routes
from redpoll.protocol.apps import App
from redpoll.protocol.channels import MAX_NAME_CHARS
from redpoll.protocol.errors import HTTP_STATUS
from redpoll.protocol.messages import MAX_CORRELATION_ID_CHARS
from redpoll.protocol.presence import MAX_USER_ID_CHARS

__all__ = ["Document", "document_of"]

# Error codes of the middleware: for every request, and for requests that need credentials.
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
    "rate_limited",
    "unavailable",
)
# Those that a request with a token for the management of apps can't get.
_OF_APP_CREDENTIALS: Final = (
    "invalid_signature",
    "timestamp_out_of_range",
    "body_md5_mismatch",
    "app_disabled",
    "unknown_app",
)
# The status of `bad_request` if the body doesn't arrive in time.
_BODY_TIMEOUT: Final = 408

_TEXT: Final = """\
Wire-compatible with the Pusher Channels HTTP API. Everything under `/api/v1/apps` exists under `/apps` as well, where
Pusher's server libraries call it. If a request has several credentials, only the first one counts, in the order bearer
token, header pair, signed query. Limits marked "of the app" are settings of each app; the default is shown.

Operations that begin with `manage_` need a token with the scope `manage` (`redpoll token create --manage`). They exist
on the control port, and on the public port with the setting `manage_on_public_port`. Changes need `If-Match` with the
`ETag` of an earlier answer.
"""

_SECURITY: Final[Mapping[str, Mapping[str, str]]] = {
    "token": {"type": "http", "scheme": "bearer", "description": "The operation names the scope."},
    "key": {"type": "apiKey", "in": "header", "name": "X-Service-Key"},
    "secret": {"type": "apiKey", "in": "header", "name": "X-Service-Secret"},
    "auth_key": {"type": "apiKey", "in": "query", "name": "auth_key"},
    "auth_timestamp": {"type": "apiKey", "in": "query", "name": "auth_timestamp", "description": "Unix time, ±600 s."},
    "auth_version": {"type": "apiKey", "in": "query", "name": "auth_version", "description": "`1.0`."},
    "body_md5": {
        "type": "apiKey",
        "in": "query",
        "name": "body_md5",
        "description": "MD5 of the body in hex; required if there is a body.",
    },
    "auth_signature": {
        "type": "apiKey",
        "in": "query",
        "name": "auth_signature",
        "description": "HMAC-SHA256 in hex of METHOD, path and sorted query, joined by line breaks.",
    },
}
_SIGNED: Final = ("auth_key", "auth_timestamp", "auth_version", "auth_signature")
_WAYS: Final[list[dict[str, list[str]]]] = [{"token": []}, {"key": [], "secret": []}, {name: [] for name in _SIGNED}]
_SECURITY_OF: Final[Mapping[Access, list[dict[str, list[str]]]]] = {Access.OPEN: [], Access.MANAGE: [{"token": []}]}

_PATH: Final = {
    "app_id": {
        "description": f"The app's id: {APP_ID_RULE}.",
        "schema": {"type": "string", "pattern": f"^[A-Za-z0-9_.-]{{1,{MAX_APP_ID_CHARS}}}$"},
    },
    "channel": {
        "description": "The channel's name, percent-encoded if necessary.",
        "schema": {"type": "string", "minLength": 1, "maxLength": MAX_NAME_CHARS},
    },
    "user_id": {
        "description": "The id that the user signed in with.",
        "schema": {"type": "string", "minLength": 1, "maxLength": MAX_USER_ID_CHARS},
    },
    "trace_id": {
        "description": "The `X-Service-Trace-Id` of the trigger's answer.",
        "schema": {"type": "string", "pattern": "^[0-9a-f]{32}$"},
    },
    "key": {
        "description": f"A key of the app: {APP_KEY_RULE}.",
        "schema": {"type": "string", "pattern": "^[A-Za-z0-9_.-]{1,128}$"},
    },
    "rule_id": {"description": "The rule's id.", "schema": {"type": "string", "pattern": "^[0-9a-f]{6}$"}},
    "webhook_id": {"description": "The webhook's id.", "schema": {"type": "string", "pattern": "^[0-9a-f]{12}$"}},
    "token_id": {"description": "The token's id.", "schema": {"type": "string", "pattern": "^[0-9a-f]{12}$"}},
}
_COUNTS: Final = (
    "Comma-separated list of `subscription_count` and `user_count`; what doesn't apply to a channel is left out."
)
_QUERY: Final = {
    "log_trace_id": ("trace_id", "The call with this trace id."),
    "log_correlation_id": ("correlation_id", "Calls with this correlation id."),
    "log_channel": ("channel", "Calls to this channel."),
    "log_name": ("name", "Calls with an event of this name."),
    "log_since": ("since", "Calls not before this time, Unix ms."),
    "log_until": ("until", "Calls not after this time, Unix ms."),
    "log_limit": ("limit", "The maximum number of calls, 1 to 1,000; default 100."),
    "trace_time_us": (
        "time_us",
        "The call with this `time_us`, if calls share the trace id; else the newest that was traced.",
    ),
    "log_cursor": ("cursor", "`next` of an earlier answer, to get the older calls."),
    "history_limit": (
        "limit",
        "The maximum number of messages, 1 to 1,000; default 100. With large messages, an answer has fewer.",
    ),
    "history_direction": (
        "direction",
        "The order within a page. `forwards` (default): oldest first. `backwards`: newest first. Without `since`, or "
        "with `backwards`, the first page has the newest messages, and `next` leads to older ones.",
    ),
    "history_cursor": ("cursor", "`next` of an earlier answer; leave the other parameters unchanged."),
    "history_since": (
        "since",
        "Only messages after this position, `EPOCH:OFFSET`, or not before this time, Unix ms; the oldest of them. "
        "`next` leads to newer ones. 0: from the beginning.",
    ),
    "history_until": (
        "until",
        "Only messages up to this position, `EPOCH:OFFSET`, or not after this time, Unix ms.",
    ),
    "stream_offset": (
        "offset",
        "Where to begin: `-1` (default) at the oldest stored message, `now` after the last one, or a token from "
        "`Stream-Next-Offset`.",
    ),
    "stream_live": (
        "live",
        "`long-poll`: wait for the next message; 204 if none comes. `sse`: a stream of `data` and `control` events. "
        "Without it, and with `Accept: text/event-stream`: events as they were published, for EventSource, which gets "
        "200 without an event instead of 503, and asks again.",
    ),
    "stream_cursor": ("cursor", "`Stream-Cursor` of the answer before."),
    "stream_only": ("only", "`data`: each message is its data alone, as JSON."),
    "stream_token": (
        "token",
        "An app token or a grant (`KEY:JWT`), for clients that can't send header fields. It is never logged.",
    ),
    "pull_endpoint": ("endpoint", "Only deliveries of this endpoint. Default: of all that have no URL."),
    "pull_limit": (
        "limit",
        "The maximum number of deliveries, 0 to 100; default 10. Large ones come alone. With 0 nothing is handed out. "
        "Of a stream, how many may be handed out and not acknowledged.",
    ),
    "pull_wait": (
        "wait",
        "For how many seconds to wait for a delivery if none is due, 0 to 60; default 30. The control port doesn't "
        "wait.",
    ),
    "filter_by_prefix": ("filter_by_prefix", "Only channels whose names begin with this text."),
    "info": ("info", _COUNTS),
    "channels_limit": (
        "limit",
        f"Answer a page: at most this many channels, 1 to {MAX_PAGE}; default {DEFAULT_PAGE}. A page may have fewer "
        f"although more follow. Without `limit` and `cursor` all channels, if they are at most {MAX_UNPAGED}.",
    ),
    "usage_days": ("days", "The number of days, today included, 1 to 400; default 30."),
    "apps_limit": ("limit", f"The maximum number of apps, 1 to {MAX_PAGE}; default {DEFAULT_PAGE}."),
    "apps_cursor": ("cursor", "`next` of the page before."),
    "channels_cursor": ("cursor", "`next` of the page before; leave the other parameters unchanged."),
    "channel_info": (
        "info",
        "Comma-separated list of `subscription_count`, `user_count` (presence channels only) and `cache` (cache "
        "channels only).",
    ),
}


def _default(name: str) -> int:
    value: int = App.__struct_defaults__[App.__struct_fields__.index(name) - len(App.__struct_fields__)]
    return value


# What the types don't define: required fields by type, and the description of each field.
_REQUIRED: Final = {
    "Trigger": ["name", "data"],
    "Item": ["name", "channel", "data"],
    "Auth": ["socket_id", "channel_name"],
}
_FIELDS: Final = {
    "name": f"1 to {_default('max_event_name_chars')} characters (of the app), not beginning with `pusher:`, "
    "`pusher_internal:` or `svc:`.",
    "data": f"At most {_default('max_data_bytes')} bytes (of the app). Never parsed.",
    "channels": f"1 to {_default('max_channels')} names (of the app), or `channel`. An encrypted channel must be "
    "the only one.",
    "channel": f"1 to {MAX_NAME_CHARS} letters, digits and `_-=@,.;`, or `#server-to-user-ID`.",
    "socket_id": "Such as `123.456`. In a trigger: a connection that doesn't get the event.",
    "info": _COUNTS,
    "correlation_id": f"At most {MAX_CORRELATION_ID_CHARS} printable ASCII characters, returned in a header. If the "
    "app has idempotency on, a repetition within 120 s gets the same answer and publishes nothing.",
    "batch": f"At most {_default('max_batch')} events (of the app).",
    "end": "The event is the channel's last: later publishes get 409 `channel_ended` until its history is cleared. "
    "Only on channels with history.",
    "channel_name": "A private, presence or encrypted channel.",
    "jti": "The `jti` of one grant, or `sub`.",
    "sub": "A user, all of whose grants that were issued until now are revoked, or `jti`.",
    "user_id": "The member, the signed-in user, or the `sub` of a grant; or `socket_id`.",
    "channel_data": "For presence channels: JSON text with `user_id` and, optionally, `user_info`.",
}


class Document:
    """GET openapi.json. Call `describe` once with the complete route table, which includes this route.

    It is made for the first request and kept: making it takes a tenth of the time that the start of the plane does.
    """

    def __init__(self) -> None:
        self._routes: Routes | None = None
        self._json = b""

    async def show(self, request: Request) -> Response:
        """Answers the document."""
        if not self._json and self._routes is not None:
            self._json = document_of(self._routes)
        return request.ok(self._json)

    def describe(self, routes: Routes) -> None:
        self._routes = routes


def document_of(routes: Routes) -> bytes:
    """The document of a complete route table, as JSON."""
    return msgspec.json.encode(_document(list(_described(routes))), order="sorted")


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
            both = (route.about.body, route.about.answer)
            types += [type_ for type_ in both if type_ is not None and type_ not in types]
        shapes, components = msgspec.json.schema_components(types, ref_template="#/components/schemas/{name}")
        self._of: dict[type, dict[str, Any]] = dict(zip(types, shapes, strict=True))
        self.components: dict[str, Any] = components
        for name, schema in self.components.items():
            _explain(name, schema)
        self.components["Error"] = _ERROR

    def of(self, type_: type) -> dict[str, Any]:
        return self._of[type_]


def _explain(name: str, schema: dict[str, Any]) -> None:
    """Adds descriptions and required fields to a schema that msgspec made from a type."""
    schema["title"] = name
    required = _REQUIRED.get(name)
    if required is None and name != "Batch":
        return
    for field, about in schema["properties"].items():
        about["description"] = _FIELDS[field]
        if field in (required or ()):
            # In the type, None stands for a missing field, which is refused with its own message.
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
        "error": {"type": "string", "description": "A sentence for people."},
        "code": {"type": "string", "enum": list(HTTP_STATUS)},
        "status": {"type": "integer"},
        "trace_id": {"type": "string", "pattern": "^[0-9a-f]{32}$"},
    },
}
_TRACE: Final = {
    "X-Service-Trace-Id": {
        "schema": {"type": "string"},
        "description": "32 hex digits; taken from `traceparent` if sent.",
    }
}
_LIMITS: Final = {
    "X-RateLimit-Policy": {
        "schema": {"type": "string", "enum": ["ip", "daily"]},
        "description": "The limit that these headers describe.",
    },
    "X-RateLimit-Limit": {"schema": {"type": "integer"}},
    "X-RateLimit-Remaining": {"schema": {"type": "integer"}},
    "X-RateLimit-Reset": {"schema": {"type": "integer"}, "description": "Unix time."},
}
_CORRELATION: Final = {
    "X-Service-Correlation-Id": {"schema": {"type": "string"}, "description": "The `correlation_id`, if it was sent."}
}
_TAG: Final = {
    "ETag": {
        "schema": {"type": "string"},
        "description": "Changes with anything of the app that this API shows.",
    }
}
_LOCATION: Final = {"Location": {"schema": {"type": "string"}, "description": "The path of what was created."}}
_IF_MATCH: Final = {
    "name": "If-Match",
    "in": "header",
    "description": "The `ETag` of the answer that the change is based on; `*` is any.",
    "schema": {"type": "string"},
}
_RETRY: Final = {"Retry-After": {"schema": {"type": "integer"}, "description": "Seconds."}}


def _operation(route: Route, schemas: _Schemas) -> dict[str, Any]:
    about = route.about
    assert about is not None
    operation: dict[str, Any] = {
        "operationId": route.name,
        "summary": about.summary,
        "parameters": list(_parameters(route)),
        "responses": _responses(route, schemas),
        "security": _SECURITY_OF.get(route.access, _WAYS),
    }
    if route.scope:
        operation["description"] = f"A token needs the scope `{route.scope}`."
    if about.body is not None:
        content = {"application/json": {"schema": schemas.of(about.body)}}
        if about.form:
            content["application/x-www-form-urlencoded"] = content["application/json"]
        if about.patch:
            content["application/merge-patch+json"] = content["application/json"]
        operation["requestBody"] = {"required": bool(getattr(about.body, "__struct_fields__", ())), "content": content}
    return operation


def _parameters(route: Route) -> Iterator[dict[str, Any]]:
    assert route.about is not None
    for name in re.findall(r"\{(\w+)\}", route.pattern):
        yield {"name": name, "in": "path", "required": True, **_PATH[name]}
    for parameter in route.about.query:
        name, text = _QUERY[parameter]
        yield {"name": name, "in": "query", "description": text, "schema": {"type": "string"}}
    if route.access is Access.MANAGE and route.method != "GET" and "{app_id}" in route.pattern:
        yield {**_IF_MATCH, "required": route.about.conditional}


def _responses(route: Route, schemas: _Schemas) -> dict[str, Any]:
    about = route.about
    assert about is not None
    limits = _LIMITS if route.limited else {}
    success: dict[str, Any] = {"description": HTTPStatus(about.success).phrase}
    if about.answer is not None:
        correlation = _CORRELATION if route.limited else {}
        tags = {**(_TAG if about.tagged else {}), **(_LOCATION if about.success == 201 else {})}
        success["headers"] = {**_TRACE, **limits, **correlation, **tags}
        success["content"] = {"application/json": {"schema": schemas.of(about.answer)}}
        if about.streamed:
            success["content"]["text/event-stream"] = {"schema": {"type": "string"}}
    responses = {str(about.success): success}
    for status, text in about.empty:
        responses[str(status)] = {"description": text, "headers": _TRACE}
    codes: dict[int, list[str]] = {_BODY_TIMEOUT: ["bad_request"]}
    for code in dict.fromkeys((*_OF_ALL, *_codes(route), *about.faults)):
        codes.setdefault(HTTP_STATUS[code], []).append(code)
    for status, names in sorted(codes.items()):
        responses[str(status)] = {
            "description": ", ".join(f"`{name}`" for name in names),
            "headers": {**_TRACE, **limits, **(_RETRY if status in (429, 503) else {})},
            "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}},
        }
    return responses


def _codes(route: Route) -> tuple[str, ...]:
    """The error codes that follow from the route's access."""
    if route.access is Access.OPEN:
        return ()
    if route.access is Access.MANAGE:
        return tuple(code for code in _OF_CREDENTIALS if code not in _OF_APP_CREDENTIALS)
    return _OF_CREDENTIALS
