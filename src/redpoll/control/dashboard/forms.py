"""HTML forms: reading the values that browsers send, and collecting faults by field.

A Form has all typed values, valid or not, so that the page can show them again next to the faults.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final
from urllib.parse import parse_qsl

from redpoll.control.http.request import Request
from redpoll.protocol.errors import ApiError

__all__ = ["CSRF_FIELD", "MAX_STRANGE_BYTES", "Form", "read_form", "read_pairs", "sentence"]

CSRF_FIELD: Final = "csrf"
# Of a form without a session, which anybody can send: one that is longer isn't offered again after the login.
MAX_STRANGE_BYTES: Final = 16 * 1024
# The largest form is the settings of an app; lists are of ids to retry or discard.
_MAX_FIELDS: Final = 5_000
_TYPE: Final = "application/x-www-form-urlencoded"


class Form:
    """Typed values by field, and `faults`: sentences by field. The field "" stands for the whole form."""

    def __init__(self, pairs: Iterable[tuple[str, str]] = ()) -> None:
        self.pairs = tuple(pairs)
        self.faults: dict[str, str] = {}
        self._values: dict[str, list[str]] = {}
        for name, value in self.pairs:
            self._values.setdefault(name, []).append(value)

    def text(self, name: str, default: str = "") -> str:
        """The value of a field without surrounding space; the last value if the field is repeated."""
        values = self._values.get(name)
        return values[-1].strip() if values else default

    def raw(self, name: str) -> str:
        """The value exactly as typed, for passwords and event data."""
        values = self._values.get(name)
        return values[-1] if values else ""

    def every(self, name: str) -> list[str]:
        """All values of a field that may be repeated, such as checkboxes."""
        return self._values.get(name, [])

    def has(self, name: str) -> bool:
        return name in self._values

    def ticked(self, name: str) -> bool:
        return name in self._values

    def untouched(self, name: str) -> bool:
        """Whether the field has what the page showed, which the page sends along as `was_NAME`; several values with
        commas between. What another operator has changed meanwhile stays then."""
        shown = self._values.get(f"was_{name}")
        return shown is not None and _lines(shown[-1]) == _lines(",".join(self.every(name)))

    def number(self, name: str, minimum: int, maximum: int, default: int = 0) -> int:
        """A whole number. Adds a fault and returns the default if it is malformed; an empty field is the default."""
        text = self.text(name)
        if not text:
            return default
        if not (text.isascii() and text.isdecimal() and len(text) <= 12 and minimum <= int(text) <= maximum):
            self.fault(name, f"Enter a whole number from {minimum:,} to {maximum:,}.")
            return default
        return int(text)

    def choice(self, name: str, choices: Iterable[str], default: str = "") -> str:
        """One of the choices. Adds a fault and returns the default for any other value."""
        text = self.text(name, default)
        if text not in choices:
            self.fault(name, "Choose one of the options.")
            return default
        return text

    def fault(self, name: str, text: str) -> None:
        """Adds a fault as a sentence, unless the field has one already."""
        self.faults.setdefault(name, sentence(text))

    @property
    def good(self) -> bool:
        return not self.faults


def _lines(text: str) -> list[str]:
    # Browsers send line ends as CR LF.
    return text.strip().splitlines()


def sentence(message: object) -> str:
    """A message with a capital letter and a period."""
    text = str(message)
    return f"{text[:1].upper()}{text[1:]}{'' if text.endswith(('.', '!', '?')) else '.'}"


def read_form(request: Request) -> Form:
    """The form in a request's body. Raises ApiError if the body is something else."""
    kind = request.headers.get("Content-Type", "").partition(";")[0].strip().lower()
    if request.body and kind != _TYPE:
        raise ApiError("unsupported_media_type", f"a form must be sent as {_TYPE}")
    return Form(pair for pair in read_pairs(request.body) if pair[0] != CSRF_FIELD)


def read_pairs(body: bytes) -> list[tuple[str, str]]:
    """The names and values of a form body, in order. Raises ApiError."""
    try:
        if b"%00" in body or b"\0" in body:
            raise ValueError("PostgreSQL's text can't have it")
        return parse_qsl(body.decode("ascii"), keep_blank_values=True, max_num_fields=_MAX_FIELDS, errors="strict")
    except (UnicodeError, ValueError):
        raise ApiError("bad_request", "the body is not a valid form, or has a NUL character") from None
