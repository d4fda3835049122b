"""HTTP requests, messages of control and publishes, read in slow, plain Python, to compare the compiled code with.

It shares no code with ext/. Used by tests/ext and by bench/soak/fuzz.py; reference.py is the same for WebSockets.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import struct
from typing import NamedTuple
from urllib.parse import unquote

import httptools

# -- requests of the usual shape ------------------------------------------------------------------------------

_REQUEST = re.compile(
    rb"""(GET|POST)\ (/[!$-;=?-\[\]_a-z~]*)\ HTTP/1\.([01])\r\n
    ((?:[!#$%&'*+\-.^_`|~0-9A-Za-z]+:[\ \t]*(?:[!-~](?:[ -~\t]*[!-~])?)?\r\n){0,100})\r\n""",
    re.VERBOSE,
)
# Each changes how a message is read.
_UNUSUAL = {b"upgrade", b"te", b"trailer", b"proxy-connection"}
_JSON = re.compile(rb"application/json(; ?charset=utf-8)?", re.IGNORECASE)
_CHUNK = re.compile(rb"([0-9A-Fa-f]{1,7})\r\n(.+)\r\n0\r\n\r\n", re.DOTALL)
CLOSES, HTTP_1_0 = 4, 8


class Usual(NamedTuple):
    """A request of the usual shape. `fields` are those that control reads, names in lower case. `forwarded` is the
    value of its X-Forwarded-For header. Of the body, `missing` bytes haven't come; negative: and the client waits for
    100 Continue."""

    flags: int
    method: bytes
    target: bytes
    fields: list[tuple[bytes, bytes]]
    body: bytes
    forwarded: bytes | None
    missing: int


def usual_request(data: bytes, wanted: frozenset[bytes]) -> Usual | None:
    """The request, where `data` is exactly one of the usual shape, or the beginning of one with a complete head
    (ext/redpoll/_http.pyx pack_simple). `wanted` are the names of the fields that control reads."""
    match = _REQUEST.match(data)
    if match is None or match.end() > 16384 or match[2].startswith(b"/app/") or match[2] in (b"/", b"/healthz"):
        return None
    if match[1] == b"GET" and match[2].partition(b"?")[0].endswith(b"/stream"):
        return None
    body = data[match.end() :]
    by_name: dict[bytes, list[bytes]] = {}
    fields = []
    for line in match[4].split(b"\r\n")[:-1]:
        name, _, value = line.partition(b":")
        fields.append((name.lower(), value.strip(b" \t")))
        by_name.setdefault(name.lower(), []).append(value.strip(b" \t"))
    lengths, encodings, expectations, forwarded, connections = (
        [value.lower() for value in by_name.get(name, [])]
        for name in (b"content-length", b"transfer-encoding", b"expect", b"x-forwarded-for", b"connection")
    )
    old = match[3] == b"0"
    hosts = len(by_name.get(b"host", []))
    if (
        _UNUSUAL & by_name.keys()
        or set(connections) - {b"close", b"keep-alive"}
        or encodings not in ([], [b"chunked"])
        or expectations not in ([], [b"100-continue"])
        or len(forwarded) > 1
        or (hosts > 1 or encodings or expectations or len(connections) > 1 if old else hosts != 1)
        or len(lengths) + len(encodings) > 1
        or any(re.fullmatch(rb"[0-9]{1,7}", value) is None for value in lengths)
    ):
        return None
    size = int(lengths[0]) if lengths else 0
    if encodings:
        chunk = _CHUNK.fullmatch(body)
        if chunk is None or int(chunk[1], 16) != len(chunk[2]):
            return None
        body, size = chunk[2], len(chunk[2])
    if size > 1024 * 1024 or len(body) > size:
        return None
    missing = size - len(body)
    if missing and (size > 16384 or match[1] != b"POST"):
        return None
    closes = b"close" in connections or (old and not connections)
    passed = [
        (name, value)
        for name, value in fields
        if name in wanted and not (name == b"content-type" and _JSON.fullmatch(value))
    ]
    flags = CLOSES * closes | HTTP_1_0 * old
    forwarded_for = by_name[b"x-forwarded-for"][0] if forwarded else None
    waits = expectations and not body
    return Usual(flags, match[1], match[2], passed, body, forwarded_for, -missing if waits else missing)


class LlhttpReading:
    """One request as llhttp reads it. `request` is `(method, target, body, stays open)`; None where `data` isn't
    exactly one whole request."""

    def __init__(self, data: bytes) -> None:
        self.request: tuple[bytes, bytes, bytes, bool] | None = None
        self.headers: list[tuple[bytes, bytes]] = []
        self._url = self._body = b""
        self._begun = self._ended = 0
        self._stays = False
        self._parser = httptools.HttpRequestParser(self)
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            return
        finally:
            parser, self._parser = self._parser, None
        if (self._begun, self._ended) == (1, 1):
            self.request = (parser.get_method(), self._url, self._body, self._stays)

    def on_message_begin(self) -> None:
        self._begun += 1

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        self._stays = self._parser.should_keep_alive()

    def on_body(self, data: bytes) -> None:
        self._body += data

    def on_message_complete(self) -> None:
        self._ended += 1


# -- messages between worker and control (src/redpoll/http/messages.py) -----------------------------------------

_REQUEST_HEAD = struct.Struct("<IIBHBBHHI")
_ANSWER_HEAD = struct.Struct("<IIB")
_FIELD = struct.Struct("<BH")


class PlainRequest(NamedTuple):
    """A request message. `announced` is None for a chunked body."""

    number: int
    flags: int
    refusal: int
    method: str
    client: str
    target: str
    fields: dict[str, str]
    announced: int | None
    body: bytes


def read_requests(data: bytes, names: tuple[str, ...]) -> tuple[list[PlainRequest], int]:
    """The whole messages at the start of `data`, and their bytes. Raises ValueError for bytes that are no message."""
    requests = []
    used = 0
    while len(data) - used >= _REQUEST_HEAD.size:
        size, number, flags, refusal, *sizes, announced = _REQUEST_HEAD.unpack_from(data, used)
        message = data[used + _REQUEST_HEAD.size : used + 4 + size]
        if used + 4 + size > len(data):
            break
        if _REQUEST_HEAD.size + sum(sizes) > 4 + size:
            raise ValueError("parts larger than the message")
        parts = []
        for part_size in sizes:
            parts.append(message[:part_size])
            message = message[part_size:]
        method, client, target, fields = parts
        requests.append(
            PlainRequest(
                *(number, flags, refusal, method.decode("ascii"), client.decode("ascii")),
                target.decode("utf-8", "surrogateescape"),
                _read_fields(fields, names),
                None if announced == 0xFFFF_FFFF else announced,
                message,
            )
        )
        used += 4 + size
    return requests, used


def _read_fields(data: bytes, names: tuple[str, ...]) -> dict[str, str]:
    fields: dict[str, str] = {}
    while data:
        if len(data) < _FIELD.size:
            raise ValueError("a part of a field")
        place, size = _FIELD.unpack_from(data)
        if place >= len(names) or size > len(data) - _FIELD.size:
            raise ValueError("an unknown field, or a part of one")
        value = data[_FIELD.size : _FIELD.size + size].decode("utf-8", "surrogateescape")
        fields.setdefault(names[place], value)
        data = data[_FIELD.size + size :]
    return fields


def read_answers(data: bytes) -> tuple[list[tuple[int, int, bytes]], int]:
    """As `read_requests`, of answers: `(number, flags, response)`."""
    answers = []
    used = 0
    while len(data) - used >= _ANSWER_HEAD.size:
        size, number, flags = _ANSWER_HEAD.unpack_from(data, used)
        if used + 4 + size > len(data):
            break
        if 4 + size < _ANSWER_HEAD.size:
            raise ValueError("smaller than its head")
        answers.append((number, flags, data[used + _ANSWER_HEAD.size : used + 4 + size]))
        used += 4 + size
    return answers, used


# -- signed queries -------------------------------------------------------------------------------------------

# Values may have escapes of ASCII characters; a `+` is a plus.
_FIELD_OF_QUERY = re.compile(r"([^=&%A-Z\[\]]+)=((?:[^&%]|%[0-7][0-9A-Fa-f])*)")
_OWN = {"auth_key", "auth_timestamp", "auth_version", "auth_signature", "body_md5"}


def usual_signature(
    method: str, path: str, query: str, body: bytes, secrets: dict[str, str], now_s: int, max_skew_s: int
) -> tuple[str, bool] | None:
    """`(key, whether there are other parameters)` of a query that is signed in the usual layout by one of `secrets`;
    else None (ext/redpoll/_http.pyx signed_params)."""
    if not (method + path + query).isascii() or len(method) + len(path) + len(query) + 8 > 4096:
        return None
    matches = [_FIELD_OF_QUERY.fullmatch(field) for field in query.split("&")]
    fields = {match[1]: match[2] for match in matches if match is not None}
    if None in matches or len(fields) < len(matches) or len(matches) > 32:
        return None
    if any("%" in fields[name] for name in _OWN & fields.keys()):
        return None
    key, stamp, signature = (fields.get(f"auth_{name}") for name in ("key", "timestamp", "signature"))
    if key not in secrets or stamp is None or signature is None or fields.get("auth_version") != "1.0":
        return None
    if re.fullmatch(r"[0-9]{1,15}", stamp) is None or abs(int(stamp) - now_s) > max_skew_s:
        return None
    signed = "&".join(f"{name}={unquote(fields[name])}" for name in sorted(fields) if name != "auth_signature")
    text = f"{method}\n{path}\n{signed}"
    if hmac.new(secrets[key].encode(), text.encode(), hashlib.sha256).hexdigest() != signature:
        return None
    # It may be left out where there is no body.
    if fields.get("body_md5", "") != (hashlib.md5(body).hexdigest() if "body_md5" in fields or body else ""):
        return None
    return key, not fields.keys() <= _OWN
