"""An app as every process sees it: its keys, switches and limits.

The record store makes these, the directory carries them to the workers, sessions obey them.
Nothing here knows where a record is kept.
"""

import msgspec

__all__ = ["App", "Key"]


class Key(msgspec.Struct, frozen=True, kw_only=True):
    """A key and its secret, both lowercase hex. A disabled key opens nothing new (decisions.md)."""

    key: str
    secret: str
    enabled: bool = True


class App(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One app's record. Sizes are bytes, lengths are characters, counts are counts; spec section 8.

    `id` is decimal digits: Pusher's Python and Go libraries accept no other.
    `keys` is oldest first; the oldest enabled key is the one we sign with.
    `allowed_origins` holds `host` or `*.host`, with a port where it isn't the scheme's own; empty allows all.
    """

    id: str
    name: str
    keys: tuple[Key, ...]
    enabled: bool = True
    client_events: bool = True
    allowed_origins: tuple[str, ...] = ()
    max_event_name_chars: int = 200
    max_channels: int = 100
    max_data_bytes: int = 10_240
    max_batch: int = 10
    max_presence_members: int = 100
    max_user_info_bytes: int = 1_024

    def secret_of(self, key: str) -> str | None:
        """The secret that goes with `key`, or None where the app has no such enabled key."""
        for each in self.keys:
            if each.key == key and each.enabled:
                return each.secret
        return None

    def signing_key(self) -> Key | None:
        """The oldest enabled key, with which the server itself signs; None where all are disabled."""
        for each in self.keys:
            if each.enabled:
                return each
        return None
