"""Descriptors that travel between two processes' ends of a passage."""

import os
import socket

import pytest

from redpoll import handover


@pytest.fixture
async def ends():
    """Two ends of one way, and what each has received or lost."""
    left_socket, right_socket = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    left_got, right_got, lost = [], [], []
    left = handover.Passage(left_socket, lambda *what: left_got.append(what), lambda: lost.append("left"))
    right = handover.Passage(right_socket, lambda *what: right_got.append(what), lambda: lost.append("right"))
    yield left, right, left_got, right_got, lost
    for descriptor, *_ in left_got + right_got:
        os.close(descriptor)
    left.close()
    right.close()


def pipe_end() -> tuple[int, int]:
    reading, writing = os.pipe()
    return reading, writing


async def test_a_descriptor_arrives_with_its_peer_and_the_bytes_read_so_far(ends, wait_until):
    left, _right, _left_got, right_got, _lost = ends
    reading, writing = pipe_end()
    assert left.send(writing, ("10.1.2.3", 4711), b"GET / HTTP/1.1\r\n\r\nrest\n")
    await wait_until(lambda: right_got)
    descriptor, peer, data, secure = right_got[0]
    assert peer == ("10.1.2.3", 4711)
    assert not secure
    assert data == b"GET / HTTP/1.1\r\n\r\nrest\n"
    os.write(descriptor, b"through")
    assert os.read(reading, 10) == b"through"
    os.close(reading)


async def test_what_was_handed_over_is_open_only_at_the_other_end(ends, wait_until):
    left, _right, _left_got, right_got, _lost = ends
    reading, writing = pipe_end()
    left.send(writing, ("::1", 1), b"")
    await wait_until(lambda: right_got)
    os.close(right_got.pop()[0])
    assert os.read(reading, 1) == b""  # end of file: nobody holds the writing end any more
    os.close(reading)


async def test_many_wait_in_order_while_the_other_end_is_slow(ends, wait_until):
    left, _right, _left_got, right_got, _lost = ends
    readers = []
    for number in range(100):
        reading, writing = pipe_end()
        readers.append(reading)
        assert left.send(writing, ("h", number), b"x" * 60_000)
    await wait_until(lambda: len(right_got) == 100)
    assert [peer[1] for _descriptor, peer, *_ in right_got] == list(range(100))
    for reading in readers:
        os.close(reading)


async def test_both_directions_share_one_way(ends, wait_until):
    _left, right, left_got, _right_got, _lost = ends
    reading, writing = pipe_end()
    right.send(writing, ("back", 2), b"GET /app/k HTTP/1.1\r\n")
    await wait_until(lambda: left_got)
    assert left_got[0][1:] == (("back", 2), b"GET /app/k HTTP/1.1\r\n", False)
    os.close(reading)


async def test_the_loss_of_one_end_is_told_to_the_other_and_nothing_leaks(ends, wait_until):
    left, right, _left_got, _right_got, lost = ends
    right.close()
    await wait_until(lambda: lost)
    assert lost == ["left"]
    reading, writing = pipe_end()
    assert not left.send(writing, ("h", 1), b"")
    assert os.read(reading, 1) == b""
    os.close(reading)


async def test_more_than_a_packet_is_refused(ends):
    left, *_ = ends
    reading, writing = pipe_end()
    assert not left.send(writing, ("h", 1), b"x" * handover.MAX_PACKET_BYTES)
    os.close(reading)


async def test_nobody_listens(tmp_path):
    assert handover.connect(str(tmp_path / "none.sock"), lambda *_: None, lambda: None) is None
