"""The command `app import`: creates or updates the apps of a plan (redpoll/importing), with their webhooks.

All apps are checked before the first is written. Webhooks that can't be created are reported and don't stop the import,
because clients don't need them. An endpoint that exists stays as it is, because its receiver may depend on it; where it
isn't what the plan says, that is reported. Repeating an import changes nothing.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Final

import msgspec

from redpoll.control.commands.context import Context
from redpoll.control.records.records import RecordError, Records
from redpoll.ipc.command_socket import CommandError
from redpoll.protocol.apps import App, Key, parse_setting
from redpoll.store.audit import COMMAND_LINE
from redpoll.store.webhooks import Endpoint

__all__ = ["COMMANDS"]

# Receivers of other servers' webhooks verify Pusher's signature.
_FORMAT: Final = "pusher"
# The sizes of a member list, for which the server's max_unsent_bytes may have no room.
_SIZES: Final = ("max_presence_members", "max_user_info_bytes")


class _Webhook(msgspec.Struct, forbid_unknown_fields=True):
    url: str
    events: list[str]
    channels: list[str]
    batch: bool = False


class _Planned(msgspec.Struct, forbid_unknown_fields=True):
    id: str
    key: str
    secret: str
    name: str
    settings: dict[str, str]
    webhooks: list[_Webhook]
    defaults: dict[str, str] = {}


async def _import(context: Context, args: dict[str, Any]) -> Any:
    planned = msgspec.convert(args["apps"], list[_Planned])
    fitting, faults = [], []
    for app in planned:
        try:
            fitting.append(_fitting(context.records, app))
        except (RecordError, ValueError) as error:
            faults.append(f"app {app.id}: {error}")
    if faults:
        raise CommandError("\n".join(faults))
    outcomes = [await _import_app(context, app, args["dry_run"]) for app in fitting]
    for outcome, before, after in zip(outcomes, planned, fitting, strict=True):
        outcome["left_out"] = sorted(before.defaults.keys() - after.defaults.keys())
    return outcomes


def _fitting(records: Records, planned: _Planned) -> _Planned:
    """The app without the sizes that only a new one gets, if there is no room for them. Raises RecordError or
    ValueError."""
    known = records.apps.get(planned.id)
    try:
        records.check_import(_record(known, planned))
    except RecordError:
        defaults = {name: text for name, text in planned.defaults.items() if name not in _SIZES}
        planned = msgspec.structs.replace(planned, defaults=defaults)
        records.check_import(_record(known, planned))
    return planned


def _record(known: App | None, planned: _Planned) -> App:
    """The app as it will be: an existing one keeps its name, its other keys and the settings that aren't planned."""
    texts = planned.settings if known is not None else {**planned.defaults, **planned.settings}
    values = {name: parse_setting(name, text) for name, text in texts.items()}
    key = Key(key=planned.key, secret=planned.secret)
    if known is None:
        return App(id=planned.id, name=planned.name, keys=(key,), **values)  # type: ignore[arg-type]
    keys = known.keys if key in known.keys else (*(own for own in known.keys if own.key != key.key), key)
    return msgspec.structs.replace(known, keys=keys, **values)


async def _import_app(context: Context, planned: _Planned, dry_run: bool) -> dict[str, Any]:
    known = context.records.apps.get(planned.id)
    record = _record(known, planned)
    outcome = "created" if known is None else "unchanged" if record == known else "updated"
    if not dry_run and outcome != "unchanged":
        await context.records.import_app(planned.id, lambda known: _record(known, planned), by=COMMAND_LINE)
    webhooks = [await _import_webhook(context, planned.id, webhook, dry_run) for webhook in planned.webhooks]
    return {"id": planned.id, "name": record.name, "outcome": outcome, "webhooks": webhooks}


async def _import_webhook(context: Context, app_id: str, planned: _Webhook, dry_run: bool) -> dict[str, Any]:
    webhooks = context.webhooks
    if webhooks is None:
        raise CommandError("the server is still starting; try again in a moment")
    shown: dict[str, Any] = {"url": planned.url, "fault": None, "differs": None}
    wanted = (planned.url, sorted(planned.events), sorted(planned.channels))
    with_url = [own for own in webhooks.endpoints.of_app(app_id) if not own.pulled]
    same = [own for own in with_url if (own.url, sorted(own.events), sorted(own.channels)) == wanted]
    if same:
        nearest = min((_differences(own, planned) for own in same), key=len)
        return {**shown, "outcome": "differs" if nearest else "unchanged", "differs": ", ".join(nearest) or None}
    try:
        fault = webhooks.endpoints.fault_of(planned.url, planned.events, _FORMAT, planned.channels)
        if fault is None and not dry_run:
            await webhooks.endpoints.create(
                app_id,
                planned.url,
                events=planned.events,
                format=_FORMAT,
                channels=planned.channels,
                batch=planned.batch,
                by=COMMAND_LINE,
            )
    except RecordError as error:
        fault = str(error)
    return {**shown, "outcome": "refused" if fault else "created", "fault": fault}


def _differences(own: Endpoint, planned: _Webhook) -> list[str]:
    """What the endpoint is, and the planned one would not be."""
    words = []
    if own.format != _FORMAT:
        words.append(f"format {own.format}")
    if own.batch != planned.batch:
        words.append("batched" if own.batch else "not batched")
    if own.client_events:
        words.append(f"only the client events {', '.join(own.client_events)}")
    if not own.enabled:
        words.append("disabled")
    return words


COMMANDS: Final[dict[str, Callable[[Context, dict[str, Any]], Awaitable[Any]]]] = {
    # {apps: [{id, key, secret, name, settings, defaults, webhooks}], dry_run} ->
    # [{id, name, outcome, left_out, webhooks}]
    "app import": _import,
}
