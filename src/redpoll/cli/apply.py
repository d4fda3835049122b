"""`redpoll apply` and `redpoll export`: apps as a file."""

from __future__ import annotations

import getpass
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from redpoll.cli.common import print_json, refuse, safe
from redpoll.cli.execute import ALL_APPS_WITHIN_S, run
from redpoll.cli.records_command import records_command
from redpoll.config import config

if TYPE_CHECKING:
    from redpoll.importing.apps_file import AppsFile

__all__ = ["apply", "export"]

_FORMATS: Final = ("toml", "yaml", "json")
_LISTS: Final = ("keys", "history", "webhooks", "tokens")


@click.command()
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False, allow_dash=True))
@click.option("--dry-run", is_flag=True, help="Check everything and show what would be done, but change nothing.")
@click.option(
    "--prune",
    is_flag=True,
    help="Also undo what FILE doesn't name: switch off other apps, disable their other keys, remove other rules, "
    "webhooks and tokens, and give other settings their defaults.",
)
@click.option(
    "--format", "kind", type=click.Choice(_FORMATS), help="Default: by the ending of FILE, or its first line."
)
@records_command
def apply(file: Path, dry_run: bool, prune: bool, kind: str | None, settings: config.Settings, as_json: bool) -> None:
    """Make the apps equal to FILE: their keys, settings, history rules, webhooks and tokens.

    FILE is TOML, YAML or JSON; - reads standard input. All of it is checked, then all of it is changed in one
    transaction. Applying a file again changes nothing. `redpoll export` prints such a file.

    A secret is written into the file, or as env:NAME or file:PATH; text:TEXT is a secret that begins like one of these.
    Secrets and tokens that the file leaves out are made and printed once.

    \b
    Examples:
      redpoll apply apps.toml --dry-run
      redpoll apply apps.toml --prune
      redpoll apply - --format json --json
    """
    parsed = _parsed(file, kind)
    if parsed.faults:
        refuse([parsed.sentence(fault) for fault in parsed.faults])
    if prune and not parsed.apps and not dry_run:
        # More often a template that went wrong than what is meant.
        refuse(
            [
                f"{parsed.name} has no app, so --prune would switch off all apps; --dry-run lists them. "
                "If that is meant, switch each off: redpoll app set ID enabled=false"
            ]
        )
    name = f"{parsed.name} by {os.environ.get('SUDO_USER') or _user()}"
    args = {"apps": parsed.apps, "dry_run": dry_run, "prune": prune, "file": name}
    result = run(settings, "app apply", args, timeout_s=ALL_APPS_WITHIN_S)
    if result["faults"]:
        from redpoll.importing.file_formats import Fault

        # `keys[0]` of the command is `key` in the file, where the app has one.
        refuse([parsed.sentence(Fault(fault["where"], fault["text"])) for fault in result["faults"]])
    if as_json:
        print_json({"file": parsed.name, "dry_run": dry_run, "apps": result["apps"], "made": result["made"]})
    else:
        _print(result, dry_run)


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        # A container may have a user without a name.
        return f"user {os.getuid()}"


def _parsed(file: Path, kind: str | None) -> AppsFile:
    from redpoll.importing import apps_file
    from redpoll.importing.plan import SourceError

    is_input = str(file) == "-"
    name = "standard input" if is_input else str(file)
    try:
        if is_input:
            content = sys.stdin.buffer.read(apps_file.MAX_BYTES + 1)
        else:
            with file.open("rb") as opened:
                content = opened.read(apps_file.MAX_BYTES + 1)
    except OSError as error:
        refuse([f"{name} can't be read: {error.strerror}"])

    def secret_of(text: str) -> str:
        return apps_file.resolve_secret(text, os.environ)

    try:
        return apps_file.parse(name, content, kind, secret_of, time.time())
    except SourceError as error:
        refuse([error])


def _print(result: dict[str, Any], dry_run: bool) -> None:
    unchanged = 0
    for app in result["apps"]:
        if app["outcome"] == "unchanged":
            unchanged += 1
            continue
        would_be = "would be " if dry_run else ""
        click.echo(f"app {app['id']} ({safe(app['name'])}): {would_be}{app['outcome']}")
        for change in app["changes"]:
            click.echo(f"  {safe(change)}")
    if unchanged:
        click.echo(f"{unchanged} {'app' if unchanged == 1 else 'apps'} unchanged")
    if result["made"]:
        click.echo("\nmade, and shown only now:")
        for one in result["made"]:
            click.echo(f"  app {one['app']}, {one['what']} {safe(one['name'])}: {one['secret']}")
    if dry_run:
        click.echo("\nThis was a dry run: nothing was changed.")


@click.command()
@click.option("--format", "kind", type=click.Choice(_FORMATS), default="toml", show_default=True)
@records_command
def export(kind: str, settings: config.Settings, as_json: bool) -> None:
    """Print all apps as a file for `redpoll apply`.

    The file has the secrets of keys and webhooks: `umask 077` before it keeps other users of the machine from reading
    them. Of tokens it has names and scopes, because nobody knows them.

    \b
    Examples:
      redpoll export > apps.toml
      redpoll export --format yaml
      redpoll export --json
    """
    from redpoll.importing.apps_file import written_secret

    apps = run(settings, "app export", {}, timeout_s=ALL_APPS_WITHIN_S)
    for app in apps:
        for row in (app, *app.get("keys", ()), *app.get("webhooks", ())):
            if "secret" in row:
                row["secret"] = written_secret(row["secret"])
    if as_json or kind == "json":
        print_json({"apps": apps})
    elif kind == "yaml":
        try:
            import yaml
        except ImportError:
            refuse(["YAML needs PyYAML: pip install 'redpoll[yaml]', or use --format toml"])
        click.echo(yaml.safe_dump({"apps": apps}, sort_keys=False, allow_unicode=True), nl=False)
    else:
        click.echo("\n\n".join(_toml_app(app) for app in apps) or "apps = []")


def _toml_app(app: dict[str, Any]) -> str:
    lines = ["[[apps]]"]
    for name, value in app.items():
        if name in _LISTS:
            rows = "".join(f"  {_toml(row)},\n" for row in value)
            lines.append(f"{name} = [\n{rows}]")
        else:
            lines.append(f"{name} = {_toml(value)}")
    return "\n".join(lines)


def _toml(value: Any) -> str:
    """A value in one line."""
    from redpoll.text import json_text

    if isinstance(value, dict):
        return "{ " + ", ".join(f"{name} = {_toml(inner)}" for name, inner in value.items()) + " }"
    if isinstance(value, list):
        return "[" + ", ".join(map(_toml, value)) + "]"
    # JSON's texts, numbers and booleans are valid TOML.
    return json_text.compact(value).decode()
