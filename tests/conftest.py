"""Fixtures for all tests: uvloop as the event loop, `wait_until`, a real Redis and a real PostgreSQL."""

import asyncio
import gc
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import uvloop

from helpers import lengths
from helpers.postgres import PostgresServer
from helpers.postgres import program as postgres_program
from redpoll.host import embedded

TESTS = Path(__file__).parent
# Tests and their servers trust no CA of this machine, also where its environment names a file of them: reading that
# takes a tenth of a second, three times per server.
os.environ["SSL_CERT_FILE"] = os.devnull
# Images for containers often set this. The tests start hundreds of processes, and without bytecode files each compiles
# all that it imports again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
# No limit on how long an example may take: the machine may be busy. Every run tries the same examples, so that a run
# fails for what was changed; `HYPOTHESIS_RANDOM=1 pytest …` looks for others.
hypothesis.settings.register_profile(
    "patient",
    deadline=None,
    derandomize="HYPOTHESIS_RANDOM" not in os.environ,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("patient")
# Files that take longest, and folders of such files. They start first, so that no long file runs alone at the end.
LONGEST_FIRST = (
    "matrix",
    "browser",
    "failures",
    "clients",
    "cluster/test_model",
    "redpoll_client/test_outbox",
    "redpoll_client/test_examples",
    "deploy/test_docs",
    "host/test_supervisor",
    "worker/fallback/test_relay",
    "worker/timers/test_janitor",
    "worker/replay/test_pacing",
    "cli",
    "control",
)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--long", action="store_true", help="Run the long forms (tests/README.md), without a time limit.")


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--long"):
        lengths.chosen["long"] = True
        # Read by pytest-timeout after this.
        config.option.timeout = 0


def pytest_asyncio_loop_factories(config, item):
    return {"uvloop": uvloop.new_event_loop}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    def rank(item: pytest.Item) -> int:
        path = item.path.relative_to(TESTS).as_posix()
        return next((at for at, begin in enumerate(LONGEST_FIRST) if path.startswith(begin)), len(LONGEST_FIRST))

    items.sort(key=rank)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    # What is collected stays to the end. Searches for garbage would only walk it.
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_finish() -> None:
    # A full collection would walk all modules and items, for 50 ms each time. On the debug build each test needs three.
    gc.freeze()


@pytest.fixture
def wait_until():
    """`await wait_until(predicate)`: polls until the predicate is true, fails after `timeout_s`."""

    async def wait(predicate: Callable[[], object], timeout_s: float = 60.0, what: str = "") -> None:
        deadline = time.monotonic() + timeout_s
        while not predicate():
            if time.monotonic() > deadline:
                pytest.fail(f"not within {timeout_s} s: {what or predicate}")
            await asyncio.sleep(0.005)

    return wait


@dataclass
class RedisServer:
    """A real Redis on its own Unix socket. `kill`, `start`, `pause` and `resume` are for failure tests."""

    folder: Path
    process: subprocess.Popen | None = None

    @property
    def path(self) -> str:
        return str(self.folder / "redis.sock")

    @property
    def url(self) -> str:
        return f"unix://{self.path}"

    def start(self) -> None:
        options = ["--port", "0", "--unixsocket", self.path, "--dir", str(self.folder), "--save", ""]
        options += ["--appendonly", "yes", "--appendfsync", "no", "--daemonize", "no"]
        self.process = subprocess.Popen([str(embedded.find_binary()), *options], stdout=subprocess.DEVNULL)
        self._wait_answering()

    def _wait_answering(self) -> None:
        import redis

        deadline = time.monotonic() + 60
        while True:
            try:
                with redis.Redis(unix_socket_path=self.path) as client:
                    client.ping()
                return
            except (redis.ConnectionError, redis.BusyLoadingError):
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.005)

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait()
        self.process = None

    def pause(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGCONT)

    def call(self, *command: object) -> Any:
        """The reply to a command, over a connection of its own."""
        import redis

        with redis.Redis(unix_socket_path=self.path) as client:
            return client.execute_command(*command)

    def flush(self) -> None:
        self.call("FLUSHALL")


def _running_redis() -> Iterator[RedisServer]:
    # The path must be short: a Unix socket's path has at most 107 bytes.
    folder = Path(tempfile.mkdtemp(prefix="rp"))
    server = RedisServer(folder)
    server.start()
    try:
        yield server
    finally:
        if server.process is not None:
            server.resume()
            server.kill()
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def redis_server() -> Iterator[RedisServer]:
    """One Redis for the whole session. Use `redis` to get it empty."""
    yield from _running_redis()


@pytest.fixture
def redis(redis_server: RedisServer) -> RedisServer:
    """The session's Redis, emptied."""
    redis_server.flush()
    return redis_server


@pytest.fixture
def own_redis() -> Iterator[RedisServer]:
    """A Redis for this test only, which it may kill, pause and start again."""
    yield from _running_redis()


def _running_postgres() -> Iterator[PostgresServer]:
    if postgres_program("initdb") is None:
        pytest.skip("PostgreSQL is not installed (Debian: apt install postgresql)")
    server = PostgresServer()
    try:
        server.start()
        yield server
    finally:
        server.close()


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[PostgresServer]:
    """One PostgreSQL for the whole session. Use `postgres_url` to get an empty record store in it."""
    yield from _running_postgres()


@pytest.fixture
def postgres_url(postgres_server: PostgresServer) -> Iterator[str]:
    """The URL of a record store of this test alone, which is empty."""
    name = postgres_server.create_database()
    yield postgres_server.url(name)
    postgres_server.drop_database(name)


@pytest.fixture(scope="module")
def own_postgres() -> Iterator[PostgresServer]:
    """A PostgreSQL for this module only, which it may kill, pause and start again."""
    yield from _running_postgres()
