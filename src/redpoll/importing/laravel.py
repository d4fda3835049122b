"""Reverb and laravel-websockets: an application's `.env`, or the package's file in Laravel's `config` folder.

An environment file has only what the package's own configuration reads from it, so the rest has the package's defaults.
Where they have no limit and redpoll has one, an app gets a larger one than by default, and the plan names it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Final
from urllib.parse import quote

from redpoll.importing.documents import Document
from redpoll.importing.php import Expression, env_value
from redpoll.importing.plan import ALL_HOSTS, AppPlan, Plan, SourceError, as_bool, as_number, without_secrets
from redpoll.protocol.apps import SETTINGS

__all__ = ["read_laravel_websockets", "read_reverb"]

# redpoll's own limit of a message from a client, which theirs may exceed.
_OUR_MESSAGE_BYTES: Final = 65_536
_OUR_DATA_BYTES: Final = 10_240
# Where theirs have no limit. A full channel's list of members of this size, each with an id of 128 characters, still
# fits into half of the default of max_unsent_bytes (control/records/checks.py, `check_roster`).
_MEMBERS: Final = 240
_USER_INFO_BYTES: Final = 2_048
_BATCH: Final = 100
_NOT_ON_PUBLIC: Final = "not on public channels, as with Pusher"
_COMPUTED: Final = "an expression that only PHP can compute: set it by hand"
# What is read of a server, and of the tables in it.
_REVERB_FIELDS: Final = (
    *("host", "port", "path", "max_request_size", "options", "tls", "local_cert", "local_pk", "passphrase"),
    *("scaling", "enabled", "server", "url", "username", "password", "database"),
)
_WEBSOCKETS_FIELDS: Final = (
    *("dashboard", "port", "ssl", "local_cert", "local_pk", "passphrase", "replication", "mode"),
    "max_request_size_in_kb",
)


def read_reverb(document: Document) -> Plan:
    """Raises SourceError."""
    config = _config(document, _reverb_of_env)
    plan = Plan("reverb", document.unset)
    chosen = _readable(plan, {name: config.get(name) for name in ("default", "servers")})
    name = str(chosen.get("default") or "reverb")
    servers = _table(chosen.get("servers"))
    server = _table(_server_fields(plan, {name: servers.get(name)}, (name, *_REVERB_FIELDS), "servers.").get(name))
    apps = _table(config.get("apps")).get("apps")
    for index, fields in enumerate(_list_of_apps(apps, document)):
        _reverb_app(plan, fields, server, f"{document.path}: app {index}")
    _reverb_server(plan, server)
    plan.unlimited_triggers("rate of publish requests")
    return plan


def _reverb_of_env(env: Mapping[str, str]) -> dict[str, Any]:
    def get(name: str) -> Any:
        return env_value(env.get(name, "")) or None

    app = {
        "app_id": get("REVERB_APP_ID"),
        "key": get("REVERB_APP_KEY"),
        "secret": get("REVERB_APP_SECRET"),
        "options": {"host": get("REVERB_HOST"), "port": get("REVERB_PORT"), "scheme": get("REVERB_SCHEME")},
        "allowed_origins": ["*"],
        "ping_interval": get("REVERB_APP_PING_INTERVAL"),
        "activity_timeout": get("REVERB_APP_ACTIVITY_TIMEOUT"),
        "max_connections": get("REVERB_APP_MAX_CONNECTIONS"),
        "max_message_size": get("REVERB_APP_MAX_MESSAGE_SIZE"),
        "accept_client_events_from": get("REVERB_APP_ACCEPT_CLIENT_EVENTS_FROM"),
        "rate_limiting": {"enabled": get("REVERB_APP_RATE_LIMITING_ENABLED")},
    }
    server = {
        "host": get("REVERB_SERVER_HOST"),
        "port": get("REVERB_SERVER_PORT"),
        "path": get("REVERB_SERVER_PATH"),
        "max_request_size": get("REVERB_MAX_REQUEST_SIZE"),
        "scaling": {
            "enabled": get("REVERB_SCALING_ENABLED"),
            "server": {
                "url": get("REDIS_URL"),
                "host": get("REDIS_HOST"),
                "port": get("REDIS_PORT"),
                "username": get("REDIS_USERNAME"),
                "password": get("REDIS_PASSWORD"),
                "database": get("REDIS_DB"),
            },
        },
    }
    return {"servers": {"reverb": server}, "apps": {"apps": [app]}}


def _reverb_app(plan: Plan, fields: dict[str, Any], server: dict[str, Any], where: str) -> None:
    origins = fields.get("allowed_origins", ["*"])
    fields = _readable(plan, {name: value for name, value in fields.items() if name != "allowed_origins"})
    app = plan.app(fields.get("app_id"), fields.get("key"), fields.get("secret"), fields.get("name"), where=where)
    app.limit("max_connections", fields.get("max_connections"), "max_connections")
    _origins(app, origins)
    accepts = fields.get("accept_client_events_from") or "members"
    notes = {"none": "", "all": f"from subscribers of the channel only, and {_NOT_ON_PUBLIC}"}
    note = notes.get(str(accepts), _NOT_ON_PUBLIC)
    app.set("accept_client_events_from", accepts, "client_events", accepts != "none", note)
    _members(app)
    app.unlimited("events of a batch", "max_batch", _BATCH)
    app.unlimited("time of a cached event", "cache_ttl_s", SETTINGS["cache_ttl_s"].maximum)
    size = server.get("max_request_size")
    if size is not None and as_number(size, "max_request_size") > _OUR_DATA_BYTES:
        app.set("max_request_size", size, "max_data_bytes", as_number(size, "max_request_size"))
    message = fields.get("max_message_size")
    if message is not None and as_number(message, "max_message_size") > _OUR_MESSAGE_BYTES:
        plan.set("max_message_size", message, "max_message_bytes", int(as_number(message, "max_message_size")))
    timeout = fields.get("activity_timeout")
    if timeout is not None:
        plan.set("activity_timeout", timeout, "activity_timeout_s", as_number(timeout, "activity_timeout"))
    if fields.get("ping_interval") is not None:
        app.nothing(
            "ping_interval", fields["ping_interval"], "redpoll pings after activity_timeout_s without a message"
        )
    limits = _readable(plan, _table(fields.get("rate_limiting")), "rate_limiting.")
    if as_bool(limits.get("enabled")):
        shown = f"{limits.get('max_attempts', 60)} in {limits.get('decay_seconds', 60)} s"
        app.nothing("rate_limiting", shown, "redpoll limits client events (client_events_per_second) and subscribes")
    elif accepts != "none":
        app.unlimited_client_events("rate of client events")
    _public_url(plan, _table(fields.get("options")))


def _public_url(plan: Plan, options: dict[str, Any]) -> None:
    options = _readable(plan, {name: options.get(name) for name in ("host", "port", "scheme")}, "options.")
    host = options.get("host")
    # Without one of them the address would be a wrong one.
    if isinstance(host, str) and host and len(options) == 3 and "public_url" not in plan.server:
        scheme = options.get("scheme") or "https"
        url = f"{scheme}://{host}:{options.get('port') or (443 if scheme == 'https' else 80)}"
        plan.set("options", url, "public_url", url, "the address in the dashboard's examples")


def _reverb_server(plan: Plan, server: dict[str, Any]) -> None:
    for name in ("host", "port"):
        if server.get(name) is not None:
            plan.set(f"servers.{name}", server[name], name, server[name])
    if server.get("path"):
        plan.set("servers.path", server["path"], "path_prefix", "/" + str(server["path"]).strip("/"))
    tls = _table(_table(server.get("options")).get("tls"))
    _certificate(plan, tls, 8_080)
    scaling = _table(server.get("scaling"))
    if as_bool(scaling.get("enabled")):
        _redis(plan, _table(scaling.get("server")))


def _certificate(plan: Plan, tls: dict[str, Any], default_port: int) -> None:
    if tls.get("local_cert") is None:
        if tls.get("local_pk") is not None:
            plan.nothing("tls.local_pk", tls["local_pk"], "there is no certificate that can be read")
        return
    plan.set("tls.local_cert", tls["local_cert"], "tls_cert", str(tls["local_cert"]))
    if tls.get("local_pk") is not None:
        plan.set("tls.local_pk", tls["local_pk"], "tls_key", str(tls["local_pk"]))
    if tls.get("passphrase") is not None:
        plan.nothing("tls.passphrase", "…", "the key of tls_key must have no passphrase")
    port = plan.server.pop("port", default_port)
    plan.set("port", port, "tls_port", port, "the port is for TLS only if it has a certificate")
    plan.set("port", port, "port", 0, "redpoll has a port without TLS too; choose one, 0 takes any")


def _redis(plan: Plan, redis: dict[str, Any]) -> None:
    url = redis.get("url")
    if isinstance(url, str) and url:
        plan.set("scaling.server.url", url.rpartition("@")[2], "redis_url", url)
        return
    user, password = redis.get("username") or "", redis.get("password") or ""
    at = f"{quote(str(user), safe='')}:{quote(str(password), safe='')}@" if user or password else ""
    shown = f"redis://{redis.get('host') or '127.0.0.1'}:{redis.get('port') or 6379}/{redis.get('database') or 0}"
    plan.set("scaling.server", shown, "redis_url", shown.replace("//", f"//{at}"))


def read_laravel_websockets(document: Document) -> Plan:
    """Raises SourceError."""
    config = _config(document, _websockets_of_env)
    plan = Plan("laravel-websockets", document.unset)
    # Version 1 has one list of origins for all apps.
    shared_origins = config.get("allowed_origins")
    size_kb = config.get("max_request_size_in_kb", 250)
    for index, fields in enumerate(_list_of_apps(config.get("apps"), document)):
        _websockets_app(plan, fields, shared_origins, size_kb, f"{document.path}: app {index}")
    server = _server_fields(plan, config, _WEBSOCKETS_FIELDS)
    port = _table(server.get("dashboard")).get("port")
    if port is not None:
        plan.set("dashboard.port", port, "port", port)
    tls = _table(server.get("ssl"))
    _certificate(plan, tls, 6_001)
    if _table(server.get("replication")).get("mode") == "redis":
        plan.nothing("replication", "redis", "set redis_url to the address of that Redis")
    plan.unlimited_triggers("rate of publish requests")
    return plan


def _websockets_of_env(env: Mapping[str, str]) -> dict[str, Any]:
    def get(name: str) -> Any:
        return env_value(env.get(name, "")) or None

    app = {
        "id": get("PUSHER_APP_ID"),
        "key": get("PUSHER_APP_KEY"),
        "secret": get("PUSHER_APP_SECRET"),
        "name": get("APP_NAME"),
        "path": get("PUSHER_APP_PATH"),
        "enable_client_messages": False,
    }
    return {
        "apps": [app],
        "dashboard": {"port": get("LARAVEL_WEBSOCKETS_PORT")},
        "ssl": {
            "local_cert": get("LARAVEL_WEBSOCKETS_SSL_LOCAL_CERT"),
            "local_pk": get("LARAVEL_WEBSOCKETS_SSL_LOCAL_PK"),
            "passphrase": get("LARAVEL_WEBSOCKETS_SSL_PASSPHRASE"),
        },
        "replication": {"mode": get("WEBSOCKETS_REPLICATION_MODE")},
    }


def _websockets_app(plan: Plan, fields: dict[str, Any], shared_origins: Any, size_kb: Any, where: str) -> None:
    origins = fields.get("allowed_origins", shared_origins)
    fields = _readable(plan, {name: value for name, value in fields.items() if name != "allowed_origins"})
    app = plan.app(fields.get("id"), fields.get("key"), fields.get("secret"), fields.get("name"), where=where)
    app.limit("capacity", fields.get("capacity"), "max_connections")
    messages = fields.get("enable_client_messages")
    has_client_events = as_bool(messages)
    note = _NOT_ON_PUBLIC if has_client_events else ""
    app.set("enable_client_messages", messages or False, "client_events", has_client_events, note)
    if has_client_events:
        app.unlimited_client_events("rate of client events")
    _members(app)
    if isinstance(origins, str):
        # The package's tables have one text.
        origins = [part for part in origins.split(",") if part.strip()]
    _origins(app, origins or [])
    if not isinstance(size_kb, Expression):
        size = as_number(size_kb, "max_request_size_in_kb") * 1_024
        app.set("max_request_size_in_kb", size_kb, "max_data_bytes", size)
    if fields.get("path"):
        app.nothing("path", fields["path"], "clients may put any path before /app; path_prefix is that of the HTTP API")
    if fields.get("host"):
        app.nothing("host", fields["host"], "redpoll finds the app by its key, on every host name")
    if as_bool(fields.get("enable_statistics")):
        app.nothing("enable_statistics", True, "statistics are in the dashboard and at /metrics, always")


# -- shared


def _members(app: AppPlan) -> None:
    """Both packages take any number of members, with user_info of any size."""
    note = "raise it if you have more; the list of all members must fit into half of max_unsent_bytes"
    app.unlimited("members of a presence channel", "max_presence_members", _MEMBERS, note)
    app.unlimited("user_info of a member", "max_user_info_bytes", _USER_INFO_BYTES, "raise it if yours is larger")


def _config(document: Document, of_env: Any) -> dict[str, Any]:
    if document.kind == "env":
        return dict(of_env(document.env))
    data = document.data
    if document.kind == "json" and isinstance(data, list):
        # The table of a database, exported.
        data = {"apps": data}
    if not isinstance(data, dict):
        raise SourceError(f"{document.path} has no apps")
    return data


def _table(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _list_of_apps(apps: Any, document: Document) -> list[dict[str, Any]]:
    if isinstance(apps, dict):
        apps = list(apps.values())
    if not isinstance(apps, list) or not apps:
        shown = f": {apps.text}" if isinstance(apps, Expression) else ""
        raise SourceError(f"{document.path} has no list of apps that can be read{shown}")
    if not all(isinstance(app, dict) for app in apps):
        raise SourceError(f"{document.path}: an app must be an array with its id, key and secret")
    return apps


def _readable(plan: Plan, fields: dict[str, Any], path: str = "") -> dict[str, Any]:
    """The fields without those that only PHP can compute, which get a row. `path` is what comes before the names."""
    for name, value in fields.items():
        if isinstance(value, Expression):
            plan.nothing(f"{path}{name}", without_secrets(str(name), value.text), _COMPUTED)
    return {name: value for name, value in fields.items() if not isinstance(value, Expression)}


def _server_fields(plan: Plan, fields: dict[str, Any], names: Collection[str], path: str = "") -> dict[str, Any]:
    """Like `_readable`, for the fields with these names, and those of the tables in them."""
    readable = _readable(plan, {name: value for name, value in fields.items() if name in names}, path)
    return {
        name: _server_fields(plan, value, names, f"{path}{name}.") if isinstance(value, dict) else value
        for name, value in readable.items()
    }


def _origins(app: AppPlan, origins: Any) -> None:
    """Takes over the origins that can be read. Those that only PHP can compute get a row each."""
    entries = origins if isinstance(origins, list) else [origins]
    readable = [entry for entry in entries if not isinstance(entry, Expression)]
    note = _COMPUTED if readable else f"{_COMPUTED}; {ALL_HOSTS}"
    for entry in entries:
        if isinstance(entry, Expression):
            app.nothing("allowed_origins", entry.text, note)
    if readable or not entries:
        app.origins("allowed_origins", readable if isinstance(origins, list) else origins)
