"""`redpoll first-login`: what the first start printed, or would have printed to a terminal."""

from pathlib import Path

import click

from redpoll.cli.common import print_json
from redpoll.cli.execute import run
from redpoll.cli.records_command import records_command
from redpoll.config import config

__all__ = ["first_login"]


@click.command("first-login")
@records_command
def first_login(settings: config.Settings, as_json: bool) -> None:
    """Show how to use a new server: its app with secret and examples, and the dashboard's password for one login.

    The password is shown until the user `admin` logs in. The examples have the addresses of the running server.

    \b
    Examples:
      redpoll first-login
      redpoll first-login --data-dir /var/lib/redpoll --json
    """
    from redpoll.host import welcome

    address = run(settings, "server show", {})
    apps = run(settings, "app list", {})
    app = apps[0] if len(apps) == 1 and apps[0]["key"] is not None else None
    url = f"http://{welcome.url_host(address['control_host'])}:{address['control_port']}"
    path = Path(settings.data_dir).resolve() / welcome.FIRST_LOGIN_NAME
    password = _password(path)
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
        click.echo(f"The dashboard is at {url}. There is no password for a first login any more, or it was chosen in")
        click.echo("admin_password; `redpoll user reset admin` gives a new one.")


def _password(path: Path) -> str | None:
    from redpoll.host import datafolder

    try:
        with datafolder.as_owner(path.parent):
            return path.read_text().strip()
    except FileNotFoundError:
        return None
