"""Whole apps in one transaction: written as `redpoll apply` and the management API plan them, created, deleted."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Final

import msgspec

from redpoll.control.commands.app_plan import AppPlan, Wanted
from redpoll.control.commands.context import Context
from redpoll.control.records.loaded_records import Edit
from redpoll.control.records.records import RecordConflict, RecordError, Records
from redpoll.control.webhooks.endpoints import deleted
from redpoll.ipc.command_socket import CommandError
from redpoll.protocol.apps import App
from redpoll.protocol.tokens import Token
from redpoll.store import apps as app_rows
from redpoll.store import tokens as token_rows
from redpoll.store import webhooks as endpoint_rows
from redpoll.store.audit import COMMAND_LINE, Actor
from redpoll.store.store import all_follow_from

if TYPE_CHECKING:
    from redpoll.control.webhooks.webhooks import Webhooks

__all__ = ["COMMANDS", "create_app", "delete_app", "finish", "plan_of", "write"]

# Every worker has all app records in memory.
_MAX_APPS: Final = 100_000


def plan_of(
    records: Records,
    webhooks: Webhooks,
    wanted: Wanted,
    tokens: Sequence[Token],
    now_s: float,
    *,
    prune: bool = False,
    dry_run: bool = False,
) -> AppPlan:
    """What `wanted` changes in the app of its id, with the faults that the record store's rules find. `tokens` are the
    valid ones of the app."""
    endpoints = webhooks.endpoints
    plan = AppPlan(
        wanted,
        records.apps.get(wanted.id),
        endpoints.of_app(wanted.id),
        tokens,
        now_s,
        prune,
        lambda webhook: endpoints.fault_of(
            webhook.url, webhook.events, webhook.format, webhook.channels, webhook.client_events, webhook.batch
        ),
        dry_run,
    )
    try:
        records.check_import(plan.app)
    except RecordError as error:
        plan.faults.append(("", str(error)))
    return plan


async def write(edit: Edit, changed: Sequence[AppPlan], off: Sequence[App], now_s: float) -> None:
    """Writes the plans, and the apps `off` without their keys, in the transaction of the edit. The caller adds the rows
    of the audit log."""
    connection = edit.connection
    await app_rows.add_many(connection, [plan.app for plan in changed if plan.known is None])
    for plan in changed:
        if plan.known is None:
            continue
        if msgspec.structs.replace(plan.app, keys=plan.known.keys, hooks=plan.known.hooks) != plan.known:
            await app_rows.update(connection, plan.app)
        for key in plan.added_keys:
            await app_rows.add_key(connection, plan.app.id, key, given=False)
        for key in plan.changed_keys:
            await app_rows.set_secret(connection, key.key, key.secret)
            await app_rows.enable_key(connection, key.key, key.enabled)
    for app in off:
        await app_rows.update(connection, app)
    added = [endpoint for plan in changed for endpoint in plan.added_endpoints]
    replaced = [endpoint for plan in changed for endpoint in plan.changed_endpoints]
    await endpoint_rows.add_many(connection, added)
    for endpoint in replaced:
        await endpoint_rows.put(connection, endpoint)
    await token_rows.add(connection, *(token for plan in changed for token in plan.added_tokens))
    await token_rows.revoke(connection, [token.id for plan in changed for token in plan.revoked_tokens], now_s)
    edit.apps = {app.id: app for app in (*(plan.app for plan in changed if plan.app != plan.known), *off)}
    edit.endpoints = (*added, *replaced)
    tokens = (token for plan in changed for token in (*plan.added_tokens, *plan.revoked_tokens))
    edit.tokens = {token.id: token.app_id for token in tokens}


async def finish(records: Records, webhooks: Webhooks, changed: Iterable[AppPlan], now_s: float) -> None:
    """After the commit: memory has the tokens, and deliveries of deleted endpoints are discarded."""
    plans = list(changed)
    added = [token for plan in plans for token in plan.added_tokens]
    revoked = [token for plan in plans for token in plan.revoked_tokens]
    records.take_tokens(added, revoked, now_s)
    for endpoint in (endpoint for plan in plans for endpoint in plan.changed_endpoints):
        if endpoint.deleted_at is not None:
            # If the process is killed here, tidying.py discards them.
            await webhooks.endpoints.discard_waiting(endpoint.id)


async def create_app(records: Records, webhooks: Webhooks, wanted: Wanted, by: Actor) -> AppPlan:
    """Creates an app with all that `wanted` names, and returns the plan with the secrets that were made. Without an id
    it gets 7 digits. Raises RecordError, which names the first fault; RecordConflict if there is such an app or key."""
    async with records.edit(by) as edit:
        now_s = time.time()
        if len(records.apps) >= _MAX_APPS:
            raise RecordConflict(f"there are {len(records.apps)} apps, the most that there may be")
        if wanted.id in records.apps:
            raise RecordConflict(f"there is an app with the id {wanted.id} already")
        if not wanted.id:
            wanted = msgspec.structs.replace(wanted, id=_new_id(records))
        taken = [key.key for key in wanted.keys if key.key in records.by_key]
        if taken:
            # Whose it is stays unsaid: a platform may pass this text to a customer.
            raise RecordConflict(f"the key {taken[0]} belongs to another app")
        plan = plan_of(records, webhooks, wanted, (), now_s)
        if plan.faults:
            where, text = plan.faults[0]
            # The file of `redpoll apply` has the shorter word.
            where = where.replace("history", "history_rules", 1)
            raise RecordError(f"{where}: {text}" if where else text)
        await write(edit, [plan], (), now_s)
        await edit.note("app create", plan.app.id, plan.app.name, "; ".join(plan.changes))
    await finish(records, webhooks, [plan], now_s)
    return plan


def _new_id(records: Records) -> str:
    while (app_id := str(secrets.randbelow(9_000_000) + 1_000_000)) in records.apps:
        pass
    return app_id


async def delete_app(records: Records, webhooks: Webhooks, app_id: str, by: Actor, given_id: str = "") -> App:
    """Deletes an app with its keys, tokens, settings, history rules and webhooks, in one transaction. Workers then
    close its connections. `given_id` is the app of the settings (`app_id`), which the next start would create again.
    Raises RecordError."""
    async with records.edit(by) as edit:
        app = records.apps.get(app_id)
        if app is None:
            raise RecordError(f"there is no app with the id {app_id}")
        if app_id == given_id:
            raise RecordConflict(
                f"app {app_id} is the one of the setting app_id (REDPOLL_APP_ID), and the next start would create it "
                "again: remove that setting first"
            )
        now_s = time.time()
        gone = [deleted(endpoint, now_s) for endpoint in webhooks.endpoints.of_app(app_id)]
        # Also those that were deleted before it, which have deliveries.
        endpoint_ids = webhooks.endpoints.ids_of(app_id)
        tokens = [token for token in records.tokens_of(app_id) if token.revoked_at is None]
        connection = edit.connection
        for endpoint in gone:
            await endpoint_rows.put(connection, endpoint)
        await app_rows.forget_deleted(connection, all_follow_from(records.known))
        await app_rows.mark_deleted(connection, app_id, now_s)
        edit.deleted = (app_id,)
        edit.endpoints = gone
        detail = f"{len(app.keys)} keys, {len(app.history)} history rules, {len(gone)} webhooks, {len(tokens)} tokens"
        await edit.note("app delete", app_id, app.name, detail)
    for endpoint_id in endpoint_ids:
        # If the process is killed here, tidying.py removes them.
        await webhooks.endpoints.remove_deliveries(endpoint_id)
    return app


async def _delete(context: Context, args: dict[str, Any]) -> Any:
    webhooks = context.webhooks
    if webhooks is None:
        raise CommandError("the server is still starting; try again in a moment")
    app = await delete_app(context.records, webhooks, args["id"], COMMAND_LINE, context.settings.app_id)
    return {"id": app.id, "name": app.name}


COMMANDS: Final = {
    "app delete": _delete,  # {id} -> {id, name}
}
