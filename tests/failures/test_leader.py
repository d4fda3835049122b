"""The leader can't do its work any more, though its supervisor lives: another node takes the lead over, or it does what
it still can (deploy/failures.md "Leader that can't work")."""

import asyncio
import contextlib
import json
import os
import signal
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest
import redis as redis_py

from failures.crowd import REMOVED, visitors
from failures.publishing import is_right
from helpers.leading import command, leader, leading_name, rows
from helpers.proxy import Proxy
from helpers.receiver import Receiver
from helpers.server import Server
from helpers.wire import Api, Socket, signed_path
from redpoll.cluster.redis.keys import Keys
from redpoll.ipc.command_socket import CommandError

HEADING = "Leader that can't work"
ROOM = "presence-room"


@pytest.fixture(scope="module")
def proxies(own_postgres) -> Iterator[dict[str, Proxy]]:
    """Between each node and PostgreSQL."""
    with contextlib.ExitStack() as stack:
        upstream = str(own_postgres.folder / ".s.PGSQL.5432")
        yield {name: stack.enter_context(Proxy(upstream)) for name in ("one", "two")}


@pytest.fixture(scope="module")
def nodes(redis_of_module, own_postgres, proxies) -> Iterator[list[Server]]:
    database = own_postgres.create_database()
    settings = {"webhook_allow_http": 1, "webhook_allow_addresses": "127.0.0.0/8", "webhook_debounce_s": 0}
    with contextlib.ExitStack() as stack, ThreadPoolExecutor(2) as pool:
        nodes = [
            Server(
                1,
                redis_of_module.url,
                node_name=name,
                database_url=f"postgresql://redpoll@127.0.0.1:{proxy.port}/{database}",
                shutdown_grace_s=2,
                **settings,
            )
            for name, proxy in proxies.items()
        ]
        for node in pool.map(lambda node: node.__enter__(), nodes):
            stack.push(node.__exit__)
        yield nodes


@pytest.fixture
async def receiver(nodes) -> AsyncIterator[Receiver]:
    """Gets the webhooks of joins."""
    async with Receiver() as receiver:
        words = ("webhook", "create", nodes[0].app_id, receiver.url, "--events", "member.added")
        made = await asyncio.to_thread(command, nodes[0], *words)
        yield receiver
        await asyncio.to_thread(command, nodes[0], "webhook", "delete", made["id"])


async def until_announced(receiver: Receiver, node: Server, user: str) -> None:
    """Joins again and again with other names, until a webhook comes: a worker may not know the new endpoint yet."""
    for attempt in range(600):
        name = f"{user}-{attempt}"
        socket = await Socket.connect(node)
        await socket.subscribe(f"presence-{name}", name)
        for _ in range(20):
            if any(user.encode() in request.body for request in receiver.requests):
                socket.abort()
                return
            await asyncio.sleep(0.005)
        socket.abort()
    raise AssertionError(f"no webhook of {user}: {node.output()}")


async def until_both_serve(nodes: list[Server]) -> None:
    """Waits until the control planes of both nodes list both nodes, and name the same leader."""
    names: list[object] = []
    while None in names or len(set(names)) != 1:
        await asyncio.sleep(0.05)
        names.clear()
        for node in nodes:
            # Its control plane may be starting.
            with contextlib.suppress(ConnectionRefusedError, FileNotFoundError, CommandError):
                both = len(await asyncio.to_thread(rows, node)) == 2
                names.append(await asyncio.to_thread(leading_name, node) if both else None)
        names += [None] * (2 - len(names))


async def test_node_that_is_cut_off_from_the_record_store_refuses_revoked_keys_and_tokens(nodes, proxies, figures):
    cut_off, other = nodes
    app = other.app_id
    key = await asyncio.to_thread(command, other, "key", "add", app)
    token = await asyncio.to_thread(command, other, "token", "create", app, "--name", "CI", "--scope", "all")
    extra = SimpleNamespace(app_key=key["key"], app_secret=key["secret"])
    bearer = {"Authorization": f"Bearer {token['token']}"}

    async with aiohttp.ClientSession() as session:

        async def ask(signer: Any = cut_off, **options: Any) -> tuple[int, Any]:
            body = json.dumps({"name": "n", "channel": "news", "data": "{}"}).encode()
            path = f"/apps/{app}/events"
            if not options:
                path = signed_path(signer, "POST", path, body)
            async with session.post(cut_off.public_url + path, data=body, **options) as answer:
                return answer.status, json.loads(await answer.text())

        async def publish(signer: Any = cut_off, **options: Any) -> int:
            status, _ = await ask(signer, **options)
            return status

        async def is_accepted() -> bool:
            began = time.monotonic()
            status, answer = await ask()
            return is_right(status, time.monotonic() - began, answer)

        while (await publish(extra), await publish(headers=bearer)) != (200, 200):
            await asyncio.sleep(0.01)
        proxies[cut_off.settings["node_name"]].stall()
        try:
            await asyncio.to_thread(command, other, "key", "disable", app, key["key"])
            await asyncio.to_thread(command, other, "token", "revoke", token["id"])
            began = time.monotonic()
            async with asyncio.timeout(60):
                while (await publish(extra), await publish(headers=bearer)) != (401, 401):
                    assert await is_accepted()
                    await asyncio.sleep(0.01)
            figures.note(
                HEADING, "cut off from PostgreSQL: a revoked key is refused", time.monotonic() - began, "s", "5 s"
            )
            assert await is_accepted()
        finally:
            proxies[cut_off.settings["node_name"]].cut()
            proxies[cut_off.settings["node_name"]].resume()
    await until_both_serve(nodes)


async def test_lead_leaves_a_node_that_is_cut_off_from_the_record_store(nodes, proxies, receiver, figures):
    leading = leader(nodes)
    (other,) = (node for node in nodes if node is not leading)
    watcher = await Socket.connect(other)
    await watcher.subscribe(ROOM, "watcher")
    async with visitors(leading, ROOM, 3):
        await until_announced(receiver, other, "before")
        began = time.monotonic()
        proxies[leading.settings["node_name"]].stall()
        try:
            # The next one waits for the record store before it does anything.
            os.kill(leading.control_pid, signal.SIGKILL)
            leading.kill_worker(0)
            await watcher.until(lambda: len(watcher.all(REMOVED)) == 3, 60, "members of a killed worker are removed")
            await until_announced(receiver, other, "meanwhile")
            figures.note(HEADING, "cut off from PostgreSQL: webhooks go on", time.monotonic() - began, "s", "8 s")
            assert leading_name(other) == other.settings["node_name"]
        finally:
            proxies[leading.settings["node_name"]].cut()
            proxies[leading.settings["node_name"]].resume()
    watcher.abort()
    await until_both_serve(nodes)


async def test_lead_leaves_a_node_whose_control_plane_hangs(nodes, receiver, wait_until, figures):
    leading = leader(nodes)
    (other,) = (node for node in nodes if node is not leading)
    await until_announced(receiver, other, "before")
    began = time.monotonic()
    hanging = leading.control_pid
    os.kill(hanging, signal.SIGSTOP)
    try:
        await until_announced(receiver, other, "meanwhile")
        figures.note(HEADING, "control plane stopped: webhooks go on", time.monotonic() - began, "s", "8 s")
        # Its supervisor has not killed it.
        assert leading.control_pid == hanging
        assert leading_name(other) == other.settings["node_name"]
    finally:
        os.kill(hanging, signal.SIGCONT)
    await until_both_serve(nodes)


async def test_without_the_record_store_a_new_leader_reaps_and_writes_the_directory(
    nodes, redis_of_module, own_postgres, figures
):
    leading = leader(nodes)
    (other,) = (node for node in nodes if node is not leading)
    watcher = await Socket.connect(other)
    await watcher.subscribe(ROOM, "watcher")
    async with visitors(leading, ROOM, 3), Api(other) as api:
        await asyncio.to_thread(own_postgres.kill)
        try:
            began = time.monotonic()
            leading.signal(signal.SIGKILL)
            leading.wait()
            await watcher.until(lambda: len(watcher.all(REMOVED)) == 3, 60, "members of the killed leader are removed")
            figures.note(HEADING, "PostgreSQL away, leader killed: members gone", time.monotonic() - began, "s", "8 s")

            with redis_py.Redis(unix_socket_path=redis_of_module.path) as client:
                client.flushall()
                while not client.exists(Keys().directory_version):
                    # Publishing works, so a load balancer must not take the server out.
                    assert await asyncio.to_thread(readiness, other) == 200
            await api.publish("news", "n", "1")
        finally:
            await asyncio.to_thread(own_postgres.start)
    watcher.abort()
    await asyncio.to_thread(leading.start)
    await until_both_serve(nodes)


def readiness(node: Server) -> int:
    try:
        with urllib.request.urlopen(f"{node.control_url}/readyz", timeout=60) as answer:
            return answer.status
    except urllib.error.HTTPError as error:
        return error.code
