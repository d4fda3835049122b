"""The compiled part of publishes, without a control plane.

tests/control/publish/test_fast_publish.py compares it with the other way."""

import hashlib
import hmac
import json
import resource
import types
from pathlib import Path

import hiredis
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from redpoll._fast_publish import FastApp, FastPublish
from redpoll._http import IncomingRequest, pack_request, read_answers
from redpoll.cluster.redis.keys import Keys
from redpoll.cluster.redis.link import LinkDown
from redpoll.http.messages import AUTHENTICATED, CLOSES, FIELDS, LAST

KEY, SECRET = "key", b"secret"
NOW_S = 1_700_000_000


def hashes(secret):
    block = secret.ljust(64, b"\0")
    return hashlib.sha256(bytes(b ^ 0x36 for b in block)), hashlib.sha256(bytes(b ^ 0x5C for b in block))


class Control:
    """A FastPublish whose callbacks note what they get."""

    def __init__(self, **changes):
        self.app = types.SimpleNamespace(id="1")
        self.published, self.completed, self.failed = [], [], []
        keys = Keys("rp")
        self.fast = FastPublish(
            {"1": self.app},
            lambda app: FastApp(
                app,
                ((KEY.encode(), hashes(SECRET)),),
                max_channels=100,
                max_batch=10,
                max_name_chars=200,
                max_data_bytes=10_240,
                caches=True,
                slow_until=0.0,
            ),
            hashes(b""),
            keys.publish,
            keys.shards,
            **{
                "clock": lambda: NOW_S,
                "timer": lambda: 0.0,
                "limit": None,
                "dateline": types.SimpleNamespace(line=b"Date: now\r\n"),
                "ready": lambda: 0,
                "publish": lambda commands, published: self.published.append((commands, published)),
                "completed": lambda *given: self.completed.append(given),
                "failed": lambda *given: self.failed.append(given),
                "reserved_events": (b"pusher:",),
                "cache_channels": (b"cache-",),
                "own_prefix": b"private-redpoll.",
                "encrypted_prefix": b"private-encrypted-",
                "max_skew_s": 600,
                "max_channel_chars": 200,
                "api_prefix": b"/api/v1",
                "logs": True,
                **changes,
            },
        )

    def take(self, data):
        return self.fast.take("link", IncomingRequest, bytearray(data), len(data), FIELDS)

    def takes(self, body, target="/apps/1/events"):
        """The commands of a publish; None if it takes the other way."""
        _, _, taken = self.take(message(1, body, target))
        if not taken:
            return None
        reader = hiredis.Reader()
        reader.feed(self.published[-1][0])
        return list(iter(reader.gets, False))

    def answers(self):
        self.fast.finish()
        return [answer for given in self.completed for answer in read_answers(given[1])[0]]


def message(number, body, target="/apps/1/events", *, secret=SECRET, flags=0, client=b"192.0.2.1", change=b""):
    digest = hashlib.md5(body).hexdigest()
    query = f"auth_key={KEY}&auth_timestamp={NOW_S}&auth_version=1.0&body_md5={digest}"
    signature = hmac.new(secret, f"POST\n{target}\n{query}".encode(), hashlib.sha256).hexdigest()
    whole = f"{target}?{query}&auth_signature={signature}".encode()
    return pack_request(number, flags, b"POST", client, whole, b"", body + change)


def body(data=b"{}", *, name=b"e", channels=b'["c"]', more=b""):
    return b'{"name":"%b","channels":%b,"data":"%b"%b}' % (name, channels, data, more)


def test_a_publish_becomes_a_command_and_its_reply_an_answer_and_a_row():
    control = Control()
    assert control.take(message(7, body(b"x"))) == ([], len(message(7, body(b"x"))), 1)
    ((commands, published),) = control.published
    assert (published.left, published.events) == (1, 1)
    assert commands.endswith(b"\r\n$16\r\ne 0 0 - - 0 1\nex\r\n")
    published(1)
    assert published.left == 0
    ((number, flags, response),) = control.answers()
    assert (number, flags) == (7, AUTHENTICATED)
    assert response.startswith(
        b"HTTP/1.1 200 OK\r\nDate: now\r\nContent-Type: application/json\r\nX-Service-Trace-Id: "
    )
    assert response.endswith(b"\r\nContent-Length: 2\r\n\r\n{}")
    link, _, count, app, is_batch, events, times, microseconds, rows, first_ms, last_ms = control.completed[0]
    assert (link, count, app, is_batch, events, times, microseconds) == ("link", 1, control.app, False, 1, [(0, 1)], 0)
    (row,) = json.loads(b"[" + rows[:-1] + b"]")
    assert row[1:] == ["1", None, NOW_S * 1000, "e", ["c"], 1, "key key from 192.0.2.1", 200, False, NOW_S * 10**6]
    assert row[0][:12] == f"{NOW_S * 1000:012x}"
    assert (first_ms, last_ms) == (NOW_S * 1000, NOW_S * 1000)


def test_trace_ids_differ():
    control = Control()
    control.take(b"".join(message(number, body()) for number in range(1, 201)))
    for _ in range(200):
        control.published[0][1](1)
    ids = {response.partition(b"Trace-Id: ")[2][:32] for _, _, response in control.answers()}
    assert len(ids) == 200


def test_an_answer_after_which_the_connection_closes_says_so():
    control = Control()
    control.take(message(1, body(), flags=CLOSES))
    control.published[0][1](1)
    ((_, flags, response),) = control.answers()
    assert flags == LAST | AUTHENTICATED
    assert b"\r\nConnection: close\r\nContent-Length: 2\r\n" in response


@pytest.mark.parametrize(
    "data",
    [
        b"plain",
        b"",
        b'\\"\\\\\\/\\b\\f\\n\\r\\t',
        b"12345678\\n12345678",
        b"1234567\xc3\xa9",
        b"\xe2\x82\xac",
        b"\xf0\x9f\x98\x80",
        b"\x7f",
        b"\xc3",
        b"\xe2\x82",
        b"\xf0\x9f\x98",
        b"\xc0\x80",
        b"\xc1\xbf",
        b"\xe0\x9f\xbf",
        b"\xed\xa0\x80",
        b"\xf4\x90\x80\x80",
        b"\xf8\x88\x80\x80\x80",
        b"\x80",
        b"\xff",
        b"a\nb",
        b"a\x00b",
        b"\\x",
        b"\\u00e",
        b"\x1f",
    ],
)
def test_texts_are_read_as_python_reads_them_or_not_here(data):
    found = Control().takes(body(data))
    try:
        expected = json.loads(body(data).decode())["data"].encode()
    except ValueError:
        assert found is None
    else:
        assert [command[2].partition(b"\ne")[2] for command in found] == [expected]


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=12) | st.text(max_size=12).map(str.encode))
def test_any_bytes_are_read_as_python_reads_them_or_not_here(data):
    found = Control().takes(body(data))
    if found is not None:
        given = json.loads(body(data))
        assert [command[2].partition(b"\n")[2] for command in found] == [(given["name"] + given["data"]).encode()]
        assert given.keys() == {"name", "channels", "data"}


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
        body(name=b"e\\n"),
        body(name=b"n" * 201),
        body(b"x" * 10_241),
        body(channels=b"[]"),
        body(channels=b'["c",]'),
        body(channels=b'["c","c"]'),
        body(channels=b'["#c"]'),
        body(channels=b'["cache-a"]'),
        body(channels=b'["private-redpoll.console"]'),
        body(channels=b'"c"'),
        body(channels=b'["private-encrypted-a","b"]'),
        body(channels=b'["' + b"c" * 201 + b'"]'),
        body(channels=b'[""]'),
        body(channels=b"[%b]" % b",".join(b'"c%d"' % at for at in range(33))),
        body(more=b',"socket_id":"1"'),
        body(more=b',"socket_id":"01.2"'),
        body(more=b',"socket_id":"' + b"9" * 19 + b'.1"'),
        body(more=b',"socket_id":null'),
    ],
)
def test_what_is_not_usual_takes_the_other_way(given):
    assert Control().takes(given) is None


def test_what_is_usual():
    assert len(Control().takes(body(channels=b"[%b]" % b",".join(b'"c%d"' % at for at in range(32))))) == 32
    assert b"e 0 0 12.345 - 0 1\n" in Control().takes(body(more=b', "socket_id" : "12.345"'))[0][2]
    assert len(Control().takes(body(channels=b'["private-encrypted-a"]'))) == 1
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
    lines = iter([b"X-RateLimit-Limit: 1\r\n", None])
    control = Control(limit=lambda address: next(lines))
    requests, _, taken = control.take(message(1, body()) + message(2, body()))
    assert ([request.number for request in requests], taken) == ([2], 1)
    control.published[0][1](1)
    assert b"\r\nX-RateLimit-Limit: 1\r\nContent-Length" in control.answers()[0][2]


def test_what_is_ready_goes_here():
    for ready, expected in ((-1, [1, 2, 3]), (2, [1, 2]), (0, [])):
        requests, _, taken = Control(ready=lambda ready=ready: ready).take(
            b"".join(message(number, body()) for number in (1, 2, 3))
        )
        assert ([request.number for request in requests], taken) == (expected, 3 - len(expected))


def test_the_last_reply_confirms_all_publishes_or_none():
    for last, confirmed in ((1, [1, 3]), (hiredis.ReplyError("MISCONF"), [1, 3]), (LinkDown(sent=False), [])):
        control = Control(check=b"CHECK", refusal=lambda reply: "no" if isinstance(reply, LinkDown) else "")
        control.take(message(1, body()) + message(2, body()) + message(3, body()))
        commands, published = control.published[0]
        assert commands.endswith(b"CHECK")
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
    control = Control(check=b"CHECK", refusal=lambda reply: "")
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
