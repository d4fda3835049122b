"""One place in the tree of processes: filled, vacant, filled again."""

import asyncio
import os
import signal
import socket
import sys

import pytest

from redpoll.child import Child

SLEEPS = [sys.executable, "-c", "import time; time.sleep(60)"]


@pytest.fixture
def post():
    made = Child("worker 0", lambda: None)
    yield made
    made.signal(signal.SIGKILL)


async def ended(post: Child, wait_until) -> int:
    """The exit code, once the process is gone."""
    codes = []
    await wait_until(lambda: (code := post.take_exit_code()) is not None and not codes.append(code))
    return codes[0]


async def test_the_exit_code_is_told_once(post, wait_until):
    post.fill([sys.executable, "-c", "import sys; sys.exit(7)"])
    assert not post.vacant.is_set()
    assert await ended(post, wait_until) == 7
    assert post.vacant.is_set()
    assert post.take_exit_code() is None


async def test_a_signal_reaches_the_process_and_shows_in_its_code(post, wait_until):
    post.fill(SLEEPS)
    post.signal(signal.SIGKILL)
    assert await ended(post, wait_until) == -signal.SIGKILL
    post.signal(signal.SIGKILL)  # nobody is there: nobody else is hit


async def test_the_pause_doubles_with_every_quick_death_up_to_5_s(post, wait_until):
    pauses = []
    for _ in range(8):
        post.fill(["true"])
        await ended(post, wait_until)
        pauses.append(post.restart_after_s())
    assert pauses == [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0]


async def test_a_long_life_resets_the_pause(post, wait_until, monkeypatch):
    now_s = 0.0
    monkeypatch.setattr("redpoll.child.monotonic", lambda: now_s)

    async def lives_until(then_s: float) -> None:
        nonlocal now_s
        post.fill(["true"])
        now_s = then_s
        await ended(post, wait_until)

    for _ in range(3):
        await lives_until(now_s)
    assert post.restart_after_s() == 0.4
    await lives_until(10.0)
    assert post.restart_after_s() == 0.1


async def test_one_who_does_not_go_in_time_is_killed(post, wait_until):
    post.fill(SLEEPS)
    watching = asyncio.create_task(ended(post, wait_until))
    await post.wait_vacant(0.0)
    assert await watching == -signal.SIGKILL


async def test_an_empty_post_is_vacant_and_hears_nothing(post):
    await post.wait_vacant(0.0)
    post.tell({"drain": True})
    assert post.take_exit_code() is None


async def test_listening_sockets_are_passed_on_until_they_are_closed(wait_until):
    with socket.create_server(("127.0.0.1", 0)) as plain, socket.create_server(("127.0.0.1", 0)) as tls:
        post = Child("worker 0", lambda: None, plain, tls)
        assert post.listening_fds() == (plain.fileno(), tls.fileno())
        post.stop_listening()
        assert plain.fileno() == tls.fileno() == -1
    assert Child("redis", lambda: None).listening_fds() == ()


async def test_a_process_group_of_its_own(post, wait_until, tmp_path):
    told = tmp_path / "group"
    post.fill(
        [sys.executable, "-c", f"import os; open({str(told)!r}, 'w').write(str(os.getpgrp()))"],
        process_group=0,
    )
    assert await ended(post, wait_until) == 0
    assert int(told.read_text()) != os.getpgrp()
