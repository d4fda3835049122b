import hiredis
import pytest
from hypothesis import given
from hypothesis import strategies as st

from redpoll import _frame
from redpoll.cluster.envelopes import (
    Added,
    Removed,
    cached_envelope,
    event_envelope,
    event_of_tail,
    event_tail,
    parse_added,
    parse_cleared,
    parse_count,
    parse_ended,
    parse_removed,
    parse_webhooks_ended,
    webhooks_ended_envelope,
)
from redpoll.cluster.redis.keys import Keys


def test_event_has_a_header_line_and_then_user_event_and_data():
    envelope = event_envelope("né", '{"a":1}\n', skip="12.34", trace="ab" * 16, user="ü")
    assert envelope == b"e 0 0 12.34 " + b"ab" * 16 + ' 2 3\nüné{"a":1}\n'.encode()


def test_event_without_skip_trace_and_user_has_dashes_and_zero():
    assert event_envelope("ev", "") == b"e 0 0 - - 0 2\nev"


def test_event_with_history_has_its_offset_and_the_one_before():
    assert event_envelope("ev", "x", offset=1795229775333584, prev=3) == (b"e 1795229775333584 3 - - 0 2\nevx")


def test_tail_is_the_envelope_from_skip_to_the_end():
    assert event_envelope("ev", "d", skip="1.2") == b"e 0 0 " + event_tail("ev", "d", skip="1.2")


def test_added_member_may_have_any_bytes_in_its_id_and_info():
    payload = 'm 0123456789ab.0.1 1795 5\nü \nn€{"x":"a b"}'.encode()
    assert parse_added(payload) == Added("0123456789ab.0.1", 1795, "ü \nn", '€{"x":"a b"}'.encode())


def test_removed_member_is_all_that_follows_the_header():
    assert parse_removed(b"r 0123456789ab.0.1 1795\na\nb") == Removed("0123456789ab.0.1", 1795, "a\nb")


@pytest.mark.parametrize("payload", [b"", b"m", b"e 0 0 - - 0 2\nev", b"m w x 1\nab", b"r w 1\nu"])
def test_malformed_added_member_is_refused(payload):
    with pytest.raises(ValueError):  # noqa: PT011
        parse_added(payload)


@pytest.mark.parametrize("payload", [b"", b"r", b"m w 1 1\na", b"r w x\nu"])
def test_malformed_removed_member_is_refused(payload):
    with pytest.raises(ValueError):  # noqa: PT011
        parse_removed(payload)


def test_count_is_the_last_word():
    assert parse_count(b"n 0123456789ab.0.1 1795 12") == 12


@pytest.mark.parametrize("payload", [b"", b"n", b"n w 1", b"n w 1 x", b"r w 1 2"])
def test_malformed_count_is_refused(payload):
    with pytest.raises(ValueError):  # noqa: PT011
        parse_count(payload)


def test_cached_event_skips_no_socket():
    tail = event_tail("ev", "a b", skip="1.2", trace="ab" * 16)
    assert cached_envelope(tail) == event_envelope("ev", "a b", trace="ab" * 16)


def test_stored_event_keeps_its_skip_only_if_it_is_asked_for():
    tail = event_tail("ev", "a b", skip="1.2", trace="ab" * 16)
    assert event_of_tail(7, 5, tail) == event_envelope("ev", "a b", skip="1.2", trace="ab" * 16, offset=7, prev=5)
    assert event_of_tail(7, 5, tail, skip=False) == event_envelope("ev", "a b", trace="ab" * 16, offset=7, prev=5)


def test_cleared_history_has_its_new_epoch():
    assert parse_cleared(b"x 0123abcd") == "0123abcd"


def test_ended_history_has_the_offset_of_its_last_event():
    assert parse_ended(b"z 17") == 17
    with pytest.raises(ValueError):  # noqa: PT011
        parse_ended(b"x 17")


@given(st.lists(st.uuids().map(str)))
def test_acknowledged_deliveries_are_named(ids):
    assert parse_webhooks_ended(webhooks_ended_envelope(ids)) == ids
    with pytest.raises(ValueError):  # noqa: PT011
        parse_webhooks_ended(b"w")


@pytest.mark.parametrize("payload", [b"", b"x", b"x a b", b"y a"])
def test_malformed_cleared_history_is_refused(payload):
    with pytest.raises(ValueError):  # noqa: PT011
        parse_cleared(payload)


TEXT = st.characters(exclude_categories=["Cs"])
SKIP = st.none() | st.from_regex(r"[0-9]{1,13}\.[0-9]{1,13}", fullmatch=True)
TRACE = st.none() | st.from_regex(r"[0-9a-f]{32}", fullmatch=True)
USER = st.none() | st.text(TEXT, max_size=20)


@given(st.text(TEXT, max_size=50), st.text(TEXT, max_size=200), SKIP, TRACE, USER)
def test_an_envelope_packed_in_c_is_head_and_tail(event, data, skip, trace, user):
    tail = event_tail(event, data, skip=skip, trace=trace, user=user)
    assert event_envelope(event, data, skip=skip, trace=trace, user=user) == b"e 0 0 " + tail


@given(
    st.sampled_from([Keys("rp"), Keys("", sharded=True), Keys("é")]),
    st.text(TEXT, max_size=20),
    st.text(TEXT, max_size=200),
    st.text(TEXT, max_size=50),
    st.text(TEXT, max_size=50) | st.integers(0, 12_000).map("x".__mul__),
    SKIP,
    TRACE,
    USER,
)
def test_a_publish_packed_in_c_is_the_command_with_topic_and_envelope(
    keys, app_id, channel, event, data, skip, trace, user
):
    packed = _frame.pack_publish(keys.publish, keys.shards, app_id, channel, event, data, skip, trace, user)
    envelope = event_envelope(event, data, skip=skip, trace=trace, user=user)
    assert packed == hiredis.pack_command((keys.publish, keys.topic(app_id, channel), envelope))
