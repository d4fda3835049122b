"""A connection whose request is to read a channel. tests/worker/streams has whole servers."""

from types import SimpleNamespace

import pytest

from redpoll.http.connection import State
from redpoll.http.messages import AUTHENTICATED, HTTP_1_0
from redpoll.http.reader import ParsedRequest
from redpoll.worker.ingress.stream_requests import ReadingConnection
from redpoll.worker.streams.asked import asked_of


class Stream:
    unsent_bytes = 0
    is_http = True

    def __init__(self) -> None:
        self.written: list[bytes] = []
        self.ended: list[bytes] = []

    def write_http(self, response: bytes) -> None:
        self.written.append(response)

    def end_http(self, response: bytes = b"") -> None:
        self.ended.append(response)

    def resume_reading(self) -> None:
        pass


class Connection(ReadingConnection):
    def unanswered(self, sent: bool) -> None:
        self.stream.write_http(b"unanswered %d" % sent)


@pytest.fixture
def connection() -> Connection:
    return connection_of()


def connection_of(**more) -> Connection:
    more.setdefault("forget_reader", lambda stream: None)
    server = SimpleNamespace(table=None, idle={}, draining=False, reading_bytes=0, **more)
    return Connection(server, Stream(), "127.0.0.1", 0)


def begun(connection: Connection, flags: int = 0):
    request = ParsedRequest(flags, b"GET", b"/apps/1/channels/c/stream", [], [], b"")
    asked = asked_of(request)
    owner = SimpleNamespace(left=lambda reader: None, addresses=SimpleNamespace(leave=lambda slot: None))
    return connection.read_channel(asked, request, owner)


def test_connection_waits_for_its_reader(connection):
    reader = begun(connection)
    assert connection.waiting is reader
    assert connection.state is State.ANSWER
    # A client that sends no more has left.
    assert not connection.ended()
    connection.gone()
    assert reader.state.name == "OVER"


def test_control_may_answer_instead(connection):
    reader = begun(connection)
    reader.answered(0, b"HTTP/1.1 401 Unauthorized\r\n\r\n")
    assert connection.stream.written[0].startswith(b"HTTP/1.1 401 Unauthorized\r\nX-Content-Type-Options: nosniff")
    assert connection.waiting is None
    assert connection.state is State.IDLE


def test_control_may_be_away(connection):
    begun(connection).unanswered(True)
    assert connection.stream.written == [b"unanswered 1"]
    assert connection.waiting is None


def test_caller_is_recognised_once(connection):
    connection.recognised()
    assert connection.authenticated == AUTHENTICATED


def test_client_of_http_1_0_gets_one_answer(connection):
    begun(connection, HTTP_1_0)
    connection.reply(b"HTTP/1.1 200 OK\r\nVary: Origin\r\n\r\n")
    assert connection.stream.ended == [b"HTTP/1.1 200 OK\r\nConnection: close\r\nVary: Origin\r\n\r\n"]


def test_deadline_of_the_connection_does_not_end_a_reader_that_control_will_answer():
    """An answer now would be followed by a second one, which the next request would get."""
    waits = []
    connection = connection_of(idle_timeout_s=60.0, wait=lambda stream, seconds: waits.append(seconds))
    reader = begun(connection)
    connection.late()
    assert (reader.state.name, waits) == ("ASKING", [60.0])
    assert (connection.stream.written, connection.stream.ended) == ([], [])
    reader.answered(0, b"HTTP/1.1 401 Unauthorized\r\n\r\n")
    assert len(connection.stream.written) == 1
