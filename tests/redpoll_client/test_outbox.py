"""Django's outbox: every committed event once and in order, none that was rolled back, whatever is killed.

`OUTBOX_TRANSACTIONS=10000 OUTBOX_KILLS=20 pytest tests/redpoll_client/test_outbox.py` is the long form; it prints the
time from commit to receipt.
"""

import asyncio
import io
import json
import os
import signal
import subprocess
import sys
from contextlib import AsyncExitStack

import pytest
from django.core.management import CommandError, call_command
from django.db import transaction
from django.test import override_settings

from answering import Answering, reply
from outbox_site import CHANNELS
from postgres import program
from redpoll_client import Publisher, Subscriber
from wire import eventually

from .conftest import url_of

SITE = [sys.executable, "-m", "outbox_site"]
TRANSACTIONS = int(os.environ.get("OUTBOX_TRANSACTIONS", "100"))
KILLS = int(os.environ.get("OUTBOX_KILLS", "2"))


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


class Site:
    """Runs the site's processes."""

    def __init__(self, database, url):
        path = os.pathsep.join(path for path in sys.path if path)
        self.environment = {**os.environ, "OUTBOX_DATABASE": database, "REDPOLL_URL": url, "PYTHONPATH": path}
        self.run("migrate")

    def run(self, *words):
        ran = subprocess.run(
            [*SITE, *words], env=self.environment, timeout=280, text=True, capture_output=True, check=False
        )
        assert ran.returncode == 0, ran.stderr
        return ran

    async def start(self, *words):
        return await asyncio.create_subprocess_exec(*SITE, *words, env=self.environment, stdout=asyncio.subprocess.PIPE)


async def test_every_committed_event_arrives_once_and_in_order(server, database):
    site = Site(database, url_of(server))
    received = {channel: [] for channel in CHANNELS}
    news = asyncio.Event()

    async def listen(channel):
        async for event in channel:
            received[channel.name].append(event.data)
            news.set()

    def count():
        return sum(map(len, received.values()))

    async def until(predicate):
        async with asyncio.timeout(240):
            while not predicate():
                news.clear()
                await news.wait()

    async with AsyncExitStack() as stack:
        subscriber = await stack.enter_async_context(Subscriber(url=url_of(server), queue=100_000))
        group = await stack.enter_async_context(asyncio.TaskGroup())
        readers = [
            group.create_task(listen(await stack.enter_async_context(subscriber.subscribe(name)))) for name in CHANNELS
        ]
        writer = await site.start("write", str(TRANSACTIONS), "1")
        senders = [await site.start("send"), await site.start("send")]
        try:
            for kill in range(KILLS):
                await until(lambda kill=kill: count() >= TRANSACTIONS * (kill + 1) // (KILLS + 2))
                senders[0].kill()
                await senders[0].wait()
                senders = [senders[1], await site.start("send")]
            committed = json.loads((await writer.communicate())[0])
            await until(lambda: count() >= sum(map(len, committed.values())))
            # What comes later must be nothing: the end of the outbox comes after every repeat.
            for sender in senders:
                sender.terminate()
            # One that was still starting dies of the signal.
            assert {await sender.wait() for sender in senders} <= {0, -signal.SIGTERM}
            site.run("send", "--once")
            assert received == committed
        finally:
            for sender in senders:
                if sender.returncode is None:
                    sender.kill()
                    await sender.wait()
            for reader in readers:
                reader.cancel()


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
        await asyncio.to_thread(site.run, "write", "5", "1")
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
