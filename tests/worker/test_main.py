"""A worker from its start to its end: ready, drained, and nothing left in Redis."""

import asyncio
import json
import os

import aiohttp
import pytest
import websockets

from helpers.bus_publishing import publish_all
from helpers.server import Server
from helpers.wire import Api, Socket
from redpoll.cluster.lifecycle import Lifecycle
from redpoll.cluster.membership.connection_state import Reach
from redpoll.cluster.redis.keys import TAGS, Keys
from redpoll.ipc.messages import FROM_CHILD, DirectoryVersion, Evacuate, ReachChanged, Ready, Serve, ShardKey, encode


async def keys_of_workers(client) -> list[bytes]:
    return [key async for key in client.scan_iter("rp:*:w:*")]


async def test_the_supervisor_hears_when_the_worker_is_ready(bench):
    worker = await bench.start()
    worker.supervisor.setblocking(False)
    said = b""
    async with asyncio.timeout(60):
        while b"Ready" not in said or b"subscribed" not in said:
            said += await asyncio.get_running_loop().sock_recv(worker.supervisor, 1000)
    messages = [FROM_CHILD.decode(line) for line in said.splitlines()]
    assert Ready() in messages
    # And how far it has come with Redis. A worker that never connects says that it is down, or nobody would know.
    assert [message.reach for message in messages if isinstance(message, ReachChanged)] == list(Reach)


async def test_stale_app_records_admit_no_clients(bench):
    worker = await bench.start()
    worker.supervisor.sendall(encode(DirectoryVersion(bench.version + 1)))
    await bench.settled(worker, lambda: not worker.registry.ready)
    with pytest.raises(websockets.InvalidStatus) as refused:
        await bench.open(worker)
    assert refused.value.response.status_code == 503
    await bench.put("1", bench.app)
    await bench.settled(worker, lambda: worker.registry.ready)
    await (await bench.client(worker)).nothing_more()


async def test_before_the_shard_key_is_known_it_does_not_connect_to_redis(bench, client_of_redis):
    starting = asyncio.create_task(bench.start(shard_key=None))
    async with asyncio.timeout(60):
        while not bench.workers:
            await asyncio.sleep(0.005)
        (worker,) = bench.workers
        url = f"http://127.0.0.1:{worker.port}/healthz"
        async with aiohttp.ClientSession() as session, session.get(url) as answer:
            # It has read the other messages too.
            assert answer.status == 200
    assert worker.link.connects == 0
    key = bytes(range(16))
    worker.supervisor.sendall(encode(ShardKey(key.hex())))
    await starting
    client = await bench.client(worker)
    await client.subscribe("news")
    assert await client_of_redis.hvals(Keys(shard_key=key).counts(bench.app.id, "news")) == [b"1"]


async def test_an_event_published_right_after_ready_reaches_its_subscriber(bench):
    for _ in range(5):
        worker = await bench.start()
        client = await bench.client(worker)
        await client.subscribe("news")
        await publish_all(bench.bus, bench.app, [("news", "first", "1", None)])
        assert (await client.next())["event"] == "first"


async def test_a_drained_worker_leaves_nothing_in_redis(bench, client_of_redis):
    worker = await bench.start()
    clients = [await bench.client(worker) for _ in range(20)]
    for n, client in enumerate(clients):
        await client.subscribe("news")
        await client.subscribe("presence-p", {"user_id": str(n)})
    assert await keys_of_workers(client_of_redis)
    worker.drain()
    await asyncio.wait_for(worker.life.until(Lifecycle.STOPPED), 60)
    left = {key.split(b":")[2] async for key in client_of_redis.scan_iter("rp:*")}
    assert left - {b"stats"} == {b"clock", b"dir", b"dirver"}  # counters are gone after 15 s


async def test_a_drained_worker_writes_its_figures_at_its_end(bench, client_of_redis):
    worker = await bench.start()
    client = await bench.client(worker)
    await client.subscribe("news")
    await bench.publish("news", "headline", "{}")
    await client.next()
    process = worker.registry.worker_id.rpartition(".")[0]
    worker.drain()
    await asyncio.wait_for(worker.life.until(Lifecycle.STOPPED), 60)
    _, figures = json.loads(await client_of_redis.get(f"rp:{{{TAGS[0].decode()}}}:stats:{process}"))
    assert figures["by_app"] == {"1": [0, 0, 1]}


async def test_a_worker_of_a_drained_node_closes_and_admits_nobody_until_it_serves_again(bench):
    worker = await bench.start()
    clients = [await bench.client(worker) for _ in range(20)]
    worker.supervisor.sendall(encode(Evacuate(0.2, None)))
    for client in clients:
        assert await client.closed_with() == 4200
    with pytest.raises(websockets.InvalidStatus) as refused:
        await bench.open(worker)
    assert refused.value.response.status_code == 503
    assert refused.value.response.headers["Retry-After"] == "1"
    worker.supervisor.sendall(encode(Serve()))
    await bench.settled(worker, lambda: worker.life.admits)
    await (await bench.client(worker)).nothing_more()
    # A worker that ends stays closed.
    worker.stop_listening()
    worker.serve()
    assert not worker.life.admits


async def test_users_counts_and_connections_are_removed_from_redis_too(bench, client_of_redis):
    worker = await bench.start()
    await bench.change(watchlist=True, subscription_count=True, max_connections=10)
    for n in range(5):
        client = await bench.client(worker)
        await client.sign_in(f"{n}", watchlist=["1", "2"])
        await client.subscribe(f"#server-to-user-{n}")
        await client.subscribe("news")
    worker.drain()
    await asyncio.wait_for(worker.life.until(Lifecycle.STOPPED), 60)
    left = {key.split(b":")[2] async for key in client_of_redis.scan_iter("rp:*")}
    assert left <= {b"clock", b"dir", b"dirver", b"stats", b"n"}  # `n`, the last count sent, expires after 60 s


async def test_the_port_is_closed_before_any_connection(bench):
    worker = await bench.start()
    client = await bench.client(worker)
    worker.stop_listening()
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection("127.0.0.1", worker.port)
    await client.nothing_more()


async def test_no_client_loses_its_connection_when_redis_restarts(own_redis, bench_on):
    """deploy/failures.md "Redis restarts or is away", on one worker: connections stay, delivery continues."""
    bench = await bench_on(own_redis)
    worker = await bench.start()
    client, member = await bench.client(worker), await bench.client(worker)
    await client.subscribe("news")
    await member.subscribe("presence-p", {"user_id": "m"})
    for round_ in range(3):
        own_redis.kill()
        await bench.settled(worker, lambda: not worker.link.up)
        own_redis.start()
        async with asyncio.timeout(60):
            receivers = [0]
            while receivers != [1]:
                try:
                    receivers = await publish_all(bench.bus, bench.app, [("news", "n", str(round_), None)])
                except Exception:
                    await asyncio.sleep(0.01)
        assert (await client.until("n"))["data"] == str(round_)
    await member.nothing_more()
    assert worker.gate.connections == 2


async def test_connections_beyond_the_limit_of_open_files_are_refused_and_others_stay(bench):
    worker = await bench.start()
    first = await bench.client(worker)
    worker.gate.max_connections = 1
    with pytest.raises(websockets.InvalidStatus) as refused:
        await bench.client(worker)
    assert refused.value.response.status_code == 503
    await first.nothing_more()


class WithoutSsl(Server):
    """A server of which the workers run in a Python that was built without the module ssl."""

    def environment(self) -> dict[str, str]:
        environment = super().environment()
        folder = self.folder / "hook"
        folder.mkdir(exist_ok=True)
        (folder / "sitecustomize.py").write_text(
            """
import sys

class Nothing:
    def find_spec(self, name, path=None, target=None):
        if name == "_ssl":
            raise ImportError("No module named '_ssl'")

if "worker" in sys.orig_argv:
    sys.meta_path.insert(0, Nothing())
"""
        )
        environment["PYTHONPATH"] = os.pathsep.join((str(folder), environment["PYTHONPATH"]))
        return environment


async def test_a_worker_without_the_module_ssl_serves_clients_without_tls():
    """uvloop needs the module, too."""
    with WithoutSsl(workers=1) as server:
        async with Api(server) as api:
            client = await Socket.connect(server)
            await client.subscribe("news")
            await api.publish("news", "e", "hello")
            assert (await client.next("e"))["data"] == "hello"
            await client.close()
        assert "asyncio's loop instead of uvloop's" in server.output()
