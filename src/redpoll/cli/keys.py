"""`redpoll key …`: the keys of an app."""

from typing import Any

import click

from redpoll import config
from redpoll.cli.asking import run
from redpoll.cli.common import print_json, records_command

__all__ = ["key", "state"]


@click.group()
def key() -> None:
    """Keys of an app: several work beside each other, so that one can take the place of another."""


@key.command("add")
@click.argument("app_id")
@click.argument("key", required=False)
@records_command
def key_add(app_id: str, key: str | None, settings: config.Settings, as_json: bool) -> None:
    """Make one more key with its secret; a KEY of the app that was disabled is enabled again."""
    made = run(settings, "key add", {"app": app_id, "key": key})
    if as_json:
        print_json(made)
    else:
        click.echo(f"key     {made['key']}\nsecret  {made['secret']}")


@key.command("list")
@click.argument("app_id")
@records_command
def key_list(app_id: str, settings: config.Settings, as_json: bool) -> None:
    """List the keys of an app with their secrets, oldest first."""
    keys = run(settings, "key list", {"app": app_id})
    if as_json:
        print_json(keys)
        return
    for each in keys:
        click.echo(f"{each['key']}  {each['secret']}{state(each)}")


@key.command("disable")
@click.argument("app_id")
@click.argument("key")
@records_command
def key_disable(app_id: str, key: str, settings: config.Settings, as_json: bool) -> None:
    """Let a key open and sign nothing new. What is connected stays; the last enabled key can't be disabled."""
    disabled = run(settings, "key disable", {"app": app_id, "key": key})
    if as_json:
        print_json(disabled)
    else:
        click.echo(f"{disabled['key']}{state(disabled)}")


def state(key: dict[str, Any]) -> str:
    return "" if key["enabled"] else "  (disabled)"
