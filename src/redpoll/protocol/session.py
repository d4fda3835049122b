"""One connection's state in the protocol: a message goes in, a list of effects comes out.

A session has no socket, no clock and no Redis. It decides what to do; the worker carries the effects out and reports
the outcome of each subscribe by `joined` or `refused`. Sections "Subscribing" to "History and recovery" of
protocol/README.md say what each message does.
"""

from collections.abc import MutableMapping

import msgspec

from redpoll.protocol import frames
from redpoll.protocol.access import ANONYMOUS, PENDING, REVOKED, Access, Identity, Refused, Subscription, is_grant
from redpoll.protocol.apps import App, CurrentApp
from redpoll.protocol.channels import (
    CONSOLE,
    MAX_NAME_CHARS,
    PRESENCE,
    PRIVATE,
    SERVER_TO_USER,
    USER,
    is_encrypted,
    is_reserved,
    kind_of,
    needs_auth,
    valid_name,
)
from redpoll.protocol.effects import (
    Acknowledge,
    AskHistory,
    Close,
    Effect,
    Join,
    Leave,
    Publish,
    Send,
    SendUrgent,
    SignedIn,
)
from redpoll.protocol.errors import ClientError, Code, fault_of
from redpoll.protocol.history import parse_page, parse_rewind
from redpoll.protocol.limits import Limits
from redpoll.protocol.presence import Member
from redpoll.protocol.session_limits import BAD_FRAME, HISTORY_REQUESTS_PER_S, REFUSED_EVENT, SessionLimits
from redpoll.protocol.users import MAX_WATCHED

__all__ = ["Session", "Subscription"]

# While Redis is away, further subscribes to one pending channel aren't answered any more.
_MAX_REPEATS = 100
_MAX_QUOTED_CHARS = 64
_REJECTED = "Client event rejected:"
_NAME_FAULT = f"invalid channel name: 1 to {MAX_NAME_CHARS} of letters, digits and _-=@,.; are allowed"

_SUBSCRIBED = Subscription(pending=False)
_PONG = SendUrgent(frames.PONG)


class Session:
    """The state of one connection. `sid` is the two numbers of its socket id.

    `channels` has pending subscriptions too; the worker reads it when the connection closes; it may pass in a mapping
    that is smaller than a dict. There may be a million sessions, so each attribute counts.
    """

    __slots__ = ("_current_app", "_identity", "_limits", "_rates", "_sid", "channels")

    def __init__(
        self,
        sid: tuple[int, int],
        app: CurrentApp,
        limits: Limits = Limits(),  # noqa: B008
        recovers: bool = False,
        channels: MutableMapping[str, Subscription] | None = None,
        decrypts_all: bool = False,
    ) -> None:
        # One integer takes half the memory of two, and a third of the text's.
        self._sid = sid[0] << 64 | sid[1]
        self._limits = limits
        self._rates: SessionLimits | None = None
        self._identity: Identity = ANONYMOUS[recovers][decrypts_all]
        self._current_app = app
        self.channels: MutableMapping[str, Subscription] = {} if channels is None else channels

    @property
    def socket_id(self) -> str:
        return f"{self._sid >> 64}.{self._sid & 0xFFFF_FFFF_FFFF_FFFF}"

    @property
    def app(self) -> App:
        """The present record of its app."""
        return self._current_app.record

    @property
    def user_id(self) -> str | None:
        """The user that this connection is signed in as, or None. Independent of presence channels."""
        return self._identity.user_id

    @property
    def authorised(self) -> bool:
        """Whether it has signed in, or was ever subscribed to a private or presence channel."""
        return self._identity.authorised

    @property
    def recovers(self) -> bool:
        """Whether it connected with `recover=1`, and so gets epochs and offsets on every channel."""
        return self._identity.recovers

    # -- messages -------------------------------------------------------------------------------------------

    def receive(self, message: bytes, now: float) -> list[Effect]:
        """Handles one complete text message, received at `now` (monotonic seconds). Never raises."""
        try:
            parsed = frames.decode_message(message)
            event = parsed.event
            if event == "pusher:subscribe":
                return self._subscribe(frames.data_of(parsed.data), now)
            if event == "pusher:ping":
                return [_PONG]
            if event.startswith("client-"):
                return self._client_event(event, parsed.channel, parsed.data, now)
            if event == "pusher:pong":
                return []
            if event == "pusher:unsubscribe":
                return self._unsubscribe(frames.data_of(parsed.data), now)
            if event == "pusher:signin":
                return self._sign_in(parsed.data)
            if event == "pusher:history":
                return self._ask_history(parsed.data, now)
        except (msgspec.DecodeError, UnicodeError, RecursionError) as fault:
            return self._bad_frame(f"Invalid message: {fault_of(fault, message)}", now)
        return self._bad_frame(f"Unsupported event received on socket: {event[:_MAX_QUOTED_CHARS]!r}", now)

    def receive_binary(self, now: float) -> list[Effect]:
        """Handles one binary message. The protocol has none, so its content doesn't matter."""
        return self._bad_frame("Invalid message: binary frames are not supported", now)

    # -- outcome of a Join ----------------------------------------------------------------------------------

    def joined(self, channel: str) -> list[Effect]:
        """The worker calls this when the Join of `channel` succeeded and its success frame was sent."""
        channels = self.channels
        subscription = channels.get(channel)
        if subscription is None or not subscription.pending:
            return []
        if not self._identity.authorised and needs_auth(channel):
            self._identity = self._identity.when_authorised()
        # Replaces the key by the caller's string, so that all sessions in a channel share one.
        del channels[channel]
        if subscription is PENDING:
            channels[channel] = _SUBSCRIBED
            return []
        if subscription.grant is not None:
            channels[channel] = self._access().settled(subscription)
        elif subscription.user_id is not None:
            channels[channel] = Subscription(False, subscription.user_id)
        else:
            channels[channel] = _SUBSCRIBED
        return [Acknowledge(channel)] * subscription.repeats

    def refused(self, channel: str, reason: str, now: float) -> list[Effect]:
        """The worker calls this when the Join of `channel` failed. `reason` is "members" if the presence channel is
        full, "channels" if the app has too many occupied channels, or "unavailable", after which the worker closes the
        connection. "address": the client's address subscribes too fast; a repeated subscribe is refused as well, and
        the subscription stays."""
        subscription = self.channels.get(channel)
        if subscription is None or not (subscription.pending or reason == "address"):
            return []
        if subscription.pending:
            del self.channels[channel]
            self._charge_subscribe(now)
        if reason == "members":
            fault = f"the presence channel is full: {self.app.max_presence_members} members are allowed"
        elif reason == "channels":
            fault = "the app has as many channels with subscribers as it may have"
        elif reason == "address":
            return self._refusal(channel, "LimitReached", "your address subscribes too fast; send it again later", 429)
        else:
            return []
        return self._refusal(channel, "LimitReached", fault, 413) * (subscription.repeats + 1)

    # -- subscribing ----------------------------------------------------------------------------------------

    def _subscribe(self, data: msgspec.Raw | str, now: float) -> list[Effect]:
        try:
            request = frames.decode_subscribe(data)
        except msgspec.ValidationError as invalid:
            return self._malformed_subscribe(data, str(invalid), now)
        channel = request.channel
        rates = self._rates
        if rates is not None and rates.subscribes is not None and rates.subscribes.is_empty(now):
            return self._too_many_subscribes(channel, now)
        kind = kind_of(channel)
        if kind is USER:
            user = channel[len(SERVER_TO_USER) :]
            if user != self.user_id:
                return self._refusal(channel, "AuthError", f"not signed in as user {user[:_MAX_QUOTED_CHARS]!r}", 401)
        elif not valid_name(channel) or is_reserved(channel):
            return self._refusal(channel, "InvalidChannel", _NAME_FAULT, 400)
        member, pending = None, PENDING
        if kind is PRIVATE or kind is PRESENCE:
            if not request.auth:
                return self._auth_required(channel)
            access = self._access() if "." in request.auth and is_grant(request.auth) and channel != CONSOLE else None
            try:
                member, pending = self._identity.open_channel(self._current_app, access, self.socket_id, kind, request)
            except Refused as refused:
                return self._refusal(channel, refused.type, refused.fault, refused.status)
        rewind = None
        if request.rewind is not None or request.since is not None:
            try:
                rewind = parse_rewind(request.rewind, request.since)
            except ValueError as error:
                return self._refusal(channel, "InvalidRewind", str(error), 400)
        existing = self.channels.get(channel)
        if existing is not None:
            return self._subscribe_again(channel, existing, member, now)
        if len(self.channels) >= self._limits.max_channels:
            fault = f"a connection may be subscribed to at most {self._limits.max_channels} channels"
            return self._refusal(channel, "LimitReached", fault, 413)
        self.channels[channel] = pending
        return [Join(channel, member, rewind, self._identity.recovers or request.recover is True)]

    def _subscribe_again(self, channel: str, existing: Subscription, member: Member | None, now: float) -> list[Effect]:
        """A repeated subscribe succeeds and changes nothing. As another user it is refused, and the first subscription
        stays."""
        if member is not None and member.user_id != existing.user_id:
            return [Send(frames.error(None, f"Existing subscription to channel {channel} as another user"))]
        self._charge_subscribe(now)
        if not existing.pending:
            return [Acknowledge(channel)]
        if existing.repeats < _MAX_REPEATS:
            self.channels[channel] = Subscription(True, existing.user_id, existing.repeats + 1, existing.grant)
        return []

    def _charge_subscribe(self, now: float) -> None:
        """Counts a subscribe that leaves no subscription: it was repeated, refused by Redis, or is taken back. Others
        need no count, because a connection has at most `max_channels`; so most connections never have a counter."""
        if (bucket := self._rate_limits().subscribes) is not None:
            bucket.charge(now)

    def _too_many_subscribes(self, channel: str, now: float) -> list[Effect]:
        """Answered, unless the client continues regardless; then the connection is closed."""
        self._limits.refusals.subscribes += 1
        if (closing := self._count_fault(REFUSED_EVENT, now)) is not None:
            return closing
        fault = f"more than {self._limits.subscribes_per_s:g} subscribes per second; send it again later"
        return self._refusal(channel[:MAX_NAME_CHARS], "LimitReached", fault, 429)

    def _auth_required(self, channel: str) -> list[Effect]:
        fault = f"channel {channel} needs a signature, and auth is missing"
        return [
            *self._on_channel(channel, frames.auth_required(channel, self.socket_id)),
            *self._refusal(channel, "AuthError", fault, 401, reason="auth_required"),
        ]

    def _malformed_subscribe(self, data: msgspec.Raw | str, fault: str, now: float) -> list[Effect]:
        """If the channel's name is readable, the refusal goes to the channel; otherwise this is a bad frame."""
        request = frames.decode_anything(data)
        channel = request.get("channel") if isinstance(request, dict) else None
        if not isinstance(channel, str):
            return self._bad_frame(f"Invalid subscribe: {fault}", now)
        if isinstance(request.get("auth"), str | None):
            return self._refusal(channel, "InvalidMember", "channel_data must be a string of JSON", 400)
        return self._refusal(channel, "AuthError", "auth must be a string", 401)

    def _unsubscribe(self, data: msgspec.Raw | str, now: float) -> list[Effect]:
        """Has no answer. Ignored if the connection isn't subscribed."""
        channel = frames.decode_unsubscribe(data).channel
        if (subscription := self.channels.pop(channel, None)) is None:
            return []
        self._charge_subscribe(now)
        return [Leave(channel, subscription.user_id)]

    def _refusal(self, channel: str, type: str, fault: str, status: int, **more: str) -> list[Effect]:
        """A refused subscribe, always answered: Echo listens for the frame on the channel, and libraries for Java and
        Swift see only the other one."""
        return [
            *self._on_channel(channel, frames.subscription_error(channel, type, fault, status, **more)),
            Send(frames.error(None, fault)),
        ]

    def _on_channel(self, channel: str, payload: bytes) -> list[Effect]:
        """A frame of the server's own on a channel that the client isn't in, or not any more. None on an encrypted
        channel for a library that would decrypt it (handshake.py)."""
        if self._identity.decrypts_all and is_encrypted(channel):
            return []
        return [Send(payload)]

    # -- taking back ----------------------------------------------------------------------------------------

    def _access(self) -> Access:
        access = self._identity.access
        if access is None:
            access = Access()
            self._identity = msgspec.structs.replace(self._identity, access=access)
        return access

    @property
    def sign_in_revoked(self) -> bool:
        """Whether a grant signed this connection in that is revoked now."""
        access = self._identity.access
        return access is not None and access.sign_in_revoked(self._current_app.grants)

    def revoked_channels(self) -> list[str]:
        """The channels that a grant opened which is revoked now. Call `remove` for each."""
        access = self._identity.access
        return [] if access is None else access.revoked_channels(self.channels, self._current_app.grants)

    def remove(self, channel: str, at_s: int | None = None) -> list[Effect]:
        """Ends the subscription, if there is one, and tells the client. `at_s` (Unix time): no signature, and no grant
        that was issued until then, opens the channel for this connection again."""
        subscription = self.channels.pop(channel, None)
        effects: list[Effect] = []
        if subscription is not None:
            effects = [Leave(channel, subscription.user_id), *self._refusal(channel, "AuthError", REVOKED, 401)]
        if at_s is not None:
            barred = self._access().barred
            barred[channel] = at_s
            if len(barred) > self._limits.max_channels:
                # On its next connection, what was signed for this one is worthless.
                effects += self._close(Code.OVER_CAPACITY, "removed from too many channels; connect again")
        return effects

    # -- signing in -----------------------------------------------------------------------------------------

    def _sign_in(self, data: msgspec.Raw) -> list[Effect]:
        """A connection that is signed in can't become another user (protocol/README.md "Users and watchlists")."""
        try:
            request = frames.decode_sign_in(frames.data_of(data))
            access = self._access() if is_grant(request.auth) else None
            user = self._identity.sign_in(self._current_app, access, self.socket_id, request)
        except (msgspec.DecodeError, UnicodeError, RecursionError) as malformed:
            return self._not_signed_in(f"Invalid signin: {fault_of(malformed)}")
        except ClientError as error:
            return self._not_signed_in(error.message)
        user_id, member = user.member.user_id, user.member
        self._identity = msgspec.structs.replace(self._identity, authorised=True, member=member)
        # What came beside a grant is signed by nobody.
        user_data = request.user_data if access is None else frames.user_data(member.user_id, member.user_info)
        effects: list[Effect] = [Send(frames.signin_success(user_data)), SignedIn(user_id, user.watchlist)]
        if user.unwatched and self.app.watchlist:
            fault = f"Watchlist too long: the first {MAX_WATCHED} users are watched, the other {user.unwatched} are not"
            effects.append(Send(frames.error(Code.WATCHLIST_TOO_LONG, fault)))
        return effects

    def _not_signed_in(self, fault: str) -> list[Effect]:
        """Always answered. Closes the connection in apps that require connections to authorise themselves."""
        if self.app.user_authentication_timeout_s > 0:
            return self._close(Code.UNAUTHORIZED, fault)
        return [Send(frames.error(Code.UNAUTHORIZED, fault))]

    # -- client events --------------------------------------------------------------------------------------

    def _client_event(self, event: str, channel: object, data: msgspec.Raw, now: float) -> list[Effect]:
        """Every refusal is a 4301 with a text that names the reason (protocol/README.md "Client events")."""
        app = self.app
        if not app.client_events:
            return self._reject(f"{_REJECTED} client events are not enabled for this app", now)
        if len(event) > app.max_event_name_chars:
            return self._reject(f"{_REJECTED} the event name is longer than {app.max_event_name_chars} characters", now)
        if not isinstance(channel, str):
            return self._reject(f"{_REJECTED} channel is missing or not a string", now)
        if kind_of(channel) not in (PRIVATE, PRESENCE) or channel == CONSOLE:
            return self._reject(f"{_REJECTED} only private and presence channels take client events", now)
        subscription = self.channels.get(channel)
        if subscription is None:
            name = channel[:MAX_NAME_CHARS]
            return self._reject(f"{_REJECTED} this connection is not subscribed to channel {name}", now)
        if subscription.pending:
            return self._reject(f"{_REJECTED} the subscription to channel {channel} is in progress", now)
        if subscription.grant is not None and not subscription.grant.client_events:
            return self._reject(f"{_REJECTED} the grant's may for channel {channel} lacks 'client_events'", now)
        text = frames.text_of(data)
        size = len(text) if text.isascii() else len(text.encode())
        if size > app.max_data_bytes:
            return self._reject(f"{_REJECTED} data has {size} bytes; at most {app.max_data_bytes} are allowed", now)
        bucket = self._rate_limits().client_events
        if bucket is not None and not bucket.take(now):
            rate = self._limits.client_events_per_s
            return self._reject(f"{_REJECTED} more than {rate:g} client events per second", now)
        return [Publish(channel, event, text, subscription.user_id)]

    # -- history --------------------------------------------------------------------------------------------

    def _ask_history(self, data: msgspec.Raw, now: float) -> list[Effect]:
        """Only for channels that the connection is subscribed to: who may receive new messages may read old ones."""
        request = frames.decode_history(frames.data_of(data))
        channel = request.channel
        subscription = self.channels.get(channel)
        if subscription is None:
            return self.history_refused(channel, "this connection is not subscribed to it", now)
        if subscription.pending:
            return self.history_refused(channel, "the subscription is in progress", now)
        try:
            limit, before, since = parse_page(request.limit, request.before, request.since)
        except ValueError as error:
            return self.history_refused(channel, str(error), now)
        if not self._rate_limits().history_requests.take(now):
            return self.history_refused(channel, f"more than {HISTORY_REQUESTS_PER_S:g} requests per second", now)
        return [AskHistory(channel, limit, before, since)]

    def history_refused(self, channel: str, fault: str, now: float) -> list[Effect]:
        """Answers a history request with `fault`. Always answered, because the client waits for it; too many close the
        connection."""
        if (closing := self._count_fault(REFUSED_EVENT, now)) is not None:
            return closing
        return [Send(frames.error(None, f"No history of channel {channel[:MAX_NAME_CHARS]}: {fault}"))]

    # -- faults ---------------------------------------------------------------------------------------------

    def rejected(self, fault: str, now: float) -> list[Effect]:
        """The worker calls this when a Publish failed: daily limit, or no Redis. Answered like any refused client
        event, so at most once a second."""
        return self._reject(f"{_REJECTED} {fault}", now)

    def _reject(self, message: str, now: float) -> list[Effect]:
        return self._send_error(Code.CLIENT_EVENT_REJECTED, message, REFUSED_EVENT, now)

    def _bad_frame(self, message: str, now: float) -> list[Effect]:
        return self._send_error(None, message, BAD_FRAME, now)

    def _send_error(self, code: int | None, message: str, weight: int, now: float) -> list[Effect]:
        """Sends at most one error frame per second; closes the connection after too many faults."""
        if (closing := self._count_fault(weight, now)) is not None:
            return closing
        if not self._rate_limits().error_frames.take(now):
            return []
        return [Send(frames.error(code, message))]

    def _count_fault(self, weight: int, now: float) -> list[Effect] | None:
        """None if the fault may be answered. Otherwise the effects to use instead: a close, or none after it."""
        rates = self._rate_limits()
        if rates.closing:
            return []
        if rates.faults.add(weight, now):
            return self._close(Code.OVER_CAPACITY, "Too many invalid messages")
        return None

    def _close(self, code: Code, message: str) -> list[Effect]:
        rates = self._rate_limits()
        if rates.closing:
            return []
        rates.closing = True
        return [Close(int(code), message)]

    def _rate_limits(self) -> SessionLimits:
        if self._rates is None:
            self._rates = SessionLimits(self._limits)
        return self._rates
