"""What a session wants done, as values: the worker carries them out in order (worker/hub.py).

Frames that only the worker can compose (a success needs the roster, a page of history Redis) are effects without
bytes.
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
    """Frame this JSON and send it, behind what is owed."""

    payload: bytes


class SendUrgent(msgspec.Struct, frozen=True, gc=False):
    """The same, ahead of frames not begun: a pong that waits 30 s costs a reconnect (protocol.md 3)."""

    payload: bytes


class Join(msgspec.Struct, frozen=True, gc=False):
    """Ask the cluster for this channel; `joined` or `refused` is called with the answer. `member` is there on
    presence channels. `rewind`: what it wants to be told of the past; `recovers`: it is told epochs and offsets."""

    channel: str
    member: Member | None
    rewind: Rewind | None = None
    recovers: bool = False


class Acknowledge(msgspec.Struct, frozen=True, gc=False):
    """Say again that the subscription succeeded, to one who is in the channel."""

    channel: str


class Leave(msgspec.Struct, frozen=True, gc=False):
    """Out of the channel, or its pending Join is void. `user_id` on presence channels."""

    channel: str
    user_id: str | None


class Publish(msgspec.Struct, frozen=True, gc=False):
    """A client event, valid, for everybody in the channel but its sender. `user_id` on presence channels."""

    channel: str
    event: str
    data: str
    user_id: str | None


class AskHistory(msgspec.Struct, frozen=True, gc=False):
    """Answer on the channel with a page of its history, oldest first: the newest `limit`, the newest `limit` before
    a place, or the oldest `limit` behind one. `history_refused` is called where there is none to give."""

    channel: str
    limit: int
    before: Position | None
    since: Position | None


class SignedIn(msgspec.Struct, frozen=True, gc=False):
    """This connection is the user's from now on. Comes again when the same user signs in again, with the
    watchlist that replaces the one before: at most 100 distinct ids, told whether or not the app has watchlists."""

    user_id: str
    watchlist: tuple[str, ...]


class Close(msgspec.Struct, frozen=True, gc=False):
    """An error frame with these, then a close frame with the same."""

    code: int
    message: str


Effect: TypeAlias = Send | SendUrgent | Join | Acknowledge | Leave | Publish | AskHistory | SignedIn | Close
