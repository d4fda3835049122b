"""soketi: its JSON configuration, `SOKETI_…` variables, or its table of apps as a JSON array.

The JSON may be nested or have paths as keys (`"appManager.array.apps"`). Where soketi's default differs from ours, the
default is taken over too, so that what worked goes on working.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple
from urllib.parse import quote

from redpoll.config.settings import Settings
from redpoll.importing.documents import Document
from redpoll.importing.plan import AppPlan, Plan, SourceError, as_bool, as_number, without_secrets
from redpoll.protocol.apps import SETTINGS
from redpoll.protocol.channels import MAX_NAME_CHARS

__all__ = ["read"]

_PREFIX: Final = "SOKETI_"
_APP: Final = "appManager.array.apps.0."
# Variables whose path isn't that of their name.
_PATHS: Final[Mapping[str, str]] = {
    "HOST": "host",
    "PORT": "port",
    "PATH_PREFIX": "pathPrefix",
    "METRICS_SERVER_PORT": "metrics.port",
    "SHUTDOWN_GRACE_PERIOD": "shutdownGracePeriod",
    "SSL_CERT": "ssl.certPath",
    "SSL_KEY": "ssl.keyPath",
    "SSL_PASS": "ssl.passphrase",
    "USER_AUTHENTICATION_TIMEOUT": "userAuthenticationTimeout",
    "PRESENCE_MAX_MEMBERS": "presence.maxMembersPerChannel",
    "PRESENCE_MAX_MEMBER_SIZE": "presence.maxMemberSizeInKb",
    "CHANNEL_LIMITS_MAX_NAME_LENGTH": "channelLimits.maxNameLength",
    "CHANNEL_CACHE_TTL": "channelLimits.cacheTtl",
    "EVENT_MAX_BATCH_SIZE": "eventLimits.maxBatchSize",
    "EVENT_MAX_CHANNELS_AT_ONCE": "eventLimits.maxChannelsAtOnce",
    "EVENT_MAX_NAME_LENGTH": "eventLimits.maxNameLength",
    "EVENT_MAX_SIZE_IN_KB": "eventLimits.maxPayloadInKb",
    "ADAPTER_DRIVER": "adapter.driver",
    "APP_MANAGER_DRIVER": "appManager.driver",
    "DB_REDIS_HOST": "database.redis.host",
    "DB_REDIS_PORT": "database.redis.port",
    "DB_REDIS_DB": "database.redis.db",
    "DB_REDIS_USERNAME": "database.redis.username",
    "DB_REDIS_PASSWORD": "database.redis.password",
    "DB_REDIS_SENTINELS": "database.redis.sentinels",
    "DB_REDIS_CLUSTER_NODES": "database.redis.clusterNodes",
    "DEFAULT_APP_ID": _APP + "id",
    "DEFAULT_APP_KEY": _APP + "key",
    "DEFAULT_APP_SECRET": _APP + "secret",
    "DEFAULT_APP_MAX_CONNS": _APP + "maxConnections",
    "DEFAULT_APP_ENABLE_CLIENT_MESSAGES": _APP + "enableClientMessages",
    "DEFAULT_APP_ENABLED": _APP + "enabled",
    "DEFAULT_APP_MAX_BACKEND_EVENTS_PER_SEC": _APP + "maxBackendEventsPerSecond",
    "DEFAULT_APP_MAX_CLIENT_EVENTS_PER_SEC": _APP + "maxClientEventsPerSecond",
    "DEFAULT_APP_MAX_READ_REQ_PER_SEC": _APP + "maxReadRequestsPerSecond",
    "DEFAULT_APP_USER_AUTHENTICATION": _APP + "enableUserAuthentication",
    "DEFAULT_APP_WEBHOOKS": _APP + "webhooks",
    "WEBHOOKS_BATCHING": "webhooks.batching.enabled",
    "WEBHOOKS_BATCHING_DURATION": "webhooks.batching.duration",
}
# Why a setting, or all that begin with the word, has no counterpart.
_WITHOUT: Final = (
    ("adapter.driver", "workers and machines of redpoll always share their state in Redis"),
    ("adapter", "workers and machines of redpoll always share their state in Redis"),
    ("appManager.driver", "redpoll's apps are in its own record store"),
    ("appManager", "redpoll's apps are in its own record store"),
    ("database.redis", "soketi's adapter isn't redis; redpoll runs a Redis of its own unless redis_url is set"),
    ("database", "redpoll's records are in its data folder"),
    ("cache", "cache channels are in Redis"),
    ("queue", "webhooks are queued in Redis and in the record store, always"),
    ("rateLimiter", "rate limits are counted per process"),
    ("cluster", "redpoll's machines find each other through Redis"),
    ("cors", "redpoll answers other origins on /auth only, for an app's allowed_origins"),
    ("httpApi.requestLimitInMb", "a request has at most 1 MiB"),
    ("metrics", "/metrics is on the control port, with names of its own"),
    ("webhooks.batching.duration", "redpoll joins the events of a second"),
    ("webhooks", "redpoll has no such setting for webhooks"),
    ("debug", "use --log-level debug"),
)
_WEBHOOK_EVENTS: Final = {
    "channel_occupied": "channel.occupied",
    "channel_vacated": "channel.vacated",
    "member_added": "member.added",
    "member_removed": "member.removed",
    "client_event": "client_event",
    "cache_miss": "cache.miss",
    "subscription_count": "subscription.count",
}
_DEFAULT_NOTE: Final = "soketi's default"


def read(document: Document) -> Plan:
    """Raises SourceError."""
    options = _Options(document)
    plan = Plan("soketi")
    apps = options.read("appManager.array.apps")
    if isinstance(apps, dict):
        # An environment file gives the fields of one app by their paths.
        apps = [apps[name] for name in sorted(apps)]
    if not isinstance(apps, list) or not apps:
        raise SourceError(
            f"{document.path} has no apps: neither appManager.array.apps nor SOKETI_DEFAULT_APP_…. If soketi reads "
            "them from a database, export that table as a JSON array, and import that file"
        )
    limits = _Limits(options)
    rates: list[_ClientRate] = []
    for index, fields in enumerate(apps):
        if not isinstance(fields, dict):
            raise SourceError(f"{document.path}: app {index} is not an object")
        rates.append(_app(plan, _Fields(fields), limits, f"{document.path}: app {index}"))
    _client_rates(plan, rates)
    _server(plan, options)
    for path, value in options.rest():
        # Without it redpoll logs what soketi logs.
        if path != "debug" or as_bool(value):
            plan.nothing(path, without_secrets(path, value), _reason(path))
    return plan


def _reason(path: str) -> str:
    return next((why for start, why in _WITHOUT if path.startswith(start)), "redpoll has no such setting")


class _Options:
    """soketi's options as a tree. `take` removes a value, so that `rest` has what nobody asked for."""

    def __init__(self, document: Document) -> None:
        self._name = document.path
        self._tree: dict[str, Any] = {}
        if document.kind == "php":
            raise SourceError(f"{document.path} is PHP; soketi's configuration is JSON or an environment file")
        if document.kind == "json" and isinstance(document.data, list):
            self._put("appManager.array.apps", document.data)
        elif document.kind == "json":
            for path, value in document.data.items():
                self._put(path, value)
        else:
            for name, value in document.env.items():
                if name.startswith(_PREFIX):
                    path = _PATHS.get(name.removeprefix(_PREFIX), name)
                    self._put(path, _from_text(value))

    def _put(self, path: str, value: Any) -> None:
        """Raises SourceError if a part of the path has a value of its own, which has no fields."""
        if value is None:
            return
        *parents, name = path.split(".")
        node = self._tree
        for parent in parents:
            below = node.get(parent)
            if below is None:
                below = node[parent] = {}
            elif isinstance(below, list):
                # The paths of one app's fields after a whole list: soketi overrides the list's item.
                below = node[parent] = {str(index): item for index, item in enumerate(below)}
            elif not isinstance(below, dict):
                raise SourceError(f"{self._name} has {path}, but also a value for {parent} that has no fields")
            node = below
        if isinstance(value, dict) and isinstance(node.get(name), dict):
            node[name].update(value)
        else:
            node[name] = value

    def read(self, path: str, default: Any = None) -> Any:
        *parents, name = path.split(".")
        node: Any = self._tree
        for parent in parents:
            node = node.get(parent) if isinstance(node, dict) else None
        value = node.pop(name, None) if isinstance(node, dict) else None
        return default if value is None or value == "" else value

    def rest(self) -> list[tuple[str, Any]]:
        """What was not taken, by path."""
        unread: list[tuple[str, Any]] = []

        def walk(node: dict[str, Any], path: str) -> None:
            for name, value in node.items():
                if isinstance(value, dict) and value:
                    walk(value, f"{path}{name}.")
                elif value not in (None, "", {}, []):
                    unread.append((path + name, value))

        walk(self._tree, "")
        return unread


def _from_text(value: str) -> Any:
    """The JSON value. Numbers and truth values stay text: a key or a password may look like one."""
    try:
        decoded = json.loads(value)
    except (ValueError, RecursionError):
        return value
    return value if isinstance(decoded, int | float) else decoded


class _Limits:
    """The limits of all apps, which an app can override. Each is (value, path or note)."""

    def __init__(self, options: _Options) -> None:
        self.members = _limit_of(options, "presence.maxMembersPerChannel", 100)
        self.member_kb = _limit_of(options, "presence.maxMemberSizeInKb", 2)
        self.name_chars = _limit_of(options, "channelLimits.maxNameLength", 200)
        self.cache_s = _limit_of(options, "channelLimits.cacheTtl", 3_600)
        self.channels = _limit_of(options, "eventLimits.maxChannelsAtOnce", 100)
        self.event_chars = _limit_of(options, "eventLimits.maxNameLength", 200)
        self.payload_kb = _limit_of(options, "eventLimits.maxPayloadInKb", 100)
        self.batch = _limit_of(options, "eventLimits.maxBatchSize", 10)
        self.sign_in_ms = _limit_of(options, "userAuthenticationTimeout", 30_000)
        # Of all webhooks; no limit, but as common to all apps.
        self.batches_webhooks = as_bool(options.read("webhooks.batching.enabled"))


def _limit_of(options: _Options, path: str, default: float) -> tuple[float, str, bool]:
    value = options.read(path)
    return (default, path, False) if value is None else (as_number(value, path), path, True)


class _Fields:
    """An app's fields in any of soketi's three spellings: maxConnections, MaxConnections, max_connections."""

    def __init__(self, fields: Mapping[str, Any]) -> None:
        # per_sec is the spelling of the tables.
        self._unread = {
            name.replace("_per_sec", "_per_second").replace("_read_req_", "_read_requests_"): value
            for name, value in fields.items()
            if value is not None and value != ""
        }

    def read(self, name: str, default: Any = None) -> Any:
        snake = "".join(f"_{char.lower()}" if char.isupper() else char for char in name)
        upper = name[0].upper() + name[1:]
        for spelling in (name, upper, "App" + upper, snake):
            if spelling in self._unread:
                return self._unread.pop(spelling)
        return default

    def rest(self) -> list[tuple[str, Any]]:
        return list(self._unread.items())


class _ClientRate(NamedTuple):
    """An app's maxClientEventsPerSecond: the `value` as it was found, and as a number; 0 or less is no limit."""

    app: AppPlan
    value: Any
    per_s: float

    @property
    def is_used(self) -> bool:
        """Whether the app's clients may send events."""
        return self.app.settings.get("client_events") == "true"


def _app(plan: Plan, fields: _Fields, limits: _Limits, where: str) -> _ClientRate:
    """Adds an app. Returns its limit of client events, which depends on those of the other apps."""
    app = plan.app(fields.read("id"), fields.read("key"), fields.read("secret"), fields.read("name"), where=where)
    maximum = fields.read("maxConnections")
    if maximum is not None:
        app.limit("maxConnections", maximum, "max_connections")
    client_messages = fields.read("enableClientMessages")
    note = _DEFAULT_NOTE if client_messages is None else ""
    app.set("enableClientMessages", client_messages or False, "client_events", as_bool(client_messages), note)
    enabled = fields.read("enabled")
    if enabled is not None:
        app.set("enabled", enabled, "enabled", as_bool(enabled))

    def limit(field: str, of_all: tuple[float, str, bool], name: str, factor: int = 1) -> None:
        value, path, is_given = of_all
        own = fields.read(field)
        if own is not None:
            app.set(field, own, name, round(as_number(own, field) * factor))
        elif is_given or round(value * factor) != SETTINGS[name].default:
            app.set(path, value, name, round(value * factor), "" if is_given else _DEFAULT_NOTE)

    limit("maxPresenceMembersPerChannel", limits.members, "max_presence_members")
    limit("maxPresenceMemberSizeInKb", limits.member_kb, "max_user_info_bytes", 1_024)
    limit("maxEventChannelsAtOnce", limits.channels, "max_channels")
    limit("maxEventNameLength", limits.event_chars, "max_event_name_chars")
    limit("maxEventPayloadInKb", limits.payload_kb, "max_data_bytes", 1_024)
    limit("maxEventBatchSize", limits.batch, "max_batch")
    limit("cacheTtl", limits.cache_s, "cache_ttl_s")
    name_chars = fields.read("maxChannelNameLength", limits.name_chars[0])
    if as_number(name_chars, "maxChannelNameLength") > MAX_NAME_CHARS:
        app.nothing("maxChannelNameLength", name_chars, f"a channel's name has at most {MAX_NAME_CHARS} characters")
    if as_bool(fields.read("enableUserAuthentication")):
        seconds = limits.sign_in_ms[0] / 1_000
        app.set("enableUserAuthentication", True, "user_authentication_timeout_s", f"{seconds:g}")
    _rates(plan, app, fields)
    client_events = fields.read("maxClientEventsPerSecond", -1)
    for webhook in _webhooks(app, fields.read("webhooks")):
        _webhook(app, webhook, limits.batches_webhooks)
    for field, value in fields.rest():
        app.nothing(field, without_secrets(field, value), "redpoll has no such setting")
    return _ClientRate(app, client_events, as_number(client_events, "maxClientEventsPerSecond"))


def _rates(plan: Plan, app: AppPlan, fields: _Fields) -> None:
    events = fields.read("maxBackendEventsPerSecond", -1)
    per_minute = round(as_number(events, "maxBackendEventsPerSecond") * 60)
    if per_minute <= 0:
        plan.unlimited_triggers(f"maxBackendEventsPerSecond of {app.id}")
    elif plan.server.get("trigger_rate_per_minute") != 0:
        limit = max(per_minute, int(plan.server.get("trigger_rate_per_minute", 0)))
        note = "redpoll counts requests per client address and minute, not per app and second"
        plan.set(f"maxBackendEventsPerSecond of {app.id}", events, "trigger_rate_per_minute", limit, note)
    reads = fields.read("maxReadRequestsPerSecond", -1)
    if as_number(reads, "maxReadRequestsPerSecond") > 0:
        app.nothing("maxReadRequestsPerSecond", reads, "redpoll doesn't limit reading requests")


def _client_rates(plan: Plan, rates: Sequence[_ClientRate]) -> None:
    """Recommends one limit for all apps: the greatest of theirs, so that none is slowed down. If an app has no limit,
    not less than redpoll's default."""
    default = Settings().client_events_per_second
    limits = [math.ceil(rate.per_s) if rate.per_s > 0 else default for rate in rates if rate.is_used]
    limit = max(limits, default=default)
    for rate in rates:
        if not rate.is_used:
            if rate.per_s > 0:
                rate.app.nothing("maxClientEventsPerSecond", rate.value, "the app has no client events")
        elif rate.per_s > 0:
            note = "" if rate.per_s == limit else "redpoll has one limit for all apps: the greatest of theirs"
            plan.set(f"maxClientEventsPerSecond of {rate.app.id}", rate.value, "client_events_per_second", limit, note)
        else:
            rate.app.unlimited_client_events("maxClientEventsPerSecond", limit)


def _webhooks(app: AppPlan, webhooks: Any) -> list[Any]:
    """The app's list of webhooks, which is JSON in a table."""
    if isinstance(webhooks, str):
        webhooks = _from_text(webhooks)
    if webhooks is not None and not isinstance(webhooks, list):
        app.nothing("webhooks", without_secrets("webhooks", webhooks), "not a list of webhooks")
    return webhooks if isinstance(webhooks, list) else []


def _webhook(app: AppPlan, webhook: Any, batch: bool) -> None:
    if not isinstance(webhook, dict) or not isinstance(webhook.get("url"), str):
        what = webhook.get("lambda_function", webhook) if isinstance(webhook, dict) else webhook
        advice = "redpoll posts to a URL; put an HTTP endpoint in front of the function"
        app.nothing("webhook", without_secrets("webhook", what), advice)
        return
    url, listed, filters = webhook["url"], webhook.get("event_types"), webhook.get("filter")
    names = [name for name in listed if isinstance(name, str)] if isinstance(listed, list) else []
    events = [_WEBHOOK_EVENTS[name] for name in names if name in _WEBHOOK_EVENTS]
    filters = filters if isinstance(filters, dict) else {}
    prefix = filters.get("channel_name_starts_with")
    if not events:
        app.nothing(f"webhook {url}", listed, "none of its events exists here")
        return
    app.add_webhook(url, events, [str(prefix)] if prefix else [], batch)
    if filters.get("channel_name_ends_with"):
        app.nothing(
            f"filter of webhook {url}",
            filters["channel_name_ends_with"],
            "redpoll filters by the beginning of names only",
        )
    if isinstance(webhook.get("headers"), dict) and webhook["headers"]:
        app.nothing(f"headers of webhook {url}", ", ".join(webhook["headers"]), "check X-Pusher-Signature instead")


def _server(plan: Plan, options: _Options) -> None:
    for path, name in (("host", "host"), ("port", "port"), ("metrics.port", "control_port")):
        value = options.read(path)
        if value is not None:
            plan.set(path, value, name, value)
    grace_ms = options.read("shutdownGracePeriod")
    if grace_ms is not None:
        plan.set(
            "shutdownGracePeriod", grace_ms, "shutdown_grace_s", as_number(grace_ms, "shutdownGracePeriod") / 1_000
        )
    prefix = options.read("pathPrefix")
    if prefix is not None:
        plan.set("pathPrefix", prefix, "path_prefix", prefix)
    _tls(plan, options)
    if options.read("adapter.driver") == "redis":
        _redis(plan, options)


def _tls(plan: Plan, options: _Options) -> None:
    cert, key = options.read("ssl.certPath"), options.read("ssl.keyPath")
    if cert is not None and key is not None:
        plan.set("ssl.certPath", cert, "tls_cert", cert)
        plan.set("ssl.keyPath", key, "tls_key", key)
        # Clients connect to the port by TLS, so TLS gets that port.
        port = plan.server.pop("port", 6_001)
        plan.set("port", port, "tls_port", port, "soketi's port is for TLS only if it has a certificate")
        plan.set("port", port, "port", 0, "redpoll has a port without TLS too; choose one, 0 takes any")
    if options.read("ssl.passphrase") is not None:
        plan.nothing("ssl.passphrase", "…", "the key of tls_key must have no passphrase")


def _redis(plan: Plan, options: _Options) -> None:
    if options.read("database.redis.sentinels") or options.read("database.redis.clusterNodes"):
        advice = "set redis_url to redis+sentinel://HOST,HOST/SERVICE or redis+cluster://HOST,HOST"
        plan.nothing("database.redis", "sentinels or cluster", advice)
        return
    host, port = options.read("database.redis.host", "127.0.0.1"), options.read("database.redis.port", 6_379)
    user, password = options.read("database.redis.username", ""), options.read("database.redis.password", "")
    at = f"{quote(str(user), safe='')}:{quote(str(password), safe='')}@" if user or password else ""
    shown = f"redis://{host}:{port}/{options.read('database.redis.db', 0)}"
    plan.set("database.redis", shown, "redis_url", shown.replace("//", f"//{at}"))
