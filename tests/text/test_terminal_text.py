"""Control characters of others don't reach a terminal."""

import json

import pytest

from redpoll.text import json_text
from redpoll.text.terminal_text import escaped_json, safe

CONTROLS = ["\x7f", "\x80", "\x9b", "\x9f", "\u061c", "\u200e", "\u2028", "\u202a", "\u202e", "\u2066", "\u2069"]


@pytest.mark.parametrize("char", ["\x00", "\x1b", "\n", *CONTROLS], ids=ascii)
def test_no_control_character_is_printed(char):
    text = f"ä{char}[31m€"
    assert safe(text) == f"ä{ascii(char)[1:-1]}[31m€"
    for document in (json_text.compact({"a": text}), json_text.indented({"a": text}).encode()):
        assert char.encode() not in document.replace(b"\n", b"" if char == "\n" else b"\n")
        assert json.loads(document) == {"a": text}


def test_other_text_stays_as_it_is():
    text = json.dumps({"a": "plain", "b": "äöü 漢字 🎉 \u00a0 \u2027 \u2030 \u2065"}, ensure_ascii=False).encode()
    assert escaped_json(text) == text
    assert safe("x" * 300) == "x" * 200 + "…"
