"""The commands `redpoll grant …`, part of the table in control/commands/commands.py."""

from __future__ import annotations

import secrets
import time
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from redpoll.control.commands.context import Context
from redpoll.ipc.command_socket import CommandError
from redpoll.protocol.access import REVOKED, reading_grant
from redpoll.protocol.apps import App
from redpoll.protocol.auth import check_grant, sign_grant
from redpoll.protocol.claims import unsigned_grant, word_fault
from redpoll.protocol.errors import ClientError
from redpoll.protocol.grants import AppGrants, Grant, of_jti, of_user
from redpoll.store import audit, revoked_grants
from redpoll.store.audit import COMMAND_LINE

__all__ = ["COMMANDS"]


def _app(context: Context, app_id: str) -> App:
    app = context.records.apps.get(app_id)
    if app is None:
        raise CommandError(f"there is no app with the id {app_id}")
    return app


async def _mint(context: Context, args: dict[str, Any]) -> Any:
    app = _app(context, args["app"])
    key = app.signing_key()
    if key is None:
        raise CommandError(f"all keys of app {app.id} are disabled: redpoll key add {app.id} makes one")
    now_s = int(time.time())
    claims = {
        "sub": args["user"],
        "iat": now_s,
        "exp": now_s + int(args["lasts_s"]),
        "jti": secrets.token_hex(8),
        "channels": args["channels"],
        "may": ["subscribe", *args["may"]],
        "info": args["info"],
    }
    claims = {name: value for name, value in claims.items() if value is not None}
    auth = f"{key.key}:{sign_grant(key.secret, unsigned_grant(claims))}"
    try:
        check_grant(msgspec.structs.replace(app, grants=True), auth, now_s)
    except ClientError as error:
        raise CommandError(error.message) from None
    return {"auth": auth, "claims": claims, "accepted": app.grants}


async def _check(context: Context, args: dict[str, Any]) -> Any:
    app = _app(context, args["app"])
    try:
        grant = check_grant(app, args["auth"], time.time())
    except ClientError as error:
        return {"valid": False, "reason": error.message}
    channel, revoked, fault = args["channel"], await _revoked(context, app), None
    if channel is not None:
        try:
            reading_grant(app, revoked, channel, args["auth"])
        except ClientError as error:
            fault = error.message
    elif revoked.is_revoked(grant, None):
        fault = REVOKED
    return {"valid": fault is None, "reason": fault, **_shape(grant)}


async def _revoked(context: Context, app: App) -> AppGrants:
    if context.cluster is not None:
        return context.cluster.grants.table.of(app.id)
    grants = AppGrants(time.time)
    async with context.store.reading() as connection:
        for app_id, subject, at_s in await revoked_grants.everything(connection):
            if app_id == app.id:
                grants.revoke(subject, at_s)
    return grants


def _shape(grant: Grant) -> dict[str, Any]:
    return {
        "key": grant.key,
        "sub": grant.user_id,
        "jti": grant.id,
        "iat": int(grant.issued_at) or None,
        "exp": int(grant.expires_at),
        "channels": grant.patterns,
        "may": [name for name, has in (("subscribe", grant.subscribes), ("client_events", grant.client_events)) if has],
    }


async def _revoke(context: Context, args: dict[str, Any]) -> Any:
    app, jti, user = _app(context, args["app"]), args["jti"], args["user"]
    word = jti if user is None else user
    fault = word_fault(word)
    if fault is not None:
        raise CommandError(f"the {'jti' if user is None else 'user'} {fault}")
    subject = of_jti(word) if user is None else of_user(word)
    if context.cluster is not None:
        at_s, ended = await context.cluster.grants.revoke(app.id, subject, COMMAND_LINE)
        return {"revoked_at": at_s, "unsubscribed": ended}
    if context.store.shared:
        raise CommandError(
            "no server runs on this data folder, and those of other machines that share the record store wouldn't hear "
            "of this: run the command on a machine where a server runs"
        )
    # No server runs: the next one reads it before it admits clients.
    at_s = int(time.time())
    async with context.store.change() as connection:
        await revoked_grants.add(connection, [(app.id, subject, at_s)])
        await audit.add(connection, COMMAND_LINE, "grant revoke", app.id, subject)
    return {"revoked_at": at_s, "unsubscribed": 0}


COMMANDS: dict[str, Callable[[Context, dict[str, Any]], Awaitable[Any]]] = {
    # {app, user or null, channels, may, info, lasts_s} -> {auth, claims, accepted: grants are on}
    "grant mint": _mint,
    "grant check": _check,  # {app, auth, channel or null} -> {valid, reason, …the claims}
    "grant revoke": _revoke,  # {app, jti or null, user or null} -> {revoked_at, unsubscribed}
}
