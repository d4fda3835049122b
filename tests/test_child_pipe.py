"""The line between supervisor and child, and what holds a child to its parent's life."""

import asyncio
import os
import select
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from redpoll.child_pipe import ChildPipe, ChildPipeClosed, Start
from redpoll.config import Settings

START = Start(
    role="worker",
    number=1,
    run="0123456789ab",
    k=3,
    redis_url="unix:///tmp/r.sock",
    listen_fd=7,
    handover_path="/tmp/h.sock",
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


class Heard:
    """Attaches to a leash and keeps what comes."""

    def __init__(self, child_pipe: ChildPipe) -> None:
        self.messages: list[dict] = []
        self.eofs = 0
        child_pipe.attach(asyncio.get_running_loop(), self.messages.append, self._eof)

    def _eof(self) -> None:
        self.eofs += 1


def test_the_first_message_says_all_that_a_child_needs(ends):
    ours, theirs = ends
    ours.tell(START)
    assert theirs.read_start() == START


def test_a_supervisor_that_is_gone_before_it_spoke_is_an_error(ends):
    ours, theirs = ends
    ours.close()
    with pytest.raises(ChildPipeClosed):
        theirs.read_start()


async def test_what_came_together_with_the_first_message_is_not_lost(ends, wait_until):
    ours, theirs = ends
    ours.tell(START)
    ours.tell({"alive": [1], "greatest": 1})
    theirs.read_start()
    heard = Heard(theirs)
    await wait_until(lambda: heard.messages == [{"alive": [1], "greatest": 1}])


async def test_messages_arrive_whole_and_in_order_however_many(ends, wait_until):
    ours, theirs = ends
    Heard(ours)
    sent = [{"n": number, "text": "ü" * 500} for number in range(5_000)]  # far more than a socket's buffer
    for message in sent:
        ours.tell(message)
    heard = Heard(theirs)
    await wait_until(lambda: len(heard.messages) == len(sent))
    assert heard.messages == sent


async def test_the_end_of_the_other_side_is_told_once_after_its_last_words(ends, wait_until):
    ours, theirs = ends
    heard = Heard(ours)
    Heard(theirs)
    theirs.tell({"fatal": "no disk"})
    theirs.close()
    await wait_until(lambda: heard.eofs)
    assert heard.messages == [{"fatal": "no disk"}]
    assert heard.eofs == 1


async def test_the_rest_can_be_read_before_the_loop_comes_to_it(ends):
    ours, theirs = ends
    heard = Heard(ours)
    theirs.tell({"fatal": "no disk"})
    theirs.close()
    ours.read_rest()
    assert heard.messages == [{"fatal": "no disk"}]
    assert heard.eofs == 1


async def test_telling_one_who_is_gone_is_no_error(ends, wait_until):
    ours, theirs = ends
    heard = Heard(ours)
    theirs.close()
    ours.tell({"drain": True})
    await wait_until(lambda: heard.eofs)
    ours.tell({"drain": True})


def test_an_armed_child_dies_with_its_parent_and_ignores_what_a_terminal_sends():
    parent = (
        "import subprocess, sys, time\n"
        "from redpoll.child_pipe import arm_child\n"
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
    readable, _, _ = select.select([child], [], [], 10)
    os.close(child)
    assert readable
