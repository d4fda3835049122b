"""The page of the audit log."""

import json

from redpoll.config.settings import Settings
from redpoll.control.commands import commands
from redpoll.control.commands.context import Context
from redpoll.store import audit
from redpoll.store.audit import Actor


async def note(plane, who, target):
    await plane.plane.dashboard.accounts.store.note(Actor(who, "10.0.0.1"), "did", "3", target)


async def test_search_by_word_user_and_app_with_pages(plane, browser):
    for at in range(60):
        await note(plane, "vera" if at % 2 else "admin", f"thing-{at:02}")
    first = (await browser.get("/dashboard/audit?app=3")).body.decode()
    assert "thing-59" in first
    assert "thing-05" not in first
    older = first.split('href="/dashboard/audit?find=')[1].split('"')[0].replace("&amp;", "&")
    assert "thing-05" in (await browser.get(f"/dashboard/audit?find={older}")).body.decode()
    one = (await browser.get("/dashboard/audit?find=thing-0&who=vera")).body.decode()
    assert "thing-01" in one
    assert "thing-02" not in one
    assert "Nothing matches" in (await browser.get("/dashboard/audit?find=100%25")).body.decode()


async def test_audit_log_is_exported_completely(plane, browser):
    for at in range(5):
        await note(plane, "admin", f"=thing-{at}")
    begun = await browser.post("/dashboard/audit/export", find="thing", format="json")
    job = begun.headers["location"]
    reply = await browser.file_of(job)
    assert [entry["target"] for entry in json.loads(reply.body)] == [f"=thing-{at}" for at in (4, 3, 2, 1, 0)]
    assert "attachment" in reply.headers["content-disposition"]


async def test_export_takes_a_text_of_any_length_as_the_page_does(plane, browser):
    """SQLite refused the pattern of the export, which ended in an internal error."""
    await note(plane, "admin", "thing")
    begun = await browser.post("/dashboard/audit/export", find="x" * 60_000, format="json")
    assert json.loads((await browser.file_of(begun.headers["location"])).body) == []


async def test_commands_are_in_the_audit_log_too(plane, browser, tmp_path):
    context = Context(plane.plane.dashboard.accounts.store, plane.records, Settings())
    made = await commands.run(context, "token create", {"app": "3", "name": "t", "scopes": ["read"], "lasts_s": None})
    await commands.run(context, "token list", {"app": "3"})
    page = (await browser.get("/dashboard/audit?who=command+line")).body.decode()
    assert "token create" in page
    assert "… read" in page
    assert "token list" not in page
    assert made["token"] not in page


async def test_a_change_has_the_same_verb_by_command_and_by_dashboard(plane, browser):
    store = plane.plane.dashboard.accounts.store
    context = Context(store, plane.records, Settings())
    await commands.run(context, "key add", {"app": "3", "key": None})
    await commands.run(context, "app set", {"id": "3", "settings": {"max_batch": "21"}})
    await commands.run(context, "token create", {"app": "3", "name": "t", "scopes": ["read"], "lasts_s": None})
    await commands.run(context, "user create", {"name": "eve", "role": "viewer"})
    await browser.post("/dashboard/apps/3/keys")
    await browser.post("/dashboard/apps/3/enabled", enabled="0")
    await browser.post("/dashboard/apps/3/tokens", name="t", scope="read", lasts="")
    await browser.post("/dashboard/users", name="vera", role="viewer")
    async with store.reading() as connection:
        by_command = await audit.find(connection, who="command line")
        by_dashboard = await audit.find(connection, who="admin")
    verbs = ["user create", "token create", "app set", "key add"]
    assert [entry.action for entry in by_command] == verbs
    assert [entry.action for entry in by_dashboard][:4] == verbs
    assert [entry.detail for entry in (by_command[2], by_dashboard[2])] == ["max_batch 10 → 21", "enabled on → off"]
