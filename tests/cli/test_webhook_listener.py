"""`redpoll webhook listen`, with a whole server."""

import asyncio
import json
import os
import signal
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from helpers.pulled_server import acknowledge, occupying, pull, pulled_server
from helpers.wire import Api
from redpoll.cli import main


@pytest.fixture(scope="module")
def server():
    with pulled_server() as running:
        yield running


@pytest.fixture
async def occupy(server):
    async with occupying(server) as occupied:
        yield occupied


def listening(server, *words):
    """The process of `redpoll webhook listen` with these words."""
    url = f"http://127.0.0.1:{server.port}/apps/{server.app_id}"
    return asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "redpoll", "webhook", "listen", "--url", url, "--json", *words),
        env={**os.environ, "REDPOLL_TOKEN": server.token},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )


async def test_listen_acknowledges_each_when_its_command_ends(server, occupy, tmp_path):
    """With several jobs, all waited for the slowest command of those that came together."""
    first, release = tmp_path / "first", tmp_path / "release"
    os.mkfifo(release)
    # Of two commands that run at the same time, the one that makes the folder waits.
    script = f"mkdir {first} && cat {release}; cat > /dev/null"
    listener = await listening(server, "--jobs", "2", "--", "sh", "-c", script)
    try:
        async with asyncio.timeout(100):
            for _ in range(2):
                await occupy()
            line = json.loads(await listener.stdout.readline())
            assert (first.exists(), line["exit"]) == (True, 0)
            words = ["webhook", "list", server.app_id, "--json", "--data-dir", str(server.folder / "data")]
            left = 2
            while left > 1:
                shown = await asyncio.to_thread(CliRunner().invoke, main, words)
                (left,) = (one["waiting"] for one in json.loads(shown.stdout))
            release.write_bytes(b"")
            other = json.loads(await listener.stdout.readline())
            assert (other["id"] != line["id"], other["exit"]) == (True, 0)
            listener.send_signal(signal.SIGINT)
            assert await listener.wait() == 0
    finally:
        if listener.returncode is None:
            listener.kill()


async def test_second_signal_ends_the_command_and_what_it_has_started(server, occupy, tmp_path, wait_until):
    """The children of a shell went on, and nobody read their ends."""
    pids = tmp_path / "pids"
    script = f"sleep 1000 & echo $$ $! > {pids}.new; mv {pids}.new {pids}; wait"
    listener = await listening(server, "--", "sh", "-c", script)
    try:
        async with asyncio.timeout(100):
            await occupy()
            await wait_until(pids.exists)
            shell, child = map(int, pids.read_text().split())
            listener.send_signal(signal.SIGINT)
            assert b"listening" in await listener.stderr.readline()
            assert b"waiting for the commands" in await listener.stderr.readline()
            listener.send_signal(signal.SIGINT)
            assert await listener.wait() == 130
            await wait_until(lambda: not any(is_running(pid) for pid in (shell, child)))
    finally:
        if listener.returncode is None:
            listener.kill()
    async with Api(server) as api:
        (delivery,) = await pull(api, wait="60")
        await acknowledge(api, [delivery])


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


async def test_listen_says_in_one_sentence_that_its_command_cannot_be_started(server, occupy, tmp_path):
    script = tmp_path / "handle"
    script.write_text("#!/nowhere/interpreter\n")
    script.chmod(0o755)
    listener = await listening(server, "--", str(script))
    await occupy()
    _, said = await listener.communicate()
    assert listener.returncode == 2
    _, sentence = said.decode().splitlines()
    assert sentence.endswith(f"{script} can't be started: No such file or directory")
    async with Api(server) as api:
        (delivery,) = await pull(api, wait="60")
        await acknowledge(api, [delivery])


async def test_listen_runs_a_command_until_it_ends_well_and_stops_at_a_signal(server, occupy, tmp_path):
    number = "$HTTP_X_SERVICE_ATTEMPT"
    script = f"cat > {tmp_path}/$HTTP_X_SERVICE_DELIVERY.{number}; test {number} != 1 || exit 3"
    listener = await listening(server, "--", "sh", "-c", script)
    try:
        async with asyncio.timeout(100):
            channel = await occupy()
            lines = [json.loads(await listener.stdout.readline()) for _ in range(2)]
            listener.send_signal(signal.SIGINT)
            assert await listener.wait() == 0
    finally:
        if listener.returncode is None:
            listener.kill()
    assert [(line["channel"], line["attempt"], line["exit"]) for line in lines] == [(channel, 1, 3), (channel, 2, 0)]
    body = json.loads((tmp_path / f"{lines[0]['id']}.2").read_text())
    assert (body["event"], body["data"]["channel"]) == ("channel.occupied", channel)
