"""How to connect, as text to paste."""

import ast
import json
import re
import shlex

import pytest

from redpoll.control.dashboard.setup import Address, PublicAddress, snippets

AT = Address("http", "127.0.0.1", 6001)


def text_of(kind, at=AT):
    (found,) = [snippet for snippet in snippets("4711", "key1", "secret1", at) if snippet.id == kind]
    return "\n".join(text for _, text in found.parts)


def test_all_common_libraries_have_a_snippet():
    assert [snippet.title for snippet in snippets("1", "k", "s", AT)] == [
        "Laravel",
        "pusher-js",
        "Node",
        "Python",
        "curl",
    ]


def test_python_snippet_parses_and_curl_sends_json():
    call = ast.parse(text_of("python")).body[1].value
    assert {keyword.arg: keyword.value.value for keyword in call.keywords} == {
        "app_id": "4711",
        "key": "key1",
        "secret": "secret1",
        "host": "127.0.0.1",
        "port": 6001,
        "ssl": False,
    }
    words = shlex.split(text_of("curl"))
    event = json.loads(words[words.index("-d") + 1])
    assert json.loads(event["data"]) == {"text": "Hello from curl"}
    assert words[1] == "http://127.0.0.1:6001/api/v1/apps/4711/events"


def test_https_public_url_enables_tls():
    at = Address("https", "ws.example.com", 443)
    assert (at.url, at.sockets) == ("https://ws.example.com", "wss://ws.example.com")
    assert "forceTLS: true" in text_of("browser", at)
    assert "PUSHER_SCHEME=https" in text_of("laravel", at)
    assert "ssl=True" in text_of("python", at)


class Request:
    def __init__(self, host):
        self.headers = {"Host": host} if host is not None else {}


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("shop.example:9601", "http://shop.example:6001"),
        ("[::1]:9601", "http://[::1]:6001"),
        (None, "http://127.0.0.1:6001"),
        ("evil; script-src *", "http://127.0.0.1:6001"),
        ("[bad", "http://127.0.0.1:6001"),
    ],
)
def test_without_a_public_url_the_host_is_the_dashboards(host, url):
    assert PublicAddress("", 6001).of(Request(host)).url == url


def test_public_url_overrides_the_host():
    assert PublicAddress("https://ws.example.com:8443", 6001).of(Request("x")).url == "https://ws.example.com:8443"


async def test_viewers_get_snippets_without_the_secret(viewer):
    page = (await viewer.get("/dashboard/apps/3")).body.decode()
    assert "YOUR_SECRET" in page
    assert re.search(r"278d425bdf160c739803", page)
