import asyncio
import threading

from redpoll.testing.recorder import ANYTHING, Published, Recorder


def event(name="e", channel="c", data="1"):
    return Published(name, channel, data)


def test_events_are_found_by_name_channel_and_data():
    recorder = Recorder()
    for one in (event(), event(data="text"), event(name="f"), event(channel="d", data='{"a":1}')):
        recorder.add(one)
    assert len(recorder.matching(None, None)) == 4
    assert len(recorder.matching("e", "c")) == 2
    assert recorder.matching("e", None, {"a": 1}) == [event(channel="d", data='{"a":1}')]
    assert recorder.matching(None, None, "text") == [event(data="text")]
    assert len(recorder.matching(None, None, ANYTHING)) == 4
    recorder.reset()
    assert recorder.all() == []


def test_a_wait_ends_in_another_thread():
    recorder = Recorder()
    adder = threading.Thread(target=lambda: [recorder.add(event(data=str(number))) for number in range(100)])
    adder.start()
    assert recorder.wait(lambda: len(recorder.all()) == 100, 60)
    adder.join()
    assert not recorder.wait(lambda: False, 0.001)
    assert recorder._waits == []


async def test_waits_in_a_loop_end_and_can_be_cancelled():
    recorder = Recorder()
    waiting = [asyncio.ensure_future(recorder.wait_for(lambda: bool(recorder.all()), 60)) for _ in range(3)]
    await asyncio.sleep(0)
    waiting[0].cancel()
    recorder.add(event())
    assert await asyncio.gather(*waiting[1:]) == [True, True]
    assert not await recorder.wait_for(lambda: False, 0.001)
    await asyncio.gather(waiting[0], return_exceptions=True)
    assert recorder._waits == []


def test_a_long_list_is_cut_where_it_is_shown():
    recorder = Recorder()
    for number in range(25):
        recorder.add(event(data="x" * 100 if number == 24 else str(number)))
    shown = recorder.shown()
    assert "… and 5 before these" in shown
    assert "x" * 80 + "…" in shown
