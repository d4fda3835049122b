"""Decodes what clients send over a WebSocket: the message, and the `data` of each control event.

`session` decides what a message means. For any bytes the decoders raise nothing but msgspec.DecodeError, UnicodeError
and RecursionError, which `errors.fault_of` describes. The shapes: protocol/README.md "Frames".
"""

from typing import Any

import msgspec

__all__ = [
    "HistoryRequest",
    "Message",
    "SignIn",
    "Subscribe",
    "Unsubscribe",
    "data_of",
    "decode_anything",
    "decode_history",
    "decode_message",
    "decode_sign_in",
    "decode_subscribe",
    "decode_unsubscribe",
    "text_of",
]


class Message(msgspec.Struct, gc=False):
    """One text message. `data` is decoded once the event is known; empty if it is missing."""

    event: str
    data: msgspec.Raw = msgspec.Raw()
    # Any, not str: a wrong type matters only to events that have a channel.
    channel: Any = None


class Subscribe(msgspec.Struct, gc=False):
    channel: str
    auth: str | None = None
    channel_data: str | None = None
    # Any: faults of these members have refusals of their own (history.parse_rewind).
    rewind: Any = None
    since: Any = None
    recover: Any = None


class HistoryRequest(msgspec.Struct, gc=False):
    channel: str
    limit: Any = None
    before: Any = None
    since: Any = None


class Unsubscribe(msgspec.Struct, gc=False):
    channel: str


class SignIn(msgspec.Struct, gc=False):
    auth: str
    user_data: str


decode_message = msgspec.json.Decoder(Message).decode
decode_subscribe = msgspec.json.Decoder(Subscribe).decode
decode_history = msgspec.json.Decoder(HistoryRequest).decode
decode_unsubscribe = msgspec.json.Decoder(Unsubscribe).decode
decode_sign_in = msgspec.json.Decoder(SignIn).decode
decode_anything = msgspec.json.Decoder().decode

_decode_string = msgspec.json.Decoder(str).decode
_QUOTE = 0x22


def data_of(data: msgspec.Raw) -> msgspec.Raw | str:
    """`data` of a control event: JSON, or a string that holds JSON, as some libraries send it."""
    view = memoryview(data)
    if not view:
        raise msgspec.ValidationError("Object missing required field `data`")
    return _decode_string(data) if view[0] == _QUOTE else data


def text_of(data: msgspec.Raw) -> str:
    """`data` of a client event as the string that subscribers get: a string as it is, other JSON in the sender's
    spelling, missing data as `{}`."""
    text = bytes(data)
    if not text:
        return "{}"
    return _decode_string(text) if text[0] == _QUOTE else text.decode()
