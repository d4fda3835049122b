"""The keys and the tokens of an app over HTTP."""

KEY, SECRET = "278d425bdf160c739803", "7ad3773142a6692b25b8"


async def test_key_is_added_disabled_enabled_and_deleted(manager, plane):
    added = await manager("POST", "/3/keys", {})
    key = added.json()
    assert (added.status, len(key["key"]), len(key["secret"]), key["enabled"]) == (201, 20, 40, True)
    assert added.headers["location"] == f"/api/v1/apps/3/keys/{key['key']}"
    assert added.headers["etag"] == await manager.etag()
    path = f"/3/keys/{key['key']}"
    masked = {**key, "secret": f"{key['secret'][:4]}****"}
    assert (await manager("GET", path)).json() == masked
    listed = (await manager("GET", "/3/keys")).json()["keys"]
    assert listed == [{"key": KEY, "secret": "7ad3****", "enabled": True}, masked]

    async def status():
        return (await plane.call("GET", "/apps/3/channels", key=key["key"], secret=key["secret"])).status

    assert await status() == 200
    assert (await manager("PATCH", path, {"enabled": False})).status == 428
    disabled = await manager.changed("PATCH", path, {"enabled": False})
    assert (disabled.status, disabled.json()["enabled"], await status()) == (200, False, 401)
    assert (await manager.changed("PATCH", path, {})).json()["enabled"] is False
    assert (await manager.changed("PATCH", path, {"enabled": True})).json() == masked
    assert await status() == 200
    assert (await manager.changed("DELETE", path)).status == 204
    assert (await status(), (await manager("GET", path)).status) == (401, 404)


async def test_key_of_ones_own_is_refused_if_anyone_has_it(manager):
    own = await manager("POST", "/3/keys", {"key": "mine", "secret": "my-secret-of-16-c"})
    assert own.json() == {"key": "mine", "secret": "my-secret-of-16-c", "enabled": True}
    for body, status in (
        ({"key": "mine"}, 409),
        ({"key": "1111111111111111aaaa"}, 409),
        ({"key": "a:b"}, 400),
        ({"key": "..."}, 400),
        ({"secret": "with space"}, 400),
        ({"secret": ""}, 400),
    ):
        assert (await manager("POST", "/3/keys", body)).status == status, body
    assert len(manager.records.apps["3"].keys) == 2
    # A platform may pass the text to a customer.
    refused = await manager("POST", "/3/keys", {"key": "1111111111111111aaaa"})
    assert refused.json()["error"] == "the key 1111111111111111aaaa belongs to another app"


async def test_last_enabled_key_stays(manager):
    for method, body in (("DELETE", None), ("PATCH", {"enabled": False})):
        refused = await manager.changed(method, f"/3/keys/{KEY}", body)
        assert (refused.status, refused.json()["code"]) == (409, "conflict")
    assert manager.records.by_key[KEY].secret_of(KEY) == SECRET


async def test_token_is_created_shown_once_and_revoked(manager, plane, audit):
    created = await manager("POST", "/3/tokens", {"name": "ci", "scopes": ["read"], "lasts_s": 60})
    token = created.json()
    assert (created.status, token["scopes"], token["expires_at"] - token["created_at"]) == (201, ["read"], 60)
    path = f"/3/tokens/{token['id']}"
    shown = {name: value for name, value in token.items() if name != "token"}
    assert (await manager("GET", path)).json() == shown
    assert (await manager("GET", "/3/tokens")).json() == {"tokens": [shown]}
    bearer = {"Authorization": f"Bearer {token['token']}"}
    assert (await plane.ask("GET", "/apps/3/channels", headers=bearer)).status == 200
    # The use of a token changes no tag.
    assert await manager.etag() == created.headers["etag"]
    assert (await manager("DELETE", path)).status == 428
    assert (await manager.changed("DELETE", path)).status == 204
    assert (await plane.ask("GET", "/apps/3/channels", headers=bearer)).json()["code"] == "token_revoked"
    assert (await manager("GET", path)).json()["revoked_at"] is not None
    assert [entry[:4] for entry in audit()] == [
        (f"token {manager.token.id} platform", "token create", "3", "ci"),
        (f"token {manager.token.id} platform", "token revoke", "3", "ci"),
    ]


async def test_refused_tokens(manager):
    for body in (
        {"name": "x", "scopes": []},
        {"name": "x", "scopes": ["manage"]},
        {"name": "", "scopes": ["read"]},
        {"name": "x", "scopes": ["read"], "lasts_s": 0},
        {"name": "x\n", "scopes": ["read"]},
        {"scopes": ["read"]},
    ):
        assert (await manager("POST", "/3/tokens", body)).status == 400, body
    assert manager.records.tokens_of("3") == []


async def test_what_belongs_to_another_app_is_not_found(manager):
    token = (await manager("POST", "/4/tokens", {"name": "ci", "scopes": ["read"]})).json()
    assert (await manager("DELETE", f"/3/tokens/{token['id']}", None, "*")).json()["code"] == "not_found"
    assert (await manager("DELETE", "/3/keys/1111111111111111aaaa", None, "*")).json()["code"] == "not_found"
    assert (await manager("POST", "/5/keys", {})).json()["code"] == "unknown_app"
