"""`redpoll serve`, `check-config` and `version`, and the hidden commands `worker` and `control` that `serve` runs."""

import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from redpoll import __version__, config
from redpoll.cli.common import fail, print_json, settings_of, with_config

if TYPE_CHECKING:
    from redpoll.child_pipe import ChildPipe

__all__ = ["COMMANDS"]


def _with_settings(command: Callable[..., None]) -> Callable[..., None]:
    """Adds --config and a flag for each setting that has one."""
    for setting in reversed(config.TABLE):
        if setting.has_flag:
            unit = f" [{setting.unit}]" if setting.unit else ""
            default = ",".join(map(str, setting.default)) if setting.is_list else setting.default
            default = f" Default: {default}." if default not in ("", None) else ""
            text = f"{setting.help}{unit}{default}".replace("`", "")
            command = click.option(setting.flag, setting.name, metavar="VALUE", help=text)(command)
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
    settings = settings_of(config_path, flags)
    from redpoll import logs, supervisor
    from redpoll.doctor import capacity

    logs.configure(settings, "supervisor")
    capacity.log_shortages(settings)
    try:
        code = supervisor.serve(settings)
    except supervisor.StartError as error:
        fail(error)
    sys.exit(code)


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
        _, found = config.load(flags, os.environ, config_path)
        warnings = [str(warning) for warning in found]
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


def _child_pipe(fd: int) -> "ChildPipe":
    from redpoll.child_pipe import ChildPipe

    return ChildPipe(fd)


@click.command(hidden=True)
@click.argument("number", type=int)
@click.option("--pipe", "pipe_fd", type=int, required=True)
def worker(number: int, pipe_fd: int) -> None:
    """A worker process, started by `serve`. The number only serves to tell workers apart in a process list."""
    from redpoll.worker.main import main as run_worker

    run_worker(_child_pipe(pipe_fd))


@click.command(hidden=True)
@click.option("--pipe", "pipe_fd", type=int, required=True)
def control(pipe_fd: int) -> None:
    """The control plane, started by `serve`."""
    from redpoll.control.main import main as run_control

    run_control(_child_pipe(pipe_fd))


COMMANDS = (serve, check_config, version, worker, control)
