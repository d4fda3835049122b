"""Text of others on a terminal: no character in it moves the cursor, changes a title or turns the writing direction."""

import re

__all__ = ["escaped_json", "safe"]

# In UTF-8: DEL, the C1 controls (U+009B begins a sequence as ESC [ does), line separators and the controls of
# bidirectional text. JSON escapes only what is below U+0020.
_CONTROLS = re.compile(
    rb"\x7f|\xc2[\x80-\x9f]|\xd8\x9c|\xe2\x80[\x8e\x8f\xa8-\xae]|\xe2\x81[\xa6-\xa9]",
)


def safe(text: str, max_chars: int = 200) -> str:
    """Untrusted text for a terminal: on one line, with control characters escaped, cut to `max_chars`."""
    shown = "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text[: max_chars + 1])
    return shown if len(shown) <= max_chars else shown[:max_chars] + "…"


def escaped_json(document: bytes) -> bytes:
    """The same JSON, with the control characters that JSON allows in strings as `\\uXXXX`."""
    if document.isascii() and b"\x7f" not in document:
        return document
    return _CONTROLS.sub(lambda match: b"\\u%04x" % ord(match[0].decode()), document)
