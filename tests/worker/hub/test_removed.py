"""The table of removed users. What it does to subscribes: test_revocations.py."""

from types import SimpleNamespace

from redpoll.worker.hub import removed as module
from redpoll.worker.hub.removed import Removed


def session(grant=None, app_id: str = "1"):
    subscription = SimpleNamespace(grant=grant)
    return SimpleNamespace(
        app=SimpleNamespace(id=app_id), channels={"presence-a": subscription, "presence-b": subscription}
    )


def test_only_that_member_of_that_channel_was_removed():
    removed = Removed()
    assert removed.at(session(), "presence-a", "7") == 0
    removed.put("1", "presence-a", "7", 5)
    assert removed.at(session(), "presence-a", "7") == 5
    assert removed.at(session(), "presence-a", "8") == 0
    assert removed.at(session(), "presence-b", "7") == 0
    assert removed.at(session(app_id="2"), "presence-a", "7") == 0
    assert removed.at(session(grant=object()), "presence-a", "7") == 0


def test_table_has_the_latest_removals(monkeypatch):
    monkeypatch.setattr(module, "MAX_REVOKED", 3)
    removed = Removed()
    for at, user in enumerate("12341", 1):
        removed.put("1", "presence-a", user, at)
    assert [removed.at(session(), "presence-a", user) for user in "1234"] == [5, 0, 3, 4]
    assert len(removed) == 3


def test_removals_of_another_app_displace_none_of_this_one(monkeypatch):
    monkeypatch.setattr(module, "MAX_REVOKED", 3)
    removed = Removed()
    removed.put("1", "presence-a", "7", 1)
    for at in range(2, 12):
        removed.put("2", "presence-a", f"user-{at}", at)
    assert removed.at(session(), "presence-a", "7") == 1
    assert len(removed) == 4
    removed.forget("2")
    removed.forget("3")
    assert removed.at(session(), "presence-a", "7") == len(removed) == 1
