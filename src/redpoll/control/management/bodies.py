"""The bodies of the management API: what requests may contain, and what is answered.

The OpenAPI document is made from these types. A secret is in the answer that creates it, and masked in every other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, TypeAlias

import msgspec
from msgspec import UNSET, Meta, UnsetType

from redpoll.config.app_names import MAX_APP_ID_CHARS
from redpoll.control.webhooks.endpoints import MAX_ENDPOINTS
from redpoll.control.webhooks.payloads import EVENTS, FORMATS
from redpoll.control.webhooks.wanted import ALL
from redpoll.protocol.apps import MAX_HISTORY_RULES, SETTINGS, App, HistoryRule, Key, Setting, Value, parse_setting
from redpoll.protocol.channels import MAX_NAME_CHARS
from redpoll.protocol.history import MAX_LIMIT, MAX_STORED_MESSAGES, MAX_STORED_S
from redpoll.protocol.joining import MAX_PATH_CHARS, MAX_RATE
from redpoll.protocol.tokens import SCOPES, Token
from redpoll.store.webhooks import Endpoint

__all__ = [
    "AppChange",
    "AppList",
    "AppSettings",
    "AppSummary",
    "CreatedApp",
    "CreatedToken",
    "KeyChange",
    "KeyList",
    "ManagedApp",
    "ManagedKey",
    "ManagedRule",
    "ManagedToken",
    "ManagedWebhook",
    "NewApp",
    "NewKey",
    "NewRule",
    "NewToken",
    "NewWebhook",
    "RuleChange",
    "RuleList",
    "TokenList",
    "WebhookChange",
    "WebhookList",
    "app_body",
    "created_app_body",
    "created_token_body",
    "key_body",
    "parsed_settings",
    "rule_body",
    "setting_texts",
    "token_body",
    "webhook_body",
]

# Of a secret this many characters are shown, if it has at least four times as many.
_SHOWN_CHARS: Final = 4
_MAX_HOSTS: Final = 50
_MAX_PREFIXES: Final = 50
_MAX_NEW_TOKENS: Final = 50
_MAX_LIFETIME_S: Final = 36_500 * 86_400

# These patterns are those of config/app_names.py and of webhooks' URLs, as JSON Schema writes them.
_Id = Annotated[str, Meta(pattern=rf"^(?!\.+$)[A-Za-z0-9_.-]{{1,{MAX_APP_ID_CHARS}}}$")]
_KeyName = Annotated[str, Meta(pattern=r"^(?!\.+$)[A-Za-z0-9_.-]{1,128}$")]
_Secret = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_.~+/=@:%^*,-]{1,128}$")]
_Name = Annotated[str, Meta(min_length=1, max_length=200, description="Printable characters, and not only spaces.")]
_Url = Annotated[str, Meta(min_length=1, max_length=2_000, description="Where webhooks may go: `webhook_allow_…`.")]
_Event = Annotated[str, Meta(extra_json_schema={"enum": [ALL, *EVENTS]})]
_Format = Annotated[str, Meta(extra_json_schema={"enum": list(FORMATS)})]
_Scope = Annotated[str, Meta(extra_json_schema={"enum": list(SCOPES)})]
_Events = Annotated[list[_Event], Meta(min_length=1, max_length=20)]
_Prefix = Annotated[str, Meta(min_length=1, max_length=MAX_NAME_CHARS)]
_Prefixes = Annotated[list[_Prefix], Meta(max_length=_MAX_PREFIXES, description="Beginnings of channel names.")]
_ClientEvent = Annotated[str, Meta(min_length=8, max_length=1_000)]
_ClientEvents = Annotated[list[_ClientEvent], Meta(max_length=_MAX_PREFIXES, description="Empty: those of any name.")]
_Batch = Annotated[bool, Meta(description="One request for the events of a second. Needs a URL and the format pusher.")]
_Scopes = Annotated[list[_Scope], Meta(min_length=1, max_length=len(SCOPES))]
_RuleName = Annotated[str, Meta(max_length=MAX_NAME_CHARS, description="A channel's name, or its beginning.")]
_Keep = Annotated[int, Meta(ge=0, le=MAX_STORED_MESSAGES, description="Messages per channel; 0: an exception.")]
_Seconds = Annotated[int, Meta(ge=0, le=MAX_STORED_S)]
_Replay = Annotated[int, Meta(ge=0, le=MAX_LIMIT)]
_MaxRate = Annotated[int, Meta(ge=1, le=MAX_RATE, description="Frames a second for each subscriber.")]
_RulePath = Annotated[str, Meta(max_length=MAX_PATH_CHARS, description="Names with dots between them.")]
_Masked = Annotated[str, Meta(description="Whole in the answer that creates it, else masked.")]
_Time = Annotated[int, Meta(description="Unix seconds.")]


# -- settings


def _type_of(setting: Setting) -> Any:
    match setting.type:
        case "switch":
            return bool
        case "choice":
            return Literal[setting.choices]
        case "hosts":
            return Annotated[list[str], Meta(max_length=_MAX_HOSTS)]
        case "seconds":
            return Annotated[float, Meta(ge=setting.minimum, le=setting.maximum)]
        case _:
            return Annotated[int, Meta(ge=setting.minimum, le=setting.maximum)]


def _described(setting: Setting, type_: Any) -> Any:
    return Annotated[type_, Meta(description=setting.help)]


if TYPE_CHECKING:
    AppSettings: TypeAlias = Any
    SettingsChange: TypeAlias = Any
else:
    AppSettings = msgspec.defstruct(
        "AppSettings",
        [(name, _described(setting, _type_of(setting))) for name, setting in SETTINGS.items()],
        kw_only=True,
        namespace={"__doc__": "All settings of an app."},
    )
    SettingsChange = msgspec.defstruct(
        "SettingsChange",
        [
            (name, _described(setting, _type_of(setting) | None) | UnsetType, UNSET)
            for name, setting in SETTINGS.items()
        ],
        kw_only=True,
        forbid_unknown_fields=True,
        namespace={"__doc__": "Settings to change; null gives a setting its default."},
    )


def setting_texts(change: SettingsChange) -> dict[str, str]:
    """The given settings of a SettingsChange as texts for `parse_setting`, without those that get their default."""
    values = {name: getattr(change, name) for name in SETTINGS}
    return {name: _setting_text(value) for name, value in values.items() if value is not UNSET and value is not None}


def parsed_settings(change: SettingsChange) -> dict[str, Value]:
    """The values of a SettingsChange for a record. Raises ValueError with a sentence for people."""
    values = {name: setting.default for name, setting in SETTINGS.items() if getattr(change, name) is None}
    return values | {name: parse_setting(name, text) for name, text in setting_texts(change).items()}


def _setting_text(value: Any) -> str:
    """As the command line would write it."""
    if isinstance(value, list):
        return ",".join(value)
    if isinstance(value, bool):
        return str(value).lower()
    # Not 1e-07: the command line writes decimals.
    return f"{value:.9f}" if isinstance(value, float) else str(value)


# -- requests


class NewKey(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A key to add. What is left out is made: 20 and 40 hex digits."""

    key: _KeyName | UnsetType = UNSET
    secret: _Secret | UnsetType = UNSET


class KeyChange(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A disabled key admits no new connection and signs no request."""

    enabled: bool | UnsetType = UNSET


class NewRule(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What to store of one channel, or with `prefix` of all whose names begin with `name`."""

    name: _RuleName
    prefix: bool = False
    keep: _Keep
    seconds: _Seconds = 0
    replay: _Replay = 0
    replay_seconds: _Seconds = 0
    client_events: bool = False
    max_rate: _MaxRate | None = None
    latest: bool = False
    join: _RulePath = ""
    by: _RulePath = ""


class RuleChange(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Fields of a rule to change."""

    keep: _Keep | UnsetType = UNSET
    seconds: _Seconds | UnsetType = UNSET
    replay: _Replay | UnsetType = UNSET
    replay_seconds: _Seconds | UnsetType = UNSET
    client_events: bool | UnsetType = UNSET
    max_rate: _MaxRate | UnsetType | None = UNSET
    latest: bool | UnsetType = UNSET
    join: _RulePath | UnsetType = UNSET
    by: _RulePath | UnsetType = UNSET


class NewWebhook(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A receiver of an app's webhooks: a URL, or with `pull` a back end that asks for deliveries. `all` stands for the
    five standard events. Its secret is made."""

    url: _Url | UnsetType = UNSET
    pull: bool = False
    events: _Events = msgspec.field(default_factory=lambda: ["all"])
    format: _Format = FORMATS[0]
    channels: _Prefixes = msgspec.field(default_factory=list)
    client_events: _ClientEvents = msgspec.field(default_factory=list)
    batch: _Batch = False


class WebhookChange(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Fields of a webhook to change."""

    url: _Url | UnsetType = UNSET
    events: _Events | UnsetType = UNSET
    format: _Format | UnsetType = UNSET
    channels: _Prefixes | UnsetType = UNSET
    client_events: _ClientEvents | UnsetType = UNSET
    batch: _Batch | UnsetType = UNSET
    enabled: bool | UnsetType = UNSET


class NewToken(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A token of an app. Without `lasts_s` it is valid until it is revoked."""

    name: _Name
    scopes: _Scopes
    lasts_s: Annotated[int, Meta(ge=1, le=_MAX_LIFETIME_S, description="Seconds.")] | UnsetType = UNSET


class NewApp(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """An app to create, with all that belongs to it: all of it, or nothing. Without `id` it gets 7 digits; without
    `keys` one is made."""

    name: _Name
    id: _Id | UnsetType = UNSET
    keys: Annotated[list[NewKey], Meta(max_length=20)] = msgspec.field(default_factory=list)
    settings: SettingsChange | UnsetType = UNSET
    history_rules: Annotated[list[NewRule], Meta(max_length=MAX_HISTORY_RULES)] = msgspec.field(default_factory=list)
    webhooks: Annotated[list[NewWebhook], Meta(max_length=MAX_ENDPOINTS)] = msgspec.field(default_factory=list)
    tokens: Annotated[list[NewToken], Meta(max_length=_MAX_NEW_TOKENS)] = msgspec.field(default_factory=list)


class AppChange(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What to change of an app: its name, and some of its settings."""

    name: _Name | UnsetType = UNSET
    settings: SettingsChange | UnsetType = UNSET


# -- answers


class AppSummary(msgspec.Struct, kw_only=True):
    """An app in a list."""

    id: str
    name: str
    enabled: bool


class AppList(msgspec.Struct, kw_only=True):
    """Apps by id. `next`: the `cursor` of the following page, null after the last one."""

    apps: list[AppSummary]
    next: str | None


class ManagedKey(msgspec.Struct, kw_only=True):
    """A key of an app."""

    key: str
    secret: _Masked
    enabled: bool


class ManagedRule(msgspec.Struct, kw_only=True):
    """A history rule of an app."""

    id: str
    name: str
    prefix: bool
    keep: int
    seconds: int
    replay: int
    replay_seconds: int
    client_events: bool
    max_rate: int | None
    latest: bool
    join: str
    by: str


class ManagedWebhook(msgspec.Struct, kw_only=True):
    """A webhook of an app. `url` null: its deliveries are pulled. `pinned`: only the pinned certificate is accepted."""

    id: str
    url: str | None
    secret: _Masked
    events: list[str]
    format: str
    channels: list[str]
    client_events: list[str]
    batch: bool
    enabled: bool
    pinned: bool


class ManagedToken(msgspec.Struct, kw_only=True):
    """A token of an app. `prefix` is its beginning. Times are Unix seconds."""

    id: str
    name: str
    prefix: str
    scopes: list[str]
    created_at: _Time
    expires_at: _Time | None
    revoked_at: _Time | None


class CreatedToken(ManagedToken, kw_only=True):
    """A new token. `token` is shown only here: the server stores its hash."""

    token: str


class ManagedApp(msgspec.Struct, kw_only=True):
    """An app with all that belongs to it."""

    id: str
    name: str
    settings: AppSettings
    keys: list[ManagedKey]
    history_rules: list[ManagedRule]
    webhooks: list[ManagedWebhook]
    tokens: Sequence[ManagedToken]


class CreatedApp(ManagedApp, kw_only=True):
    """A new app, with all its secrets. No other answer has them."""

    tokens: Sequence[CreatedToken]


class KeyList(msgspec.Struct):
    """The keys of an app, oldest first."""

    keys: list[ManagedKey]


class RuleList(msgspec.Struct):
    """The history rules of an app."""

    history_rules: list[ManagedRule]


class WebhookList(msgspec.Struct):
    """The webhooks of an app, oldest first."""

    webhooks: list[ManagedWebhook]


class TokenList(msgspec.Struct):
    """The tokens of an app, oldest first. Ended ones for ninety days, of the expired ones the newest thousand."""

    tokens: list[ManagedToken]


# -- from records


def _shown(secret: str, whole: bool) -> str:
    """The secret, or what people recognise it by."""
    if whole:
        return secret
    return f"{secret[:_SHOWN_CHARS] if len(secret) >= 4 * _SHOWN_CHARS else ''}****"


def key_body(key: Key, whole: bool = False) -> ManagedKey:
    """`whole`: with its secret, as in every function here."""
    return ManagedKey(key=key.key, secret=_shown(key.secret, whole), enabled=key.enabled)


def rule_body(rule: HistoryRule) -> ManagedRule:
    return ManagedRule(**{name: getattr(rule, name) for name in ManagedRule.__struct_fields__})


def webhook_body(endpoint: Endpoint, whole: bool = False) -> ManagedWebhook:
    return ManagedWebhook(
        id=endpoint.id,
        url=endpoint.url or None,
        secret=_shown(endpoint.secret, whole),
        events=list(endpoint.events),
        format=endpoint.format,
        channels=list(endpoint.channels),
        client_events=list(endpoint.client_events),
        batch=endpoint.batch,
        enabled=endpoint.enabled,
        pinned=bool(endpoint.pin),
    )


def token_body(token: Token) -> ManagedToken:
    return ManagedToken(**_token_fields(token))


def created_token_body(token: Token, plain: str) -> CreatedToken:
    return CreatedToken(**_token_fields(token), token=plain)


def _token_fields(token: Token) -> dict[str, Any]:
    return {
        "id": token.id,
        "name": token.name,
        "prefix": token.prefix,
        "scopes": list(token.scopes),
        "created_at": int(token.created_at),
        "expires_at": None if token.expires_at is None else int(token.expires_at),
        "revoked_at": None if token.revoked_at is None else int(token.revoked_at),
    }


def settings_body(app: App) -> AppSettings:
    values = {name: getattr(app, name) for name in SETTINGS}
    return AppSettings(**{name: list(value) if isinstance(value, tuple) else value for name, value in values.items()})


def app_body(app: App, endpoints: Sequence[Endpoint], tokens: Sequence[Token]) -> ManagedApp:
    return ManagedApp(**_app_fields(app, endpoints, whole=False), tokens=[token_body(token) for token in tokens])


def created_app_body(app: App, endpoints: Sequence[Endpoint], tokens: Sequence[CreatedToken]) -> CreatedApp:
    return CreatedApp(**_app_fields(app, endpoints, whole=True), tokens=tokens)


def _app_fields(app: App, endpoints: Sequence[Endpoint], whole: bool) -> dict[str, Any]:
    return {
        "id": app.id,
        "name": app.name,
        "settings": settings_body(app),
        "keys": [key_body(key, whole) for key in app.keys],
        "history_rules": [rule_body(rule) for rule in app.history],
        "webhooks": [webhook_body(endpoint, whole) for endpoint in endpoints],
    }
