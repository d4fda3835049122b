"""`redpoll import`: takes over the apps and settings of another Pusher-compatible server."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from redpoll.cli.common import print_json, refuse, safe
from redpoll.cli.execute import ALL_APPS_WITHIN_S, run
from redpoll.cli.records_command import records_command
from redpoll.config import config

if TYPE_CHECKING:
    from redpoll.importing.plan import Plan, Row

__all__ = ["import_"]

_SOURCES = ("soketi", "reverb", "laravel-websockets", "pusher")
_MAX_VALUE_CHARS = 48


@click.command("import")
@click.argument("source", type=click.Choice(_SOURCES))
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False))
@click.option(
    "--env",
    "env_path",
    type=click.Path(path_type=Path, dir_okay=False),
    help="What env() reads in a PHP file. Default: the .env of the Laravel application that the file is in.",
)
@click.option("--dry-run", is_flag=True, help="Check everything and show what would be done, but change nothing.")
@records_command
def import_(
    source: str, file: Path, env_path: Path | None, dry_run: bool, settings: config.Settings, as_json: bool
) -> None:
    """Take over apps and settings of another server, with the same ids, keys and secrets.

    FILE is soketi's JSON configuration, its table of apps as a JSON array, or a file with its SOKETI_… variables; a
    Laravel application's .env, config/reverb.php or config/websockets.php; the lines of the page "App Keys" at Pusher.

    Prints each thing that was found, what it becomes here, and why something has no counterpart. Settings of the server
    are printed as lines for redpoll.toml. An import may be repeated; it deletes nothing.

    \b
    Examples:
      redpoll import soketi /etc/soketi.json --dry-run
      redpoll import reverb /srv/app/.env
      redpoll import laravel-websockets /srv/app/config/websockets.php --env /srv/app/.env
      redpoll import pusher app-keys.txt --json
    """
    from redpoll.importing.plan import SourceError

    try:
        plan = _plan(source, file, env_path)
    except SourceError as error:
        refuse([error])
    apps = [
        {
            "id": app.id,
            "key": app.key,
            "secret": app.secret,
            "name": app.name,
            "settings": app.settings,
            "defaults": app.defaults,
            "webhooks": app.webhooks,
        }
        for app in plan.apps
    ]
    outcomes = run(settings, "app import", {"apps": apps, "dry_run": dry_run}, timeout_s=ALL_APPS_WITHIN_S)
    if as_json:
        rows = [
            {
                "app": row.app or None,
                "theirs": row.theirs,
                "value": row.value,
                "ours": row.ours or None,
                "note": row.note,
            }
            for row in plan.rows
        ]
        print_json({"source": source, "dry_run": dry_run, "apps": outcomes, "rows": rows, "server": plan.server})
        return
    _print(plan, outcomes, dry_run)


def _plan(source: str, file: Path, env_path: Path | None) -> Plan:
    from redpoll.importing import documents, laravel, pusher, soketi

    read = {
        "soketi": soketi.read,
        "reverb": laravel.read_reverb,
        "laravel-websockets": laravel.read_laravel_websockets,
        "pusher": pusher.read,
    }[source]
    return read(documents.load(file, env_path))


def _print(plan: Plan, outcomes: list[dict[str, Any]], dry_run: bool) -> None:
    for outcome in outcomes:
        would_be = "would be " if dry_run and outcome["outcome"] != "unchanged" else ""
        click.echo(f"app {outcome['id']} ({safe(outcome['name'])}): {would_be}{outcome['outcome']}")
        _print_app(plan, outcome)
        click.echo()
    if plan.server:
        click.echo("settings of the server: write these lines into redpoll.toml")
        for name, value in plan.server.items():
            click.echo(f"  {name} = {_toml(value)}")
        click.echo()
        _print_table(row for row in plan.rows if not row.app and row.ours)
        click.echo()
    without = [row for row in plan.rows if not row.ours]
    if without:
        click.echo("not taken over")
        _print_table(without)
    if dry_run:
        click.echo("\nThis was a dry run: nothing was changed.")


def _print_app(plan: Plan, outcome: dict[str, Any]) -> None:
    """Prints what was taken over, then the webhooks that weren't."""
    rows = [row for row in plan.rows if row.app == outcome["id"] and row.ours]
    not_done = []
    for row in [row for row in rows if row.ours.partition("=")[0] in outcome["left_out"]]:
        rows.remove(row)
        not_done.append(f"NOT set: {row.ours}: a list of such members doesn't fit into half of max_unsent_bytes")
    # Both in the order of the plan.
    for row, webhook in zip(
        [row for row in rows if row.theirs.startswith("webhook ")], outcome["webhooks"], strict=True
    ):
        if webhook["fault"]:
            rows.remove(row)
            not_done.append(f"NOT created: {safe(row.theirs)}: {webhook['fault']}")
        elif webhook["differs"]:
            rows.remove(row)
            not_done.append(f"NOT changed: {safe(row.theirs)} exists, but differs: {safe(webhook['differs'])}")
    _print_table(rows)
    for line in not_done:
        click.echo(f"  {line}")


def _toml(value: str | int | float | bool) -> str:
    from redpoll.text import json_text

    # JSON's strings, numbers and booleans are valid TOML.
    return json_text.compact(value).decode()


def _print_table(rows: Iterable[Row]) -> None:
    """Prints what was found, what it becomes, and the notes, in columns."""
    lines: list[Sequence[str]] = []
    for row in rows:
        theirs = safe(f"{row.theirs}: {_text(row.value)}", _MAX_VALUE_CHARS)
        lines.append((theirs, safe(row.ours) if row.ours else "–", safe(row.note)))
    widths = [max((len(line[column]) for line in lines), default=0) for column in (0, 1)]
    for theirs, ours, note in lines:
        click.echo(f"  {theirs:<{widths[0]}}  {ours:<{widths[1]}}  {note}".rstrip())


def _text(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return str(value).lower()
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)
