"""App tokens: a token's record, and whether it authorises a request (protocol/README.md "Tokens").

The token itself is never stored; `auth.token_hash` of what the caller sent finds the record.
"""

import math

import msgspec

from redpoll.protocol.errors import ApiError

__all__ = ["MANAGE", "SCOPES", "Token", "fault_of_token"]

# What a token of an app may authorise. `all` includes the others.
SCOPES = ("publish", "read", "auth", "webhooks", "all")
# The one scope of a token that manages the apps: no token of an app has it, and it authorises nothing in an app.
MANAGE = "manage"


class Token(msgspec.Struct, frozen=True, kw_only=True):
    """A token's record. `app_id` None is a token for every app, or for the management of apps; `prefix` is the first 8
    characters of the token, so that people recognise it. Times are Unix seconds; `expires_at` None: it doesn't
    expire."""

    id: str
    app_id: str | None
    name: str
    hash: str
    prefix: str
    scopes: tuple[str, ...]
    created_at: float
    expires_at: float | None = None
    last_used_at: float | None = None
    revoked_at: float | None = None

    @property
    def lasts_until(self) -> float:
        """When it expired or expires, revoked or not; infinity if it doesn't."""
        return math.inf if self.expires_at is None else self.expires_at

    @property
    def ends_at(self) -> float:
        """When it was revoked, expired or expires; infinity if it has no end."""
        return self.lasts_until if self.revoked_at is None else min(self.lasts_until, self.revoked_at)

    def allows(self, scope: str) -> bool:
        return scope in self.scopes or ("all" in self.scopes and scope != MANAGE)


def fault_of_token(token: Token | None, scope: str, app_id: str | None, now_s: float) -> ApiError | None:
    """Why `token` doesn't authorise `scope` in this app at Unix time `now_s`; None if it does.

    `token` is None if no record was found. `app_id` None: the scope is MANAGE, which belongs to no app. The status is
    401, or 403 if only the scope is missing. The app need not exist.
    """
    if token is None:
        return ApiError("unauthorized", "unknown bearer token")
    if token.revoked_at is not None:
        return ApiError("token_revoked", f"the token was revoked {now_s - token.revoked_at:.0f} s ago")
    if token.expires_at is not None and now_s >= token.expires_at:
        return ApiError(
            "token_expired",
            f"the token expired {now_s - token.expires_at:.0f} s ago, at Unix time {token.expires_at:.0f}; "
            f"the server's time is {now_s:.0f}",
        )
    if app_id is not None and token.app_id is not None and token.app_id != app_id:
        return ApiError("unauthorized", "the token is for another app")
    if not token.allows(scope):
        has = ", ".join(token.scopes) or "none"
        return ApiError("insufficient_scope", f"the token lacks the scope {scope}; it has {has}")
    return None
