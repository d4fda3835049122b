"""The compiled path of HTTP: it knows the usual case alone, and must agree with the slower code that knows all.

pack_simple is compared with llhttp, signed_params with protocol.auth.
"""

import contextlib
import hashlib
import hmac
import urllib.parse

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from helpers.messages import unpack_request
from redpoll._http import (
    IncomingRequest,
    pack_answer,
    pack_request,
    pack_rest,
    pack_simple,
    read_answers,
    read_requests,
    signed_params,
)
from redpoll.http.messages import CLOSES, FIELDS, HTTP_1_0, size_of
from redpoll.protocol import auth
from redpoll.protocol.apps import App, Key
from redpoll.protocol.errors import ApiError

# -- pack_simple and llhttp -------------------------------------------------------------------------------------

PLACES = {name.lower().encode(): place for place, name in enumerate(FIELDS)}


def simple_request(data, fields):
    """`(flags, method, target, body)` of what pack_simple packed, or None. Its header fields are added to `fields`."""
    packed = pack_simple(data, 7, 0, b"192.0.2.1", PLACES)
    if packed is None or packed[4]:
        return None
    flags, method, message, client, _ = packed
    assert client == b"192.0.2.1"
    read = unpack_request(message)
    assert (read.number, read.flags, read.refusal, read.method.encode(), read.client, read.announced) == (
        *(7, flags, 0, method),
        *("192.0.2.1", 0),
    )
    assert size_of(message, 0) == len(message)
    fields += [(name.lower().encode(), value.encode("utf-8", "surrogateescape")) for name, value in read.fields.items()]
    return flags, method, read.target.encode("utf-8", "surrogateescape"), read.body


HEADERS = [
    b"Host: h",
    b"host: other:80",
    b"Content-Length: 4",
    b"content-length: 04",
    b"Content-Length: 0",
    b"Content-Length: +4",
    b"Content-Length: 4, 4",
    b"Content-Length: ",
    b"Content-Length: 99999999",
    b"Transfer-Encoding: chunked",
    b"Connection: close",
    b"Connection: Keep-Alive",
    b"Connection: close, x",
    b"Connection: Upgrade",
    b"Upgrade: h2c",
    b"Expect: 100-continue",
    b"X-Forwarded-For: 1.2.3.4",
    b"Content-Type: application/json",
    b"Content-Type: text/plain",
    b"X-Service-Key:  k \t",
    b"Authorization: Bearer x",
    b"X-A: \xe9",
    b"X-A: a\tb",
    b"X-A:",
    b"X-A : b",
    b" folded",
    b"X\x00A: b",
    b"X-A: \x00",
    b"X-A: a\rb",
    b"X-A: a\nb",
    b": empty",
    b"no colon",
]
heads = st.builds(
    lambda method, target, version, lines, end, body: (
        b" ".join((method, target, version)) + b"\r\n" + b"".join(line + b"\r\n" for line in lines) + end + body
    ),
    st.sampled_from([b"GET", b"POST", b"HEAD", b"get", b"POST "]),
    st.sampled_from([b"/", b"/apps/1/events?a=1&b=%20", b"*", b"http://h/", b"/a b", b"/\xc3\xa9", b"/#a", b'/"', b""]),
    st.sampled_from([b"HTTP/1.1", b"HTTP/1.1", b"HTTP/1.0", b"HTTP/1.2", b"HTTP/2.0", b""]),
    st.lists(st.sampled_from(HEADERS), max_size=5),
    st.sampled_from([b"\r\n", b"\n", b"", b"\r"]),
    st.sampled_from(
        [
            b"",
            b"abcd",
            b"abc",
            b"abcde",
            b"4\r\nabcd\r\n0\r\n\r\n",
            b"4\r\nabcd\r\n0\r\nX: y\r\n\r\n",
            b"GET / HTTP/1.1\r\nHost: h\r\n\r\n",
        ]
    ),
)


@settings(max_examples=600, deadline=None)
@given(heads)
@example(b"POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 4\r\n\r\nabcd")
@example(b"GET / HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n")
def test_what_is_read_here_llhttp_reads_the_same(http_reference, data):
    fields = []
    simple = simple_request(data, fields)
    if simple is None:
        return
    flags, method, target, body = simple
    seen = http_reference.LlhttpReading(data)
    assert seen.request == (method, target, body, not flags & CLOSES)
    assert all(field in seen.headers for field in fields)
    # And nothing of it names what only the slower code understands.
    names = [name for name, _ in seen.headers]
    assert names.count(b"host") == 1 or (names.count(b"host") == 0 and flags & HTTP_1_0)
    assert names.count(b"content-length") + names.count(b"transfer-encoding") <= 1
    assert b"upgrade" not in names


@settings(max_examples=500, deadline=None)
@given(st.data())
def test_a_changed_byte_is_read_as_llhttp_reads_it_or_not_here(http_reference, data):
    good = (
        b"POST /apps/1/events?auth_key=k HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        b"Connection: keep-alive\r\nContent-Length: 4\r\n\r\nabcd"
    )
    at = data.draw(st.integers(0, len(good) - 1))
    changed = good[:at] + bytes([data.draw(st.integers(0, 255))]) + good[at + 1 :]
    simple = simple_request(changed, [])
    if simple is not None:
        flags, method, target, body = simple
        assert http_reference.LlhttpReading(changed).request == (method, target, body, not flags & CLOSES)


def test_the_usual_requests_are_read_here():
    fields = []
    assert simple_request(b"GET /a?b HTTP/1.1\r\nhost:h\r\n\r\n", fields) == (0, b"GET", b"/a?b", b"")
    request = b"POST /a HTTP/1.1\r\nHost: h\r\nConnection: close\r\nX-Service-Key: k\r\nContent-Length: 2\r\n\r\nab"
    assert simple_request(request, fields) == (4, b"POST", b"/a", b"ab")
    assert fields == [(b"x-service-key", b"k")]
    for cut in range(len(request)):
        assert simple_request(request[:cut], []) is None
    assert simple_request(request + b"G", []) is None
    assert simple_request(b"GET /app/key HTTP/1.1\r\nhost:h\r\n\r\n", []) is None
    many = b"GET /a HTTP/1.1\r\nHost: h\r\n" + b"X-A: b\r\n" * 99
    assert simple_request(many + b"\r\n", []) is not None
    assert simple_request(many + b"X-A: b\r\n\r\n", []) is None
    long = b"GET /a HTTP/1.1\r\nHost: h\r\nX-A: " + b"a" * (16384 - 35) + b"\r\n\r\n"
    assert len(long) == 16384
    assert simple_request(long, []) is not None
    assert simple_request(long.replace(b"X-A: ", b"X-A: a"), []) is None


@pytest.mark.parametrize("fields", [b"", b"Expect: 100-continue\r\n"], ids=["plain", "expects"])
def test_a_request_in_pieces_becomes_the_same_message(fields):
    head = b"POST /a HTTP/1.1\r\nHost: h\r\n%bX-Service-Key: k\r\nContent-Length: 5\r\n\r\n" % fields
    whole = pack_simple(head + b"abcde", 9, 1, b"192.0.2.1", PLACES)
    assert whole[4] == 0
    for cut in range(5):
        flags, method, beginning, client, missing = pack_simple(head + b"abcde"[:cut], 7, 1, b"192.0.2.1", PLACES)
        assert missing == (-5 if fields and not cut else 5 - cut)
        assert (flags, method, pack_rest(beginning, b"abcde"[cut:], 9), client) == whole[:4]
        for wrong in (b"", b"abcde"[cut:-1], b"abcde"[cut:] + b"f"):
            with pytest.raises(ValueError, match="aren't what is missing"):
                pack_rest(beginning, wrong, 9)
    with pytest.raises(ValueError, match="no message"):
        pack_rest(b"abc", b"", 9)


@pytest.mark.parametrize(("method", "size"), [(b"GET", 5), (b"POST", 16_385)])
def test_a_beginning_that_is_not_kept_is_not_read_here(method, size):
    head = b"%b /a HTTP/1.1\r\nHost: h\r\nContent-Length: %d\r\n\r\n" % (method, size)
    assert pack_simple(head, 7, 0, b"192.0.2.1", PLACES) is None
    assert pack_simple(head + b"a" * size, 7, 0, b"192.0.2.1", PLACES)[4] == 0


# -- messages ---------------------------------------------------------------------------------------------------


def test_requests_of_a_stream_are_read_in_order_and_a_part_is_left():
    stream = b"".join(pack_request(n, 1, b"POST", b"::1", b"/a?%d" % n, b"", b"x" * n) for n in range(1, 6))
    for cut in range(len(stream)):
        requests, used = read_requests(IncomingRequest, bytearray(stream[:cut] + b"\0" * 8), cut, ())
        assert used <= cut
        assert [(one.number, one.path, one.query, one.body) for one in requests] == [
            (n, "/a", str(n), b"x" * n) for n in range(1, len(requests) + 1)
        ]
        assert all(one.secure and one.remote == "::1" and one.more_headers == b"" for one in requests)
    requests, used = read_requests(IncomingRequest, bytearray(stream), len(stream), ())
    assert (len(requests), used) == (5, len(stream))


def test_answers_of_a_stream_are_read_in_order_and_a_part_is_left():
    stream = pack_answer(7, 1, b"abc") + pack_answer(8, 2, b"")
    for cut in range(len(stream) + 1):
        answers, used = read_answers(stream[:cut])
        assert answers == [(7, 1, b"abc"), (8, 2, b"")][: len(answers)]
        assert used == (0, 12, 21)[len(answers)]


@given(st.binary(max_size=200))
def test_any_bytes_are_read_or_refused(data):
    with contextlib.suppress(ValueError):
        read_requests(IncomingRequest, bytearray(data + b"\0"), len(data), ("X-A",))
    with contextlib.suppress(ValueError):
        read_answers(data)


@pytest.mark.parametrize("fields", [b"\0", b"\0\1", b"\0\2\0a", b"\1\0\0", b"\0\1\0ab"])
def test_a_part_of_a_field_is_an_error(fields):
    message = pack_request(1, 0, b"GET", b"", b"/", fields, b"")
    with pytest.raises(ValueError, match="a malformed message"):
        read_requests(IncomingRequest, bytearray(message), len(message), ("X-A",))


def test_what_is_too_large_for_a_message_is_refused():
    with pytest.raises(ValueError, match="too large"):
        pack_request(1, 0, b"GET", b"", b"/" * 70_000, b"", b"")


# -- signed_params and protocol.auth ----------------------------------------------------------------------------

APP = App(id="3", name="t", keys=(Key(key="k1", secret="s1"), Key(key="off", secret="s2", enabled=False)))
NOW = 1_700_000_000
PATH = "/apps/3/events"


def signed(body=b"{}", method="POST", path=PATH, secret="s1", **changed):
    fields = {"auth_key": "k1", "auth_timestamp": str(NOW), "auth_version": "1.0"}
    if body:
        fields["body_md5"] = hashlib.md5(body).hexdigest()
    fields |= changed
    text = "&".join(f"{name}={value}" for name, value in sorted(fields.items()))
    digest = hmac.new(secret.encode(), f"{method}\n{path}\n{text}".encode(), hashlib.sha256).hexdigest()
    return urllib.parse.urlencode(fields) + f"&auth_signature={digest}"


def compare(method, path, query, body):
    """signed_params finds only what protocol.auth lets in, and the same in it."""
    short_path = path.removeprefix(auth.PREFIX) if path.startswith(auth.PREFIX + "/") else None
    found = signed_params(method, path, query, body, APP, auth.hashes_of, float(NOW), auth.MAX_SKEW_S, short_path)
    if found is None:
        return None
    params = auth.check_query(APP, method, path, query, body, float(NOW))
    key, more = found
    assert dict(params)["auth_key"] == key
    assert more == any(name not in auth.AUTH_NAMES for name, _ in params)
    return found


def test_the_usual_signature_is_checked_here():
    assert compare("POST", PATH, signed(), b"{}") == ("k1", False)
    assert compare("POST", PATH, signed(), None) == ("k1", False)
    assert compare("GET", PATH, signed(b"", "GET"), b"") == ("k1", False)
    assert compare("POST", PATH, signed(info="user_count", a1="x", a="y"), b"{}") == ("k1", True)
    assert compare("POST", PATH, signed(info="a,b&c=%41 ").replace("+", "%20"), b"{}") == ("k1", True)
    assert compare("POST", PATH, signed(a="1+1").replace("%2B", "+"), b"{}") == ("k1", True)
    shuffled = "&".join(reversed(signed(a="1", b="2").split("&")))
    assert compare("POST", PATH, shuffled, b"{}") == ("k1", True)


def test_the_path_may_be_signed_without_its_prefix():
    assert compare("POST", auth.PREFIX + PATH, signed(), b"{}") == ("k1", False)
    assert compare("POST", auth.PREFIX + PATH, signed(path=auth.PREFIX + PATH), b"{}") == ("k1", False)
    assert compare("POST", PATH, signed(path=auth.PREFIX + PATH), b"{}") is None


@pytest.mark.parametrize(
    ("query", "body"),
    [
        (signed(secret="other"), b"{}"),
        (signed(a="%zz").replace("%25zz", "%zz"), b"{}"),
        (signed(a="é"), b"{}"),
        (signed() + "&a=%4", b"{}"),
        (signed().replace("auth_key=k1", "auth_key=%6b1"), b"{}"),
        (signed().replace("auth_key", "%61uth_key"), b"{}"),
        (signed(), b"{ }"),
        (signed(), b""),
        (signed(body=b""), b"{}"),
        (signed(auth_key="off", secret="s2"), b"{}"),
        (signed(auth_key="unknown"), b"{}"),
        (signed(auth_version="1.1"), b"{}"),
        (signed(auth_timestamp=str(NOW - 601)), b"{}"),
        (signed(auth_timestamp=str(NOW + 601)), b"{}"),
        (signed(auth_timestamp="-1"), b"{}"),
        (signed(auth_timestamp="9" * 16), b"{}"),
        (signed() + "&auth_key=k1", b"{}"),
        (signed() + "&info=user_count", b"{}"),
        (signed().replace("auth_key", "Auth_Key"), b"{}"),
        (signed()[:-1], b"{}"),
        (signed() + "0", b"{}"),
        ("", b"{}"),
        ("auth_key", b""),
        ("&" * 40, b""),
        ("=".join(["a"] * 40), b""),
        ("&".join(f"a{n}=1" for n in range(40)), b""),
    ],
)
def test_nothing_else_is_let_in_here(query, body):
    assert compare("POST", PATH, query, body) is None


@settings(max_examples=400, deadline=None)
@given(st.data())
def test_a_changed_byte_is_let_in_only_where_the_slower_code_lets_it_in(data):
    query = signed(a="1", info="user_count")
    at = data.draw(st.integers(0, len(query) - 1))
    changed = query[:at] + chr(data.draw(st.integers(0, 0x17F))) + query[at + 1 :]
    compare("POST", PATH, changed, b"{}")


@given(st.text(max_size=300), st.text(max_size=100), st.binary(max_size=50))
def test_any_text_is_judged_without_an_error(query, path, body):
    try:
        compare("POST", path, query, body)
    except ApiError:
        pytest.fail("let in here, refused there")


def test_long_paths_and_queries_are_left_to_the_slower_code():
    path = "/apps/3/" + "x" * 5000
    assert compare("POST", path, signed(path=path), b"{}") is None
    assert compare("POST", PATH, signed(x="y" * 5000), b"{}") is None
