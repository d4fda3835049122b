"""One connection's side of the protocol: a message in, effects out. Protocol.md 1.3, 5, 6, 7, 10.

Pure: no socket, no clock, no Redis. It says what is to be done (effects.py, given out here too), the worker does it,
and tells it what became of a subscribe.
"""

import msgspec

from redpoll.protocol import frames, incoming
from redpoll.protocol.apps import App
from redpoll.protocol.auth import channel_fault, signin_fault
from redpoll.protocol.channels import (
    CONSOLE,
    MAX_NAME_CHARS,
    SERVER_TO_USER,
    Kind,
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
from redpoll.protocol.limits import Limits, TokenBucket, Window
from redpoll.protocol.presence import Member, info_fault, parse_member
from redpoll.protocol.users import MAX_WATCHED, parse_user

__all__ = [
    "Acknowledge",
    "AskHistory",
    "Close",
    "Effect",
    "Join",
    "Leave",
    "Membership",
    "Publish",
    "Send",
    "SendUrgent",
    "Session",
    "SignedIn",
]


class Membership(msgspec.Struct, frozen=True, gc=False):
    """A channel that this connection is in, or (`pending`) has asked for. `user_id` on presence channels.
    `repeats` counts the subscribes that came while it was pending; each is acknowledged."""

    pending: bool
    user_id: str | None = None
    repeats: int = 0


class _Standing(msgspec.Struct, frozen=True, gc=False):
    """What a connection has proved to be, and whether it recovers, which it says when it connects: here it costs
    nothing. Four constants serve all that have not signed in."""

    authorised: bool
    recovers: bool
    member: Member | None = None


class _Conduct:
    """What a connection has done that is limited. Made when it first does: most never do."""

    __slots__ = ("client_events", "closing", "complaints", "histories", "offences")

    def __init__(self, limits: Limits) -> None:
        rate = limits.client_events_per_s
        self.client_events = TokenBucket(rate, rate) if rate > 0 else None
        self.complaints = TokenBucket(_COMPLAINTS_PER_S, 1)
        self.histories = TokenBucket(_HISTORIES_PER_S, _MOST_HISTORIES)
        self.offences = Window(_MOST_OFFENCES, _OFFENCES_WITHIN_S)
        self.closing = False


# `pusher:error` for bad frames, unknown events and refused client events (decisions.md, Frames).
_COMPLAINTS_PER_S = 1.0
# 100 bad frames in 10 s end the connection (protocol.md 1.3). Refused client events, which an eager page
# produces at 60 a second without malice, weigh a tenth.
_OFFENCES_WITHIN_S = 10.0
_MOST_OFFENCES = 1000
_BAD_FRAME = 10
_REFUSED_CLIENT_EVENT = 1
# Each is a reading of up to 1,000 messages in Redis: enough to walk through what a channel keeps at most.
_HISTORIES_PER_S = 20.0
_MOST_HISTORIES = 100.0
# A client that repeats a subscribe more often than this while Redis is away isn't waiting for each answer.
_MOST_REPEATS = 100
_MAX_QUOTED_CHARS = 64
_REJECTED = "Client event rejected:"
_NAME_FAULT = f"invalid channel name: 1 to {MAX_NAME_CHARS} of letters, digits and _-=@,.; are allowed"

_PENDING = Membership(pending=True)
_ATTACHED = Membership(pending=False)
# By whether it recovers.
_STRANGER = (_Standing(authorised=False, recovers=False), _Standing(authorised=False, recovers=True))
_AUTHORISED = (_Standing(authorised=True, recovers=False), _Standing(authorised=True, recovers=True))
_PONG = SendUrgent(frames.PONG)


class Session:
    """What one connection has asked for and holds. `sid` are the two numbers of its socket id.

    `app` is replaced by the worker when the record changes. `channels` is pending and attached alike, read by
    the worker at close. Some 300 bytes with one public channel; each slot is paid a million times
    (design.md 7).
    """

    __slots__ = ("_conduct", "_limits", "_sid", "_standing", "app", "channels")

    def __init__(
        self,
        sid: tuple[int, int],
        app: App,
        limits: Limits = Limits(),  # noqa: B008
        recovers: bool = False,
    ) -> None:
        # One integer takes half of what two take, and a third of the text.
        self._sid = sid[0] << 64 | sid[1]
        self._limits = limits
        self._conduct: _Conduct | None = None
        self._standing = _STRANGER[recovers]
        self.app = app
        self.channels: dict[str, Membership] = {}

    @property
    def socket_id(self) -> str:
        return f"{self._sid >> 64}.{self._sid & 0xFFFF_FFFF_FFFF_FFFF}"

    @property
    def user_id(self) -> str | None:
        """Whom this connection has signed in as; None for nobody. Members of presence channels are no matter of it."""
        member = self._standing.member
        return None if member is None else member.user_id

    @property
    def authorised(self) -> bool:
        """Whether it has signed in, or ever was in a private or presence channel (protocol.md 10.4)."""
        return self._standing.authorised

    @property
    def recovers(self) -> bool:
        """Whether it connected with `recover=1`: it is told epochs and offsets on every channel."""
        return self._standing.recovers

    # -- messages -------------------------------------------------------------------------------------------

    def receive(self, message: bytes, now: float) -> list[Effect]:
        """One complete text message, at `now` (monotonic seconds). Never raises, whatever the bytes."""
        try:
            parsed = incoming.decode_message(message)
            event = parsed.event
            if event == "pusher:subscribe":
                return self._subscribe(incoming.data_of(parsed.data), now)
            if event == "pusher:ping":
                return [_PONG]
            if event.startswith("client-"):
                return self._client_event(event, parsed.channel, parsed.data, now)
            if event == "pusher:pong":
                return []
            if event == "pusher:unsubscribe":
                return self._unsubscribe(incoming.data_of(parsed.data))
            if event == "pusher:signin":
                return self._sign_in(parsed.data)
            if event == "pusher:history":
                return self._ask_history(parsed.data, now)
        except (msgspec.DecodeError, UnicodeError, RecursionError) as fault:
            return self._bad_frame(f"Invalid message: {fault_of(fault)}", now)
        return self._bad_frame(f"Unsupported event received on socket: {event[:_MAX_QUOTED_CHARS]!r}", now)

    def receive_binary(self, now: float) -> list[Effect]:
        """One binary message: not part of the protocol, so its bytes aren't asked for."""
        return self._bad_frame("Invalid message: binary frames are not supported", now)

    # -- what became of a Join ------------------------------------------------------------------------------

    def joined(self, channel: str) -> list[Effect]:
        """The pending Join of `channel` was accepted, its success frame is sent."""
        channels = self.channels
        held = channels.get(channel)
        if held is None or not held.pending:
            return []
        if not self._standing.authorised and needs_auth(channel):
            self._standing = _AUTHORISED[self._standing.recovers]
        # The caller's string goes in for ours: everybody in a channel keeps the same one.
        del channels[channel]
        if held is _PENDING:
            channels[channel] = _ATTACHED
            return []
        channels[channel] = Membership(False, held.user_id) if held.user_id is not None else _ATTACHED
        return [Acknowledge(channel)] * held.repeats

    def refused(self, channel: str, reason: str) -> list[Effect]:
        """The pending Join of `channel` was refused: "members", the presence channel is full; or
        "unavailable", for which there are no frames: the worker closes then."""
        held = self.channels.get(channel)
        if held is None or not held.pending:
            return []
        del self.channels[channel]
        if reason != "members":
            return []
        most = self.app.max_presence_members
        fault = f"the presence channel has its {most} members, no further user is admitted"
        return _refusal(channel, "LimitReached", fault, 413) * (held.repeats + 1)

    # -- subscribing ----------------------------------------------------------------------------------------

    def _subscribe(self, data: msgspec.Raw | str, now: float) -> list[Effect]:
        try:
            asked = incoming.decode_subscribe(data)
        except msgspec.ValidationError as invalid:
            return self._malformed_subscribe(data, str(invalid), now)
        channel = asked.channel
        kind = kind_of(channel)
        if kind is Kind.USER:
            user = channel[len(SERVER_TO_USER) :]
            if user != self.user_id:
                return _refusal(channel, "AuthError", f"not signed in as user {user[:_MAX_QUOTED_CHARS]!r}", 401)
        elif not valid_name(channel) or is_reserved(channel):
            return _refusal(channel, "InvalidChannel", _NAME_FAULT, 400)
        member = None
        if kind is Kind.PRIVATE or kind is Kind.PRESENCE:
            if not asked.auth:
                return self._auth_required(channel)
            fault = channel_fault(self.app, self.socket_id, channel, asked.auth, asked.channel_data)
            if fault is not None:
                return _refusal(channel, "AuthError", fault, 401)
            if kind is Kind.PRESENCE:
                try:
                    member = self._member(asked.channel_data)
                except ClientError as error:
                    return _refusal(channel, "InvalidMember", error.message, 400)
        rewind = None
        if asked.rewind is not None or asked.since is not None:
            try:
                rewind = parse_rewind(asked.rewind, asked.since)
            except ValueError as wrong:
                return _refusal(channel, "InvalidRewind", str(wrong), 400)
        held = self.channels.get(channel)
        if held is not None:
            return self._subscribe_again(channel, held, member)
        if len(self.channels) >= self._limits.max_channels:
            fault = f"{self._limits.max_channels} channels are the most that one connection may be in"
            return _refusal(channel, "LimitReached", fault, 413)
        self.channels[channel] = _PENDING if member is None else Membership(True, member.user_id)
        return [Join(channel, member, rewind, self._standing.recovers or asked.recover is True)]

    def _member(self, channel_data: str | None) -> Member:
        """Whom a signed subscribe brings: the member it names, else the user who has signed in (10.1)."""
        if channel_data is not None:
            return parse_member(channel_data, self.app)
        member = self._standing.member
        if member is None:
            raise ClientError(None, "channel_data is missing, and this connection is not signed in")
        fault = info_fault(member.user_info, self.app)
        if fault is not None:
            raise ClientError(None, f"channel_data is missing, and the signed-in user's {fault}")
        return member

    def _subscribe_again(self, channel: str, held: Membership, member: Member | None) -> list[Effect]:
        """Protocol.md 5.6: the same again succeeds again and changes nothing; another user is refused, and
        the membership stands (cluster.md 6)."""
        if member is not None and member.user_id != held.user_id:
            message = f"Existing subscription to channel {channel} as another user"
            return [Send(frames.error(None, message))]
        if not held.pending:
            return [Acknowledge(channel)]
        if held.repeats < _MOST_REPEATS:
            self.channels[channel] = Membership(True, held.user_id, held.repeats + 1)
        return []

    def _auth_required(self, channel: str) -> list[Effect]:
        """Three frames, always: the spec's (4.8), the one Echo hears, the one Java and Swift see."""
        fault = f"channel {channel} needs a signature, and auth is missing"
        return [
            Send(frames.auth_required(channel, self.socket_id)),
            Send(frames.subscription_error(channel, "AuthError", fault, 401, reason="auth_required")),
            Send(frames.error(None, fault)),
        ]

    def _malformed_subscribe(self, data: msgspec.Raw | str, fault: str, now: float) -> list[Effect]:
        """Where the channel can be read, its handlers hear what is wrong with the rest."""
        asked = incoming.decode_anything(data)
        channel = asked.get("channel") if isinstance(asked, dict) else None
        if not isinstance(channel, str):
            return self._bad_frame(f"Invalid subscribe: {fault}", now)
        if isinstance(asked.get("auth"), str | None):
            return _refusal(channel, "InvalidMember", "channel_data must be a string of JSON", 400)
        return _refusal(channel, "AuthError", "auth must be a string", 401)

    def _unsubscribe(self, data: msgspec.Raw | str) -> list[Effect]:
        """No answer, and nothing at all for a channel that one isn't in (5.6)."""
        channel = incoming.decode_unsubscribe(data).channel
        held = self.channels.pop(channel, None)
        return [] if held is None else [Leave(channel, held.user_id)]

    # -- signing in -----------------------------------------------------------------------------------------

    def _sign_in(self, data: msgspec.Raw) -> list[Effect]:
        """Protocol.md 10.1. Once a user, a connection is nobody else's."""
        try:
            asked = incoming.decode_sign_in(incoming.data_of(data))
            fault = signin_fault(self.app, self.socket_id, asked.auth, asked.user_data)
            if fault is not None:
                return self._not_signed_in(fault)
            user = parse_user(asked.user_data)
        except (msgspec.DecodeError, UnicodeError, RecursionError) as malformed:
            return self._not_signed_in(f"Invalid signin: {fault_of(malformed)}")
        except ClientError as error:
            return self._not_signed_in(error.message)
        user_id = user.member.user_id
        if self.user_id is not None and self.user_id != user_id:
            return self._not_signed_in("Already signed in as another user")
        self._standing = _Standing(True, self._standing.recovers, user.member)
        effects: list[Effect] = [Send(frames.signin_success(asked.user_data)), SignedIn(user_id, user.watchlist)]
        if user.unwatched and self.app.watchlist:
            fault = f"Watchlist too long: only its first {MAX_WATCHED} users are watched, {user.unwatched} are not"
            effects.append(Send(frames.error(Code.WATCHLIST_TOO_LONG, fault)))
        return effects

    def _not_signed_in(self, fault: str) -> list[Effect]:
        """In band, always answered; the end where an app wants connections that prove who they are (10.4)."""
        if self.app.user_authentication_timeout_s > 0:
            return self._close(Code.UNAUTHORIZED, fault)
        return [Send(frames.error(Code.UNAUTHORIZED, fault))]

    # -- client events --------------------------------------------------------------------------------------

    def _client_event(self, event: str, channel: object, data: msgspec.Raw, now: float) -> list[Effect]:
        """Protocol.md 7. Every refusal is a 4301 with a text of its own."""
        app = self.app
        if not app.client_events:
            return self._reject(f"{_REJECTED} client events are not enabled for this app", now)
        if len(event) > app.max_event_name_chars:
            return self._reject(f"{_REJECTED} the event name is longer than {app.max_event_name_chars} characters", now)
        if not isinstance(channel, str):
            return self._reject(f"{_REJECTED} channel is missing or not a string", now)
        if kind_of(channel) not in (Kind.PRIVATE, Kind.PRESENCE) or channel == CONSOLE:
            return self._reject(f"{_REJECTED} only private and presence channels take client events", now)
        held = self.channels.get(channel)
        if held is None:
            name = channel[:MAX_NAME_CHARS]
            return self._reject(f"{_REJECTED} this connection is not subscribed to channel {name}", now)
        if held.pending:
            return self._reject(f"{_REJECTED} the subscription to channel {channel} is in progress", now)
        text = incoming.text_of(data)
        size = len(text) if text.isascii() else len(text.encode())
        if size > app.max_data_bytes:
            return self._reject(f"{_REJECTED} data has {size} bytes; at most {app.max_data_bytes} are allowed", now)
        bucket = self._conducted().client_events
        if bucket is not None and not bucket.take(now):
            rate = self._limits.client_events_per_s
            return self._reject(f"{_REJECTED} more than {rate:g} client events a second", now)
        return [Publish(channel, event, text, held.user_id)]

    # -- history --------------------------------------------------------------------------------------------

    def _ask_history(self, data: msgspec.Raw, now: float) -> list[Effect]:
        """Only of a channel that one is in: who may hear it now may hear what was said (issue 5)."""
        asked = incoming.decode_history(incoming.data_of(data))
        channel = asked.channel
        held = self.channels.get(channel)
        if held is None or held.pending:
            what = "is not subscribed to it" if held is None else "waits for its subscription"
            return self.history_refused(channel, f"this connection {what}", now)
        try:
            limit, before, since = parse_page(asked.limit, asked.before, asked.since)
        except ValueError as wrong:
            return self.history_refused(channel, str(wrong), now)
        if not self._conducted().histories.take(now):
            return self.history_refused(channel, f"more than {_HISTORIES_PER_S:g} requests a second", now)
        return [AskHistory(channel, limit, before, since)]

    def history_refused(self, channel: str, fault: str, now: float) -> list[Effect]:
        """No page of the channel's history, for `fault`. Always told, since whoever asked waits for it; who goes on
        and on is closed."""
        ended = self._offended(_REFUSED_CLIENT_EVENT, now)
        if ended is not None:
            return ended
        return [Send(frames.error(None, f"No history of channel {channel[:MAX_NAME_CHARS]}: {fault}"))]

    # -- faults ---------------------------------------------------------------------------------------------

    def rejected(self, fault: str, now: float) -> list[Effect]:
        """A Publish that could not be carried out, for `fault`: the daily limit, Redis away. Told like any other
        refused client event, so at most once a second."""
        return self._reject(f"{_REJECTED} {fault}", now)

    def _reject(self, message: str, now: float) -> list[Effect]:
        return self._complain(Code.CLIENT_EVENT_REJECTED, message, _REFUSED_CLIENT_EVENT, now)

    def _bad_frame(self, message: str, now: float) -> list[Effect]:
        return self._complain(None, message, _BAD_FRAME, now)

    def _complain(self, code: int | None, message: str, weight: int, now: float) -> list[Effect]:
        """At most one such frame a second; the connection ends when it goes on and on."""
        ended = self._offended(weight, now)
        if ended is not None:
            return ended
        if not self._conducted().complaints.take(now):
            return []
        return [Send(frames.error(code, message))]

    def _offended(self, weight: int, now: float) -> list[Effect] | None:
        """What is done in the place of an answer where it was one too many; None: it may be answered."""
        conduct = self._conducted()
        if conduct.closing:
            return []
        if conduct.offences.add(weight, now):
            return self._close(Code.OVER_CAPACITY, "Too many invalid messages")
        return None

    def _close(self, code: Code, message: str) -> list[Effect]:
        conduct = self._conducted()
        if conduct.closing:
            return []
        conduct.closing = True
        return [Close(int(code), message)]

    def _conducted(self) -> _Conduct:
        conduct = self._conduct
        if conduct is None:
            conduct = self._conduct = _Conduct(self._limits)
        return conduct


def _refusal(channel: str, type: str, fault: str, status: int) -> list[Effect]:
    """A refused subscribe, always answered: once for the channel's handlers, once for libraries that hear
    only `pusher:error` (protocol.md 5.5)."""
    return [
        Send(frames.subscription_error(channel, type, fault, status)),
        Send(frames.error(None, fault)),
    ]
