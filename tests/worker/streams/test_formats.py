"""Messages as JSON and as events."""

import json

from redpoll.cluster.envelopes import event_envelope
from redpoll.protocol.errors import ApiError
from redpoll.protocol.streams import Live, Reading, Start, cursor_at
from redpoll.worker.streams.formats import Batch, Form, Message, as_json, form_of, message_of

NOW_S = 1_800_000_000.0
MESSAGES = [Message(2_000, 1_000, b"a", b'{"n": 1}'), Message(3_000, 2_000, b"b", "é\n".encode())]
SSE = Form(Live.SSE, False, False)
PLAIN = Form(Live.EVENT_SOURCE, False, False)


def batch(messages=MESSAGES, *, up_to_date: bool = True, ended: bool = False) -> Batch:
    return Batch("e", messages, messages[-1].offset if messages else 3_000, up_to_date, ended)


def events(text: bytes) -> list[list[str]]:
    blocks = text.decode().split("\n\n")
    assert blocks.pop() == ""
    return [block.split("\n") for block in blocks]


def test_message_is_read_from_its_envelope():
    payload = event_envelope("n", "dätä", skip="1.2", user="u", offset=7, prev=5)
    assert message_of(payload) == Message(7, 5, b"n", "dätä".encode())


def test_messages_are_those_of_the_history():
    assert json.loads(as_json(MESSAGES, False)) == [
        {"offset": 2_000, "event": "a", "data": '{"n": 1}', "time_ms": 2},
        {"offset": 3_000, "event": "b", "data": "é\n", "time_ms": 3},
    ]
    assert as_json([], False) == b"[]"


def test_data_alone_may_have_half_a_surrogate_pair():
    """JSON.stringify writes it if a text was cut within a character."""
    data = [
        b'{"delta":\n"\\ud83d"}',
        b'["\\uDE00", "\\ud83d\\ude00", "\\\\ud83d"]',
        b'{"delta": "\\ud83d',
        b'{"delta":\t"\\ud83d", "a": NaN}',
    ]
    assert json.loads(as_json([Message(1, 0, b"n", each) for each in data], True)) == [
        {"delta": "\ud83d"},
        ["\ude00", "\U0001f600", "\\ud83d"],
        data[2].decode(),
        data[3].decode(),
    ]
    assert as_json([Message(1, 0, b"n", data[0])], True) == b'[{"delta": "\\ud83d"}]'


def test_data_alone_is_json_or_a_string():
    data = [b'{"a":\n [1, 2]}', b"7", b"hello", b'{"broken"', b"", b"[" * 5_000, b'"\xc3\xa9"']
    text = as_json([Message(1, 0, b"n", each) for each in data], True)
    assert json.loads(text) == [{"a": [1, 2]}, 7, "hello", '{"broken"', "", "[" * 5_000, "é"]
    assert b"\n" not in text


def test_stream_has_data_and_then_the_position():
    data, control = events(SSE.written(batch(), NOW_S))
    assert data[0] == "event: data"
    assert json.loads(data[1].removeprefix("data:")) == json.loads(as_json(MESSAGES, False))
    assert control[0] == "event: control"
    assert json.loads(control[1].removeprefix("data:")) == {
        "streamNextOffset": "e_0000000000003000",
        "streamCursor": str(cursor_at(NOW_S, None)),
        "upToDate": True,
    }


def test_stream_without_messages_tells_the_position():
    ((name, control),) = events(SSE.written(batch([], up_to_date=False), NOW_S))
    assert name == "event: control"
    assert "upToDate" not in json.loads(control.removeprefix("data:"))


def test_end_of_a_stream_has_no_cursor():
    *_, (_, control) = events(SSE.written(batch(ended=True), NOW_S))
    control = json.loads(control.removeprefix("data:"))
    assert control["streamClosed"] is True
    assert "streamCursor" not in control


def test_event_source_gets_each_event_with_its_id():
    assert events(PLAIN.written(batch(), NOW_S)) == [
        ["id: e_0000000000002000", "event: a", 'data: {"n": 1}'],
        ["id: e_0000000000003000", "event: b", "data: é", "data: "],
    ]
    assert events(PLAIN.written(batch([]), NOW_S)) == [["id: e_0000000000003000"]]
    assert events(PLAIN.written(batch([], ended=True), NOW_S)) == [["event: pusher:end", "data: {}"]]
    assert PLAIN.opening() == b"retry: 1000\n\n"


def test_line_breaks_begin_no_field():
    message = Message(1, 0, b"a\r\nid: 9\rx", b"one\r\n\r\nevent: evil\rdata: two\n")
    ((*lines,),) = events(PLAIN.written(batch([message]), NOW_S))
    assert lines == [
        "id: e_0000000000000001",
        "event: a id: 9 x",
        "data: one",
        "data: ",
        "data: event: evil",
        "data: data: two",
        "data: ",
    ]


def test_only_event_source_is_told_why_its_stream_ends():
    error = ApiError("unauthorized", "access was revoked")
    ((name, data),) = events(PLAIN.failure(error))
    assert name == "event: pusher:error"
    body = {"error": "access was revoked", "code": "unauthorized", "status": 401}
    assert json.loads(data.removeprefix("data: ")) == body
    assert PLAIN._replace(chunked=True).failure(error).endswith(b"\n\n\r\n")
    assert SSE.failure(error) == b""


def test_chunks_are_those_of_http_1_1():
    chunked = PLAIN._replace(chunked=True)
    plain = PLAIN.written(batch(), NOW_S)
    assert chunked.written(batch(), NOW_S) == b"%x\r\n%b\r\n" % (len(plain), plain)
    # An empty chunk would end the response.
    assert chunked.events([]) == b""
    assert (chunked.closing(), PLAIN.closing()) == (b"0\r\n\r\n", b"")
    assert chunked.keep_alive() == b"3\r\n:\n\n\r\n"


def test_reader_whose_cursor_is_not_behind_gets_greater_ones():
    present = cursor_at(NOW_S, None)
    assert form_of(Reading(Start(), Live.SSE, present - 1, False), True, NOW_S) == SSE._replace(chunked=True)
    ahead = form_of(Reading(Start(), Live.SSE, present, False), True, NOW_S)
    assert ahead.least_cursor > present
    assert f'"streamCursor":"{ahead.least_cursor}"'.encode() in ahead.written(batch(), NOW_S)
    # EventSource has no cursor, so all its readers share one form.
    assert form_of(Reading(Start(), Live.EVENT_SOURCE, present, False), False, NOW_S) == PLAIN
