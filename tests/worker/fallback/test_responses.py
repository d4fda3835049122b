from redpoll.protocol.handshake import Refusal
from redpoll.worker.fallback import responses


def test_stream_is_not_to_be_buffered_or_changed_by_proxies():
    head = responses.stream_head(responses.cors_lines("https://a.example"), chunked=True).decode()
    assert head.endswith("\r\n\r\n")
    for line in (
        "HTTP/1.1 200 OK",
        "X-Accel-Buffering: no",
        "Cache-Control: no-store, no-transform",
        "Access-Control-Allow-Origin: https://a.example",
        "Vary: Origin",
        "Transfer-Encoding: chunked",
        "Connection: close",
    ):
        assert f"{line}\r\n" in head
    assert "Transfer-Encoding" not in responses.stream_head("", chunked=False).decode()


def test_client_without_origin_gets_no_cors_lines():
    assert responses.cors_lines(None) == ""


def test_refusal_has_the_error_and_the_close_of_a_websocket():
    head, _, body = responses.refused(Refusal(4001, "App key x not known to this server"), "").partition(b"\r\n\r\n")
    assert b"Content-Length: %d" % len(body) in head
    opened, error, close = body.decode().splitlines()
    assert opened == "o"
    assert "pusher:error" in error
    assert close == 'c[4001,"App key x not known to this server"]'


def test_failures_say_what_to_do():
    for status in (400, 403, 404, 408, 413, 503):
        response = responses.failed(status, "Vary: Origin\r\n")
        assert response.startswith(b"HTTP/1.1 %d " % status)
        assert b"Vary: Origin\r\n" in response
        assert (b"Retry-After: 1" in response) is (status == 503)
    assert b"too many" in responses.failed(503, "", "too many")
