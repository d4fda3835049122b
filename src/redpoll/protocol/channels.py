"""Names of channels and what follows from them, protocol.md 5.1 and 5.2. Knows no connection and no app."""

import re
from enum import Enum

__all__ = [
    "CONSOLE",
    "MAX_NAME_CHARS",
    "OWN_PREFIX",
    "SERVER_TO_USER",
    "Kind",
    "is_cache",
    "is_encrypted",
    "is_reserved",
    "kind_of",
    "needs_auth",
    "valid_name",
    "valid_target",
]

# The documented maximum is 164, but every server library lets 200 through (protocol.md 5.1).
MAX_NAME_CHARS = 200
SERVER_TO_USER = "#server-to-user-"
# Channels that the server itself fills, for nobody but its dashboard (decisions.md "Dashboard and trace").
OWN_PREFIX = "private-redpoll."
CONSOLE = OWN_PREFIX + "console"

_NAME = re.compile(rf"[-a-zA-Z0-9_=@,.;]{{1,{MAX_NAME_CHARS}}}").fullmatch
_CACHE = ("cache-", "private-cache-", "presence-cache-", "private-encrypted-cache-")


class Kind(Enum):
    """What one must show to be let in. Whether a channel caches or is encrypted is independent of it:
    one enum for both made a peer take `private-cache-*` without a signature (protocol.md 5.2)."""

    PUBLIC = "public"
    PRIVATE = "private"
    PRESENCE = "presence"
    USER = "user"


def kind_of(channel: str) -> Kind:
    """By anchored prefix: `my-private-x` is public, and so is `private` without the dash."""
    if channel.startswith("private-"):
        return Kind.PRIVATE
    if channel.startswith("presence-"):
        return Kind.PRESENCE
    if channel.startswith(SERVER_TO_USER):
        return Kind.USER
    return Kind.PUBLIC


def needs_auth(channel: str) -> bool:
    """Whether a subscribe must be signed. `cache-` and `encrypted-` never change it."""
    return channel.startswith(("private-", "presence-"))


def is_cache(channel: str) -> bool:
    """Whether the last event from the server is kept and told to whoever joins later (protocol.md 8)."""
    return channel.startswith(_CACHE)


def is_encrypted(channel: str) -> bool:
    """Whether `data` is ciphertext that only the ends can read; to us a private channel (protocol.md 11)."""
    return channel.startswith("private-encrypted-")


def valid_name(channel: str) -> bool:
    """Whether there may be a channel of this name; `#…` names are the protocol's own."""
    return _NAME(channel) is not None


def is_reserved(channel: str) -> bool:
    """Whether the name belongs to the server, and to no channel that it has."""
    return channel.startswith(OWN_PREFIX) and channel != CONSOLE


def valid_target(channel: str) -> bool:
    """Whether one may publish to this name: a channel's, or `#server-to-user-ID` with an ID of the same
    characters, which is all that the server libraries let through (protocol.md 5.1). Not to the server's own."""
    if channel.startswith(OWN_PREFIX):
        return False
    return _NAME(channel) is not None or (
        channel.startswith(SERVER_TO_USER)
        and len(channel) <= MAX_NAME_CHARS
        and _NAME(channel[len(SERVER_TO_USER) :]) is not None
    )
