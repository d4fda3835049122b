"""Reads the settings from flags, environment variables and a TOML file, and checks them.

A flag overrides the environment, the environment overrides the file, and the file overrides the default. All faults are
found before anything starts and are reported together. settings.py defines which settings exist.
"""

import contextlib
import difflib
import ipaddress
import itertools
import math
import os
import re
import shlex
import tomllib
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from redpoll.config import certificate, certificate_files, single_sign_on
from redpoll.config.addresses import ADDRESS_FAULTS, checks_server, database_files
from redpoll.config.app_names import (
    APP_ID_RULE,
    APP_KEY_RULE,
    APP_SECRET_RULE,
    valid_app_id,
    valid_app_key,
    valid_app_secret,
)
from redpoll.config.cgroups import usable_cpus
from redpoll.config.setting_table import PREFIX, TABLE, Setting, flag_of, sample, variable_of
from redpoll.config.settings import Alias, Settings

__all__ = ["TABLE", "ConfigError", "Fault", "Setting", "Settings", "flag_of", "load", "sample", "suggestion"]

_BY_NAME = {setting.name: setting for setting in TABLE}
_RENAMED = {setting.was: setting for setting in TABLE if setting.was}
_APP = ("app_id", "app_key", "app_secret")
_SHORT_PASSWORD_CHARS = 12
# URLs that may contain a password or a token, though the settings aren't secret as a whole.
_WITH_CREDENTIALS = {"otel_endpoint", "public_url", "redis_url"}
_PATH_PREFIX = re.compile(r"[A-Za-z0-9._~-]+(/[A-Za-z0-9._~-]+)*|")
_HOST_NAME = re.compile(r"(\*\.)?[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*\.?")
# Variables with our prefix that are not settings: the path of the file, how a release is built, and what
# redpoll-client and `redpoll webhook listen` read.
_NOT_SETTINGS = {PREFIX + name for name in ("CONFIG", "DEBUG", "SIGNING_KEY", "TOKEN", "URL")}
# Kubernetes gives each pod such variables for each Service of its namespace (Docker: links), so a Service that is named
# `redpoll` gives REDPOLL_PORT=tcp://10.96.12.3:80, REDPOLL_SERVICE_HOST and others.
_SERVICE_LINK = re.compile(
    r"([A-Z0-9]+_)+(SERVICE_HOST|SERVICE_PORT(_[A-Z0-9_]+)?|PORT_[0-9]+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)"
)
_LINKED_PORT = re.compile(r"(tcp|udp|sctp)://\S+:[0-9]+")


@dataclass(frozen=True)
class Fault:
    """One fault: `path` is where (`--port`, `REDPOLL_PORT`, `redpoll.toml: $.port`), `text` is what is wrong."""

    path: str
    text: str

    def __str__(self) -> str:
        return f"{self.path}: {self.text}"


class ConfigError(Exception):
    """The settings can't be used. `faults` has every fault that was found, in the order of the table."""

    def __init__(self, faults: list[Fault]) -> None:
        super().__init__(faults)
        self.faults = faults

    def __str__(self) -> str:
        return "\n".join(str(fault) for fault in self.faults)


@dataclass(frozen=True)
class _Entry:
    """A value as the operator wrote it, and where."""

    value: Any
    path: str
    strict: bool  # TOML values have types; flags and variables are text
    per_unit: int = 1
    file: str = ""  # empty for flags and variables


def load(
    flags: Mapping[str, Any],
    environment: Mapping[str, str],
    config_path: str | None = None,
    *,
    read_files: bool = True,
) -> tuple[Settings, list[str]]:
    """Reads the settings, and returns them with warnings for the log. Raises ConfigError with all faults.

    `flags` maps setting names to values, None where a flag is not given. `config_path` comes from --config; without it
    `REDPOLL_CONFIG` names the file. An empty variable counts as not set, and so do those that Kubernetes makes for
    Services. `read_files` False skips the checks of the certificate and key files, for commands whose user need not be
    able to read them.
    """
    faults: list[Fault] = []
    environment = {name: value for name, value in environment.items() if not _is_service_link(name, value)}
    entries = _from_file(config_path or environment.get(PREFIX + "CONFIG") or None, faults)
    entries |= _from_environment(environment, faults)
    for name, value in flags.items():
        if value is not None and name in _RENAMED:
            faults.append(Fault(flag_of(name), f"was renamed to {_RENAMED[name].flag}"))
        elif value is not None:
            entries[name] = _Entry(value, _BY_NAME[name].flag, strict=False)
    values: dict[str, Any] = {}
    for setting in TABLE:
        entry = entries.get(setting.name)
        if entry is not None:
            try:
                values[setting.name] = _converted(entry, setting)
            except (msgspec.ValidationError, ValueError) as error:
                faults.append(Fault(entry.path, _explained(error, entry, setting)))
    _check_together(values, entries, faults)
    _check_tls(values, entries, faults, read_files)
    _check_authorities(values, entries, faults, read_files)
    _check_redis_certificate(values, entries, faults, read_files)
    _check_database_files(values, entries, faults, read_files)
    if faults:
        raise ConfigError(faults)
    values["workers"] = values.get("workers") or math.ceil(usable_cpus())
    values["public_url"] = values.get("public_url", "").rstrip("/")
    prefix = values.get("path_prefix", "").strip("/")
    values["path_prefix"] = f"/{prefix}" if prefix else ""
    settings = Settings(**values)
    return settings, _unknown_variables(environment) + _doubts(settings) + _open_secrets(entries)


def _doubts(settings: Settings) -> list[str]:
    """Warnings about settings that are possible together, but hardly what the operator wants."""
    warnings = []
    if settings.tls_port is None and not settings.tls_client_ca and (settings.tls_cert or settings.tls_key):
        warnings.append("tls_cert or tls_key is set but tls_port is not: nothing is served over TLS")
    if settings.database_url and not settings.redis_url:
        warnings.append(
            "database_url is set but redis_url is not: only one server can use this database, because servers that "
            "share their records must share a Redis too"
        )
    files = settings.redis_ca_file or settings.redis_cert_file
    if files and not settings.redis_url.startswith("rediss"):
        warnings.append(
            "redis_ca_file or redis_cert_file is set but redis_url doesn't begin with rediss: no TLS is used"
        )
    if settings.database_url and not checks_server(settings.database_url):
        warnings.append(
            "database_url names another machine without sslmode=verify-full: anyone in between can read the "
            "password and the records; add ?sslmode=verify-full&sslrootcert=FILE, a file with the authorities you trust"
        )
    if settings.proxy_protocol and not settings.trusted_proxies:
        warnings.append(
            "proxy_protocol is on and trusted_proxies is empty: anyone who reaches the port can choose the address "
            "that limits and logs see; name the proxy in trusted_proxies, or let only the proxy reach the port"
        )
    if 0 < len(settings.admin_password) < _SHORT_PASSWORD_CHARS:
        warnings.append(f"admin_password has fewer than {_SHORT_PASSWORD_CHARS} characters and is easy to guess")
    return warnings


def _converted(entry: _Entry, setting: Setting) -> Any:
    value = entry.value
    if entry.per_unit != 1:
        value = float(value) / entry.per_unit
    if setting.may_be_none and value == "":
        return None
    if setting.is_list and isinstance(value, str) and not entry.strict:
        value = [item for part in value.split(",") if (item := part.strip())]
    elif setting.may_be_one and isinstance(value, str):
        value = [value] if value else []
    return msgspec.convert(value, setting.type, strict=entry.strict)


def _explained(error: Exception, entry: _Entry, setting: Setting) -> str:
    text = str(error)
    # msgspec's path of a single value is `$`; the fault's own path says where the value was written.
    text = text.removesuffix(" - at `$`")
    # Error messages must not contain secrets, not even wrong ones.
    return text if setting.is_secret or setting.name in _WITH_CREDENTIALS else f"{text}; got {entry.value!r}"


def _from_file(path: str | None, faults: list[Fault]) -> dict[str, _Entry]:
    if path is None:
        return {}
    try:
        document = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        faults.append(Fault(path, f"can't be read: {error.strerror}"))
        return {}
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        faults.append(Fault(path, f"is not valid TOML: {error}"))
        return {}
    entries = {}
    for name, value in document.items():
        value_path = f"{path}: $.{name}"
        if name in _BY_NAME:
            entries[name] = _Entry(value, value_path, strict=True, file=path)
        elif name in _RENAMED:
            faults.append(Fault(value_path, f"was renamed to {_RENAMED[name].name}"))
        else:
            faults.append(Fault(value_path, f"unknown setting{suggestion(name, _BY_NAME)}"))
    return entries


def _from_environment(environment: Mapping[str, str], faults: list[Fault]) -> dict[str, _Entry]:
    entries = {}
    for name, setting in _RENAMED.items():
        if environment.get(variable_of(name)):
            faults.append(Fault(variable_of(name), f"was renamed to {setting.variable}"))
    for setting in TABLE:
        if setting.name not in _APP:
            for alias in (Alias(setting.variable), *setting.aliases):
                if environment.get(alias.variable):
                    value = environment[alias.variable]
                    entries[setting.name] = _Entry(value, alias.variable, strict=False, per_unit=alias.per_unit)
                    break
    # The three values of an app must come from one family of variables: a key of one app and a secret of another don't
    # work together.
    families = zip(*((Alias(_BY_NAME[name].variable), *_BY_NAME[name].aliases) for name in _APP), strict=True)
    for family in families:
        if any(environment.get(alias.variable) for alias in family):
            for name, alias in zip(_APP, family, strict=True):
                if environment.get(alias.variable):
                    entries[name] = _Entry(environment[alias.variable], alias.variable, strict=False)
            break
    return entries


def _check_together(values: dict[str, Any], entries: dict[str, _Entry], faults: list[Fault]) -> None:
    """Checks what the types can't express: the form of a value, and values that depend on each other."""

    def fault(name: str, text: str) -> None:
        faults.append(Fault(entries[name].path, text))

    missing = [name for name in _APP if not values.get(name) and name not in entries]
    if 0 < len(missing) < len(_APP):
        variables = ", ".join(f"{_BY_NAME[name].variable} ({name})" for name in missing)
        faults.append(Fault(variables, "missing: set app_id, app_key and app_secret, or none of them"))
    if values.get("app_id") and not valid_app_id(values["app_id"]):
        fault("app_id", f"must have {APP_ID_RULE}; got {values['app_id']!r}")
    if values.get("app_key") and not valid_app_key(values["app_key"]):
        fault("app_key", f"must have {APP_KEY_RULE}; got {values['app_key']!r}")
    if values.get("app_secret") and not valid_app_secret(values["app_secret"]):
        fault("app_secret", f"must have {APP_SECRET_RULE}")
    if values.get("path_prefix") and not _PATH_PREFIX.fullmatch(values["path_prefix"].strip("/")):
        fault("path_prefix", f"must be a path of letters, digits and `-_.~/`; got {values['path_prefix']!r}")
    for name, fault_of in ADDRESS_FAULTS.items():
        reason = fault_of(values[name]) if values.get(name) else None
        if reason:
            fault(name, reason)
    for name in ("trusted_proxies", "webhook_allow_addresses"):
        for network in values.get(name, ()):
            try:
                ipaddress.ip_network(network)
            except ValueError as error:
                fault(name, f"is not an address or network: {error}")
    for host in values.get("control_names", ()):
        if not _HOST_NAME.fullmatch(host):
            fault("control_names", f"must be host names without scheme and port, or `*.` and a name; got {host!r}")
    for name, text in single_sign_on.faults_of(values):
        if name in entries:
            fault(name, text)
        else:
            faults.append(Fault(f"{_BY_NAME[name].variable} ({name})", text))
    if values.get("encryption_master_key"):
        try:
            Settings(encryption_master_key=values["encryption_master_key"]).master_key()
        except ValueError as error:
            fault("encryption_master_key", f"is not 32 bytes in base64: {error}")
    ports = {"public": "port", "control": "control_port", "TLS": "tls_port"}
    for (what, name), (other_what, other) in itertools.combinations(ports.items(), 2):
        port = values.get(name, _BY_NAME[name].default)
        if port and port == values.get(other, _BY_NAME[other].default):
            entry = entries.get(other) or entries[name]
            faults.append(Fault(entry.path, f"{what} port and {other_what} port are both {port}; use different ports"))


def _check_tls(values: dict[str, Any], entries: dict[str, _Entry], faults: list[Fault], read_files: bool) -> None:
    """Checks that what has TLS has certificates and their keys, that all can be read, and that they belong together."""
    port = "a TLS port" if values.get("tls_port") is not None else "a control port with TLS (tls_client_ca)"
    if values.get("tls_port") is None and not values.get("tls_client_ca"):
        return
    if not values.get("tls_cert"):
        faults.append(Fault(f"{_BY_NAME['tls_cert'].variable} (tls_cert)", f"missing: {port} needs a certificate"))
        return
    if not read_files:
        return
    try:
        certificate_files.find(Settings(**{name: values.get(name, ()) for name in ("tls_cert", "tls_key", "tls_ocsp")}))
    except certificate.PairError as error:
        for part, text in error.faults.items():
            name = f"tls_{part}"
            faults.append(Fault(entries[name].path if name in entries else f"{_BY_NAME[name].variable} ({name})", text))


def _check_authorities(
    values: dict[str, Any], entries: dict[str, _Entry], faults: list[Fault], read_files: bool
) -> None:
    """Checks the files of certificates that we trust."""
    for name in ("webhook_ca_file", "redis_ca_file", "tls_client_ca"):
        path = values.get(name)
        text = _authorities_fault(path) if path and read_files else None
        if text:
            faults.append(Fault(entries[name].path, text))


def _authorities_fault(path: str) -> str | None:
    try:
        import ssl
    except ImportError:
        return certificate.NO_SSL
    try:
        ssl.create_default_context().load_verify_locations(cafile=path)
    except ssl.SSLError:
        return f"{path} contains no PEM certificates"
    except OSError as error:
        return f"{path} can't be read: {error.strerror}"
    return None


def _check_redis_certificate(
    values: dict[str, Any], entries: dict[str, _Entry], faults: list[Fault], read_files: bool
) -> None:
    """Checks the certificate with which redpoll identifies itself to Redis, and its key."""
    names = ("redis_cert_file", "redis_key_file")
    missing = [name for name in names if not values.get(name)]
    if len(missing) == 1:
        variable = f"{_BY_NAME[missing[0]].variable} ({missing[0]})"
        faults.append(Fault(variable, "missing: a certificate for Redis needs its key, and the key its certificate"))
    if missing or not read_files:
        return
    try:
        certificate.read_pair(values["redis_cert_file"], values["redis_key_file"])
    except certificate.PairError as error:
        faults.extend(Fault(entries[f"redis_{part}_file"].path, text) for part, text in error.faults.items())


def _check_database_files(
    values: dict[str, Any], entries: dict[str, _Entry], faults: list[Fault], read_files: bool
) -> None:
    """Checks the TLS files in `database_url`. A start would wait for PostgreSQL if one can't be read, because the
    driver reports that like a server that is away."""
    url = values.get("database_url")
    if not url or not read_files or ADDRESS_FAULTS["database_url"](url):
        return
    for name, path in database_files(url).items():
        text = _authorities_fault(path) if name == "sslrootcert" else _reading_fault(path)
        if text:
            faults.append(Fault(entries["database_url"].path, f"its {name} {text}"))


def _reading_fault(path: str) -> str | None:
    try:
        with open(path, "rb"):
            return None
    except OSError as error:
        return f"{path} can't be read: {error.strerror}"


def _open_secrets(entries: Mapping[str, _Entry]) -> list[str]:
    """A warning if other users can read the settings file, and it has a secret."""
    files = {
        entry.file
        for name, entry in entries.items()
        if entry.file and (_BY_NAME[name].is_secret or (name in _WITH_CREDENTIALS and "@" in str(entry.value)))
    }
    warnings = []
    for file in files:
        with contextlib.suppress(OSError):
            if os.stat(file).st_mode & 0o004:
                close = f"chmod 640 {shlex.quote(file)}"
                warnings.append(f"{file}: other users of this machine can read its secrets; close it with: {close}")
    return warnings


def _is_service_link(name: str, value: str) -> bool:
    if name.endswith("_PORT") and _LINKED_PORT.fullmatch(value):
        return True
    return _SERVICE_LINK.fullmatch(name) is not None


def _unknown_variables(environment: Mapping[str, str]) -> list[str]:
    known = {setting.variable for setting in TABLE} | _NOT_SETTINGS
    return [
        f"{name} is not a setting{suggestion(name, known)}"
        for name in sorted(environment)
        if name.startswith(PREFIX) and name not in known
    ]


def suggestion(name: str, known: typing.Iterable[str]) -> str:
    """`; did you mean X?` if a known name is similar, else an empty string."""
    near = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {near[0]}?" if near else ""
