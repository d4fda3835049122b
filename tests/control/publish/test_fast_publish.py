"""The fast path of publishes gives the same answers, commands and rows as the other way, and takes the usual requests.

Both ways get the same messages of a worker, with a link that records commands and answers them: no sockets, no Redis.
"""

import asyncio
import hashlib
import hmac
import json
import re
import types

import hiredis
import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from redpoll._http import pack_request
from redpoll.cluster import traces
from redpoll.cluster.bus import Bus, Unavailable
from redpoll.cluster.redis.keys import Keys
from redpoll.cluster.redis.link import LinkDown
from redpoll.cluster.redis.primary import question_of
from redpoll.control.api.api import Api
from redpoll.control.api.middleware import Front
from redpoll.control.http.ratelimit import RateLimit
from redpoll.control.http.router import Route, Routes
from redpoll.control.http.worker_requests import WorkerRequests, _WorkerLink
from redpoll.control.publish.fast_publish import FastPath
from redpoll.control.publish.publisher import Publisher
from redpoll.control.tracing.tracing import Tracer
from redpoll.http.messages import CLOSES, HTTP_1_0, SECURE, pack_fields
from redpoll.protocol import auth
from redpoll.protocol.apps import App, HistoryRule, Key
from redpoll.protocol.tokens import Token

NOW_S = 1_700_000_000
KEY, SECRET = "278d425bdf160c739803", "7ad3773142a6692b25b8"
KEYS = (
    Key(key=KEY, secret=SECRET),
    Key(key="second", secret="s" * 80),
    Key(key="disabled", secret=SECRET, enabled=False),
)
RULES = (
    HistoryRule(id="abcdef", name="stored-", prefix=True, keep=5, seconds=60, era="1"),
    HistoryRule(id="abcde0", name="news", keep=5, seconds=60, era="1"),
    HistoryRule(id="abcde1", name="stored-not", keep=0, era="1"),
)
APPS = {
    "1": App(id="1", name="usual", keys=KEYS),
    "2": App(id="2", name="narrow", keys=KEYS, max_channels=2, max_batch=2, max_event_name_chars=5, max_data_bytes=10),
    "3": App(id="3", name="stores", keys=KEYS, history=RULES),
    "4": App(id="4", name="limited", keys=KEYS, plan="free"),
    "5": App(id="5", name="disabled", keys=KEYS, enabled=False),
    "6": App(id="6", name="watched", keys=KEYS, console_until=NOW_S + 5.0),
    "7": App(id="7", name="debugged", keys=KEYS, debug_until=NOW_S + 5.0),
}
TOKENS = {
    auth.token_hash(token): Token(id=token, hash=auth.token_hash(token), prefix="", created_at=0.0, **of_token)
    for token, of_token in {
        "one": {"app_id": "1", "name": "backend", "scopes": ("publish",)},
        "every": {"app_id": None, "name": "ops \u00e9", "scopes": ("all",)},
        "reads": {"app_id": "1", "name": "reads", "scopes": ("read",)},
        "revoked": {"app_id": "1", "name": "revoked", "scopes": ("publish",), "revoked_at": 1.0},
    }.items()
}
HEAD = re.compile(rb"X-Service-Trace-Id: ([0-9a-f]{32})\r\n")
# What control asks Redis after publishes.
QUESTION = question_of(Keys().nothing)


@pytest.fixture(autouse=True, scope="module")
def time_stands_still():
    """Trace ids begin with the time."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(traces, "time", types.SimpleNamespace(time=lambda: NOW_S))
        yield


class RedisLink:
    """Records commands without QUESTION, of which both ways send another number. `reply()` answers those that wait:
    `outcomes` in turn, and then with a number; QUESTION with `checked`."""

    up = True

    def __init__(self, outcomes=(), checked=1, refusal=""):
        self.checked = checked
        self.refusal = refusal
        self.sent = b""
        self.waiting = []
        self.outcomes = list(outcomes)

    def call_packed(self, command, done):
        if command == QUESTION:
            self.waiting.append((done, True))
        else:
            self.sent += command
            self.waiting.append((done, False))

    def publish(self, commands, done):
        self.sent += commands.data
        self.waiting += [(done, False)] * commands.count

    def publish_now(self, commands, done, question, done_of_question):
        self.publish(commands, done)
        self.call_packed(question, done_of_question)

    def call(self, *command, done=lambda reply: None):
        self.call_packed(hiredis.pack_command(command), done)

    def run(self, script, keys, args, done):
        # Each publish that is stored brings the name of a new epoch.
        args = [re.sub(r"^[0-9a-f]{12}[0-9a-f]+$", "epoch", arg) if isinstance(arg, str) else arg for arg in args]
        self.call_packed(hiredis.pack_command((*keys, *args)), lambda reply: done([b"OK", 1]))

    def reply(self):
        while self.waiting:
            done, is_check = self.waiting.pop(0)
            done(self.checked if is_check else self.outcomes.pop(0) if self.outcomes else 1)


class Absent:
    """What only the other way uses: answered with 503."""

    def __getattr__(self, name):
        async def refuse(*given):
            raise Unavailable(f"{name} isn't part of this test")

        return refuse


class Transport:
    def __init__(self):
        self.written = b""

    def write(self, data):
        self.written += data


async def subscribed():
    """All workers are."""


def control(*, fast, per_minute=0, outcomes=(), spans_left=0, is_current=True, **link_state):
    """The parts of a control plane with one worker. `receive(*reads)` gives what leaves it, in a comparable form."""
    link, keys = RedisLink(outcomes, **link_state), Keys("rp")
    publisher = Publisher(Bus(link, keys), subscribed, confirm_s=60)
    publisher.open = True
    tracer = Tracer(None, None, 0, clock=lambda: NOW_S)
    tracer.spans_left = spans_left
    api = Api(publisher, Absent(), Absent(), Absent(), Absent(), None, tracer)
    routes = Routes(
        [
            Route("POST", "/apps/{app_id}/events", "events", api.trigger, scope="publish", limited=True),
            Route("POST", "/apps/{app_id}/batch_events", "batch", api.trigger_batch, scope="publish", limited=True),
        ]
    )
    records = types.SimpleNamespace(apps=dict(APPS), by_key={}, tokens=TOKENS, is_current=lambda: is_current)
    records.token_used = lambda token, now_s: used.add(token.id)
    rate = RateLimit(per_minute, wall_clock=lambda: NOW_S, clock=lambda: 0.0) if per_minute else None
    front = Front(routes, records, rate=rate, tracer=tracer, clock=lambda: NOW_S)
    api.conclude = front.conclude
    path = FastPath(front, routes, records, publisher, keys, rate, tracer)
    taken, used = [], set()

    def take(*given):
        requests, used, count = path.take(*given)
        taken.append(count)
        return requests, used, count

    owner = WorkerRequests("", front.received, take if fast else None)
    worker = _WorkerLink(owner)
    worker._transport = transport = Transport()

    async def receive(*reads, expire=False):
        for data in reads:
            view = worker.get_buffer(len(data))
            view[: len(data)] = data
            worker.buffer_updated(len(data))
            if expire:
                # The other way begins in the next pass.
                await asyncio.sleep(0)
                publisher._awaited[0] = (0.0, publisher._awaited[0][1])
                publisher._expire()
            for _ in range(10):
                link.reply()
                await asyncio.sleep(0)
        publisher.close()
        answers, trace_ids = [], []
        left = transport.written
        while left:
            size = 4 + int.from_bytes(left[:4], "little")
            answers.append((left[4:8], left[8], left[9:size]))
            left = left[size:]
        found = {}
        for number, flags, response in sorted(answers):
            trace = HEAD.search(response)[1]
            trace_ids.append(trace)
            found[number] = flags, re.sub(rb"Date: [^\r]+", b"Date", response.replace(trace, b"TRACE"))
            link.sent = link.sent.replace(trace, b"TRACE".ljust(32))
        rows = []
        for app_id, batch in tracer._ended.by_app():
            encoded_rows = msgspec.json.decode(bytes(batch.json[:-1]) + b"]")
            assert batch.marks == {row[2] for row in encoded_rows if row[2] is not None}
            for row in encoded_rows:
                assert row[0].encode() in trace_ids
                assert row[1] == app_id
                assert abs(row[10] - NOW_S * 1_000_000) < 60_000_000
                assert row[3] == row[10] // 1000
                assert batch.first_ms <= row[3] <= batch.last_ms
                rows.append(repr((row[1:3], row[4:10])))
        events = [(route.answers, sum(route.times)) for route in routes.all]
        counts = publisher.by_app, publisher.events_published, publisher.unconfirmed, tracer.sampled_out
        by_app = {app: sum(times) for app, times in front.times_by_app.items()}
        assert worker.unanswered == 0
        return found, sorted(commands_of(link.sent)), sorted(rows), events, counts, by_app, used

    return receive, taken


def commands_of(sent):
    reader = hiredis.Reader()
    reader.feed(sent)
    commands = []
    while (command := reader.gets()) is not False:
        commands.append(repr(command))
    return commands


def message(
    number, target="/apps/1/events", body=b"", *, key=KEY, secret=SECRET, extra="", flags=0, digest=None, change=None,
    fields=b"", method="POST", stamp=NOW_S, client=b"192.0.2.1", refusal=0, signed=None, unsigned=False,
):  # fmt: skip
    """`signed`: the path that is signed, if it isn't the target's. `unsigned`: without a query."""
    digest = hashlib.md5(body).hexdigest() if digest is None else digest
    query = f"auth_key={key}&auth_timestamp={stamp}&auth_version=1.0&body_md5={digest}{extra}"
    text = f"{method}\n{signed or target}\n{query}".encode()
    query += "&auth_signature=" + hmac.new(secret.encode(), text, hashlib.sha256).hexdigest()
    if change is not None:
        query = query[:change] + chr(ord(query[change]) ^ 1) + query[change + 1 :]
    if not unsigned:
        target = f"{target}?{query}"
    return pack_request(number, flags, method.encode(), client, target.encode(), fields, body, refusal=refusal)


BODY = b'{"name":"e","channels":["c"],"data":"{}"}'
TEXTS = st.sampled_from(
    [
        "e", "", "new-message", "pusher:ping", "pusher_internal:x", "svc:a", "pusher", "n" * 200, "n" * 201,
        "sechs6", 'a"b', "a\\b", "caf\u00e9", "\u20ac\U0001f600", "a\x7fb", "a\tb", "{\"a\":\"b\\n\"}",
        "x" * 10_240, "x" * 10_241, "\u00e9" * 5, "\u00e9" * 6, "App\\Events\\Shipped", "a\x00\x1fb",
    ]
) | st.text(max_size=20)  # fmt: skip
NAMES = st.sampled_from(
    [
        "c", "d", "news", "private-a", "presence-b", "cache-a", "private-cache-a", "private-encrypted-a",
        "private-encrypted-cache-a", "presence-cache-x", "private-redpoll.console", "private-redpoll",
        "#server-to-user-1", "stored-1", "stored-not", "stored", "a b", "", "a" * 200, "a" * 201, "caf\u00e9",
        "_-=@,.;", "c\n",
    ]
)  # fmt: skip
SOCKETS = st.sampled_from(["1.2", "123.456", "01.2", "1", "1.", "x.y", "9" * 18 + ".0", "9" * 19 + ".0", "", "-1.2"])


def member(name, values):
    return st.tuples(st.just(name), values)


OTHERS = st.sampled_from(
    [("info", "user_count"), ("info", ""), ("correlation_id", "a"), ("x", 1), ("data", None), ("name", 7),
     ("socket_id", None), ("channels", []), ("channels", "c"), ("channel", ["c"]), ("data", {"a": 1})]
)  # fmt: skip
single = st.tuples(
    member("name", TEXTS),
    member("channels", st.lists(NAMES, min_size=1, max_size=4)) | member("channel", NAMES),
    member("data", TEXTS),
).map(list)
usual = st.sampled_from(
    [
        [("name", "e"), ("channels", ["c"]), ("data", "x")],
        [("data", '{"some":"data"}'), ("name", "e"), ("channels", ["c", "d", "private-a"])],
        [("name", "e"), ("channel", "c"), ("data", ""), ("socket_id", "1.2")],
    ]
)


def encoded(members, style):
    """An object with these members, which may be repeated."""
    separators = [(", ", ": "), (",", ":"), ("\n,\t", " :\r")][style % 3]
    parts = [
        json.dumps(name) + separators[1] + json.dumps(value, ensure_ascii=style < 3, separators=separators)
        for name, value in members
    ]
    return "{" + separators[0].join(parts) + "}"


objects = st.tuples(
    st.tuples(
        usual | usual | single,
        st.lists(OTHERS | member("socket_id", SOCKETS) | member("data", TEXTS), max_size=2) | st.just([]),
    ).flatmap(lambda both: st.permutations(both[0] + both[1])),
    st.integers(0, 5),
).map(lambda made: encoded(*made))
in_batch = st.sampled_from(
    ['{"name":"e","channel":"c","data":"x"}', '{"channel":"d", "data":"y", "name":"f"}', '{"name":"e","channel":"c"}']
)
batches = st.lists(in_batch | objects, max_size=4).map(lambda items: '{"batch":[' + ",".join(items) + "]}")
bodies = st.one_of(
    objects.map(lambda text: text.encode("utf-8", "surrogatepass")),
    batches.map(lambda text: text.encode("utf-8", "surrogatepass")),
    st.sampled_from(
        [BODY, BODY + b" \n", b" " + BODY, BODY + b"x", BODY[:-1], b"", b"[]", b"null", BODY.replace(b'"e"', b'"e\n"'),
         BODY.replace(b"{}", b"\xff"), BODY.replace(b"{}", b"\xed\xa0\x80"), BODY.replace(b"{}", b"\xc0\x80"),
         BODY.replace(b"{}", b"\xf4\x90\x80\x80"), BODY.replace(b"{}", b"\xe2\x82"), BODY.replace(b"{}", b"\\ud800"),
         BODY.replace(b"{}", b"\\u00e9\\/\\b\\f\\n\\r\\t"), BODY.replace(b"{}", b"\\x"), BODY.replace(b"{}", b"a\x00b"),
         BODY.replace(b"{}", b"\\u0000\\ud83d\\ude00"), BODY.replace(b"{}", b"\\ude00\\ud83d"),
         BODY.replace(b'"c"', b'"c",'), BODY.replace(b'"c"', b""), BODY.replace(b'"c"', b'"c" "d"'),
         b'{"batch":[],"batch":[]}', b'{"batch":[]}', b'{"batch":[{}]}', b'{"name":"e","channels":["c"],"data":"{}",}']
    ),
)  # fmt: skip
CREDENTIALS = [
    pack_fields(fields)
    for fields in (
        [(1, KEY.encode()), (2, SECRET.encode())],
        [(2, SECRET.encode()), (1, KEY.encode())],
        [(1, KEY.encode()), (2, b"wrong")],
        [(1, b"disabled"), (2, SECRET.encode())],
        [(1, KEY.encode())],
        [(1, b"\xff"), (2, b"\xff")],
        [(1, KEY.encode()), (2, SECRET.encode()), (4, b"gzip")],
        [(1, KEY.encode()), (2, SECRET.encode()), (0, b"Bearer reads")],
        [(0, b"Bearer one")],
        [(0, b"bearer  one ")],
        [(0, b"Basic one")],
        [(0, b"Bearer every")],
        [(0, b"Bearer reads")],
        [(0, b"Bearer revoked")],
        [(0, b"Bearer \xff")],
        [(0, b"Bearer one"), (5, b"https://a.example")],
    )
]
requests = st.builds(
    lambda target, body, options, flags: (target, body, {**options, "flags": flags}),
    st.sampled_from(
        ["/apps/1/events"] * 8 + ["/apps/1/batch_events"] * 4
        + [f"/apps/{app}/{last}" for app in "2334567" for last in ("events", "batch_events")]
        + ["/api/v1/apps/1/events", "/apps/9/events", "/apps/1/events/", "/apps//events", "/apps/%31/events"]
    ),
    bodies,
    st.sampled_from(
        [{}] * 12
        + [{"key": "second", "secret": "s" * 80}, {"key": "disabled"}, {"key": "unknown"}, {"secret": "wrong"},
           {"digest": "0" * 32}, {"digest": "short"}, {"extra": "&x=1"}, {"extra": "&name=q"}, {"extra": "&auth_key=b"},
           {"extra": "&a[]=1"}, {"change": 5}, {"change": -1}, {"stamp": NOW_S - 601}, {"stamp": NOW_S + 600},
           {"stamp": "x"}, {"method": "GET"}, {"method": "PUT"}, {"client": b"2001:db8::1"}, {"client": b'a"b'},
           {"fields": pack_fields([(3, b"text/plain")])}, {"fields": pack_fields([(1, b"k")])}, {"refusal": 413},
           {"signed": "/apps/1/events"}, {"signed": "/api/v1/apps/1/events"}, {"unsigned": True}]
        + [{"fields": fields, "unsigned": unsigned} for unsigned in (True, True, False) for fields in CREDENTIALS]
    ),
    st.sampled_from([0] * 4 + [SECURE, CLOSES, CLOSES | SECURE, HTTP_1_0, HTTP_1_0 | CLOSES]),
)  # fmt: skip


@settings(max_examples=100, deadline=None)
@given(
    st.lists(requests, min_size=1, max_size=5),
    st.sampled_from([0, 0, 2]),
    st.lists(st.sampled_from([1, 0, LinkDown(sent=True), hiredis.ReplyError("OOM no memory")]), max_size=4),
    st.sampled_from([0, 0, 0, 1]),
)
@example([("/apps/1/events", BODY, {})] * 3, 2, [], 0)
@example([("/apps/1/events", BODY, {})] * 3, 0, [LinkDown(sent=True), 1], 1)
def test_both_ways_give_the_same(drawn, per_minute, outcomes, spans_left):
    messages = [message(number, target, body, **options) for number, (target, body, options) in enumerate(drawn, 1)]

    # Within a read, the fast path goes first. Where the order matters, each message is a read of its own.
    reads = messages if per_minute or outcomes or spans_left else [b"".join(messages)]

    async def both():
        found = []
        for fast in (True, False):
            receive, _ = control(fast=fast, per_minute=per_minute, outcomes=outcomes, spans_left=spans_left)
            found.append(await receive(*reads))
        return found

    fast, slow = asyncio.run(both())
    assert fast == slow


USUAL = [
    ("/apps/1/events", BODY, {}),
    ("/api/v1/apps/1/events", BODY, {"flags": CLOSES}),
    ("/apps/2/events", BODY, {"key": "second", "secret": "s" * 80}),
    ("/apps/1/events", '{"name":"e","channels":["a","b"], "data":"{\\"k\\":\\"é\\"}","socket_id":"1.2"}'.encode(), {}),
    ("/apps/3/events", b'{"name":"e","channels":["c","new","stored","news-1"],"data":"{}"}', {}),
    ("/apps/1/events", BODY, {"flags": HTTP_1_0}),
    ("/apps/1/events", BODY, {"flags": HTTP_1_0 | CLOSES}),
    ("/api/v1/apps/1/events", BODY, {"signed": "/apps/1/events"}),
    ("/apps/1/events", BODY, {"unsigned": True, "fields": CREDENTIALS[0]}),
    ("/apps/1/events", BODY, {"unsigned": True, "fields": pack_fields([(0, b"Bearer one")])}),
    ("/apps/1/events", rb'{"name": "App\\Events\\Sent", "channels": ["c"], "data": "Gr\u00fc\u00dfe"}', {}),
    ("/apps/1/events", b'{"name":"e","channels":["c"],"data":"{}","socket_id":null}', {}),
    (
        "/apps/1/batch_events",
        b'{"batch":[{"name":"e","channel":"c","data":"1"},{"name":"f","channel":"c","data":""}]}',
        {},
    ),
]  # fmt: skip


async def test_usual_publishes_take_the_fast_path():
    for target, body, options in USUAL:
        receive, taken = control(fast=True)
        found, commands, rows, *_ = await receive(message(1, target, body, **options))
        assert (taken, len(found), len(rows)) == ([1], 1, 1)
        assert found[b"\1\0\0\0"][1].startswith(b"HTTP/1.1 200 OK\r\n")
        assert commands


@pytest.mark.parametrize("channel", ["stored-1", "stored-", "news", "stored-not"])
async def test_publishes_into_channels_with_a_rule_for_history_take_the_other_way(channel):
    receive, taken = control(fast=True)
    body = json.dumps({"name": "e", "channels": ["c", channel], "data": "{}"}).encode()
    await receive(message(1, "/apps/3/events", body))
    assert taken == [0]


async def test_traced_publishes_and_those_while_redis_is_away_take_the_other_way():
    receive, taken = control(fast=True, spans_left=2)
    await receive(b"".join(message(number, body=BODY) for number in range(1, 6)))
    assert taken == [3]


@pytest.mark.parametrize("size", [0, 1, 40, 10_240])
async def test_a_message_is_read_when_all_of_it_is_there(size):
    receive, taken = control(fast=True)
    whole = message(1, body=b'{"name":"e","channels":["c"],"data":"%b"}' % (b"x" * size))
    found, *_ = await receive(whole + whole[:-1])
    assert (taken, len(found)) == ([1], 1)


async def test_publishes_that_redis_does_not_confirm_in_time_are_503_and_late_replies_are_dropped():
    found = []
    for fast in (True, False):
        receive, _ = control(fast=fast)
        found.append(await receive(message(1, body=BODY), expire=True))
    assert found[0] == found[1]
    (_, response), *_ = found[0][0].values()
    assert response.startswith(b"HTTP/1.1 503")


async def test_publishes_are_503_where_redis_is_a_replica():
    found = []
    for fast in (True, False):
        receive, taken = control(fast=fast, checked=LinkDown(sent=False))
        found.append(await receive(message(1, body=BODY)))
        assert taken == ([1] if fast else [])
    assert found[0] == found[1]
    (_, response), *_ = found[0][0].values()
    assert response.startswith(b"HTTP/1.1 503")


async def test_publishes_are_503_at_once_and_not_sent_while_redis_is_congested():
    receive, taken = control(fast=True, refusal="too much is unanswered by Redis")
    found, commands, *_ = await receive(message(1, body=BODY))
    assert (taken, commands) == ([0], [])
    assert found[b"\1\0\0\0"][1].startswith(b"HTTP/1.1 503")


async def test_publishes_are_503_while_nobody_here_knows_what_was_revoked():
    """Neither the record store nor Redis' directory answers, but the masters of other shards do."""
    for fast in (True, False):
        receive, _ = control(fast=fast, is_current=False)
        found, commands, *_ = await receive(message(1, body=BODY))
        assert commands == []
        assert found[b"\1\0\0\0"][1].startswith(b"HTTP/1.1 503")
