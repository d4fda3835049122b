"""Publishes as official server libraries and reverse proxies send them, in the packets in which they send them. Not a
test.

Recorded with a socket: Python (pusher 3.3.4), Node (5.3.4), PHP's curl, Ruby's net/http, nginx, HAProxy, Caddy, Apache.
The others are made of what their libraries' sources set, and of what their HTTP clients add.
"""

TARGET = b"/apps/1/events?auth_key=key&auth_timestamp=1700000000&auth_version=1.0"
BODY = b'{"name":"e","channels":["c"],"data":"{}"}'


def _post(*lines, version=b"1.1", packets=1, target=TARGET, body=BODY):
    head = b"".join(line + b"\r\n" for line in (b"POST %b HTTP/%b" % (target, version), *lines)) + b"\r\n"
    return (head + body,) if packets == 1 else (head, body)


_TYPE = b"Content-Type: application/json"
_LENGTH = b"Content-Length: %d" % len(BODY)
_ANY = b"Accept: */*"
_FROM_PHP = (_ANY, _TYPE, b"X-Pusher-Library: pusher-http-php 7.2.7")
_FORWARDED = b"X-Forwarded-For: 198.51.100.7"

LIBRARY_REQUESTS = {
    "python with requests": _post(
        b"Host: 127.0.0.1:6001",
        b"User-Agent: python-requests/2.34.2",
        b"Accept-Encoding: gzip, deflate, br",
        _ANY,
        b"Connection: keep-alive",
        b"X-Pusher-Library: pusher-http-python 3.3.4",
        _TYPE,
        _LENGTH,
        packets=2,
    ),
    "python with aiohttp": _post(
        b"Host: 127.0.0.1:6001",
        b"X-Pusher-Library: pusher-http-python 3.3.4",
        _TYPE,
        _ANY,
        b"Accept-Encoding: gzip, deflate, br",
        b"User-Agent: Python/3.11 aiohttp/3.14.5",
        _LENGTH,
    ),
    "python with tornado": _post(
        b"Connection: close",
        b"Host: 127.0.0.1:6001",
        b"X-Pusher-Library: pusher-http-python 3.3.4",
        _TYPE,
        _LENGTH,
        b"Accept-Encoding: gzip",
        packets=2,
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
    ),
    "php with curl": _post(b"Host: 127.0.0.1:6001", *_FROM_PHP, _LENGTH),
    "php with guzzle": _post(
        b"Host: 127.0.0.1:6001",
        b"User-Agent: GuzzleHttp/7",
        _TYPE,
        b"X-Pusher-Library: pusher-http-php 7.2.7",
        _LENGTH,
    ),
    "ruby": _post(
        _TYPE,
        b"X-Pusher-Library: pusher-http-ruby 2.0.3",
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
    ),
    "java": _post(
        b"X-Pusher-Library: pusher-http-java 1.3.4",
        _LENGTH,
        _TYPE,
        b"Host: 127.0.0.1:6001",
        b"Connection: Keep-Alive",
        b"User-Agent: Apache-HttpClient/4.5.14 (Java/17.0.12)",
        b"Accept-Encoding: gzip,deflate",
        packets=2,
    ),
    ".net": _post(
        b"Host: 127.0.0.1:6001",
        b"Accept: application/json",
        b"Pusher-Library-Name: pusher-http-dotnet",
        b"Pusher-Library-Version: 5.0.0",
        b"Content-Type: application/json; charset=utf-8",
        _LENGTH,
    ),
    "rust": _post(b"content-type: application/json", b"host: 127.0.0.1:6001", b"content-length: %d" % len(BODY)),
    "nginx, default settings": _post(
        b"Host: 127.0.0.1:6001", b"Connection: close", _LENGTH, *_FROM_PHP, version=b"1.0"
    ),
    "nginx, keep-alive": _post(b"Host: app.example", _FORWARDED, b"X-Forwarded-Proto: https", _LENGTH, *_FROM_PHP),
    "haproxy": _post(
        b"host: app.example",
        b"accept: */*",
        b"content-type: application/json",
        b"x-pusher-library: pusher-http-php 7.2.7",
        b"content-length: %d" % len(BODY),
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
    ),
    "HTTP/1.0 with keep-alive": _post(b"Host: app.example", b"Connection: keep-alive", _TYPE, _LENGTH, version=b"1.0"),
    "the other path": _post(b"Host: h", _TYPE, _LENGTH, target=b"/api/v1" + TARGET),
    "curl that asks before it sends": _post(b"Host: h", _TYPE, _LENGTH, b"Expect: 100-continue"),
    "one chunk": _post(
        b"Host: h", _TYPE, b"Transfer-Encoding: chunked", body=b"%x\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY)
    ),
    "a pair of key and secret": _post(
        b"Host: h", _TYPE, b"X-Service-Key: key", b"X-Service-Secret: secret", _LENGTH, target=b"/apps/1/events"
    ),
    "a token": _post(b"Host: h", _TYPE, b"Authorization: Bearer token", _LENGTH, target=b"/apps/1/events"),
}
