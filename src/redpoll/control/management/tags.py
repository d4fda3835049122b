"""The entity tags of apps (RFC 9110 section 8.8.3), which keep one writer from overwriting what another one changed.

An app has one tag, which changes with anything of it that the API shows: its name, settings, keys, history rules,
webhooks or tokens. What is below the app has the same tag. It is made of the records alone, so all nodes agree on it.
"""

from __future__ import annotations

import hashlib
import re
from typing import TYPE_CHECKING, Final

import msgspec

from redpoll.control.records.records import Records
from redpoll.protocol.errors import ApiError

if TYPE_CHECKING:
    from redpoll.control.webhooks.endpoints import Endpoints

__all__ = ["Tags"]

# RFC 9110 section 8.8.3: entity-tag = [ weak ] opaque-tag.
_TAG: Final = re.compile(r'(?:W/)?"[\x21\x23-\x7e\x80-\xff]*"')
_LIST: Final = re.compile(rf"[ \t]*{_TAG.pattern}[ \t]*(?:,[ \t]*{_TAG.pattern}[ \t]*)*")
_TAG_BYTES: Final = 16
_MAX_KEY_BYTES: Final = 64
_MAX_FIELD_CHARS: Final = 4_096


class Tags:
    """`secret`: the tag covers secrets, and without it nobody may try which secret belongs to a tag."""

    def __init__(self, records: Records, endpoints: Endpoints, secret: bytes) -> None:
        self._records = records
        self._endpoints = endpoints
        self._secret = secret[:_MAX_KEY_BYTES]

    def of(self, app_id: str) -> str:
        """The tag of an app, in quotes. Raises KeyError if there is no such app."""
        app = self._records.apps[app_id]
        # What the server itself changes isn't shown.
        shown = msgspec.structs.replace(
            app, hooks="", console_key=None, console_until=0.0, debug_until=0.0, debug_socket=""
        )
        endpoints = [msgspec.structs.replace(one, failing_since=None) for one in self._endpoints.of_app(app_id)]
        tokens = [msgspec.structs.replace(one, last_used_at=None) for one in self._records.tokens_of(app_id)]
        content = msgspec.json.encode([shown, endpoints, tokens])
        return f'"{hashlib.blake2b(content, digest_size=_TAG_BYTES, key=self._secret).hexdigest()}"'

    def check(self, app_id: str, if_match: str) -> None:
        """Raises ApiError unless `matches`."""
        if not self.matches(app_id, if_match):
            raise ApiError(
                "precondition_failed",
                "the app has changed since the answer with this ETag: read it again, and decide again what to change",
            )

    def matches(self, app_id: str, if_match: str) -> bool:
        """Whether the app's tag is one of those in the header field If-Match (RFC 9110 section 13.1.1). Weak tags never
        match, as the section says; `*` is every app that exists. Raises ApiError for an unknown app, or another field.
        """
        if app_id not in self._records.apps:
            raise ApiError("unknown_app", "there is no app with this id")
        if len(if_match) > _MAX_FIELD_CHARS:
            raise ApiError("bad_request", f"If-Match has more than {_MAX_FIELD_CHARS} characters")
        if if_match.strip() == "*":
            return True
        if _LIST.fullmatch(if_match) is None:
            raise ApiError("bad_request", 'If-Match must be the ETag of an earlier answer, with its quotes, or "*"')
        return self.of(app_id) in _TAG.findall(if_match)
