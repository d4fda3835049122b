"""The page that checks the connection; tests/browser/test_use.py runs it in a browser."""

import pytest


async def test_page_may_connect_to_the_public_address_and_has_the_apps_key(plane, browser):
    reply = await browser.get("/dashboard/apps/3/check")
    page = reply.body.decode()
    assert f'data-key="{plane.records.apps["3"].keys[0].key}"' in page
    assert plane.records.apps["3"].keys[0].secret not in page
    assert "proxy_set_header Upgrade" in page
    policy = reply.headers["content-security-policy"]
    assert "connect-src 'self' ws://test:6001 http://test:6001;" in policy


@pytest.mark.parametrize(
    ("typed", "shown"),
    [
        ("https://ws.example.com", "wss://ws.example.com https://ws.example.com;"),
        ("wss://ws.example.com:8443", "wss://ws.example.com:8443 https://ws.example.com:8443;"),
        ("http://[::1]:6001", "ws://[::1]:6001 http://[::1]:6001;"),
    ],
)
async def test_another_address_can_be_checked(browser, typed, shown):
    reply = await browser.get(f"/dashboard/apps/3/check?at={typed}")
    assert f"connect-src 'self' {shown}" in reply.headers["content-security-policy"]


@pytest.mark.parametrize("typed", ["ws.example.com", "ftp://a", "https://a;script-src *", "https://", "http://a:port"])
async def test_what_is_no_address_is_refused_and_never_in_the_policy(browser, typed):
    reply = await browser.get("/dashboard/apps/3/check?at=" + typed.replace(" ", "%20").replace(";", "%3B"))
    assert b'id="at-fault"' in reply.body
    assert "connect-src 'self' ws://test:6001 http://test:6001;" in reply.headers["content-security-policy"]
