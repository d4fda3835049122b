"""What the commands share: where the settings come from, how faults are told, how times and JSON are printed."""

import functools
import json
import os
import sys
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from typing import Any, NoReturn

import click

from redpoll import config

__all__ = [
    "fail",
    "print_json",
    "records_command",
    "refuse",
    "safe",
    "settings_of",
    "when",
    "with_config",
    "words_of",
]


def with_config(command: Callable[..., None]) -> Callable[..., None]:
    return click.option("--config", "config_path", metavar="FILE", help="TOML file with settings.")(command)


def settings_of(config_path: str | None, flags: dict[str, Any], *, look_into_files: bool = True) -> config.Settings:
    """Reads the settings; with faults, prints them all and ends with 2."""
    try:
        settings, warnings = config.load(flags, os.environ, config_path, look_into_files=look_into_files)
    except config.ConfigError as error:
        refuse(error.faults)
    for warning in warnings:
        click.echo(f"warning: {warning}", err=True)
    return settings


def refuse(faults: Iterable[object]) -> NoReturn:
    for fault in faults:
        click.echo(str(fault), err=True)
    sys.exit(2)


def fail(sentence: object) -> NoReturn:
    click.echo(f"redpoll: {sentence}", err=True)
    sys.exit(1)


def records_command(command: Callable[..., None]) -> Callable[..., None]:
    """What every command on records takes: where they are, and how to print. It is called with `settings` for it."""

    @functools.wraps(command)
    def with_settings(config_path: str | None, data_dir: str | None, **words: Any) -> None:
        command(settings=settings_of(config_path, {"data_dir": data_dir}, look_into_files=False), **words)

    wrapped = click.option("--json", "as_json", is_flag=True, help="Print JSON.")(with_settings)
    wrapped = click.option("--data-dir", metavar="FOLDER", help="The server's data folder.")(wrapped)
    return with_config(wrapped)


def when(at_s: float | None) -> str:
    """A Unix time for people; null is never."""
    return "never" if at_s is None else datetime.fromtimestamp(at_s, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def safe(text: str, most: int = 200) -> str:
    """Text of anybody's making as it may go to a terminal: on one line, without control characters, cut to `most`."""
    shown = "".join(each if each.isprintable() else ascii(each)[1:-1] for each in text[: most + 1])
    return shown if len(shown) <= most else shown[:most] + "…"


def words_of(texts: Iterable[str]) -> list[str]:
    """What an option was given that may be repeated or have commas."""
    return [word for each in texts for part in each.split(",") if (word := part.strip())]


def print_json(value: Any) -> None:
    click.echo(json.dumps(value, indent=2, ensure_ascii=False))
