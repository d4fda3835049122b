"""The pages of apps: creating, renaming, switching off, settings, deleting."""

import re
from html import unescape

import pytest

from redpoll.protocol.apps import SETTINGS, App

SCRIPT = "<script>alert('x')</script>"


async def test_created_app_works_at_once_and_is_in_the_audit_log(plane, browser):
    reply = await browser.post("/dashboard/new-app", name=SCRIPT)
    assert reply.status == 303
    app = next(app for app in plane.records.apps.values() if app.name == SCRIPT)
    assert reply.headers["location"] == f"/dashboard/apps/{app.id}"
    for path in (
        "/dashboard/apps",
        f"/dashboard/apps/{app.id}",
        f"/dashboard/apps/{app.id}/settings",
        "/dashboard/audit",
    ):
        page = (await browser.get(path)).body
        assert b"<script>alert" not in page, path
        assert b"&lt;script&gt;alert" in page, path


async def test_many_apps_have_pages_and_a_search(plane, browser):
    apps = [App(id=f"many-{number:03}", name=f"Many {number:03}", keys=()) for number in range(600)]
    for app in apps:
        plane.records.apps[app.id] = app
    page = (await browser.get("/dashboard/apps?find=MANY&page=5")).body.decode()
    assert "Many 599" in page
    assert "Many 499" not in page
    assert "600 apps" in page
    assert "many-123" in (await browser.get("/dashboard/apps?find=y-123")).body.decode()
    assert "No matching apps" in (await browser.get("/dashboard/apps?find=nothing")).body.decode()
    # Lists to choose from would have all of them.
    for path in ("/dashboard", "/dashboard/audit"):
        page = (await browser.get(f"{path}?app=many-007")).body.decode()
        assert "Many 008" not in page
        assert 'value="many-007"' in page


async def test_invalid_name_is_reported_at_its_field(browser):
    reply = await browser.post("/dashboard/new-app", name="x" * 201)
    assert reply.status == 422
    assert b'id="fault-name"' in reply.body
    assert b'value="' + b"x" * 201 in reply.body


async def test_notice_is_shown_once(browser):
    reply = await browser.post("/dashboard/new-app", name="shop")
    path = reply.headers["location"]
    assert b"shop was created" in (await browser.get(path)).body
    assert b"shop was created" not in (await browser.get(path)).body


def in_force(app):
    """What the form sends if nothing was changed."""
    fields = {}
    for name, setting in SETTINGS.items():
        value = getattr(app, name)
        if name == "enabled" or (setting.type == "switch" and not value):
            continue
        fields[name] = ", ".join(value) if setting.type == "hosts" else "1" if setting.type == "switch" else str(value)
    return fields


async def test_every_setting_is_in_the_form_and_can_be_changed(plane, browser):
    page = (await browser.get("/dashboard/apps/3/settings")).body.decode()
    for name in SETTINGS:
        assert f'name="{name}"' in page, name
    fields = in_force(plane.records.apps["3"]) | {
        "allowed_origins": "shop.example.com\n*.example.org",
        "watchlist": "1",
        "max_batch": "20",
        "user_authentication_timeout_s": "2.5",
        "plan": "starter",
    }
    del fields["client_events"]
    assert (await browser.post("/dashboard/apps/3/settings", **fields)).status == 303
    app = plane.records.apps["3"]
    assert app.allowed_origins == ("shop.example.com", "*.example.org")
    assert (app.watchlist, app.client_events, app.max_batch, app.plan) == (True, False, 20, "starter")
    assert app.user_authentication_timeout_s == 2.5
    noted = (await browser.get("/dashboard/audit")).body.decode()
    assert "max_batch 10 → 20" in noted


async def test_what_another_operator_has_saved_meanwhile_stays(plane, browser):
    page = (await browser.get("/dashboard/apps/3/settings")).body.decode()
    shown = {name: unescape(value) for name, value in re.findall(r'name="(was_\w+)" value="([^"]*)"', page)}
    assert {f"was_{name}" for name in SETTINGS if name != "enabled"} == set(shown)
    fields = in_force(plane.records.apps["3"]) | shown
    other = {"max_batch": 20, "watchlist": True, "allowed_origins": ("a.example", "b.example")}
    await plane.records.set_app("3", other)
    assert (await browser.post("/dashboard/apps/3/settings", **fields | {"max_channels": "55"})).status == 303
    app = plane.records.apps["3"]
    assert (app.max_channels, app.max_batch, app.watchlist) == (55, 20, True)
    assert app.allowed_origins == other["allowed_origins"]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_batch", "many"),
        ("max_batch", "0"),
        ("plan", "gold"),
        ("allowed_origins", "https://shop.example.com/"),
        ("cache_ttl_s", ""),
        ("max_presence_members", "10000"),
    ],
)
async def test_invalid_setting_is_reported_at_its_field_and_nothing_is_saved(plane, browser, field, value):
    before = plane.records.apps["3"]
    fields = in_force(before) | {"watchlist": "1", "max_channels": "55", "max_user_info_bytes": "16384", field: value}
    reply = await browser.post("/dashboard/apps/3/settings", **fields)
    page = reply.body.decode()
    assert reply.status == 422
    assert f'id="fault-{field}"' in page
    assert 'value="55"' in page
    assert plane.records.apps["3"] == before


async def test_app_is_switched_off_and_on(plane, browser):
    await browser.post("/dashboard/apps/3/enabled", enabled="0")
    assert plane.records.apps["3"].enabled is False
    assert b"This app is off" in (await browser.get("/dashboard/apps/3/channels")).body
    await browser.post("/dashboard/apps/3/enabled", enabled="1")
    assert plane.records.apps["3"].enabled is True


async def test_an_app_is_renamed(plane, browser):
    assert (await browser.post("/dashboard/apps/3/name", name="Shop")).status == 303
    assert plane.records.apps["3"].name == "Shop"
    assert (await browser.post("/dashboard/apps/3/name", name="")).status == 422


async def test_other_switch_values_are_refused(plane, browser):
    for fields in ({}, {"enabled": "yes"}):
        assert (await browser.post("/dashboard/apps/3/enabled", **fields)).status == 400
    assert plane.records.apps["3"].enabled is True


async def test_an_app_is_deleted_when_its_name_is_typed(plane, browser):
    await plane.records.rename_app("3", "Shop <b>")
    await plane.records.create_token("3", "ci", ["read"])
    page = (await browser.get("/dashboard/apps/3/settings")).body
    for typed in ("", "shop <b>", "3"):
        reply = await browser.post("/dashboard/apps/3/delete", confirm=typed)
        assert (reply.status, b'id="fault-confirm"' in reply.body) == (422, True), typed
        # The settings below are still those of the app, not those of this form.
        assert reply.body.count(b" checked") == page.count(b" checked")
        assert "3" in plane.records.apps
    reply = await browser.post("/dashboard/apps/3/delete", confirm=" Shop <b> ")
    assert (reply.status, reply.headers["location"]) == (303, "/dashboard/apps")
    assert "3" not in plane.records.apps
    assert b"Shop &lt;b&gt; was deleted" in (await browser.get("/dashboard/apps")).body
    assert (await browser.get("/dashboard/apps/3")).status == 404
    noted = (await browser.get("/dashboard/audit")).body.decode()
    assert "app delete" in noted
    assert "1 keys, 0 history rules, 0 webhooks, 1 tokens" in noted


async def test_the_app_of_the_settings_can_not_be_deleted(make_plane, redis, log_in_to):
    plane = await make_plane(redis.url, app_id="3")
    browser = await log_in_to(plane)
    assert b"every start would create it again" in (await browser.get("/dashboard/apps/3/settings")).body
    reply = await browser.post("/dashboard/apps/3/delete", confirm=plane.records.apps["3"].name)
    assert reply.status == 422
    assert "3" in plane.records.apps
