"""What an import will do: apps to create, settings of the server, and a row for everything that was found.

The modules of the other servers fill a `Plan`. Values that exceed a limit of redpoll become that limit, with a note.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from redpoll.config.app_names import (
    APP_ID_RULE,
    APP_KEY_RULE,
    APP_SECRET_RULE,
    valid_app_id,
    valid_app_key,
    valid_app_secret,
)
from redpoll.config.settings import Settings
from redpoll.protocol.apps import SETTINGS, parse_setting

__all__ = ["ALL_HOSTS", "AppPlan", "Plan", "Row", "SourceError", "as_bool", "as_number", "without_secrets"]

# What it means that no origin is taken over.
ALL_HOSTS: Final = "in a new app all hosts may connect"

# Environment files have numbers as text.
_NUMBERS: Final = frozenset(("port", "tls_port", "control_port"))
# Their word for "no limit".
_UNLIMITED: Final = (-1, 0, None, "", "-1", "0")
# Names of settings whose values aren't printed.
_SECRET_NAME: Final = re.compile(
    r"pass|pwd|secret|token|credential|authorization|(access|api|encryption|master|private)[-_]?key", re.IGNORECASE
)
_CREDENTIALS_IN_URL: Final = re.compile(r"(?<=://)[^/\s]*@")


class SourceError(Exception):
    """The file can't be imported. The text is a sentence for the operator."""


@dataclass(frozen=True)
class Row:
    """One thing that was found. `ours` is empty if redpoll has no counterpart, and `note` then says why.

    `app` is the id of the app that it belongs to, empty for the server.
    """

    app: str
    theirs: str
    value: Any
    ours: str
    note: str = ""


@dataclass
class AppPlan:
    """An app to create. `settings` are texts as for `redpoll app set`, and `defaults` those that only a new app gets;
    each webhook is `{url, events, channels}`, with `batch` if it is true."""

    id: str
    key: str
    secret: str
    name: str
    rows: list[Row]
    settings: dict[str, str] = field(default_factory=dict)
    defaults: dict[str, str] = field(default_factory=dict)
    webhooks: list[dict[str, Any]] = field(default_factory=list)

    def set(self, theirs: str, value: Any, name: str, ours: Any, note: str = "", otherwise: str = "") -> None:
        """Takes over `value` of their setting `theirs` as `ours` of our setting `name`. `otherwise` is noted if it
        doesn't fit."""
        setting = SETTINGS[name]
        if setting.type == "count":
            limited = min(max(int(ours), setting.minimum), setting.maximum)
            if limited != int(ours):
                note = _joined(note, f"redpoll allows {setting.minimum} to {setting.maximum}")
            ours = limited
        text = ",".join(ours) if isinstance(ours, list) else str(ours).lower() if isinstance(ours, bool) else str(ours)
        try:
            parse_setting(name, text)
        except ValueError as error:
            self.nothing(theirs, value, _joined(str(error), otherwise))
            return
        self.settings[name] = text
        self.rows.append(Row(self.id, theirs, value, f"{name}={text}", note))

    def limit(self, theirs: str, value: Any, name: str, note: str = "") -> None:
        """Like `set`, for a limit that is off below 1 or without a value."""
        self.set(theirs, value, name, 0 if value in _UNLIMITED else as_number(value, theirs), note)

    def unlimited(self, theirs: str, name: str, ours: int, note: str = "") -> None:
        """Notes a limit of redpoll that they don't have: a new app gets `ours`, and an existing one keeps its own."""
        self.defaults[name] = str(ours)
        self.rows.append(Row(self.id, theirs, "none", f"{name}={ours}", _joined("for a new app", note)))

    def origins(self, theirs: str, value: Any) -> None:
        """Takes over a list of hosts whose pages may connect; `*` and an empty list stand for all hosts."""
        if not isinstance(value, list):
            advice = "use redpoll app set ID allowed_origins=HOST,…"
            self.nothing(theirs, value, f"not a list that can be read; {ALL_HOSTS}: {advice}")
            return
        hosts: list[str] = []
        refused: list[str] = []
        for entry in map(str, value):
            host = entry.strip().lower().removeprefix("https://").removeprefix("http://").rstrip("/")
            try:
                hosts += parse_setting("allowed_origins", host) if host != "*" else ()  # type: ignore[arg-type]
            except ValueError:
                refused.append(entry)
        if "*" in value or not value:
            self.rows.append(Row(self.id, theirs, value, "allowed_origins=", "all hosts"))
            return
        if hosts:
            note = "a page on a port other than 80 and 443 needs its port here: HOST:PORT"
            self.set(theirs, hosts, "allowed_origins", hosts, note, ALL_HOSTS)
        elif not refused:
            self.nothing(theirs, value, ALL_HOSTS)
        for entry in refused:
            why = "redpoll takes HOST, *.HOST and HOST:PORT, no other patterns"
            self.nothing(theirs, entry, _joined(why, "" if hosts else ALL_HOSTS))

    def unlimited_client_events(self, theirs: str, limit: int = Settings().client_events_per_second) -> None:
        """Notes that their clients' events have no limit of rate. Here the server has one, for its own sake."""
        why = f"redpoll allows {limit} a second and connection: client_events_per_second"
        self.nothing(theirs, "none", why)

    def add_webhook(self, url: str, events: list[str], channels: list[str], batch: bool = False) -> None:
        """Adds an endpoint for redpoll's events; `channels` are beginnings of names, empty for all."""
        self.webhooks.append({"url": url, "events": events, "channels": channels, **({"batch": True} if batch else {})})
        ours = f"webhook in Pusher's format{', batched' if batch else ''}"
        self.rows.append(Row(self.id, f"webhook {url}", ", ".join(events), ours))

    def nothing(self, theirs: str, value: Any, why: str) -> None:
        """Notes that redpoll has no counterpart for `theirs`."""
        self.rows.append(Row(self.id, theirs, value, "", why))


class Plan:
    """The apps and settings found so far. `server` has settings of redpoll's server by name, for its settings file.
    `unset` are variables of an environment file that the source reads, and that weren't found."""

    def __init__(self, source: str, unset: Sequence[str] = ()) -> None:
        self.source = source
        self._unset = unset
        self.apps: list[AppPlan] = []
        self.server: dict[str, str | int | float | bool] = {}
        self.rows: list[Row] = []

    def app(self, app_id: Any, key: Any, secret: Any, name: Any = None, *, where: str) -> AppPlan:
        """Adds an app. Raises SourceError if redpoll can't have an app like that."""
        values = {"id": app_id, "key": key, "secret": secret}
        missing = [
            part
            for part, value in values.items()
            if not isinstance(value, str | int) or isinstance(value, bool) or value == ""
        ]
        if missing:
            raise SourceError(f"{where}: no {' and no '.join(missing)} of the app found{self._sought(missing)}")
        app_id, key, secret = str(app_id), str(key), str(secret)
        if not valid_app_id(app_id):
            raise SourceError(f"{where}: the app id {app_id!r} can't be kept; redpoll's ids have {APP_ID_RULE}")
        if not valid_app_key(key):
            raise SourceError(f"{where}: the key of app {app_id} can't be kept; redpoll's keys have {APP_KEY_RULE}")
        if not valid_app_secret(secret):
            raise SourceError(
                f"{where}: the secret of app {app_id} can't be kept; redpoll's secrets have {APP_SECRET_RULE}"
            )
        for other in self.apps:
            if app_id == other.id or key == other.key:
                raise SourceError(f"{where}: two apps have the id {app_id} or the key {key}")
        plan = AppPlan(app_id, key, secret, str(name or app_id), self.rows)
        self.apps.append(plan)
        self.rows.append(Row(app_id, "id, key, secret", f"{app_id}, {key}, …", "the same"))
        return plan

    def _sought(self, parts: Sequence[str]) -> str:
        """Where these parts of an app would probably have come from; "" if from nowhere else."""
        # Such as REVERB_APP_KEY. A file reads many variables that are seldom set.
        endings = tuple(part.upper() for part in parts)
        names = [name for name in self._unset if name.upper().endswith(endings)] or self._unset
        return f"; env() found no {', '.join(names)}: --env names the .env that has them" if names else ""

    def set(self, theirs: str, value: Any, name: str, ours: str | int | float | bool, note: str = "") -> None:
        """Recommends a setting of redpoll's server."""
        if isinstance(ours, str) and name in _NUMBERS:
            ours = int(as_number(ours, theirs))
        self.server[name] = ours
        # The URL may contain a password.
        shown = "…" if name == "redis_url" else str(ours).lower() if isinstance(ours, bool) else ours
        self.rows.append(Row("", theirs, value, f"{name}={shown}", note))

    def nothing(self, theirs: str, value: Any, why: str) -> None:
        self.rows.append(Row("", theirs, value, "", why))

    def unlimited_triggers(self, theirs: str) -> None:
        """Recommends to switch off the rate limit of publish requests, which `theirs` doesn't have."""
        note = "back ends publish without a limit there; redpoll's default is 300 requests a minute and client address"
        self.set(theirs, "none", "trigger_rate_per_minute", 0, note)


def as_bool(value: Any) -> bool:
    """Whether a setting is on: true, 1 and the texts that environment files have for them."""
    return value is True or str(value).strip().lower() in ("true", "1", "on", "yes")


def as_number(value: Any, where: str) -> float:
    """Raises SourceError if the value isn't a number."""
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        raise SourceError(f"{where} is not a number: {str(value)[:50]!r}") from None
    if not math.isfinite(number):
        raise SourceError(f"{where} is not a number: {str(value)[:50]!r}")
    return number


def without_secrets(name: str, value: Any) -> Any:
    """The value of their setting `name` as it may be printed: "…" in the place of a password, secret, token or key."""
    if _SECRET_NAME.search(name):
        return "…"
    if isinstance(value, dict):
        return {inner: without_secrets(str(inner), content) for inner, content in value.items()}
    if isinstance(value, list):
        return [without_secrets("", item) for item in value]
    return _CREDENTIALS_IN_URL.sub("…@", value) if isinstance(value, str) else value


def _joined(*notes: str) -> str:
    return "; ".join(note for note in notes if note)
