"""PostgreSQL, which has the records, is away at the start and later (deploy/failures.md "PostgreSQL is away")."""

import asyncio
import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import aiohttp
import pytest
from click.testing import CliRunner

from failures.publishing import is_right
from helpers.postgres import PostgresServer
from helpers.receiver import Receiver
from helpers.server import Server
from helpers.wire import Api, Socket
from redpoll.cli import main

HEADING = "PostgreSQL is away"
WEBHOOKS = {"webhook_allow_http": 1, "webhook_allow_addresses": "127.0.0.0/8", "webhook_debounce_s": 0}


@pytest.fixture(scope="module")
def server(own_postgres: PostgresServer) -> Iterator[Server]:
    """A server that was started before its PostgreSQL."""
    name = own_postgres.create_database(empty=True)
    own_postgres.kill()
    running = Server(workers=2, database_url=own_postgres.url(name), **WEBHOOKS)
    log = running.folder / "err"
    with ThreadPoolExecutor(1) as pool:
        starting = pool.submit(running.__enter__)
        try:
            while not (log.exists() and "record store not available, the start waits for it" in log.read_text()):
                assert not starting.done(), "it didn't wait for PostgreSQL"
                time.sleep(0.01)
        finally:
            own_postgres.start()
        starting.result()
    try:
        yield running
    finally:
        running.__exit__(None, None, None)


async def run(server: Server, *words: str) -> Any:
    words = (*words, "--json", "--data-dir", str(server.folder / "data"))
    return await asyncio.to_thread(CliRunner().invoke, main, words)


async def command(server: Server, *words: str) -> Any:
    result = await run(server, *words)
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


async def test_only_changes_of_records_fail_while_postgres_is_away(server, own_postgres, figures, wait_until):
    app = server.app_id
    async with Receiver() as receiver, Api(server) as api, aiohttp.ClientSession() as browser:
        await command(server, "history", "rule", "add", app, "--prefix", "kept-", "--keep", "100", "--seconds", "3600")
        await command(server, "webhook", "create", app, receiver.url, "--events", "member.added")
        anna = await Socket.connect(server)
        await anna.subscribe("presence-room", "anna")
        await anna.subscribe("kept-news")
        await wait_until(lambda: len(receiver.requests) == 1)
        before = [server.control_pid, *server.worker_pids()]
        receiver.requests.clear()

        own_postgres.kill()
        for number in range(100):
            await api.publish("kept-news", "n", str(number))
        vera = await Socket.connect(server)
        await vera.subscribe("presence-room", "vera")
        await anna.next("pusher_internal:member_added", "presence-room")
        await anna.until(lambda: len(anna.all("n")) == 100)
        assert len((await api.get("/channels/kept-news/history", limit="100"))["messages"]) == 100
        assert await api.users("presence-room") == ["anna", "vera"]
        result = await run(server, "app", "create", "refused")
        assert (result.exit_code, "the record store failed: PostgreSQL at" in result.stderr) == (1, True), result.output
        log = server.folder / "err"
        await command(server, "connections", "kick", app, vera.socket_id)
        await vera.until_closed()
        assert any("not in the audit log" in line and vera.socket_id in line for line in log.read_text().splitlines())
        form = {"name": "admin", "password": "any"}
        async with browser.post(f"{server.control_url}/dashboard/login", data=form) as response:
            assert response.status == 503
            page = await response.text()
        # Where the database is, strangers don't learn.
        assert "the record store is not available" in page
        assert "PostgreSQL" not in page
        await wait_until(lambda: "webhook deliveries not written, they wait in Redis" in log.read_text())
        await wait_until(lambda: server.metrics()["redpoll_record_store_up", "worker=control"] == 0)
        assert receiver.requests == []

        began = time.monotonic()
        await asyncio.to_thread(own_postgres.start)
        started = time.monotonic()
        await command(server, "app", "create", "accepted")
        changed = time.monotonic()
        await wait_until(lambda: receiver.requests)
        figures.note(HEADING, "PostgreSQL's own start after kill -9", started - began, "s")
        figures.note(HEADING, "then a change of records is accepted", changed - started, "s")
        figures.note(HEADING, "then the webhook that waited is delivered", time.monotonic() - started, "s")
        (request,) = receiver.requests
        assert b"vera" in request.body
        assert [server.control_pid, *server.worker_pids()] == before
        for socket in (anna, vera):
            await socket.close()


async def test_publishing_goes_on_while_postgres_restarts(server, own_postgres, figures):
    publishing = True
    waits: list[float] = []

    async def publish(api: Api) -> None:
        while publishing:
            began = time.monotonic()
            status, answer = await api.ask("POST", "/events", {"name": "n", "channels": ["news"], "data": "x"})
            took_s = time.monotonic() - began
            assert is_right(status, took_s, answer), answer
            waits.append(took_s)

    before = [server.control_pid, *server.worker_pids()]
    async with Api(server) as api:
        publisher = asyncio.create_task(publish(api))
        for _ in range(2):
            await asyncio.to_thread(own_postgres.kill)
            await asyncio.to_thread(own_postgres.start)
            await command(server, "app", "list")
            await command(server, "app", "create", "another")
        publishing = False
        await publisher
    figures.note(HEADING, "publishes while PostgreSQL restarts twice, all answered 200", len(waits), "")
    figures.note(HEADING, "the longest of them", max(waits), "s")
    assert [server.control_pid, *server.worker_pids()] == before
