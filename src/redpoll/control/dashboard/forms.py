"""What people typed: forms as browsers send them, their values, and the faults found in them, field by field.

A form keeps what was typed whatever is wrong with it, so that a page can be shown again with all of it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final
from urllib.parse import parse_qsl

from redpoll.control.request import Request
from redpoll.protocol.errors import ApiError

__all__ = ["CSRF_FIELD", "Form", "read_form", "read_pairs", "sentence"]

CSRF_FIELD: Final = "csrf"
# The largest form is the settings of an app; lists are of ids to retry or discard.
_MOST_FIELDS: Final = 5_000
_TYPE: Final = "application/x-www-form-urlencoded"


class Form:
    """Typed values by field, and `faults` by field: sentences. The field "" is for what concerns the whole form."""

    def __init__(self, pairs: Iterable[tuple[str, str]] = ()) -> None:
        self.pairs = tuple(pairs)
        self.faults: dict[str, str] = {}
        self._values: dict[str, list[str]] = {}
        for name, value in self.pairs:
            self._values.setdefault(name, []).append(value)

    def text(self, name: str, default: str = "") -> str:
        """The value of a field, without the space around it; of a repeated one the last."""
        values = self._values.get(name)
        return values[-1].strip() if values else default

    def raw(self, name: str) -> str:
        """As it was typed: for passwords, and for what is sent on."""
        values = self._values.get(name)
        return values[-1] if values else ""

    def every(self, name: str) -> list[str]:
        """The values of a field that may stand there more than once, such as ticked boxes."""
        return self._values.get(name, [])

    def has(self, name: str) -> bool:
        return name in self._values

    def ticked(self, name: str) -> bool:
        return name in self._values

    def number(self, name: str, least: int, most: int, default: int = 0) -> int:
        """A whole number; where it is none, a fault at its field, and the default. So is an empty field."""
        text = self.text(name)
        if not text:
            return default
        if not (text.isascii() and text.isdecimal() and len(text) <= 12 and least <= int(text) <= most):
            self.fault(name, f"A whole number from {least:,} to {most:,}, please.")
            return default
        return int(text)

    def choice(self, name: str, choices: Iterable[str], default: str = "") -> str:
        """One of the choices; a fault where it is another."""
        text = self.text(name, default)
        if text not in choices:
            self.fault(name, "Choose one of these.")
            return default
        return text

    def fault(self, name: str, text: str) -> None:
        """The first fault of a field stays, as a sentence."""
        self.faults.setdefault(name, sentence(text))

    @property
    def good(self) -> bool:
        return not self.faults


def sentence(told: object) -> str:
    """What a refusal says, as a sentence of its own."""
    text = str(told)
    return f"{text[:1].upper()}{text[1:]}{'' if text.endswith(('.', '!', '?')) else '.'}"


def read_form(call: Request) -> Form:
    """The form in a call's body. Raises ApiError where there is none."""
    kind = call.headers.get("Content-Type", "").partition(";")[0].strip().lower()
    if call.body and kind != _TYPE:
        raise ApiError("unsupported_media_type", f"a form is {_TYPE}")
    return Form(pair for pair in read_pairs(call.body) if pair[0] != CSRF_FIELD)


def read_pairs(body: bytes) -> list[tuple[str, str]]:
    """Names and values in their order. Raises ApiError."""
    try:
        return parse_qsl(body.decode("ascii"), keep_blank_values=True, max_num_fields=_MOST_FIELDS, errors="strict")
    except (UnicodeError, ValueError):
        raise ApiError("bad_request", "that isn't a form") from None
