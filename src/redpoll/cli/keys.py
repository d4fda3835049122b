"""`redpoll key …`: adds, lists and disables the keys of an app."""

from typing import Any

import click

from redpoll.cli.app_argument import AppCommand, app_records_command
from redpoll.cli.common import print_json
from redpoll.cli.execute import run
from redpoll.config import config

__all__ = ["key", "state"]


@click.group()
def key() -> None:
    """Manage the keys of an app. Several can be enabled at once, so that keys can be rotated.

    \b
    Examples:
      redpoll key add 1234567
      redpoll key list 1234567
    """


@key.command("add", cls=AppCommand)
@click.argument("app_id", required=False)
@click.argument("key", required=False)
@app_records_command
def key_add(app_id: str, key: str | None, settings: config.Settings, as_json: bool) -> None:
    """Create a key with its secret. With the KEY of a disabled key, enable that one again.

    \b
    Examples:
      redpoll key add 1234567
      redpoll key add 1234567 OLDKEY
    """
    added = run(settings, "key add", {"app": app_id, "key": key})
    if as_json:
        print_json(added)
    else:
        click.echo(f"key     {added['key']}\nsecret  {added['secret']}")


@key.command("list", cls=AppCommand)
@click.argument("app_id", required=False)
@app_records_command
def key_list(app_id: str, settings: config.Settings, as_json: bool) -> None:
    """List the keys of an app with their secrets, oldest first.

    \b
    Examples:
      redpoll key list 1234567 --json
    """
    keys = run(settings, "key list", {"app": app_id})
    if as_json:
        print_json(keys)
        return
    for row in keys:
        click.echo(f"{row['key']}  {row['secret']}{state(row)}")


@key.command("disable", cls=AppCommand)
@click.argument("app_id", required=False)
@click.argument("key")
@app_records_command
def key_disable(app_id: str, key: str, settings: config.Settings, as_json: bool) -> None:
    """Disable a key for new connections and requests.

    Open connections stay. The last enabled key can't be disabled.

    \b
    Examples:
      redpoll key disable 1234567 OLDKEY
    """
    disabled = run(settings, "key disable", {"app": app_id, "key": key})
    if as_json:
        print_json(disabled)
    else:
        click.echo(f"{disabled['key']}{state(disabled)}")


def state(key: dict[str, Any]) -> str:
    """The suffix for a key's line of output."""
    return "" if key["enabled"] else "  (disabled)"
