"""The texts of a first start: snippets to connect, and the first login."""

from urllib.parse import urlsplit

import pusher
import pytest
from pusher.http import Request

from redpoll.host.welcome import first_login, how_to_use, url_host

APP = {"id": "1234567", "key": "0123456789abcdef0123", "secret": "fedcba98765432100123", "name": "x"}


def variables(text: str) -> dict[str, str]:
    """NAME=VALUE lines, as a .env file is read."""
    lines = [line for line in text.splitlines() if "=" in line.partition(" ")[0]]
    return dict(line.split("=", 1) for line in lines)


def test_pusher_url_has_all_that_a_server_library_needs():
    url = urlsplit(variables(how_to_use(APP, "::1", 6001))["PUSHER_URL"])
    assert (url.username, url.password) == (APP["key"], APP["secret"])
    assert (url.hostname, url.port, url.path) == ("::1", 6001, f"/apps/{APP['id']}")


def test_python_snippet_creates_a_client_of_this_server():
    text = how_to_use(APP, "127.0.0.1", 6001)
    library = eval(text[text.index("pusher.Pusher(") :], {"pusher": pusher})._pusher_client
    request = Request(library, "POST", "/apps/1234567/events", {})
    assert request.url.startswith("http://127.0.0.1:6001/apps/1234567/events?auth_key=0123456789abcdef0123&")
    assert library.secret == APP["secret"]


@pytest.mark.parametrize("driver", ["PUSHER", "REVERB"])
def test_laravel_variables_are_complete_for_both_drivers(driver):
    found = variables(how_to_use(APP, "push.example", 80))
    assert (found[f"{driver}_APP_ID"], found[f"{driver}_APP_KEY"]) == (APP["id"], APP["key"])
    assert found[f"{driver}_APP_SECRET"] == APP["secret"]
    for prefix in (driver, f"VITE_{driver}"):
        assert (found[f"{prefix}_HOST"], found[f"{prefix}_PORT"]) == ("push.example", "80")
        assert found[f"{prefix}_SCHEME"] == "http"
    # What VITE_… says is built into pages for everybody to read.
    assert not any(APP["secret"] in value for name, value in found.items() if name.startswith("VITE_"))


def test_pusher_js_snippet_does_not_use_the_hosted_service():
    text = how_to_use(APP, "127.0.0.1", 6001)
    options = text[text.index("new Pusher(") : text.index("})")]
    for option in ('wsHost: "127.0.0.1"', "wsPort: 6001", "forceTLS: false", 'enabledTransports: ["ws"'):
        assert option in options


@pytest.mark.parametrize(("tls_port", "wss_port"), [(None, 6001), (0, 6001), (6002, 6002)])
def test_pusher_js_snippet_has_the_tls_port(tls_port, wss_port):
    assert f"wsPort: 6001, wssPort: {wss_port}," in how_to_use(APP, "127.0.0.1", 6001, tls_port)


def test_first_login_names_the_url_and_the_file():
    lines = first_login("http://127.0.0.1:9601", "pass-word", "/data/first-login").splitlines()
    assert lines[0].endswith(" http://127.0.0.1:9601")
    assert lines[2].split() == ["password", "pass-word"]
    assert lines[-1].endswith(" /data/first-login")


@pytest.mark.parametrize(
    ("host", "in_url"),
    [
        ("0.0.0.0", "127.0.0.1"),
        ("::", "[::1]"),
        ("::1", "[::1]"),
        ("10.1.2.3", "10.1.2.3"),
        ("push.example", "push.example"),
    ],
)
def test_url_host_formats_hosts_for_urls(host, in_url):
    assert url_host(host) == in_url
