"""One connection, without sockets. test_control_port.py and test_http_connection.py test it over sockets."""

import asyncio

import pytest

from redpoll.http.connection import HttpConnection, State
from redpoll.http.head import FieldTable
from redpoll.http.messages import CLOSES, CONTINUE, FIELDS, HEAD_ONLY, LAST
from redpoll.http.server import HttpServer
from redpoll.loop.writable import WRITABLE_BELOW_BYTES

GET = b"GET /%d HTTP/1.1\r\nHost: h\r\n\r\n"
HEAD_OF_4 = b"POST /b HTTP/1.1\r\nHost: h\r\nContent-Length: 4\r\n\r\n"
OK = b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"


class Stream:
    """Records what is written."""

    is_http = True
    unsent_bytes = 0

    def __init__(self):
        self.written = []
        self.reads = True

    def write_http(self, response):
        self.written.append(response)

    def end_http(self, response=b""):
        self.written += [response, "end"]

    def pause_reading(self):
        self.reads = False

    def resume_reading(self):
        self.reads = True


class Port(HttpServer):
    """Records requests, deadlines and who waits for the client to read."""

    head_timeout_s = 10.0

    def __init__(self):
        super().__init__(FieldTable(FIELDS), ("bodies",))
        self.requests, self.waits, self.unread = [], [], {}
        self.silent = 0.0

    def submit(self, connection, request):
        self.requests.append(request)

    def error(self, fault):
        return b"%d" % fault.status

    def wait(self, stream, seconds):
        self.waits.append(seconds)

    def silent_s(self, stream):
        return self.silent

    def when_read(self, stream, then):
        self.unread[stream] = then

    def forget_reader(self, stream):
        self.unread.pop(stream, None)


@pytest.fixture
async def port():
    return Port()


@pytest.fixture
def http(port):
    return HttpConnection(port, Stream(), "192.0.2.1", 0)


async def test_its_state_says_what_it_waits_for(port, http):
    http.received(b"GET")
    assert (http.state, port.waits) == (State.HEAD, [10.0])
    http.received(GET[3:] % 1)
    assert http.state is State.ANSWER
    http.received(GET % 2)
    assert (http.state, http.stream.reads, len(port.requests)) == (State.ANSWER, False, 1)
    http.answered(0, OK)
    assert http.state is State.TURN
    await asyncio.sleep(0)
    http.answered(0, OK)
    assert (http.state, http.stream.reads, list(port.idle)) == (State.IDLE, True, [http.stream])
    http.answered(LAST, OK)
    assert (http.state, http.stream.written) == (State.ENDED, [OK, OK, OK, "end"])


def test_a_body_is_read_once_the_server_allows_it(port, http):
    http.received(HEAD_OF_4 + b"ab")
    assert (http.state, http.stream.reads, port.reading_bytes) == (State.ANSWER, False, 2)
    assert (port.requests[0].flags, port.requests[0].announced) == (HEAD_ONLY, 4)
    http.answered(CONTINUE, b"")
    assert (http.state, http.stream.reads, port.waits, http.stream.written) == (State.BODY, True, [15.0], [])
    http.received(b"c")
    assert (http.state, port.waits, port.reading_bytes) == (State.BODY, [15.0], 3)
    http.received(b"d")
    assert (http.state, port.requests[1].body, port.reading_bytes) == (State.ANSWER, b"abcd", 0)


def test_a_late_body_is_refused_by_the_server(port, http):
    http.received(HEAD_OF_4 + b"ab")
    http.answered(CONTINUE, b"")
    http.late()
    assert (port.requests[1].flags, port.requests[1].refusal) == (HEAD_ONLY | CLOSES, 408)
    assert (http.state, port.reading_bytes) == (State.ANSWER, 0)
    http.received(b"cd" + GET % 1)
    http.answered(LAST, b"408")
    assert (http.stream.written, len(port.requests)) == ([b"408", "end"], 2)


def test_the_next_request_waits_until_the_client_has_read(port, http):
    http.received(GET % 1 + GET % 2)
    http.stream.unsent_bytes = WRITABLE_BELOW_BYTES
    http.answered(0, OK)
    assert (http.state, len(port.requests)) == (State.UNREAD, 1)
    http.stream.unsent_bytes = 0
    port.unread[http.stream]()
    assert (http.state, len(port.requests)) == (State.ANSWER, 2)


def test_a_connection_that_is_lost_while_its_client_does_not_read_is_forgotten(port, http):
    http.received(GET % 1 + GET % 2)
    http.stream.unsent_bytes = WRITABLE_BELOW_BYTES
    http.answered(0, OK)
    http.gone()
    assert (http.state, port.unread) == (State.ENDED, {})


def test_one_whose_answer_waits_for_the_client_to_read_is_forgotten(port, http):
    http.received(GET % 1)
    port.when_read(http.stream, lambda: None)
    http.gone()
    assert port.unread == {}


def test_an_idle_connection_ends_after_its_time_and_one_that_waits_for_an_answer_does_not(port, http):
    port.silent = 70.0
    http.late()
    assert (http.state, port.waits) == (State.IDLE, [5.0])
    port.silent = 75.0
    http.received(GET % 1)
    http.late()
    assert (http.state, port.waits) == (State.ANSWER, [5.0, 75.0])
    http.answered(0, OK)
    http.late()
    assert (http.state, http.stream.written) == (State.ENDED, [OK, b"", "end"])


def test_a_draining_server_gets_no_further_request(port, http):
    http.received(GET % 1 + GET % 2)
    port.draining = True
    http.answered(0, OK)
    assert b"\r\nConnection: close\r\n" in http.stream.written[0]
    assert (http.state, http.stream.written[1], len(port.requests)) == (State.ENDED, "end", 1)


def test_a_client_that_closes_its_side_is_answered_first(port, http):
    assert not http.ended()
    http.received(GET % 1)
    assert http.ended()
    http.answered(0, OK)
    assert http.stream.written == [OK, b"", "end"]


def test_what_came_is_dropped_when_the_connection_ends(port, http):
    http.received(HEAD_OF_4.replace(b"4", b"40") + b"ab")
    http.received(b"x" * 10)
    http.gone()
    assert port.reading_bytes == 0
    http.received(GET % 1)
    assert (http.state, len(port.requests)) == (State.ENDED, 1)
