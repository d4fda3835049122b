"""The worker's own HTTP responses."""

import json

from redpoll.http import errors as http_errors
from redpoll.http.errors import ALIVE, alive_response, closing, error_response


def test_an_error_has_the_apis_shape():
    head, _, body = error_response(503, "unavailable", "later", "Retry-After: 1\r\n").partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 503 Service Unavailable\r\n")
    assert b"\r\nRetry-After: 1" in head
    assert b"\r\nConnection: close" in head
    assert b"\r\nContent-Length: %d" % len(body) in head
    error = json.loads(body)
    assert (error["error"], error["code"], error["status"], len(error["trace_id"])) == ("later", "unavailable", 503, 32)
    assert b"Connection" not in error_response(503, "unavailable", "later", keep_alive=True)


def test_every_answer_has_the_date(monkeypatch):
    for second, date in (
        (784_111_777, b"Sun, 06 Nov 1994 08:49:37 GMT"),
        (784_111_778, b"Sun, 06 Nov 1994 08:49:38 GMT"),
    ):
        monkeypatch.setattr(http_errors.time, "time", lambda second=second: second + 0.9)
        for answer in (*map(alive_response, ALIVE), error_response(503, "unavailable", "later")):
            assert b"\r\nDate: %b\r\n" % date in answer
    assert alive_response(b"/").endswith(b"Content-Length: 2\r\n\r\nOK")


def test_closing_adds_connection_close_once():
    for connection in (b"", b"Connection: keep-alive\r\n", b"Connection: close\r\n"):
        response = closing(b"HTTP/1.1 200 OK\r\n%bContent-Length: 2\r\n\r\n\r\n" % connection)
        assert response.count(b"Connection: ") == 1
        assert b"Connection: close\r\n" in response
        assert response.endswith(b"Content-Length: 2\r\n\r\n\r\n")
