"""Reads the file of `redpoll apply`: apps as TOML, YAML or JSON, checked for its shape.

The record store's own rules (whether a key is free, a setting exists) are checked by control/commands/app_apply.py,
which names a place in the file as a path such as `apps[3].settings.max_batch`; `AppsFile.line` finds its line.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any, Final, NamedTuple

from redpoll.importing.file_formats import Fault, format_of, read
from redpoll.importing.plan import SourceError

__all__ = ["MAX_BYTES", "AppsFile", "parse", "resolve_secret", "written_secret"]

MAX_BYTES: Final = 16 << 20
_MAX_NUMBER: Final = 10**12
_MAX_SECRET_BYTES: Final = 4_096
# Before a secret that begins like a reference.
_TEXT: Final = "text:"
_DURATION: Final = re.compile(r"([1-9][0-9]{0,6})([smhd])")
_SECONDS: Final = {"s": 1, "m": 60, "h": 3_600, "d": 86_400}


class AppsFile(NamedTuple):
    """`apps` as the command `app apply` takes them, if there are no `faults`. `lines` are the lines of paths."""

    name: str
    apps: list[dict[str, Any]]
    faults: list[Fault]
    lines: Mapping[str, int]

    def line(self, where: str) -> int | None:
        """The line of the path, or else of the nearest thing that contains it."""
        while where:
            if where in self.lines:
                return self.lines[where]
            where = re.sub(r"(\.[^.\[\]]*|\[[0-9]*\])$", "", where) if re.search(r"[.\[]", where) else ""
        return None

    def sentence(self, fault: Fault) -> str:
        """`apps.toml:12: apps[0].key: …`."""
        line = self.line(fault.where)
        place = f"{self.name}:{line}" if line is not None else self.name
        return f"{place}: {fault.where}: {fault.text}" if fault.where else f"{place}: {fault.text}"


def parse(name: str, content: bytes, kind: str | None, secret_of: Callable[[str], str], now_s: float) -> AppsFile:
    """Reads the file. `kind` is one of file_formats.FORMATS, None to recognise it. `secret_of(text)` returns the secret
    that a text of the file stands for, and raises ValueError. Raises SourceError if the file can't be read at all."""
    if len(content) > MAX_BYTES:
        raise SourceError(f"{name}: more than {MAX_BYTES >> 20} MiB, the most that a file may have")
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise SourceError(f"{name}: not a text in UTF-8") from None
    faults: list[Fault] = []
    lines: dict[str, int] = {}
    try:
        data = read(kind or format_of(name, text), text, lines, faults)
        json.dumps(data, ensure_ascii=False, default=str).encode()
    except UnicodeEncodeError:
        raise SourceError(f"{name}: a text has half of a surrogate pair, which is no character") from None
    except RecursionError:
        raise SourceError(f"{name}: values are nested too deeply") from None
    except SourceError as error:
        raise SourceError(f"{name}{error}") from None
    apps = _Checker(faults, secret_of, now_s).apps(data)
    return AppsFile(name, apps, faults, lines)


def resolve_secret(text: str, environment: Mapping[str, str]) -> str:
    """`env:NAME` is the content of a variable, `file:PATH` that of a file without the end of its last line, `text:TEXT`
    the TEXT; any other text is the secret. Raises ValueError."""
    if text.startswith(_TEXT):
        return text.removeprefix(_TEXT)
    if text.startswith("env:"):
        value = environment.get(text[4:])
        if not value:
            raise ValueError(f"the environment has no variable {text[4:]}")
        if not value.isprintable():
            raise ValueError(f"the variable {text[4:]} has characters that no secret may have")
        return value
    if text.startswith("file:"):
        path = Path(text[5:])
        try:
            with path.open("rb") as file:
                content = file.read(_MAX_SECRET_BYTES + 1)
            if len(content) > _MAX_SECRET_BYTES:
                raise ValueError(f"{path} is too large for a secret")
            value = content.decode().rstrip("\r\n")
        except OSError as error:
            raise ValueError(f"{path} can't be read: {error.strerror}") from None
        except UnicodeDecodeError:
            raise ValueError(f"{path} is not a text in UTF-8") from None
        if not value:
            raise ValueError(f"{path} is empty")
        return value
    return text


def written_secret(secret: str) -> str:
    """The text for which `resolve_secret` returns this secret."""
    return f"{_TEXT}{secret}" if secret.startswith(("env:", "file:", _TEXT)) else secret


# -- the shape

_APP: Final = {
    "id": str,
    "name": str,
    "key": str,
    "secret": str,
    "keys": list,
    "settings": dict,
    "history": list,
    "webhooks": list,
    "tokens": list,
}
_LISTS: Final[dict[str, dict[str, type]]] = {
    "keys": {"key": str, "secret": str, "enabled": bool},
    "history": {
        "prefix": str,
        "channel": str,
        "keep": int,
        "seconds": int,
        "replay": int,
        "replay_seconds": int,
        "client_events": bool,
        "max_rate": int,
        "latest": bool,
        "join": str,
        "by": str,
    },
    "webhooks": {
        "url": str,
        "pull": bool,
        "events": list,
        "format": str,
        "channels": list,
        "client_events": list,
        "batch": bool,
        "secret": str,
        "pin": str,
        "enabled": bool,
    },
    "tokens": {"name": str, "scopes": list, "expires": str},
}
_REQUIRED: Final = {"keys": ("key",), "history": ("keep",), "tokens": ("name", "scopes")}
_KINDS: Final = {str: "a text", int: "a whole number", bool: "true or false", list: "a list", dict: "a table"}


class _Checker:
    """Collects faults, and returns what is right."""

    def __init__(self, faults: list[Fault], secret_of: Callable[[str], str], now_s: float) -> None:
        self._faults = faults
        self._secret_of = secret_of
        self._now_s = now_s

    def apps(self, data: Any) -> list[dict[str, Any]]:
        if not isinstance(data, dict):
            self._fault("", "the file must have a list `apps`")
            return []
        for name in data:
            if name != "apps":
                self._fault(str(name), "unknown; the file has a list `apps` and nothing else")
        listed = data.get("apps")
        if not isinstance(listed, list):
            self._fault("apps" if "apps" in data else "", "the file must have a list `apps`")
            return []
        apps = [self._app(app, f"apps[{number}]") for number, app in enumerate(listed)]
        self._duplicates(apps)
        return apps

    def _fault(self, where: str, text: str) -> None:
        self._faults.append(Fault(where, text))

    def _duplicates(self, apps: list[dict[str, Any]]) -> None:
        ids: dict[str, int] = {}
        keys: dict[str, str] = {}
        for number, app in enumerate(apps):
            other = ids.setdefault(app["id"], number)
            if app["id"] and other != number:
                self._fault(f"apps[{number}].id", f"the id {app['id']} is that of apps[{other}] too")
            for at, key in enumerate(app["keys"]):
                owner = keys.setdefault(key["key"], f"apps[{number}].keys[{at}]")
                if key["key"] and owner != f"apps[{number}].keys[{at}]":
                    place = f"apps[{number}].key" if app["one_key"] else f"apps[{number}].keys[{at}]"
                    self._fault(place, f"the key {key['key']} is here twice")

    def _app(self, app: Any, path: str) -> dict[str, Any]:
        table = self._table(app, _APP, path)
        if "id" not in table:
            self._fault(path, "an app needs an id")
        if "keys" in table and ("key" in table or "secret" in table):
            self._fault(f"{path}.keys", "give either key and secret, or keys")
        lists = {name: self._list(name, table.get(name, []), f"{path}.{name}") for name in _LISTS}
        keys = lists["keys"]
        if "keys" not in table and ("key" in table or "secret" in table):
            keys = [{"key": table.get("key", ""), "enabled": True, **self._with_secret(table, path)}]
        for rule, where in _with_paths(lists["history"], f"{path}.history"):
            if ("prefix" in rule) == ("channel" in rule):
                self._fault(where, "a rule has either prefix or channel")
        return {
            "id": table.get("id", ""),
            "name": table.get("name"),
            "one_key": "keys" not in table,
            "keys": keys,
            "settings": self._settings(table.get("settings", {}), f"{path}.settings"),
            "history": [_rule(rule) for rule in lists["history"]],
            "webhooks": lists["webhooks"],
            "tokens": lists["tokens"],
        }

    def _table(self, value: Any, fields: Mapping[str, type], path: str) -> dict[str, Any]:
        """The fields that have the right type."""
        if not isinstance(value, dict):
            self._fault(path, f"must be a table with some of {', '.join(fields)}")
            return {}
        table = {}
        for name, content in value.items():
            kind = fields.get(name)
            where = f"{path}.{name}"
            if name in ("id", "key", "expires") and isinstance(content, int | date) and not isinstance(content, bool):
                # 1234567 and 2030-01-01 are written without quotes.
                content = content.isoformat() if isinstance(content, date) else str(content)
            if kind is None:
                self._fault(where, f"unknown; there are {', '.join(fields)}")
            elif not isinstance(content, kind) or (kind is int and not _is_number(content)):
                self._fault(where, f"must be {_KINDS[kind]}")
            else:
                table[name] = content
        return table

    def _list(self, name: str, values: list[Any], path: str) -> list[dict[str, Any]]:
        rows = []
        for value, where in _with_paths(values, path):
            row = self._table(value, _LISTS[name], where)
            if name == "webhooks" and isinstance(value, dict):
                # A webhook that is pulled has no URL.
                if row.pop("pull", False) is ("url" in value):
                    self._fault(where, "needs either url, or pull = true")
                row.setdefault("url", None)
            for needed in _REQUIRED.get(name, ()):
                if isinstance(value, dict) and needed not in value and not (needed == "keep" and "max_rate" in value):
                    self._fault(where, f"needs {needed}")
                row.setdefault(needed, [] if _LISTS[name][needed] is list else "")
            for field, kind in _LISTS[name].items():
                if kind is list and not all(isinstance(word, str) for word in row.get(field, ())):
                    self._fault(f"{where}.{field}", "must be a list of texts")
                    row[field] = []
            rows.append({**row, **self._with_secret(row, where)})
            if name == "tokens":
                expires = rows[-1].pop("expires", None)
                rows[-1]["expires_at"] = self._expiry(expires, f"{where}.expires")
                rows[-1]["dated"] = expires is not None and _DURATION.fullmatch(expires) is None
        return rows

    def _with_secret(self, row: dict[str, Any], path: str) -> dict[str, str]:
        """`{secret}` if the row has one that can be read."""
        if "secret" not in row:
            return {}
        try:
            return {"secret": self._secret_of(row["secret"])}
        except ValueError as error:
            self._fault(f"{path}.secret", str(error))
            return {"secret": ""}

    def _expiry(self, text: str | None, path: str) -> float | None:
        """Unix seconds of `90d` or of a date; None: never."""
        if text is None:
            return None
        if (lasts := _DURATION.fullmatch(text)) is not None:
            return self._now_s + timedelta(seconds=int(lasts[1]) * _SECONDS[lasts[2]]).total_seconds()
        try:
            at = datetime.fromisoformat(text)
        except ValueError:
            self._fault(path, f"must be a number followed by s, m, h or d, or a date such as 2030-01-31, not {text!r}")
            return None
        return (at if at.tzinfo is not None else at.replace(tzinfo=UTC)).timestamp()

    def _settings(self, settings: dict[str, Any], path: str) -> dict[str, str]:
        """Each setting as a text for `parse_setting`."""
        texts = {}
        for name, value in settings.items():
            if isinstance(value, list) and all(isinstance(word, str) for word in value):
                texts[name] = ",".join(value)
            elif isinstance(value, bool):
                texts[name] = str(value).lower()
            elif isinstance(value, str | int | float):
                texts[name] = str(value)
            else:
                self._fault(f"{path}.{name}", "must be a text, a number, true or false, or a list of texts")
        return texts


def _is_number(value: Any) -> bool:
    return not isinstance(value, bool) and abs(value) <= _MAX_NUMBER


def _with_paths(values: list[Any], path: str) -> list[tuple[Any, str]]:
    return [(value, f"{path}[{number}]") for number, value in enumerate(values)]


def _rule(row: dict[str, Any]) -> dict[str, Any]:
    """A history rule with the fields of protocol.apps.HistoryRule but `id`."""
    rule = {name: value for name, value in row.items() if name not in ("prefix", "channel", "keep")}
    keep = row["keep"] if isinstance(row["keep"], int) else 0
    return {**rule, "keep": keep, "name": row.get("prefix", row.get("channel", "")), "prefix": "prefix" in row}
