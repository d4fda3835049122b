"""The compiled part of publishes, without a control plane.

tests/control/publish/test_fast_publish.py compares it with the other way."""

import json
import resource
from pathlib import Path

import hiredis
import pytest

from ext.fast_publishing import NOW_S, Control, body, message
from redpoll._http import pack_request
from redpoll.cluster.redis.link import LinkDown
from redpoll.http.messages import CLOSES, FIELDS, pack_fields, unpack_fields


def test_a_publish_becomes_a_command_and_its_reply_an_answer_and_a_row():
    control = Control()
    assert control.take(message(7, body(b"x"))) == ([], len(message(7, body(b"x"))), 1)
    ((commands, published),) = control.published
    assert (published.left, published.events) == (1, 1)
    assert commands.endswith(b"\r\n$16\r\ne 0 0 - - 0 1\nex\r\n")
    published(1)
    assert published.left == 0
    ((number, flags, response),) = control.answers()
    word, date, trace_id, *lines = response.split(b" ")
    assert (number, flags, word, date, lines) == (7, 4, b"open", b"date", [b"", b"{}"])
    link, _, count, app, is_batch, events, times, microseconds, rows, first_ms, last_ms = control.completed[0]
    assert (link, count, app, is_batch, events, times, microseconds) == ("link", 1, control.app, False, 1, [(0, 1)], 0)
    (row,) = json.loads(b"[" + rows[:-1] + b"]")
    assert row == [trace_id.decode(), "1", NOW_S * 10**6, NOW_S * 1000, "e", ["c"], 1, "key key", "192.0.2.1"]
    assert trace_id[:12].decode() == f"{NOW_S * 1000:012x}"
    assert (first_ms, last_ms) == (NOW_S * 1000, NOW_S * 1000)


def test_trace_ids_differ():
    control = Control()
    control.take(b"".join(message(number, body()) for number in range(1, 201)))
    for _ in range(200):
        control.published[0][1](1)
    ids = {response.split(b" ")[2] for _, _, response in control.answers()}
    assert len(ids) == 200


def test_an_answer_after_which_the_connection_closes_says_so():
    control = Control()
    control.take(message(1, body(), flags=CLOSES))
    control.published[0][1](1)
    ((_, flags, response),) = control.answers()
    assert (flags, response.split(b" ")[0]) == (5, b"closes")


@pytest.mark.parametrize(
    "given",
    [
        b"",
        b"{}",
        b"[]",
        body()[:-1],
        body() + b"x",
        body(more=b',"name":"e"'),
        body(more=b',"channel":"d"'),
        body(more=b',"info":"user_count"'),
        body(more=b',"correlation_id":"a"'),
        body(more=b',"x":1'),
        body(more=b","),
        body(name=b""),
        body(name=b"pusher:e"),
        body(name=b"e\\ud800"),
        body(name=b"n" * 201),
        body(b"x" * 10_241),
        body(channels=b"[]"),
        body(channels=b'["c",]'),
        body(channels=b'["#c"]'),
        body(channels=b'["cache-a"]'),
        body(channels=b'["private-redpoll.console"]'),
        body(channels=b'"c"'),
        body(channels=b'["private-encrypted-a","b"]'),
        body(channels=b'["' + b"c" * 201 + b'"]'),
        body(channels=b'[""]'),
        body(channels=b"[%b]" % b",".join(b'"c%d"' % at for at in range(33))),
        body(more=b',"socket_id":"1"'),
        body(more=b',"socket_id":{}'),
    ],
)
def test_what_is_not_usual_takes_the_other_way(given):
    assert Control().takes(given) is None


def test_what_is_usual():
    assert len(Control().takes(body(channels=b"[%b]" % b",".join(b'"c%d"' % at for at in range(32))))) == 32
    assert b"e 0 0 12.345 - 0 1\n" in Control().takes(body(more=b', "socket_id" : "12.345"'))[0][2]
    assert len(Control().takes(body(channels=b'["private-encrypted-a"]'))) == 1
    for unknown in (b"01.2", b"9" * 19 + b".1"):
        assert b"e 0 0 - - 0 1\n" in Control().takes(body(more=b',"socket_id":"%b"' % unknown))[0][2]
    assert len(Control().takes(body(channels=b'["c","d","c"]'))) == 2
    assert len(Control().takes(body(channels=b'["#server-to-user-1"]'))) == 1
    batch = b'{"batch":[%b,%b]}' % ((b'{"name":"e","channel":"c","data":""}',) * 2)
    assert len(Control().takes(batch, "/apps/1/batch_events")) == 2


def test_a_wrong_signature_or_digest_or_an_unknown_app_takes_the_other_way():
    control = Control()
    wrong = [
        message(1, body(), secret=b"other"),
        message(2, body(), change=b" "),
        message(3, body(), "/apps/2/events"),
        message(4, body(), "/apps/1/event"),
        message(5, body(), client=b'a"b'),
    ]
    requests, used, taken = control.take(b"".join(wrong))
    assert ([request.number for request in requests], used, taken) == ([1, 2, 3, 4, 5], sum(map(len, wrong)), 0)
    assert not control.published


def test_the_caller_that_header_fields_name_is_checked_also_for_an_unknown_app():
    """The time of a refusal told which ids exist."""
    asked = []
    control = Control(caller=lambda app_id, fields: asked.append((app_id, unpack_fields(fields))))
    fields = pack_fields([(FIELDS.index("Authorization"), b"Bearer x")])
    for app_id in ("1", "2"):
        target = f"/apps/{app_id}/events".encode()
        _, _, taken = control.take(pack_request(1, 0, b"POST", b"192.0.2.1", target, fields, body()))
        assert not taken
    assert asked == [(app_id, {"Authorization": "Bearer x"}) for app_id in ("1", "2")]


def test_replies_belong_to_the_requests_in_order_and_an_error_to_one_of_them():
    control = Control()
    two = body(channels=b'["a","b"]')
    control.take(message(1, two) + message(2, two) + message(3, two))
    _, published = control.published[0]
    assert (published.left, published.events) == (3, 6)
    error = hiredis.ReplyError("OOM")
    for reply in (1, 1, 1, error, 1):
        published(reply)
    assert published.left == 1
    assert [given[-1] for given in control.failed] == [error]
    assert control.failed[0][1] == message(2, two)
    published(1)
    assert [number for number, _, _ in control.answers()] == [1, 3]
    with pytest.raises(ValueError, match="a reply without a publish"):
        published(1)


def test_publishes_that_expire_fail_once_and_their_late_replies_are_dropped():
    control = Control()
    control.take(message(1, body()) + message(2, body()) + message(3, body()))
    _, published = control.published[0]
    published(1)
    published.expire(TimeoutError("late"))
    assert published.left == 0
    published(1)
    published(1)
    assert [len(control.failed), len(control.answers())] == [2, 1]


def test_bytes_that_are_no_message_are_an_error_and_leave_nothing_behind():
    control = Control()
    with pytest.raises(ValueError, match="a malformed message"):
        control.take(message(1, body()) + b"\x20\0\0\0" + b"\xff" * 40)
    assert control.take(b"\x20\0\0") == ([], 0, 0)
    control.take(message(2, body()))
    assert len(control.published) == 1
    assert control.published[0][0].count(b"PUBLISH") == 1


def test_a_burst_of_large_events_leaves_no_memory_behind():
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

    control = Control()
    large = body(b"x" * 10_000, channels=b"[%b]" % b",".join(b'"c%d"' % at for at in range(32)))
    stream = b"".join(message(number, large) for number in range(150))
    before = resident()
    control.take(stream)
    assert control.published[0][0].count(b"PUBLISH") == 150 * 32
    control.published.clear()
    assert resident() < before + 20_000_000


def test_the_limit_adds_lines_or_sends_the_other_way():
    lines = iter([b"limited", None])
    control = Control(limit=lambda address: next(lines))
    requests, _, taken = control.take(message(1, body()) + message(2, body()))
    assert ([request.number for request in requests], taken) == ([2], 1)
    control.published[0][1](1)
    assert control.answers()[0][2].split(b" ")[3] == b"limited"


def test_what_is_ready_goes_here():
    for ready, expected in ((-1, [1, 2, 3]), (2, [1, 2]), (0, [])):
        requests, _, taken = Control(ready=lambda ready=ready: ready).take(
            b"".join(message(number, body()) for number in (1, 2, 3))
        )
        assert ([request.number for request in requests], taken) == (expected, 3 - len(expected))


def test_the_last_reply_confirms_all_publishes_or_none():
    for last, confirmed in ((1, [1, 3]), (LinkDown(sent=False), [])):
        control = Control(is_checked=True)
        control.take(message(1, body()) + message(2, body()) + message(3, body()))
        _, published = control.published[0]
        published(1)
        published(hiredis.ReplyError("OOM"))
        published(1)
        assert (control.answers(), published.left, published.over) == ([], 2, False)
        published(last)
        assert (published.left, published.over) == (0, True)
        assert [number for number, _, _ in control.answers()] == confirmed
        assert len(control.failed) == 3 - len(confirmed)
        with pytest.raises(ValueError, match="a reply without a publish"):
            published(1)


def test_what_expires_before_the_last_reply_is_not_answered_again():
    control = Control(is_checked=True)
    control.take(message(1, body()) + message(2, body()))
    _, published = control.published[0]
    published(1)
    published.expire(TimeoutError("late"))
    published(1)
    published(1)
    assert (control.answers(), len(control.failed)) == ([], 2)


def test_replies_of_several_masters_come_in_any_order():
    control = Control()
    control.take(b"".join(message(number, body(channels=b'["a","b"]')) for number in (1, 2, 3)))
    _, published = control.published[0]
    first, again, *others = published.of_each()
    assert first is again
    assert len(others) == 4
    for done in reversed(others):
        done(1)
    assert [number for number, _, _ in control.answers()] == [3, 2]
    first(1)
    assert not first.over
    published.expire(TimeoutError("late"))
    assert (first.over, others[0].over, published.left) == (True, True, 0)
    again(1)
    assert len(control.failed) == 1
