"""How the server ends: SIGTERM closes connections with 4200, children die with the supervisor. A port that is taken is
reported in one sentence."""

import asyncio
import os
import signal
import subprocess
import sys
import time

from server import Server, processes
from wire import connect_many, subscribe_all


async def test_sigterm_closes_every_socket_with_4200_and_ends_with_0() -> None:
    with Server(workers=2) as server:
        sockets = await connect_many(server, 20)
        await subscribe_all(sockets, "ending")
        server.signal(signal.SIGTERM)
        codes = await asyncio.gather(*(socket.until_closed() for socket in sockets))
        assert set(codes) == {4200}
        assert await asyncio.to_thread(server.wait) == 0


async def test_no_child_survives_a_killed_supervisor() -> None:
    with Server(workers=2) as server:
        children = {*server.worker_pids(), server.control_pid, server.redis_pid}
        server.signal(signal.SIGKILL)
        await asyncio.to_thread(server.wait)
        deadline = time.monotonic() + 60
        while left := children & {process.pid for process in processes()}:
            assert time.monotonic() < deadline, f"still running: {left}"
            await asyncio.sleep(0.02)


async def test_second_start_on_the_same_folder_finds_its_app_and_redis_again() -> None:
    with Server(workers=1) as server:
        first = server.port
        server.stop()
        server.start()
        assert server.port != first or server.port
        (socket,) = await connect_many(server, 1)
        await subscribe_all([socket], "again")
        await socket.close()


def test_port_that_is_taken_is_reported_in_one_sentence() -> None:
    """With `SO_REUSEPORT` alone, two servers would share the port without a word."""
    with Server(workers=1) as server:
        command = [
            sys.executable,
            "-m",
            "redpoll",
            "serve",
            "--host",
            "127.0.0.1",
            "--port",
            str(server.port),
        ]
        command += ["--control-port", "0", "--workers", "1", "--data-dir", str(server.folder / "other")]
        environment = {**os.environ, "PYTHONPATH": server.environment()["PYTHONPATH"]}
        second = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=120,
            env=environment,
            cwd=server.folder,
            check=False,
        )
        assert second.returncode not in (0, None)
        output = (second.stdout + second.stderr).strip()
        assert str(server.port) in output
        assert "Traceback" not in output
        assert len(output.splitlines()) <= 3, output
