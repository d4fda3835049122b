import json

import pytest

from redpoll.protocol.history import MAX_OFFSET, Position, Rewind, parse_page, parse_position, parse_rewind

TOO_MUCH = json.loads("9" * 400)


def test_a_position_is_an_epoch_and_an_offset_in_either_spelling_or_an_offset_alone():
    assert parse_position({"epoch": "e", "offset": 7}) == Position("e", 7)
    assert parse_position("e:7") == Position("e", 7)
    assert parse_position(7) == Position(None, 7)
    assert parse_position({"epoch": "\u00e9 /", "offset": MAX_OFFSET}) == Position("\u00e9 /", MAX_OFFSET)


def test_a_position_in_one_word_is_parsed_again():
    assert parse_position(str(Position("0a1b", 1_795_242_899_679_000))) == Position("0a1b", 1_795_242_899_679_000)


@pytest.mark.parametrize(
    "given",
    [
        *("", "e", "e:", ":7", "e:-1", "e:1.5", "e:x", "e:7:8", "e:99999999999999999", "e" * 101 + ":1", "7"),
        *(-1, 1.5, True, MAX_OFFSET + 1, TOO_MUCH, [], {}),
        {"epoch": "e"},
        {"offset": 1},
        {"epoch": "", "offset": 1},
        {"epoch": "e" * 101, "offset": 1},
        {"epoch": 1, "offset": 1},
        {"epoch": "e", "offset": "1"},
        {"epoch": "e", "offset": -1},
        {"epoch": "e", "offset": True},
        {"epoch": "e", "offset": 1.0},
        {"epoch": "e", "offset": MAX_OFFSET + 1},
    ],
)
def test_an_invalid_position_is_refused_with_a_sentence(given):
    with pytest.raises(ValueError, match="must be"):
        parse_position(given)


def test_a_rewind_is_a_count_seconds_or_a_position():
    assert parse_rewind(None, None) is None
    assert parse_rewind({"count": 1_000}, None) == Rewind(count=1_000)
    assert parse_rewind({"count": 1, "seconds": None}, None) == Rewind(count=1)
    assert parse_rewind({"seconds": 2_592_000}, None) == Rewind(seconds=2_592_000)
    assert parse_rewind(None, {"epoch": "e", "offset": 0}) == Rewind(epoch="e", offset=0)


@pytest.mark.parametrize(
    ("rewind", "since", "fault"),
    [
        ({"count": 1}, {"epoch": "e", "offset": 1}, "give either rewind or since"),
        ({"count": 1, "seconds": 1}, None, "rewind: give either count or seconds"),
        ({}, None, "rewind: give either count or seconds"),
        (5, None, "rewind must be an object"),
        ("2m", None, "rewind must be an object"),
        ({"count": 0}, None, "rewind: count must be between 1 and 1000"),
        ({"count": -1}, None, "rewind: count must be between 1 and 1000"),
        ({"count": 1_001}, None, "rewind: count must be between 1 and 1000"),
        ({"count": TOO_MUCH}, None, "rewind: count must be between 1 and 1000"),
        ({"count": "5"}, None, "rewind: count must be a whole number"),
        ({"count": 1.5}, None, "rewind: count must be a whole number"),
        ({"count": True}, None, "rewind: count must be a whole number"),
        ({"seconds": 0}, None, "rewind: seconds must be between 1 and 2592000"),
        ({"seconds": 2_592_001}, None, "rewind: seconds must be between 1 and 2592000"),
        (None, "e:1", "since must be an object"),
        (None, 7, "since must be an object"),
        (None, {"epoch": "e"}, "since: offset must be a whole number"),
        (None, {"epoch": "e", "offset": -1}, "since: offset must be between 0"),
        (None, {"offset": 1}, "since: epoch must be a string"),
    ],
)
def test_a_malformed_rewind_is_refused_with_a_sentence(rewind, since, fault):
    with pytest.raises(ValueError, match=fault):
        parse_rewind(rewind, since)


def test_a_page_is_the_newest_hundred_messages_by_default():
    assert parse_page(None, None, None) == (100, None, None)
    assert parse_page(1, "e:7", None) == (1, Position("e", 7), None)
    assert parse_page(1_000, None, 7) == (1_000, None, Position(None, 7))


@pytest.mark.parametrize(
    ("limit", "before", "since", "fault"),
    [
        (0, None, None, "limit must be between 1 and 1000"),
        (-5, None, None, "limit must be between 1 and 1000"),
        (1_001, None, None, "limit must be between 1 and 1000"),
        ("10", None, None, "limit must be a whole number"),
        (None, 1, 1, "give either before or since"),
        (None, -1, None, "before: offset must be between 0"),
        (None, None, "nonsense", "since: must be like EPOCH:OFFSET"),
        (None, None, [], "since: offset must be a whole number"),
    ],
)
def test_a_malformed_page_is_refused_with_a_sentence(limit, before, since, fault):
    with pytest.raises(ValueError, match=fault):
        parse_page(limit, before, since)
