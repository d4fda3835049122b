"""`redpoll serve`, `check-config`, `reload`, `health`, `version`."""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from redpoll import __version__
from redpoll.cli import without_collections
from redpoll.cli.common import fail, print_json, settings_of, with_config
from redpoll.cli.execute import ask_server, refuse_unused_store, run
from redpoll.cli.records_command import records_command
from redpoll.config import config

__all__ = ["check_config", "health", "reload", "serve", "version"]

_HEALTH_WITHIN_S = 3.0


def _with_settings(command: Callable[..., None]) -> Callable[..., None]:
    """Adds --config and a flag for each setting that has one."""
    for setting in reversed(config.TABLE):
        if setting.has_flag:
            unit = f" [{setting.unit}]" if setting.unit else ""
            default = ",".join(map(str, setting.default)) if setting.is_list else setting.default
            default = f" Default: {default}." if default not in ("", None) else ""
            text = f"{setting.help}{unit}{default}".replace("`", "")
            command = click.option(setting.flag, setting.name, metavar="VALUE", help=text)(command)
            if setting.was:
                # config.py refuses it, and names the new one.
                command = click.option(config.flag_of(setting.was), setting.was, hidden=True)(command)
    return with_config(command)


@click.command()
@_with_settings
def serve(config_path: str | None, **flags: Any) -> None:
    """Start the server and run it until SIGTERM or Ctrl-C.

    Each setting can also be given in the environment (REDPOLL_PORT for --port) or in the file of --config.

    \b
    Examples:
      redpoll serve
      redpoll serve --port 6001 --workers 4 --data-dir /var/lib/redpoll
      redpoll serve --config /etc/redpoll.toml
    """
    _open_standard_streams()
    # A certificate may be there a moment later, so such a start is tried again (deploy/redpoll.service).
    settings = settings_of(config_path, flags, files_code=1)
    with without_collections():
        from redpoll.doctor import capacity
        from redpoll.host.serve import StartError
        from redpoll.host.serve import serve as run_server
        from redpoll.text import logs

    if not settings.database_url:
        refuse_unused_store(
            Path(settings.data_dir).resolve(),
            "set database_url (REDPOLL_DATABASE_URL), move them to a new redpoll.sqlite with `redpoll store copy`",
        )
    logs.configure(settings, "supervisor")
    capacity.log_shortages(settings)
    try:
        code = run_server(settings, reread=lambda: config.load(flags, os.environ, config_path)[0])
    except StartError as error:
        fail(error)
    sys.exit(code)


def _open_standard_streams() -> None:
    """Opens /dev/null for those that the caller closed (`>&-`). Otherwise the first sockets get their numbers, and what
    is printed."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            # It gets the lowest number that is free.
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    # Python has None for a stream that was closed when it started.
    sys.stdout = sys.stdout or os.fdopen(1, "w", closefd=False)
    sys.stderr = sys.stderr or os.fdopen(2, "w", closefd=False)


@click.command("check-config")
@_with_settings
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def check_config(config_path: str | None, as_json: bool, **flags: Any) -> None:
    """Check flags, environment and file, and report every fault. Starts nothing.

    \b
    Examples:
      redpoll check-config --config /etc/redpoll.toml
      redpoll check-config --port 80 --json
    """
    if not as_json:
        settings_of(config_path, flags)
        click.echo("the settings are valid")
        return
    faults: list[str] = []
    warnings: list[str] = []
    try:
        _, doubts = config.load(flags, os.environ, config_path)
        warnings = [str(warning) for warning in doubts]
    except config.ConfigError as error:
        faults = [str(fault) for fault in error.faults]
    print_json({"faults": faults, "warnings": warnings})
    sys.exit(2 if faults else 0)


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def version(as_json: bool) -> None:
    """Print the version.

    \b
    Examples:
      redpoll version
      redpoll version --json
    """
    if as_json:
        print_json({"version": __version__})
    else:
        click.echo(f"redpoll {__version__}")


@click.command()
@records_command
def reload(settings: config.Settings, as_json: bool) -> None:
    """Make the running server read its settings and its certificate again, as SIGHUP does.

    Applies at once what a running server can, and names what needs a restart. If something is wrong, nothing changes,
    each fault is printed, and the exit code is 1. The server reads its own file and environment, not those given here.

    \b
    Examples:
      redpoll reload
      redpoll reload --data-dir /var/lib/redpoll --json
    """
    report = run(settings, "server reload", {})
    if as_json:
        print_json(report)
    else:
        for fault in report["faults"]:
            click.echo(fault, err=True)
        for name, value in report["applied"].items():
            click.echo(f"{name}: now {','.join(value) if isinstance(value, list) else value}")
        if report["certificate"]:
            click.echo("the certificates were loaded again")
        for name in report["restart"]:
            click.echo(f"{name}: changed, but needs a restart")
        if not any(report.values()):
            # The file that was edited may be another one.
            click.echo("nothing has changed; the server reads its own environment and the file of its own --config")
    if report["faults"]:
        if not as_json:
            fail("nothing was changed")
        sys.exit(1)


@click.command()
@records_command
def health(settings: config.Settings, as_json: bool) -> None:
    """Tell whether the server of this data folder is ready, for container runtimes. Exits with 1 if it isn't.

    \b
    Examples:
      redpoll health
      redpoll health --data-dir /var/lib/redpoll --json
    """
    reason = _obstacle(settings)
    if as_json:
        print_json({"ready": reason is None, "reason": reason})
    elif reason is None:
        click.echo("ready")
    if reason is not None:
        if not as_json:
            click.echo(f"redpoll: not ready: {reason}", err=True)
        sys.exit(1)


def _obstacle(settings: config.Settings) -> str | None:
    """Why the server of this data folder isn't ready; None if it is."""
    from redpoll.host.datafolder import DataFolderError
    from redpoll.ipc.command_socket import CommandError

    try:
        # Not by HTTP: the ports may want a certificate or the PROXY protocol.
        reason: str | None = ask_server(settings, "server health", {}, _HEALTH_WITHIN_S)["obstacle"]
    except (OSError, CommandError, DataFolderError) as error:
        return f"no server answers on the data folder {settings.data_dir}: {error}"
    return reason
