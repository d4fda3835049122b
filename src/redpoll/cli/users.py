"""`redpoll user …`: creates dashboard users and resets their passwords."""

from typing import Any

import click

from redpoll.cli.common import print_json, records_command
from redpoll.cli.execute import run
from redpoll.config import config

__all__ = ["user"]


@click.group()
def user() -> None:
    """Manage dashboard users.

    \b
    Examples:
      redpoll user create ann --role admin
    """


@user.command("create")
@click.argument("name")
@click.option("--role", type=click.Choice(["admin", "viewer"]), required=True, help="A viewer can't change anything.")
@records_command
def user_create(name: str, role: str, settings: config.Settings, as_json: bool) -> None:
    """Create a user and print a one-time password. The first login asks for a new one.

    \b
    Examples:
      redpoll user create ann --role admin
      redpoll user create bob --role viewer --json
    """
    _print_password(run(settings, "user create", {"name": name, "role": role}), as_json)


@user.command("reset")
@click.argument("name")
@records_command
def user_reset(name: str, settings: config.Settings, as_json: bool) -> None:
    """Give a user a new one-time password. The user's open sessions end.

    \b
    Examples:
      redpoll user reset ann
    """
    _print_password(run(settings, "user reset", {"name": name}), as_json)


def _print_password(user: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print_json(user)
    else:
        click.echo(f"name      {user['name']}\npassword  {user['password']}\n\nThe password is not shown again.")
