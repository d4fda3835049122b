"""What the commands share: reading the settings, reporting faults, printing times, untrusted text and JSON."""

import os
import re
import sys
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from typing import Any, NoReturn

import click

from redpoll.config import config, engine
from redpoll.text import json_text
from redpoll.text.terminal_text import safe

__all__ = [
    "fail",
    "need_engine",
    "print_json",
    "refuse",
    "safe",
    "seconds_of",
    "settings_of",
    "split_words",
    "time_text",
    "with_config",
]


def with_config(command: Callable[..., None]) -> Callable[..., None]:
    return click.option("--config", "config_path", metavar="FILE", help="TOML file with settings.")(command)


def settings_of(
    config_path: str | None, flags: dict[str, Any], *, read_files: bool = True, files_code: int = 2
) -> config.Settings:
    """Reads the settings. Prints every fault and exits with 2 if there is one; with `files_code` if only the files that
    they name are at fault."""
    try:
        settings, warnings = config.load(flags, os.environ, config_path, read_files=read_files)
    except config.ConfigError as error:
        try:
            config.load(flags, os.environ, config_path, read_files=False)
        except config.ConfigError:
            refuse(error.faults)
        refuse(error.faults, files_code)
    for warning in warnings:
        click.echo(f"warning: {warning}", err=True)
    return settings


def refuse(faults: Iterable[object], code: int = 2) -> NoReturn:
    """Prints the faults and exits, with 2 if the command line or the settings are wrong."""
    for fault in faults:
        click.echo(str(fault), err=True)
    sys.exit(code)


def fail(sentence: object) -> NoReturn:
    """Prints the sentence and exits with 1: the command could not be executed."""
    click.echo(f"redpoll: {sentence}", err=True)
    sys.exit(1)


def need_engine(what: str) -> None:
    """Exits with 1 and one sentence if this installation has no engine; `what` needs it."""
    if not engine.has_engine():
        fail(engine.lack_of_engine(what))


_SECONDS = {"s": 1, "m": 60, "h": 3_600, "d": 86_400}


def seconds_of(text: str, option: str) -> int:
    """The seconds of a duration such as 30s, 10m, 12h or 30d. Exits with 2 if it is none; `option` is what to name."""
    match = re.fullmatch(r"([1-9][0-9]{0,9})([smhd])", text)
    if match is None:
        refuse([f"{option}: must be a number followed by s, m, h or d, such as 30d; got {text!r}"])
    return int(match[1]) * _SECONDS[match[2]]


def time_text(at_s: float | None) -> str:
    """A Unix time as text for people; "never" for None."""
    return "never" if at_s is None else datetime.fromtimestamp(at_s, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def split_words(texts: Iterable[str]) -> list[str]:
    """The words of an option that may be repeated and may contain commas."""
    return [word for text in texts for part in text.split(",") if (word := part.strip())]


def print_json(value: Any) -> None:
    click.echo(json_text.indented(value))
