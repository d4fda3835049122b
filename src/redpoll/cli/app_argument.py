"""The argument APP_ID of commands on records, which may be left out where the server has one app."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import click

from redpoll.cli.common import records_command, refuse
from redpoll.cli.execute import run
from redpoll.config import config

__all__ = ["AppCommand", "app_records_command", "only_app"]


class AppCommand(click.Command):
    """A command whose first argument names an app. If a later argument would be missing, the first was left out."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        arguments = [param for param in self.params if isinstance(param, click.Argument)]
        if args and len(arguments) > 1 and not ctx.resilient_parsing:
            given, _, _ = self.make_parser(ctx).parse_args(list(args))
            first = given.get(arguments[0].name or "")
            is_missing = any(
                param.required and not isinstance(given.get(param.name or ""), str) for param in arguments[1:]
            )
            # NAME=VALUE of `app set`: no id has an equals sign.
            if isinstance(first, str) and (is_missing or "=" in first):
                args = ["", *args]
        return super().parse_args(ctx, args)


def app_records_command(command: Callable[..., None]) -> Callable[..., None]:
    """`records_command` for a command with the argument `app_id`: without it, the command gets the only app's id."""

    @functools.wraps(command)
    def with_app(app_id: str | None, settings: config.Settings, **words: Any) -> None:
        command(app_id=app_id or only_app(settings, "APP_ID"), settings=settings, **words)

    return records_command(with_app)


def only_app(settings: config.Settings, choice: str) -> str:
    """The id of the only app of the data folder. Exits with 2 if there is another number of apps; `choice` is how to
    name one."""
    apps = run(settings, "app list", {})
    if len(apps) != 1:
        ids = ", ".join(app["id"] for app in apps)
        refuse([f"this server has {len(apps)} apps: choose one with {choice} ({ids})" if apps else "there is no app"])
    app_id: str = apps[0]["id"]
    return app_id
