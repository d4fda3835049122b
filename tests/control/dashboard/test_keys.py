"""The page of keys: adding, replacing and disabling them."""


async def test_a_key_is_rotated(plane, browser):
    old = plane.records.apps["3"].keys[0].key
    assert (await browser.post("/dashboard/apps/3/keys")).status == 303
    _, new = plane.records.apps["3"].keys
    page = (await browser.get("/dashboard/apps/3/keys")).body.decode()
    assert new.key in page
    assert (await browser.post("/dashboard/apps/3/keys/disable", key=old)).status == 303
    assert plane.records.apps["3"].signing_key() == new
    assert (await browser.post("/dashboard/apps/3/keys/enable", key=old)).status == 303
    assert plane.records.apps["3"].signing_key().key == old


async def test_last_enabled_key_can_not_be_disabled(plane, browser):
    old = plane.records.apps["3"].keys[0].key
    reply = await browser.post("/dashboard/apps/3/keys/disable", key=old)
    assert reply.status == 422
    assert b"is the last enabled key" in reply.body
    assert plane.records.apps["3"].keys[0].enabled


async def test_unknown_keys_and_keys_of_other_apps_are_refused(plane, browser):
    for key in ("1111111111111111aaaa", "unknown", "<script>"):
        reply = await browser.post("/dashboard/apps/3/keys/enable", key=key)
        assert reply.status == 422
        assert b"<script>" not in reply.body.replace(b'<script src="', b"")
    assert len(plane.records.apps["3"].keys) == 1
