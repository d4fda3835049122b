"""Responses as bytes."""

import email.utils

import pytest

from redpoll._http import pack_answer, pack_ok
from redpoll.control.http.response import JSON, Dateline, Response, dateline, header_line


def parts(data: bytes) -> tuple[bytes, dict[bytes, bytes], bytes]:
    head, _, body = data.partition(b"\r\n\r\n")
    status_line, *lines = head.split(b"\r\n")
    return status_line, dict(line.split(b": ", 1) for line in lines), body


def test_a_response_has_its_length_its_date_and_its_own_headers():
    status_line, headers, body = parts(Response(200, b"{}", JSON + b"X-A: b\r\n").render("GET"))
    assert status_line == b"HTTP/1.1 200 OK"
    assert headers[b"Content-Length"] == b"2"
    assert headers[b"Content-Type"] == b"application/json"
    assert headers[b"X-A"] == b"b"
    assert email.utils.parsedate_to_datetime(headers[b"Date"].decode())
    assert b"Connection" not in headers
    assert body == b"{}"


def test_the_response_to_head_has_the_length_but_no_body():
    _, headers, body = parts(Response(200, b"12345").render("HEAD"))
    assert headers[b"Content-Length"] == b"5"
    assert body == b""


@pytest.mark.parametrize("status", [204, 304])
def test_some_statuses_have_neither_body_nor_length(status):
    _, headers, body = parts(Response(status, b"").render("OPTIONS"))
    assert b"Content-Length" not in headers
    assert body == b""


@pytest.mark.parametrize(
    ("http_1_0", "keep_alive", "expected"),
    [
        (False, True, None),
        (False, False, b"close"),
        (True, True, b"keep-alive"),
        (True, False, b"close"),
    ],
)
def test_the_connection_header_is_sent_if_the_version_does_not_imply_it(http_1_0, keep_alive, expected):
    _, headers, _ = parts(Response(200, b"", keep_alive=keep_alive).render("GET", http_1_0=http_1_0))
    assert headers.get(b"Connection") == expected


def test_a_line_break_in_a_header_is_refused():
    assert header_line("X-A", "b") == b"X-A: b\r\n"
    with pytest.raises(ValueError, match="line break"):
        header_line("X-A", "b\r\nSet-Cookie: c")


def test_the_date_line_changes_only_at_a_tick():
    line = Dateline()
    line.line = b"Date: long ago\r\n"
    line.tick()
    assert line.line.startswith(b"Date: ")
    assert line.line.endswith(b" GMT\r\n")
    assert dateline.line in Response(200, b"").render("GET")


@pytest.mark.parametrize("body", [b"", b"{}", b"x" * 100_000])
def test_an_answer_packed_in_c_is_the_rendered_response(body):
    response = Response(200, body, JSON + b"X-A: b\r\n")
    packed = pack_ok(7, 4, dateline.line, response.headers, response.body)
    assert packed == pack_answer(7, 4, response.render("POST"))
