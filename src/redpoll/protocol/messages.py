"""Decodes and validates what callers of the HTTP API send: events, batches, `info`, requests to sign a subscription.

What these functions return is valid: later code checks no form again. `data` is never parsed. Signatures are verified
earlier, on the raw bytes (auth.py). The rules: protocol/README.md "Publishing" and "HTTP API".

What is published is checked by ext's `_publish`, also for requests that are read without these functions
(plain_publish.py where the engine isn't built). Here are the rules that it gets, and the error of each refusal.
"""

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, TypeVar
from urllib.parse import parse_qsl

import msgspec

from redpoll.protocol import channels
from redpoll.protocol.apps import SETTINGS, App
from redpoll.protocol.auth import AUTH_NAMES, Params
from redpoll.protocol.channels import Kind
from redpoll.protocol.claims import word_fault
from redpoll.protocol.errors import ApiError, ClientError, fault_of
from redpoll.protocol.grants import of_jti, of_user
from redpoll.protocol.presence import parse_member

try:
    from redpoll._publish import Call, Limits, Refusal, Rules
except ImportError:
    # Not Linux: the engine isn't built.
    if not TYPE_CHECKING:
        from redpoll.protocol.plain_publish import Call, Limits, Refusal, Rules

__all__ = [
    "CHANNEL_INFO",
    "EVENT_INFO",
    "MAX_CORRELATION_ID_CHARS",
    "RESERVED_PREFIXES",
    "Auth",
    "AuthRequest",
    "Batch",
    "Call",
    "Item",
    "Revoke",
    "Trigger",
    "Unsubscribe",
    "check_channel",
    "decode_auth",
    "decode_batch",
    "decode_event",
    "decode_revoke",
    "decode_unsubscribe",
    "limits_of",
    "parse_channel_info",
    "parse_info",
]

MAX_CORRELATION_ID_CHARS = 128
# Only the server may send events with these names. `svc:` is reserved by the service's own specification.
RESERVED_PREFIXES = ("pusher:", "pusher_internal:", "svc:")
# What `info` may ask for: when publishing and listing channels; of one channel.
EVENT_INFO = frozenset(("subscription_count", "user_count"))
CHANNEL_INFO = EVENT_INFO | {"cache"}

_MAX_QUOTED_CHARS = 64
_SOCKET_ID = re.compile(r"[0-9]+\.[0-9]+").fullmatch
_PRINTABLE_ASCII = re.compile(r"[ -~]*").fullmatch


class AuthRequest(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A valid subscription to sign. `channel_data` is set on presence channels."""

    socket_id: str
    channel_name: str
    channel_data: str | None = None


class Trigger(msgspec.Struct, gc=False):
    """The body of `POST events`, not validated yet. The OpenAPI document shows this and the next three."""

    name: str | None = None
    data: str | None = None
    channels: list[str] | None = None
    channel: str | None = None
    socket_id: str | None = None
    info: str | None = None
    correlation_id: str | None = None
    end: bool = False


class Item(msgspec.Struct, gc=False):
    """One event of a `Batch`."""

    name: str | None = None
    channel: str | None = None
    data: str | None = None
    socket_id: str | None = None
    info: str | None = None
    end: bool = False


class Batch(msgspec.Struct, gc=False):
    """The body of `POST batch_events`."""

    batch: list[Item]
    correlation_id: str | None = None


class Auth(msgspec.Struct, gc=False):
    """The body of `POST auth`, as JSON or as a form."""

    socket_id: str | None = None
    channel_name: str | None = None
    channel_data: str | None = None


class Revoke(msgspec.Struct, gc=False):
    """The body of `POST grants/revoke`."""

    jti: str | None = None
    sub: str | int | None = None


class Unsubscribe(msgspec.Struct, gc=False):
    """The body of `POST channels/NAME/unsubscribe`."""

    user_id: str | int | None = None
    socket_id: str | None = None


_RULES: Final = Rules(
    channel_chars=channels.NAME_CHARS.encode(),
    max_channel_chars=channels.MAX_NAME_CHARS,
    own_prefix=channels.OWN_PREFIX.encode(),
    user_prefix=channels.SERVER_TO_USER.encode(),
    encrypted_prefix=channels.ENCRYPTED_PREFIX.encode(),
    cache_prefixes=tuple(prefix.encode() for prefix in channels.CACHE_PREFIXES),
    reserved_names=tuple(prefix.encode() for prefix in RESERVED_PREFIXES),
)
# By app id. An app that has changed or is gone leaves an entry, so there is a bound.
_MAX_LIMITS: Final = 10_000
_limits: Final[dict[str, Limits]] = {}

_T = TypeVar("_T")
_trigger_decoder = msgspec.json.Decoder(Trigger)
_batch_decoder = msgspec.json.Decoder(Batch)
_auth_decoder = msgspec.json.Decoder(Auth)
_revoke_decoder = msgspec.json.Decoder(Revoke)
_unsubscribe_decoder = msgspec.json.Decoder(Unsubscribe)


def limits_of(app: App) -> Limits:
    """What the app's record says about publishes."""
    known = _limits.get(app.id)
    if known is not None and known.app is app:
        return known
    if len(_limits) >= _MAX_LIMITS:
        _limits.clear()
    made = _limits[app.id] = Limits(
        app,
        _RULES,
        max_channels=app.max_channels,
        max_batch=app.max_batch,
        max_name_chars=app.max_event_name_chars,
        max_data_bytes=app.max_data_bytes,
        caches=app.cache_ttl_s > 0,
        stored=tuple(rule.name.encode() for rule in app.history if not rule.prefix),
        stored_prefixes=tuple(rule.name.encode() for rule in app.history if rule.prefix),
    )
    return made


def decode_event(body: bytes, query: Params, app: App) -> Call:
    """The event of `POST events`. Raises ApiError.

    Members that the body lacks, except `data`, may be in the query, which Pusher documents and discourages. `channels`
    there is a comma list, or repeated as `channels[]`.
    """
    trigger = _decode(_trigger_decoder, body)
    if query:
        _fill_from_query(trigger, query)
    names = trigger.channels
    if names is None:
        if trigger.channel is None:
            raise ApiError("bad_request", "channels is missing")
        names = [trigger.channel]
    elif trigger.channel is not None:
        raise ApiError("bad_request", "give either channels or channel")
    elif not names:
        raise ApiError("bad_request", "channels is empty")
    call = Call(limits_of(app))
    call.add(names, trigger.name, trigger.data, trigger.socket_id)
    _check_channels(call, names)
    if trigger.correlation_id is not None:
        _check_correlation_id(trigger.correlation_id)
    call.correlation_id = trigger.correlation_id
    info = _check_event(call, trigger)
    call.infos = (info,) if info else ()
    if trigger.end:
        _check_may_end(app, names)
        call.ends = (0,)
    return call


def decode_batch(body: bytes, app: App) -> Call:
    """The events of `POST batch_events`, in order. One invalid item refuses the batch: raises ApiError, with the item's
    index in the text.

    A `correlation_id` beside `batch` belongs to every event, so that a batch can be repeated as safely as an event.
    """
    batch = _decode(_batch_decoder, body)
    if batch.correlation_id is not None:
        _check_correlation_id(batch.correlation_id)
    items = batch.batch
    call = Call(limits_of(app), True)
    if len(items) > app.max_batch:
        raise ApiError("batch_too_large", f"{len(items)} events in the batch; at most {app.max_batch} are allowed")
    infos = []
    ends = []
    for index, item in enumerate(items):
        try:
            if item.channel is None:
                raise ApiError("bad_request", "channel is missing")
            names = (item.channel,)
            call.add(names, item.name, item.data, item.socket_id)
            _check_channels(call, names)
            infos.append(_check_event(call, item))
            if item.end:
                _check_may_end(app, names)
                ends.append(index)
        except ApiError as fault:
            raise ApiError(fault.code, f"batch[{index}]: {fault.message}") from None
    call.infos = tuple(infos) if any(infos) else ()
    call.ends = tuple(ends)
    call.correlation_id = batch.correlation_id if items else None
    return call


def decode_auth(body: bytes, app: App, *, form: bool = False) -> AuthRequest:
    """The subscription that `POST auth` asks to sign. `form`: the body is urlencoded, as pusher-js sends it.

    Raises ApiError, also for member data that would make the subscribe fail.
    """
    request = _auth_of_form(body) if form else _decode(_auth_decoder, body)
    if request.socket_id is None or request.channel_name is None:
        raise ApiError("bad_request", "socket_id and channel_name are required")
    if _SOCKET_ID(request.socket_id) is None:
        raise ApiError("invalid_socket_id", f"socket_id {_quoted(request.socket_id)} is not like 123.456")
    check_channel(request.channel_name)
    kind = channels.kind_of(request.channel_name)
    if kind is Kind.PUBLIC:
        raise ApiError("invalid_channel", f"channel {_quoted(request.channel_name)} is public and needs no signature")
    if kind is Kind.PRESENCE:
        if request.channel_data is None:
            raise ApiError("bad_request", "channel_data is required for presence channels")
        try:
            parse_member(request.channel_data, app)
        except ClientError as fault:
            raise ApiError("bad_request", fault.message) from None
    return AuthRequest(
        socket_id=request.socket_id, channel_name=request.channel_name, channel_data=request.channel_data
    )


def decode_revoke(body: bytes) -> str:
    """What `POST grants/revoke` revokes, as a subject of `AppGrants`. Raises ApiError."""
    request = _decode(_revoke_decoder, body)
    if (request.jti is None) is (request.sub is None):
        raise ApiError("bad_request", "give jti, the id of one grant, or sub, the user of several")
    word = str(request.sub if request.jti is None else request.jti)
    fault = word_fault(word)
    if fault is not None:
        raise ApiError("bad_request", f"{'sub' if request.jti is None else 'jti'} {fault}")
    return of_user(word) if request.jti is None else of_jti(word)


def decode_unsubscribe(body: bytes, channel: str) -> tuple[str, str]:
    """The user and the socket id that `POST channels/NAME/unsubscribe` names, "" for the one that isn't given. Raises
    ApiError."""
    check_channel(channel)
    if not channels.needs_auth(channel) or channel.startswith(channels.OWN_PREFIX):
        raise ApiError(
            "invalid_channel",
            f"channel {_quoted(channel)} needs no signature, so a client that is removed may subscribe again; only "
            "private and presence channels have this",
        )
    request = _decode(_unsubscribe_decoder, body)
    if (request.user_id is None) is (request.socket_id is None):
        raise ApiError("bad_request", "give user_id or socket_id: whose subscription ends")
    if request.socket_id is not None:
        if _SOCKET_ID(request.socket_id) is None:
            raise ApiError("invalid_socket_id", f"socket_id {_quoted(request.socket_id)} is not like 123.456")
        return "", request.socket_id
    user_id = str(request.user_id)
    fault = word_fault(user_id)
    if fault is not None:
        raise ApiError("bad_request", f"user_id {fault}")
    return user_id, ""


def check_channel(name: str) -> None:
    """Raises ApiError `invalid_channel` unless a channel may have this name."""
    if not channels.valid_name(name):
        raise _bad_name(name)


def parse_info(info: str, allowed: frozenset[str]) -> tuple[str, ...]:
    """The distinct attributes of a comma list. Raises ApiError `invalid_info` on one that isn't `allowed`."""
    if not info:
        return ()
    attributes = tuple(dict.fromkeys(part.strip() for part in info.split(",")))
    for attribute in attributes:
        if attribute not in allowed:
            names = ", ".join(sorted(allowed))
            raise ApiError("invalid_info", f"info {_quoted(attribute)} is not allowed here; allowed are {names}")
    return attributes


def parse_channel_info(channel: str, info: str) -> tuple[str, ...]:
    """The distinct attributes that `info` asks of this one channel. Raises ApiError on one that a channel of this kind
    doesn't have."""
    attributes = parse_info(info, CHANNEL_INFO)
    if "user_count" in attributes and channels.kind_of(channel) is not Kind.PRESENCE:
        raise ApiError(
            "not_presence_channel", "Cannot retrieve the user count unless the channel is a presence channel"
        )
    if "cache" in attributes and not channels.is_cache(channel):
        raise ApiError("invalid_info", "Cannot retrieve the cached event unless the channel is a cache channel")
    return attributes


def _check_correlation_id(value: str) -> None:
    """Printable, because the answer repeats it in a header."""
    if len(value) > MAX_CORRELATION_ID_CHARS or _PRINTABLE_ASCII(value) is None:
        raise ApiError(
            "bad_request",
            f"correlation_id must be printable ASCII, at most {MAX_CORRELATION_ID_CHARS} characters",
        )


def _bad_name(name: str) -> ApiError:
    return ApiError(
        "invalid_channel",
        f"channel name {_quoted(name)}: 1 to {channels.MAX_NAME_CHARS} of letters, digits and _-=@,.; are allowed",
    )


def _check_channels(call: Call, names: Sequence[str]) -> None:
    """Raises ApiError unless the last event may be published on the channels `names`; each of them counts once."""
    refusal = call.refusal_of_channels()
    if not refusal:
        return
    match refusal:
        case Refusal.TOO_MANY_CHANNELS:
            raise ApiError("too_many_channels", f"{len(names)} channels; at most {call.app.max_channels} are allowed")
        case Refusal.RESERVED_CHANNEL:
            raise ApiError(
                "invalid_channel",
                f"channel name {_quoted(call.refused_channel)}: {channels.OWN_PREFIX}… is reserved for the server",
            )
        case Refusal.ENCRYPTED_CHANNEL:
            raise ApiError(
                "bad_request",
                f"channel {_quoted(call.refused_channel)} is encrypted: publish to it alone, not to "
                f"{len(set(names))} names",
            )
    raise _bad_name(call.refused_channel)


def _check_event(call: Call, source: Trigger | Item) -> tuple[str, ...]:
    """Raises ApiError if the last event, which is this one, is refused besides its channels. Returns what `info` asks
    for."""
    refusal = call.refusal_of_event()
    if refusal:
        raise _refused_event(refusal, source, call.app)
    return parse_info(source.info, EVENT_INFO) if source.info else ()


def _check_may_end(app: App, names: Sequence[str]) -> None:
    """Raises ApiError `no_history` unless an event may end each of these channels: its history remembers the end."""
    for name in names:
        if app.history_rule(name) is None:
            raise ApiError(
                "no_history",
                f"channel {_quoted(name)} has no history, so no event can end it (end: true); add a rule with "
                "redpoll history rule add",
            )


def _refused_event(refusal: int, source: Trigger | Item, app: App) -> ApiError:
    match refusal:
        case Refusal.NAME_MISSING:
            return ApiError("bad_request", "name is missing")
        case Refusal.NAME_SIZE:
            return ApiError(
                "invalid_event_name",
                f"name has {len(source.name or '')} characters; 1 to {app.max_event_name_chars} are allowed",
            )
        case Refusal.NAME_RESERVED:
            return ApiError("invalid_event_name", f"name {_quoted(source.name or '')} begins with a reserved prefix")
        case Refusal.DATA_MISSING:
            return ApiError("bad_request", "data is missing")
        case Refusal.DATA_SIZE:
            return ApiError(
                "payload_too_large",
                f"The data content of this event exceeds the allowed maximum ({app.max_data_bytes} bytes): "
                f"it has {len((source.data or '').encode())} bytes. The operator can raise the limit to "
                f"{SETTINGS['max_data_bytes'].maximum}: redpoll app set {app.id} max_data_bytes=N",
            )
    return ApiError("invalid_socket_id", f"socket_id {_quoted(source.socket_id or '')} is not like 123.456")


def _fill_from_query(trigger: Trigger, query: Params) -> None:
    names: list[str] | None = None
    for name, value in query:
        if name in AUTH_NAMES:
            continue
        if name == "channels":
            names = (names or []) + value.split(",")
        elif name.startswith("channels["):
            names = [*(names or []), value]
        elif name in ("name", "channel", "socket_id", "info", "correlation_id") and getattr(trigger, name) is None:
            setattr(trigger, name, value)
    if names is not None and trigger.channels is None:
        trigger.channels = names


def _auth_of_form(body: bytes) -> Auth:
    try:
        fields = parse_qsl(body.decode(), keep_blank_values=True, errors="strict", max_num_fields=100)
    except ValueError:
        raise ApiError("bad_request", "the body is not a urlencoded form") from None
    values = {name: value for name, value in fields if name in Auth.__struct_fields__}
    return Auth(**values)


def _decode(decoder: "msgspec.json.Decoder[_T]", body: bytes) -> _T:
    try:
        return decoder.decode(body)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as fault:
        raise ApiError("bad_request", f"the body is not what this endpoint expects: {fault_of(fault, body)}") from None


def _quoted(text: str) -> str:
    """The caller's input, cut and quoted, for an answer."""
    return repr(text if len(text) <= _MAX_QUOTED_CHARS else text[:_MAX_QUOTED_CHARS] + "…")
