"""A connection answers the same whether requests of the usual shape are read in C or all are read by llhttp.

Both kinds of connection get the same bytes in the same pieces, without sockets and without a control plane.
"""

import re

import httptools
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from helpers.library_requests import LIBRARY_REQUESTS
from helpers.messages import unpack_request
from redpoll._http import pack_simple
from redpoll.config.proxies import NO_PROXIES
from redpoll.http import reader
from redpoll.http.connection import State
from redpoll.http.errors import error_response
from redpoll.http.head import FieldTable
from redpoll.http.messages import CLOSES, CONTINUE, FIELDS, HEAD_ONLY, LAST, PULL_LIMIT, pack_fields
from redpoll.worker.ingress import http_requests
from redpoll.worker.ingress.client_addresses import ClientAddresses
from redpoll.worker.ingress.http_requests import TABLE, PublicConnection
from redpoll.worker.ingress.strangers import Strangers

# What differs between two answers to the same request.
VARYING = re.compile(rb'"trace_id":"[0-9a-f]{32}"|X-Service-Trace-Id: [0-9a-f]{32}\r\n|Date: [^\r]+\r\n')


PROXIES = ["192.0.2.0/24", "10.0.0.0/8"]


class Connection:
    """Records what is written, and closes at the first answer that ends it."""

    is_http = True
    unsent_bytes = 0

    def __init__(self):
        self.written = []

    def write_http(self, data):
        self.written.append(VARYING.sub(b"", data))

    def end_http(self, data=b""):
        self.written += [VARYING.sub(b"", data), "end"]
        self.is_http = False

    def end_reading(self):
        pass

    def pause_reading(self):
        pass

    def resume_reading(self):
        pass


class Link:
    """Answers a request when `answer()` is called, as control would: to a head alone, that the body may be read."""

    ready = True

    def __init__(self):
        self.requests = []
        self.awaited = {}
        self.next_number = 1
        self.usual_total = 0

    def send(self, requester, flags, method, client, target, fields, body, announced=0, refusal=0):
        self.requests.append((flags, method, client, target, fields, body, announced, refusal))
        number = self.next_number
        self.next_number += 1
        self.awaited[number] = requester, flags, refusal
        return number

    def send_packed(self, requester, message):
        read = unpack_request(message)
        assert read.number == self.next_number
        target = read.target.encode("utf-8", "surrogateescape")
        values = [(FIELDS.index(name), value.encode("utf-8", "surrogateescape")) for name, value in read.fields.items()]
        return self.send(
            *(requester, read.flags, read.method.encode(), read.client.encode(), target, pack_fields(values)),
            *(read.body, read.announced, read.refusal),
        )

    def answer(self):
        while self.awaited:
            number, (requester, flags, refusal) = self.awaited.popitem()
            if flags & HEAD_ONLY and not refusal:
                requester.answered(CONTINUE, b"")
            else:
                last = LAST if flags & CLOSES else 0
                requester.answered(last, b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nX: %d\r\n\r\n" % number)


class NoneOfOurs:
    """No request is the fallback's."""

    def answer(self, http, request):
        return None


class Shared:
    """What the connections of a worker share."""

    local = NoneOfOurs()

    table = TABLE
    draining = False
    max_requests = 100
    head_timeout_s = body_timeout_s = 10.0
    reading_bytes = 0
    max_reading_bytes = 1 << 20

    def __init__(self):
        self.link = Link()
        self.idle = {}
        self.strangers = Strangers(256, NO_PROXIES)
        self.client_addresses = ClientAddresses(PROXIES)
        self.upgraded = None

    def wait(self, connection, seconds):
        pass

    def forget_reader(self, connection):
        pass

    def later(self, call):
        call()

    def limit_reached(self, limit):
        pass

    @property
    def max_strange_requests(self):
        return self.max_requests

    @property
    def max_strange_reading_bytes(self):
        return self.max_reading_bytes

    def refusal(self, http, request):
        return None

    def send(self, http, request, requester=None, more_flags=0):
        flags, method, target, fields, _, body, announced, refusal = request
        client = self.client_of(http, request).encode()
        return self.link.send(http, flags, method, client, target, pack_fields(fields), body, announced, refusal)

    def error(self, fault):
        return error_response(*fault)

    def upgrade(self, connection, received):
        self.upgraded = received
        connection.is_http = False

    def client_of(self, http, request):
        return self.client_addresses.of(http.peer, request.forwarded)


def conversation(pieces, answer_late):
    """Everything that leaves a connection which receives `pieces`."""
    shared, connection = Shared(), Connection()
    http = PublicConnection(shared, connection, "192.0.2.1", 0)
    for piece in pieces:
        if not connection.is_http:
            break
        http.received(piece)
        if not answer_late:
            shared.link.answer()
    shared.link.answer()
    return (
        shared.link.requests,
        connection.written,
        shared.upgraded,
        shared.reading_bytes,
        shared.strangers.idle == {connection: None},
    )


LINES = [
    b"Content-Length: 4",
    b"Content-Length: 0",
    b"content-LENGTH:\t004 ",
    b"Content-Length: 4x",
    b"Content-Length:",
    b"Transfer-Encoding: chunked",
    b"Transfer-Encoding : chunked",
    b"Connection: close",
    b"Connection: keep-alive",
    b"Connection: keep-alive, close",
    b"Connection: upgrade",
    b"Proxy-Connection: close",
    b"Upgrade: h2c",
    b"Upgrade: websocket",
    b"Expect: 100-continue",
    b"X-Forwarded-For: 198.51.100.7",
    b"x-forwarded-for: 203.0.113.9, 198.51.100.8:80,10.1.2.3",
    b"X-Forwarded-For: unknown",
    b"Content-Type: application/json; charset=UTF-8",
    b"Connection: Keep-Alive",
    b"Content-Type: application/json",
    b"Content-Type: text/plain",
    b"content-type: Application/JSON",
    b"X-Service-Key: k",
    b"x-service-key: \t other ",
    b"X-Service-Secret: \xc3\xa9",
    b"Authorization: Bearer t",
    b"Origin: https://a.example",
    b'If-None-Match: "a"',
    b"traceparent: 00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
    b"Content-Encoding: gzip",
    b"Host: two",
    b"X-A: a\rb",
    b"X-A: a\nb",
    b"X-A: a\x00b",
    b"X-A: a\x7fb",
    b" folded",
    b"no colon",
    b"X A: b",
]
TARGETS = [*[b"/apps/1/events?auth_key=k"] * 4, b"/", b"*", b"http://h/", b"/app/k", b"//", b"/a#b", b"/\xff"]
one_request = st.builds(
    lambda method, target, version, lines, end, body: (
        b"%b %b HTTP/%b\r\n" % (method, target, version) + b"".join(line + b"\r\n" for line in lines) + end + body
    ),
    st.sampled_from([b"POST"] * 4 + [b"GET", b"HEAD", b"PUT", b"post", b"CONNECT"]),
    st.sampled_from(
        [b"/apps/1/events?auth_key=k"] * 4 + [b"/", b"*", b"http://h/", b"/app/k", b"//", b"/a#b", b"/\xff"]
    ),
    st.sampled_from([b"1.1"] * 8 + [b"1.0", b"2.0"]),
    st.lists(st.sampled_from(LINES), max_size=3).flatmap(
        lambda lines: st.permutations([b"Host: h", *lines]) if len(lines) < 3 else st.just(lines)
    ),
    st.sampled_from([b"\r\n"] * 6 + [b"\n", b""]),
    st.sampled_from([b"abcd"] * 3 + [b"", b"abc", b"abcde", b"4\r\nabcd\r\n0\r\n\r\n", b"\r\n"]),
)
GOOD = b"POST /apps/1/events?a=b HTTP/1.1\r\nHost: h\r\nContent-Length: 4\r\n\r\nabcd"


@settings(max_examples=500, deadline=None)
@given(st.lists(one_request | st.just(GOOD), min_size=1, max_size=4), st.data(), st.booleans())
@example([GOOD, GOOD], None, False)
def test_both_ways_of_reading_answer_the_same(requests, data, answer_late):
    pieces = list(requests)
    if data is not None and data.draw(st.booleans()):
        stream = b"".join(requests)
        cuts = sorted(data.draw(st.sets(st.integers(1, len(stream) - 1), max_size=6)))
        pieces = [stream[start:end] for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True)]
    compiled = conversation(pieces, answer_late)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(http_requests, "pack_simple", lambda *given: None)
        assert conversation(pieces, answer_late) == compiled


def test_a_usual_request_is_read_in_c_also_if_its_body_comes_later(monkeypatch):
    seen = []
    monkeypatch.setattr(http_requests, "pack_simple", lambda *given: seen.append(given) or pack_simple(*given))
    made = []
    monkeypatch.setattr(reader.httptools, "HttpRequestParser", lambda owner: made.append(owner) or PARSER(owner))
    requests, *_ = conversation([GOOD, GOOD], False)
    assert (len(seen), len(made), requests[0]) == (2, 0, requests[1])
    pieces = [GOOD[:-4], GOOD[-4:-2], GOOD[-2:], GOOD]
    assert conversation(pieces, False)[0] == requests
    assert not made
    # A head in pieces isn't kept.
    in_parts, *_ = conversation([GOOD[:20], GOOD[20:]], False)
    assert (len(made), in_parts) == (1, requests[:1])


# Control only reads PULL_LIMIT in what a worker adds to a pull.
@pytest.mark.parametrize("name", [name for name in FIELDS if name != PULL_LIMIT])
def test_fields_that_control_reads_are_passed_on_in_c(name):
    data = b"GET /api/v1/redpoll.js HTTP/1.1\r\nHost: h\r\n%b: some value\r\n\r\n" % name.upper().encode()
    _, _, message, _, _ = pack_simple(data, 1, 0, b"192.0.2.1", FieldTable(FIELDS).kinds)
    assert unpack_request(message).fields == {name: "some value"}


@pytest.mark.parametrize("request_", LIBRARY_REQUESTS.values(), ids=LIBRARY_REQUESTS)
def test_requests_of_libraries_and_proxies_are_read_in_c(monkeypatch, request_):
    made, packets = [], request_.packets
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(reader.httptools, "HttpRequestParser", lambda owner: made.append(owner) or PARSER(owner))
        compiled = conversation(packets * 2, False)
    assert not made
    monkeypatch.setattr(http_requests, "pack_simple", lambda *given: None)
    assert conversation(packets * 2, False) == compiled
    flags, _, client, _, _, body, _, _ = compiled[0][0]
    assert (body, not flags & HEAD_ONLY) == (request_.body, True)
    assert client == (b"198.51.100.7" if b"orwarded-" in b"".join(packets).replace(b"x-f", b"X-F") else b"192.0.2.1")


SMUGGLED = [
    b"Content-Length: 4\r\nContent-Length: 4",
    b"Content-Length: 4\r\nContent-Length: 5",
    b"Content-Length: 4, 4",
    b"Content-Length: 4\r\nTransfer-Encoding: chunked",
    b"Transfer-Encoding: chunked\r\nContent-Length: 4",
    b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked",
    b"Transfer-Encoding: gzip, chunked",
    b"Transfer-Encoding: xchunked",
    b"Transfer-Encoding : chunked",
    b"Content-Length: 4\r\nX-A: b\r\n folded",
    b"Content-Length: 4\nX-A: b",
    b"Content-Length: 4\rX-A: b",
    b"Content-Length: 4\r\nX-Forwarded-For: 1.2.3.4\r\nX-Forwarded-For: 1.2.3.5",
    b"Content-Length: 4\r\nExpect: a-miracle",
]
BODIES = [b"abcd", b"4\r\nabcd\r\n0\r\n\r\n", b"4;a=b\r\nabcd\r\n0\r\n\r\n", b"2\r\nab\r\n2\r\ncd\r\n0\r\n\r\n"]


@pytest.mark.parametrize("version", [b"1.1", b"1.0"])
@pytest.mark.parametrize("lines", SMUGGLED)
def test_what_two_readers_could_understand_differently_is_not_read_in_c(lines, version):
    for body in [*BODIES, b""]:
        data = b"POST /apps/1/events?a=b HTTP/%b\r\nHost: h\r\n%b\r\n\r\n%b" % (version, lines, body)
        assert pack_simple(data, 1, 0, b"192.0.2.1", FieldTable(FIELDS).kinds) is None


def test_a_kept_request_that_is_not_whole_in_time_is_refused_by_control():
    for packed in (pack_simple, lambda *given: None):
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(http_requests, "pack_simple", packed)
            shared, connection = Shared(), Connection()
            http = PublicConnection(shared, connection, "192.0.2.1", 0)
            http.received(GOOD[:-1])
            assert http.state is State.BODY
            # What is kept counts as it was received, and as a message to control.
            assert shared.reading_bytes > len(GOOD) if packed is pack_simple else shared.reading_bytes == 3
            http.late()
            ((flags, *_, body, announced, refusal),) = shared.link.requests
            assert (flags, body, announced, refusal) == (HEAD_ONLY | CLOSES, b"", None, 408)
            assert shared.reading_bytes == 0


def test_the_body_of_a_kept_request_counts_until_its_client_is_gone():
    shared = Shared()
    shared.max_reading_bytes = 5
    first, second = (PublicConnection(shared, Connection(), "192.0.2.1", 0) for _ in range(2))
    first.received(GOOD[:-1])
    assert (first.state, shared.reading_bytes) == (State.BODY, 3)
    # There is no room for this one: its body is refused.
    second.received(GOOD[:-1])
    assert (second.state, shared.reading_bytes) == (State.ENDED, 3)
    first.gone()
    assert shared.reading_bytes == 0


PARSER = httptools.HttpRequestParser
