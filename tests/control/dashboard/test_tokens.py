"""The pages of tokens."""

import json
import re


async def test_token_is_shown_once_and_has_its_scopes(plane, browser):
    reply = await browser.post("/dashboard/apps/3/tokens", name="<script>x", scope=["publish"], lasts="30")
    plain = re.search(r'id="plain-token">(rp_\w{40})<', reply.body.decode())[1]
    assert b"<script>x" not in reply.body
    page = (await browser.get("/dashboard/apps/3/tokens")).body.decode()
    assert plain not in page
    assert plain[:8] in page
    body = json.dumps({"name": "e", "channel": "c", "data": "{}"}).encode()
    headers = {"Authorization": f"Bearer {plain}"}
    assert (await plane.ask("POST", "/apps/3/events", body, headers)).status == 200
    assert (await plane.ask("GET", "/apps/3/channels", b"", headers)).status == 403
    (token,) = plane.records.tokens_of("3")
    assert token.expires_at is not None
    await browser.post("/dashboard/apps/3/tokens/revoke", id=token.id)
    assert (await plane.ask("POST", "/apps/3/events", body, headers)).status == 401
    assert "revoked" in (await browser.get("/dashboard/apps/3/tokens")).body.decode()


async def test_missing_fields_are_reported_and_the_form_keeps_its_values(plane, browser):
    reply = await browser.post("/dashboard/apps/3/tokens", name="deploy", lasts="7")
    assert reply.status == 422
    assert b'id="fault-scope"' in reply.body
    assert b'value="deploy"' in reply.body
    reply = await browser.post("/dashboard/apps/3/tokens", name="", scope=["read"], lasts="9999")
    assert {b'id="fault-name"' in reply.body, b'id="fault-lasts"' in reply.body} == {True}
    assert re.search(rb'value="read" checked', reply.body)
    assert not plane.records.tokens_of("3")


async def test_token_of_another_app_can_not_be_revoked(plane, browser):
    token, _ = await plane.records.create_token("4", "other", ["all"])
    assert (await browser.post("/dashboard/apps/3/tokens/revoke", id=token.id)).status == 422
    assert plane.records.tokens_of("4")[0].revoked_at is None


async def test_management_token_is_shown_once_and_manages_apps(plane, browser, viewer):
    reply = await browser.post("/dashboard/tokens", name="platform", lasts="30")
    plain = re.search(r'id="plain-token">(rp_\w{40})<', reply.body.decode())[1]
    bearer = {"Authorization": f"Bearer {plain}"}
    assert (await plane.ask("GET", "/api/v1/apps", b"", bearer)).status == 200
    assert (await plane.ask("GET", "/apps/3/channels", b"", bearer)).status == 403
    (token,) = plane.records.tokens_of(None)
    for seen in (await browser.get("/dashboard/tokens"), await viewer.get("/dashboard/tokens")):
        assert token.prefix in seen.body.decode()
        assert plain not in seen.body.decode()
    assert b'value="manage"' not in (await browser.get("/dashboard/apps/3/tokens")).body
    # Each page knows its own tokens only.
    assert (await browser.post("/dashboard/apps/3/tokens/revoke", id=token.id)).status == 422
    assert (await browser.post("/dashboard/tokens", name="", lasts="1")).status == 422
    reply = await browser.post("/dashboard/tokens/revoke", id=token.id)
    assert (reply.status, reply.headers["location"]) == (303, "/dashboard/tokens")
    assert (await plane.ask("GET", "/api/v1/apps", b"", bearer)).status == 401
    noted = (await browser.get("/dashboard/audit")).body.decode()
    assert "token create" in noted
    assert "token revoke" in noted


async def test_token_of_an_app_can_not_be_revoked_on_the_page_of_management_tokens(plane, browser):
    token, _ = await plane.records.create_token("4", "other", ["all"])
    assert (await browser.post("/dashboard/tokens/revoke", id=token.id)).status == 422
    assert plane.records.tokens_of("4")[0].revoked_at is None
