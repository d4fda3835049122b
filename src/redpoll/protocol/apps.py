"""An app as every process sees it: its keys, switches, limits and rules of history, and the table of the settings
that an operator may change one by one.

The record store makes these, the directory carries them to the workers, sessions obey them.
Nothing here knows where a record is kept.
"""

import re
from collections.abc import Iterable, Sequence
from typing import Literal, TypeAlias

import msgspec

from redpoll.protocol.channels import OWN_PREFIX, SERVER_TO_USER, valid_name
from redpoll.protocol.history import MAX_LIMIT, MAX_STORED_MESSAGES, MAX_STORED_S

__all__ = [
    "DAILY_LIMITS",
    "MAX_HISTORY_RULES",
    "NOT_SETTINGS",
    "SETTINGS",
    "App",
    "HistoryRule",
    "Key",
    "Setting",
    "Value",
    "history_fault",
    "parse_setting",
    "with_eras",
]

# Messages a UTC day by plan (spec section 8): one per published channel and per client event.
DAILY_LIMITS: dict[str, int | None] = {"free": 200_000, "starter": 1_000_000, "pro": None}


class Key(msgspec.Struct, frozen=True, kw_only=True):
    """A key and its secret, both lowercase hex. A disabled key opens nothing new (decisions.md)."""

    key: str
    secret: str
    enabled: bool = True


class HistoryRule(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What is kept of one channel, or of all whose names begin alike. `history_fault` says what goes with what.

    `id` is 6 hex digits. `name` is the channel's, or with `prefix` how its name begins ("": every channel).
    `keep` is messages a channel, 0 for none: an exception to a wider rule. They are kept for `seconds`.
    Who subscribes is told the last `replay` messages, or those of the last `replay_seconds`, without asking.
    `era` is `with_eras`'s: histories of two eras have not the same epoch.
    """

    id: str
    name: str
    prefix: bool = False
    keep: int = 0
    seconds: int = 0
    replay: int = 0
    replay_seconds: int = 0
    client_events: bool = False
    era: str = ""


class App(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One app's record. Sizes are bytes, lengths are characters, counts are counts; spec section 8.

    `id` is decimal digits: Pusher's Python and Go libraries accept no other.
    `keys` is oldest first; the oldest enabled key is the one we sign with.
    `history` are the rules of history, no two of them for the same name. `hooks` is made from the app's enabled
    webhook endpoints, a letter for each kind of event that one of them wants: o channel.occupied and .vacated,
    m member.added and .removed, c client_event, x cache.miss, s subscription.count.
    `console_key` signs subscriptions to the dashboard's console and nothing else; until `console_until` (Unix
    seconds) somebody watches it. What each of the others means stands in `SETTINGS`.
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
    user_resume_s: int = 0
    max_history_channels: int = 10_000
    history: tuple[HistoryRule, ...] = ()
    hooks: str = ""
    console_key: Key | None = None
    console_until: float = 0.0

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

    def history_rule(self, channel: str) -> HistoryRule | None:
        """The rule by which messages of `channel` are kept, None where none are: one for this very name goes
        before prefixes, a longer prefix before a shorter one. Asked for each event published."""
        if not self.history:
            return None
        found = None
        for rule in self.history:
            if not rule.prefix:
                if rule.name == channel:
                    found = rule
                    break
            elif channel.startswith(rule.name) and (found is None or len(rule.name) > len(found.name)):
                found = rule
        # What is for one user's eyes, and the console, would be in a stream that others may read.
        if found is None or not found.keep or channel.startswith((SERVER_TO_USER, OWN_PREFIX)):
            return None
        return found


# -- rules of history ---------------------------------------------------------------------------------------

# Every publish walks the rules, and a record has 16 KiB in the directory (cluster.md 7).
MAX_HISTORY_RULES = 32
_RULE_ID = re.compile(r"[0-9a-f]{6}").fullmatch


def history_fault(rule: HistoryRule) -> str | None:
    """What is wrong with a rule that contradicts itself or passes a limit, a sentence for the operator; else None."""
    if _RULE_ID(rule.id) is None:
        return f"id must be 6 hex digits, not {rule.id!r}"
    if not valid_name(rule.name) and (rule.name or not rule.prefix):
        return f"{rule.name!r} is not {'how a name of a channel begins' if rule.prefix else 'the name of a channel'}"
    if rule.name.startswith(OWN_PREFIX):
        return f"channels that begin with {OWN_PREFIX!r} are the server's own; nothing is kept of them"
    if not 0 <= rule.keep <= MAX_STORED_MESSAGES:
        return f"keep must be between 0 and {MAX_STORED_MESSAGES} messages, not {rule.keep}"
    if rule.keep == 0:
        if rule.seconds or rule.replay or rule.replay_seconds or rule.client_events:
            return "a rule that keeps 0 messages keeps them for no time, replays none and has no client events"
        return None
    if not 1 <= rule.seconds <= MAX_STORED_S:
        return f"seconds must be between 1 and {MAX_STORED_S}, not {rule.seconds}"
    if rule.replay and rule.replay_seconds:
        return "replay either the last messages or those of the last seconds, not both"
    most = min(rule.keep, MAX_LIMIT)
    if not 0 <= rule.replay <= most:
        return f"replay must be between 0 and {most} messages, not {rule.replay}"
    if not 0 <= rule.replay_seconds <= rule.seconds:
        return f"replay_seconds must be between 0 and the {rule.seconds} s kept, not {rule.replay_seconds}"
    return None


def with_eras(before: Sequence[HistoryRule], after: Iterable[HistoryRule], era: str) -> tuple[HistoryRule, ...]:
    """The rules `after`, which take the place of `before`, each with the era in which it keeps messages: `era`, a word
    that was never one, where channels of it may have had none kept until now; else the one that was theirs.

    What was published while no rule kept it is in no history, and nobody who goes on from before that is to be told
    that nothing is missing.
    """
    after = tuple(after)
    unkept = [_ruling(after, each) for each in before if not each.keep]
    made: list[HistoryRule] = []
    for rule in after:
        was = _ruling(before, rule)
        kept = was is not None and was.keep > 0 and not any(rule is each for each in unkept)
        theirs = "" if not rule.keep else was.era if was is not None and kept else era
        made.append(msgspec.structs.replace(rule, era=theirs))
    return tuple(made)


def _ruling(rules: Iterable[HistoryRule], of: HistoryRule) -> HistoryRule | None:
    """By which of `rules` the channels of a rule go, or would, that have no narrower one."""
    found = None
    for rule in rules:
        if rule.name == of.name and rule.prefix == of.prefix:
            return rule
        if rule.prefix and of.name.startswith(rule.name) and (found is None or len(rule.name) > len(found.name)):
            found = rule
    return found


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
    Setting(
        "user_resume_s",
        "count",
        "A signed-in user or member who is back within this time is replayed what the last connection missed, "
        "on channels with history. 0: off.",
        "s",
        0,
        600,
    ),
    Setting(
        "max_history_channels",
        "count",
        "Channels with history at a time. Events of further ones are sent, but not kept.",
        "",
        1,
        1_000_000,
    ),
)
SETTINGS: dict[str, Setting] = {setting.name: setting for setting in _TABLE}
# The fields of `App` that are something else: who it is, and what has commands or a maker of its own.
NOT_SETTINGS = frozenset(("id", "name", "keys", "history", "hooks", "console_key", "console_until"))

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
