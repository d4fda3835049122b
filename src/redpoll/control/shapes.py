"""What the API's answers hold: the shapes that the handlers fill and that the OpenAPI document shows.

One definition for both, so that the document can't promise what no handler says. What callers send is
redpoll.protocol.messages'.
"""

from __future__ import annotations

import msgspec
from msgspec import UNSET, UnsetType

__all__ = [
    "Attributes",
    "AuthAnswer",
    "BatchAnswer",
    "CachedEvent",
    "ChannelAnswer",
    "ChannelsAnswer",
    "Empty",
    "TriggerAnswer",
    "User",
    "UsersAnswer",
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


class AuthAnswer(msgspec.Struct, gc=False, omit_defaults=True):
    """`auth` is `KEY:HEX`. `channel_data` comes back on presence channels, `shared_secret` (base64) is there on
    encrypted ones where the server has a master key."""

    auth: str
    channel_data: str | UnsetType = UNSET
    shared_secret: str | UnsetType = UNSET
