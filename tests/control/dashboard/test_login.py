"""Logging in and out, and the one-time password."""

import html
import re
from urllib.parse import urlencode

import pytest

from redpoll.control.accounts.first_login import FIRST_LOGIN
from redpoll.control.accounts.login_throttle import MAX_WAIT_S, LoginThrottle
from redpoll.control.dashboard.forms import MAX_STRANGE_BYTES

PASSWORD = "correct horse battery"


async def test_control_port_redirects_to_the_login_and_back(open_browser):
    stranger = await open_browser()
    assert (await stranger.get("/")).headers["location"] == "/dashboard"
    assert (await stranger.get("/dashboard")).headers["location"] == "/dashboard/login"
    asked = await stranger.get("/dashboard/apps/3/keys")
    assert asked.headers["location"] == "/dashboard/login?next=%2Fdashboard%2Fapps%2F3%2Fkeys"
    reply = await stranger.post("/dashboard/login", name="admin", password=PASSWORD, next="/dashboard/apps/3/keys")
    assert (reply.status, reply.headers["location"]) == (303, "/dashboard/apps/3/keys")
    assert "HttpOnly" in reply.headers["set-cookie"]
    assert (await stranger.get("/dashboard/login")).status == 303


async def test_wrong_password_and_wrong_name_have_the_same_message(open_browser):
    stranger = await open_browser()
    wrong = [await stranger.post("/dashboard/login", name=name, password="x" * 12) for name in ("admin", "nobody")]
    assert [reply.status for reply in wrong] == [401, 401]
    assert all(b"Wrong name or password." in reply.body for reply in wrong)
    assert not stranger.cookie


async def test_right_password_logs_in_after_many_wrong_ones_from_the_same_address(plane, open_browser):
    """Ten wrong logins used to lock out everybody at an address for five minutes."""
    waits = []

    async def sleep(seconds):
        waits.append(seconds)

    passed_s = 0.0
    plane.plane.dashboard.login.throttle = LoginThrottle(lambda: passed_s, sleep)
    stranger = await open_browser()
    replies = [await stranger.post("/dashboard/login", name="admin", password="wrong") for _ in range(11)]
    assert {reply.status for reply in replies} == {401, 429}
    refused = replies[-1]
    assert refused.status == 429
    assert 0 < int(refused.headers["retry-after"]) < 30
    # The refused one would have waited for the others, which this test's sleep doesn't.
    passed_s = 10.0
    reply = await stranger.post("/dashboard/login", name="admin", password=PASSWORD)
    assert reply.status == 303
    assert 0 < max(waits) <= MAX_WAIT_S
    assert (await (await open_browser()).post("/dashboard/login", name="admin", password=PASSWORD)).status == 303


async def test_first_login_asks_for_a_new_password(plane, connect, open_browser, tmp_path):
    accounts = plane.plane.dashboard.accounts
    one_time = await accounts.reset("admin") if await accounts.users() else ""
    stranger = await open_browser()
    one_time = one_time or await accounts.reset("admin")
    (tmp_path / FIRST_LOGIN).write_text("of-an-earlier-admin")
    assert b"first-login" not in (await stranger.get("/dashboard/login")).body
    (tmp_path / FIRST_LOGIN).write_text(one_time)
    assert b"first-login" in (await stranger.get("/dashboard/login")).body
    reply = await stranger.post("/dashboard/login", name="admin", password=one_time)
    assert reply.headers["location"] == "/dashboard/account"
    assert not (tmp_path / FIRST_LOGIN).exists()
    # No other page works until the password is changed.
    assert (await stranger.get("/dashboard/apps")).headers["location"] == "/dashboard/account"
    await stranger.get("/dashboard/account")
    short = await stranger.post(
        "/dashboard/account", old_password=one_time, new_password="short", new_password_again="short"
    )
    assert short.status == 422
    assert b'id="fault-new_password"' in short.body
    other = await stranger.post(
        "/dashboard/account", old_password=one_time, new_password=PASSWORD, new_password_again="x"
    )
    assert b'id="fault-new_password_again"' in other.body
    done = await stranger.post(
        "/dashboard/account", old_password=one_time, new_password=PASSWORD, new_password_again=PASSWORD
    )
    assert done.headers["location"] == "/dashboard"
    assert (await stranger.get("/dashboard/apps")).status == 200


async def test_after_a_password_change_a_copy_of_the_cookie_is_worthless(browser):
    copied = browser.cookie
    await browser.get("/dashboard/account")
    new = {"new_password": PASSWORD[::-1], "new_password_again": PASSWORD[::-1]}
    done = await browser.post("/dashboard/account", old_password=PASSWORD, **new)
    assert done.headers["location"] == "/dashboard"
    assert b"Password changed." in (await browser.get("/dashboard")).body
    assert browser.cookie != copied
    browser.cookie = copied
    assert (await browser.get("/dashboard")).headers["location"] == "/dashboard/login"


async def test_a_login_ends_the_former_session_of_the_browser(browser):
    former = browser.cookie
    assert (await browser.post("/dashboard/login", name="admin", password=PASSWORD)).status == 303
    assert browser.cookie != former
    browser.cookie = former
    assert (await browser.get("/dashboard")).headers["location"] == "/dashboard/login"


async def test_logout_ends_the_session_on_the_server(plane, browser):
    cookie = browser.cookie
    reply = await browser.post("/dashboard/logout")
    assert "Max-Age=0" in reply.headers["set-cookie"]
    browser.cookie = cookie
    assert (await browser.get("/dashboard/apps")).status == 303


async def test_form_sent_after_the_session_ended_is_shown_after_the_login(plane, browser):
    typed = '<script>alert("1")</script> & more\nlines'
    before = browser.cookie
    await browser.post("/dashboard/logout")
    browser.cookie = before
    reply = await browser.post("/dashboard/apps/3/settings", allowed_origins=typed, max_batch="77", password="hidden")
    assert reply.status == 401
    assert b"<script>alert" not in reply.body
    fields = dict(re.findall(r'name="(resend\w*)" value="([^"]*)"', reply.body.decode()))
    assert "hidden" not in fields["resend"]
    resend = {name: html.unescape(value) for name, value in fields.items()}
    again = await browser.post("/dashboard/login", name="admin", password=PASSWORD, **resend)
    assert again.status == 200
    assert b"<script>alert" not in again.body
    page = again.body.decode()
    assert html.escape(typed, quote=False).replace('"', "&#34;") in page
    assert 'value="77"' in page
    assert 'action="/dashboard/apps/3/settings"' in page
    # When the person sends it again, it works.
    done = await browser.post("/dashboard/apps/3/settings", max_batch="77")
    assert done.status == 303
    assert plane.records.apps["3"].max_batch == 77


async def test_long_form_of_a_stranger_is_not_parsed(browser):
    before = browser.cookie
    await browser.post("/dashboard/logout")
    browser.cookie = before
    reply = await browser.post("/dashboard/apps/3/settings", allowed_origins="x" * MAX_STRANGE_BYTES)
    assert reply.status == 401
    assert b"What you typed was too long to be kept." in reply.body
    assert b"resend" not in reply.body
    longest = await browser.post("/dashboard/login", name="x" * (2 * MAX_STRANGE_BYTES))
    assert longest.status == 413
    # What the login page carries at most can be sent with it.
    resend = urlencode({"allowed_origins": "ü" * (MAX_STRANGE_BYTES // 6 - 10)})
    form = {"resend_path": "/dashboard/apps/3/settings", "resend": resend}
    assert (await browser.post("/dashboard/login", name="admin", password=PASSWORD, **form)).status == 200


@pytest.mark.parametrize("name", ["a%00b", "a\0b"])
async def test_nul_in_a_form_is_refused(plane, connect, name):
    wire = await connect(plane.port)
    body = f"name={name}&password=x".encode()
    head = b"POST /dashboard/login HTTP/1.1\r\nHost: test\r\nContent-Type: application/x-www-form-urlencoded\r\n"
    assert (await wire.ask(head + b"Content-Length: %d\r\n\r\n%b" % (len(body), body))).status == 400


async def test_logins_are_in_the_audit_log_without_passwords(browser, open_browser):
    stranger = await open_browser()
    await stranger.post("/dashboard/login", name="admin", password="a secret that is wrong")
    page = (await browser.get("/dashboard/audit")).body
    assert b"logged in" in page
    assert b"login failed" in page
    assert b"a secret" not in page
