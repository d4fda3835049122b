"""All error codes and close codes, and the two exceptions that carry one.

The tables are complete: an answer with another code is a bug. Faults of the server itself are logged elsewhere, and
callers see `internal` or a close with a general text.
"""

import re
from enum import IntEnum

import msgspec

__all__ = ["CLOSE_TEXTS", "HTTP_STATUS", "ApiError", "ClientError", "Code", "close_reason", "fault_of"]

# A close frame has 125 bytes, two of which are the code (RFC 6455 section 5.5).
_MAX_REASON_BYTES = 123

_HALF_PAIR = "a text has half of a surrogate pair, such as a cut emoji"
# msgspec's words for it, if the other half would have room. Nearer to the end it says what it says of any text that
# ends too early.
_HALF_PAIR_FAULTS = ("utf-16 surrogate pair", "unexpected end of hex escape")
_TRUNCATED = "Input data was truncated"
# The first half after an even number of backslashes, then no escape, and less than one would take.
_LATE_HALF_PAIR = re.compile(r"(?<!\\)(?:\\\\)*\\u[dD][89abAB][0-9a-fA-F]{2}(?!\\u).{0,5}\Z", re.DOTALL).search
_MAX_END = 64


class Code(IntEnum):
    """Codes of `pusher:error` and of close frames (protocol/README.md "Close codes"). Clients act on the range:

    4000-4099 they stay away, 4100-4199 they reconnect after a second, 4200-4299 at once.
    43xx is never a close code: pusher-js would never reconnect.
    """

    TLS_REQUIRED = 4000
    UNKNOWN_KEY = 4001
    APP_DISABLED = 4003
    OVER_QUOTA = 4004
    PATH_NOT_FOUND = 4005
    BAD_VERSION = 4006
    UNSUPPORTED_VERSION = 4007
    UNAUTHORIZED = 4009
    OVER_CAPACITY = 4100
    RECONNECT = 4200
    PONG_NOT_RECEIVED = 4201
    CLIENT_EVENT_REJECTED = 4301
    WATCHLIST_TOO_LONG = 4302


# The texts of closes that always have the same.
CLOSE_TEXTS: dict[Code, str] = {
    Code.APP_DISABLED: "the app is disabled",
    Code.OVER_QUOTA: "the app has reached its limit of connections",
    Code.PONG_NOT_RECEIVED: "Pong reply not received in time",
}

# Codes of the HTTP API, ordered by status (protocol/README.md "Errors").
HTTP_STATUS: dict[str, int] = {
    "bad_request": 400,
    "invalid_event_name": 400,
    "invalid_channel": 400,
    "too_many_channels": 400,
    "batch_too_large": 400,
    "invalid_socket_id": 400,
    "invalid_info": 400,
    "not_presence_channel": 400,
    "unknown_epoch": 400,
    "invalid_offset": 400,
    "invalid_cursor": 400,
    "no_history": 400,
    "unauthorized": 401,
    "invalid_signature": 401,
    "timestamp_out_of_range": 401,
    "body_md5_mismatch": 401,
    "token_expired": 401,
    "token_revoked": 401,
    "app_disabled": 403,
    "insufficient_scope": 403,
    "forbidden": 403,
    "unknown_app": 404,
    "not_found": 404,
    "method_not_allowed": 405,
    "idempotency_conflict": 409,
    "conflict": 409,
    "channel_ended": 409,
    "too_many_histories": 409,
    "offset_gone": 410,
    "precondition_failed": 412,
    "payload_too_large": 413,
    "unsupported_media_type": 415,
    "precondition_required": 428,
    "rate_limited": 429,
    "daily_limit_exceeded": 429,
    "too_many_connections": 429,
    "internal": 500,
    "unavailable": 503,
}


class ClientError(Exception):
    """A WebSocket client's fault, sent to it as `pusher:error`. `code` is None where the protocol says null."""

    def __init__(self, code: int | None, message: str) -> None:
        super().__init__(code, message)
        self.code = code
        self.message = message

    def __str__(self) -> str:
        return f"{self.message} ({self.code})"


class ApiError(Exception):
    """An HTTP caller's fault. `code` is a key of `HTTP_STATUS`, which gives the status."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(code, message)
        self.code = code
        self.message = message

    @property
    def status(self) -> int:
        return HTTP_STATUS[self.code]

    def body(self, trace_id: str) -> dict[str, str | int]:
        """The body of an error answer. `trace_id` is 32 hex digits."""
        return {"error": self.message, "code": self.code, "status": self.status, "trace_id": trace_id}

    def __str__(self) -> str:
        return f"{self.message} ({self.code})"


def close_reason(message: str) -> str:
    """`message` cut to the length of a close reason, between two characters."""
    return message.encode("utf-8", "replace")[:_MAX_REASON_BYTES].decode("utf-8", "ignore")


def fault_of(error: Exception, source: bytes | str = b"") -> str:
    """Why msgspec could not decode `source`, without quoting it.

    JavaScript cuts texts between the halves of an emoji, and JSON has a spelling for a half. It is named, because
    msgspec's own words send people after a fault of the network.
    """
    if isinstance(error, RecursionError):
        return "nested too deeply"
    if not isinstance(error, msgspec.DecodeError):
        return "not UTF-8"
    fault = str(error)
    if fault == _TRUNCATED:
        end = source[-_MAX_END:]
        text = end if isinstance(end, str) else end.decode("utf-8", "replace")
        return _HALF_PAIR if _LATE_HALF_PAIR(text) else fault
    return _HALF_PAIR if any(words in fault for words in _HALF_PAIR_FAULTS) else fault
