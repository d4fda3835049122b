from redpoll.http.messages import HTTP_1_0
from redpoll.worker.fallback.lines import BEAT, OPEN, PRELUDE, lines_of
from redpoll.worker.fallback.outlets import PollRequest, StreamRequest


class Http:
    """The parts of a PublicConnection that outlets use."""

    def __init__(self) -> None:
        self.stream = self
        self.written = b""
        self.over = False
        self.reads = True
        self.admissions = 0

    def admitted(self) -> None:
        self.admissions += 1

    def read_no_more(self) -> None:
        self.reads = False

    def write_http(self, data: bytes) -> None:
        self.written += data

    def finish(self, last: bytes) -> None:
        self.written += last
        self.over = True

    def reply(self, response: bytes) -> None:
        self.written += response
        self.over = True


def test_stream_is_chunked_and_ends_properly():
    http = Http()
    stream = StreamRequest(http, "", 0)
    stream.begin()
    stream.write(OPEN)
    stream.write(lines_of(b""))
    stream.end()
    stream.write(BEAT)
    _, _, body = http.written.partition(b"\r\n\r\n")
    assert body == PRELUDE.chunk + b"2\r\no\n\r\n" + b"0\r\n\r\n"
    assert (http.over, http.admissions, http.reads) == (True, 1, False)


def test_stream_of_http_1_0_ends_with_the_connection():
    http = Http()
    stream = StreamRequest(http, "", HTTP_1_0)
    stream.begin()
    stream.write(BEAT)
    stream.end()
    assert http.written.partition(b"\r\n\r\n")[2] == PRELUDE.text + b"h\n"


def test_poll_has_all_lines_in_one_response():
    http = Http()
    poll = PollRequest(http, "")
    poll.begin()
    poll.write(OPEN)
    poll.write(BEAT)
    assert http.written == b""
    poll.end()
    assert http.written.endswith(b"Content-Length: 4\r\n\r\no\nh\n")


def test_client_that_left_is_reported_once_and_gets_nothing():
    for request in (StreamRequest(http := Http(), "", 0), PollRequest(http, "")):
        left = []
        request.on_left = lambda left=left: left.append(1)
        request.left()
        request.left()
        request.begin()
        request.write(BEAT)
        request.end()
        request.refuse(b"no")
        assert (left, http.written) == ([1], b"")
