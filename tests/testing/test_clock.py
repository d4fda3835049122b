import pytest

from redpoll.testing.clock import Clock
from redpoll.testing.loop_thread import LoopThread


@pytest.fixture
def thread():
    running = LoopThread()

    async def nothing() -> None:
        pass

    running.start(nothing, nothing)
    yield running
    running.stop()


def test_timers_are_called_in_order_when_time_is_advanced(thread):
    clock, called = Clock(thread), []
    began = clock.now()

    def set_timers() -> None:
        for seconds in (3000, 1000, 2000):
            clock.call_later(seconds, lambda seconds=seconds: called.append((seconds, clock.now() - began)))
        clock.call_later(1500, lambda: called.append("cancelled")).cancel()
        clock.call_later(500, lambda: clock.call_later(500, lambda: called.append("nested")))

    thread.call(set_timers)
    clock.advance(2500)
    assert [entry if isinstance(entry, str) else entry[0] for entry in called] == [1000, "nested", 2000]
    # A timer sees its own time, not the end of the advance.
    assert 2000 <= called[-1][1] < 2500
    clock.advance(500)
    assert called[-1][0] == 3000


def test_time_does_not_go_back(thread):
    clock = Clock(thread)
    with pytest.raises(ValueError, match="can't go back by 1 s"):
        clock.advance(-1)


def test_timers_are_called_without_an_advance_too(thread):
    clock = Clock(thread)
    import threading

    rung = threading.Event()
    thread.call(clock.call_later, 0.001, rung.set)
    assert rung.wait(60)
    thread.call(clock.stop)
