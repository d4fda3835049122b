"""The pipe between supervisor and child, and that a child dies with its parent."""

import asyncio
import os
import select
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from redpoll.config.config import Settings
from redpoll.ipc.child_pipe import ChildPipe, ChildPipeClosed
from redpoll.ipc.messages import FROM_CHILD, TO_CONTROL, Fatal, FromChild, Inbox, LivingWorkers, Start, Stop, ToControl

START = Start(
    role="worker",
    number=1,
    run="0123456789ab",
    process=3,
    redis_url="unix:///tmp/r.sock",
    listen_fd=7,
    requests_path="/tmp/c.sock",
    data_dir="/tmp/data",
    settings=Settings(port=0, app_id="1", app_key="k", app_secret="s", tls_port=0, trusted_proxies=("::1",)),
    tls_fd=8,
)


@pytest.fixture
def ends():
    ours, theirs = socket.socketpair()
    pair = ChildPipe(ours.detach()), ChildPipe(theirs.detach())
    yield pair
    for child_pipe in pair:
        child_pipe.close()


class Received:
    """Attaches to a pipe and collects the messages."""

    def __init__(self, child_pipe: ChildPipe, inbox: Inbox = FROM_CHILD) -> None:
        self.messages: list[FromChild | ToControl] = []
        self.eofs = 0
        child_pipe.attach(asyncio.get_running_loop(), inbox, self.messages.append, self._eof)

    def _eof(self) -> None:
        self.eofs += 1


def test_first_message_arrives_complete(ends):
    ours, theirs = ends
    ours.send(START)
    assert theirs.read_start() == START


def test_supervisor_that_ended_before_the_first_message_is_an_error(ends):
    ours, theirs = ends
    ours.close()
    with pytest.raises(ChildPipeClosed):
        theirs.read_start()


async def test_message_that_arrives_with_the_first_one_is_not_lost(ends, wait_until):
    ours, theirs = ends
    ours.send(START)
    ours.send(LivingWorkers([1], 1))
    theirs.read_start()
    received = Received(theirs, TO_CONTROL)
    await wait_until(lambda: received.messages == [LivingWorkers([1], 1)])


async def test_attached_end_answers_a_ping_and_shows_no_message(ends, wait_until):
    ours, theirs = ends
    at_ours = Received(ours)
    ours.ping()
    ours.ping()
    assert ours.pong_due
    theirs_received = Received(theirs)
    await wait_until(lambda: not ours.pong_due)
    assert at_ours.messages == theirs_received.messages == []
    theirs.ping()
    await wait_until(lambda: not theirs.pong_due)


async def test_many_messages_arrive_complete_and_in_order(ends, wait_until):
    ours, theirs = ends
    Received(ours)
    sent = [Fatal(f"{number} {'ü' * 500}") for number in range(5_000)]  # far more than a socket's buffer
    for message in sent:
        ours.send(message)
    received = Received(theirs)
    await wait_until(lambda: len(received.messages) == len(sent))
    assert received.messages == sent


async def test_end_of_file_is_reported_once_after_the_last_message(ends, wait_until):
    ours, theirs = ends
    received = Received(ours)
    Received(theirs)
    theirs.send(Fatal("no disk"))
    theirs.close()
    await wait_until(lambda: received.eofs)
    assert received.messages == [Fatal("no disk")]
    assert received.eofs == 1


async def test_malformed_message_is_refused_with_a_sentence_and_the_next_one_counts(wait_until):
    raw, theirs = socket.socketpair()
    pipe = ChildPipe(theirs.detach())
    received = Received(pipe)
    with raw, capture_logs() as logs:
        raw.sendall(b'nonsense\n{"type":"Fatal"}\n{"type":"Fatal","reason":"no disk"}\n')
        await wait_until(lambda: received.messages)
    assert received.messages == [Fatal("no disk")]
    assert [(line["event"], line["log_level"]) for line in logs] == [("message on the child pipe refused", "error")] * 2
    pipe.close()


async def test_read_rest_delivers_messages_before_the_loop_does(ends):
    ours, theirs = ends
    received = Received(ours)
    theirs.send(Fatal("no disk"))
    theirs.close()
    ours.read_rest()
    assert received.messages == [Fatal("no disk")]
    assert received.eofs == 1


async def test_sending_to_a_closed_end_is_no_error(ends, wait_until):
    ours, theirs = ends
    received = Received(ours)
    theirs.close()
    ours.send(Stop())
    await wait_until(lambda: received.eofs)
    ours.send(Stop())


def test_armed_child_dies_with_its_parent_and_ignores_terminal_signals():
    parent = (
        "import subprocess, sys, time\n"
        "from redpoll.ipc.child_pipe import arm_child\n"
        "child = subprocess.Popen(['sleep', '60'], preexec_fn=arm_child)\n"
        "print(child.pid, flush=True)\n"
        "time.sleep(60)\n"
    )
    with subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        child = os.pidfd_open(pid)
        status = Path(f"/proc/{pid}/status").read_text()
        ignored = next(line for line in status.splitlines() if line.startswith("SigIgn"))
        for number in (signal.SIGINT, signal.SIGHUP):
            assert int(ignored.split()[1], 16) & 1 << (number - 1)
        process.kill()
    # A pidfd becomes readable when its process ends.
    readable, _, _ = select.select([child], [], [], 60)
    os.close(child)
    assert readable
