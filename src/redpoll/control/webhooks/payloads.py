"""The body of a delivery in both formats, its headers and its signatures (protocol/README.md "Webhooks").

All functions depend only on their arguments. endpoints.py decides which endpoint gets a transition; sender.py sends.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Final
from uuid import UUID, uuid5

import msgspec

if TYPE_CHECKING:
    from redpoll.cluster.transition import Transition
    from redpoll.protocol.apps import Key

__all__ = [
    "BATCH",
    "EVENTS",
    "FORMATS",
    "STANDARD",
    "batch_id",
    "client_event_name",
    "format_of",
    "has_events",
    "headers",
    "join",
    "render",
    "sign",
]

FORMATS: Final = ("service", "pusher")
# Our name of each event, and Pusher's.
_PUSHER_NAMES: Final[Mapping[str, str]] = {
    "channel.occupied": "channel_occupied",
    "channel.vacated": "channel_vacated",
    "member.added": "member_added",
    "member.removed": "member_removed",
    "client_event": "client_event",
    "cache.miss": "cache_miss",
    "subscription.count": "subscription_count",
}
EVENTS: Final = tuple(_PUSHER_NAMES)
# The five events that `all` stands for. The other two must be named (protocol/README.md "Webhooks").
STANDARD: Final = EVENTS[:5]
# `X-Service-Event` of several events in one POST.
BATCH: Final = "batch"
_BATCHES: Final = UUID("5c0e5c1e-6d3f-4f0a-9a51-0d7b5f0a8e42")

_encode: Final = msgspec.json.Encoder().encode
_decode: Final = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_decode_text: Final = msgspec.json.Decoder(str).decode
_QUOTE: Final = ord('"')


class _PusherBody(msgspec.Struct):
    time_ms: int
    events: list[msgspec.Raw]


_decode_body: Final = msgspec.json.Decoder(_PusherBody).decode
# What `render` writes first in the pusher format, and only there.
_PUSHER_BEGINNING: Final = b'{"time_ms":'


def render(format: str, transition: Transition) -> bytes:
    """The JSON body. It is rendered once and stored, so every attempt sends the same bytes.

    `service`: `{"event", "data", "timestamp"}`; `pusher`: `{"time_ms", "events": [one]}`. The times are those of the
    transition. `seq` increases per channel: retries may change the order, and a receiver that ignores lower numbers
    than it has seen restores it. Raises msgspec.DecodeError if the row's detail isn't valid for its event.
    """
    if format == "pusher":
        event = {"name": _PUSHER_NAMES[transition.event], "channel": transition.channel}
        event |= _pusher_fields(transition)
        return _encode({"time_ms": transition.time_ms, "events": [event | {"seq": transition.stamp}]})
    data = {"channel": transition.channel, **_service_fields(transition), "seq": transition.stamp}
    return _encode({"event": transition.event, "data": data, "timestamp": transition.time_ms // 1000})


def _service_fields(transition: Transition) -> dict[str, Any]:
    """The members of `data` besides `channel` and `seq`."""
    event, detail = transition.event, transition.detail
    if event == "channel.occupied" or event == "subscription.count":
        return {"subscription_count": _number(detail)}
    if event == "channel.vacated":
        return {"subscription_count": 0}
    if event == "member.added":
        user: dict[str, Any] = {"user_id": transition.user}
        return user | {"user_info": msgspec.Raw(detail)} if detail else user
    if event == "member.removed":
        return {"user_id": transition.user}
    return _client_event(transition) if event == "client_event" else {}


def _pusher_fields(transition: Transition) -> dict[str, Any]:
    """The members of the event besides `name`, `channel` and `seq`."""
    event = transition.event
    if event in ("member.added", "member.removed"):
        return {"user_id": transition.user}
    if event == "subscription.count":
        return {"subscription_count": _number(transition.detail)}
    return _client_event(transition) if event == "client_event" else {}


def _client_event(transition: Transition) -> dict[str, Any]:
    """`data` is a string in both formats, because typed receivers expect one. If the client sent another type, it is
    that value's JSON text."""
    sent = _decode(transition.detail)
    data = bytes(sent["data"]) if "data" in sent else b"null"
    fields: dict[str, Any] = {
        "event": sent["event"],
        "data": _decode_text(data) if data[0] == _QUOTE else data.decode(),
        "socket_id": sent["socket_id"],
    }
    return fields if transition.user is None else fields | {"user_id": transition.user}


def client_event_name(detail: bytes) -> str:
    """The name of a client event, from the detail of its transition. Raises as `render`."""
    return _decode_text(_decode(detail)["event"])


def _number(detail: bytes) -> int:
    return msgspec.json.decode(detail, type=int)


def has_events(body: bytes) -> bool:
    """Whether it is a body in the pusher format, which `join` takes: of an endpoint whose format was changed, some of
    the waiting deliveries have the other."""
    return body.startswith(_PUSHER_BEGINNING)


def format_of(body: bytes) -> str:
    """The format in which the body was rendered, whose headers it needs: that of its endpoint may be another by now."""
    return "pusher" if has_events(body) else "service"


def join(bodies: Iterable[bytes]) -> bytes:
    """One body in the pusher format with the events of all of them, in their order and with their bytes. Its `time_ms`
    is the latest of theirs."""
    parts = [_decode_body(body) for body in bodies]
    events = [event for part in parts for event in part.events]
    return _encode(_PusherBody(max(part.time_ms for part in parts), events))


def batch_id(delivery_ids: Iterable[str]) -> str:
    """`X-Service-Delivery` of several deliveries in one POST: the same for the same set, whatever its order, and
    another for any other set. So a receiver that ignores ids that it knows misses no event."""
    return str(uuid5(_BATCHES, " ".join(sorted(delivery_ids))))


def sign(secret: str, body: bytes) -> str:
    """HMAC-SHA256 of the raw body in lowercase hex. With an endpoint's secret it is the service's signature, with the
    secret of an app's key it is Pusher's."""
    return hmac.digest(secret.encode(), body, hashlib.sha256).hex()


def headers(
    format: str,
    event: str,
    body: bytes,
    *,
    delivery_id: str,
    attempt: int,
    now_s: float,
    secret: str,
    previous_secret: str = "",
    key: Key | None = None,
) -> dict[str, str]:
    """The headers of one attempt; `attempt` counts from 1, `now_s` is in Unix seconds.

    `secret` is the endpoint's newest secret. For a day after a rotation, `previous_secret` signs in a second header, so
    receivers can change theirs at any time of that day. In the pusher format, the app's oldest enabled key signs too;
    an app without one sends no Pusher signature.
    """
    values = {
        # Pusher's libraries compare this whole string.
        "Content-Type": "application/json",
        "X-Service-Event": event,
        "X-Service-Timestamp": str(int(now_s)),
        "X-Service-Delivery": delivery_id,
        "X-Service-Attempt": str(attempt),
        "X-Service-Signature": sign(secret, body),
    }
    if previous_secret:
        values["X-Service-Signature-Previous"] = sign(previous_secret, body)
    if format == "pusher" and key is not None:
        values["X-Pusher-Key"] = key.key
        values["X-Pusher-Signature"] = sign(key.secret, body)
    return values
