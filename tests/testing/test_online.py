import pytest

from redpoll.testing.clock import Clock
from redpoll.testing.loop_thread import LoopThread
from redpoll.testing.online import Group, SignedInUsers


@pytest.fixture
def reports():
    return []


@pytest.fixture
def world(still_time, reports):
    async def nothing() -> None:
        pass

    thread = LoopThread()
    thread.start(nothing, nothing)
    clock = Clock(thread)
    yield SignedInUsers(clock, lambda *report: reports.append(report)), clock, thread
    thread.stop()


def test_only_watched_users_are_reported(world, reports):
    users, clock, thread = world
    assert users.watch("1", "anna") is False
    thread.call(users.add, "1", "anna", "tab 1")
    thread.call(users.add, "1", "anna", "tab 2")
    thread.call(users.add, "1", "ben", "tab")
    assert reports == [("1", "anna", True)]
    assert users.watch("1", "ben") is True
    assert users.of("1", "anna") == ["tab 1", "tab 2"]
    thread.call(users.discard, "1", "anna", "tab 1")
    clock.advance(3)
    assert reports == [("1", "anna", True)]
    thread.call(users.discard, "1", "anna", "tab 2")
    clock.advance(2)
    assert len(reports) == 1
    clock.advance(1)
    assert reports[1:] == [("1", "anna", False)]
    users.unwatch("1", "anna")
    thread.call(users.add, "1", "anna", "tab 1")
    assert len(reports) == 2


def test_a_group_says_whether_it_changed():
    group = Group()
    assert (group.add("a"), group.add("a"), group.discard("a"), group.discard("a")) == (True, False, True, False)
