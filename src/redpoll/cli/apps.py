"""`redpoll app …`: apps and their settings."""

from collections.abc import Iterable
from typing import Any

import click

from redpoll import config
from redpoll.cli.asking import run
from redpoll.cli.common import print_json, records_command, refuse
from redpoll.cli.keys import state

__all__ = ["app"]


@click.group()
def app() -> None:
    """Apps: what clients and server libraries connect to. Works beside a running server and without one."""


@app.command("create")
@click.argument("name")
@records_command
def app_create(name: str, settings: config.Settings, as_json: bool) -> None:
    """Make an app and print how to use it. A running server serves it at once."""
    made = run(settings, "app create", {"name": name})
    if as_json:
        print_json(made)
        return
    from redpoll.welcome import how_to_use, url_host

    click.echo(f"For the server at {url_host(settings.host)}:{settings.port}, as it is set here:\n")
    click.echo(how_to_use(made, settings.host, settings.port, settings.tls_port), nl=False)


@app.command("list")
@records_command
def app_list(settings: config.Settings, as_json: bool) -> None:
    """List all apps."""
    apps = run(settings, "app list", {})
    if as_json:
        print_json(apps)
        return
    for each in apps:
        click.echo(f"{each['id']:<10} {each['key'] or '(no enabled key)':<20}  {each['name']}")


@app.command("show")
@click.argument("app_id", metavar="ID")
@records_command
def app_show(app_id: str, settings: config.Settings, as_json: bool) -> None:
    """Show one app with its keys and secrets, and how it is set."""
    shown = run(settings, "app show", {"id": app_id})
    if as_json:
        print_json(shown)
        return
    click.echo(f"id      {shown['id']}\nname    {shown['name']}")
    for key in shown["keys"]:
        click.echo(f"key     {key['key']}{state(key)}\nsecret  {key['secret']}")
    _print_settings(run(settings, "app set", {"id": app_id, "settings": {}})["settings"])


@app.command("set")
@click.argument("app_id", metavar="ID")
@click.argument("assignments", metavar="NAME=VALUE…", nargs=-1)
@records_command
def app_set(app_id: str, assignments: tuple[str, ...], settings: config.Settings, as_json: bool) -> None:
    """Change settings of an app, all of them or, with a fault, none; without NAME=VALUE, show them.

    In force at once, in every process.
    """
    texts = _assigned(assignments)
    changed = run(settings, "app set", {"id": app_id, "settings": texts})
    if as_json:
        print_json(changed)
        return
    shown = changed["settings"]
    _print_settings({name: shown[name] for name in texts or shown})


def _assigned(assignments: Iterable[str]) -> dict[str, str]:
    """`NAME=VALUE` words by name, each one good by itself; with faults, prints them all and ends with 2."""
    from redpoll.protocol.apps import parse_setting

    texts: dict[str, str] = {}
    faults = []
    for assignment in assignments:
        name, equals, text = assignment.partition("=")
        try:
            if not equals:
                raise ValueError(f"{assignment!r} is not of the form name=value")
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
    """In the words that `app set` takes."""
    for name, value in values.items():
        text = ",".join(value) if isinstance(value, (list, tuple)) else str(value)
        text = text.lower() if isinstance(value, bool) else text
        click.echo(f"{name}={text}")
