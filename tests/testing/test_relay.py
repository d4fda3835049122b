import random

from helpers.wire import BINARY, TEXT, frame
from redpoll.testing.relay import take_frames


def test_frames_are_taken_whole_however_the_bytes_come():
    chance = random.Random(1)
    sent = [
        (TEXT, b""),
        (TEXT, b"x" * 125),
        (BINARY, b"y" * 126),
        (TEXT, b"z" * 70_000),
        (TEXT, "ü".encode()),
    ]
    for mask in (None, b"\x01\x02\x03\x04"):
        stream = b"".join(frame(opcode, payload, mask=mask) for opcode, payload in sent)
        buffer, taken, at = bytearray(), [], 0
        while at < len(stream):
            size = chance.choice((1, 2, 3, 1000))
            buffer += stream[at : at + size]
            at += size
            taken += take_frames(buffer)
        assert [(opcode, payload) for _, opcode, payload in taken] == sent
        assert b"".join(whole for whole, _, _ in taken) == stream
        assert not buffer
