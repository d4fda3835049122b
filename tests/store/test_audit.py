"""The audit log in the record store: filters, order and the maximum of rows."""

from redpoll.store import audit
from redpoll.store.audit import Actor


async def test_entries_are_newest_first_and_filtered_by_app_user_and_text(connection):
    for at in range(4):
        by = Actor("vera" if at == 3 else "admin", "::1")
        await audit.add(connection, by, "did", "3" if at % 2 else "", f"t{at}")
    assert [row.target for row in await audit.find(connection)] == ["t3", "t2", "t1", "t0"]
    assert [row.target for row in await audit.find(connection, app_id="3")] == ["t3", "t1"]
    assert [row.target for row in await audit.find(connection, app_id="3", who="vera")] == ["t3"]
    assert [row.target for row in await audit.find(connection, text="T2")] == ["t2"]
    assert await audit.find(connection, text="%") == []
    third = (await audit.find(connection))[1]
    assert [row.target for row in await audit.find(connection, before=third.number, limit=1)] == ["t1"]


async def test_oldest_entries_are_removed_at_the_maximum(connection, monkeypatch):
    monkeypatch.setattr(audit, "MAX_ROWS", 50)
    for at in range(200):
        await audit.add(connection, Actor("admin"), "did", target=f"t{at}")
    rows = await audit.find(connection, limit=1_000)
    assert len(rows) == 50
    assert rows[0].target == "t199"
    await audit.add_many(connection, Actor("admin"), "did", [("", f"m{at}", "") for at in range(20)])
    assert [row.target for row in await audit.find(connection, limit=1_000)][-1] == "t170"


async def test_logins_push_out_no_changes(connection, monkeypatch):
    """Whoever may log in can log in and out all day, and failed logins are everybody's."""
    monkeypatch.setattr(audit, "MAX_ROWS", 50)
    monkeypatch.setattr(audit, "MAX_LOGINS", 10)
    await audit.add(connection, Actor("admin"), "app delete", target="t")
    for at in range(299):
        await audit.add(connection, Actor("vera"), ("logged in", "login failed", "logged out")[at % 3], target=f"t{at}")
    rows = await audit.find(connection, limit=1_000)
    assert ([row.target for row in rows[:2]], len(rows)) == (["t298", "t297"], 11)
    assert (rows[-1].action, rows[-1].target) == ("app delete", "t")
