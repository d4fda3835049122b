"""What a connection has proved about itself, and what was taken from it (protocol/README.md "Grants").

The session asks here whether a signature or a grant opens a channel or signs a user in.
"""

import hmac
from collections.abc import Mapping
from typing import NamedTuple

import msgspec

from redpoll.protocol.apps import App, CurrentApp
from redpoll.protocol.auth import NO_SECRET, channel_fault, check_grant, grant_key_fault, signin_fault
from redpoll.protocol.channels import PRESENCE, Kind, kind_of
from redpoll.protocol.claims import MAX_GRANT_BYTES, digest_of
from redpoll.protocol.errors import ClientError, Code
from redpoll.protocol.frames import SignIn, Subscribe
from redpoll.protocol.grants import AppGrants, Grant
from redpoll.protocol.presence import Member, info_fault, parse_member
from redpoll.protocol.users import User, parse_user

__all__ = [
    "ANONYMOUS",
    "PENDING",
    "REVOKED",
    "Access",
    "Identity",
    "Refused",
    "Subscription",
    "is_grant",
    "reading_grant",
    "users_of",
]

# The text of a subscription that the app ended.
REVOKED = "access was revoked"
# Grants that a connection remembers. A page has one, and a second one while it changes.
_MAX_HELD = 4


class Subscription(msgspec.Struct, frozen=True, gc=False):
    """A channel that this connection is subscribed to, or (`pending`) has asked for. `user_id` is set on presence
    channels. `repeats` counts further subscribes that came while it was pending; each is acknowledged. `grant` opened
    the channel; None: a signature did, or it needs none."""

    pending: bool
    user_id: str | None = None
    repeats: int = 0
    grant: Grant | None = None


# Of all channels that no grant opens and that have no members.
PENDING = Subscription(pending=True)


class Refused(Exception):
    """Why a channel isn't opened, as `pusher:subscription_error` says it."""

    def __init__(self, fault: str, type: str = "AuthError", status: int = 401) -> None:
        super().__init__(fault)
        self.fault = fault
        self.type = type
        self.status = status


class _Held(NamedTuple):
    """A verified grant, the secret that it was verified with, and what is the same for all its private channels."""

    grant: Grant
    secret: str
    pending: Subscription
    subscribed: Subscription


class Access:
    """The grants that a connection has shown, so that forty channels cost one check, and the channels that it was
    removed from, with the Unix seconds. `signed_in` is the grant that signed it in. Most connections never need one."""

    __slots__ = ("barred", "held", "signed_in")

    def __init__(self) -> None:
        self.held: tuple[_Held, ...] = ()
        self.barred: dict[str, int] = {}
        self.signed_in: Grant | None = None

    def grant(self, app: App, grants: AppGrants, auth: str) -> _Held:
        """The grant in `auth`, checked now or before; revocations aren't looked at. Raises ClientError."""
        if not app.grants or len(auth) > MAX_GRANT_BYTES:
            # Refused with the reason.
            check_grant(app, auth, grants.clock())
        digest = digest_of(auth)
        for held in self.held:
            if hmac.compare_digest(held.grant.digest, digest) and _is_enabled(app, held):
                fault = held.grant.time_fault(grants.clock())
                if fault is not None:
                    raise ClientError(None, f"Invalid grant: {fault}")
                return held
        grant = check_grant(app, auth, grants.clock())
        held = _Held(
            grant,
            app.secret_of(grant.key) or NO_SECRET,
            Subscription(pending=True, grant=grant),
            Subscription(pending=False, grant=grant),
        )
        self.held = (*self.held[1 - _MAX_HELD :], held)
        return held

    def settled(self, pending: Subscription) -> Subscription:
        """What a pending subscription by a grant becomes."""
        if pending.user_id is None:
            for held in self.held:
                if held.grant is pending.grant:
                    return held.subscribed
        return Subscription(False, pending.user_id, 0, pending.grant)

    def opens(self, app: App, grants: AppGrants, user_id: str | None, channel: str, auth: str) -> _Held:
        """The grant in `auth`, which opens the channel for a connection that is signed in as `user_id`, None if it
        isn't. Raises ClientError."""
        held = self.grant(app, grants, auth)
        grant = held.grant
        fault = grant.channel_fault(channel)
        if fault is None and user_id is not None and grant.user_id != user_id:
            fault = f"it is for user {grant.user_id!r}, and this connection is signed in as {user_id!r}"
        if fault is not None:
            raise ClientError(None, f"Invalid grant: {fault}")
        barred_at = self.barred.get(channel)
        if grants.is_revoked(grant, channel) or (barred_at is not None and int(grant.issued_at) <= barred_at):
            raise ClientError(None, REVOKED)
        return held

    def sign_in_revoked(self, grants: AppGrants) -> bool:
        return self.signed_in is not None and grants.is_revoked(self.signed_in, None)

    def revoked_channels(self, channels: Mapping[str, Subscription], grants: AppGrants) -> list[str]:
        """Those of a connection's channels that a grant opened which is revoked now."""
        if not self.held:
            return []
        granted = ((name, one.grant) for name, one in channels.items() if one.grant is not None)
        return [name for name, grant in granted if grants.is_revoked(grant, name)]


def _is_enabled(app: App, held: _Held) -> bool:
    """Whether the key that signed the grant is still enabled, with the same secret."""
    secret = app.secret_of(held.grant.key)
    return secret is not None and hmac.compare_digest(secret.encode(), held.secret.encode())


def users_of(user_id: str | None, subscription: Subscription | None) -> set[str | None]:
    """Who a connection that is signed in as `user_id` is in a channel: that user, the member, the grant's user."""
    if subscription is None:
        return {user_id}
    grant = subscription.grant
    return {user_id, subscription.user_id, None if grant is None else grant.user_id}


class Identity(msgspec.Struct, frozen=True, gc=False):
    """What a connection has proved about itself, and what its URL said: whether it recovers, and whether its library
    decrypts all frames (handshake.py). Eight constants serve all connections that aren't signed in and have no grant,
    so that these facts cost one pointer."""

    authorised: bool
    recovers: bool
    decrypts_all: bool = False
    member: Member | None = None
    access: Access | None = None

    @property
    def user_id(self) -> str | None:
        return None if self.member is None else self.member.user_id

    def when_authorised(self) -> "Identity":
        if self.member is None and self.access is None:
            return _AUTHORISED[self.recovers][self.decrypts_all]
        return msgspec.structs.replace(self, authorised=True)

    def open_channel(
        self, current: CurrentApp, access: Access | None, socket_id: str, kind: Kind, request: Subscribe
    ) -> tuple[Member | None, Subscription]:
        """The member, on presence channels, and the pending subscription of a channel that `request.auth` opens.
        `access` is set if that is a grant. Raises Refused."""
        app, channel, data = current.record, request.channel, request.channel_data
        auth = request.auth or ""
        if access is not None:
            try:
                held = access.opens(app, current.grants, self.user_id, channel, auth)
                if kind is not PRESENCE:
                    return None, held.pending
                member = _granted_member(held.grant, data, app)
            except ClientError as error:
                raise Refused(error.message) from None
            return member, Subscription(True, member.user_id, 0, held.grant)
        fault = channel_fault(app, socket_id, channel, auth, data)
        if fault is None and self.access is not None and channel in self.access.barred:
            # A signature has no time: nobody knows whether it was made before the removal.
            fault = REVOKED
        if fault is not None:
            raise Refused(fault)
        if kind is not PRESENCE:
            return None, PENDING
        try:
            member = self._member(data, app)
        except ClientError as error:
            raise Refused(error.message, "InvalidMember", 400) from None
        return member, Subscription(True, member.user_id)

    def _member(self, channel_data: str | None, app: App) -> Member:
        """The member that a signed subscribe names; without `channel_data` the signed-in user."""
        if channel_data is not None:
            return parse_member(channel_data, app)
        if self.member is None:
            raise ClientError(None, "channel_data is missing, and this connection is not signed in")
        fault = info_fault(self.member.user_info, app)
        if fault is not None:
            raise ClientError(None, f"channel_data is missing, and the signed-in user's {fault}")
        return self.member

    def sign_in(self, current: CurrentApp, access: Access | None, socket_id: str, request: SignIn) -> User:
        """The user whom `request` signs in. `access` is set if `auth` is a grant. Raises ClientError."""
        app, grants = current.record, current.grants
        if access is None:
            fault = signin_fault(app, socket_id, request.auth, request.user_data)
            if fault is not None:
                raise ClientError(Code.UNAUTHORIZED, fault)
            user = parse_user(request.user_data)
        else:
            grant = access.grant(app, grants, request.auth).grant
            user = _granted_user(grant, grants, parse_user(request.user_data))
        if self.member is not None and self.member.user_id != user.member.user_id:
            raise ClientError(Code.UNAUTHORIZED, "Already signed in as another user")
        if access is not None:
            access.signed_in = grant
        elif self.access is not None:
            self.access.signed_in = None
        return user


# Each by whether it recovers, then by whether its library decrypts all frames.
ANONYMOUS = tuple(
    tuple(Identity(False, recovers, decrypts) for decrypts in (False, True)) for recovers in (False, True)
)
_AUTHORISED = tuple(
    tuple(Identity(True, recovers, decrypts) for decrypts in (False, True)) for recovers in (False, True)
)


def is_grant(auth: str) -> bool:
    """Whether `auth` is a JWT and no signature, which has hex digits only. Keys may have dots. Those that redpoll makes
    have none, so the session looks for one first, and most subscribes need no call."""
    return "." in auth.partition(":")[2]


def reading_grant(app: App | None, grants: AppGrants, channel: str, auth: str) -> Grant:
    """The grant in `auth` by which its bearer may read a channel over HTTP: what lets it subscribe. `app` None: there
    is none with that id, which is answered like an unknown key. Raises ClientError with the reason."""
    fault = grant_key_fault(app, auth)
    if app is None or fault is not None:
        raise ClientError(None, fault or "")
    grant = Access().opens(app, grants, None, channel, auth).grant
    if kind_of(channel) is PRESENCE:
        _granted_member(grant, None, app)
    return grant


def _granted_member(grant: Grant, channel_data: str | None, app: App) -> Member:
    """The member of a presence channel that a grant opens: its own user with its own info, whatever else
    `channel_data` says, because nobody has signed that. Raises ClientError."""
    if grant.user_id is None:
        raise ClientError(None, "Invalid grant: a presence channel needs a sub, which names the member")
    if channel_data is not None and parse_member(channel_data, app).user_id != grant.user_id:
        raise ClientError(None, f"Invalid grant: it is for user {grant.user_id!r}, and channel_data names another")
    fault = info_fault(grant.user_info, app)
    if fault is not None:
        raise ClientError(None, f"Invalid grant: info as {fault}")
    return Member(grant.user_id, grant.user_info)


def _granted_user(grant: Grant, grants: AppGrants, asked: User) -> User:
    if grant.user_id is None or asked.member.user_id != grant.user_id:
        raise ClientError(Code.UNAUTHORIZED, f"Invalid grant: it is for user {grant.user_id!r}, not for this user_data")
    if asked.watchlist:
        raise ClientError(
            Code.UNAUTHORIZED, "Invalid grant: it can't sign a watchlist; sign user_data with the key's secret for one"
        )
    if grants.is_revoked(grant, None):
        raise ClientError(Code.UNAUTHORIZED, REVOKED)
    return User(Member(grant.user_id, grant.user_info), (), 0)
