"""A request to read a channel, as it was received: which requests are one, and what control is asked about it.

A token or grant in the query, which EventSource needs because it can't send header fields, is moved into a header field
here. So nothing that logs or shows a request's target ever has it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final, NamedTuple
from urllib.parse import parse_qsl, unquote

from redpoll.http.messages import FIELDS, pack_fields, unpack_fields
from redpoll.http.reader import ParsedRequest
from redpoll.protocol.access import REVOKED, is_grant, reading_grant
from redpoll.protocol.apps import App
from redpoll.protocol.credentials import bearer_of, has_token
from redpoll.protocol.errors import ApiError, ClientError
from redpoll.protocol.grants import AppGrants, Grant
from redpoll.protocol.streams import Live, Reading, accepts_events, parse_reading
from redpoll.worker.streams.answers import come_again

__all__ = ["READ_FIELDS", "Asked", "asked_of", "wants_events"]

# The header fields that requests are read with: those for control, and those that only the worker reads.
_OWN_FIELDS: Final = ("X-Forwarded-Proto", "Accept", "Last-Event-ID")
READ_FIELDS: Final = (*FIELDS, *_OWN_FIELDS)
_ACCEPT, _LAST_EVENT_ID = range(len(FIELDS) + 1, len(READ_FIELDS))
_IF_NONE_MATCH: Final = FIELDS.index("If-None-Match")
_AUTHORIZATION: Final = FIELDS.index("Authorization")
_PATH: Final = re.compile(rb"[^?]*/apps/[^/?]+/channels/[^/?]+/stream(?:\?|$)").match
_PARAMETER: Final = "token"
_MAX_PARAMETERS: Final = 100


class Asked(NamedTuple):
    """`request` is what control is asked: without the token in its query, and with the header fields of `FIELDS` only.
    `query` isn't decoded, and has no token either."""

    request: ParsedRequest
    query: str
    accept: str
    known_etag: str
    last_event_id: str

    @property
    def flags(self) -> int:
        return self.request.flags

    @property
    def is_head(self) -> bool:
        return self.request.method == b"HEAD"

    @property
    def is_event_source(self) -> bool:
        """Whether a browser's EventSource asks, or a client like it."""
        try:
            return not self.is_head and self.reading().live is Live.EVENT_SOURCE
        except ApiError:
            return False

    def refused(self, response: bytes) -> bytes:
        """What the client gets for a temporary error, whose `response` is this: an EventSource is to ask again."""
        return come_again() if self.is_event_source else response

    def reading(self) -> Reading:
        """What it asks for. Raises ApiError `bad_request`."""
        try:
            query = parse_qsl(self.query, keep_blank_values=True, errors="strict", max_num_fields=_MAX_PARAMETERS)
        except ValueError:
            raise ApiError(
                "bad_request", f"the query is not UTF-8, or has more than {_MAX_PARAMETERS} fields"
            ) from None
        return parse_reading(query, self.accept, self.last_event_id)

    def grant_of(self, app: App, revoked: AppGrants, channel: str) -> Grant | None:
        """The grant that lets it read, which control has checked; None if another credential does. Raises ApiError
        `unauthorized` if the grant was revoked meanwhile, `unavailable` if this worker's record of the app is older
        than control's."""
        # As control reads them: of several the first.
        headers = unpack_fields(pack_fields(self.request.fields))
        bearer = bearer_of(headers) if has_token(headers) else ""
        if not is_grant(bearer):
            return None
        try:
            return reading_grant(app, revoked, channel, bearer)
        except ClientError as error:
            if error.message == REVOKED:
                raise ApiError("unauthorized", REVOKED) from None
            raise ApiError("unavailable", f"this server knows an older record of the app: {error.message}") from None

    def forwarding(self) -> Mapping[bytes, bytes]:
        """Its X-Forwarded-For header, as Addresses.enter reads it."""
        forwarded = self.request.forwarded
        return {b"x-forwarded-for": ", ".join(forwarded).encode("latin-1")} if forwarded else {}


def asked_of(request: ParsedRequest) -> Asked | None:
    """None: the request isn't one to read a channel."""
    if request.method not in (b"GET", b"HEAD") or _PATH(request.target) is None:
        return None
    path, mark, query = request.target.decode("latin-1").partition("?")
    token, query = _without_token(query)
    values = {place: value.decode("latin-1") for place, value in reversed(request.fields)}
    fields = [(place, value) for place, value in request.fields if place < len(FIELDS)]
    if token is not None and all(place != _AUTHORIZATION for place, _ in fields):
        fields.append((_AUTHORIZATION, f"Bearer {token}".encode("latin-1", "replace")))
    target = (path + mark * bool(query) + query).encode("latin-1")
    return Asked(
        request._replace(target=target, fields=fields),
        query,
        values.get(_ACCEPT, ""),
        values.get(_IF_NONE_MATCH, ""),
        values.get(_LAST_EVENT_ID, "").strip(),
    )


def wants_events(request: ParsedRequest) -> bool:
    """Whether the client asks for server-sent events."""
    return any(place == _ACCEPT and accepts_events(value.decode("latin-1")) for place, value in request.fields)


def _without_token(query: str) -> tuple[str | None, str]:
    """The query's token, decoded, and the rest as it is. Of several tokens the last counts."""
    if _PARAMETER not in query and "%" not in query:
        return None, query
    token: str | None = None
    left = []
    # To decode thousands would take longer than a pass of the loop may. These, a token and more than control takes, are
    # enough to be refused.
    for part in query.split("&", _MAX_PARAMETERS + 2)[: _MAX_PARAMETERS + 2]:
        name, _, value = part.partition("=")
        if unquote(name.replace("+", " ")) == _PARAMETER:
            token = unquote(value.replace("+", " "), encoding="latin-1")
        else:
            left.append(part)
    return token, "&".join(left)
