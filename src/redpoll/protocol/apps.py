"""An app as every process sees it: its keys, switches and limits, and the table of those an operator may change.

The record store makes these, the directory carries them to the workers, sessions obey them.
Nothing here knows where a record is kept.
"""

import re
from typing import Literal, TypeAlias

import msgspec

__all__ = ["DAILY_LIMITS", "SETTINGS", "App", "Key", "Setting", "Value", "parse_setting"]

# Messages a UTC day by plan (spec section 8): one per published channel and per client event.
DAILY_LIMITS: dict[str, int | None] = {"free": 200_000, "starter": 1_000_000, "pro": None}


class Key(msgspec.Struct, frozen=True, kw_only=True):
    """A key and its secret, both lowercase hex. A disabled key opens nothing new (decisions.md)."""

    key: str
    secret: str
    enabled: bool = True


class App(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One app's record. Sizes are bytes, lengths are characters, counts are counts; spec section 8.

    `id` is decimal digits: Pusher's Python and Go libraries accept no other.
    `keys` is oldest first; the oldest enabled key is the one we sign with.
    What each of the others means stands in `SETTINGS`.
    """

    id: str
    name: str
    keys: tuple[Key, ...]
    enabled: bool = True
    client_events: bool = True
    subscription_count: bool = False
    watchlist: bool = False
    user_authentication_timeout_s: float = 0.0
    allowed_origins: tuple[str, ...] = ()
    max_connections: int = 0
    plan: Literal["free", "starter", "pro"] = "pro"
    cache_ttl_s: int = 1_800
    idempotency: bool = False
    tls_required: bool = False
    max_event_name_chars: int = 200
    max_channels: int = 100
    max_data_bytes: int = 10_240
    max_batch: int = 10
    max_presence_members: int = 100
    max_user_info_bytes: int = 1_024

    @property
    def daily_limit(self) -> int | None:
        """Messages a UTC day, None for no limit."""
        return DAILY_LIMITS[self.plan]

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


# -- what an operator may change ----------------------------------------------------------------------------

Value: TypeAlias = bool | int | float | str | tuple[str, ...]


class Setting(msgspec.Struct, frozen=True):
    """One changeable field of `App`. `least` and `most` bound a `count` or `seconds`, both included;
    `choices` are those of a `choice`; `hosts` is a comma list. `unit` is "" where the name says it all."""

    name: str
    type: Literal["switch", "count", "seconds", "choice", "hosts"]
    help: str
    unit: str = ""
    least: int = 0
    most: int = 0
    choices: tuple[str, ...] = ()

    @property
    def default(self) -> Value:
        return _DEFAULTS[self.name]


_TABLE = (
    Setting("enabled", "switch", "Off: connections are closed with 4003, HTTP calls are answered with 403."),
    Setting("client_events", "switch", "Whether clients may send events of their own, named `client-…`."),
    Setting(
        "subscription_count",
        "switch",
        "Tell subscribers how many they are, on all channels but presence channels. HTTP tells it in any case.",
    ),
    Setting("watchlist", "switch", "Tell signed-in users which users of their watchlist are online."),
    Setting(
        "user_authentication_timeout_s",
        "seconds",
        "Close connections (4009) that by then have neither signed in nor joined a private or presence channel. "
        "0: never.",
        "s",
        most=3_600,
    ),
    Setting(
        "allowed_origins",
        "hosts",
        "Hosts whose pages may connect (else 4009): `host` or `*.host`, with a port where it isn't the scheme's own. "
        "Empty: all. Clients that send no Origin always may.",
    ),
    Setting(
        "max_connections", "count", "Connections at a time, over all workers (else 4004). 0: any.", most=100_000_000
    ),
    Setting(
        "plan",
        "choice",
        "Messages a UTC day: free 200,000, starter 1,000,000, pro any number.",
        choices=tuple(DAILY_LIMITS),
    ),
    Setting("cache_ttl_s", "count", "How long a cache channel keeps its last event.", "s", 1, 604_800),
    Setting(
        "idempotency",
        "switch",
        "A trigger that repeats a correlation_id within 120 s gets the first one's answer and publishes nothing.",
    ),
    Setting("tls_required", "switch", "Refuse connections that don't come by TLS (4000)."),
    Setting("max_event_name_chars", "count", "Longest name of an event.", "characters", 1, 1_000),
    Setting("max_channels", "count", "Channels of one trigger.", "", 1, 1_000),
    Setting("max_data_bytes", "count", "Most data of an event.", "bytes", 1, 262_144),
    Setting("max_batch", "count", "Events of one batch.", "", 1, 1_000),
    Setting("max_presence_members", "count", "Users of one presence channel.", "", 1, 10_000),
    Setting("max_user_info_bytes", "count", "Most user_info of a member of a presence channel.", "bytes", 2, 16_384),
)
SETTINGS: dict[str, Setting] = {setting.name: setting for setting in _TABLE}

_DEFAULTS: dict[str, Value] = dict(
    zip(App.__struct_fields__[-len(App.__struct_defaults__) :], App.__struct_defaults__, strict=True)
)

_SWITCH = {"true": True, "1": True, "false": False, "0": False}
# A record has 16 KiB in the directory, which every worker reads whole (cluster.md 7).
_MOST_HOSTS = 50
_COUNT = re.compile(r"-?[0-9]{1,15}").fullmatch
_SECONDS = re.compile(r"-?[0-9]{1,15}(?:\.[0-9]{1,9})?").fullmatch
_HOST = re.compile(r"(?:(?:\*\.)?[a-z0-9_-]+(?:\.[a-z0-9_-]+)*|\[[0-9a-f:.]+\])(?::([0-9]{1,5}))?").fullmatch
_MAX_HOST_CHARS = 253 + len("*.:65535")


def parse_setting(name: str, text: str) -> Value:
    """What `text` means as the value of `App`'s field `name`. Raises ValueError with a sentence for the operator."""
    setting = SETTINGS.get(name)
    if setting is None:
        raise ValueError(f"there is no setting {name!r}; an app has {', '.join(SETTINGS)}")
    text = text.strip()
    if setting.type == "switch":
        if text.lower() not in _SWITCH:
            raise ValueError(f"{name} must be true or false, not {text!r}")
        return _SWITCH[text.lower()]
    if setting.type == "choice":
        if text not in setting.choices:
            raise ValueError(f"{name} must be one of {', '.join(setting.choices)}, not {text!r}")
        return text
    if setting.type == "hosts":
        return _hosts(name, text)
    return _number(setting, text)


def _number(setting: Setting, text: str) -> int | float:
    unit = f" {setting.unit}" if setting.unit else ""
    whole = setting.type == "count"
    if (_COUNT if whole else _SECONDS)(text) is None:
        kind = "a whole number" if whole else "a number"
        raise ValueError(f"{setting.name} must be {kind}{unit and ' of' + unit}, not {text!r}")
    value = int(text) if whole else float(text)
    if not setting.least <= value <= setting.most:
        raise ValueError(f"{setting.name} must be between {setting.least} and {setting.most}{unit}, not {text}")
    return value


def _hosts(name: str, text: str) -> tuple[str, ...]:
    """Browsers write origins in lower case, so entries are kept in it."""
    entries = tuple(dict.fromkeys(part.strip().lower() for part in text.split(",") if part.strip()))
    for entry in entries:
        if "/" in entry:
            raise ValueError(f"{name}: write the host alone, without scheme and path, not {entry!r}")
        if entry == "*":
            raise ValueError(f"{name}: leave it empty to allow all, '*' is no host")
        match = _HOST(entry) if len(entry) <= _MAX_HOST_CHARS else None
        if match is None or not 0 < int(match[1] or 1) < 65_536:
            raise ValueError(f"{name}: {entry!r} is neither 'host' nor '*.host', with ':port' if need be")
    if len(entries) > _MOST_HOSTS:
        raise ValueError(f"{name}: {len(entries)} entries; at most {_MOST_HOSTS} are allowed")
    return entries
