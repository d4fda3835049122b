"""Webhooks that a back end pulls, while the back end and the control plane are killed.

The back end is pulling.py. A delivery may come again only if the server hasn't confirmed its acknowledgement.
"""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from click.testing import CliRunner

from helpers.pulled_server import acknowledge, delivery_stream, occupying, pulled_server
from helpers.server import Server
from helpers.wire import Api, Socket
from redpoll.cli import main

HEADING = "Webhook receivers down"
PER_SOCKET = 50
SETTINGS = {
    "webhook_debounce_s": 0,
    # A delivery that the back end is about to acknowledge isn't sent again because the machine paused.
    "webhook_acknowledge_within_s": 15,
    # Each kill may cost the same delivery an attempt.
    "webhook_retry_after_s": ",".join(["0.5"] * 20),
    "subscribes_per_second": 0,
    "subscribes_per_second_per_address": 0,
}
TESTS = Path(__file__).parents[1]


def command(server: Server, *words: str) -> Any:
    result = CliRunner().invoke(main, [*words, "--json", "--data-dir", str(server.folder / "data")])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


class Puller:
    """The back end: a process that `kill` replaces."""

    def __init__(self, server: Server, path: Path, kind: str) -> None:
        names = (kind, str(server.port), server.app_id, server.app_key, server.app_secret)
        self._command = [sys.executable, "-m", "failures.pulling", *names, str(path)]
        self._process = subprocess.Popen(self._command, cwd=TESTS)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        self._process = subprocess.Popen(self._command, cwd=TESTS)

    def end(self) -> None:
        self._process.kill()
        self._process.wait()


@contextmanager
def pulling(server: Server, path: Path, kind: str) -> Iterator[Puller]:
    puller = Puller(server, path, kind)
    try:
        yield puller
    finally:
        puller.end()


def read(path: Path) -> tuple[dict[str, int], int, int]:
    """By channel how often its delivery came, how many were confirmed, and how many came after that."""
    came: dict[str, int] = {}
    done: set[str] = set()
    after = 0
    # The last line of a killed process may be a part of one, and the next process goes on in it.
    for words in (line.split() for line in path.read_text().splitlines()):
        if len(words) == 3 and words[0] == "got":
            came[words[2]] = came.get(words[2], 0) + 1
            after += words[1] in done
        elif len(words) == 2 and words[0] == "done":
            done.add(words[1])
    return came, len(done), after


async def occupy(server: Server, count: int) -> list[Socket]:
    """Occupies the channels `pulled-0` to `pulled-COUNT`, a connection for some of them."""
    sockets = []
    for start in range(0, count, PER_SOCKET):
        socket = await Socket.connect(server)
        sockets.append(socket)
        for number in range(start, min(start + PER_SOCKET, count)):
            socket.send(socket.subscribe_request(f"pulled-{number}"))
        await socket.settle()
    return sockets


@pytest.mark.parametrize("kind", ["poll", "stream"])
async def test_nothing_is_missed_and_only_the_unacknowledged_comes_again(
    kind: str, size: Callable[[int, int], int], wait_until: Callable, figures, tmp_path: Path
) -> None:
    count, kills, path = size(150, 10_000), size(2, 20), tmp_path / "pulled"
    path.touch()
    with Server(workers=2, **SETTINGS) as server:
        await asyncio.to_thread(
            command, server, "webhook", "create", server.app_id, "--pull", "--events", "channel.occupied"
        )
        with pulling(server, path, kind) as puller:
            began = time.monotonic()
            occupying = asyncio.create_task(occupy(server, count))
            for number in range(kills):
                # Evenly over the deliveries.
                wanted = (number + 1) * count // (kills + 1)
                await wait_until(lambda wanted=wanted: len(read(path)[0]) >= wanted, timeout_s=120)
                if number % 2:
                    puller.kill()
                else:
                    pid = server.control_pid
                    os.kill(pid, signal.SIGKILL)
                    await wait_until(lambda pid=pid: server.control_pids() not in ([], [pid]))
            sockets = await occupying
            await wait_until(lambda: len(read(path)[0]) == count, timeout_s=120, what="all deliveries")
            # A killed back end may have acknowledged more than it has written down.
            while (await asyncio.to_thread(command, server, "webhook", "list", server.app_id))[0]["waiting"]:
                await asyncio.sleep(0.2)
            took_s = time.monotonic() - began
        came, done, after = read(path)
        assert await asyncio.to_thread(command, server, "dead-letter", "list", server.app_id) == []
        for socket in sockets:
            await socket.close()
    assert set(came) == {f"pulled-{number}" for number in range(count)}
    assert (done > 0, after) == (True, 0)
    repeated = sum(came.values()) - count
    how = "pulled" if kind == "poll" else "streamed"
    figures.note(HEADING, f"{how} deliveries missing, of {count} with {kills} kills", count - len(came), "", "0")
    figures.note(HEADING, f"{how} deliveries that came again, none after its confirmation", repeated, "")
    figures.note(HEADING, f"time for all that were {how}, with kills", took_s, "s")


async def test_delivery_of_a_stream_whose_worker_was_killed_comes_again_on_the_next() -> None:
    with pulled_server(workers=2) as server:
        async with Api(server) as api, occupying(server) as occupy:
            async with delivery_stream(server) as stream:
                channel = await occupy()
                first = (await stream.next()).json
                assert stream.response.connection is not None
                assert stream.response.connection.transport is not None
                _, port = stream.response.connection.transport.get_extra_info("sockname")
                os.kill(server.worker_of(port), signal.SIGKILL)
                with suppress(EOFError, aiohttp.ClientError):
                    while True:  # After a pause, the same delivery may have come again.
                        await stream.next()
            async with delivery_stream(server) as stream:
                again = (await stream.next()).json
                assert (again["id"], again["channel"]) == (first["id"], channel)
                assert again["attempt"] > first["attempt"]
                assert await acknowledge(api, [again]) == 1
