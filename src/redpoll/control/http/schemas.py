"""The bodies of the API's answers. Handlers fill these types, and the OpenAPI document is made from them.

Because both use one definition, the document can't differ from the answers. The bodies of requests are defined in
protocol/messages.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from redpoll.protocol.history import StoredMessage

__all__ = [
    "AcknowledgedResponse",
    "Attributes",
    "AuthResponse",
    "BatchResponse",
    "CachedEvent",
    "ChannelResponse",
    "ChannelsResponse",
    "Empty",
    "EventsResponse",
    "LoggedCall",
    "PulledDelivery",
    "PulledResponse",
    "RevokedResponse",
    "TraceResponse",
    "TriggerResponse",
    "UnsubscribedResponse",
    "User",
    "UsersResponse",
    "VerifyResponse",
]


class Empty(msgspec.Struct, gc=False):
    """An empty object."""


class Attributes(msgspec.Struct, gc=False, omit_defaults=True):
    """The attributes that `info` requested, as far as they apply to the channel."""

    subscription_count: int | UnsetType = UNSET
    user_count: int | UnsetType = UNSET


class TriggerResponse(msgspec.Struct, gc=False, omit_defaults=True):
    """`channels` is present if `info` was given, with one entry per distinct channel."""

    channels: dict[str, Attributes] | UnsetType = UNSET


class BatchResponse(msgspec.Struct, gc=False, omit_defaults=True):
    """`batch` is present if any item has `info`, with one entry per item, in the same order."""

    batch: list[Attributes] | UnsetType = UNSET


class ChannelsResponse(msgspec.Struct, gc=False, omit_defaults=True):
    """The occupied channels, by name. `next` is present in a page: the `cursor` of the following one, null if there is
    none."""

    channels: dict[str, Attributes]
    next: str | UnsetType | None = UNSET


class UnsubscribedResponse(msgspec.Struct, gc=False):
    """How many subscriptions and readers over HTTP ended, on all nodes. 0: there was none."""

    unsubscribed: int


class RevokedResponse(msgspec.Struct, gc=False):
    """`revoked_at`: Unix seconds. Grants of the user with a later `iat` are accepted. `unsubscribed`: how many
    subscriptions and readers over HTTP ended."""

    revoked_at: int
    unsubscribed: int


class CachedEvent(msgspec.Struct, gc=False):
    """The event that new subscribers of a cache channel get. `ttl` is in seconds."""

    data: str
    ttl: int


class ChannelResponse(msgspec.Struct, gc=False, omit_defaults=True):
    """`user_count` is present on presence channels. `cache` is present if `info` requested it, null if nothing is
    cached."""

    occupied: bool
    subscription_count: int
    user_count: int | UnsetType = UNSET
    cache: CachedEvent | UnsetType | None = UNSET


class User(msgspec.Struct, gc=False):
    """A member of a presence channel."""

    id: str


class UsersResponse(msgspec.Struct, gc=False):
    """The distinct users of a presence channel."""

    users: list[User]


class Message(StoredMessage, gc=False, frozen=True):
    """A stored message. `offset` increases from message to message, with gaps. `time_ms` is Unix time."""


# The messages of a stream, as a catch-up answers them.
Messages = list[Message]


class HistoryResponse(msgspec.Struct, gc=False):
    """Messages of a channel. `epoch` changes when the history is lost or cleared, and is "" if there is none. `next` is
    the `cursor` of the following messages, null if there are none."""

    epoch: str
    messages: list[Message]
    next: str | None


class ClearedResponse(msgspec.Struct, gc=False):
    """The new epoch of the channel's history, "" if there was nothing to clear."""

    epoch: str


class AuthResponse(msgspec.Struct, gc=False, omit_defaults=True):
    """`auth` is `KEY:HEX`. `channel_data` is returned on presence channels, `shared_secret` (base64) on encrypted
    channels if the server has a master key."""

    auth: str
    channel_data: str | UnsetType = UNSET
    shared_secret: str | UnsetType = UNSET


class LoggedCall(msgspec.Struct, gc=False, kw_only=True):
    """A trigger call of the event log. `time_ms` and `time_us` are the Unix time of its start in ms and µs. `size` is
    the bytes of its data. `caller` names the key or token and the client's address. `sampled`: it has spans."""

    trace_id: str
    correlation_id: str | None
    time_ms: int
    name: str
    channels: Sequence[str]
    size: int
    caller: str
    status: int
    sampled: bool
    time_us: int


class EventsResponse(msgspec.Struct, gc=False):
    """Calls, newest first. `next` is the `cursor` of the older ones, null if there are none. `unanswered` names the
    nodes that didn't answer within a second, whose calls are missing; it is absent if all answered."""

    events: list[LoggedCall]
    next: str | None
    unanswered: list[str] | msgspec.UnsetType = msgspec.UNSET


class TraceResponse(LoggedCall, gc=False, kw_only=True):
    """A call with its spans in order of time, each `{time_ms, time_us, stage, …}`. Stages: `authenticated`, `accepted`,
    `received` (`worker`), `written` (`worker`, `channel`, `sockets`; if it was joined with others, `frame`, the name of
    the frame, and `parts`, their number), `replaced` by a newer event (`worker`, `channel`, `frame`), `dropped`
    (`worker`, `channel`, `socket_id`), `webhook` (`delivery`, `endpoint`, `event`). `unanswered` is as in the answer to
    a search."""

    spans: list[dict[str, Any]]
    unanswered: list[str] | msgspec.UnsetType = msgspec.UNSET


class UsageDay(msgspec.Struct, gc=False):
    """What the app used on a day (`YYYY-MM-DD`, UTC) on all nodes: the most connections at a time, events published
    over HTTP, events that clients triggered, and events sent to clients, counted per socket. Connections are counted
    every five seconds, so a shorter peak isn't seen. With several nodes `peak_connections` is the sum of the nodes'
    peaks, which may have been at different times."""

    day: str
    peak_connections: int
    published: int
    client_events: int
    sent: int


class UsageResponse(msgspec.Struct, gc=False):
    """Days on which the app was used, oldest first; today is counted up to the last seconds. `unanswered` names the
    nodes that didn't answer within a second, whose counts are missing; it is absent if all answered."""

    days: list[UsageDay]
    unanswered: list[str] | msgspec.UnsetType = msgspec.UNSET


class PulledDelivery(msgspec.Struct, gc=False, kw_only=True):
    """A delivery that was handed out. `headers` and `body` are what a webhook with a URL would have got, with the
    signature. `attempt` counts from 1."""

    id: str
    endpoint_id: str
    event: str
    channel: str
    attempt: int
    headers: dict[str, str]
    body: str


class PulledResponse(msgspec.Struct, gc=False):
    """Deliveries, the longest due first; none if none was due while the request waited."""

    deliveries: list[PulledDelivery]


class AcknowledgedResponse(msgspec.Struct, gc=False):
    """How many deliveries ended; those that had ended before don't count."""

    acknowledged: int


class VerifyResponse(msgspec.Struct, gc=False, omit_defaults=True):
    """Whether a webhook's signature is valid. If it is, `endpoint_id` is the endpoint that it was made for."""

    valid: bool
    endpoint_id: str | UnsetType = UNSET
