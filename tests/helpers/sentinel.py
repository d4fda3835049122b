"""Runs Redis in several forms for tests: over TLS with an own ACL file, with a replica, with a replica and Sentinels,
and as a Cluster. Not a test.

Every server listens on a port of 127.0.0.1 that is reserved for it, also while it is killed, and ends with the `with`
block.
"""

from __future__ import annotations

import contextlib
import functools
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import redis as redis_py

from helpers.ports import reserved_ports
from redpoll.host import embedded

STARTED_WITHIN_S = 60.0


class RedisNode:
    """One `redis-server` on a TCP port. `options` are its command line, without `--port`."""

    def __init__(self, folder: Path, port: int, options: Sequence[str] = (), client: dict[str, Any] | None = None):
        self.folder = folder
        self.port = port
        self.options = list(options)
        self._client = client or {}
        self.process: subprocess.Popen[bytes] | None = None
        folder.mkdir(exist_ok=True)

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}"

    def client(self) -> redis_py.Redis:
        return redis_py.Redis(port=self.port, decode_responses=True, **self._client)

    def start(self) -> None:
        # As redpoll itself does: on the PATH, or the one of the extra `embedded`.
        command = [_binary(), *self.options, "--dir", str(self.folder), "--bind", "127.0.0.1"]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        self.wait_answering()

    def wait_answering(self) -> None:
        with self.client() as client:
            wait_until(client.ping, "Redis didn't answer")

    def signal(self, number: int) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def kill(self) -> None:
        if self.process is not None:
            # A stopped process is killed, too.
            self.process.kill()
            self.process.wait()
            self.process = None


@functools.cache
def _binary() -> str:
    return str(embedded.find_binary())


def wait_until(holds: Callable[[], object], what: str) -> None:
    """Asks until the answer is true. Errors of a Redis that isn't ready count as "not yet"."""
    deadline = time.monotonic() + STARTED_WITHIN_S
    while True:
        with contextlib.suppress(redis_py.RedisError):
            if holds():
                return
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


@contextmanager
def tls_redis(authority: Path, cert: Path, key: Path, *, users: Sequence[str] = ()) -> Iterator[RedisNode]:
    """A Redis that speaks only TLS and asks for client certificates. `users` are lines of its ACL file."""
    if not (shutil.which("redis-server") or shutil.which("valkey-server")):
        pytest.skip("needs redis-server or valkey-server on the PATH: the one of the extra `embedded` has no TLS")
    with _folder() as folder, reserved_ports(1) as (port,):
        acl = folder / "users.acl"
        acl.write_text("".join(f"user {line}\n" for line in users))
        options = ["--port", "0", "--tls-port", str(port), "--tls-cert-file", str(cert), "--tls-key-file", str(key)]
        options += ["--tls-ca-cert-file", str(authority), "--tls-auth-clients", "yes", "--save", ""]
        options += ["--aclfile", str(acl)]
        tls = {"ssl": True, "ssl_ca_certs": str(authority), "ssl_certfile": str(cert), "ssl_keyfile": str(key)}
        node = RedisNode(folder, port, options, tls)
        try:
            node.start()
            yield node
        finally:
            node.kill()


_REPLICATED: Sequence[str] = (
    *("--save", "", "--appendonly", "no", "--repl-diskless-sync-delay", "0"),
    # Otherwise a replica waits for up to 10 s before it notices the end of its master.
    *("--repl-ping-replica-period", "1"),
)


class RedisPair:
    """A primary and a replica that change places, without Sentinels: clients are to reach the primary at one address
    (proxy.py)."""

    def __init__(self, folder: Path, ports: Sequence[int]) -> None:
        names = ("one", "two")
        self.nodes = [
            RedisNode(folder / name, port, ["--port", str(port), *_REPLICATED])
            for name, port in zip(names, ports, strict=True)
        ]
        self.primary, self.replica = self.nodes

    def start(self) -> None:
        for node in self.nodes:
            node.start()
        self.replicate()

    def replicate(self) -> None:
        """Makes `replica` follow `primary`, and waits until it has its data."""
        with self.replica.client() as client:
            client.replicaof("127.0.0.1", self.primary.port)
            wait_until(lambda: client.info("replication")["master_link_status"] == "up", "the replica has no data")

    def switch(self) -> None:
        """The replica becomes the primary in place: no connection is closed, and no write is lost."""
        with self.primary.client() as client:
            client.execute_command("FAILOVER")
        self.primary, self.replica = self.replica, self.primary
        for node, role in ((self.primary, "master"), (self.replica, "slave")):
            with node.client() as client:
                wait_until(lambda: client.execute_command("ROLE")[0] == role, "the primary wasn't replaced")  # noqa: B023

    def close(self) -> None:
        for node in self.nodes:
            node.kill()


class SentinelService:
    """A master, a replica and three Sentinels that watch them: `url` is what redpoll gets."""

    NAME = "cache"
    PASSWORD = "sentinel-pw"

    def __init__(self, folder: Path, ports: Sequence[int], down_after_ms: int, failover_timeout_ms: int) -> None:
        self.folder = folder
        first, second = ports[:2]
        self.nodes = [
            RedisNode(folder / "one", first, ["--port", str(first), *_REPLICATED]),
            RedisNode(folder / "two", second, ["--port", str(second), *_REPLICATED]),
        ]
        self._times_ms = down_after_ms, failover_timeout_ms
        self.sentinels = []
        for number, port in enumerate(ports[2:]):
            one = folder / f"sentinel{number}"
            options = [str(one / "sentinel.conf"), "--sentinel"]
            self.sentinels.append(RedisNode(one, port, options, {"password": self.PASSWORD}))
            self._configure(self.sentinels[-1], first)

    def _configure(self, sentinel: RedisNode, master_port: int) -> None:
        down_after_ms, failover_timeout_ms = self._times_ms
        (sentinel.folder / "sentinel.conf").write_text(
            f"port {sentinel.port}\n"
            f"requirepass {self.PASSWORD}\n"
            f"sentinel sentinel-pass {self.PASSWORD}\n"
            f"sentinel monitor {self.NAME} 127.0.0.1 {master_port} 2\n"
            f"sentinel down-after-milliseconds {self.NAME} {down_after_ms}\n"
            f"sentinel failover-timeout {self.NAME} {failover_timeout_ms}\n"
        )

    @property
    def url(self) -> str:
        hosts = ",".join(f"127.0.0.1:{sentinel.port}" for sentinel in self.sentinels)
        return f"redis+sentinel://{hosts}/{self.NAME}?sentinel_password={self.PASSWORD}"

    def start(self) -> None:
        master, replica = self.nodes
        master.start()
        replica.start()
        with replica.client() as client:
            client.replicaof("127.0.0.1", master.port)
            wait_until(lambda: client.info("replication")["master_link_status"] == "up", "the replica has no data")
        self._start_sentinels()

    def _start_sentinels(self) -> None:
        for sentinel in self.sentinels:
            sentinel.start()
        for sentinel in self.sentinels:
            with sentinel.client() as client:
                wait_until(lambda: self._is_complete(client), "a Sentinel doesn't know all others")

    def set_up_anew(self) -> None:
        """Replaces the Sentinels by new ones, which know the present master and no fail-over."""
        master = self.master()
        for sentinel in self.sentinels:
            sentinel.kill()
            self._configure(sentinel, master.port)
        self._start_sentinels()

    def _is_complete(self, client: redis_py.Redis) -> bool:
        words = client.execute_command("SENTINEL", "MASTER", self.NAME)
        state = words if isinstance(words, dict) else dict(zip(words[::2], words[1::2], strict=True))
        return int(state["num-slaves"]) == 1 and int(state["num-other-sentinels"]) == 2

    def master(self) -> RedisNode:
        """The node that is the master now, as its own answer to ROLE says."""
        for node in self.nodes:
            if node.process is not None:
                with node.client() as client, contextlib.suppress(redis_py.RedisError):
                    if client.execute_command("ROLE")[0] == "master":
                        return node
        raise AssertionError("there is no master")

    def cut_replication(self) -> None:
        """What the master writes from now on is lost when it fails. Its replica can still become the master."""
        with self.master().client() as client:
            client.execute_command("ACL", "SETUSER", "default", "-psync", "-sync")
            client.execute_command("CLIENT", "KILL", "TYPE", "replica")

    def set_down_after(self, ms: int) -> None:
        """From now on, a server that is silent for so long is replaced."""
        for sentinel in self.sentinels:
            with sentinel.client() as client:
                client.execute_command("SENTINEL", "SET", self.NAME, "down-after-milliseconds", ms)

    def close(self) -> None:
        for node in (*self.sentinels, *self.nodes):
            node.kill()


class RedisCluster:
    """Masters with a replica each, or without replicas. `url` names two of the nodes."""

    def __init__(self, folder: Path, ports: Sequence[int], masters: int, node_timeout_ms: int) -> None:
        """`ports` are two for each node, of which there are `masters`, or twice as many with replicas. A node that is
        silent for `node_timeout_ms` is failing."""
        count = len(ports) // 2
        self._first_masters = masters
        self._node_timeout_ms = node_timeout_ms
        options = ["--save", "", "--appendonly", "no", "--cluster-enabled", "yes"]
        # A node that stops for a moment while the cluster is made isn't forgotten by the others.
        options += ["--cluster-node-timeout", "60000"]
        options += ["--cluster-allow-replica-migration", "no", "--repl-diskless-sync-delay", "0"]
        self.nodes = [
            RedisNode(folder / f"node{number}", port, ["--port", str(port), "--cluster-port", str(bus), *options])
            for number, (port, bus) in enumerate(zip(ports[:count], ports[count:], strict=True))
        ]
        self._buses = ports[count:]

    @property
    def url(self) -> str:
        return f"redis+cluster://127.0.0.1:{self.nodes[0].port},127.0.0.1:{self.nodes[1].port}"

    def start(self) -> None:
        for node in self.nodes:
            node.start()
        count = self._first_masters
        masters, replicas = self.nodes[:count], self.nodes[count:]
        with contextlib.ExitStack() as stack:
            clients = {node: stack.enter_context(node.client()) for node in self.nodes}
            for number, node in enumerate(masters):
                first, last = number * 16384 // count, (number + 1) * 16384 // count - 1
                clients[node].execute_command("CLUSTER", "ADDSLOTSRANGE", first, last)
                clients[node].execute_command("CLUSTER", "SET-CONFIG-EPOCH", number + 1)
            for node, bus in zip(self.nodes[1:], self._buses[1:], strict=True):
                clients[self.nodes[0]].execute_command("CLUSTER", "MEET", "127.0.0.1", node.port, bus)
            ids = {node: clients[node].execute_command("CLUSTER", "MYID") for node in self.nodes}

            def knows_all(node: RedisNode) -> bool:
                known = str(clients[node].execute_command("CLUSTER", "NODES"))
                return all(one in known for one in ids.values())

            for node in self.nodes:
                wait_until(lambda: knows_all(node), "a node doesn't know all others")  # noqa: B023
            for master, replica in zip(masters, replicas, strict=False):
                clients[replica].execute_command("CLUSTER", "REPLICATE", ids[master])
            for node, client in clients.items():
                wait_until(
                    lambda: (
                        "cluster_state:ok" in str(client.execute_command("CLUSTER", "INFO"))  # noqa: B023
                        and (node in masters or client.info("replication")["master_link_status"] == "up")  # noqa: B023
                    ),
                    "the cluster isn't complete",
                )
            for client in clients.values():
                client.config_set("cluster-node-timeout", self._node_timeout_ms)

    def masters(self) -> list[RedisNode]:
        """The nodes that call themselves masters and have slots."""
        found = []
        for node in self.nodes:
            if node.process is not None:
                with node.client() as client, contextlib.suppress(redis_py.RedisError):
                    if client.execute_command("ROLE")[0] == "master":
                        found.append(node)
        return found

    def owner(self, slot: int) -> RedisNode:
        """The master that has this slot."""
        for node in self.masters():
            with node.client() as client:
                if _owns(client, slot):
                    return node
        raise AssertionError(f"no master has slot {slot}")

    def move_slot(self, slot: int) -> None:
        """Moves the slot with all its keys to another master, as `redis-cli --cluster reshard` does."""
        masters = self.masters()
        with contextlib.ExitStack() as stack:
            clients = [stack.enter_context(node.client()) for node in masters]
            ids = [client.execute_command("CLUSTER", "MYID") for client in clients]
            owner = next(number for number, client in enumerate(clients) if _owns(client, slot))
            target = (owner + 1) % len(masters)
            clients[target].execute_command("CLUSTER", "SETSLOT", slot, "IMPORTING", ids[owner])
            clients[owner].execute_command("CLUSTER", "SETSLOT", slot, "MIGRATING", ids[target])
            while keys := clients[owner].execute_command("CLUSTER", "GETKEYSINSLOT", slot, 2):
                port = masters[target].port
                clients[owner].execute_command("MIGRATE", "127.0.0.1", port, "", 0, 5000, "KEYS", *keys)
            for number in (target, owner, *set(range(len(masters))) - {target, owner}):
                clients[number].execute_command("CLUSTER", "SETSLOT", slot, "NODE", ids[target])

    def close(self) -> None:
        for node in self.nodes:
            node.kill()


def _owns(client: redis_py.Redis, slot: int) -> bool:
    (line,) = [line for line in str(client.execute_command("CLUSTER", "NODES")).splitlines() if "myself" in line]
    for words in line.split()[8:]:
        first, _, last = words.partition("-")
        if not words.startswith("[") and int(first) <= slot <= int(last or first):
            return True
    return False


@contextmanager
def redis_cluster(
    masters: int = 3, *, replicated: bool = True, node_timeout_ms: int = 60_000
) -> Iterator[RedisCluster]:
    """A running RedisCluster. By default no node fails that the machine stops for a moment."""
    nodes = 2 * masters if replicated else masters
    with _folder() as folder, reserved_ports(2 * nodes) as ports:
        cluster = RedisCluster(folder, ports, masters, node_timeout_ms)
        try:
            cluster.start()
            yield cluster
        finally:
            cluster.close()


@contextmanager
def redis_pair() -> Iterator[RedisPair]:
    """A running RedisPair."""
    with _folder() as folder, reserved_ports(2) as ports:
        pair = RedisPair(folder, ports)
        try:
            pair.start()
            yield pair
        finally:
            pair.close()


@contextmanager
def sentinel_service(down_after_ms: int = 500, failover_timeout_ms: int = 2000) -> Iterator[SentinelService]:
    """A running SentinelService."""
    with _folder() as folder, reserved_ports(5) as ports:
        service = SentinelService(folder, ports, down_after_ms, failover_timeout_ms)
        try:
            service.start()
            yield service
        finally:
            service.close()


@contextmanager
def _folder() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="rp"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
