"""Commands on the records: their common options, the app that may be left out, and how they are carried out.

A command that is one verb of control/commands/commands.py is a function that returns the verb's arguments, under
`executes(verb, show)`. Others get the settings from `records_command` and call `run` (execute.py) themselves.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import click

from redpoll.cli.common import print_json, refuse, settings_of, with_config
from redpoll.cli.execute import run
from redpoll.config import config

__all__ = ["AppCommand", "executes", "only_app", "records_command"]


class AppCommand(click.Command):
    """A command whose first argument is `app_id`. It may be left out where the server has one app, also if more
    arguments follow."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        arguments = [param for param in self.params if isinstance(param, click.Argument)]
        if args and len(arguments) > 1 and not ctx.resilient_parsing:
            values, _, _ = self.make_parser(ctx).parse_args(list(args))
            first = values.get(arguments[0].name or "")
            is_missing = any(
                param.required and not isinstance(values.get(param.name or ""), str) for param in arguments[1:]
            )
            # NAME=VALUE of `app set`, or a URL: no id has such signs.
            if isinstance(first, str) and (is_missing or "=" in first or "://" in first):
                args = ["", *args]
        return super().parse_args(ctx, args)


def records_command(command: Callable[..., None]) -> Callable[..., None]:
    """Adds the options of every command on records: --config, --data-dir and --json.

    The command is called with `settings` and `as_json` instead. If it is an AppCommand, `app_id` is never empty, unless
    it has the option --manage and that is given.
    """

    @functools.wraps(command)
    def with_settings(config_path: str | None, data_dir: str | None, **words: Any) -> None:
        settings = settings_of(config_path, {"data_dir": data_dir}, read_files=False)
        if isinstance(click.get_current_context().command, AppCommand) and not words.get("manage"):
            words["app_id"] = words["app_id"] or only_app(settings, "APP_ID")
        command(settings=settings, **words)

    wrapped = click.option("--json", "as_json", is_flag=True, help="Print JSON.")(with_settings)
    wrapped = click.option("--data-dir", metavar="FOLDER", help="The server's data folder.")(wrapped)
    return with_config(wrapped)


def executes(
    verb: str, show: Callable[[Any], None], passed: Callable[[Any], bool] = lambda _result: True
) -> Callable[[Callable[..., dict[str, Any]]], Callable[..., None]]:
    """Makes a function that returns the arguments of `verb` a command on records. `show` prints the verb's result for
    people; with --json, the result itself is printed. Then the command exits with 1 if the result isn't `passed`."""

    def decorate(arguments: Callable[..., dict[str, Any]]) -> Callable[..., None]:
        @functools.wraps(arguments)
        def command(settings: config.Settings, as_json: bool, **words: Any) -> None:
            result = run(settings, verb, arguments(**words))
            (print_json if as_json else show)(result)
            if not passed(result):
                sys.exit(1)

        return records_command(command)

    return decorate


def only_app(settings: config.Settings, choice: str) -> str:
    """The id of the only app of the data folder. Exits with 2 if there is another number of apps; `choice` is how to
    name one."""
    apps = run(settings, "app list", {})
    if len(apps) != 1:
        ids = ", ".join(app["id"] for app in apps)
        refuse([f"this server has {len(apps)} apps: choose one with {choice} ({ids})" if apps else "there is no app"])
    app_id: str = apps[0]["id"]
    return app_id
