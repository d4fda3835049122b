"""What hiredis has parsed, in order, to those who wait for it."""

from collections import deque

import hiredis
import pytest

from redpoll._replies import Taker, hand_out

NOTHING = object()
MESSAGE = b">3\r\n$%d\r\n%b\r\n$1\r\nt\r\n$1\r\np\r\n"


class Connection:
    """Bytes from Redis, and what came of them."""

    def __init__(self, data: bytes, calls: int = 0):
        reader = hiredis.Reader(notEnoughData=NOTHING)
        reader.feed(data)
        self.gets = reader.gets
        self.lost = False
        self.seen = []
        self.pending = deque(self.taker(n) for n in range(calls))

    def taker(self, number):
        return lambda reply: self.seen.append((number, reply))

    def message(self, topic, payload):
        self.seen.append((topic, payload))

    def pushed(self, push):
        self.seen.append(("pushed", *push))

    def failed(self, reply):
        self.seen.append(("failed", str(reply)))

    def hand_out(self, most=100):
        return hand_out(self, self.gets, NOTHING, self.pending, self.message, most)


def message(kind=b"message"):
    return MESSAGE % (len(kind), kind)


@pytest.mark.parametrize("kind", [b"message", b"smessage"])
def test_replies_and_messages_come_in_order(kind):
    connection = Connection(b":1\r\n" + message(kind) + b"$2\r\nok\r\n_\r\n", calls=3)
    assert not connection.hand_out()
    assert connection.seen == [(0, 1), (b"t", b"p"), (1, b"ok"), (2, None)]
    assert not connection.pending


def test_other_pushes_are_told_apart():
    pushes = (b">3\r\n$9\r\nsubscribe\r\n$1\r\nt\r\n:1\r\n", b">1\r\n$7\r\nmessage\r\n", b">0\r\n")
    connection = Connection(b"".join(pushes))
    assert not connection.hand_out()
    assert connection.seen == [("pushed", b"subscribe", b"t", 1), ("pushed", b"message"), ("pushed",)]


def test_an_error_and_a_reply_without_a_call_fail():
    connection = Connection(b"-ERR no\r\n:1\r\n:2\r\n", calls=1)
    connection.hand_out()
    assert connection.seen == [("failed", "ERR no"), (0, 1), ("failed", "2")]


def test_no_more_than_asked_for_at_once():
    connection = Connection(b":1\r\n" * 5, calls=5)
    assert connection.hand_out(2)
    assert [number for number, _ in connection.seen] == [0, 1]
    assert connection.hand_out(2)
    assert not connection.hand_out(2)
    assert [number for number, _ in connection.seen] == [0, 1, 2, 3, 4]


def test_nothing_comes_after_the_connection_is_lost():
    connection = Connection(b":1\r\n:2\r\n")
    taken = []

    def lose(reply):
        taken.append(reply)
        connection.lost = True

    connection.pending.extend([lose, taken.append])
    assert not connection.hand_out()
    assert taken == [1]


def test_what_a_call_raises_is_passed_on_and_the_next_one_goes_on():
    connection = Connection(b":1\r\n:2\r\n", calls=2)

    def raises(reply):
        raise ValueError(reply)

    connection.pending[0] = raises
    with pytest.raises(ValueError, match="1"):
        connection.hand_out()
    assert not connection.hand_out()
    assert connection.seen == [(1, 2)]


def test_what_is_not_resp_is_hiredis_error():
    with pytest.raises(hiredis.ProtocolError):
        Connection(b"?\r\n").hand_out()


def test_a_taker_without_a_way_to_take_says_so():
    connection = Connection(b":1\r\n")
    connection.pending.append(Taker())
    with pytest.raises(NotImplementedError):
        connection.hand_out()
