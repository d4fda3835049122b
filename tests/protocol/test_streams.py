"""What a request to read a channel asks for, tokens and cursors."""

import pytest

from redpoll.protocol.errors import ApiError
from redpoll.protocol.history import MAX_OFFSET
from redpoll.protocol.streams import (
    CURSOR_INTERVAL_S,
    Live,
    Reading,
    Start,
    cursor_at,
    has_ended_since,
    parse_reading,
    token_of,
)

TOKEN = token_of("e1", 17)
NOW_S = 1_800_000_000


def asked(accept: str = "", last_event_id: str = "", **query: str) -> Reading:
    return parse_reading(list(query.items()), accept, last_event_id)


def test_tokens_of_an_epoch_sort_as_text_and_are_read_again():
    offsets = [0, 1, 9, 10, 1_795_531_351_085_745, MAX_OFFSET]
    tokens = [token_of("0a", offset) for offset in offsets]
    assert tokens == sorted(tokens)
    assert [asked(offset=token).start for token in tokens] == [Start("0a", offset) for offset in offsets]


def test_request_begins_at_the_oldest_message_unless_it_says_otherwise():
    assert asked().start == asked(offset="-1").start == Start()
    assert asked(offset="now").start == Start(now=True)
    assert asked(offset=TOKEN).start == Start("e1", 17)


def test_live_and_accept_say_how_the_answer_comes():
    assert asked().live is Live.NO
    assert asked(accept="application/json").live is Live.NO
    assert asked(live="long-poll", offset="-1").live is Live.LONG_POLL
    assert asked(live="sse", offset="-1").live is Live.SSE
    assert asked(accept="text/html, Text/Event-Stream;q=0.9").live is Live.EVENT_SOURCE
    # With `live` it is the protocol's stream, whatever the client accepts.
    assert asked(accept="text/event-stream", live="sse", offset="-1").live is Live.SSE


def test_event_source_goes_on_after_its_last_event():
    assert asked(accept="text/event-stream", last_event_id=TOKEN, offset="-1").start == Start("e1", 17)
    # Others don't send it, and it means nothing there.
    assert asked(last_event_id="anything").start == Start()


@pytest.mark.parametrize(
    "offset", ["", " ", "0,1", "0 1", "../x", "e_1", "e_" + "9" * 16, f"{TOKEN}\n", "é", "x" * 200]
)
def test_offset_that_is_no_token_is_refused(offset):
    with pytest.raises(ApiError, match="offset must be") as refused:
        asked(offset=offset)
    assert refused.value.code == "bad_request"


@pytest.mark.parametrize(
    ("query", "text"),
    [
        ([("live", "sse")], "offset is missing"),
        ([("live", "long-poll")], "offset is missing"),
        ([("live", "forever")], "live must be"),
        ([("offset", "-1"), ("offset", "-1")], "more than once"),
        ([("cursor", "x")], "cursor"),
        ([("cursor", "9" * 16)], "cursor"),
        ([("only", "names")], "only must be"),
    ],
)
def test_request_that_contradicts_itself_is_refused(query, text):
    with pytest.raises(ApiError, match=text):
        parse_reading(query, "", "")


def test_unknown_parameters_are_ignored():
    assert parse_reading([("foo", "1"), ("foo", "2"), ("auth_key", "x")], "", "") == asked()


def test_cursor_counts_intervals_and_always_grows():
    present = cursor_at(NOW_S, None)
    assert cursor_at(NOW_S + CURSOR_INTERVAL_S, None) == present + 1
    assert cursor_at(NOW_S, present - 1) == present
    assert all(cursor_at(NOW_S, present) > present for _ in range(50))
    assert cursor_at(NOW_S, present + 1000) > present + 1000


def test_position_of_another_epoch_is_noticed():
    assert has_ended_since(Start("e1", 17), "e2")
    assert not has_ended_since(Start("e1", 17), "e1")
    assert not has_ended_since(Start(), "e2")
