"""`redpoll debug`: everything about an app or a connection, from all workers, until it ends by itself."""

import asyncio
import json
import signal
import subprocess
import sys
import time

import pytest

from helpers.server import Server
from helpers.wire import Socket


@pytest.fixture(scope="module")
def server():
    """Two workers, whose lines come together."""
    with Server(workers=2, node_name="web-1") as running:
        yield running


@pytest.fixture
def where(server):
    return ("--data-dir", str(server.folder / "data"))


class Following:
    """`redpoll debug … --json` as a process. `seen` has its lines so far."""

    def __init__(self, server, *words: str) -> None:
        command = [
            sys.executable,
            "-m",
            "redpoll",
            "debug",
            *words,
            "--data-dir",
            str(server.folder / "data"),
            "--json",
        ]
        self.process = subprocess.Popen(
            command,
            env=server.environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
        self.seen: list[dict] = []
        # It says so when the server has begun.
        assert "Ctrl-C ends it" in self.process.stderr.readline()

    async def until(self, found) -> dict:
        """The first line, of those seen and of those to come, for which `found` is true."""
        at = 0
        while True:
            if at == len(self.seen):
                self.seen.append(json.loads(await asyncio.to_thread(self.process.stdout.readline)))
            if found(self.seen[at]):
                return self.seen[at]
            at += 1

    def interrupt(self) -> int:
        self.process.send_signal(signal.SIGINT)
        self.process.communicate(timeout=60)
        return self.process.returncode


async def test_lines_of_all_workers_and_of_requests_come_until_ctrl_c(typed, server, where):
    before_s = time.time()
    following = await asyncio.to_thread(Following, server, "--app", server.app_id, "--for", "5m")
    (running,) = json.loads((await asyncio.to_thread(typed, "debug", "--json", *where)).stdout)
    assert (running["app"], running["socket"]) == (server.app_id, "")
    assert before_s <= running["until"] - 300 <= time.time()
    # The workers take the record in their own time, and answer this command after it.
    assert (await asyncio.to_thread(typed, "connections", "list", server.app_id, *where)).exit_code == 0
    clients: list[Socket] = []
    while len({line.get("origin") for line in following.seen}) < 2:
        clients.append(await Socket.connect(server))
        await following.until(lambda line: line.get("socket") == clients[-1].socket_id)
        assert len(clients) < 200
    assert {line["origin"] for line in following.seen} == {"web-1 worker 0", "web-1 worker 1"}
    await clients[0].subscribe("private-room")
    published = await asyncio.to_thread(
        typed, "publish", "private-room", "greeting", "hello", "--app", server.app_id, *where
    )
    assert published.exit_code == 0, published.stderr
    sent = await following.until(lambda line: line["what"] == "event sent")
    assert (sent["event_name"], sent["data"], sent["sockets"]) == ("greeting", "hello", 1)
    answered = await following.until(lambda line: line["what"] == "request answered")
    assert (answered["origin"], answered["status"], answered["method"]) == ("web-1 control", 200, "POST")
    assert "auth_signature=…" in answered["query"]
    assert "greeting" in answered["body"]
    assert await asyncio.to_thread(following.interrupt) == 130
    assert json.loads((await asyncio.to_thread(typed, "debug", "--json", *where)).stdout) == []
    assert 'what="request answered"' in (server.folder / "err").read_text()
    for client in clients:
        client.abort()


async def test_one_connection_is_found_by_its_id(typed, server, where):
    client, other = await Socket.connect(server), await Socket.connect(server)
    following = await asyncio.to_thread(Following, server, "--socket", client.socket_id, "--for", "5m")
    # As above.
    assert (await asyncio.to_thread(typed, "connections", "list", server.app_id, *where)).exit_code == 0
    # Lines of the other one would come before the last line of this one.
    await other.subscribe("room")
    await client.subscribe("room")
    await following.until(lambda line: line["what"] == "subscribed")
    assert {line["socket"] for line in following.seen} == {client.socket_id}
    assert await asyncio.to_thread(following.interrupt) == 130
    client.abort()
    other.abort()


def test_it_ends_by_itself(server):
    following = Following(server, "--app", server.app_id, "--for", "1s")
    following.process.communicate(timeout=60)
    assert following.process.returncode == 0


def test_it_is_ended_by_another_command(typed, server, where):
    begun = typed("debug", "--app", server.app_id, "--no-follow", *where)
    assert begun.stdout.startswith(f"app {server.app_id} (app {server.app_id}): until 20")
    ended = typed("debug", "--off", *where)
    assert ended.stdout.startswith(f"app {server.app_id}")
    assert typed("debug", *where).stderr == "nothing is being debugged\n"


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("--app", "nosuchapp"), 1, "no app with the id nosuchapp"),
        (("--socket", "1.1"), 1, "no connection with the socket id 1.1"),
        (("--socket", "abc"), 1, "is no socket id"),
        (("--app", "4711", "--for", "soon"), 2, "--for: must be a number followed by"),
        (("--app", "4711", "--for", "2d"), 2, "at most 24h"),
    ],
)
def test_what_is_wrong_is_said(typed, where, words, code, said):
    result = typed("debug", *words, *where)
    assert (result.exit_code, said in result.stderr) == (code, True), result.stderr


def test_without_a_server_it_is_refused(typed, app_id):
    result = typed("debug", "--app", app_id)
    assert (result.exit_code, "needs a running server" in result.stderr) == (1, True)
