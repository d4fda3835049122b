"""Access control: logins, roles, and forms of other sites."""

import re

import pytest
from structlog.testing import capture_logs

from redpoll.control.commands.app_write import delete_app
from redpoll.control.dashboard.access import own_path
from redpoll.store.audit import Actor


async def pages_of(plane):
    return [route for route in plane.plane.routes.all if route.name.startswith("dashboard_")]


def filled(pattern):
    return re.sub(r"\{app_id\}", "3", re.sub(r"\{(?!app_id)\w+\}", "x", pattern))


async def test_pages_need_a_login(plane, open_browser):
    stranger = await open_browser()
    for route in await pages_of(plane):
        if route.name in ("dashboard_static", "dashboard_login", "dashboard_log_in"):
            continue
        ask = stranger.get if route.method == "GET" else stranger.post
        reply = await ask(filled(route.pattern))
        if route.method == "GET":
            assert (reply.status, reply.headers["location"][:16]) == (303, "/dashboard/login"), route.pattern
        else:
            assert reply.status == 401, route.pattern
            assert b'name="password"' in reply.body


async def test_viewers_can_not_change_anything(plane, viewer):
    before = dict(plane.records.apps)
    # Except a viewer's own password, and pages that only show.
    allowed = {"log_out", "change_password", "console_watch", "console_auth"}
    for route in await pages_of(plane):
        name = route.name.removeprefix("dashboard_")
        if route.method == "POST" and name not in allowed and not name.startswith("export_") and name != "log_in":
            reply = await viewer.post(filled(route.pattern), name="x", enabled="0", key="278d425bdf160c739803")
            assert reply.status == 403, route.pattern
    assert dict(plane.records.apps) == before


async def test_an_app_that_is_deleted_while_a_form_waits_is_a_conflict(plane, browser, monkeypatch):
    """It was an internal error, with a traceback."""
    watch_console = plane.records.watch_console

    async def deleted_first(app_id, until):
        await delete_app(plane.records, plane.plane.webhooks, app_id, Actor("another"))
        return await watch_console(app_id, until)

    monkeypatch.setattr(plane.records, "watch_console", deleted_first)
    reply = await browser.post("/dashboard/apps/3/console/watch")
    assert (reply.status, "here is no app with the id 3" in reply.body.decode()) == (409, True)


async def test_secrets_are_shown_to_admins_only(browser, viewer):
    for path in ("/dashboard/apps/3", "/dashboard/apps/3/keys"):
        assert b"7ad3773142a6692b25b8" in (await browser.get(path)).body
        assert b"7ad3773142a6692b25b8" not in (await viewer.get(path)).body


@pytest.mark.parametrize("token", ["", "x", "0" * 64])
async def test_form_without_the_csrf_token_changes_nothing(plane, browser, token):
    reply = await browser.post("/dashboard/new-app", csrf=token, name="stolen")
    assert reply.status == 403
    assert all(app.name != "stolen" for app in plane.records.apps.values())


async def test_bytes_that_are_not_utf_8_are_refused_without_a_traceback(plane, browser, connect):
    wire = await connect(plane.port)
    with capture_logs() as lines:
        for cookie, token in ((b"redpoll=\xff", b"x"), (browser.cookie.encode(), b"\xff"), (b"\xff=1; ;=", b"\xff")):
            reply = await wire.ask(
                b"POST /dashboard/new-app HTTP/1.1\r\nHost: test\r\nContent-Length: 0\r\n"
                b"Cookie: " + cookie + b"\r\nX-CSRF-Token: " + token + b"\r\n\r\n"
            )
            assert reply.status in (400, 401), (cookie, token)
    assert not [line for line in lines if line["log_level"] == "error"]


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "https://evil.example"},
        {"Origin": "null"},
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site"},
    ],
)
async def test_form_from_another_site_changes_nothing_even_with_the_token(plane, browser, headers):
    reply = await browser.post("/dashboard/new-app", headers=headers, name="stolen")
    assert reply.status == 403
    assert all(app.name != "stolen" for app in plane.records.apps.values())


async def test_own_form_with_browser_headers_is_accepted(browser):
    headers = {"Origin": "http://test", "Sec-Fetch-Site": "same-origin"}
    assert (await browser.post("/dashboard/new-app", headers=headers, name="mine")).status == 303


async def test_a_nul_character_is_refused_before_a_database_could_see_it(browser):
    for target in ("/dashboard/apps/3/deliveries/%00", "/dashboard/apps?notice=%00"):
        reply = await browser.get(target)
        assert (reply.status, b"NUL character" in reply.body) == (400, True), target


async def test_a_query_of_too_many_fields_is_refused(browser):
    reply = await browser.get("/dashboard/apps?" + "&".join(f"a{n}=1" for n in range(101)))
    assert (reply.status, b"more than 100 parameters" in reply.body) == (400, True)


async def test_htmx_requests_redirect_the_whole_page_to_the_login(open_browser):
    stranger = await open_browser()
    reply = await stranger.get("/dashboard/figures", **{"HX-Request": "true"})
    assert (reply.status, reply.headers["hx-redirect"]) == (204, "/dashboard/login")


async def test_https_cookie_has_the_host_prefix(make_plane, redis, connect):
    plane = await make_plane(redis.url, trusted_proxies=("127.0.0.1",))
    accounts = plane.plane.dashboard.accounts
    await accounts.first_admin("correct horse battery")
    body = b"name=admin&password=correct+horse+battery"
    head = {"Content-Type": "application/x-www-form-urlencoded", "X-Forwarded-Proto": "https"}
    reply = await plane.ask("POST", "/dashboard/login", body, head)
    cookie = reply.headers["set-cookie"]
    assert cookie.startswith("__Host-redpoll=")
    assert {"Secure", "HttpOnly", "Path=/", "SameSite=Lax"} <= set(cookie.split("; "))
    plain = await plane.ask("POST", "/dashboard/login", body, {"Content-Type": head["Content-Type"]})
    assert plain.headers["set-cookie"].startswith("redpoll=")
    assert "Secure" not in plain.headers["set-cookie"]


async def test_public_port_has_no_dashboard(plane):
    for route in await pages_of(plane):
        assert route.place.value == "control"


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("/dashboard/apps?x=1", "/dashboard/apps?x=1"),
        ("//evil.example/dashboard", "/dashboard"),
        ("//[", "/dashboard"),
        ("https://evil.example/dashboard", "/dashboard"),
        ("/dashboardevil", "/dashboard"),
        ("/dashboard\\@evil", "/dashboard"),
        ("/dashboard/\r\nSet-Cookie: a=b", "/dashboard"),
        ("javascript:alert(1)", "/dashboard"),
        ("/dashboard/../../x", "/dashboard"),
        ("/dashboard/%2e%2E/x", "/dashboard"),
        ("/dashboard/..%2f..%2fx", "/dashboard"),
        ("/dashboard/a..b?x=../y", "/dashboard/a..b?x=../y"),
    ],
)
def test_login_redirects_stay_on_this_site(path, expected):
    assert own_path(path) == expected


async def test_errors_are_pages_for_people_and_json_for_programs(browser):
    page = await browser.get("/dashboard/apps/999")
    assert (page.status, page.headers["content-type"]) == (404, "text/html; charset=utf-8")
    assert b"There is no app with this id" in page.body
    assert (await browser.get("/dashboard/none")).headers["content-type"] == "text/html; charset=utf-8"
    assert (await browser.get("/api/v1/none")).headers["content-type"] == "application/json"
    # A page's own scripts are programs; htmx puts the answer into the page.
    script = {"X-CSRF-Token": browser.csrf}
    assert (await browser.get("/dashboard/none", **script)).headers["content-type"] == "application/json"
    page = await browser.get("/dashboard/none", **script, **{"HX-Request": "true"})
    assert page.headers["content-type"] == "text/html; charset=utf-8"


async def test_form_of_an_earlier_session_is_offered_again(plane, browser):
    earlier = browser.csrf
    await browser.log_in()
    reply = await browser.post("/dashboard/new-app", csrf=earlier, name="Shop <b>")
    assert reply.status == 403
    assert all(app.name != "Shop <b>" for app in plane.records.apps.values())
    page = reply.body.decode()
    assert 'action="/dashboard/new-app"' in page
    assert 'value="Shop &lt;b&gt;"' in page
    assert (await browser.post("/dashboard/new-app", name="Shop <b>")).status == 303


async def test_form_of_an_earlier_session_omits_passwords(browser):
    earlier = browser.csrf
    await browser.log_in()
    reply = await browser.post("/dashboard/account", csrf=earlier, old_password="secret one", new_password="secret two")
    assert reply.status == 403
    assert b"secret" not in reply.body


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        (
            "http://test/dashboard/apps/3/channels?prefix=a",
            "/dashboard/login?next=%2Fdashboard%2Fapps%2F3%2Fchannels%3Fprefix%3Da",
        ),
        ("http://[", "/dashboard/login"),
    ],
)
async def test_login_after_an_htmx_request_returns_to_its_page(open_browser, url, expected):
    stranger = await open_browser()
    reply = await stranger.get("/dashboard/figures", **{"HX-Request": "true", "HX-Current-URL": url})
    assert reply.headers["hx-redirect"] == expected
