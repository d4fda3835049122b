"""The frame encoder compared with json.dumps, and the envelope parser with what a publisher writes."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from redpoll import _frame

# Text that is mostly what has to be escaped, in runs around the eight bytes that the encoder takes at once.
AWKWARD = st.text(
    st.one_of(st.sampled_from('"\\\x00\x1f\x7f\n\t\b\f\r\u2028é\U0001f600'), st.characters(codec="utf-8"))
)
LONG = st.builds(lambda text, times: text * times, AWKWARD, st.sampled_from([1, 9, 200]))


@given(event=AWKWARD, channel=AWKWARD, data=LONG, user=st.none() | AWKWARD)
def test_event_frame_agrees_with_json(reference, event, channel, data, user):
    arguments = event.encode(), channel.encode(), data.encode(), None if user is None else user.encode()
    assert _frame.event_frame(*arguments) == reference.event_frame(*arguments)


def test_every_byte_is_escaped_as_json_does_it_wherever_it_stands(reference):
    for byte in range(256):
        for place in (0, 3, 7, 8, 12):
            data = ("x" * place + chr(byte) + "yyyyy").encode()
            assert _frame.event_frame(b"e", b"c", data) == reference.event_frame(b"e", b"c", data)


@pytest.mark.parametrize("size", [0, 1, 125, 126, 127, 65535, 65536, 65537])
def test_text_frames_have_the_shortest_length(reference, size):
    assert reference.server_frames(_frame.text(b"x" * size)) == [(1, b"x" * size)]


def test_control_frames(reference):
    made = _frame.ping(b"a") + _frame.pong(b"b") + _frame.close(4100, "slow") + _frame.close(None)
    assert reference.server_frames(made) == [(9, b"a"), (10, b"b"), (8, b"\x10\x04slow"), (8, b"")]


def test_control_frames_refuse_more_than_125_bytes():
    _frame.ping(b"x" * 125)
    with pytest.raises(ValueError, match="125"):
        _frame.pong(b"x" * 126)


def test_a_close_reason_is_cut_at_a_whole_character(reference):
    [(opcode, payload)] = reference.server_frames(_frame.close(4100, "é" * 100))
    assert opcode == 8
    assert payload[2:].decode() == "é" * 61
    assert len(payload) <= 125


def envelope(offset=0, prev=0, skip="-", trace="-", user=b"", event=b"e", data=b"{}") -> bytes:
    header = f"e {offset} {prev} {skip} {trace} {len(user)} {len(event)}\n"
    return header.encode() + user + event + data


@given(
    offset=st.integers(0, 2**63 - 1),
    prev=st.integers(0, 2**63 - 1),
    skip=st.none() | st.tuples(st.integers(1, 2**60), st.integers(1, 2**60)),
    trace=st.none() | st.text("0123456789abcdef", min_size=1),
    user=AWKWARD,
    event=AWKWARD.filter(bool),
    data=AWKWARD,
)
def test_envelope_reads_what_a_publisher_writes(offset, prev, skip, trace, user, event, data):
    user, event, data = user.encode(), event.encode(), data.encode()
    socket_id = f"{skip[0]}.{skip[1]}" if skip else "-"
    payload = envelope(offset, prev, socket_id, trace or "-", user, event, data)
    expected = (offset, prev, *(skip or (0, 0)), trace.encode() if trace else None, user or None, event, data)
    assert _frame.envelope(payload) == expected
    frame = _frame.event_frame(event, b"private-c", data, user or None)
    assert _frame.frame_of(payload, b"private-c") == (frame, *(skip or (0, 0)))
    assert _frame.frame_and_trace(payload, b"private-c") == (
        *_frame.frame_of(payload, b"private-c"),
        trace.encode() if trace else None,
    )
    assert _frame.offsets(payload) == (offset, prev)
    assert _frame.trace_of(payload) == (trace.encode() if trace else None)


@given(offset=st.integers(1, 2**63 - 1), user=st.none() | AWKWARD.filter(bool), data=LONG)
def test_a_frame_for_recovering_clients_has_its_offset_beside_the_event(reference, offset, user, data):
    payload = envelope(offset, 0, user=(user or "").encode(), event=b"news", data=data.encode())
    frame, _, _ = _frame.frame_of(payload, b"c", True)
    [(_, text)] = reference.server_frames(frame)
    expected = {"event": "news", "channel": "c", "data": data, "offset": offset}
    assert json.loads(text) == (expected if user is None else {**expected, "user_id": user})
    assert _frame.frame_of(payload, b"c", with_offset=False) == _frame.frame_of(payload, b"c")


@pytest.mark.parametrize("offset", [1, 9, 10, 99, 100, 2**32, 10**18, 2**63 - 1])
def test_offsets_of_every_length_fit_their_frame(reference, offset):
    for size in (0, 70, 80, 90, 65_490, 65_500, 65_510):
        frame, _, _ = _frame.frame_of(envelope(offset, data=b"x" * size), b"c", True)
        [(opcode, text)] = reference.server_frames(frame)
        assert (opcode, json.loads(text)["offset"]) == (1, offset)


def test_an_unstored_event_has_no_offset():
    assert _frame.frame_of(envelope(), b"c", True) == _frame.frame_of(envelope(), b"c")


@pytest.mark.parametrize(
    "payload",
    [b"", b"e", b"e ", b"x 0 0 - - 0 1\ne", b"e 1 2", b"e 1\n2 - - 0 1", b"e -1 0 - - 0 1\n", b"e 1 x - - 0 1\n"],
)
def test_offsets_and_trace_of_a_malformed_start_are_refused(payload):
    with pytest.raises(ValueError, match="malformed envelope"):
        _frame.offsets(payload)
    with pytest.raises(ValueError, match="malformed envelope"):
        _frame.trace_of(payload)


def test_the_trace_is_read_only_from_the_header_line():
    for payload in (b"e 1 2 \n- abc 0 1\n", b"e 1 2 -\n abc ", b"e 1 2 - abc\n "):
        with pytest.raises(ValueError, match="header line"):
            _frame.trace_of(payload)


def test_an_empty_event_and_data_are_read():
    assert _frame.envelope(envelope(event=b"", data=b"")) == (0, 0, 0, 0, None, None, b"", b"")


@pytest.mark.parametrize("skip", ["123456789012345678901234567890.1", "1.99999999999999999999", "a.b", "1.", ".1"])
def test_an_impossible_socket_id_skips_no_socket(skip):
    assert _frame.envelope(envelope(skip=skip))[2:4] == (0, 0)


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"e",
        b"e ",
        b"x 0 0 - - 0 1\ne{}",
        b"e 0 0 - - 0 1",
        b"e 0 0 - - 0\ne{}",
        b"e 0 0 - -  1\ne{}",
        b"e -1 0 - - 0 1\ne{}",
        b"e 0 0 1 - 0 1\ne{}",
        b"e 0 0 - - 0 9\ne{}",
        b"e 0 0 - - 9 0\ne{}",
        b"e 0 0 - - 9223372036854775807 9223372036854775807\ne{}",
        b"e 0 0 - - 99999999999999999999 0\ne{}",
        b"e 0 0 - - 0 1 \ne{}",
        b"e 0 0 - - 0 1x\ne{}",
    ],
)
def test_malformed_envelopes_are_refused(payload):
    with pytest.raises(ValueError, match="malformed envelope"):
        _frame.envelope(payload)
    with pytest.raises(ValueError, match="malformed envelope"):
        _frame.frame_of(payload, b"c")


@given(st.data())
def test_damaged_envelopes_are_parsed_or_refused(data):
    payload = bytearray(envelope(12, 11, "1.2", "abc", b"user", b"event", b'{"a":1}'))
    for _ in range(data.draw(st.integers(1, 4))):
        payload[data.draw(st.integers(0, len(payload) - 1))] = data.draw(st.integers(0, 255))
    payload = bytes(payload[: data.draw(st.integers(0, len(payload)))])
    try:
        fields = _frame.envelope(payload)
    except ValueError:
        return
    assert len(fields) == 8
    assert payload.endswith((fields[5] or b"") + fields[6] + fields[7])


def test_frames_of_events_are_json():
    frame = _frame.event_frame("é\n".encode(), b"c", b'{"a":"b"}', b"u")
    assert json.loads(frame[2:]) == {"event": "é\n", "channel": "c", "data": '{"a":"b"}', "user_id": "u"}
