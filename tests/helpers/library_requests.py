"""Publishes as official server libraries and reverse proxies send them, in the packets in which they send them. Not a
test.

Recorded with a socket: Python (pusher 3.3.4), Node (5.3.4), Ruby's httpclient, PHP's curl and Guzzle, Go's net/http,
Java's HttpClient, nginx, HAProxy, Caddy, Apache, with the headers and bodies that the libraries' sources set. The
others are made of what their libraries' sources set, and of what their HTTP clients add.
"""

import hashlib
import hmac
import time
from typing import NamedTuple

# Where the path and the query of a request are.
TARGET = b"/apps/1/events?auth_key=key&auth_timestamp=1700000000&auth_version=1.0"
_PLAIN_TARGET = TARGET.partition(b"?")[0]
# Bodies of the same event, as the libraries write them: the order of the members, spaces, a socket that is null.
BODY = b'{"name":"e","channels":["c"],"data":"{}"}'
_SPACED = b'{"name": "e", "channels": ["c"], "data": "{}"}'
_OF_PHP = b'{"name":"e","data":"{}","channels":["c"]}'
_OF_JAVA = b'{"channels":["c"],"name":"e","data":"{}"}'
_OF_RUST = b'{"name":"e","channels":["c"],"data":"{}","socket_id":null}'
# Laravel names an event by its class, and excludes the socket whose request caused it.
_OF_LARAVEL = rb'{"name":"App\\Events\\Shipped","data":"{\"order\":{\"id\":1}}","channels":["c"],"socket_id":"1.2"}'
# json.dumps of text that isn't ASCII.
_ESCAPED = rb'{"name": "e", "channels": ["c"], "data": "{\"text\": \"Gr\u00fc\u00dfe \ud83d\ude00\"}"}'

# In which order the parameters of the query are.
_IN_ORDER = ("auth_key", "auth_timestamp", "auth_version", "body_md5", "auth_signature")
_SORTED = ("auth_key", "auth_signature", "auth_timestamp", "auth_version", "body_md5")


class LibraryRequest(NamedTuple):
    """`packets` have TARGET where the signed one goes (`signed`), or the credentials `key`, `secret`, `token` in header
    fields. `body` is the content. `closes`: the connection ends after the answer."""

    packets: tuple[bytes, ...]
    body: bytes
    order: tuple[str, ...]
    # Of the path, not signed.
    prefix: bytes

    @property
    def closes(self) -> bool:
        head = self.packets[0].lower()
        return b"connection: close" in head or (b" http/1.0\r\n" in head and b"connection: keep-alive" not in head)

    def signed(self, app_id: str, key: str, secret: str, token: str = "") -> tuple[bytes, ...]:
        """The packets with the credentials of an app, signed now."""
        head, *rest = self.packets
        path = f"/apps/{app_id}/events".encode()
        if TARGET not in head:
            head = head.replace(b" %b " % _PLAIN_TARGET, b" %b " % path, 1).replace(b"Key: key", f"Key: {key}".encode())
            head = head.replace(b"Secret: secret", f"Secret: {secret}".encode())
            return head.replace(b"Bearer token", f"Bearer {token}".encode()), *rest
        before = head[head.index(b"/") : head.index(TARGET)].removeprefix(self.prefix)
        values = dict(
            zip(_IN_ORDER, (key, str(int(time.time())), "1.0", hashlib.md5(self.body).hexdigest()), strict=False)
        )
        query = "&".join(f"{name}={value}" for name, value in values.items())
        text = b"POST\n%b\n%b" % (before + path, query.encode())
        values["auth_signature"] = hmac.new(secret.encode(), text, hashlib.sha256).hexdigest()
        query = "&".join(f"{name}={values[name]}" for name in self.order)
        return head.replace(TARGET, path + b"?" + query.encode()), *rest


def _post(*lines, version=b"1.1", packets=1, target=TARGET, body=BODY, sent=None, order=_IN_ORDER, prefix=b""):
    """`sent`: the body with its chunk. `_LENGTH` among the lines becomes that of the body."""
    head = b"POST %b HTTP/%b\r\n" % (target, version)
    for line in lines:
        head += (line + b"%d" % len(body) if line.lower() == b"content-length: " else line) + b"\r\n"
    head += b"\r\n"
    sent = body if sent is None else sent
    return LibraryRequest((head + sent,) if packets == 1 else (head, sent), body, order, prefix)


_TYPE = b"Content-Type: application/json"
_LENGTH = b"Content-Length: "
_ANY = b"Accept: */*"
_FROM_PHP = (_ANY, _TYPE, b"X-Pusher-Library: pusher-http-php 7.2.7")
_FORWARDED = b"X-Forwarded-For: 198.51.100.7"
_FROM_PYTHON = (
    b"Host: 127.0.0.1:6001",
    b"User-Agent: python-requests/2.34.2",
    b"Accept-Encoding: gzip, deflate, br",
    _ANY,
    b"Connection: keep-alive",
    b"X-Pusher-Library: pusher-http-python 3.3.4",
    _TYPE,
    _LENGTH,
)
_FROM_GUZZLE = (
    b"Host: 127.0.0.1:6001",
    b"User-Agent: GuzzleHttp/7",
    _TYPE,
    b"X-Pusher-Library: pusher-http-php 7.2.7",
    _LENGTH,
)
_FROM_DOTNET = (
    b"Host: 127.0.0.1:6001",
    b"Accept: application/json",
    b"Pusher-Library-Name: pusher-http-dotnet",
    b"Pusher-Library-Version: 5.0.0",
    b"Content-Type: application/json; charset=utf-8",
)
_BY_DOTNET = ("auth_signature", "auth_key", "auth_timestamp", "auth_version", "body_md5")

# What is compared with.
USUAL = _post(b"Host: 127.0.0.1", _TYPE, _LENGTH)
USUAL_EACH = _post(b"Host: 127.0.0.1", b"Connection: close", _TYPE, _LENGTH)

LIBRARY_REQUESTS = {
    "python with requests": _post(*_FROM_PYTHON, packets=2, body=_SPACED, order=_SORTED),
    "python with requests, text that isn't ASCII": _post(*_FROM_PYTHON, packets=2, body=_ESCAPED, order=_SORTED),
    "python with aiohttp": _post(
        b"Host: 127.0.0.1:6001",
        b"X-Pusher-Library: pusher-http-python 3.3.4",
        _TYPE,
        _ANY,
        b"Accept-Encoding: gzip, deflate, br",
        b"User-Agent: Python/3.11 aiohttp/3.14.5",
        _LENGTH,
        body=_SPACED,
        order=("auth_key", "body_md5", "auth_version", "auth_timestamp", "auth_signature"),
    ),
    "python with tornado": _post(
        b"Connection: close",
        b"Host: 127.0.0.1:6001",
        _TYPE,
        _LENGTH,
        b"Accept-Encoding: gzip",
        packets=2,
        body=_SPACED,
        order=_SORTED,
    ),
    "node": _post(
        b"x-pusher-library: pusher-http-node 5.3.4",
        b"content-type: application/json",
        _ANY,
        _LENGTH,
        b"User-Agent: node-fetch/1.0 (+https://github.com/bitinn/node-fetch)",
        b"Accept-Encoding: gzip,deflate",
        b"Host: 127.0.0.1:6001",
        b"Connection: keep-alive",
        body=_OF_PHP,
    ),
    "php with curl": _post(b"Host: 127.0.0.1:6001", *_FROM_PHP, _LENGTH, body=_OF_PHP),
    "php with guzzle": _post(*_FROM_GUZZLE, body=_OF_PHP),
    "php with guzzle, without curl": _post(
        _LENGTH,
        b"User-Agent: GuzzleHttp/7",
        b"Host: 127.0.0.1:6001",
        _TYPE,
        b"X-Pusher-Library: pusher-http-php 7.2.7",
        b"Connection: close",
        body=_OF_PHP,
    ),
    "laravel": _post(*_FROM_GUZZLE, body=_OF_LARAVEL),
    "ruby": _post(
        b"X-Pusher-Library: pusher-http-ruby 2.1.0",
        _TYPE,
        b"User-Agent: HTTPClient/1.0 (2.8.3, ruby 3.1.2 (2022-04-12))",
        _ANY,
        b"Date: Tue, 24 Nov 2026 14:23:20 GMT",
        _LENGTH,
        b"Host: 127.0.0.1:6001",
        order=("body_md5", "auth_version", "auth_key", "auth_timestamp", "auth_signature"),
    ),
    "ruby's own net/http": _post(
        _TYPE,
        b"Accept-Encoding: gzip;q=1.0,deflate;q=0.6,identity;q=0.3",
        _ANY,
        b"User-Agent: Ruby",
        b"Connection: close",
        b"Host: 127.0.0.1:6001",
        _LENGTH,
        packets=2,
    ),
    "go": _post(
        b"Host: 127.0.0.1:6001",
        b"User-Agent: Go-http-client/1.1",
        _LENGTH,
        _TYPE,
        b"X-Pusher-Library: pusher-http-go 5.1.1",
        b"Accept-Encoding: gzip",
        order=_SORTED,
    ),
    "java": _post(
        _LENGTH,
        _TYPE,
        b"Host: 127.0.0.1:6001",
        b"Connection: Keep-Alive",
        b"User-Agent: Apache-HttpClient/4.5.13 (Java/17.0.15)",
        b"Accept-Encoding: gzip,deflate",
        body=_OF_JAVA,
        order=("body_md5", "auth_signature", "auth_timestamp", "auth_key", "auth_version"),
    ),
    ".net": _post(*_FROM_DOTNET, _LENGTH, body=_OF_PHP, order=_BY_DOTNET),
    ".net framework, which asks before it sends": _post(
        *_FROM_DOTNET, _LENGTH, b"Expect: 100-continue", packets=2, body=_OF_PHP, order=_BY_DOTNET
    ),
    "rust": _post(b"content-type: application/json", b"host: 127.0.0.1:6001", b"content-length: ", body=_OF_RUST),
    "nginx, default settings": _post(
        b"Host: 127.0.0.1:6001", b"Connection: close", _LENGTH, *_FROM_PHP, version=b"1.0"
    ),
    "nginx, keep-alive": _post(b"Host: app.example", _FORWARDED, b"X-Forwarded-Proto: https", _LENGTH, *_FROM_PHP),
    "haproxy": _post(
        b"host: app.example",
        b"accept: */*",
        b"content-type: application/json",
        b"x-pusher-library: pusher-http-php 7.2.7",
        b"content-length: ",
        b"x-forwarded-for: 198.51.100.7",
    ),
    "caddy": _post(
        b"Host: app.example",
        _LENGTH,
        _ANY,
        _TYPE,
        _FORWARDED,
        b"X-Forwarded-Host: app.example",
        b"X-Forwarded-Proto: https",
        b"X-Pusher-Library: pusher-http-php 7.2.7",
        b"Accept-Encoding: gzip",
        packets=2,
    ),
    "apache": _post(
        b"Host: 127.0.0.1:6001",
        *_FROM_PHP,
        _FORWARDED,
        b"X-Forwarded-Host: app.example",
        b"X-Forwarded-Server: app.example",
        _LENGTH,
        b"Connection: Keep-Alive",
    ),
    "traefik": _post(
        b"Host: app.example",
        b"User-Agent: curl/8.14.1",
        _LENGTH,
        _ANY,
        _TYPE,
        _FORWARDED,
        b"X-Forwarded-Host: app.example",
        b"X-Forwarded-Port: 443",
        b"X-Forwarded-Proto: https",
        b"X-Forwarded-Server: edge",
        b"X-Real-Ip: 198.51.100.7",
        b"Accept-Encoding: gzip",
        packets=2,
    ),
    "HTTP/1.0 with keep-alive": _post(b"Host: app.example", b"Connection: keep-alive", _TYPE, _LENGTH, version=b"1.0"),
    "the other path": _post(b"Host: h", _TYPE, _LENGTH, target=b"/api/v1" + TARGET),
    "the other path, signed without its prefix": _post(
        *_FROM_GUZZLE, target=b"/api/v1" + TARGET, body=_OF_PHP, prefix=b"/api/v1"
    ),
    "curl that would ask before it sends": _post(b"Host: h", _TYPE, _LENGTH, b"Expect: 100-continue"),
    "one chunk": _post(
        b"Host: h", _TYPE, b"Transfer-Encoding: chunked", sent=b"%x\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY)
    ),
    "a pair of key and secret": _post(
        b"Host: h", _TYPE, b"X-Service-Key: key", b"X-Service-Secret: secret", _LENGTH, target=_PLAIN_TARGET
    ),
    "a token": _post(b"Host: h", _TYPE, b"Authorization: Bearer token", _LENGTH, target=_PLAIN_TARGET),
}
