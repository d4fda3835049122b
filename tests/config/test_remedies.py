from pathlib import Path

import pytest

from redpoll.config import remedies
from redpoll.protocol.errors import Code

FILES = Path(__file__).parents[2] / "deploy" / "proxies"
# What the tests of tests/deploy/test_proxies.py run.
TESTED = {"nginx": "nginx.conf", "HAProxy": "haproxy.cfg", "Caddy": "Caddyfile", "Apache": "apache.conf"}


@pytest.mark.parametrize(
    ("headers", "name"),
    [
        ({"Server": "nginx/1.22"}, "nginx"),
        ({"Server": "cloudflare"}, "Cloudflare"),
        ({"Via": "1.1 Caddy"}, "Caddy"),
        ({}, ""),
    ],
)
def test_a_proxy_is_recognised_by_its_headers(headers, name):
    assert remedies.recognise(headers) == name


@pytest.mark.parametrize("remedy", [remedies.remedy_for_upgrade, remedies.remedy_for_idle])
def test_an_unknown_proxy_gets_the_lines_of_all(remedy):
    lines = remedy("")
    assert [f"in {name}:" for name in ("nginx", "HAProxy", "Caddy", "Apache", "Traefik", "Cloudflare")] == [
        line for line in lines if line.startswith("in ")
    ]
    assert len(lines) > len(remedy("nginx"))


def test_the_setting_that_avoids_idle_connections_is_named():
    assert any("activity_timeout_s" in line for line in remedies.remedy_for_idle("HAProxy"))


@pytest.mark.parametrize("proxy", TESTED)
def test_lines_for_a_proxy_are_those_that_the_tests_run(proxy):
    tested = [line.strip() for line in (FILES / TESTED[proxy]).read_text().splitlines()]
    lines = [*remedies.remedy_for_upgrade(proxy), *remedies.remedy_for_idle(proxy)[:-1]]
    for line in (line.strip() for line in lines):
        assert line in tested or line.startswith(("#", f"in {proxy}")), line


def test_refusals_are_close_codes():
    assert set(remedies.REFUSALS) <= {int(code) for code in Code}
