"""`redpoll user …`: who may log in to the dashboard."""

from typing import Any

import click

from redpoll import config
from redpoll.cli.asking import run
from redpoll.cli.common import print_json, records_command

__all__ = ["user"]


@click.group()
def user() -> None:
    """People who may log in to the dashboard."""


@user.command("create")
@click.argument("name")
@click.option("--role", type=click.Choice(["admin", "viewer"]), required=True, help="A viewer changes nothing.")
@records_command
def user_create(name: str, role: str, settings: config.Settings, as_json: bool) -> None:
    """Make a user and print a password for the first login, which asks for another one."""
    _tell_password(run(settings, "user create", {"name": name, "role": role}), as_json)


@user.command("reset")
@click.argument("name")
@records_command
def user_reset(name: str, settings: config.Settings, as_json: bool) -> None:
    """Give a user a new password for one login, which asks for another one; whoever is logged in by it is out."""
    _tell_password(run(settings, "user reset", {"name": name}), as_json)


def _tell_password(made: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print_json(made)
    else:
        click.echo(f"name      {made['name']}\npassword  {made['password']}\n\nIt is not shown again.")
