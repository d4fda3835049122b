"""The command `redpoll`: its subcommands, flags, output and exit codes.

Each noun (app, key, token, …) has a module, imported when a command of it runs. common.py has what they share.
execute.py runs a command in the server that owns the data folder, or in this process when no server runs. remote.py
reaches an app over the network. processes.py starts the server's own processes.

deploy/README.md "Command line" lists the exit codes.
"""

import contextlib
import functools
import gc
import importlib
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any, Final

import click

from redpoll import __version__
from redpoll.config.engine import has_engine

__all__ = ["EVERYWHERE", "main", "without_collections"]

# By module of this package: the commands that it has. A command's function has its name, with `_` for `-`.
_COMMANDS: Final = {
    "server": ("serve", "check-config", "version", "health", "reload"),
    "processes": ("worker", "control"),
    "messages": ("publish", "channels", "trace", "tail"),
    "subscribe": ("subscribe",),
    "apps": ("app",),
    "imports": ("import",),
    "apply": ("apply", "export"),
    "credentials": ("key", "token", "grant"),
    "history": ("history",),
    "webhooks": ("webhook", "dead-letter"),
    "users": ("user", "first-login"),
    "connections": ("connections",),
    "debug": ("debug",),
    "demo": ("demo",),
    "usage": ("usage",),
    "nodes": ("node", "balance"),
    "backup": ("backup", "restore"),
    "store": ("store", "migrate"),
    "doctor": ("doctor",),
    "fake": ("fake",),
    "tools": ("openapi", "completion"),
}
# Commands that run without the engine too. What they do in the server's data folder needs it.
EVERYWHERE: Final = frozenset(
    {
        "channels",
        "check-config",
        "completion",
        "doctor",
        "fake",
        "openapi",
        "publish",
        "subscribe",
        "tail",
        "trace",
        "version",
        "webhook listen",
    }
)
_INTERRUPTED: Final = 130
_MODULES: Final = {name: module for module, names in _COMMANDS.items() for name in names}


@contextlib.contextmanager
def without_collections() -> Iterator[None]:
    """For imports: they only create objects that live as long as the process. Garbage collections would walk these
    again and again, for up to a sixth of the time that a start takes. So none walks them, also later, and also not the
    interpreter's last ones, which take as long as the rest of a stop."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()


def _without_engine(command: click.Command, words: str) -> click.Command:
    """The command, which says so where it needs the engine. Its --help stays."""
    if words in EVERYWHERE:
        return command
    if isinstance(command, click.Group):
        for name, inner in command.commands.items():
            _without_engine(inner, f"{words} {name}")
    elif command.callback is not None:
        command.callback = _checking(command.callback, f"redpoll {words}")
    return command


def _checking(callback: Callable[..., Any], words: str) -> Callable[..., Any]:
    @functools.wraps(callback)
    def checked(*arguments: Any, **options: Any) -> Any:
        from redpoll.cli.common import need_engine

        need_engine(words)
        return callback(*arguments, **options)

    return checked


@functools.cache
def _module(name: str) -> ModuleType:
    with without_collections():
        return importlib.import_module(name)


class _Commands(click.Group):
    """Imports the module of a command when the command is run, completed or shown. All modules take longer to import
    than most commands to run, and each process of a server would keep them in memory."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(_MODULES)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _MODULES:
            return None
        module = _module(f"redpoll.cli.{_MODULES[cmd_name]}")
        command = getattr(module, "import_" if cmd_name == "import" else cmd_name.replace("-", "_"))
        assert isinstance(command, click.Command)
        return command if has_engine() else _without_engine(command, cmd_name)

    def invoke(self, ctx: click.Context) -> Any:
        """Exits with 130 at Ctrl-C. click's own exit code for it is 1, which means a failure."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            sys.exit(_INTERRUPTED)
        except click.Abort as abort:
            # At a prompt. The end of the input aborts it too, and is a failure.
            if not isinstance(abort.__context__, KeyboardInterrupt):
                raise
            click.echo(err=True)
            sys.exit(_INTERRUPTED)


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="redpoll", message="%(prog)s %(version)s")
def main() -> None:
    """A self-hosted real-time messaging server that speaks the Pusher Channels protocol.

    \b
    Examples:
      redpoll serve
      redpoll subscribe news
      redpoll publish news headline '{"title":"Hello"}'
      redpoll doctor
    """
