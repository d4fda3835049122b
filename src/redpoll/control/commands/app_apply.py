"""The commands `app apply` and `app export`: the records as a file, and a file as the records.

`app apply` plans each app of the file (app_plan.py) and writes all of them in one transaction (app_write.py), or
nothing if there is a fault. It never deletes an app: with `prune`, those that the file doesn't name are switched off.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

import hiredis
import msgspec
import sqlalchemy as sa

from redpoll.cluster.directory import DirectoryWriter
from redpoll.cluster.redis.link import LinkDown
from redpoll.control.commands.app_plan import AppPlan, Wanted
from redpoll.control.commands.app_write import finish, plan_of, write
from redpoll.control.commands.context import Context
from redpoll.control.records.loaded_records import Edit
from redpoll.ipc.command_socket import CommandError
from redpoll.protocol.apps import SETTINGS, App, HistoryRule
from redpoll.protocol.tokens import Token
from redpoll.store import audit
from redpoll.store.audit import COMMAND_LINE

if TYPE_CHECKING:
    from redpoll.control.webhooks.webhooks import Webhooks

__all__ = ["COMMANDS"]

# Other requests are served after each of these many apps.
_APPS_AT_ONCE: Final = 50
_KNOWN_TO_WORKERS_WITHIN_S: Final = 15.0
_LOOK_EVERY_S: Final = 0.02


async def _apply(context: Context, args: dict[str, Any]) -> Any:
    webhooks = context.webhooks
    if webhooks is None:
        raise CommandError("the server is still starting; try again in a moment")
    wanted = msgspec.convert(args["apps"], list[Wanted])
    async with context.records.edit(COMMAND_LINE) as edit:
        now_s = time.time()
        options = {"prune": args["prune"], "dry_run": args["dry_run"]}
        plans = await _plans(context, webhooks, edit, wanted, now_s, options)
        faults = [
            {"where": f"apps[{number}].{where}" if where else f"apps[{number}]", "text": text}
            for number, plan in enumerate(plans)
            for where, text in plan.faults
        ]
        named = {app.id for app in wanted}
        off = [
            msgspec.structs.replace(app, enabled=False)
            for app_id, app in sorted(context.records.apps.items())
            if args["prune"] and app_id not in named and app.enabled
        ]
        changed = [plan for plan in plans if plan.changes or plan.known is None]
        writes = not faults and not args["dry_run"]
        if writes and (changed or off):
            await write(edit, changed, off, now_s)
            await audit.add_many(edit.connection, COMMAND_LINE, "apply", _audited(changed, off, args["file"]))
    if faults:
        return {"faults": faults, "apps": [], "made": []}
    if writes and (changed or off):
        await finish(context.records, webhooks, changed, now_s)
        await _until_workers_know(context)
    shown = [
        {"id": plan.app.id, "name": plan.app.name, "outcome": plan.outcome, "changes": plan.changes} for plan in plans
    ]
    shown += [{"id": app.id, "name": app.name, "outcome": "switched off", "changes": []} for app in off]
    made = [{"app": plan.app.id, **one} for plan in plans for one in plan.made] if writes else []
    return {"faults": [], "apps": shown, "made": made}


async def _plans(
    context: Context, webhooks: Webhooks, edit: Edit, wanted: Sequence[Wanted], now_s: float, options: dict[str, bool]
) -> list[AppPlan]:
    """`options`: those of plan_of."""
    tokens: dict[str | None, list[Token]] = {}
    for token in context.records.tokens.values():
        if token.revoked_at is None and (token.expires_at is None or now_s < token.expires_at):
            tokens.setdefault(token.app_id, []).append(token)
    plans = []
    for number, one in enumerate(wanted):
        if number % _APPS_AT_ONCE == 0:
            # PostgreSQL ends a transaction in which nothing is asked for 3 s (store/postgres.py).
            await edit.connection.execute(sa.select(1))
        plans.append(plan_of(context.records, webhooks, one, tokens.get(one.id, ()), now_s, **options))
    return plans


def _audited(changed: Sequence[AppPlan], off: Sequence[App], file: str) -> Iterator[tuple[str, str, str]]:
    for plan in changed:
        detail = "; ".join(plan.changes) if plan.known is not None else "created"
        yield plan.app.id, plan.app.name, f"{file}: {detail}"
    for app in off:
        yield app.id, app.name, f"{file}: not in the file: switched off"


async def _until_workers_know(context: Context) -> None:
    """Waits until the directory in Redis has the change, which the leading node may write: clients of a new app are
    refused for good before. Gives up after 15 s: the records are right, and the workers follow when Redis answers."""
    cluster = context.cluster
    if cluster is None:
        return
    writer = DirectoryWriter(cluster.link, cluster.keys)
    deadline = time.monotonic() + _KNOWN_TO_WORKERS_WITHIN_S
    while time.monotonic() < deadline:
        try:
            version = await writer.version()
        except (LinkDown, hiredis.ReplyError):
            return
        if version is not None and version.number >= context.records.version:
            return
        await asyncio.sleep(_LOOK_EVERY_S)


# -- export


async def _export(context: Context, _args: dict[str, Any]) -> Any:
    webhooks = context.webhooks
    if webhooks is None:
        raise CommandError("the server is still starting; try again in a moment")
    now_s = time.time()
    tokens: dict[str | None, dict[str, Token]] = {}
    for token in context.records.tokens.values():
        if token.revoked_at is None and (token.expires_at is None or now_s < token.expires_at):
            # A file names each token once; the newest of a name stands for it.
            tokens.setdefault(token.app_id, {})[token.name] = token
    return [
        _exported(app, webhooks, tokens.get(app_id, {}).values())
        for app_id, app in sorted(context.records.apps.items())
    ]


def _exported(app: App, webhooks: Webhooks, tokens: Iterable[Token]) -> dict[str, Any]:
    """The app as the file has it. What has its default is left out."""
    shown: dict[str, Any] = {"id": app.id, "name": app.name}
    if len(app.keys) == 1 and app.keys[0].enabled:
        shown |= {"key": app.keys[0].key, "secret": app.keys[0].secret}
    else:
        shown["keys"] = [
            {"key": key.key, "secret": key.secret, **({} if key.enabled else {"enabled": False})} for key in app.keys
        ]
    settings = {name: getattr(app, name) for name, row in SETTINGS.items() if getattr(app, name) != row.default}
    endpoints = [
        {
            **({"pull": True} if one.pulled else {"url": one.url}),
            "events": one.events,
            "format": one.format,
            "secret": one.secret,
            **({"pin": one.pin} if one.pin else {}),
            **({"channels": one.channels} if one.channels else {}),
            **({"client_events": one.client_events} if one.client_events else {}),
            **({"batch": True} if one.batch else {}),
            **({} if one.enabled else {"enabled": False}),
        }
        for one in webhooks.endpoints.of_app(app.id)
    ]
    lists: dict[str, Any] = {
        "settings": settings,
        "history": [_exported_rule(rule) for rule in app.history],
        "webhooks": endpoints,
        "tokens": [{"name": token.name, "scopes": token.scopes, **_expiry(token.expires_at)} for token in tokens],
    }
    return shown | {name: value for name, value in lists.items() if value}


def _exported_rule(rule: HistoryRule) -> dict[str, Any]:
    fields = ("seconds", "replay", "replay_seconds", "client_events", "max_rate", "latest", "join", "by")
    others = {name: getattr(rule, name) for name in fields if getattr(rule, name)}
    return {"prefix" if rule.prefix else "channel": rule.name, "keep": rule.keep, **others}


def _expiry(expires_at: float | None) -> dict[str, str]:
    return {} if expires_at is None else {"expires": datetime.fromtimestamp(int(expires_at), UTC).isoformat()}


COMMANDS: Final[dict[str, Callable[[Context, dict[str, Any]], Awaitable[Any]]]] = {
    # {apps: [Wanted], dry_run, prune, file: for the audit log}
    # -> {faults: [{where, text}], apps: [{id, name, outcome, changes}], made: [{app, what, name, secret}]}
    "app apply": _apply,
    "app export": _export,  # {} -> [app as in a file]
}
