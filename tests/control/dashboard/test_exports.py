"""Exports that spreadsheets can read."""

import csv
import io

from redpoll.control.dashboard.exports import as_csv


def test_rows_can_have_different_names_and_any_text():
    text = as_csv([{"a": 1, "b": 'say "hi",\nthere'}, {"a": None, "c": ["x", "y"]}]).decode()
    assert list(csv.DictReader(io.StringIO(text))) == [
        {"a": "1", "b": 'say "hi",\nthere', "c": ""},
        {"a": "", "b": "", "c": "x y"},
    ]


def test_formulas_are_exported_as_text():
    text = as_csv([{"a": value} for value in ("=1+1", "+1", "-1", "@x", "\tx", "plain", -1)]).decode()
    assert [row["a"] for row in csv.DictReader(io.StringIO(text))] == [
        "'=1+1",
        "'+1",
        "'-1",
        "'@x",
        "'\tx",
        "plain",
        "-1",
    ]


def test_export_without_rows_is_a_file():
    assert as_csv([]) == b"\r\n"
