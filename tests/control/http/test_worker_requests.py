"""Requests that workers send, against a whole control plane."""

import asyncio
import json

from structlog.testing import capture_logs

from redpoll._http import pack_answer
from redpoll.http.messages import AUTHENTICATED, CLOSES, CONTINUE, HEAD_ONLY, HTTP_1_0, LAST

KEY, SECRET = "278d425bdf160c739803", "7ad3773142a6692b25b8"
BODY = b'{"name":"e","channels":["c"],"data":"{}"}'
PAIR = {"X-Service-Key": KEY, "X-Service-Secret": SECRET}


async def test_a_signed_publish_is_answered_and_published(workers_request, sign, hear, wait_until):
    listener = await hear("c")
    reply = await workers_request("POST", sign("POST", "/apps/3/events", BODY), BODY)
    assert (reply.status, reply.body) == (200, b"{}")
    assert "connection" not in reply.headers
    await wait_until(lambda: len(listener.heard) == 1)


async def test_many_requests_of_one_write_are_all_answered(workers_request, sign):
    numbers = {workers_request.send("POST", sign("POST", "/apps/3/events", BODY), BODY) for _ in range(500)}
    numbers |= {workers_request.send("GET", "/healthz") for _ in range(500)}
    answers = [await workers_request.next() for _ in numbers]
    assert {answer.number for answer in answers} == numbers
    assert all(answer.response.startswith(b"HTTP/1.1 200 ") for answer in answers)


async def test_a_request_in_single_bytes_and_one_of_a_megabyte(workers_request, sign):
    sent = []
    write, workers_request.writer.write = workers_request.writer.write, sent.append
    workers_request.send("GET", "/healthz")
    workers_request.writer.write = write
    for byte in sent[0]:
        write(bytes([byte]))
        await asyncio.sleep(0)
    assert (await workers_request.next()).response.startswith(b"HTTP/1.1 200 ")
    large = BODY[:-1] + b',"x":"' + b"y" * 1_000_000 + b'"}'
    assert (await workers_request("POST", sign("POST", "/apps/3/events", large), large)).status == 200
    assert (await workers_request("GET", "/healthz")).status == 200


async def test_the_response_says_whether_the_connection_stays_open(workers_request):
    for flags, connection, last in ((0, b"", 0), (CLOSES, b"close", LAST), (HTTP_1_0, b"keep-alive", 0)):
        workers_request.send("GET", "/healthz", flags=flags)
        answer = await workers_request.next()
        assert answer.flags == last
        assert (b"\r\nConnection: %b\r\n" % connection in answer.response) is bool(connection)


async def test_a_head_is_checked_before_its_body_is_read(workers_request, sign):
    async def verdict(target, announced=100_000, fields=()):
        workers_request.send("POST", target, flags=HEAD_ONLY, announced=announced, fields=fields)
        answer = await workers_request.next()
        if answer.flags == CONTINUE | AUTHENTICATED:
            assert answer.response == b""
            return CONTINUE
        assert answer.flags & LAST
        assert b"\r\nConnection: close\r\n" in answer.response
        return int(answer.response[9:12])

    assert await verdict(sign("POST", "/apps/3/events", b"whatever")) == CONTINUE
    assert await verdict(sign("POST", "/apps/3/events", b"whatever"), None) == CONTINUE
    assert await verdict("/apps/3/events", fields=PAIR) == CONTINUE
    assert await verdict("/apps/3/events") == 401
    assert await verdict(sign("POST", "/apps/3/events", b"x", secret="wrong")) == 401
    assert await verdict("/nowhere") == 404
    assert await verdict("/healthz") == 405
    assert await verdict(sign("POST", "/apps/3/events", b"x"), 1024 * 1024 + 1) == 413


async def test_the_body_of_a_request_that_has_none_is_not_waited_for(workers_request, sign):
    for target, status in (("/readyz", 200), (sign("GET", "/apps/3/channels"), 200), ("/apps/3/channels", 401)):
        workers_request.send("GET", target, flags=HEAD_ONLY, announced=None)
        answer = await workers_request.next()
        assert answer.flags & LAST
        assert answer.response.startswith(b"HTTP/1.1 %d " % status)
        assert b"\r\nConnection: close\r\n" in answer.response


async def test_an_answer_says_whether_its_caller_authenticated(workers_request, sign):
    body = b'{"name":"e","channel":"c","data":"d"}'
    for method, target, fields, known in (
        ("POST", sign("POST", "/apps/3/events", body), (), True),
        ("POST", "/apps/3/events", PAIR, True),
        ("GET", sign("GET", "/apps/3/channels"), (), True),
        ("POST", sign("POST", "/apps/3/events", body, secret="wrong"), (), False),
        ("GET", "/readyz", (), False),
    ):
        workers_request.send(method, target, body if method == "POST" else b"", fields=fields)
        assert bool((await workers_request.next()).flags & AUTHENTICATED) is known


async def test_a_body_that_was_not_read_is_answered_and_logged(plane, workers_request, sign):
    for status in (408, 413):
        workers_request.send("POST", sign("POST", "/apps/3/events", b"x"), flags=HEAD_ONLY | CLOSES, refusal=status)
        answer = await workers_request.next()
        assert answer.flags & LAST
        assert answer.response.startswith(b"HTTP/1.1 %d " % status)
    await plane.write_log()
    reply = await plane.ask("GET", sign("GET", "/apps/3/events/log"))
    assert sorted(row["status"] for row in reply.json()["events"]) == [408, 413]


async def test_the_event_log_has_the_clients_address(plane, workers_request, sign):
    await workers_request("POST", sign("POST", "/apps/3/events", BODY), BODY, client="2001:db8::7")
    await plane.write_log()
    reply = await plane.ask("GET", sign("GET", "/apps/3/events/log"))
    (row,) = reply.json()["events"]
    assert row["caller"].endswith("from 2001:db8::7")


async def test_bytes_that_are_not_utf_8_are_refused_without_a_traceback(workers_request):
    with capture_logs() as lines:
        for fields in ({"X-Service-Key": "\udcff", "X-Service-Secret": "\udcff"}, {"Authorization": "Bearer \udcff"}):
            reply = await workers_request("POST", "/apps/3/events?\udcff=\udcfe", BODY, fields=fields)
            assert reply.status == 401, json.loads(reply.body)
    assert [line for line in lines if line["log_level"] == "error"] == []


async def test_a_stop_answers_received_requests_and_ends_the_link(plane, workers_request):
    workers_request.send("GET", "/healthz")
    await workers_request.next()
    finishing = asyncio.create_task(plane.plane.entrance.worker_requests.finish(60.0))
    head = await workers_request.reader.readexactly(9)
    assert head[4:8] == b"\0\0\0\0"
    workers_request.send("GET", "/healthz")
    assert (await workers_request.next()).response.startswith(b"HTTP/1.1 200 ")
    workers_request.writer.write_eof()
    await finishing
    # A heartbeat may come before the end.
    assert (await workers_request.reader.read()).replace(pack_answer(0, 0, b""), b"") == b""


async def test_one_clients_requests_do_not_wait_for_all_of_another(workers_request, sign):
    wrong = sign("GET", "/apps/3/channels", params={"a[]": "+"}, secret="no")
    flood = [workers_request.send("GET", wrong, client="203.0.113.1") for _ in range(500)]
    other = workers_request.send("GET", "/healthz", client="203.0.113.2")
    order = [(await workers_request.next()).number for _ in range(501)]
    assert sorted(order) == [*flood, other]
    assert order.index(other) < 250


async def test_large_requests_that_wait_are_all_answered(workers_request):
    # More than a link holds at a time.
    numbers = [workers_request.send("POST", "/apps/3/events", bytes(200_000), client="203.0.113.1") for _ in range(50)]
    answers = [await workers_request.next() for _ in numbers]
    assert [answer.number for answer in answers] == numbers
    assert {answer.response[9:12] for answer in answers} == {b"401"}
