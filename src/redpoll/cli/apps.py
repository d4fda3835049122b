"""`redpoll app …`: creates, lists, shows and configures apps."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import click

from redpoll.cli.common import print_json, refuse, safe
from redpoll.cli.credentials import state
from redpoll.cli.execute import ask_server, run
from redpoll.cli.records_command import AppCommand, records_command
from redpoll.config import config

__all__ = ["app"]

_ADDRESS_WITHIN_S = 3.0


@click.group()
def app() -> None:
    """Manage apps. Each app has its own keys, channels and settings.

    Works with or without a running server.

    \b
    Examples:
      redpoll app create "My app"
      redpoll app list --json
    """


@app.command("create")
@click.argument("name")
@records_command
def app_create(name: str, settings: config.Settings, as_json: bool) -> None:
    """Create an app and print how to connect to it. A running server serves it at once.

    \b
    Examples:
      redpoll app create "My app"
      redpoll app create demo --json
    """
    created = run(settings, "app create", {"name": name})
    if as_json:
        print_json(created)
        return
    from redpoll.host.datafolder import DataFolderError
    from redpoll.host.welcome import how_to_use, url_host
    from redpoll.ipc.command_socket import CommandError

    try:
        address = ask_server(settings, "server show", {}, _ADDRESS_WITHIN_S)
        host, port, tls_port, source = address["host"], address["port"], address["tls_port"], ""
    except (OSError, CommandError, DataFolderError):
        host, port, tls_port = settings.host, settings.port, settings.tls_port
        source = ", according to the settings here, because none runs on this data folder"
    click.echo(f"For the server at {url_host(host)}:{port}{source}:\n")
    click.echo(how_to_use(created, host, port, tls_port), nl=False)


@app.command("list")
@records_command
def app_list(settings: config.Settings, as_json: bool) -> None:
    """List all apps.

    \b
    Examples:
      redpoll app list
      redpoll app list --json
    """
    apps = run(settings, "app list", {})
    if as_json:
        print_json(apps)
        return
    if not apps:
        click.echo(f"there is no app in the data folder {Path(settings.data_dir).resolve()}", err=True)
    for row in apps:
        click.echo(f"{row['id']:<10} {row['key'] or '(no enabled key)':<20}  {row['name']}")


@app.command("show", cls=AppCommand)
@click.argument("app_id", metavar="ID", required=False)
@records_command
def app_show(app_id: str, settings: config.Settings, as_json: bool) -> None:
    """Show an app with its keys, secrets and settings.

    \b
    Examples:
      redpoll app show 1234567
    """
    shown = run(settings, "app show", {"id": app_id})
    if as_json:
        print_json(shown)
        return
    click.echo(f"id      {shown['id']}\nname    {shown['name']}")
    for key in shown["keys"]:
        click.echo(f"key     {key['key']}{state(key)}\nsecret  {key['secret']}")
    _print_settings(run(settings, "app set", {"id": app_id, "settings": {}})["settings"])


@app.command("delete")
@click.argument("app_id", metavar="ID")
@click.option("--yes", is_flag=True, help="Don't ask.")
@records_command
def app_delete(app_id: str, yes: bool, settings: config.Settings, as_json: bool) -> None:
    """Delete an app with its keys, settings, history rules, webhooks and tokens. It can't be undone.

    Its connections are closed, and waiting webhooks are discarded. The event log and the audit log keep what they have.
    `redpoll app set ID enabled=false` only switches an app off.

    \b
    Examples:
      redpoll app delete 1234567
      redpoll app delete 1234567 --yes --json
    """
    if not yes:
        shown = run(settings, "app show", {"id": app_id})
        click.confirm(f"Delete the app {app_id} ({safe(shown['name'])})? It can't be undone.", abort=True, err=True)
    deleted = run(settings, "app delete", {"id": app_id})
    if as_json:
        print_json(deleted)
    else:
        click.echo(f"app {deleted['id']} ({safe(deleted['name'])}) deleted")


@app.command("set", cls=AppCommand)
@click.argument("app_id", metavar="ID", required=False)
@click.argument("assignments", metavar="NAME=VALUE…", nargs=-1)
@records_command
def app_set(app_id: str, assignments: tuple[str, ...], settings: config.Settings, as_json: bool) -> None:
    """Change settings of an app; without NAME=VALUE, show them.

    If one assignment is wrong, nothing changes. Changes apply at once, in every process.

    \b
    Examples:
      redpoll app set 1234567
      redpoll app set 1234567 max_connections=5000 allowed_origins=example.com,*.example.com
      redpoll app set 1234567 enabled=false
    """
    texts = _assigned(assignments)
    changed = run(settings, "app set", {"id": app_id, "settings": texts})
    if as_json:
        print_json(changed)
        return
    shown = changed["settings"]
    _print_settings({name: shown[name] for name in texts or shown})


def _assigned(assignments: Iterable[str]) -> dict[str, str]:
    """The values of `NAME=VALUE` words by name. Prints every fault and exits with 2 if there is one."""
    from redpoll.protocol.apps import parse_setting

    texts: dict[str, str] = {}
    faults = []
    for assignment in assignments:
        name, equals, text = assignment.partition("=")
        try:
            if not equals:
                raise ValueError(f"{assignment!r} must have the form NAME=VALUE")
            if name in texts:
                raise ValueError(f"{name} is given more than once")
            parse_setting(name, text)
        except ValueError as error:
            faults.append(error)
        texts[name] = text
    if faults:
        refuse(faults)
    return texts


def _print_settings(values: dict[str, Any]) -> None:
    """Prints settings in the form that `app set` reads."""
    for name, value in values.items():
        text = ",".join(value) if isinstance(value, (list, tuple)) else str(value)
        text = text.lower() if isinstance(value, bool) else text
        click.echo(f"{name}={text}")
