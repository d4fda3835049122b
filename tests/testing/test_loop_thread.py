import threading

import pytest

from redpoll.testing.loop_thread import LoopThread


async def nothing() -> None:
    pass


def test_results_and_errors_come_back():
    thread = LoopThread()
    thread.start(nothing, nothing)
    try:
        assert thread.call(max, 1, 2) == 2
        assert thread.call(lambda: thread.call(threading.current_thread)) is not threading.current_thread()
        with pytest.raises(ZeroDivisionError):
            thread.call(lambda: 1 / 0)
        with pytest.raises(RuntimeError, match="runs already"):
            thread.start(nothing, nothing)
    finally:
        thread.stop()
    thread.stop()
    with pytest.raises(RuntimeError, match="isn't running"):
        thread.call(max, 1, 2)


def test_a_start_that_fails_leaves_no_thread():
    before, closed = threading.active_count(), []

    async def opened() -> None:
        raise OSError("no")

    async def close() -> None:
        closed.append(True)

    thread = LoopThread()
    with pytest.raises(OSError, match="no"):
        thread.start(opened, close)
    assert (threading.active_count(), closed, thread.running) == (before, [True], False)
