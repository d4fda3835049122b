"""How the server ends: SIGTERM closes connections with 4200, children die with the supervisor. A port that is taken is
reported in one sentence."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest

from helpers.server import Server, process
from helpers.wire import connect_many, subscribe_all


@pytest.fixture(scope="module")
def data_folder() -> Iterator[Server]:
    """One server of all tests here, which each of them may end."""
    with Server(workers=2) as server:
        yield server


@pytest.fixture
def server(data_folder: Server) -> Server:
    """It runs, started again on the same folder if the test before has ended it."""
    if not data_folder.running:
        data_folder.start()
    return data_folder


def test_port_that_is_taken_is_reported_in_one_sentence(server: Server) -> None:
    """With `SO_REUSEPORT` alone, two servers would share the port without a word."""
    command = [sys.executable, "-m", "redpoll", "serve", "--host", "127.0.0.1", "--port", str(server.port)]
    command += ["--control-port", "0", "--workers", "1", "--data-dir", str(server.folder / "other")]
    environment = {**os.environ, "PYTHONPATH": server.environment()["PYTHONPATH"]}
    second = subprocess.run(
        command, capture_output=True, text=True, timeout=120, env=environment, cwd=server.folder, check=False
    )
    assert second.returncode not in (0, None)
    output = (second.stdout + second.stderr).strip()
    assert str(server.port) in output
    assert "Traceback" not in output
    assert len(output.splitlines()) <= 3, output


async def test_sigterm_closes_every_socket_with_4200_and_ends_with_0_and_the_next_start_finds_the_app_again(
    server: Server,
) -> None:
    sockets = await connect_many(server, 20)
    await subscribe_all(sockets, "ending")
    server.signal(signal.SIGTERM)
    codes = await asyncio.gather(*(socket.until_closed() for socket in sockets))
    assert set(codes) == {4200}
    assert await asyncio.to_thread(server.wait) == 0
    await asyncio.to_thread(server.start)
    (socket,) = await connect_many(server, 1)
    await subscribe_all([socket], "again")
    await socket.close()


async def test_no_child_survives_a_killed_supervisor(server: Server, wait_until: Callable) -> None:
    children = {*server.worker_pids(), server.control_pid, server.redis_pid}
    server.signal(signal.SIGKILL)
    await asyncio.to_thread(server.wait)
    await wait_until(lambda: not any(process(pid) for pid in children), what="the end of all children")
