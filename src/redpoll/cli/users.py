"""`redpoll user …`: creates dashboard users and resets their passwords."""

from typing import Any

import click

from redpoll.cli.records_command import executes

__all__ = ["user"]


@click.group()
def user() -> None:
    """Manage dashboard users.

    \b
    Examples:
      redpoll user create ann --role admin
    """


def _print_password(user: dict[str, Any]) -> None:
    click.echo(f"name      {user['name']}\npassword  {user['password']}\n\nThe password is not shown again.")


@user.command("create")
@click.argument("name")
@click.option("--role", type=click.Choice(["admin", "viewer"]), required=True, help="A viewer can't change anything.")
@executes("user create", _print_password)
def user_create(name: str, role: str) -> dict[str, Any]:
    """Create a user and print a one-time password. The first login asks for a new one.

    \b
    Examples:
      redpoll user create ann --role admin
      redpoll user create bob --role viewer --json
    """
    return {"name": name, "role": role}


@user.command("reset")
@click.argument("name")
@executes("user reset", _print_password)
def user_reset(name: str) -> dict[str, Any]:
    """Give a user a new one-time password. The user's open sessions end.

    \b
    Examples:
      redpoll user reset ann
    """
    return {"name": name}
