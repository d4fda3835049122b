import json

from redpoll import _frame
from redpoll.worker.fallback.lines import BEAT, LineMaker, lines_of


def test_frames_become_lines_in_their_order():
    maker = LineMaker()
    frames = (
        _frame.text(b'{"a":1}') + _frame.text('{"ü":"🎈\\n"}'.encode()) + _frame.ping(b"") + _frame.close(4100, "slow")
    )
    lines = maker.of(frames)
    messages, beat, close, rest = lines.text.decode().split("\n")
    assert (messages[0], json.loads(messages[1:])) == ("a", ['{"a":1}', '{"ü":"🎈\\n"}'])
    assert (beat, close, rest) == ("h", 'c[4100,"slow"]', "")
    assert lines.closing == (4100, "slow")


def test_long_frames_are_read():
    for size in (125, 126, 65535, 65536, 200_000):
        lines = LineMaker().of(_frame.text(b"x" * size) + _frame.text(b"y"))
        assert json.loads(lines.text[1:]) == ["x" * size, "y"]


def test_chunk_has_the_size_in_bytes_and_units_are_those_of_utf_16():
    lines = lines_of('a["ü🎈"]\n'.encode())
    assert lines.chunk == b"c\r\n" + lines.text + b"\r\n"
    assert lines.units == len('a["ü"]\n') + 2
    assert BEAT.units == 2


def test_pongs_are_dropped():
    assert LineMaker().of(_frame.pong(b"x")).text == b""


def test_same_frames_are_made_into_lines_once_until_they_are_forgotten():
    maker = LineMaker()
    frame = _frame.text(b"hello")
    assert maker.of(frame) is maker.of(bytes(bytearray(frame)))
    assert maker.made == 1
    maker.forget()
    maker.of(frame)
    assert maker.made == 2


def test_memory_of_lines_is_bounded():
    maker = LineMaker()
    frames = [_frame.text(b"%d" % number * 50_000) for number in range(100)]
    for frame in frames:
        maker.of(frame)
    maker.of(frames[0])
    assert maker.made == 101
