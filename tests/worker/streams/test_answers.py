"""Heads and whole answers."""

from email.parser import BytesHeaderParser

from redpoll.protocol.errors import ApiError
from redpoll.protocol.streams import Live, Reading, Start
from redpoll.worker.streams.answers import (
    Granted,
    batch_answer,
    come_again,
    error_answer,
    etag_of,
    is_known,
    metadata,
    secured,
    stream_head,
)
from redpoll.worker.streams.formats import Batch, Message

GRANTED = Granted("1", "c", "Access-Control-Allow-Origin: https://a.example\r\nX-Service-Trace-Id: 0f\r\n", "0f")
CATCH_UP = Reading(Start(), Live.NO, None, False)
BATCH = Batch("e", [Message(7, 5, b"n", b"1")], 7, True)
BEGIN = "e_0000000000000005"


def parts(response: bytes) -> tuple[int, dict[str, str], bytes]:
    head, _, body = response.partition(b"\r\n\r\n")
    line, _, lines = head.partition(b"\r\n")
    return int(line.split()[1]), dict(BytesHeaderParser().parsebytes(lines)), body


def test_answer_names_the_position_and_is_to_be_asked_for_again():
    status, headers, body = parts(batch_answer(BATCH, BEGIN, CATCH_UP, GRANTED, ""))
    assert (status, body) == (200, b'[{"offset":7,"event":"n","data":"1","time_ms":0}]')
    assert headers["Stream-Next-Offset"] == "e_0000000000000007"
    assert headers["Stream-Up-To-Date"] == "true"
    assert headers["Cache-Control"] == "private, no-cache"
    assert headers["Content-Length"] == str(len(body))
    assert headers["Access-Control-Allow-Origin"] == "https://a.example"
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert not {"Stream-Closed", "Stream-Cursor"} & headers.keys()


def test_known_answer_is_not_sent_again():
    etag = parts(batch_answer(BATCH, BEGIN, CATCH_UP, GRANTED, ""))[1]["ETag"]
    status, headers, body = parts(batch_answer(BATCH, BEGIN, CATCH_UP, GRANTED, f'"other", W/{etag}'))
    assert (status, body, headers["ETag"]) == (304, b"", etag)
    assert parts(batch_answer(BATCH, BEGIN, CATCH_UP, GRANTED, '"other"'))[0] == 200
    assert is_known(etag, "*")


def test_etag_says_all_that_an_answer_says():
    tags = {
        etag_of(BATCH._replace(up_to_date=new, ended=over), BEGIN) for new in (True, False) for over in (True, False)
    }
    assert len(tags | {etag_of(BATCH, "e_0000000000000004"), etag_of(BATCH._replace(offset=8), BEGIN)}) == 6


def test_answer_from_now_on_is_not_stored():
    reading = CATCH_UP._replace(start=Start(now=True))
    status, headers, body = parts(batch_answer(BATCH._replace(messages=[]), BEGIN, reading, GRANTED, "*"))
    assert (status, body, headers["Cache-Control"]) == (200, b"[]", "no-store")
    assert "ETag" not in headers


def test_long_poll_has_a_cursor_and_204_without_messages():
    reading = CATCH_UP._replace(live=Live.LONG_POLL)
    status, headers, _ = parts(batch_answer(BATCH, BEGIN, reading, GRANTED, ""))
    assert (status, headers["Stream-Cursor"].isdecimal()) == (200, True)
    empty = BATCH._replace(messages=[])
    status, headers, body = parts(batch_answer(empty, BEGIN, reading, GRANTED, ""))
    assert (status, body, "Content-Length" in headers) == (204, b"", False)
    status, headers, _ = parts(batch_answer(empty._replace(ended=True), BEGIN, reading, GRANTED, ""))
    assert (status, headers["Stream-Closed"], "Stream-Cursor" in headers) == (204, "true", False)


def test_heads_have_no_size():
    status, headers, body = parts(metadata(BATCH, GRANTED))
    assert (status, body, headers["Cache-Control"]) == (200, b"", "no-store")
    status, headers, body = parts(stream_head(GRANTED, True))
    assert (status, body, headers["Content-Type"]) == (200, b"", "text/event-stream")
    assert headers["Transfer-Encoding"] == "chunked"
    assert headers["Connection"] == "close"
    assert "Transfer-Encoding" not in parts(stream_head(GRANTED, False))[1]


def test_error_has_the_trace_id_of_control():
    status, headers, body = parts(error_answer(ApiError("offset_gone", "gone"), GRANTED))
    assert (status, headers["X-Service-Trace-Id"]) == (410, "0f")
    assert b'"trace_id":"0f"' in body
    assert parts(error_answer(ApiError("unavailable", "later"), GRANTED))[1]["Retry-After"] == "1"


def test_event_source_is_asked_to_come_again_and_keeps_its_position():
    answers = [parts(come_again()) for _ in range(100)]
    waits = {int(body.removeprefix(b"retry: ").removesuffix(b"\n\n")) for _, _, body in answers}
    assert len(waits) > 1
    assert all(1_000 <= wait_ms <= 3_000 for wait_ms in waits)
    status, headers, _ = answers[0]
    assert (status, headers["Content-Type"], headers["Connection"]) == (200, "text/event-stream", "close")
    # Else a page of another origin would take it for a failure.
    assert headers["Access-Control-Allow-Origin"] == "*"


def test_grant_is_read_from_controls_answer():
    response = (
        b"HTTP/1.1 200 OK\r\nDate: x\r\nX-Service-Trace-Id: 0f\r\nVary: Origin\r\nX-Stream-App: 1\r\n"
        b"X-Stream-Channel: a=b\r\nContent-Length: 2\r\n\r\n{}"
    )
    assert Granted.of_response(response) == Granted("1", "a=b", "X-Service-Trace-Id: 0f\r\nVary: Origin\r\n", "0f")


def test_controls_errors_get_the_same_headers():
    status, headers, body = parts(secured(b"HTTP/1.1 401 Unauthorized\r\nContent-Length: 2\r\n\r\n{}"))
    assert (status, headers["X-Content-Type-Options"], body) == (401, "nosniff", b"{}")
