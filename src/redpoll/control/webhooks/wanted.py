"""What a webhook endpoint wants: which transitions it gets, and which values it may have."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

from redpoll.cluster.hooks import Hook
from redpoll.control.records.records import RecordError
from redpoll.control.webhooks.payloads import EVENTS, FORMATS, STANDARD, client_event_name
from redpoll.protocol.channels import valid_name
from redpoll.store.webhooks import Endpoint

__all__ = [
    "ALL",
    "check_has_url",
    "check_pin",
    "check_wanted",
    "hooks_of",
    "target_of",
    "wants",
    "wants_client_event",
]

ALL: Final = "all"
_MAX_NAMES: Final = 50
# An app may allow longer names of events, but none longer than this (protocol/apps.py).
_MAX_EVENT_CHARS: Final = 1_000
_FINGERPRINT: Final = re.compile(r"[0-9a-f]{64}").fullmatch
# The letter in `App.hooks` that makes workers write outbox rows for an event.
_LETTERS: Final = {
    "channel.occupied": Hook.OCCUPANCY,
    "channel.vacated": Hook.OCCUPANCY,
    "member.added": Hook.MEMBERS,
    "member.removed": Hook.MEMBERS,
    "client_event": Hook.CLIENT_EVENTS,
    "cache.miss": Hook.CACHE_MISSES,
    "subscription.count": Hook.COUNTS,
}


def wants(endpoint: Endpoint, event: str, channel: str) -> bool:
    """Whether the endpoint gets this event on this channel; of client events, whether it gets some.

    `all` stands for the five standard events; the other two must be named (protocol/README.md "Webhooks").
    """
    subscribed = event in endpoint.events or (ALL in endpoint.events and event in STANDARD)
    return subscribed and (not endpoint.channels or channel.startswith(endpoint.channels))


def wants_client_event(endpoint: Endpoint, detail: bytes) -> bool:
    """Whether an endpoint that gets client events gets this one, by its name. Raises as `payloads.render`."""
    return not endpoint.client_events or client_event_name(detail) in endpoint.client_events


def hooks_of(endpoints: Iterable[Endpoint]) -> str:
    """The hook mask (`App.hooks`) for these endpoints of one app; disabled ones don't count."""
    events = {name for endpoint in endpoints if endpoint.enabled for name in endpoint.events}
    events |= set(STANDARD) if ALL in events else set()
    return "".join(dict.fromkeys(letter for event, letter in _LETTERS.items() if event in events))


def target_of(endpoint: Endpoint) -> str:
    """For people: the endpoint's URL, or that its deliveries are pulled."""
    return endpoint.url or "(pulled)"


def check_has_url(endpoint: Endpoint) -> None:
    """Raises RecordError for an endpoint whose deliveries are pulled."""
    if endpoint.pulled:
        raise RecordError("the webhook has no URL: its deliveries are pulled")


def check_pin(endpoint: Endpoint) -> None:
    """Raises RecordError for a pin that no certificate of its URL can match. A captured one is right; this is for those
    from a file."""
    if not endpoint.pin:
        return
    check_has_url(endpoint)
    if endpoint.url.lower().startswith("http:"):
        raise RecordError("there is no certificate to pin on an http:// URL")
    if not _FINGERPRINT(endpoint.pin):
        raise RecordError(f"a pin is the SHA-256 of a certificate, 64 hex digits, not {endpoint.pin[:100]!r}")


def check_wanted(endpoint: Endpoint) -> None:
    """Raises RecordError unless its events, format, channels, names of client events and batch are right."""
    unknown = [event for event in endpoint.events if event != ALL and event not in EVENTS]
    if unknown or not endpoint.events:
        named = ", ".join(map(repr, unknown)) or "nothing"
        raise RecordError(f"a webhook's events are {ALL}, or some of {', '.join(EVENTS)}, not {named}")
    if endpoint.format not in FORMATS:
        raise RecordError(f"a webhook's format is {' or '.join(FORMATS)}, not {endpoint.format!r}")
    invalid = [prefix for prefix in endpoint.channels if not valid_name(prefix)]
    if invalid:
        raise RecordError(f"{invalid[0]!r} can't be a channel prefix: no channel's name begins with it")
    if len(endpoint.channels) > _MAX_NAMES:
        raise RecordError(f"a webhook has at most {_MAX_NAMES} channel prefixes")
    _check_client_events(endpoint)
    if endpoint.batch and endpoint.pulled:
        raise RecordError(
            "a webhook that is pulled can't batch events: each of its deliveries is acknowledged by itself"
        )
    if endpoint.batch and endpoint.format != "pusher":
        raise RecordError(
            f"only a webhook in the format pusher can batch events: {endpoint.format} has one in each body"
        )


def _check_client_events(endpoint: Endpoint) -> None:
    names = endpoint.client_events
    wrong = [name for name in names if not name.startswith("client-") or len(name) > _MAX_EVENT_CHARS or "\0" in name]
    if wrong:
        raise RecordError(f"{wrong[0][:100]!r} can't be the name of a client event: it must begin with client-")
    if len(names) > _MAX_NAMES:
        raise RecordError(f"a webhook names at most {_MAX_NAMES} client events")
    if names and not {ALL, "client_event"} & set(endpoint.events):
        raise RecordError(f"names of client events are for a webhook with the event client_event, or {ALL}")
