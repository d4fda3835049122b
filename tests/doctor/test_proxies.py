import pytest

from redpoll.doctor import proxies


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
    assert proxies.recognise(headers) == name


def test_an_unknown_proxy_gets_the_lines_of_all():
    assert len(proxies.remedy_for_upgrade("")) > len(proxies.remedy_for_upgrade("nginx"))
    assert any("activity_timeout_s" in line for line in proxies.remedy_for_idle("HAProxy"))
