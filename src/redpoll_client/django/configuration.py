"""The setting `REDPOLL`, and the publisher and the rules that it names."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from django.conf import settings
from django.core.exceptions import ImproperlyConfigured
from django.core.signals import setting_changed
from django.utils.module_loading import import_string

from redpoll_client.publisher import Publisher
from redpoll_client.rules import Rules

__all__ = ["endpoint_secrets", "get_publisher", "get_rules", "user_id_of"]

_OWN = ("rules", "user_id", "endpoint_secret")
_lock = threading.Lock()
_publishers: list[Publisher] = []


def _setting() -> dict[str, Any]:
    value = getattr(settings, "REDPOLL", {})
    if not isinstance(value, dict):
        raise ImproperlyConfigured("REDPOLL must be a dict")
    return value


def get_publisher() -> Publisher:
    """The publisher of this process, made at its first use from the setting. Raises ImproperlyConfigured."""
    with _lock:
        if not _publishers:
            options = {name: value for name, value in _setting().items() if name not in _OWN}
            try:
                _publishers.append(Publisher(**options))
            except (TypeError, ValueError) as error:
                raise ImproperlyConfigured(f"REDPOLL: {error}") from None
        return _publishers[0]


def get_rules() -> Rules:
    """The rules. Raises ImproperlyConfigured if the setting names none."""
    name = _setting().get("rules")
    rules = import_string(name) if isinstance(name, str) else None
    if not isinstance(rules, Rules):
        raise ImproperlyConfigured(
            f"REDPOLL: rules must be the dotted name of a redpoll_client.rules.Rules, not {name!r}"
        )
    return rules


def user_id_of(user: Any) -> str:
    """The id under which others see this user."""
    name = _setting().get("user_id")
    function: Callable[[Any], Any] = import_string(name) if isinstance(name, str) else lambda user: user.pk
    return str(function(user))


def endpoint_secrets() -> list[str]:
    """The secrets of webhook endpoints."""
    value = _setting().get("endpoint_secret", [])
    return [value] if isinstance(value, str) else list(value)


def _forget(*, setting: str, **_: Any) -> None:
    if setting == "REDPOLL":
        with _lock:
            while _publishers:
                _publishers.pop().close()


# Tests override settings.
setting_changed.connect(_forget)
