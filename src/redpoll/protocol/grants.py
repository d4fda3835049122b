"""Signed channel grants: what one allows, and which of them were revoked (protocol/README.md "Grants").

claims.py makes a `Grant` of a JWT whose signature auth.py has verified. access.py decides what a connection may do with
it.
"""

from collections.abc import Callable, Iterator

import msgspec

from redpoll.protocol.channels import ENCRYPTED_PREFIX, is_encrypted

__all__ = [
    "KEPT_S",
    "LEEWAY_S",
    "MAX_LIFETIME_S",
    "MAX_REVOKED",
    "AppGrants",
    "Grant",
    "RevokedGrants",
    "of_channel",
    "of_grant",
    "of_jti",
    "of_user",
]

MAX_LIFETIME_S = 86_400
# How far the back end's clock may differ from the server's (RFC 7519 section 4.1.4).
LEEWAY_S = 10
# Revocations of one app that a grant could still meet.
MAX_REVOKED = 10_000
# A revocation is kept until every grant that it is about has expired.
KEPT_S = MAX_LIFETIME_S + 3 * LEEWAY_S


class Grant(msgspec.Struct, frozen=True, gc=False):
    """What one JWT allows. `key` signed it; `digest` is the SHA-256 of `auth`, by which a connection knows it again.

    `user_id` (`sub`) is None if the grant names nobody, `id` (`jti`) if it has no id. `user_info` is as in `Member`.
    Times are Unix seconds; `issued_at` is 0 without `iat`, and `not_before` the later of `iat` and `nbf`. `names` are
    the channels, with a space around each, `prefixes` the beginnings of channels with spaces between them, None for no
    beginning: connections keep their grants, and tuples would take three times the memory.
    """

    key: str
    digest: bytes
    user_id: str | None
    user_info: bytes
    id: str | None
    expires_at: float
    issued_at: float
    not_before: float
    names: str
    prefixes: str | None
    subscribes: bool
    client_events: bool

    @property
    def patterns(self) -> list[str]:
        """The claim `channels`, names first."""
        prefixes = [] if self.prefixes is None else self.prefixes.split(" ")
        return self.names.split() + [prefix + "*" for prefix in prefixes]

    def channel_fault(self, channel: str) -> str | None:
        """Why the grant doesn't open this channel; None if it does. Says nothing about time and revocation."""
        if not self.subscribes:
            return "its may lacks 'subscribe'"
        if f" {channel} " in self.names:
            return None
        prefixes = () if self.prefixes is None else tuple(self.prefixes.split(" "))
        if not is_encrypted(channel):
            return None if channel.startswith(prefixes) else f"no pattern of its channels matches {channel}"
        if channel.startswith(tuple(prefix for prefix in prefixes if prefix.startswith(ENCRYPTED_PREFIX))):
            return None
        return (
            f"channel {channel} is encrypted: only a pattern that begins with {ENCRYPTED_PREFIX} opens it, and the "
            "client needs its shared_secret from your back end beside auth, as without grants"
        )

    def time_fault(self, now_s: float) -> str | None:
        """Why the grant doesn't count at this Unix time; None if it does."""
        if now_s > self.expires_at + LEEWAY_S:
            return f"it expired {now_s - self.expires_at:.0f} s ago, at {self.expires_at:.0f}"
        if self.expires_at > now_s + MAX_LIFETIME_S + LEEWAY_S:
            return f"its exp is {self.expires_at - now_s:.0f} s ahead; at most {MAX_LIFETIME_S} s are allowed"
        if self.not_before > now_s + LEEWAY_S:
            return f"its iat or nbf is {self.not_before - now_s:.0f} s ahead of the server's clock"
        return None


# -- revocations --------------------------------------------------------------------------------------------

# A subject is what a revocation is about. Names of channels have no spaces, so subjects of different kinds differ.


def of_jti(jti: str) -> str:
    return f"jti {jti}"


def of_user(user_id: str) -> str:
    return f"sub {user_id}"


def of_channel(channel: str, user_id: str) -> str:
    """A user's grants, for one channel."""
    return f"channel {channel} sub {user_id}"


def of_grant(channel: str, digest: str) -> str:
    """One grant, for one channel. `digest` in hex."""
    return f"channel {channel} grant {digest}"


class AppGrants:
    """What all sessions of an app share about grants: which are revoked, and the clock (Unix seconds) by which grants
    expire.

    A revocation has a time, in whole Unix seconds. Grants of a user that were issued later count, so someone who is let
    in again needs a new one. A grant without `iat` counts as older than any revocation.
    """

    __slots__ = ("_revoked", "clock")

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock = clock
        self._revoked: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._revoked)

    def revoke(self, subject: str, at_s: int) -> bool:
        """Returns whether that was news."""
        if self._revoked.get(subject, -1) >= at_s:
            return False
        self._revoked[subject] = at_s
        return True

    def revoked_at(self, subject: str) -> int | None:
        return self._revoked.get(subject)

    def is_revoked(self, grant: Grant, channel: str | None) -> bool:
        """`channel` None: for a sign-in."""
        revoked = self._revoked
        if not revoked:
            return False
        if grant.id is not None and of_jti(grant.id) in revoked:
            return True
        subjects = [of_user(grant.user_id)] if grant.user_id is not None else []
        if channel is not None:
            if of_grant(channel, grant.digest.hex()) in revoked:
                return True
            if grant.user_id is not None:
                subjects.append(of_channel(channel, grant.user_id))
        return any(int(grant.issued_at) <= revoked.get(subject, -1) for subject in subjects)

    def items(self) -> Iterator[tuple[str, int]]:
        return iter(self._revoked.items())

    def forget_old(self) -> None:
        """Removes revocations whose grants have all expired."""
        oldest = self.clock() - KEPT_S
        old = [subject for subject, at_s in self._revoked.items() if at_s < oldest]
        for subject in old:
            del self._revoked[subject]


class RevokedGrants:
    """The revocations of all apps, in the memory of one process. `clock` is Unix time in seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock = clock
        self._by_app: dict[str, AppGrants] = {}
        self._forget_from = MAX_REVOKED

    def of(self, app_id: str) -> AppGrants:
        grants = self._by_app.get(app_id)
        if grants is None:
            grants = self._by_app[app_id] = AppGrants(self.clock)
        return grants

    def __len__(self) -> int:
        return sum(map(len, self._by_app.values()))

    def __iter__(self) -> Iterator[tuple[str, str, int]]:
        """App id, subject, and when it was revoked."""
        for app_id, grants in self._by_app.items():
            for subject, at_s in grants.items():
                yield app_id, subject, at_s

    def forget_old(self) -> None:
        for grants in self._by_app.values():
            grants.forget_old()

    def put(self, app_id: str, subject: str, at_s: int) -> bool:
        """Returns whether that was news. Old revocations leave when the table has doubled."""
        if at_s < self.clock() - KEPT_S:
            return False
        grants = self.of(app_id)
        news = grants.revoke(subject, at_s)
        if news and len(grants) > self._forget_from:
            grants.forget_old()
            self._forget_from = max(MAX_REVOKED, 2 * len(grants))
        return news
