"""`redpoll user …`: creates dashboard users and resets their passwords; `redpoll first-login`: what the first start
printed, or would have printed to a terminal."""

from pathlib import Path
from typing import Any

import click

from redpoll.cli.common import print_json
from redpoll.cli.execute import run
from redpoll.cli.records_command import executes, records_command
from redpoll.config import config

__all__ = ["first_login", "user"]


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


@click.command("first-login")
@records_command
def first_login(settings: config.Settings, as_json: bool) -> None:
    """Show how to use a new server: its app with secret and examples, and the dashboard's password for one login.

    The password is shown until the user `admin` logs in or gets another one. Of several nodes, the one that was
    started first has it. The examples have the addresses of the running server.

    \b
    Examples:
      redpoll first-login
      redpoll first-login --data-dir /var/lib/redpoll --json
    """
    from redpoll.host import welcome

    address = run(settings, "server show", {})
    apps = run(settings, "app list", {})
    app = apps[0] if len(apps) == 1 and apps[0]["key"] is not None else None
    scheme = "https" if address["control_tls"] else "http"
    url = f"{scheme}://{welcome.url_host(address['control_host'])}:{address['control_port']}"
    path = Path(settings.data_dir).resolve() / welcome.FIRST_LOGIN_NAME
    password = run(settings, "first login", {})["password"]
    if as_json:
        print_json({"app": app, "dashboard": url, "password": password})
        return
    if app is not None:
        click.echo(f"The app {app['id']} of this server:\n")
        click.echo(welcome.how_to_use(app, address["host"], address["port"], address["tls_port"]))
    else:
        click.echo(
            f"This server has {len(apps)} apps: `redpoll app list` names them, `redpoll app show ID` shows one.\n"
        )
    if password is not None:
        click.echo(welcome.first_login(url, password, str(path)), nl=False)
    else:
        click.echo(f"The dashboard is at {url}. There is no password for a first login here: it was used or replaced,")
        click.echo("or chosen in admin_password, or another node has it; `redpoll user reset admin` gives a new one.")
