"""Splitting words of options, and printing times and untrusted text."""

import pytest

from redpoll.cli.common import safe, split_words, time_text


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain", "plain"),
        ("Büro “7”", "Büro “7”"),
        ("a\nb\tc", "a\\nb\\tc"),
        ("\x1b[2J\x9b", "\\x1b[2J\\x9b"),
        ("\u202etxt", "\\u202etxt"),
        ("x" * 11, "x" * 10 + "…"),
    ],
)
def test_safe_escapes_control_characters(text, shown):
    assert safe(text, 10 if "xx" in text else 200) == shown


def test_split_words_splits_at_commas():
    assert split_words(["a, b", "c", ",", ""]) == ["a", "b", "c"]


def test_times_are_utc_and_none_is_never():
    assert (time_text(1_700_000_000), time_text(None)) == ("2023-11-14 22:13:20 UTC", "never")
