"""What the commands share: words and times as they are typed and shown."""

import pytest

from redpoll.cli.common import safe, when, words_of


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
def test_text_of_others_does_nothing_to_a_terminal(text, shown):
    assert safe(text, 10 if "xx" in text else 200) == shown


def test_an_option_is_repeated_or_has_commas():
    assert words_of(["a, b", "c", ",", ""]) == ["a", "b", "c"]


def test_times_are_utc_and_null_is_never():
    assert (when(1_700_000_000), when(None)) == ("2023-11-14 22:13:20 UTC", "never")
