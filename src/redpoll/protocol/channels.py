"""Channel names and what follows from them: kind, caching, encryption (protocol/README.md "Channel names")."""

import re
from enum import Enum
from typing import Final

__all__ = [
    "CACHE_PREFIXES",
    "CONSOLE",
    "ENCRYPTED_PREFIX",
    "MAX_NAME_CHARS",
    "NAME_CHARS",
    "OWN_PREFIX",
    "PRESENCE",
    "PRIVATE",
    "PUBLIC",
    "SERVER_TO_USER",
    "USER",
    "Kind",
    "is_cache",
    "is_encrypted",
    "is_reserved",
    "kind_of",
    "needs_auth",
    "valid_name",
]

# Pusher documents 164, but every server library lets 200 pass.
MAX_NAME_CHARS = 200
NAME_CHARS = "-_=@,.;0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
SERVER_TO_USER = "#server-to-user-"
# Reserved for the server. Its only channel is the console, which shows the dashboard every event of an app.
OWN_PREFIX = "private-redpoll."
CONSOLE = OWN_PREFIX + "console"

_NAME = re.compile(rf"[{re.escape(NAME_CHARS)}]{{1,{MAX_NAME_CHARS}}}").fullmatch
ENCRYPTED_PREFIX = "private-encrypted-"
# The beginnings of names that are neither public nor private.
_OTHERS = ("presence-", SERVER_TO_USER)
CACHE_PREFIXES = ("cache-", "private-cache-", "presence-cache-", "private-encrypted-cache-")


class Kind(Enum):
    """What a subscribe must prove. Caching and encryption are independent of it: another server that put both into
    one enumeration accepted `private-cache-…` without a signature."""

    PUBLIC = "public"
    PRIVATE = "private"
    PRESENCE = "presence"
    USER = "user"


# Sessions use these names, because CPython 3.11 takes five times as long for `Kind.PRIVATE`.
PUBLIC: Final = Kind.PUBLIC
PRIVATE: Final = Kind.PRIVATE
PRESENCE: Final = Kind.PRESENCE
USER: Final = Kind.USER


def kind_of(channel: str) -> Kind:
    """By anchored prefix: `my-private-x` is public, and so is `private` without the dash."""
    if channel.startswith("private-"):
        return PRIVATE
    if not channel.startswith(_OTHERS):
        return PUBLIC
    return PRESENCE if channel.startswith("presence-") else USER


def needs_auth(channel: str) -> bool:
    """Whether a subscribe must be signed. `cache-` and `encrypted-` never change it."""
    return channel.startswith(("private-", "presence-"))


def is_cache(channel: str) -> bool:
    """Whether the last published event is stored and sent to new subscribers."""
    return channel.startswith(CACHE_PREFIXES)


def is_encrypted(channel: str) -> bool:
    """Whether `data` is ciphertext that only publishers and subscribers can read. The channel is private as well."""
    return channel.startswith(ENCRYPTED_PREFIX)


def valid_name(channel: str) -> bool:
    """Whether a channel may have this name. `#…` is reserved for user channels."""
    return _NAME(channel) is not None


def is_reserved(channel: str) -> bool:
    """Whether the name is reserved for the server, but isn't its console."""
    return channel.startswith(OWN_PREFIX) and channel != CONSOLE
