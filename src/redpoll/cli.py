"""The command `redpoll`: its words, flags, output and exit codes. What they do is done elsewhere.

Exit codes: 0 done, 1 it could not be done (one sentence says why), 2 wrong flags or settings (every fault is
told).
"""

import asyncio
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click

from redpoll import __version__, config

if TYPE_CHECKING:
    from redpoll.leash import Leash

__all__ = ["main"]

# A server that is just starting, or another command, holds the folder and takes no commands yet.
_WAIT_FOR_SERVER_S = 10.0


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def main() -> None:
    """A self-hosted real-time messaging server that speaks the Pusher Channels protocol."""


def _with_settings(command: Callable[..., None]) -> Callable[..., None]:
    """Gives a command a flag for each setting that has one, and --config."""
    for setting in reversed(config.TABLE):
        if setting.has_flag:
            unit = f" [{setting.unit}]" if setting.unit else ""
            default = f" Default: {setting.default}." if setting.default != "" else ""
            text = f"{setting.help}{unit}{default}".replace("`", "")
            command = click.option(setting.flag, setting.name, metavar="VALUE", help=text)(command)
    return _with_config(command)


def _with_config(command: Callable[..., None]) -> Callable[..., None]:
    return click.option("--config", "config_path", metavar="FILE", help="TOML file with settings.")(command)


def _settings(config_path: str | None, flags: dict[str, Any]) -> config.Settings:
    """Reads the settings; with faults, prints them all and ends with 2."""
    try:
        settings, warnings = config.load(flags, os.environ, config_path)
    except config.ConfigError as error:
        for fault in error.faults:
            click.echo(str(fault), err=True)
        sys.exit(2)
    for warning in warnings:
        click.echo(f"warning: {warning}", err=True)
    return settings


def _fail(sentence: object) -> NoReturn:
    click.echo(f"redpoll: {sentence}", err=True)
    sys.exit(1)


@main.command()
@_with_settings
def serve(config_path: str | None, **flags: Any) -> None:
    """Start the server and run it until SIGTERM or Ctrl-C.

    Each setting may also stand in the environment (REDPOLL_PORT for --port) or in the file of --config.
    """
    settings = _settings(config_path, flags)
    from redpoll import logs, supervisor

    logs.configure(settings, "supervisor")
    try:
        code = supervisor.serve(settings)
    except supervisor.StartError as error:
        _fail(error)
    sys.exit(code)


@main.command("check-config")
@_with_settings
def check_config(config_path: str | None, **flags: Any) -> None:
    """Check flags, environment and file; name every fault at once. Starts nothing."""
    _settings(config_path, flags)
    click.echo("the settings are good")


@main.command()
def version() -> None:
    """Print the version."""
    click.echo(f"redpoll {__version__}")


@main.group()
def app() -> None:
    """Apps: what clients and server libraries connect to. Works beside a running server and without one."""


def _app_command(command: Callable[..., None]) -> Callable[..., None]:
    """What every `app` command takes: where the records are, and how to print."""
    command = click.option("--json", "as_json", is_flag=True, help="Print JSON.")(command)
    command = click.option("--data-dir", metavar="FOLDER", help="The server's data folder.")(command)
    return _with_config(command)


@app.command("create")
@click.argument("name")
@_app_command
def app_create(name: str, config_path: str | None, data_dir: str | None, as_json: bool) -> None:
    """Make an app and print how to use it. A running server serves it at once."""
    settings = _settings(config_path, {"data_dir": data_dir})
    made = _run(settings, "app create", {"name": name})
    if as_json:
        _print_json(made)
        return
    from redpoll.welcome import how_to_use, url_host

    click.echo(f"For the server at {url_host(settings.host)}:{settings.port}, as it is set here:\n")
    click.echo(how_to_use(made, settings.host, settings.port), nl=False)


@app.command("list")
@_app_command
def app_list(config_path: str | None, data_dir: str | None, as_json: bool) -> None:
    """List all apps."""
    apps = _run(_settings(config_path, {"data_dir": data_dir}), "app list", {})
    if as_json:
        _print_json(apps)
        return
    for each in apps:
        click.echo(f"{each['id']:<10} {each['key'] or '(no enabled key)':<20}  {each['name']}")


@app.command("show")
@click.argument("app_id", metavar="ID")
@_app_command
def app_show(app_id: str, config_path: str | None, data_dir: str | None, as_json: bool) -> None:
    """Show one app with its keys and secrets."""
    shown = _run(_settings(config_path, {"data_dir": data_dir}), "app show", {"id": app_id})
    if as_json:
        _print_json(shown)
        return
    click.echo(f"id      {shown['id']}\nname    {shown['name']}")
    for key in shown["keys"]:
        state = "" if key["enabled"] else "  (disabled)"
        click.echo(f"key     {key['key']}{state}\nsecret  {key['secret']}")


def _print_json(value: Any) -> None:
    click.echo(json.dumps(value, indent=2, ensure_ascii=False))


def _run(settings: config.Settings, verb: str, args: dict[str, Any]) -> Any:
    """Carries out a command: here when the data folder is free, else by the server that holds it."""
    from redpoll import datafolder
    from redpoll.control import commands

    folder = Path(settings.data_dir).resolve()
    deadline = time.monotonic() + _WAIT_FOR_SERVER_S
    while True:
        try:
            with datafolder.hold(folder, verb, wait_s=0):
                return asyncio.run(_run_here(folder, verb, args))
        except datafolder.DataFolderError as error:
            held = error
        except commands.CommandError as error:
            _fail(error)
        try:
            return commands.ask(commands.socket_path(folder), verb, args)
        except (FileNotFoundError, ConnectionRefusedError) as error:
            if time.monotonic() > deadline:
                _fail(f"{held}, which takes no commands: {error}")
            time.sleep(0.05)
        except commands.CommandError as error:
            _fail(error)


async def _run_here(folder: Path, verb: str, args: dict[str, Any]) -> Any:
    from redpoll.control import commands
    from redpoll.control.records import Records
    from redpoll.store.store import Store, StoreError, database_url

    # The store holds secrets.
    os.umask(0o077)
    try:
        store = await Store.open(database_url(folder))
    except StoreError as error:
        raise commands.CommandError(str(error)) from error
    try:
        records = Records(store)
        await records.load()
        return await commands.run(records, verb, args)
    finally:
        await store.close()


def _leash(fd: int) -> "Leash":
    from redpoll.leash import Leash

    return Leash(fd)


@main.command(hidden=True)
@click.argument("number", type=int)
@click.option("--leash", "leash_fd", type=int, required=True)
def worker(number: int, leash_fd: int) -> None:
    """A worker process; started by `serve` only. The number is there for those who read process lists."""
    from redpoll.worker.main import main as run_worker

    run_worker(_leash(leash_fd))


@main.command(hidden=True)
@click.option("--leash", "leash_fd", type=int, required=True)
def control(leash_fd: int) -> None:
    """The control plane; started by `serve` only."""
    from redpoll.control.main import main as run_control

    run_control(_leash(leash_fd))
