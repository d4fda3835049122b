"""One child of the supervisor: started, ended, started again."""

import asyncio
import os
import signal
import socket
import sys

import pytest

from redpoll.host.child import Child
from redpoll.ipc.child_pipe import ChildPipe
from redpoll.ipc.messages import Stop

SLEEPS = [sys.executable, "-c", "import time; time.sleep(60)"]


@pytest.fixture
def child():
    child = Child("worker 0", lambda: None)
    yield child
    child.signal(signal.SIGKILL)


async def ended(child: Child, wait_until) -> int:
    """Waits for the end of the process and returns its exit code."""
    codes = []
    await wait_until(lambda: (code := child.take_exit_code()) is not None and not codes.append(code))
    return codes[0]


async def test_exit_code_is_returned_once(child, wait_until):
    child.spawn([sys.executable, "-c", "import sys; sys.exit(7)"])
    assert not child.ended.is_set()
    assert await ended(child, wait_until) == 7
    assert child.ended.is_set()
    assert child.take_exit_code() is None


async def test_signal_reaches_the_process_and_shows_in_its_exit_code(child, wait_until):
    child.spawn(SLEEPS)
    child.signal(signal.SIGKILL)
    assert await ended(child, wait_until) == -signal.SIGKILL
    child.signal(signal.SIGKILL)  # without a process it does nothing


async def test_restart_delay_doubles_with_every_quick_death_up_to_5_s(child, wait_until, monkeypatch):
    monkeypatch.setattr("redpoll.host.child.monotonic", lambda: 0.0)
    pauses = []
    for _ in range(8):
        child.spawn(["true"])
        await ended(child, wait_until)
        pauses.append(child.restart_delay_s())
    assert pauses == [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0]


async def test_long_life_resets_the_restart_delay(child, wait_until, monkeypatch):
    now_s = 0.0
    monkeypatch.setattr("redpoll.host.child.monotonic", lambda: now_s)

    async def lives_until(then_s: float) -> None:
        nonlocal now_s
        child.spawn(["true"])
        now_s = then_s
        await ended(child, wait_until)

    for _ in range(3):
        await lives_until(now_s)
    assert child.restart_delay_s() == 0.4
    await lives_until(10.0)
    assert child.restart_delay_s() == 0.1


async def test_process_that_does_not_end_in_time_is_killed(child, wait_until):
    child.spawn(SLEEPS)
    watching = asyncio.create_task(ended(child, wait_until))
    await child.wait_ended(0.0)
    assert await watching == -signal.SIGKILL


async def test_child_without_a_process_has_ended_and_ignores_messages(child):
    await child.wait_ended(0.0)
    child.send(Stop())
    assert child.take_exit_code() is None


async def test_silence_counts_from_the_first_answer_or_from_ready(child):
    ours, theirs = socket.socketpair()
    with theirs:
        child.connect(ChildPipe(ours.detach()))
        assert [child.ping() for _ in range(3)] == [0, 0, 0]
        assert child.unanswered_at_start == 2
        child.ready = True
        assert [child.ping() for _ in range(3)] == [1, 2, 3]
        child.child_pipe.pong_due = False
        assert [child.ping() for _ in range(3)] == [0, 1, 2]
        assert child.unanswered_at_start == 2
        child.child_pipe.close()


async def test_listening_sockets_are_inherited_until_they_are_closed(wait_until):
    with socket.create_server(("127.0.0.1", 0)) as plain, socket.create_server(("127.0.0.1", 0)) as tls:
        child = Child("worker 0", lambda: None, plain, tls)
        assert child.listening_fds() == (plain.fileno(), tls.fileno())
        child.close_listeners()
        assert plain.fileno() == tls.fileno() == -1
    assert Child("redis", lambda: None).listening_fds() == ()


async def test_process_can_get_its_own_process_group(child, wait_until, tmp_path):
    output = tmp_path / "group"
    child.spawn(
        [sys.executable, "-c", f"import os; open({str(output)!r}, 'w').write(str(os.getpgrp()))"],
        process_group=0,
    )
    assert await ended(child, wait_until) == 0
    assert int(output.read_text()) != os.getpgrp()
