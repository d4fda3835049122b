"""The pages of single sign-on without a provider that answers. With one: tests/browser/test_sign_on.py."""

import asyncio
import html
import re

import pytest
from structlog.testing import capture_logs

from helpers.ports import reserved_ports
from redpoll.control.accounts.identity import Identity
from redpoll.control.accounts.sign_on import Returned, SignOn, SignOnError
from redpoll.store import audit

_RETURNED = SignOn.returned


@pytest.fixture
async def stranger(make_plane, redis, log_in_to):
    """Somebody at a dashboard whose provider is away."""
    with reserved_ports(1) as (port,):
        settings = {"oidc_issuer": f"http://127.0.0.1:{port}", "oidc_client_id": "redpoll"}
        plane = await make_plane(redis.url, **settings)
        browser = await log_in_to(plane)
        browser.cookie = ""
        yield browser


async def test_login_page_offers_it_and_keeps_the_page_that_was_asked_for(stranger):
    page = await stranger.get("/dashboard/login?next=%2Fdashboard%2Fusers")
    assert b'href="/dashboard/sso?next=%2Fdashboard%2Fusers"' in page.body
    assert b'name="password"' in page.body


async def test_form_sent_after_the_session_ended_is_shown_after_single_sign_on(stranger):
    typed = {"allowed_origins": '"<b>"\nmore', "max_batch": "77"}
    page = (await stranger.post("/dashboard/apps/3/settings", **typed)).body.decode()
    assert 'href="/dashboard/sso?next=%2Fdashboard" target="_blank"' in page
    path, fields = re.search(
        r'<form method="post" action="(/dashboard/apps[^"]*)">(.*?)</form>', page, re.DOTALL
    ).groups()
    carried = {name: html.unescape(value) for name, value in re.findall(r'name="(\w+)" value="([^"]*)"', fields)}
    assert carried == typed
    # Before the login it is kept once more.
    assert (await stranger.post(path, **carried)).body.decode() == page
    accounts = stranger.plane.plane.dashboard.accounts
    stranger.cookie = f"redpoll={await accounts.sign_on(Identity('https://a 1', 'ann', 'admin', None, 'token'))}"
    again = await stranger.post(path, **carried)
    assert again.status == 403
    assert 'value="77"' in again.body.decode()
    assert html.escape(typed["allowed_origins"], quote=False).replace('"', "&#34;") in again.body.decode()
    assert (await stranger.post(path, max_batch="77")).status == 303


async def test_provider_that_is_away_is_a_page_and_a_log_line(stranger):
    with capture_logs() as logged:
        page = await stranger.get("/dashboard/sso")
    assert page.status == 403
    assert b"The provider can&#39;t be reached." in page.body
    assert b"logs in with a local user" in page.body
    # The address is for the log only.
    assert b"well-known" not in page.body
    (line,) = [line for line in logged if line["event"] == "single sign-on refused"]
    assert "/.well-known/openid-configuration" in line["reason"]


async def test_answers_without_a_login_are_refused(stranger):
    page = await stranger.get("/dashboard/sso/callback?code=c&state=s")
    assert page.status == 403
    assert b"The cookie of the login is missing or not ours." in page.body
    assert b"Max-Age=0" in page.headers["set-cookie"].encode()


@pytest.fixture
def returns(monkeypatch):
    """From now on each browser that comes back brings what belongs to a login that began here."""
    monkeypatch.setattr(SignOn, "returned", lambda *_: Returned({"code": "c"}, "nonce", "verifier", "/dashboard"))


@pytest.mark.parametrize("has_record", [True, False])
async def test_login_without_a_role_ends_the_users_other_sessions(stranger, returns, monkeypatch, has_record):
    async def refuse(*_):
        raise SignOnError("the user '1' has no role here: roles none", "Ask for a role.", "https://a 1")

    monkeypatch.setattr(SignOn, "finish", refuse)
    accounts = stranger.plane.plane.dashboard.accounts
    plain = ""
    if has_record:
        plain = await accounts.sign_on(Identity("https://a 1", "ann", "admin", None, "token"))
    assert (await stranger.get("/dashboard/sso/callback?code=c&state=s")).status == 403
    assert await accounts.session(plain) is None
    async with accounts.store.reading() as connection:
        newest = (await audit.find(connection))[0]
    assert (newest.action, newest.detail) == ("login failed", "single sign-on: no role")
    assert newest.who == ("sso:ann" if has_record else "https://a 1")


async def test_wrong_answers_of_an_address_slow_down_no_login_from_there(stranger, returns, monkeypatch):
    async def refuse(*_):
        raise SignOnError("the provider gave no ID token: 400, invalid_grant", "Check.")

    waits = []

    async def sleep(seconds):
        waits.append(seconds)

    monkeypatch.setattr(stranger.plane.plane.dashboard.login.throttle, "_sleep", sleep)
    monkeypatch.setattr(SignOn, "finish", refuse)
    for _ in range(60):
        assert (await stranger.get("/dashboard/sso/callback?code=x&state=s")).status == 403

    async def finish(*_):
        return Identity("https://a 1", "ann", "admin", None, "token")

    monkeypatch.setattr(SignOn, "finish", finish)
    assert (await stranger.get("/dashboard/sso/callback?code=c&state=s")).headers["location"] == "/dashboard"
    assert waits == []


async def test_logins_of_an_address_that_wait_for_the_provider_are_bounded(stranger, returns, connect, monkeypatch):
    answers, asked = asyncio.Event(), asyncio.Semaphore(0)

    async def finish(*_):
        asked.release()
        await answers.wait()
        raise SignOnError("the provider can't be reached: no answer within 10 s", "Try again.")

    monkeypatch.setattr(SignOn, "finish", finish)
    others = [type(stranger)(stranger.plane, await connect(stranger.plane.port)) for _ in range(5)]
    waiting = [asyncio.create_task(other.get("/dashboard/sso/callback?code=c&state=s")) for other in others]
    for _ in others:
        await asyncio.wait_for(asked.acquire(), 60)
    refused = await asyncio.wait_for(stranger.get("/dashboard/sso/callback?code=c&state=s"), 60)
    assert refused.status == 429
    assert b"Too many logins are under way." in refused.body
    # Pages of other sites can send a browser here, but without the cookie and its state. This takes no place.
    with monkeypatch.context() as without:
        without.setattr(SignOn, "returned", _RETURNED)
        assert (await stranger.get("/dashboard/sso/callback?code=c&state=s")).status == 403
    answers.set()
    assert [reply.status for reply in await asyncio.gather(*waiting)] == [403] * 5
    assert (await stranger.get("/dashboard/sso/callback?code=c&state=s")).status == 403


async def test_no_pages_without_an_issuer(open_browser):
    stranger = await open_browser()
    assert b"single sign-on" not in (await stranger.get("/dashboard/login")).body
    assert (await stranger.get("/dashboard/sso")).status == 404


async def test_user_of_the_provider_has_no_password_here(plane, open_browser):
    accounts = plane.plane.dashboard.accounts
    plain = await accounts.sign_on(Identity("https://a 1", "ann", "viewer", frozenset({"3"}), "token"))
    stranger = await open_browser()
    assert (await stranger.post("/dashboard/login", name="sso:ann", password="")).status == 401
    stranger.cookie = f"redpoll={plain}"
    assert (await stranger.get("/dashboard")).headers["location"] == "/dashboard/apps"
    page = await stranger.get("/dashboard/account")
    assert b"your password and your role are those of the provider" in page.body
    # There is no provider in this plane's settings, so the session ends here only.
    assert (await stranger.post("/dashboard/logout")).headers["location"] == "/dashboard/login"
