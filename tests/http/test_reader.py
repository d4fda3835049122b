"""Requests from bytes. tests/worker/ingress/test_http_connection.py has what is refused, over sockets."""

import pytest

from redpoll.http.head import FieldTable
from redpoll.http.messages import CLOSES, FIELDS, HEAD_ONLY, HTTP_1_0, MAX_BODY_BYTES, SECURE
from redpoll.http.reader import ParsedRequest, Phase, RequestReader

GET = b"GET /a HTTP/1.1\r\nHost: h\r\n\r\n"
POST = b"POST /b HTTP/1.1\r\nHost: h\r\nContent-Length: 4\r\n\r\nabcd"
CHUNKED = b"PUT /c HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n3;x\r\nabc\r\n1\r\nd\r\n0\r\nT: 1\r\n\r\n"
UPGRADE = b"GET /u HTTP/1.1\r\nHost: h\r\nX: y\r\nConnection: Upgrade\r\nUpgrade: %b\r\n\r\n"


@pytest.fixture
def make():
    """`make(websockets=…)`: a RequestReader."""
    return lambda websockets=False: RequestReader(FieldTable(FIELDS), SECURE, websockets=websockets)


@pytest.mark.parametrize("data", [GET, POST, CHUNKED])
def test_a_request_is_the_same_however_it_is_cut(make, data):
    whole = make()
    assert whole.read(data) == b""
    (request,) = whole.requests
    assert request[:3] == (SECURE, data[: data.index(b" ")], b"/" + data[data.index(b"/") + 1 :][:1])
    assert request.body == (b"" if data is GET else b"abcd")
    for at in range(1, len(data)):
        reader = make()
        assert reader.read(data[:at]) == b""
        assert reader.requests == []
        assert reader.phase in (Phase.HEAD, Phase.BODY)
        assert reader.read(data[at:]) == b""
        assert (reader.requests, reader.phase) == ([request], Phase.BETWEEN)


def test_what_follows_the_piece_with_a_whole_request_is_left(make):
    reader = make()
    rest = reader.read(GET + b"GET /" + b"x" * 9_000)
    # The parser gets 8 KiB at once.
    assert (len(reader.requests), len(rest), reader.phase) == (1, len(GET) + 9_005 - 8_192, Phase.HEAD)


def test_flags_say_how_the_client_speaks(make):
    reader = make()
    reader.read(b"GET / HTTP/1.0\r\n\r\n")
    reader.requests.clear()
    assert reader.read(GET) == b""
    # llhttp reads nothing after a request that closes.
    assert reader.fault is not None
    for data, flags in (
        (b"GET / HTTP/1.0\r\n\r\n", HTTP_1_0 | CLOSES),
        (b"GET / HTTP/1.0\r\nConnection: keep-alive\r\n\r\n", HTTP_1_0),
        (GET.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"), CLOSES),
    ):
        reader = make()
        reader.read(data)
        assert reader.requests[0].flags == SECURE | flags


def test_an_upgrade_is_an_ordinary_request_unless_it_names_a_websocket_that_is_wanted(make):
    head = UPGRADE % b"websocket"
    reader = make(websockets=True)
    assert reader.read(head + b"frame") == b"frame"
    assert reader.requests == [head]
    for wanted, protocol in ((True, b"h2c"), (False, b"websocket"), (False, b"h2c")):
        reader = make(wanted)
        assert reader.read(UPGRADE % protocol + GET) == GET
        assert [request.target for request in reader.requests] == [b"/u"]


def test_the_request_of_a_head_alone_has_what_the_head_announces(make):
    reader = make()
    reader.read(b"POST /b HTTP/1.1\r\nHost: h\r\nOrigin: o\r\nX-Forwarded-For: f\r\nContent-Length: 9\r\n\r\nabc")
    origin = (FIELDS.index("Origin"), b"o")
    asked = reader.head_request(HEAD_ONLY, reader.head.announced)
    assert asked == ParsedRequest(SECURE | HEAD_ONLY, b"POST", b"/b", [origin], ["f"], b"", 9)
    assert (reader.size, reader.body_bytes) == (3, 3)


def test_a_body_is_read_up_to_its_limit(make):
    reader = make()
    reader.read(b"POST /b HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n%x\r\n" % (MAX_BODY_BYTES + 1))
    reader.read(b"x" * MAX_BODY_BYTES)
    assert not reader.is_too_large
    left = reader.read(b"x\r\n0\r\n\r\n" + GET)
    assert reader.is_too_large
    assert (reader.requests, reader.fault) == ([], None)
    assert reader.read(left + GET) != b""


def test_nothing_is_read_after_a_fault(make):
    reader = make()
    assert reader.read(GET + b"GARBAGE\r\n\r\n") == b""
    assert (len(reader.requests), reader.fault[:2]) == (1, (400, "bad_request"))
    reader.requests.clear()
    assert reader.read(GET) == b""
    assert reader.requests == []


def test_a_closed_reader_holds_nothing(make):
    reader = make()
    reader.read(GET + POST[:-1])
    reader.close()
    assert (reader.requests, reader.phase) == ([], Phase.BETWEEN)
