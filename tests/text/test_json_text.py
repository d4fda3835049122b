import json
from datetime import UTC, datetime

import pytest

from redpoll.text import json_text

VALUES = [
    {},
    {"a": 1, "b": [True, None, 1.5, "é\u2028\n"], "c": {"d": []}},
    [1, 2**63, "x" * 1000],
    "text",
    (1, 2),
]


@pytest.fixture(params=["orjson", "msgspec alone"])
def library(request, monkeypatch):
    """Both ways give the same JSON: orjson has no wheel for every Python."""
    if request.param == "msgspec alone":
        monkeypatch.setattr(json_text, "orjson", None)
    return request.param


@pytest.mark.parametrize("value", VALUES)
def test_both_forms_can_be_read_back(library, value):
    expected = json.loads(json.dumps(value))
    assert json.loads(json_text.compact(value)) == expected
    assert json.loads(json_text.indented(value)) == expected
    assert b"\n" not in json_text.compact(value)


def test_indented_has_two_spaces_a_level_and_keeps_letters(library):
    assert json_text.indented({"a": [1], "b": "é"}) == '{\n  "a": [\n    1\n  ],\n  "b": "é"\n}'


def test_compact_writes_unknown_things_as_their_text(library):
    assert json.loads(json_text.compact({"error": ValueError("no"), "kind": int})) == {"error": "no", "kind": str(int)}
    assert json.loads(json_text.compact({"at": datetime(2026, 11, 22, tzinfo=UTC)}))["at"].startswith("2026-11-22")


def test_compact_takes_what_orjson_refuses(library):
    assert json.loads(json_text.compact({"many": 2**70, 7: "a key"})) == {"many": 2**70, "7": "a key"}
