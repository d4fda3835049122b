"""`redpoll key …`: adds, lists and disables the keys of an app."""

from typing import Any

import click

from redpoll.cli.records_command import AppCommand, executes

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
@executes("key add", lambda added: click.echo(f"key     {added['key']}\nsecret  {added['secret']}"))
def key_add(app_id: str, key: str | None) -> dict[str, Any]:
    """Create a key with its secret. With the KEY of a disabled key, enable that one again.

    \b
    Examples:
      redpoll key add 1234567
      redpoll key add 1234567 OLDKEY
    """
    return {"app": app_id, "key": key}


def _print_keys(keys: list[dict[str, Any]]) -> None:
    for row in keys:
        click.echo(f"{row['key']}  {row['secret']}{state(row)}")


@key.command("list", cls=AppCommand)
@click.argument("app_id", required=False)
@executes("key list", _print_keys)
def key_list(app_id: str) -> dict[str, Any]:
    """List the keys of an app with their secrets, oldest first.

    \b
    Examples:
      redpoll key list 1234567 --json
    """
    return {"app": app_id}


@key.command("disable", cls=AppCommand)
@click.argument("app_id", required=False)
@click.argument("key")
@executes("key disable", lambda disabled: click.echo(f"{disabled['key']}{state(disabled)}"))
def key_disable(app_id: str, key: str) -> dict[str, Any]:
    """Disable a key for new connections and requests.

    Open connections stay. The last enabled key can't be disabled.

    \b
    Examples:
      redpoll key disable 1234567 OLDKEY
    """
    return {"app": app_id, "key": key}


def state(key: dict[str, Any]) -> str:
    """The suffix for a key's line of output."""
    return "" if key["enabled"] else "  (disabled)"
