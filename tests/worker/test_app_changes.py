"""A changed app record and the connections that are open. Others are tested with what they change."""

import asyncio
import time
from collections import Counter
from types import SimpleNamespace

import msgspec
import pytest

from redpoll import _engine
from redpoll.protocol.apps import App, CurrentApp, Key
from redpoll.protocol.grants import AppGrants
from redpoll.protocol.session import Session
from redpoll.worker.app_changes import AppChanges
from redpoll.worker.hub.client_libraries import ClientLibraries
from redpoll.worker.timers.paced_close import PacedClose


async def test_an_app_that_is_deleted_closes_its_sockets_with_4001(bench):
    worker = await bench.start()
    client = await bench.client(worker)
    await bench.put("1", None)
    error = await client.until("pusher:error")
    assert error["data"]["code"] == 4001


async def test_an_app_that_is_disabled_closes_its_sockets_with_4003(bench):
    workers = [await bench.start(), await bench.start()]
    clients = [await bench.client(worker) for worker in workers]
    await clients[0].subscribe("news")
    await bench.change(enabled=False)
    for client in clients:
        assert await client.closed_with() == 4003
    await bench.change(enabled=True)
    await (await bench.client(workers[0])).nothing_more()


class Connection:
    def __init__(self, current):
        self.state = _engine.OPEN
        self.code = None
        self.session = Session((1, 1), current)
        self.client_seen = ClientLibraries().note({})

    def shut(self, code, message):
        self.state = _engine.CLOSING
        self.code = code


class Site:
    """Apps with 100 connections each, of which the first pass of a close takes 10, and a clock of the test."""

    def __init__(self, monkeypatch):
        self.timers = []
        self.now = 100.0
        self.current = {}
        self.connections = {}
        self.followed = []
        loop = SimpleNamespace(call_later=lambda delay_s, work: self.timers.append(work))
        monkeypatch.setattr(asyncio, "get_running_loop", lambda: loop)
        paced = PacedClose()
        paced.clock = lambda: self.now
        hub = SimpleNamespace(
            debugging=SimpleNamespace(app_changed=lambda app_id, new: None),
            users=SimpleNamespace(app_changed=lambda old, new: None),
            user_resume=SimpleNamespace(switch=None),
            open_connections=SimpleNamespace(
                app_changed=lambda app: setattr(self.current[app.id], "record", app),
                count_of_app=lambda app_id: len(self.connections[app_id]),
                each_of_app=lambda app_id: iter(self.connections[app_id]),
            ),
        )
        registry = SimpleNamespace(app_changed=lambda old, new: self.followed.append((old, new)))
        self.changes = AppChanges(hub, registry, None, lambda app_id, error: None, paced)

    def app(self, app_id, **settings):
        app = App(id=app_id, name="test", keys=(Key(key="aa" * 10, secret="bb" * 10),), **settings)
        self.current[app_id] = CurrentApp(app, AppGrants(time.time))
        self.connections[app_id] = [Connection(self.current[app_id]) for _ in range(100)]
        return app

    def pass_time(self, seconds=20.0):
        self.now += seconds
        timers, self.timers[:] = self.timers[:], []
        for work in timers:
            work()

    def codes(self, app_id):
        return Counter(connection.code for connection in self.connections[app_id])


@pytest.fixture
def site(monkeypatch):
    return Site(monkeypatch)


def but(app, **settings):
    return msgspec.structs.replace(app, **settings)


class TestClosing:
    def test_an_app_that_is_enabled_again_keeps_the_connections_that_are_left(self, site):
        app = site.app("1")
        disabled = but(app, enabled=False)
        site.changes.changed("1", app, disabled)
        site.changes.changed("1", disabled, app)
        site.pass_time()
        assert site.codes("1") == {4003: 10, None: 90}
        assert not site.timers
        # Disabled once more, it closes them.
        site.changes.changed("1", app, disabled)
        site.pass_time()
        assert site.codes("1") == {4003: 100}

    def test_a_connection_whose_app_is_enabled_is_not_closed(self, site):
        """Whatever became of the message about the change."""
        app = site.app("1")
        site.changes.changed("1", app, but(app, enabled=False))
        site.current["1"].record = app
        site.pass_time()
        assert site.codes("1") == {4003: 10, None: 90}

    def test_another_change_of_a_disabled_app_does_not_begin_again(self, site):
        app = site.app("1")
        disabled, renamed = but(app, enabled=False), but(app, enabled=False, name="another")
        site.connections["1"] = [Connection(site.current["1"]) for _ in range(20_000)]
        site.changes.changed("1", app, disabled)
        site.pass_time(5.0)
        site.changes.changed("1", disabled, renamed)
        site.pass_time(5.0)
        assert site.codes("1") == {4003: 20_000}

    def test_connections_of_two_apps_are_closed_beside_each_other(self, site):
        first, second = site.app("1"), site.app("2")
        site.connections["1"] = [Connection(site.current["1"]) for _ in range(20_000)]
        site.changes.changed("1", first, None)
        site.changes.changed("2", second, None)
        site.pass_time(0.1)
        assert site.codes("2") == {4001: 100}
        assert site.codes("1")[None] > 19_000

    def test_an_app_that_is_deleted_while_it_is_disabled_closes_the_rest_with_4001(self, site):
        app = site.app("1")
        disabled = but(app, enabled=False)
        site.changes.changed("1", app, disabled)
        site.changes.changed("1", disabled, None)
        site.pass_time()
        assert site.codes("1") == {4003: 10, 4001: 90}

    def test_an_app_that_is_made_again_keeps_the_connections_that_are_left(self, site):
        app = site.app("1")
        again = but(app, max_presence_members=7)
        site.changes.changed("1", app, None)
        site.changes.changed("1", None, again)
        site.pass_time()
        assert site.codes("1") == {4001: 10, None: 90}
        # They follow what is different from before.
        assert site.followed == [(app, None), (app, again)]

    def test_an_app_that_is_made_again_later_is_a_new_one(self, site):
        app = site.app("1")
        site.changes.changed("1", app, None)
        site.pass_time()
        site.changes.changed("1", None, app)
        assert site.codes("1") == {4001: 100}
        assert site.followed == [(app, None), (None, app)]

    def test_another_app_with_the_same_id_has_its_own_connections_only(self, site):
        app = site.app("1")
        other = but(app, keys=(Key(key="cc" * 10, secret="dd" * 10),))
        site.changes.changed("1", app, None)
        site.changes.changed("1", None, other)
        newcomer = Connection(site.current["1"])
        site.connections["1"].append(newcomer)
        site.pass_time()
        assert site.codes("1") == {4001: 100, None: 1}
        assert newcomer.code is None
        # It can be disabled as any other.
        site.changes.changed("1", other, but(other, enabled=False))
        site.pass_time()
        assert newcomer.code == 4003

    @pytest.mark.parametrize("word", ["first", ""], ids=["known", "of an earlier redpoll"])
    def test_another_app_inherits_no_connections_if_the_deletion_was_missed(self, site, word):
        app = site.app("1", made=word)
        other = but(app, keys=(Key(key="cc" * 10, secret="dd" * 10),), made="second")
        site.changes.changed("1", app, other)
        newcomer = Connection(site.current["1"])
        site.connections["1"].append(newcomer)
        site.pass_time()
        assert site.codes("1") == {4001: 100, None: 1}
        assert newcomer.code is None
        assert site.followed == [(app, None), (None, other)]

    @pytest.mark.parametrize(
        ("before", "after", "key"),
        [
            ("first", "second", "aa" * 10),
            ("first", "first", "cc" * 10),
            # An earlier redpoll changed it.
            ("first", "", "cc" * 10),
        ],
    )
    def test_an_app_with_its_key_or_its_word_keeps_its_connections(self, site, before, after, key):
        app = site.app("1", made=before)
        site.changes.changed("1", app, but(app, keys=(Key(key=key, secret="bb" * 10),), made=after))
        site.pass_time()
        assert site.codes("1") == {None: 100}

    @pytest.mark.parametrize("how", ["enabled", "made"])
    def test_another_app_with_the_same_id_that_comes_back_inherits_no_connections(self, site, how):
        app = site.app("1")
        other = but(app, keys=(Key(key="cc" * 10, secret="dd" * 10),))
        away = but(other, enabled=False) if how == "enabled" else None
        site.changes.changed("1", app, None)
        site.changes.changed("1", None, other)
        site.changes.changed("1", other, away)
        site.changes.changed("1", away, other)
        site.pass_time()
        assert site.codes("1") == {4001: 100}
        assert not site.timers
