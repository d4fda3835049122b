"""Effects: what a session wants done, as values. The worker carries them out in order (worker/hub/hub.py).

An effect without bytes stands for a frame that only the worker can compose: a success frame needs the member list,
a page of history needs Redis.
"""

from typing import TypeAlias

import msgspec

from redpoll.protocol.history import Position, Rewind
from redpoll.protocol.presence import Member

__all__ = [
    "Acknowledge",
    "AskHistory",
    "Close",
    "Effect",
    "Join",
    "Leave",
    "Publish",
    "Send",
    "SendUrgent",
    "SignedIn",
]


class Send(msgspec.Struct, frozen=True, gc=False):
    """Send this JSON as a text frame, after the frames that are already queued."""

    payload: bytes


class SendUrgent(msgspec.Struct, frozen=True, gc=False):
    """Send this JSON before queued frames that haven't begun: a client whose pong takes 30 s reconnects."""

    payload: bytes


class Join(msgspec.Struct, frozen=True, gc=False):
    """Join this channel; the worker then calls `Session.joined` or `refused`. `member` is set on presence channels.
    `rewind`: which past messages the client asked for; `recovers`: it wants epochs and offsets."""

    channel: str
    member: Member | None
    rewind: Rewind | None = None
    recovers: bool = False


class Acknowledge(msgspec.Struct, frozen=True, gc=False):
    """Send the success frame again: the connection subscribed a second time."""

    channel: str


class Leave(msgspec.Struct, frozen=True, gc=False):
    """Leave the channel, or cancel its pending Join. `user_id` is set on presence channels."""

    channel: str
    user_id: str | None


class Publish(msgspec.Struct, frozen=True, gc=False):
    """Publish a valid client event to all other subscribers of the channel. `user_id` is set on presence channels."""

    channel: str
    event: str
    data: str
    user_id: str | None


class AskHistory(msgspec.Struct, frozen=True, gc=False):
    """Send a page of the channel's history, oldest first: the newest `limit` messages, the newest `limit` before a
    position, or the oldest `limit` after one. If that fails, the worker calls `Session.history_refused`."""

    channel: str
    limit: int
    before: Position | None
    since: Position | None


class SignedIn(msgspec.Struct, frozen=True, gc=False):
    """The connection is signed in as this user. Repeated when the same user signs in again; the watchlist, at most
    100 distinct ids, then replaces the previous one. Set even if the app's `watchlist` is off."""

    user_id: str
    watchlist: tuple[str, ...]


class Close(msgspec.Struct, frozen=True, gc=False):
    """Send `pusher:error` with this code and message, then close with the same."""

    code: int
    message: str


Effect: TypeAlias = Send | SendUrgent | Join | Acknowledge | Leave | Publish | AskHistory | SignedIn | Close
