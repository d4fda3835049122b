"""What the API's answers hold: the shapes that the handlers fill and that the OpenAPI document shows.

One definition for both, so that the document can't promise what no handler says. What callers send is
redpoll.protocol.messages'.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from redpoll.protocol.history import StoredMessage

__all__ = [
    "Attributes",
    "AuthAnswer",
    "BatchAnswer",
    "CachedEvent",
    "CallAnswer",
    "ChannelAnswer",
    "ChannelsAnswer",
    "Empty",
    "EventsAnswer",
    "TraceAnswer",
    "TriggerAnswer",
    "User",
    "UsersAnswer",
    "VerifyAnswer",
]


class Empty(msgspec.Struct, gc=False):
    """An empty object."""


class Attributes(msgspec.Struct, gc=False, omit_defaults=True):
    """What `info` asked for, as far as it applies to the channel."""

    subscription_count: int | UnsetType = UNSET
    user_count: int | UnsetType = UNSET


class TriggerAnswer(msgspec.Struct, gc=False, omit_defaults=True):
    """`channels` is there where `info` was given: one entry per distinct channel."""

    channels: dict[str, Attributes] | UnsetType = UNSET


class BatchAnswer(msgspec.Struct, gc=False, omit_defaults=True):
    """`batch` is there where any item has `info`: one entry per item, in their order."""

    batch: list[Attributes] | UnsetType = UNSET


class ChannelsAnswer(msgspec.Struct, gc=False):
    """The occupied channels, by name."""

    channels: dict[str, Attributes]


class CachedEvent(msgspec.Struct, gc=False):
    """The event that a cache channel tells to whoever joins; `ttl` is in seconds."""

    data: str
    ttl: int


class ChannelAnswer(msgspec.Struct, gc=False, omit_defaults=True):
    """`user_count` is there on presence channels; `cache` where it was asked for, null while nothing is cached."""

    occupied: bool
    subscription_count: int
    user_count: int | UnsetType = UNSET
    cache: CachedEvent | UnsetType | None = UNSET


class User(msgspec.Struct, gc=False):
    """A member of a presence channel."""

    id: str


class UsersAnswer(msgspec.Struct, gc=False):
    """The distinct users of a presence channel."""

    users: list[User]


class Message(StoredMessage, gc=False, frozen=True):
    """A kept message. `offset` rises from message to message, not one by one; `time_ms` is Unix time."""


class HistoryAnswer(msgspec.Struct, gc=False):
    """Messages of a channel. `epoch` is another one once the history was lost or cleared, and "" where there is none;
    `next` is the `cursor` of the messages that follow, null where none do."""

    epoch: str
    messages: list[Message]
    next: str | None


class ClearedAnswer(msgspec.Struct, gc=False):
    """The epoch that the channel's history has from now on; "" where there was nothing to clear."""

    epoch: str


class AuthAnswer(msgspec.Struct, gc=False, omit_defaults=True):
    """`auth` is `KEY:HEX`. `channel_data` comes back on presence channels, `shared_secret` (base64) is there on
    encrypted ones where the server has a master key."""

    auth: str
    channel_data: str | UnsetType = UNSET
    shared_secret: str | UnsetType = UNSET


class CallAnswer(msgspec.Struct, gc=False, kw_only=True):
    """A trigger call of the event log. `time_ms` is Unix time, `size` the bytes of its data; `caller` says with which
    key or token it came and from which address; `sampled`: it has spans."""

    trace_id: str
    correlation_id: str | None
    time_ms: int
    name: str
    channels: Sequence[str]
    size: int
    caller: str
    status: int
    sampled: bool


class EventsAnswer(msgspec.Struct, gc=False):
    """Calls, newest first; `next` is the `cursor` of the older ones, null where there are none."""

    events: list[CallAnswer]
    next: str | None


class TraceAnswer(CallAnswer, gc=False, kw_only=True):
    """A call with its spans in order of time, each `{time_ms, stage, …}`. Stages: `authenticated`, `accepted`,
    `received` (`worker`), `written` (`worker`, `channel`, `sockets`), `dropped` (`worker`, `channel`, `socket_id`),
    `webhook` (`delivery`, `endpoint`, `event`)."""

    spans: list[dict[str, Any]]


class VerifyAnswer(msgspec.Struct, gc=False, omit_defaults=True):
    """Whether a webhook's signature is good; if so, `endpoint_id` is the endpoint that it was made for."""

    valid: bool
    endpoint_id: str | UnsetType = UNSET
