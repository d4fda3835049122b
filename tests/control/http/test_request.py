"""Requests, and responses that carry their trace id."""

import pytest

from redpoll.control.http.request import Request, error_response
from redpoll.protocol.apps import App, Key
from redpoll.protocol.errors import HTTP_STATUS, ApiError
from redpoll.protocol.tokens import Token


def call(target="/apps/1/events?a=1", **headers):
    return Request("POST", target, headers, b"")


def test_path_and_query_are_not_decoded():
    seen = call("/apps/1/channels/a%40b?x=%41&y")
    assert (seen.path, seen.query) == ("/apps/1/channels/a%40b", "x=%41&y")
    assert call("/healthz").query == ""
    assert (seen.target, call("/healthz").target) == ("/apps/1/channels/a%40b?x=%41&y", "/healthz")


def test_the_last_value_of_a_repeated_parameter_counts():
    seen = call()
    seen.params = [("a", "1"), ("b", ""), ("a", "2")]
    assert (seen.param("a"), seen.param("b"), seen.param("c")) == ("2", "", None)


def test_the_key_of_the_header_wins_over_the_query():
    seen = call()
    seen.params = [("auth_key", "q")]
    assert seen.key == "q"
    seen = call(**{"X-Service-Key": "h"})
    seen.params = [("auth_key", "q")]
    assert seen.key == "h"


def test_responses_and_errors_have_the_trace_id_and_the_requests_headers():
    seen = call()
    seen.more_headers = b"X-More: 1\r\n"
    for answer in (seen.ok(b"{}", b"X-Own: 2\r\n"), seen.error(ApiError("bad_request", "no"))):
        assert b"X-Service-Trace-Id: %b\r\n" % seen.trace_id.encode() in answer.headers
        assert b"X-More: 1\r\n" in answer.headers
    assert b"X-Own: 2\r\n" in seen.ok(b"{}", b"X-Own: 2\r\n").headers


def test_503_has_a_retry_after_header():
    assert b"Retry-After: 1\r\n" in error_response(ApiError("unavailable", "x"), "0" * 32).headers
    assert b"Retry-After" not in error_response(ApiError("bad_request", "x"), "0" * 32).headers


def test_a_status_that_replaces_the_codes_is_also_in_the_body():
    answer = error_response(ApiError("bad_request", "late"), "0" * 32, 408)
    assert answer.status == 408
    assert b'"status":408' in answer.body
    assert b'"code":"bad_request"' in answer.body


def test_the_key_of_a_request_with_a_token_is_the_signing_key():
    keys = (Key(key="old", secret="1", enabled=False), Key(key="new", secret="2"), Key(key="newer", secret="3"))
    token = Token(id="t", app_id="1", name="t", hash="h", prefix="p", scopes=("all",), created_at=0.0)
    seen = call("/apps/1/auth?auth_key=q", **{"X-Service-Key": "newer"})
    seen.params = [("auth_key", "q")]
    seen.app, seen.token = App(id="1", name="a", keys=keys), token
    assert seen.key == "new"
    seen.app = App(id="1", name="a", keys=keys[:1])
    assert seen.key == ""


@pytest.mark.parametrize("code", [code for code, status in HTTP_STATUS.items() if status in (400, 401, 403, 429)])
def test_every_401_has_a_challenge(code):
    headers = error_response(ApiError(code, "x"), "0" * 32).headers
    assert (b"WWW-Authenticate: Bearer" in headers) is (HTTP_STATUS[code] == 401 or code == "insufficient_scope")


def test_a_request_keeps_its_trace_id():
    seen = call()
    assert len(seen.trace_id) == 32
    assert seen.trace_id == seen.trace_id
