"""Logging in and out, and the one-time password."""

import html
import re
import time

from redpoll.control.accounts.login_throttle import MAX_WAIT_S, LoginThrottle
from redpoll.control.dashboard.login import FIRST_LOGIN

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
    plane.plane.dashboard.login.throttle = LoginThrottle(lambda: time.monotonic() + passed_s, sleep)
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


async def test_logins_are_in_the_audit_log_without_passwords(browser, open_browser):
    stranger = await open_browser()
    await stranger.post("/dashboard/login", name="admin", password="a secret that is wrong")
    page = (await browser.get("/dashboard/audit")).body
    assert b"logged in" in page
    assert b"login failed" in page
    assert b"a secret" not in page
