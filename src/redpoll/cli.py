"""The command `redpoll`: its words, flags, output and exit codes. What they do is done elsewhere.

Exit codes: 0 done, 1 it could not be done (one sentence says why), 2 wrong flags or settings (every fault is
told).
"""

import asyncio
import functools
import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
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


def _settings(config_path: str | None, flags: dict[str, Any], *, look_into_files: bool = True) -> config.Settings:
    """Reads the settings; with faults, prints them all and ends with 2."""
    try:
        settings, warnings = config.load(flags, os.environ, config_path, look_into_files=look_into_files)
    except config.ConfigError as error:
        _refuse(error.faults)
    for warning in warnings:
        click.echo(f"warning: {warning}", err=True)
    return settings


def _refuse(faults: Iterable[object]) -> NoReturn:
    for fault in faults:
        click.echo(str(fault), err=True)
    sys.exit(2)


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


def _records_command(command: Callable[..., None]) -> Callable[..., None]:
    """What every command on records takes: where they are, and how to print. It is called with `settings` for it."""

    @functools.wraps(command)
    def with_settings(config_path: str | None, data_dir: str | None, **words: Any) -> None:
        command(settings=_settings(config_path, {"data_dir": data_dir}, look_into_files=False), **words)

    wrapped = click.option("--json", "as_json", is_flag=True, help="Print JSON.")(with_settings)
    wrapped = click.option("--data-dir", metavar="FOLDER", help="The server's data folder.")(wrapped)
    return _with_config(wrapped)


@app.command("create")
@click.argument("name")
@_records_command
def app_create(name: str, settings: config.Settings, as_json: bool) -> None:
    """Make an app and print how to use it. A running server serves it at once."""
    made = _run(settings, "app create", {"name": name})
    if as_json:
        _print_json(made)
        return
    from redpoll.welcome import how_to_use, url_host

    click.echo(f"For the server at {url_host(settings.host)}:{settings.port}, as it is set here:\n")
    click.echo(how_to_use(made, settings.host, settings.port, settings.tls_port), nl=False)


@app.command("list")
@_records_command
def app_list(settings: config.Settings, as_json: bool) -> None:
    """List all apps."""
    apps = _run(settings, "app list", {})
    if as_json:
        _print_json(apps)
        return
    for each in apps:
        click.echo(f"{each['id']:<10} {each['key'] or '(no enabled key)':<20}  {each['name']}")


@app.command("show")
@click.argument("app_id", metavar="ID")
@_records_command
def app_show(app_id: str, settings: config.Settings, as_json: bool) -> None:
    """Show one app with its keys and secrets, and how it is set."""
    shown = _run(settings, "app show", {"id": app_id})
    if as_json:
        _print_json(shown)
        return
    click.echo(f"id      {shown['id']}\nname    {shown['name']}")
    for key in shown["keys"]:
        click.echo(f"key     {key['key']}{_state(key)}\nsecret  {key['secret']}")
    _print_settings(_run(settings, "app set", {"id": app_id, "settings": {}})["settings"])


@app.command("set")
@click.argument("app_id", metavar="ID")
@click.argument("assignments", metavar="NAME=VALUE…", nargs=-1)
@_records_command
def app_set(app_id: str, assignments: tuple[str, ...], settings: config.Settings, as_json: bool) -> None:
    """Change settings of an app, all of them or, with a fault, none; without NAME=VALUE, show them.

    In force at once, in every process.
    """
    texts = _assigned(assignments)
    changed = _run(settings, "app set", {"id": app_id, "settings": texts})
    if as_json:
        _print_json(changed)
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
        _refuse(faults)
    return texts


def _print_settings(values: dict[str, Any]) -> None:
    """In the words that `app set` takes."""
    for name, value in values.items():
        text = ",".join(value) if isinstance(value, (list, tuple)) else str(value)
        text = text.lower() if isinstance(value, bool) else text
        click.echo(f"{name}={text}")


@main.group()
def key() -> None:
    """Keys of an app: several work beside each other, so that one can take the place of another."""


@key.command("add")
@click.argument("app_id")
@click.argument("key", required=False)
@_records_command
def key_add(app_id: str, key: str | None, settings: config.Settings, as_json: bool) -> None:
    """Make one more key with its secret; a KEY of the app that was disabled is enabled again."""
    made = _run(settings, "key add", {"app": app_id, "key": key})
    if as_json:
        _print_json(made)
    else:
        click.echo(f"key     {made['key']}\nsecret  {made['secret']}")


@key.command("list")
@click.argument("app_id")
@_records_command
def key_list(app_id: str, settings: config.Settings, as_json: bool) -> None:
    """List the keys of an app with their secrets, oldest first."""
    keys = _run(settings, "key list", {"app": app_id})
    if as_json:
        _print_json(keys)
        return
    for each in keys:
        click.echo(f"{each['key']}  {each['secret']}{_state(each)}")


@key.command("disable")
@click.argument("app_id")
@click.argument("key")
@_records_command
def key_disable(app_id: str, key: str, settings: config.Settings, as_json: bool) -> None:
    """Let a key open and sign nothing new. What is connected stays; the last enabled key can't be disabled."""
    disabled = _run(settings, "key disable", {"app": app_id, "key": key})
    if as_json:
        _print_json(disabled)
    else:
        click.echo(f"{disabled['key']}{_state(disabled)}")


def _state(key: dict[str, Any]) -> str:
    return "" if key["enabled"] else "  (disabled)"


@main.group()
def token() -> None:
    """Tokens for the HTTP API of an app: `Authorization: Bearer TOKEN`, with scopes and an end."""


@token.command("create")
@click.argument("app_id")
@click.option("--name", required=True, help="What it is for, for people.")
@click.option(
    "--scope", "scopes", multiple=True, required=True, metavar="publish|read|auth|all", help="May be repeated."
)
@click.option("--expires", metavar="TIME", help="How long it lasts: 90s, 15m, 12h, 30d. Without: until it is revoked.")
@_records_command
def token_create(
    app_id: str, name: str, scopes: tuple[str, ...], expires: str | None, settings: config.Settings, as_json: bool
) -> None:
    """Make a token and print it. It is shown this once: only its hash is kept."""
    asked = [scope.strip() for each in scopes for scope in each.split(",") if scope.strip()]
    args = {"app": app_id, "name": name, "scopes": asked, "lasts_s": _duration_s(expires)}
    made = _run(settings, "token create", args)
    if as_json:
        _print_json(made)
        return
    click.echo(f"id       {made['id']}\ntoken    {made['token']}\nscopes   {','.join(made['scopes'])}")
    click.echo(f"expires  {_when(made['expires_at'])}\n\nKeep the token now: it is not shown again.")


@token.command("list")
@click.argument("app_id")
@_records_command
def token_list(app_id: str, settings: config.Settings, as_json: bool) -> None:
    """List the tokens of an app, oldest first, without the tokens themselves."""
    tokens = _run(settings, "token list", {"app": app_id})
    if as_json:
        _print_json(tokens)
        return
    for each in tokens:
        ends = f"revoked {_when(each['revoked_at'])}" if each["revoked_at"] else f"expires {_when(each['expires_at'])}"
        used = f"used {_when(each['last_used_at'])}"
        click.echo(f"{each['id']}  {each['prefix']}…  {','.join(each['scopes'])}  {ends}  {used}  {each['name']}")


@token.command("revoke")
@click.argument("ids", metavar="ID…", nargs=-1, required=True)
@_records_command
def token_revoke(ids: tuple[str, ...], settings: config.Settings, as_json: bool) -> None:
    """End tokens, at once and for good; all of them or, where an ID is unknown, none."""
    revoked = _run(settings, "token revoke", {"ids": ids})
    if as_json:
        _print_json(revoked)
        return
    for each in revoked:
        click.echo(f"{each['id']}  revoked {_when(each['revoked_at'])}  {each['name']}")


_SECONDS = {"s": 1, "m": 60, "h": 3_600, "d": 86_400}


def _duration_s(text: str | None) -> int | None:
    if text is None:
        return None
    found = re.fullmatch(r"([1-9][0-9]{0,9})([smhd])", text)
    if found is None:
        _refuse([f"--expires: a number with s, m, h or d behind it, such as 30d, not {text!r}"])
    return int(found[1]) * _SECONDS[found[2]]


def _when(at_s: int | None) -> str:
    return "never" if at_s is None else datetime.fromtimestamp(at_s, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


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
                return asyncio.run(_run_here(settings, folder, verb, args))
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


async def _run_here(settings: config.Settings, folder: Path, verb: str, args: dict[str, Any]) -> Any:
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
        records = Records(store, max_owed_bytes=settings.max_owed_bytes)
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
