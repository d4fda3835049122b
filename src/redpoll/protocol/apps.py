"""An app's record: its keys, settings, limits and history rules.

The record store creates records, the directory distributes them to the workers, and sessions follow them. `SETTINGS`
describes each setting that an operator may change; the command line, the dashboard and `parse_setting` use it.
"""

import re
from collections.abc import Iterable, Sequence
from typing import Literal, TypeAlias

import msgspec

from redpoll.protocol.channels import OWN_PREFIX, SERVER_TO_USER, is_encrypted, needs_auth, valid_name
from redpoll.protocol.grants import AppGrants
from redpoll.protocol.history import MAX_LIMIT, MAX_STORED_MESSAGES, MAX_STORED_S
from redpoll.protocol.joining import MAX_RATE, Pace, path_of

__all__ = [
    "DAILY_LIMITS",
    "MAX_HISTORY_RULES",
    "SETTINGS",
    "App",
    "CurrentApp",
    "HistoryRule",
    "Key",
    "Setting",
    "Value",
    "has_place",
    "history_fault",
    "parse_setting",
    "with_eras",
]

# Messages per UTC day: one per published channel and per client event (protocol/README.md "Limits").
DAILY_LIMITS: dict[str, int | None] = {"free": 200_000, "starter": 1_000_000, "pro": None}


class Key(msgspec.Struct, frozen=True, kw_only=True):
    """A key and its secret, both lowercase hex if redpoll made them. A disabled key admits no new connection and signs
    no request."""

    key: str
    secret: str
    enabled: bool = True


class HistoryRule(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What to store of one channel, or of all channels with a prefix. `history_fault` checks it.

    `id` is 6 hex digits. `name` is a channel's name, or with `prefix` the beginning of names ("": every channel).
    `keep` is messages per channel, stored for `seconds`; 0 makes the rule an exception to a wider one.
    New subscribers get the last `replay` messages, or those of the last `replay_seconds`.
    With `max_rate` each subscriber gets at most that many frames a second of a channel (`protocol/joining.py`): the
    `latest` event of each name, or those whose strings at the path `join` are joined, of one value at the path `by`.
    `era` is set by `with_eras`: histories of two eras have different epochs.
    """

    id: str
    name: str
    prefix: bool = False
    keep: int = 0
    seconds: int = 0
    replay: int = 0
    replay_seconds: int = 0
    client_events: bool = False
    max_rate: int | None = None
    latest: bool = False
    join: str = ""
    by: str = ""
    era: str = ""


class App(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One app's record. `SETTINGS` describes the fields that aren't described here.

    `id` is decimal digits if redpoll made it, because Pusher's Python library accepts no other. Ids that come from
    other servers have letters, digits, `-`, `_` and `.` (app_names.APP_ID_RULE); so have keys.
    `keys` is oldest first; the server itself signs with the oldest enabled key.
    `history` has at most one rule per name. `hooks` is derived from the app's enabled webhook endpoints, one letter
    per kind of event that any of them wants: o channel.occupied and .vacated, m member.added and .removed,
    c client_event, x cache.miss, s subscription.count.
    `console_key` signs subscriptions to the dashboard's console and nothing else. The console is in use until
    `console_until` (Unix seconds).
    Until `debug_until` (Unix seconds), all processes log what concerns the connection `debug_socket`, or with "" all of
    the app.
    `made` is a random word that an app gets when it is made and never changes, so another app with the same id has
    another one; "" if an earlier redpoll made or changed it.
    """

    id: str
    name: str
    keys: tuple[Key, ...]
    enabled: bool = True
    client_events: bool = True
    subscription_count: bool = False
    watchlist: bool = False
    grants: bool = False
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
    user_resume_s: int = 0
    max_cached_channels: int = 10_000
    max_history_channels: int = 10_000
    max_occupied_channels: int = 1_000_000
    history: tuple[HistoryRule, ...] = ()
    hooks: str = ""
    console_key: Key | None = None
    console_until: float = 0.0
    debug_until: float = 0.0
    debug_socket: str = ""
    made: str = ""

    @property
    def daily_limit(self) -> int | None:
        """Messages per UTC day; None for no limit."""
        return DAILY_LIMITS[self.plan]

    def secret_of(self, key: str) -> str | None:
        """The secret of `key`, or None if the app has no such enabled key."""
        for own in self.keys:
            if own.key == key and own.enabled:
                return own.secret
        return None

    def signing_key(self) -> Key | None:
        """The oldest enabled key, which the server itself signs with; None if all are disabled."""
        return next((key for key in self.keys if key.enabled), None)

    def has_place(self, channel: str, occupied: int) -> bool:
        """Whether `channel` may become occupied beside `occupied` others (max_occupied_channels)."""
        return has_place(channel, occupied, self.max_occupied_channels)

    def history_rule(self, channel: str) -> HistoryRule | None:
        """The rule for `channel`, or None if its messages aren't stored. Called for each published event."""
        rule = self.rule(channel)
        return rule if rule is not None and rule.keep else None

    def rule(self, channel: str) -> HistoryRule | None:
        """The rule for `channel`, which may store nothing. The channel's own rule wins, then the longest prefix."""
        if not self.history:
            return None
        best = None
        for rule in self.history:
            if not rule.prefix:
                if rule.name == channel:
                    best = rule
                    break
            elif channel.startswith(rule.name) and (best is None or len(rule.name) > len(best.name)):
                best = rule
        # Events for one user, and the console's, must not be in a history that others can read.
        return None if best is None or channel.startswith((SERVER_TO_USER, OWN_PREFIX)) else best

    def pace(self, channel: str) -> Pace | None:
        """How often the subscribers of `channel` get events; None: at once, each of them."""
        rule = self.rule(channel)
        if rule is None or rule.max_rate is None:
            return None
        join = path_of(rule.join) if rule.join else ()
        by = path_of(rule.by) if rule.by else ()
        return Pace(rule.max_rate, join, by, self.max_data_bytes, bool(join) and is_encrypted(channel))


def has_place(channel: str, occupied: int, limit: int) -> bool:
    """Whether a channel may become occupied beside `occupied` others. Public channels are refused from half of the
    limit on; 0 is no limit."""
    return not limit or occupied < (limit if needs_auth(channel) else -(-limit // 2))


# -- history rules ------------------------------------------------------------------------------------------

# Every publish walks the rules, and a record may have 16 KiB in the directory.
MAX_HISTORY_RULES = 32
_RULE_ID = re.compile(r"[0-9a-f]{6}").fullmatch


class CurrentApp:
    """The present record of one app, and what its sessions know of grants. The sessions of the app share it, so a
    change reaches all at once. Without `grants` the clock stands at 0, and no grant counts."""

    __slots__ = ("grants", "record")

    def __init__(self, record: App, grants: AppGrants | None = None) -> None:
        self.record = record
        self.grants = AppGrants(lambda: 0.0) if grants is None else grants


def history_fault(rule: HistoryRule) -> str | None:
    """A sentence for the operator if the rule contradicts itself or exceeds a limit; else None."""
    if _RULE_ID(rule.id) is None:
        return f"id must be 6 hex digits, not {rule.id!r}"
    if not valid_name(rule.name) and (rule.name or not rule.prefix):
        return f"{rule.name!r} can't be the {'beginning of a channel name' if rule.prefix else 'name of a channel'}"
    if rule.name.startswith(OWN_PREFIX):
        return f"channels that begin with {OWN_PREFIX!r} are reserved for the server and have no history"
    rate_fault = _rate_fault(rule)
    if rate_fault is not None:
        return rate_fault
    if not 0 <= rule.keep <= MAX_STORED_MESSAGES:
        return f"keep must be between 0 and {MAX_STORED_MESSAGES} messages, not {rule.keep}"
    if rule.keep == 0:
        if rule.seconds or rule.replay or rule.replay_seconds or rule.client_events:
            return "with keep 0 nothing is stored: leave out seconds, replay, replay_seconds and client_events"
        return None
    if not 1 <= rule.seconds <= MAX_STORED_S:
        return f"seconds must be between 1 and {MAX_STORED_S}, not {rule.seconds}"
    if rule.replay and rule.replay_seconds:
        return "give either replay or replay_seconds, not both"
    max_replay = min(rule.keep, MAX_LIMIT)
    if not 0 <= rule.replay <= max_replay:
        return f"replay must be between 0 and {max_replay} messages, not {rule.replay}"
    if not 0 <= rule.replay_seconds <= rule.seconds:
        return f"replay_seconds must be between 0 and the rule's {rule.seconds} seconds, not {rule.replay_seconds}"
    return None


def _rate_fault(rule: HistoryRule) -> str | None:
    if rule.max_rate is None:
        if rule.latest or rule.join or rule.by:
            return "latest, join and by say what becomes of events beyond max_rate: give max_rate as well"
        return None
    if not 1 <= rule.max_rate <= MAX_RATE:
        return f"max_rate must be between 1 and {MAX_RATE} frames a second, not {rule.max_rate}"
    if rule.latest == bool(rule.join):
        both = "not both" if rule.latest else "which says what becomes of events beyond max_rate"
        return f"give either latest or join, {both}"
    if rule.by and not rule.join:
        return "by belongs to join: it says which texts are one"
    try:
        paths = [path_of(path) for path in (rule.join, rule.by) if path]
    except ValueError as error:
        return str(error)
    if len(paths) == 2 and paths[0] == paths[1]:
        return "join and by must be two paths: the text, and what all its parts have in common"
    return None


def with_eras(before: Sequence[HistoryRule], after: Iterable[HistoryRule], era: str) -> tuple[HistoryRule, ...]:
    """The rules `after`, which replace `before`, with their eras. `era` must be a new, unused word.

    A rule keeps its era if every channel it matches was stored until now; otherwise it gets `era`. What was published
    while no rule stored it is missing from the history, so a client that recovers from before must see a new epoch.
    """
    after = tuple(after)
    newly_stored = [_rule_for(after, old) for old in before if not old.keep]
    result: list[HistoryRule] = []
    for rule in after:
        previous = _rule_for(before, rule)
        if not rule.keep:
            rule_era = ""
        elif previous is None or not previous.keep or any(rule is other for other in newly_stored):
            rule_era = era
        else:
            rule_era = previous.era
        result.append(msgspec.structs.replace(rule, era=rule_era))
    return tuple(result)


def _rule_for(rules: Iterable[HistoryRule], target: HistoryRule) -> HistoryRule | None:
    """The one of `rules` that applies to the channels of `target`, apart from those with a narrower rule."""
    best = None
    for rule in rules:
        if rule.name == target.name and rule.prefix == target.prefix:
            return rule
        if rule.prefix and target.name.startswith(rule.name) and (best is None or len(rule.name) > len(best.name)):
            best = rule
    return best


# -- settings -----------------------------------------------------------------------------------------------

Value: TypeAlias = bool | int | float | str | tuple[str, ...]


class Setting(msgspec.Struct, frozen=True):
    """One changeable field of `App`. `minimum` and `maximum` are the bounds of `count` and `seconds`, both included;
    `choices` belongs to `choice`; `hosts` is a comma list. `unit` is "" if the name says it all."""

    name: str
    type: Literal["switch", "count", "seconds", "choice", "hosts"]
    help: str
    unit: str = ""
    minimum: int = 0
    maximum: int = 0
    choices: tuple[str, ...] = ()

    @property
    def default(self) -> Value:
        return _DEFAULTS[self.name]


_TABLE = (
    Setting("enabled", "switch", "If off, connections are closed with 4003 and HTTP requests get 403."),
    Setting("client_events", "switch", "Clients may send events, named `client-…`."),
    Setting(
        "subscription_count",
        "switch",
        "Send subscribers their number when it changes, except on presence channels. HTTP answers it in any case.",
    ),
    Setting("watchlist", "switch", "Tell signed-in users which users of their watchlist are online."),
    Setting(
        "grants",
        "switch",
        "Accept signed channel grants (JWT) in place of a signature for each channel and connection.",
    ),
    Setting(
        "user_authentication_timeout_s",
        "seconds",
        "Close connections (4009) that have neither signed in nor joined a private or presence channel in this time. "
        "0: never.",
        "s",
        maximum=3_600,
    ),
    Setting(
        "allowed_origins",
        "hosts",
        "Hosts whose pages may connect (else 4009): `host` or `*.host`, with a port unless it is the scheme's own. "
        "Empty: all. Clients that send no Origin, or the server's `public_url`, are always allowed.",
    ),
    Setting(
        "max_connections", "count", "Open connections, over all workers (else 4004). 0: no limit.", maximum=100_000_000
    ),
    Setting(
        "plan",
        "choice",
        "Messages per UTC day: free 200,000, starter 1,000,000, pro unlimited.",
        choices=tuple(DAILY_LIMITS),
    ),
    Setting("cache_ttl_s", "count", "How long a cache channel keeps its last event.", "s", 1, 604_800),
    Setting(
        "idempotency",
        "switch",
        "A publish that repeats a correlation_id within 120 s gets the first answer and publishes nothing.",
    ),
    Setting("tls_required", "switch", "Refuse connections without TLS (4000)."),
    Setting("max_event_name_chars", "count", "Length of an event's name.", "characters", 1, 1_000),
    Setting("max_channels", "count", "Channels of one publish.", "", 1, 1_000),
    Setting("max_data_bytes", "count", "Size of an event's data.", "bytes", 1, 262_144),
    Setting("max_batch", "count", "Events of one batch.", "", 1, 1_000),
    Setting("max_presence_members", "count", "Users of one presence channel.", "", 1, 10_000),
    Setting("max_user_info_bytes", "count", "Size of a presence member's user_info.", "bytes", 2, 16_384),
    Setting(
        "user_resume_s",
        "count",
        "A signed-in user or presence member who reconnects within this time gets what the last connection missed, "
        "on channels with history. 0: off.",
        "s",
        0,
        600,
    ),
    Setting(
        "max_cached_channels",
        "count",
        "Cache channels that have a cached event at a time. Events of further ones are delivered, but not cached.",
        "",
        1,
        1_000_000,
    ),
    Setting(
        "max_history_channels",
        "count",
        "Channels that have a history at a time. Events of further ones are delivered, but not stored.",
        "",
        1,
        1_000_000,
    ),
    Setting(
        "max_occupied_channels",
        "count",
        "Channels that have subscribers at a time, over all workers; subscribes to further ones are refused, to public "
        "ones from half of it on. Exact below 6,400; above, a client that chooses names for it can exceed the limit by "
        "half. Each channel takes about 1 kB of Redis. 0: no limit.",
        maximum=100_000_000,
    ),
)
SETTINGS: dict[str, Setting] = {setting.name: setting for setting in _TABLE}

_DEFAULTS: dict[str, Value] = dict(
    zip(App.__struct_fields__[-len(App.__struct_defaults__) :], App.__struct_defaults__, strict=True)
)

_SWITCH = {"true": True, "1": True, "false": False, "0": False}
# A record may have 16 KiB in the directory, which every worker reads whole.
_MAX_ORIGINS = 50
_COUNT = re.compile(r"-?[0-9]{1,15}").fullmatch
_SECONDS = re.compile(r"-?[0-9]{1,15}(?:\.[0-9]{1,9})?").fullmatch
_HOST = re.compile(r"(?:(?:\*\.)?[a-z0-9_-]+(?:\.[a-z0-9_-]+)*|\[[0-9a-f:.]+\])(?::([0-9]{1,5}))?").fullmatch
_MAX_HOST_CHARS = 253 + len("*.:65535")


def parse_setting(name: str, text: str) -> Value:
    """The value of `App`'s field `name` that `text` stands for. Raises ValueError with a sentence for the operator."""
    setting = SETTINGS.get(name)
    if setting is None:
        raise ValueError(f"there is no setting {name!r}; the settings are {', '.join(SETTINGS)}")
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
    if not setting.minimum <= value <= setting.maximum:
        raise ValueError(f"{setting.name} must be between {setting.minimum} and {setting.maximum}{unit}, not {text}")
    return value


def _hosts(name: str, text: str) -> tuple[str, ...]:
    """Lower case, because browsers write origins so."""
    entries = tuple(dict.fromkeys(part.strip().lower() for part in text.split(",") if part.strip()))
    for entry in entries:
        if "/" in entry:
            raise ValueError(f"{name}: write the host alone, without scheme and path, not {entry!r}")
        if entry == "*":
            raise ValueError(f"{name}: leave it empty to allow all hosts, instead of '*'")
        match = _HOST(entry) if len(entry) <= _MAX_HOST_CHARS else None
        if match is None or not 0 < int(match[1] or 1) < 65_536:
            raise ValueError(f"{name}: {entry!r} is neither 'host' nor '*.host', each with an optional ':port'")
    if len(entries) > _MAX_ORIGINS:
        raise ValueError(f"{name}: {len(entries)} entries; at most {_MAX_ORIGINS} are allowed")
    return entries
