"""The settings: one table that flags, environment, TOML file, sample file and `check-config` all read.

A value comes from the first of: flag, environment, file, default. Every fault is found before anything is
started, and all are told at once. Knows nothing of what the settings do.
"""

import difflib
import os
import re
import textwrap
import tomllib
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

import msgspec
from msgspec import Meta

__all__ = ["TABLE", "ConfigError", "Fault", "Setting", "Settings", "load", "sample", "suggestion"]

PREFIX = "REDPOLL_"


@dataclass(frozen=True)
class Alias:
    """Another server's variable that sets one of ours. `per_unit`: how many of its units are one of ours."""

    variable: str
    per_unit: int = 1


def _about(text: str, unit: str = "", *, aliases: tuple[Alias, ...] = (), flag: bool = True, **bounds: Any) -> Meta:
    return Meta(description=text, extra={"unit": unit, "aliases": aliases, "flag": flag}, **bounds)


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """Every setting with its type, bounds, unit, default and explanation: the table itself.

    The names are those of the TOML file, of the flags (`--data-dir`) and of the environment
    (`REDPOLL_DATA_DIR`). Times are seconds, sizes bytes. Aliases are the names that soketi and Pusher's own
    libraries use.
    """

    host: Annotated[
        str,
        _about("Address of the public port, for WebSockets and the HTTP API. `::` listens on IPv4 as well."),
    ] = "0.0.0.0"
    port: Annotated[
        int,
        _about(
            "The public port. 0 takes any free one; the ready line names it.",
            aliases=(Alias("SOKETI_PORT"),),
            ge=0,
            le=65535,
        ),
    ] = 6001
    control_host: Annotated[
        str,
        _about("Address of the control port: metrics, health and the same HTTP API. Keep it private."),
    ] = "127.0.0.1"
    control_port: Annotated[
        int,
        _about(
            "The control port. 0 takes any free one.",
            aliases=(Alias("SOKETI_METRICS_SERVER_PORT"),),
            ge=0,
            le=65535,
        ),
    ] = 9601
    workers: Annotated[
        int, _about("Worker processes. 0 starts one for each CPU that this process may use.", ge=0, le=1024)
    ] = 0
    redis_url: Annotated[
        str,
        _about(
            "Redis or Valkey 7 or newer: `redis://[[USER]:PASSWORD@]HOST[:PORT][/DB]` or `unix:///PATH`. "
            "Empty: one of our own is started, with its data in the data folder.",
            aliases=(Alias("REDIS_URL"),),
        ),
    ] = ""
    redis_prefix: Annotated[
        str,
        _about(
            "What every key and topic in Redis begins with. Servers that share a Redis and a prefix are one cluster.",
            pattern=r"^[A-Za-z0-9_.-]{1,32}\Z",
        ),
    ] = "rp"
    redis_appendfsync: Annotated[
        Literal["no", "always"],
        _about(
            "When our own Redis asks the disk to keep what it wrote. `no`: what was acknowledged survives "
            "killed processes, a power loss may cost about the last 30 s. `always`: it survives that too, "
            "and each change waits for the disk. Means nothing when `redis_url` is given."
        ),
    ] = "no"
    data_dir: Annotated[
        str,
        _about(
            "Folder of the record store (apps and keys) and of our own Redis. Made with mode 0700.",
            min_length=1,
        ),
    ] = "./redpoll-data"
    log_level: Annotated[Literal["debug", "info", "warning", "error"], _about("The least grave lines to log.")] = "info"
    log_format: Annotated[
        Literal["text", "json"], _about("Log lines on stderr: `text` is for people, `json` for collectors.")
    ] = "text"
    activity_timeout_s: Annotated[
        float,
        _about(
            "A connection from which nothing came for so long is pinged. Told to clients, which ping by it as well.",
            "s",
            ge=1,
            le=3600,
        ),
    ] = 120.0
    pong_timeout_s: Annotated[
        float,
        _about(
            "A connection that stays silent for so long after our ping is closed with 4201.",
            "s",
            gt=0,
            le=600,
        ),
    ] = 30.0
    head_timeout_s: Annotated[
        float,
        _about("A connection that has not sent a whole request head by then is closed.", "s", gt=0, le=600),
    ] = 10.0
    max_message_bytes: Annotated[
        int,
        _about(
            "The longest message taken from a client; a longer one closes its connection with 1009.",
            "bytes",
            ge=1024,
            le=64 * 1024 * 1024,
        ),
    ] = 65_536
    max_owed_bytes: Annotated[
        int,
        _about(
            "What one connection may be owed while it does not read; beyond it, it is closed with 4100.",
            "bytes",
            ge=64 * 1024,
            le=1024 * 1024 * 1024,
        ),
    ] = 1_048_576
    max_channels_per_connection: Annotated[
        int, _about("Channels that one connection may be subscribed to.", ge=1, le=1_000_000)
    ] = 1_000
    client_events_per_second: Annotated[
        int, _about("Client events that one connection may trigger; more are refused with 4301.", "1/s", ge=1)
    ] = 10
    shutdown_grace_s: Annotated[
        float,
        _about(
            "How long the workers may take to close their connections at a stop before they are killed.",
            "s",
            aliases=(Alias("SOKETI_SHUTDOWN_GRACE_PERIOD", per_unit=1000),),
            ge=0,
            le=3600,
        ),
    ] = 10.0
    app_id: Annotated[
        str,
        _about(
            "An app that is created, or brought up to date, at every start: its id, decimal digits. Give all "
            "three of `app_id`, `app_key`, `app_secret` or none; with none, the first start makes an app and "
            "prints it.",
            aliases=(Alias("SOKETI_DEFAULT_APP_ID"), Alias("PUSHER_APP_ID")),
            flag=False,
        ),
    ] = ""
    app_key: Annotated[
        str,
        _about(
            "The key of that app: letters, digits, `-` and `_`.",
            aliases=(Alias("SOKETI_DEFAULT_APP_KEY"), Alias("PUSHER_APP_KEY")),
            flag=False,
        ),
    ] = ""
    app_secret: Annotated[
        str,
        _about(
            "The secret of that app, of the same characters. Has no flag: a command line is there for all to read.",
            aliases=(Alias("SOKETI_DEFAULT_APP_SECRET"), Alias("PUSHER_APP_SECRET")),
            flag=False,
        ),
    ] = ""


@dataclass(frozen=True)
class Setting:
    """One row of the table, as flags, sample file and documentation want it."""

    name: str
    type: Any
    unit: str
    default: Any
    help: str
    aliases: tuple[Alias, ...]
    has_flag: bool

    @property
    def variable(self) -> str:
        return PREFIX + self.name.upper()

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")


def _rows() -> tuple[Setting, ...]:
    hints = typing.get_type_hints(Settings, include_extras=True)
    rows = []
    for field in msgspec.structs.fields(Settings):
        meta = typing.get_args(hints[field.name])[1]
        extra = meta.extra
        rows.append(
            Setting(
                field.name,
                hints[field.name],
                extra["unit"],
                field.default,
                meta.description,
                extra["aliases"],
                extra["flag"],
            )
        )
    return tuple(rows)


TABLE = _rows()
_BY_NAME = {setting.name: setting for setting in TABLE}
_APP = ("app_id", "app_key", "app_secret")
# Variables that begin like settings and are none: where the file is, and how the extensions are built.
_NOT_SETTINGS = {PREFIX + "CONFIG", PREFIX + "DEBUG"}


@dataclass(frozen=True)
class Fault:
    """One thing wrong: `path` says where (`--port`, `REDPOLL_PORT`, `redpoll.toml: $.port`), `text` what."""

    path: str
    text: str

    def __str__(self) -> str:
        return f"{self.path}: {self.text}"


class ConfigError(Exception):
    """The settings can't be used. Carries every fault that was found, in the order of the table."""

    def __init__(self, faults: list[Fault]) -> None:
        super().__init__(faults)
        self.faults = faults

    def __str__(self) -> str:
        return "\n".join(str(fault) for fault in self.faults)


@dataclass(frozen=True)
class _Given:
    """A value as it was written, and where."""

    value: Any
    path: str
    strict: bool  # a file has types; flags and the environment have text
    per_unit: int = 1


def load(
    flags: Mapping[str, Any], environment: Mapping[str, str], config_path: str | None = None
) -> tuple[Settings, list[str]]:
    """Settings from flags (by name; None is not given), environment and TOML file, and warnings for the log.

    `config_path` is the flag's; without it `REDPOLL_CONFIG` is asked. An empty variable counts as not given.
    Raises ConfigError with every fault at once.
    """
    faults: list[Fault] = []
    given = _from_file(config_path or environment.get(PREFIX + "CONFIG") or None, faults)
    given |= _from_environment(environment)
    for name, value in flags.items():
        if value is not None:
            given[name] = _Given(value, _BY_NAME[name].flag, strict=False)
    values: dict[str, Any] = {}
    for setting in TABLE:
        entry = given.get(setting.name)
        if entry is not None:
            try:
                values[setting.name] = _converted(entry, setting)
            except (msgspec.ValidationError, ValueError) as error:
                faults.append(Fault(entry.path, _explained(error, entry, setting)))
    _check_together(values, given, faults)
    if faults:
        raise ConfigError(faults)
    values["workers"] = values.get("workers") or len(os.sched_getaffinity(0))
    return Settings(**values), _unknown_variables(environment)


def _converted(entry: _Given, setting: Setting) -> Any:
    value = entry.value
    if entry.per_unit != 1:
        value = float(value) / entry.per_unit
    return msgspec.convert(value, setting.type, strict=entry.strict)


def _explained(error: Exception, entry: _Given, setting: Setting) -> str:
    text = str(error)
    # The path of a lone value is `$`, which says nothing; ours says where it was written.
    text = text.removesuffix(" - at `$`")
    # A secret is not repeated, not even a wrong one.
    return text if setting.name == "app_secret" else f"{text}; it is {entry.value!r}"


def _from_file(path: str | None, faults: list[Fault]) -> dict[str, _Given]:
    if path is None:
        return {}
    try:
        document = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        faults.append(Fault(path, f"can't be read: {error.strerror}"))
        return {}
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        faults.append(Fault(path, f"is not TOML: {error}"))
        return {}
    given = {}
    for name, value in document.items():
        where = f"{path}: $.{name}"
        if name in _BY_NAME:
            given[name] = _Given(value, where, strict=True)
        else:
            faults.append(Fault(where, f"no such setting{suggestion(name, _BY_NAME)}"))
    return given


def _from_environment(environment: Mapping[str, str]) -> dict[str, _Given]:
    given = {}
    for setting in TABLE:
        if setting.name not in _APP:
            for alias in (Alias(setting.variable), *setting.aliases):
                if environment.get(alias.variable):
                    value = environment[alias.variable]
                    given[setting.name] = _Given(value, alias.variable, strict=False, per_unit=alias.per_unit)
                    break
    # The three of an app come from one family of names: a key of one and a secret of another open nothing.
    families = zip(*((Alias(_BY_NAME[name].variable), *_BY_NAME[name].aliases) for name in _APP), strict=True)
    for family in families:
        if any(environment.get(alias.variable) for alias in family):
            for name, alias in zip(_APP, family, strict=True):
                if environment.get(alias.variable):
                    given[name] = _Given(environment[alias.variable], alias.variable, strict=False)
            break
    return given


def _check_together(values: dict[str, Any], given: dict[str, _Given], faults: list[Fault]) -> None:
    """What the type of one value can't say: its form, and how it goes with others."""

    def fault(name: str, text: str) -> None:
        faults.append(Fault(given[name].path, text))

    missing = [name for name in _APP if not values.get(name) and name not in given]
    if 0 < len(missing) < len(_APP):
        wanted = ", ".join(f"{_BY_NAME[name].variable} ({name})" for name in missing)
        faults.append(Fault(wanted, "is missing: an app is given by its id, key and secret, or not at all"))
    if values.get("app_id") and not re.fullmatch(r"[0-9]{1,18}", values["app_id"]):
        fault("app_id", f"an app's id is 1 to 18 decimal digits, not {values['app_id']!r}")
    # What has a meaning in PUSHER_URL (`:` `/` `@`) or in a signature's `KEY:HEX` can't be in a key or
    # secret.
    for name in ("app_key", "app_secret"):
        if values.get(name) and not re.fullmatch(r"[A-Za-z0-9_-]{1,128}", values[name]):
            fault(name, "may hold letters, digits, `-` and `_` only, at most 128")
    if values.get("redis_url"):
        trouble = _redis_url_fault(values["redis_url"])
        if trouble:
            fault("redis_url", trouble)
    port, control_port = values.get("port", 6001), values.get("control_port", 9601)
    if port and port == control_port:
        faults.append(
            Fault(
                (given.get("control_port") or given["port"]).path,
                f"public and control port are both {port}; they are two",
            )
        )


def _redis_url_fault(url: str) -> str | None:
    try:
        parts = urlsplit(url)
        parts.port  # noqa: B018  raises where it is no port
    except ValueError as error:
        return f"is no URL: {error}"
    if parts.scheme == "unix":
        return None if parts.path.startswith("/") else "wants an absolute path: unix:///run/redis.sock"
    if parts.scheme != "redis":
        return f"begins with redis:// or unix://, not {parts.scheme or url.split('@')[-1]!r}"
    if not parts.hostname:
        return "names no host"
    database = parts.path.strip("/")
    return None if not database or database.isdecimal() else f"database {database!r} is not a number"


def _unknown_variables(environment: Mapping[str, str]) -> list[str]:
    known = {setting.variable for setting in TABLE} | _NOT_SETTINGS
    return [
        f"{name} is no setting{suggestion(name, known)}"
        for name in sorted(environment)
        if name.startswith(PREFIX) and name not in known
    ]


def suggestion(name: str, known: typing.Iterable[str]) -> str:
    """`; did you mean X?` where something known is near, else an empty string."""
    near = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {near[0]}?" if near else ""


def sample() -> str:
    """The text of deploy/redpoll.toml: every setting with its explanation and default, commented out."""
    lines = [
        "# redpoll: every setting with its default.",
        "# A flag (--port) wins over the environment (REDPOLL_PORT), that over this file.",
        "# `redpoll check-config --config FILE` explains every fault of a file at once.",
    ]
    for setting in TABLE:
        unit = f" [{setting.unit}]" if setting.unit else ""
        text = f"{setting.help}{unit}"
        lines += ["", *textwrap.wrap(text, 108, initial_indent="# ", subsequent_indent="# ")]
        lines.append(f"#{setting.name} = {_toml(setting.default)}")
    return "\n".join(lines) + "\n"


def _toml(value: str | int | float) -> str:
    # A JSON string is a TOML string as well.
    return msgspec.json.encode(value).decode()
