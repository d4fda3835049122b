import json

from redpoll.protocol.errors import ApiError
from redpoll.testing.request import Request


def test_answers_carry_the_trace_id_and_the_requests_headers():
    request = Request("GET", "/apps/1/channels?a=1&a=2", {}, b"")
    request.params = [("a", "1"), ("a", "2")]
    request.more_headers = b"X-Test: 1\r\n"
    assert (request.path, request.param("a"), request.param("b")) == ("/apps/1/channels", "2", None)
    for answer in (request.ok(b"{}"), request.error(ApiError("unavailable", "away"))):
        assert b"X-Test: 1\r\n" in answer.headers
        assert b"X-Service-Trace-Id: " in answer.headers
    assert b"Retry-After: 1\r\n" in request.error(ApiError("unavailable", "away")).headers
    assert json.loads(request.error(ApiError("bad_request", "no")).body)["error"] == "no"
