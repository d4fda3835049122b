"""The history rules and the webhooks of an app over HTTP."""

from redpoll.control.commands.app_write import delete_app
from redpoll.control.webhooks.wanted import hooks_of
from redpoll.store.audit import COMMAND_LINE


async def test_history_rule_is_added_changed_and_removed(manager, audit):
    added = await manager("POST", "/3/history_rules", {"name": "news-", "prefix": True, "keep": 10, "seconds": 60})
    rule = added.json()
    assert (added.status, rule["keep"], rule["replay"], rule["client_events"]) == (201, 10, 0, False)
    path = f"/3/history_rules/{rule['id']}"
    assert added.headers["location"] == f"/api/v1/apps{path}"
    assert manager.records.apps["3"].history_rule("news-1").keep == 10
    assert (await manager("PATCH", path, {"keep": 20})).status == 428
    changed = await manager.changed("PATCH", path, {"keep": 20, "replay": 15})
    assert changed.json() == {**rule, "keep": 20, "replay": 15}
    assert (await manager("GET", "/3/history_rules")).json() == {"history_rules": [changed.json()]}
    assert manager.records.apps["3"].history_rule("news-1").replay == 15
    assert (await manager.changed("PATCH", path, {"replay": 21})).status == 400
    assert (await manager.changed("DELETE", path)).status == 204
    assert manager.records.apps["3"].history_rule("news-1") is None
    assert (await manager("GET", path)).status == 404
    assert [entry[1] for entry in audit()] == ["history rule add", "history rule change", "history rule remove"]


async def test_rule_with_a_rate(manager):
    rate = {"max_rate": 20, "join": "delta", "by": "id"}
    added = await manager("POST", "/3/history_rules", {"name": "answer-", "prefix": True, "keep": 0, **rate})
    assert (added.status, added.json()) == (201, {**added.json(), **rate, "latest": False})
    path = f"/3/history_rules/{added.json()['id']}"
    assert manager.records.apps["3"].pace("answer-1").by == ("id",)
    changed = await manager.changed("PATCH", path, {"latest": True, "join": "", "by": ""})
    assert (changed.json()["latest"], changed.json()["join"]) == (True, "")
    for change in ({"join": "delta"}, {"max_rate": None}, {"max_rate": 0}, {"join": "a..b", "latest": False}):
        assert (await manager.changed("PATCH", path, change)).status == 400, change
    assert (await manager.changed("PATCH", path, {"max_rate": None, "latest": False})).status == 200
    assert manager.records.apps["3"].pace("answer-1") is None


async def test_refused_rules(manager):
    rule = {"name": "a", "keep": 1, "seconds": 1}
    assert (await manager("POST", "/3/history_rules", rule)).status == 201
    for body in (rule, {"name": "b", "keep": 1}, {"name": "", "keep": 1, "seconds": 1}, {"name": "b", "keep": -1}):
        assert (await manager("POST", "/3/history_rules", body)).status == 400, body
    assert len(manager.records.apps["3"].history) == 1


async def test_webhook_is_created_changed_rotated_and_deleted(manager, audit):
    created = await manager("POST", "/3/webhooks", {"url": "https://one.example/hook"})
    webhook = created.json()
    assert (created.status, webhook["events"], webhook["format"], webhook["enabled"]) == (201, ["all"], "service", True)
    path = f"/3/webhooks/{webhook['id']}"
    masked = {**webhook, "secret": f"{webhook['secret'][:4]}****"}
    assert (await manager("GET", path)).json() == masked
    assert (await manager("GET", "/3/webhooks")).json() == {"webhooks": [masked]}
    assert manager.records.apps["3"].hooks == "omc"
    change = {"url": "https://two.example/", "events": ["member.added"], "format": "pusher", "channels": ["presence-"]}
    assert (await manager("PATCH", path, change)).status == 428
    changed = await manager.changed("PATCH", path, change)
    assert changed.json() == {**masked, **change}
    assert manager.records.apps["3"].hooks == "m"
    assert (await manager.changed("PATCH", path, {"enabled": False})).json()["enabled"] is False
    assert manager.records.apps["3"].hooks == hooks_of([])
    assert (await manager.changed("PATCH", path, {})).status == 200
    assert (await manager("POST", f"{path}/rotate")).status == 428
    rotated = await manager.changed("POST", f"{path}/rotate")
    assert rotated.status == 200
    assert len(rotated.json()["secret"]) == 40
    assert rotated.json()["secret"] != webhook["secret"]
    assert (await manager.changed("DELETE", path)).status == 204
    assert (await manager("GET", path)).status == 404
    assert [entry[1] for entry in audit()] == [
        "webhook create",
        "webhook change",
        "webhook change",
        "webhook rotate",
        "webhook delete",
    ]


async def test_webhook_gets_the_events_of_a_second_in_one_request(manager):
    made = await manager("POST", "/3/webhooks", {"url": "https://one.example/hook", "format": "pusher", "batch": True})
    assert (made.status, made.json()["batch"]) == (201, True)
    path = f"/3/webhooks/{made.json()['id']}"
    refused = await manager.changed("PATCH", path, {"format": "service"})
    assert (refused.status, "only a webhook in the format pusher can batch" in refused.body.decode()) == (400, True)
    assert (await manager.changed("PATCH", path, {"format": "service", "batch": False})).json()["batch"] is False
    whole = {"name": "Shop", "webhooks": [{"url": "https://one.example/", "format": "pusher", "batch": True}]}
    assert (await manager("POST", "", whole)).json()["webhooks"][0]["batch"] is True


async def test_refused_webhooks(manager):
    for body in (
        {"url": "http://plain.example/"},
        {"url": "https://[::1]/"},
        {"url": "https://x.example/", "events": []},
        {"url": "https://x.example/", "format": "xml"},
        {"url": "https://x.example/", "channels": ["a b"]},
        {"url": "https://x.example/", "secret": "mine"},
        {"url": "https://x.example/", "batch": True},
        {"pull": True, "format": "pusher", "batch": True},
        {},
    ):
        assert (await manager("POST", "/3/webhooks", body)).status == 400, body
    assert (await manager("GET", "/3/webhooks")).json() == {"webhooks": []}


async def test_webhook_is_deleted_while_another_writer_deletes_its_app(manager, monkeypatch):
    webhook = (await manager("POST", "/3/webhooks", {"url": "https://one.example/hook"})).json()
    webhooks = manager.plane.plane.webhooks
    endpoints = webhooks.endpoints
    discard = endpoints.discard_waiting

    async def discard_late(endpoint_id: str) -> None:
        monkeypatch.undo()
        await delete_app(manager.records, webhooks, "3", COMMAND_LINE)
        await discard(endpoint_id)

    monkeypatch.setattr(endpoints, "discard_waiting", discard_late)
    reply = await manager.changed("DELETE", f"/3/webhooks/{webhook['id']}")
    # The tag is that of the app without the webhook, which another writer's change doesn't reach.
    assert (reply.status, reply.headers["etag"].startswith('"')) == (204, True)
    assert (await manager("GET", "/3")).status == 404
