from redpoll.http.connection import State
from redpoll.http.head import FieldTable
from redpoll.http.messages import CLOSES, FIELDS, HTTP_1_0
from redpoll.http.reader import ParsedRequest
from redpoll.http.server import HttpServer
from redpoll.worker.ingress.held_requests import HoldingConnection


class Stream:
    unsent_bytes = 0
    is_http = True

    def __init__(self) -> None:
        self.written = b""
        self.over = False

    def write_http(self, response: bytes) -> None:
        self.written += response

    def end_http(self, response: bytes = b"") -> None:
        self.written += response
        self.over = True

    def pause_reading(self) -> None: ...
    def resume_reading(self) -> None: ...
    def abort(self) -> None: ...


class Held:
    def __init__(self, ends_with_client: bool = True) -> None:
        self.ends_with_client = ends_with_client
        self.gone = 0

    def left(self) -> None:
        self.gone += 1


class Server(HttpServer):
    def forget_reader(self, stream: Stream) -> None: ...


def held(flags: int = 0, **more) -> tuple[HoldingConnection, Stream, Held]:
    stream, waiting = Stream(), Held(**more)
    http = HoldingConnection(Server(FieldTable(FIELDS), ()), stream, "127.0.0.1", 0)
    http.hold(waiting, ParsedRequest(flags, b"POST", b"/app/k", (), (), b""))
    return http, stream, waiting


ANSWER = b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"


async def test_reply_lets_the_next_request_come():
    http, stream, _ = held()
    assert http.state is State.ANSWER
    http.reply(ANSWER)
    assert (stream.written, stream.over, http.state) == (ANSWER, False, State.IDLE)


async def test_reply_to_a_client_that_closes_is_the_last():
    for flags in (CLOSES, HTTP_1_0):
        http, stream, _ = held(flags)
        http.reply(ANSWER)
        assert stream.over
        assert b"\r\nConnection: close\r\n" in stream.written


async def test_stream_ends_with_its_connection():
    http, stream, waiting = held()
    http.finish(b"0\r\n\r\n")
    assert (stream.written, stream.over) == (b"0\r\n\r\n", True)
    http.gone()
    assert waiting.gone == 0


async def test_client_that_is_gone_is_reported_once():
    http, _, waiting = held()
    http.gone()
    http.gone()
    assert waiting.gone == 1


async def test_half_closed_client_still_gets_the_answer_to_a_request():
    assert held(ends_with_client=False)[0].ended() is True
    assert held(ends_with_client=True)[0].ended() is False
