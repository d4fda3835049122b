"""Requests of a worker to control: one write per loop pass, and exactly one outcome per request."""

import asyncio
import os
import time

import pytest
from structlog.testing import capture_logs

from redpoll._http import pack_answer
from redpoll.http.messages import CLOSES
from redpoll.worker.ingress.control_link import ControlLink


class Requester:
    def __init__(self):
        self.ends = []

    def answered(self, flags, response):
        self.ends.append(("answered", flags, response))

    def unanswered(self, sent):
        self.ends.append(("unanswered", sent))


@pytest.fixture
async def link(tmp_path):
    link = ControlLink(str(tmp_path / "requests.sock"))
    yield link
    link.close()


def send(link, body=b"", flags=0):
    requester = Requester()
    requester.number = link.send(requester, flags, b"POST", b"192.0.2.1", b"/a", b"", body)
    return requester


async def test_without_control_no_request_is_taken_and_the_log_says_so_every_ten_seconds(link, tmp_path):
    with capture_logs() as logs:
        for _ in range(80):
            assert not link.is_open()
            link.beat()
    told = [(line["event"], line["path"], line["reason"]) for line in logs]
    assert (
        told
        == [("control plane not reached", str(tmp_path / "requests.sock"), "[Errno 2] No such file or directory")] * 2
    )


async def test_a_socket_of_another_user_gets_no_request(link, control, monkeypatch):
    user = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: user + 1)
    with capture_logs() as logs:
        assert not link.is_open()
    assert [line["reason"] for line in logs] == [f"the socket is of another user, with the uid {user}; remove it"]
    assert not control.requests
    monkeypatch.setattr(os, "geteuid", lambda: user)
    assert link.is_open()


async def test_each_request_gets_its_own_answer_in_any_order(link, control, wait_until):
    assert link.is_open()
    control.answer = lambda request: None
    first, second = send(link, b"one"), send(link, b"two")
    await wait_until(lambda: len(control.requests) == 2)
    assert [request.body for request in control.requests] == [b"one", b"two"]
    for request in reversed(control.requests):
        control.send(request, b"to " + request.body)
    await wait_until(lambda: first.ends and second.ends)
    assert (first.ends, second.ends) == ([("answered", 0, b"to one")], [("answered", 0, b"to two")])
    assert not link.awaited


async def test_an_answer_may_come_in_pieces(link, control, wait_until):
    control.answer = lambda request: None
    assert link.is_open()
    requester = send(link, flags=CLOSES)
    await wait_until(lambda: control.requests)
    for byte in pack_answer(requester.number, 1, b"response"):
        control.writers[0].write(bytes([byte]))
        await asyncio.sleep(0.001)
    await wait_until(lambda: requester.ends)
    assert requester.ends == [("answered", 1, b"response")]


async def test_large_requests_wait_until_control_reads(link, control, wait_until):
    assert link.is_open()
    requesters = [send(link, bytes([n]) * 900_000) for n in range(8)]
    await wait_until(lambda: all(requester.ends for requester in requesters))
    assert [request.body[:1] for request in control.requests] == [bytes([n]) for n in range(8)]
    assert all(len(request.body) == 900_000 for request in control.requests)


async def test_when_control_dies_sent_requests_are_unconfirmed_and_queued_ones_unsent(link, control, wait_until):
    control.answer = lambda request: None
    assert link.is_open()
    sent, forgotten = send(link), send(link)
    link.forget(forgotten.number)
    await wait_until(lambda: len(control.requests) == 2)
    unsent = send(link)
    link.close()
    assert (sent.ends, unsent.ends, forgotten.ends) == ([("unanswered", True)], [("unanswered", False)], [])
    assert link.unconfirmed_total == 1
    assert link.is_open()
    again = send(link)
    await wait_until(lambda: len(control.requests) == 3)
    control.kill()
    await wait_until(lambda: again.ends)
    assert again.ends == [("unanswered", True)]


class Faulty(Requester):
    def answered(self, flags, response):
        raise ZeroDivisionError

    def unanswered(self, sent):
        raise ZeroDivisionError


@pytest.mark.parametrize("dies", [False, True])
async def test_an_error_of_one_requester_keeps_no_outcome_from_the_others(link, control, wait_until, dies):
    errors = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: errors.append(context["exception"]))
    control.answer = lambda request: None
    assert link.is_open()
    link.send(Faulty(), 0, b"POST", b"192.0.2.1", b"/a", b"", b"")
    others = [send(link), send(link)]
    await wait_until(lambda: len(control.requests) == 3)
    if dies:
        control.kill()
    else:
        # In one write, so that they are read together.
        control.writers[0].write(b"".join(pack_answer(request.number, 0, b"x") for request in control.requests))
    await wait_until(lambda: errors and all(other.ends for other in others))
    assert [type(error) for error in errors] == [ZeroDivisionError]
    assert {other.ends[0][0] for other in others} == {"unanswered" if dies else "answered"}


async def test_thousands_without_an_answer_are_told_in_turns(link, control, wait_until):
    control.answer = lambda request: None
    assert link.is_open()
    told = []

    class Slow(Requester):
        def unanswered(self, sent):
            # As long as a slice.
            until = time.monotonic() + 0.003
            while time.monotonic() < until:
                pass
            told.append(self)

    requesters = [Slow() for _ in range(10)]
    numbers = [link.send(requester, 0, b"POST", b"192.0.2.1", b"/a", b"", b"") for requester in requesters]
    await wait_until(lambda: len(control.requests) == 10)
    link.close()
    assert told == requesters[:1]
    link.forget(numbers[9])
    await wait_until(lambda: len(told) == 9)
    assert told == requesters[:9]


async def test_an_answer_to_a_forgotten_request_is_dropped(link, control, wait_until):
    control.answer = lambda request: None
    assert link.is_open()
    gone = send(link)
    await wait_until(lambda: control.requests)
    link.forget(gone.number)
    control.send(control.requests[0], b"late")
    control.answer = lambda request: b"now"
    other = send(link)
    await wait_until(lambda: other.ends)
    assert gone.ends == []


async def test_requests_to_a_silent_control_plane_fail_and_no_more_are_sent(link, control, wait_until):
    control.beats = False
    control.answer = lambda request: None
    assert link.is_open()
    old = send(link)
    await wait_until(lambda: control.requests)
    for _ in range(4):
        link.beat()
    young = send(link)
    for _ in range(2):
        link.beat()
    assert (old.ends, young.ends) == ([("unanswered", True)], [])
    assert not link.is_open()
    await wait_until(lambda: len(control.requests) == 2)
    control.beat()
    await wait_until(link.is_open)
    link.beat()
    assert young.ends == []
    control.send(control.requests[1], b"at last")
    await wait_until(lambda: young.ends)
    assert young.ends == [("answered", 0, b"at last")]
