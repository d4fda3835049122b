"""Hosted Pusher: the lines of the dashboard's page "App Keys", an environment file, or JSON.

Only the credentials are in these files. The other settings are on the dashboard's page "App Settings", so each is
listed with the command that sets it here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final
from urllib.parse import unquote, urlsplit

from redpoll.importing.documents import Document
from redpoll.importing.plan import Plan, SourceError

__all__ = ["read"]

_NAMES: Final = {
    "id": ("PUSHER_APP_ID", "app_id", "appId", "APP_ID", "id"),
    "key": ("PUSHER_APP_KEY", "PUSHER_KEY", "key", "app_key", "APP_KEY"),
    "secret": ("PUSHER_APP_SECRET", "PUSHER_SECRET", "secret", "app_secret", "APP_SECRET"),
    "name": ("name",),
    "cluster": ("PUSHER_APP_CLUSTER", "PUSHER_CLUSTER", "cluster"),
}
_ON_THEIR_PAGE: Final = (
    ("Enable client events", "client_events=false if it is off"),
    ("Enable subscription counting", "subscription_count=true if it is on"),
    ("Enable authorized connections", "user_authentication_timeout_s=SECONDS if it is on"),
    ("Force TLS", "tls_required=true if it is on"),
)


def read(document: Document) -> Plan:
    """Raises SourceError."""
    plan = Plan("pusher")
    content = document.data if document.kind == "json" else document.env
    apps = content if isinstance(content, list) else [content]
    for index, fields in enumerate(apps):
        if not isinstance(fields, dict):
            raise SourceError(f"{document.path}: app {index} is not an object with app_id, key and secret")
        _app(plan, fields, document.path if len(apps) == 1 else f"{document.path}: app {index}")
    plan.nothing("daily messages, connections", "your plan", "no limit here; redpoll app set ID max_connections=COUNT")
    plan.nothing("Webhooks", "on their dashboard", "redpoll webhook create ID URL --format pusher")
    plan.unlimited_triggers("rate of publish requests")
    return plan


def _app(plan: Plan, fields: Mapping[str, Any], where: str) -> None:
    values = {part: next((fields[name] for name in names if fields.get(name)), None) for part, names in _NAMES.items()}
    url = fields.get("PUSHER_URL")
    if url and not (values["id"] and values["key"] and values["secret"]):
        try:
            parts = urlsplit(str(url))
        except ValueError:
            raise SourceError(f"{where}: PUSHER_URL is no address") from None
        values |= {
            "id": parts.path.rpartition("/")[2],
            "key": unquote(parts.username or ""),
            "secret": unquote(parts.password or ""),
        }
    app = plan.app(values["id"], values["key"], values["secret"], values["name"], where=where)
    if values["cluster"]:
        app.nothing("cluster", values["cluster"], "clients name redpoll's host instead; pusher-js wants some cluster")
    for theirs, ours in _ON_THEIR_PAGE:
        app.nothing(theirs, "on their dashboard", f"redpoll app set {app.id} {ours}")
