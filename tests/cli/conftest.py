"""Runs the command `redpoll` in this process, and one server for the commands that need it."""

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from click.testing import CliRunner

from helpers.server import Server
from redpoll.cli import main


@pytest.fixture
def typed(tmp_path, monkeypatch):
    """`typed("app", "list")` → click's result; the data folder is `tmp_path / "data"`, the environment is
    clean.
    """
    for name in list(os.environ):
        if name.startswith(("REDPOLL_", "REVERB_", "SOKETI_", "PUSHER_")) or name == "REDIS_URL":
            monkeypatch.delenv(name)
    monkeypatch.setenv("REDPOLL_DATA_DIR", str(tmp_path / "data"))
    umask = os.umask(0o022)

    def run(*words: str):
        return CliRunner().invoke(main, words)

    yield run
    os.umask(umask)


@pytest.fixture
def foreign(typed, monkeypatch):
    """The data folder is one of the user nobody, and the commands are root's. It isn't below `tmp_path`, which nobody
    can't enter."""
    if os.geteuid() != 0:
        pytest.skip("needs root, who alone can act as somebody else")
    around = Path(tempfile.mkdtemp(prefix="rp"))
    around.chmod(0o755)
    folder = around / "data"
    folder.mkdir(mode=0o700)
    os.chown(folder, 65_534, 65_534)
    monkeypatch.setenv("REDPOLL_DATA_DIR", str(folder))
    yield folder
    shutil.rmtree(around)


@pytest.fixture
def app_id(typed):
    """The id of an app that was created without a server."""
    return json.loads(typed("app", "create", "demo", "--json").stdout)["id"]


@pytest.fixture
def answering(monkeypatch):
    """`answering(value)`: every command gets this value, as if from a server. Returns the list of requests."""

    def prepare(value: object) -> list[tuple[str, dict]]:
        asked = []

        def run(_settings: object, verb: str, args: dict) -> object:
            asked.append((verb, args))
            return value

        monkeypatch.setattr("redpoll.cli.records_command.run", run)
        monkeypatch.setattr("redpoll.cli.webhooks.run", run)
        return asked

    return prepare


@pytest.fixture(scope="package")
def server():
    """One server for all tests of commands that need one."""
    with Server(workers=1) as running:
        yield running


@pytest.fixture
def on_server(typed, server, monkeypatch):
    """`typed`, with PUSHER_URL naming the server's app."""
    monkeypatch.setenv("PUSHER_URL", server.pusher_url)
    return typed


@pytest.fixture
def on_server_async(on_server):
    """The same for async tests: the command has an event loop of its own."""

    async def run(*words: str):
        return await asyncio.to_thread(on_server, *words)

    return run


@pytest.fixture
def background(server):
    """`background("subscribe", …)` starts the command as a process, with PUSHER_URL. The end of the test kills it."""
    started = []

    def start(*words: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-m", "redpoll", *words],
            env={**server.environment(), "PUSHER_URL": server.pusher_url},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            # A run of the tests in the background ignores SIGINT, and so would the command.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


@pytest.fixture
def wait_until_true():
    """`wait_until_true(predicate)`: asks until it is true, for a minute."""

    def wait(predicate) -> None:
        deadline = time.monotonic() + 60
        while not predicate():
            assert time.monotonic() < deadline
            time.sleep(0.05)

    return wait
