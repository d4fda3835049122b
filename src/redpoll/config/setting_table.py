"""The settings as a table, in the form that flags, environment variables and the sample file need."""

import textwrap
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from redpoll.config.settings import Alias, Settings

__all__ = [
    "PREFIX",
    "TABLE",
    "VARIABLES",
    "Setting",
    "flag_of",
    "sample",
    "variable_of",
    "without_secrets",
    "without_settings",
]

PREFIX = "REDPOLL_"


@dataclass(frozen=True)
class Setting:
    """One row of the table, in the form that flags and the sample file need."""

    name: str
    type: Any
    unit: str
    default: Any
    help: str
    aliases: tuple[Alias, ...]
    has_flag: bool
    is_secret: bool
    # `redpoll reload` applies a change of it; a change of any other needs a restart.
    is_live: bool
    # An earlier name, which is refused.
    was: str
    # A list, of which the file may have one element as a string.
    may_be_one: bool

    @property
    def is_list(self) -> bool:
        return isinstance(self.default, tuple)

    @property
    def may_be_none(self) -> bool:
        return self.default is None

    @property
    def variable(self) -> str:
        return variable_of(self.name)

    @property
    def flag(self) -> str:
        return flag_of(self.name)


def variable_of(name: str) -> str:
    return PREFIX + name.upper()


def flag_of(name: str) -> str:
    return "--" + name.replace("_", "-")


def _rows() -> tuple[Setting, ...]:
    hints = typing.get_type_hints(Settings, include_extras=True)
    rows = []
    for field in msgspec.structs.fields(Settings):
        kind, meta = typing.get_args(hints[field.name])
        # Error messages name the type that may be written, and null can't be written.
        kinds = [option for option in typing.get_args(kind) if option is not type(None)]
        extra = meta.extra
        rows.append(
            Setting(
                field.name,
                kinds[0] if field.default is None else hints[field.name],
                extra["unit"],
                field.default,
                meta.description,
                extra["aliases"],
                extra["flag"],
                extra["secret"],
                extra["live"],
                extra["was"],
                extra["one"],
            )
        )
    return tuple(rows)


TABLE = _rows()
_NO_SECRETS = {setting.name: "" for setting in TABLE if setting.is_secret}
# Every environment variable that sets a setting, with the aliases.
VARIABLES = frozenset(
    variable for setting in TABLE for variable in (setting.variable, *(alias.variable for alias in setting.aliases))
)


def without_secrets(settings: Settings) -> Settings:
    """The settings for a worker, which needs none of the secret ones. `redis_url` isn't one of these."""
    return msgspec.structs.replace(settings, **_NO_SECRETS)


def without_settings(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment for a server that isn't the operator's: without the operator's settings and file."""
    return {name: value for name, value in environment.items() if name not in VARIABLES and not name.startswith(PREFIX)}


def sample() -> str:
    """The text of deploy/redpoll.toml: every setting with its explanation and default, commented out."""
    lines = [
        "# redpoll: every setting with its default.",
        "# A flag (--port) overrides the environment (REDPOLL_PORT), which overrides this file.",
        "# `redpoll check-config --config FILE` reports every error in a file at once.",
        "# A change of the file counts from the next start on, or where it says so, from `redpoll reload` on.",
    ]
    for setting in TABLE:
        unit = f" [{setting.unit}]" if setting.unit else ""
        text = f"{setting.help}{unit}"
        text += " Applied by `redpoll reload`." if setting.is_live else ""
        lines += ["", *textwrap.wrap(text, 108, initial_indent="# ", subsequent_indent="# ")]
        lines.append(f"#{setting.name} = {_toml(setting.default)}")
    return "\n".join(lines) + "\n"


def _toml(value: str | int | float | tuple[str, ...] | None) -> str:
    if value is None:
        value = ""  # TOML has no null
    # JSON's strings, numbers, arrays and booleans are valid TOML.
    return msgspec.json.encode(value).decode()
