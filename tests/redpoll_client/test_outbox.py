"""Django's outbox: every committed event once and in order, none that was rolled back, whatever is killed.

`python -m bench.soak.outbox` is the long form, with figures.
"""

import asyncio
import io
import os
import signal
from types import SimpleNamespace

import pytest
from django.core.management import CommandError, call_command
from django.db import OperationalError, connections, transaction
from django.test import override_settings

from helpers.answering import Answering, reply
from helpers.lengths import amount
from helpers.outbox_run import Site, run_outbox
from helpers.postgres import program
from helpers.wire import eventually
from redpoll_client import Publisher

from .conftest import url_of


@pytest.fixture(params=["sqlite", "postgres"])
def database(request, tmp_path):
    """OUTBOX_DATABASE of an empty database."""
    if request.param == "sqlite":
        yield str(tmp_path / "outbox.sqlite3")
        return
    if program("initdb") is None:
        pytest.skip("PostgreSQL isn't installed")
    postgres = request.getfixturevalue("postgres_server")
    name = postgres.create_database(empty=True)
    yield f"postgres:{postgres.folder}:{name}"
    postgres.drop_database(name)


async def test_every_committed_event_arrives_once_and_in_order(server, database):
    site = Site(database, url_of(server))

    async def kill_control():
        os.kill(server.control_pid, signal.SIGKILL)

    result = await run_outbox(site, url_of(server), amount(50, 100), sender_kills=amount(1, 2), kills=[kill_control])
    assert result.received == result.committed


async def test_a_sender_outlives_connections_that_the_database_ends(server, postgres_server):
    name = await asyncio.to_thread(postgres_server.create_database, empty=True)
    site = Site(f"postgres:{postgres_server.folder}:{name}", url_of(server))

    async def count(query):
        return len(await asyncio.to_thread(postgres_server.execute, name, query))

    sender = await site.start("send")
    try:
        others = "FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"
        await eventually(lambda: count(f"SELECT 1 {others} AND query LIKE 'LISTEN%'"), 1)
        assert await count(f"SELECT pg_terminate_backend(pid) {others}") >= 2
        await asyncio.to_thread(site.run, "write", "5", "1", "0")
        await eventually(lambda: count("SELECT 1 FROM redpoll_outboxevent"), 0)
        sender.terminate()
        assert await sender.wait() == 0
    finally:
        if sender.returncode is None:
            sender.kill()
            await sender.wait()
        await asyncio.to_thread(postgres_server.drop_database, name)


def manage(*words):
    out, err = io.StringIO(), io.StringIO()
    call_command("redpoll_outbox", *words, stdout=out, stderr=err)
    return out.getvalue() + err.getvalue()


def test_a_refused_row_is_set_aside_and_can_be_sent_again(django_site):
    from redpoll_client.django.publishing import store

    with (
        Answering(reply(413, {"error": "too large for us"}), reply(200)) as server,
        override_settings(REDPOLL={"url": server.url}),
    ):
        with transaction.atomic():
            rows = [store("a", "n", str(number)) for number in range(3)]
        with pytest.raises(transaction.TransactionManagementError):
            store("a", "n", "")
        with pytest.raises(ValueError, match="at most 10240"), transaction.atomic():
            store("a", "n", "x" * 10_241)
        assert "set aside: 413: too large for us" in manage("--once")
        assert [asked.json["data"] for asked in server.asked] == ["0", "1", "2"]
        assert f"{rows[0].id}: n to a" in manage("--failed")
        manage("--retry", str(rows[0].id))
        with pytest.raises(CommandError, match="no refused event"):
            manage("--retry", "0")
        manage("--once")
        assert server.asked[3].body == server.asked[0].body
        assert manage("--failed") == ""


def test_rows_wait_while_the_server_is_away_and_it_is_said_once(django_site):
    from redpoll_client.django.models import OutboxEvent
    from redpoll_client.django.outbox import Sender
    from redpoll_client.django.publishing import store

    said = []
    away, wrong = reply(503, {"error": "away"}), reply(401, {"error": "wrong secret"})
    with Answering(away, wrong, reply(200)) as server, Publisher(url=server.url) as publisher:
        with override_settings(REDPOLL={"url": server.url}), transaction.atomic():
            for number in range(2):
                store("a", "n", str(number))
        sender = Sender(publisher, say=said.append)
        assert [sender.pass_once() for _ in range(4)] == [0, 0, 2, 0]
    assert [text.partition(":")[0] for text in said] == [
        "the server doesn't take events; they wait",
        "the server takes events again",
    ]
    assert [asked.json["data"] for asked in server.asked] == ["0", "0", "0", "1"]
    assert not OutboxEvent.objects.exists()


def test_a_server_that_asks_for_hours_is_asked_again_within_a_minute(django_site, monkeypatch):
    from redpoll_client.django.outbox import Sender
    from redpoll_client.django.publishing import store

    waits = []
    over = reply(429, {"error": "daily limit"}, {"Retry-After": "43200"})
    with Answering(over, reply(200)) as server, Publisher(url=server.url) as publisher:
        with override_settings(REDPOLL={"url": server.url}), transaction.atomic():
            store("a", "n", "1")
        sender = Sender(publisher)

        def wait(wait_s):
            waits.append(wait_s)
            if len(server.asked) == 2:
                sender.stop()

        monkeypatch.setattr(sender, "_pause", wait)
        sender.run()
    assert waits[0] == 60


@pytest.mark.parametrize(
    ("vendor", "driver", "version", "hears"),
    [
        ("postgresql", "psycopg", "3.3.9", True),
        ("postgresql", "psycopg", "3.2", True),
        # Its `notifies` takes no time-out.
        ("postgresql", "psycopg", "3.1.18", False),
        ("postgresql", "psycopg2", "2.9.10 (dt dec pq3 ext lo64)", False),
        ("sqlite", "sqlite3", "2.6.0", False),
    ],
)
def test_the_sender_listens_with_drivers_that_can_wait(django_tables, vendor, driver, version, hears):
    from redpoll_client.django.outbox import _hears_notifications

    module = SimpleNamespace(__name__=driver, __version__=version)
    assert _hears_notifications(SimpleNamespace(vendor=vendor, Database=module)) is hears


def test_publish_on_commit_publishes_only_then(django_site):
    from redpoll_client.django.publishing import publish_on_commit

    with Answering(reply(200)) as server, override_settings(REDPOLL={"url": server.url}):
        with transaction.atomic():
            data = {"state": "paid"}
            publish_on_commit("a", "n", data)
            data["state"] = "changed"
            assert server.asked == []
        with transaction.atomic():
            publish_on_commit("a", "n", "rolled back")
            transaction.set_rollback(True)
        assert [asked.json["data"] for asked in server.asked] == ['{"state":"paid"}']
        server.answers = [reply(503)]
        with transaction.atomic():
            # Logged: the transaction is over.
            publish_on_commit("a", "n", "lost")


def test_a_database_that_is_away_is_said_once(django_site, monkeypatch):
    from redpoll_client.django.outbox import Sender

    said, passes = [], iter([OperationalError("gone")] * 3 + [None])
    monkeypatch.setattr("redpoll_client.django.outbox.random.uniform", lambda low, high: 0.0)
    with Answering(reply(200)) as server, Publisher(url=server.url) as publisher:
        sender = Sender(publisher, say=said.append)

        def pass_once():
            error = next(passes)
            if error is not None:
                raise error
            sender.stop()
            return 1

        monkeypatch.setattr(sender, "pass_once", pass_once)
        sender.run()
    assert said == ["the database doesn't answer: gone; trying again", "the database answers again"]


def test_one_sender_at_a_time_where_rows_cannot_be_divided(django_site, monkeypatch):
    """Oracle skips locked rows, but not in a query for the first so many of them."""
    from redpoll_client.django.models import OutboxLease
    from redpoll_client.django.outbox import Sender
    from redpoll_client.django.publishing import store

    features = connections["default"].features
    monkeypatch.setattr(features, "has_select_for_update_skip_locked", True)
    monkeypatch.setattr(features, "supports_select_for_update_with_limit", False)
    with Answering(reply(200)) as server, Publisher(url=server.url) as publisher:
        with override_settings(REDPOLL={"url": server.url}), transaction.atomic():
            store("a", "n", "1")
        assert Sender(publisher).pass_once() == 1
        assert OutboxLease.objects.count() == 1
