"""Writes values without a declared type as JSON: log lines and what commands print with `--json`.

orjson does that in half to three quarters of msgspec's time (`bench/parts/json_writers.py`). Records with a declared
type are msgspec's, which orjson can't write. orjson has no wheel for Python 3.15 yet; there msgspec writes everything.
"""

from typing import Any

import msgspec

from redpoll.text.terminal_text import escaped_json

try:
    import orjson
except ImportError:  # Python 3.15
    orjson = None  # type: ignore[assignment]

__all__ = ["compact", "indented"]

_encode = msgspec.json.Encoder(enc_hook=str).encode


def compact(value: Any) -> bytes:
    """One line. What JSON has no type for is written as its text."""
    if orjson is not None:
        try:
            return escaped_json(orjson.dumps(value, default=str))
        except TypeError:
            # Integers of more than 64 bits, and keys that aren't text: msgspec takes both.
            pass
    return escaped_json(_encode(value))


def indented(value: Any) -> str:
    """For people: two spaces a level. Raises TypeError for what JSON has no type for."""
    if orjson is not None:
        return escaped_json(orjson.dumps(value, option=orjson.OPT_INDENT_2)).decode()
    return escaped_json(msgspec.json.format(msgspec.json.encode(value), indent=2)).decode()
