"""The routes of the management API, with their descriptions in the OpenAPI document."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Final

from redpoll.control.http.router import API_PREFIX, About, Access, Place, Route
from redpoll.control.management.apps import AppManagement
from redpoll.control.management.bodies import (
    AppChange,
    AppList,
    CreatedApp,
    CreatedToken,
    KeyChange,
    KeyList,
    ManagedApp,
    ManagedKey,
    ManagedRule,
    ManagedToken,
    ManagedWebhook,
    NewApp,
    NewKey,
    NewRule,
    NewToken,
    NewWebhook,
    RuleChange,
    RuleList,
    TokenList,
    WebhookChange,
    WebhookList,
)
from redpoll.control.management.credentials import KeyManagement, TokenManagement
from redpoll.control.management.managed import refusals
from redpoll.control.management.receivers import RuleManagement, WebhookManagement
from redpoll.protocol.tokens import MANAGE

if TYPE_CHECKING:
    from redpoll.control.management.managed import Managed
    from redpoll.control.records.spreading import Spreading

__all__ = ["management_routes"]

_APPS: Final = f"{API_PREFIX}/apps"
_APP: Final = f"{_APPS}/{{app_id}}"


def management_routes(managed: Managed, given_id: str = "", spreading: Spreading | None = None) -> list[Route]:
    """`given_id`: see AppManagement. `spreading` None: the routes aren't served."""
    route = partial(_route, spreading)
    apps = AppManagement(managed, given_id)
    keys, tokens = KeyManagement(managed), TokenManagement(managed)
    rules, webhooks = RuleManagement(managed), WebhookManagement(managed)
    one_key, one_token = _APP + "/keys/{key}", _APP + "/tokens/{token_id}"
    one_rule, one_webhook = _APP + "/history_rules/{rule_id}", _APP + "/webhooks/{webhook_id}"
    hooks = _APP + "/webhooks"
    return [
        route("GET", _APPS, "list_apps", apps.list, "List apps by id.", AppList, query=("apps_limit", "apps_cursor")),
        route("POST", _APPS, "create_app", apps.create, "Create an app with all it needs.", CreatedApp, NewApp),
        route("GET", _APP, "show_app", apps.show, "Show an app.", ManagedApp),
        route("PATCH", _APP, "change_app", apps.change, "Change name and settings.", ManagedApp, AppChange),
        route("DELETE", _APP, "delete_app", apps.delete, "Delete an app and all that belongs to it.", None),
        route("GET", _APP + "/keys", "list_keys", keys.list, "List the keys of an app.", KeyList),
        route("POST", _APP + "/keys", "add_key", keys.add, "Add a key.", ManagedKey, NewKey),
        route("GET", one_key, "show_key", keys.show, "Show a key.", ManagedKey),
        route("PATCH", one_key, "change_key", keys.change, "Enable or disable a key.", ManagedKey, KeyChange),
        route("DELETE", one_key, "delete_key", keys.delete, "Delete a key.", None),
        route("GET", _APP + "/history_rules", "list_rules", rules.list, "List the history rules.", RuleList),
        route("POST", _APP + "/history_rules", "add_rule", rules.add, "Add a history rule.", ManagedRule, NewRule),
        route("GET", one_rule, "show_rule", rules.show, "Show a history rule.", ManagedRule),
        route("PATCH", one_rule, "change_rule", rules.change, "Change a history rule.", ManagedRule, RuleChange),
        route("DELETE", one_rule, "delete_rule", rules.delete, "Remove a history rule.", None),
        route("GET", hooks, "list_webhooks", webhooks.list, "List the webhooks.", WebhookList),
        route("POST", hooks, "create_webhook", webhooks.create, "Create a webhook.", ManagedWebhook, NewWebhook),
        route("GET", one_webhook, "show_webhook", webhooks.show, "Show a webhook.", ManagedWebhook),
        route(
            "PATCH", one_webhook, "change_webhook", webhooks.change, "Change a webhook.", ManagedWebhook, WebhookChange
        ),
        route(
            "POST",
            one_webhook + "/rotate",
            "rotate_webhook",
            webhooks.rotate,
            "Give a webhook a new secret. Deliveries are signed with the old one too, for a day.",
            ManagedWebhook,
            conditional=True,
            success=200,
        ),
        route("DELETE", one_webhook, "delete_webhook", webhooks.delete, "Delete a webhook.", None),
        route("GET", _APP + "/tokens", "list_tokens", tokens.list, "List the tokens of an app.", TokenList),
        route("POST", _APP + "/tokens", "create_token", tokens.create, "Create a token.", CreatedToken, NewToken),
        route("GET", one_token, "show_token", tokens.show, "Show a token.", ManagedToken),
        route("DELETE", one_token, "revoke_token", tokens.revoke, "Revoke a token.", None),
    ]


def _route(
    spreading: Spreading | None,
    method: str,
    pattern: str,
    name: str,
    handler: Any,
    summary: str,
    answer: type | None,
    body: type | None = None,
    *,
    query: tuple[str, ...] = (),
    conditional: bool = False,
    success: int = 0,
) -> Route:
    conditional = conditional or method in ("PATCH", "DELETE")
    more: tuple[str, ...] = ("unknown_app",) if "{app_id}" in pattern else ()
    if query:
        more += ("invalid_cursor",)
    if method != "GET":
        more += ("conflict", "precondition_failed")
    if conditional:
        more += ("precondition_required",)
    about = About(
        summary,
        answer,
        body=body,
        query=query,
        faults=more,
        success=success or {"POST": 201, "DELETE": 204}.get(method, 200),
        tagged=(method, pattern) not in (("GET", _APPS), ("DELETE", _APP)),
        conditional=conditional,
        patch=method == "PATCH",
    )
    return Route(
        method,
        pattern,
        f"manage_{name}",
        refusals(handler, None if method == "GET" else spreading),
        Access.MANAGE,
        Place.MANAGEMENT,
        scope=MANAGE,
        about=about,
    )
