"""What bench/soak/fuzz.py feeds to `_http` and `_fast_publish`: requests, messages, signed queries and publishes.

Each target compares the compiled code with tests/ext/http_reference.py, with llhttp, or with the modules that decide
what the compiled code leaves to them (protocol/auth.py, protocol/messages.py). Queries and publishes are signed after
they are damaged, so that damage reaches what comes after the signature.
"""

from __future__ import annotations

import hashlib
import hmac
import importlib.util
import json
import re
import struct
from collections import namedtuple
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import unquote

import hiredis

ROOT = Path(__file__).parents[2]
NOW_S = 1_700_000_000
KEY, SECRET = "key", "secret"
SECRETS = {KEY: SECRET, "second": "s" * 80}
CLIENT = b"192.0.2.1"
LINES = b"X-RateLimit-Limit: 1\r\n"
HEAD = struct.Struct("<IIBHBBHHI")
# The flag of an answer (src/redpoll/http/messages.py).
AUTHENTICATED = 4
TRACE = re.compile(rb"X-Service-Trace-Id: ([0-9a-f]{32})\r\n")
# Stands for the signature of what is around it, for one with the path without its prefix, and for the body's digest.
SIGNATURE, SHORT_SIGNATURE, DIGEST = b"SIGNATURE", b"SIGNATURE-OF-SHORT-PATH", b"DIGEST"

# Bits of a publish's first byte: which of two apps, a batch, the log is off, its limit is empty, it is refused by the
# limit.
OTHER_APP, BATCH, UNLOGGED, NO_LINES, LIMITED = (1 << bit for bit in range(5))
# Bits of Redis' replies to a read: errors among them, some don't come, a check follows the publishes, its reply refuses
# them, replies come in any order.
ERRORS, EXPIRES, CHECKED, REFUSED, OF_EACH = (1 << bit for bit in range(5))
# Between two publishes of one read.
SEPARATOR = b"\0\0"


class Difference(Exception):
    """The compiled code and the slow code disagree."""


def load_reference() -> Any:
    spec = importlib.util.spec_from_file_location("http_reference", ROOT / "tests" / "ext" / "http_reference.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class HttpTargets:
    """Feeds one input to one of the targets."""

    def __init__(self) -> None:
        from redpoll import _http
        from redpoll._fast_publish import FastApp, FastPublish
        from redpoll.cluster.redis.keys import Keys
        from redpoll.control.publish.forms import answer_form, row_form
        from redpoll.http import messages as http_messages
        from redpoll.protocol import auth, channels, messages
        from redpoll.protocol.apps import App, HistoryRule, Key
        from redpoll.protocol.errors import ApiError

        self.reference = load_reference()
        self.http, self.auth, self.channels, self.messages, self.refusal = _http, auth, channels, messages, ApiError
        self.fast_app_type, self.fast_type = FastApp, FastPublish
        self.Event = namedtuple("Event", "name data channels socket_id")
        self.answer_forms = (
            *(answer_form(closes=False), answer_form(closes=True)),
            answer_form(closes=False, http_1_0=True),
        )
        self.row_form = row_form()
        self.names = http_messages.FIELDS
        self.places = {name.lower().encode(): place for place, name in enumerate(self.names)}
        self.keys = Keys("rp")
        keys = tuple(Key(key=key, secret=secret) for key, secret in SECRETS.items())
        rule = HistoryRule(id="abcdef", name="stored-", prefix=True, keep=5, seconds=60, era="1")
        small = {"max_channels": 3, "max_batch": 2, "max_event_name_chars": 5, "max_data_bytes": 10}
        self.apps = {
            "1": App(id="1", name="usual", keys=keys),
            "2": App(id="2", name="small", keys=keys, history=(rule,), **small),
        }

    # -- requests, messages, signatures ---------------------------------------------------------------------

    def requests(self, data: bytes) -> None:
        """pack_simple reads the usual shape, all of it and nothing else, as llhttp reads it."""
        expected = self.reference.usual_request(data, frozenset(self.places))
        packed = self.http.pack_simple(data, 7, 0, CLIENT, self.places, lambda value: b"for " + value)
        if packed is None or expected is None:
            if packed is not expected:
                raise Difference(f"{packed} is not {expected}")
            return
        flags, method, message, client, missing = packed
        if missing != expected.missing:
            raise Difference(f"{missing} bytes are missing, not {expected.missing}")
        rest = b"r" * abs(missing)
        message = self.http.pack_rest(message, rest, 7)
        ((read,), used) = self.reference.read_requests(message, self.names)
        fields: dict[str, str] = {}
        for name, value in expected.fields:
            fields.setdefault(self.names[self.places[name]], value.decode())
        target = expected.target.decode()
        if client != (CLIENT if expected.forwarded is None else b"for " + expected.forwarded):
            raise Difference(f"{client} is not the client of {expected.forwarded}")
        made = (
            7,
            expected.flags,
            0,
            expected.method.decode(),
            client.decode(),
            target,
            fields,
            0,
            expected.body + rest,
        )
        if used != len(message) or read != made or (flags, method) != expected[:2]:
            raise Difference(f"{read} is not {made}")
        llhttp = self.reference.LlhttpReading(data + rest)
        if llhttp.request != (expected.method, expected.target, made[-1], not expected.flags & 4):
            raise Difference(f"llhttp reads {llhttp.request}")
        if any(field not in llhttp.headers for field in expected.fields):
            raise Difference(f"llhttp reads {llhttp.headers}")

    def stream(self, data: bytes) -> None:
        """Messages of a stream: requests, then the same bytes as answers."""
        for compiled, plain in (
            (self._requests_of, self._plain_requests),
            (self.http.read_answers, self.reference.read_answers),
        ):
            try:
                expected = plain(data)
            except ValueError:
                expected = None
            try:
                read = compiled(data)
            except ValueError:
                read = None
            if read != expected:
                raise Difference(f"{read} is not {expected}")
        response = b"HTTP/1.1 200 OK\r\n%b%bContent-Length: %d\r\n\r\n%b"
        dateline, headers, body = data[:9], data[9:20], data[20:]
        made = self.http.pack_ok(7, 5, dateline, headers, body)
        if made != self.http.pack_answer(7, 5, response % (dateline, headers, len(body), body)):
            raise Difference(f"pack_ok made {made}")

    def _requests_of(self, data: bytes) -> tuple[list[Any], int]:
        requests, used = self.http.read_requests(self.http.IncomingRequest, bytearray(data), len(data), self.names)
        return [self._plain(request) for request in requests], used

    def _plain_requests(self, data: bytes) -> tuple[list[Any], int]:
        requests, used = self.reference.read_requests(data, self.names)
        return [self._without_end(request) for request in requests], used

    def _plain(self, request: Any) -> Any:
        # A target that ends with "?" has an empty query, which an IncomingRequest doesn't distinguish.
        target = request.path + (f"?{request.query}" if request.query else "")
        if bool(request.secure) != bool(request.flags & 1):
            raise Difference("secure is not the flag")
        return self._without_end(
            self.reference.PlainRequest(
                *(request.number, request.flags, request.refusal, request.method, request.remote, target),
                *(dict(request.headers), request.announced, request.body),
            )
        )

    @staticmethod
    def _without_end(request: Any) -> Any:
        path, mark, query = request.target.partition("?")
        return request if query or not mark else request._replace(target=path)

    def queries(self, data: bytes) -> None:
        """`PATH LF QUERY LF BODY`: signed_params lets in what is signed in the usual layout, and nothing else."""
        path_bytes, _, rest = data.partition(b"\n")
        query_bytes, _, body = rest.partition(b"\n")
        query_bytes = query_bytes.replace(DIGEST, hashlib.md5(body).hexdigest().encode())
        path, query = (part.decode("utf-8", "surrogateescape") for part in (path_bytes, query_bytes))
        prefix = self.auth.PREFIX
        short = path.removeprefix(prefix) if path.startswith(prefix + "/") else None
        for mark, signed_path in ((SHORT_SIGNATURE.decode(), short or path), (SIGNATURE.decode(), path)):
            if mark in query:
                others = [field for field in query.split("&") if not field.startswith("auth_signature=")]
                text = f"POST\n{signed_path}\n{'&'.join(map(unquote, sorted(others)))}"
                query = query.replace(mark, signature_of(text), 1)
                break
        expected = None
        for signed_path in (path, short):
            if expected is None and signed_path is not None:
                expected = self.reference.usual_signature(
                    *("POST", signed_path, query, body, SECRETS, NOW_S, self.auth.MAX_SKEW_S)
                )
        app, hashes_of, skew_s = self.apps["1"], self.auth.hashes_of, self.auth.MAX_SKEW_S
        actual = self.http.signed_params("POST", path, query, body, app, hashes_of, float(NOW_S), skew_s, short)
        if actual != expected:
            raise Difference(f"{actual} is not {expected}")
        if actual is None:
            return
        params = self.auth.check_query(app, "POST", path, query, body, float(NOW_S))
        if actual != (dict(params)["auth_key"], any(name not in self.auth.AUTH_NAMES for name, _ in params)):
            raise Difference(f"{actual} is not {params}")

    # -- publishes -------------------------------------------------------------------------------------------

    def bodies(self, data: bytes) -> None:
        """A byte of bits for the replies, and bodies, each after a byte of bits: signed publishes of one read."""
        replies, parts = data[:1], data[1:].split(SEPARATOR)[:8]
        messages = [
            message(number, part[1:], app="2" if part[0] & OTHER_APP else "1", batch=bool(part[0] & BATCH))
            for number, part in enumerate(parts, 1)
            if part
        ]
        if messages:
            self._publish(replies[0], data[1] if len(data) > 1 else 0, b"".join(messages))

    def publishes(self, data: bytes) -> None:
        """Two bytes of bits and messages, as a worker sends them."""
        if len(data) > 1:
            self._publish(data[0], data[1], data[2:])

    def _publish(self, replies: int, bits: int, stream: bytes) -> None:
        """FastPublish publishes, answers and logs what the slower code would, and hands out all other messages."""
        sent: list[tuple[bytes, Any]] = []
        answers: list[bytes] = []
        rows: list[bytes] = []
        failed: list[bytes] = []

        def completed(link: Any, packed: bytes, count: int, *more: Any) -> None:
            answers.append(packed)
            rows.append(more[5])
            if len(self.reference.read_answers(packed)[0]) != count:
                raise Difference(f"not {count} answers")

        fast = self._fast(replies, bits, sent, completed, lambda link, message, *more: failed.append(message))
        try:
            expected, expected_used = self.reference.read_requests(stream, self.names)
        except ValueError:
            expected = None
        try:
            requests, used, taken = fast.take(
                "link", self.http.IncomingRequest, bytearray(stream), len(stream), self.names
            )
        except ValueError:
            if expected is not None:
                raise Difference("a message was refused") from None
            return
        if expected is None or used != expected_used:
            raise Difference(f"{used} bytes are not the messages'")
        others = [self._plain(request) for request in requests]
        published = []
        for request in expected:
            if others and others[0] == self._without_end(request):
                others.pop(0)
            else:
                published.append((request, self._events_of(request)))
        if others or len(published) != taken or taken != sum(group.left for _, group in sent):
            raise Difference(f"{taken} requests were taken, left over: {others}")
        self._check_commands(replies, b"".join(commands for commands, _ in sent), published)
        if taken:
            confirmed, refused = self._reply(replies, sent[0][1], [self._count_of(call) for _, call in published])
            fast.finish()
            left = [self.reference.read_requests(message, self.names)[0][0] for message in failed]
            if left != [published[at][0] for at in refused]:
                raise Difference(f"{left} failed")
            self._check_answers(bits, [published[at] for at in confirmed], b"".join(answers), b"".join(rows))

    def _fast(self, replies: int, bits: int, sent: list[tuple[bytes, Any]], completed: Any, failed: Any) -> Any:
        limit = None
        if bits & (NO_LINES | LIMITED):
            lines = [b"" if bits & NO_LINES else LINES] * 2 + [None] * bool(bits & LIMITED)
            turns = iter(lines * 100)

            def limit(client: str) -> bytes | None:
                return next(turns)

        return self.fast_type(
            self.apps,
            self._fast_app,
            self.auth.NO_SECRET.encode(),
            self.keys.publish,
            self.keys.shards,
            clock=lambda: NOW_S,
            timer=lambda: 0.0,
            limit=limit,
            caller=lambda app_id, fields: None,
            dateline=SimpleNamespace(line=b"Date: now\r\n"),
            ready=lambda: 0,
            publish=lambda commands, published: sent.append((commands.data, published)),
            soon=lambda finish: None,
            completed=completed,
            failed=failed,
            answers=self.answer_forms,
            row=None if bits & UNLOGGED else self.row_form,
            max_skew_s=self.auth.MAX_SKEW_S,
            api_prefix=self.auth.PREFIX.encode(),
            is_checked=self._is_checked(replies),
        )

    @staticmethod
    def _is_checked(replies: int) -> bool:
        # Where masters answer in any order, there is no check.
        return bool(replies & CHECKED) and not replies & OF_EACH

    @staticmethod
    def _count_of(call: tuple[str, str, Any]) -> int:
        return sum(len(event.channels) for event in call[2])

    def _fast_app(self, app: Any) -> Any:
        keys = tuple((key.key.encode(), key.secret.encode()) for key in app.keys)
        return self.fast_app_type(self.messages.limits_of(app), keys, 0.0)

    def _events_of(self, request: Any) -> tuple[str, str, Any]:
        """App, key and events of a publish, by the slower code. A publish that it refuses, or that needs more than a
        PUBLISH, must not be taken."""
        path, _, query = request.target.partition("?")
        match = re.fullmatch(f"(?:{self.auth.PREFIX})?/apps/([^/]+)/(batch_)?events", path)
        if match is None or request.method != "POST" or request.flags & ~13 or request.refusal or request.fields:
            raise Difference(f"{request} was taken")
        app = self.apps[match[1]]
        try:
            params = self.auth.check_query(app, "POST", path, query, request.body, NOW_S)
            if match[2]:
                call = self.messages.decode_batch(request.body, app)
            else:
                call = self.messages.decode_event(request.body, params, app)
        except self.refusal as fault:
            raise Difference(f"{request} was taken: {fault}") from None
        if call.infos or call.correlation_id is not None:
            raise Difference(f"{request} was taken")
        events = [self.Event(*event) for event in call.events_of()]
        for event in events:
            if any(self.channels.is_cache(name) or app.history_rule(name) for name in event.channels):
                raise Difference(f"{event} was taken")
        return app.id, dict(params)["auth_key"], events

    def _check_commands(self, replies: int, commands: bytes, published: list[Any]) -> None:
        expected = []
        for _, (app_id, _, events) in published:
            for event in events:
                name = event.name.encode()
                envelope = b"e 0 0 %b - 0 %d\n%b" % ((event.socket_id or "-").encode(), len(name), name)
                for channel in event.channels:
                    topic = self.keys.topic(app_id, channel)
                    expected.append([self.keys.publish, topic, envelope + event.data.encode()])
        reader = hiredis.Reader()
        reader.feed(commands)
        made = list(iter(reader.gets, False))
        if made != expected:
            raise Difference(f"{made} is not {expected}")

    def _reply(self, bits: int, group: Any, counts: list[int]) -> tuple[list[int], list[int]]:
        """Give Redis' replies to publishes, of `counts` commands each. Returns which are confirmed, and which
        fail, in order: the first error fails one; the last reply confirms it, or the reply to the check does."""
        if group.events != sum(counts):
            raise Difference(f"{group.events} commands, not {sum(counts)}")
        confirmed: list[int] = []
        refused: list[int] = []
        left = list(counts)
        checked = self._is_checked(bits)
        order = list(enumerate(at for at, count in enumerate(counts) for _ in range(count)))
        takers = [group] * len(order)
        if bits & OF_EACH:
            takers = group.of_each()
            order.sort(key=lambda reply: reply[0] * 7919 % 31)
        if bits & EXPIRES:
            del order[len(order) // 2 :]
        for place, at in order:
            fails = bits & ERRORS and place % 3 == 2
            takers[place](hiredis.ReplyError("OOM") if fails else 1)
            left[at] -= 1
            if at in refused:
                continue
            if fails:
                refused.append(at)
            elif not left[at] and not checked:
                confirmed.append(at)
            if bits & OF_EACH and takers[place].over != (at in refused + confirmed):
                raise Difference("a publish is over, or isn't")
        waiting = [at for at in range(len(counts)) if at not in refused + confirmed]
        if group.left != len(waiting):
            raise Difference(f"{group.left} requests wait, not {waiting}")
        if bits & EXPIRES:
            group.expire(TimeoutError("late"))
            refused += waiting
        elif checked:
            group(hiredis.ReplyError("READONLY") if bits & REFUSED else 1)
            (refused if bits & REFUSED else confirmed).extend(waiting)
        if group.left or not group.over:
            raise Difference(f"{group.left} requests have no outcome")
        if not bits & (EXPIRES | OF_EACH):
            try:
                group(1)
            except ValueError:
                pass
            else:
                raise Difference("one reply too many was taken")
        return confirmed, refused

    def _check_answers(self, bits: int, answered: list[Any], packed: bytes, rows: bytes) -> None:
        answers, used = self.reference.read_answers(packed)
        logged = json.loads(b"[" + rows[:-1] + b"]")
        if used != len(packed) or len(answers) != len(answered):
            raise Difference(f"{len(answers)} answers for {len(answered)} requests")
        if len(logged) != (0 if bits & UNLOGGED else len(answers)):
            raise Difference(f"{len(logged)} rows for {len(answers)} answers")
        for index, ((number, flags, response), (request, (app_id, key, events))) in enumerate(
            zip(answers, answered, strict=True)
        ):
            trace = TRACE.search(response)[1]
            closes = request.flags >> 2 & 1
            lines = b"" if bits & NO_LINES or not bits & LIMITED else LINES
            stays = b"Connection: keep-alive\r\n" if request.flags & 8 else b""
            expected = (
                b"HTTP/1.1 200 OK\r\nDate: now\r\nContent-Type: application/json\r\nX-Service-Trace-Id: %b\r\n%b%b"
                b"Content-Length: 2\r\n\r\n{}" % (trace, lines, b"Connection: close\r\n" if closes else stays)
            )
            if (number, flags, response) != (request.number, closes | AUTHENTICATED, expected):
                raise Difference(f"{response} is not {expected}")
            if logged:
                names = dict.fromkeys(event.name for event in events)
                channels = dict.fromkeys(channel for event in events for channel in event.channels)
                row = [trace.decode(), app_id, None, NOW_S * 1000, ", ".join(names), list(channels)]
                row += [sum(len(event.data.encode()) for event in events), f"key {key} from {request.client}"]
                if logged[index] != [*row, 200, False, NOW_S * 1_000_000]:
                    raise Difference(f"{logged[index]} is not {row}")


def signature_of(text: str, secret: str = SECRET) -> str:
    return hmac.new(secret.encode(), text.encode("utf-8", "replace"), hashlib.sha256).hexdigest()


def message(
    number: int, body: bytes, *, app: str = "1", batch: bool = False, prefix: str = "", flags: int = 0
) -> bytes:
    """A worker's message of a signed publish."""
    path = f"{prefix}/apps/{app}/{'batch_' if batch else ''}events"
    digest = hashlib.md5(body).hexdigest()
    query = f"auth_key={KEY}&auth_timestamp={NOW_S}&auth_version=1.0&body_md5={digest}"
    signature = signature_of(f"POST\n{path}\n{query}")
    target = f"{path}?{query}&auth_signature={signature}".encode()
    size = HEAD.size - 4 + len(b"POST") + len(CLIENT) + len(target) + len(body)
    head = HEAD.pack(size, number, flags, 0, 4, len(CLIENT), len(target), 0, 0)
    return head + b"POST" + CLIENT + target + body


def seeds() -> dict[str, list[bytes]]:
    """Valid inputs of each target, to be damaged."""
    event = b'{"name":"e","channels":["c","presence-d"],"data":"{\\"a\\":\\"\xc3\xa9\\\\n\\"}"}'
    one = b'{"name":"a b","channel":"private-x" , "data":"","socket_id":"12.345"}'
    batch = b'{"batch":[{"name":"e","channel":"a","data":"x"},{"channel":"b","name":"f","data":"y\\/"}]}'
    head = b"POST /apps/1/events?auth_key=k HTTP/1.1\r\nHost: h\r\nContent-Type: application/json\r\n"
    fields = b"Connection: keep-alive\r\nX-Service-Key: k\r\nauthorization:Bearer x\r\nUser-Agent: a \tb\r\n"
    query = b"auth_key=key&auth_timestamp=%d&auth_version=1.0&body_md5=DIGEST" % NOW_S
    answer = struct.pack("<IIB", 8, 5, 1) + b"abc"
    chunked = HEAD.pack(HEAD.size - 4 + 10, 3, 2, 413, 3, 0, 2, 4, 0xFFFF_FFFF)
    escaped = query + b"&filter_by_prefix=a%2Fb%20c+d&info=%C3%A9"
    stored = b'\x01{"name":"e","channels":["stored-a"],"data":"x"}'
    return {
        "requests": [
            head + fields + b"Content-Length: 4\r\n\r\nabcd",
            b"GET /a?b=%20 HTTP/1.1\r\nhost:h\r\nConnection: close\r\nOrigin: http://o\r\ntraceparent: 00-1\r\n\r\n",
            head + b"Content-Length: 0\r\nContent-Type: text/plain\r\nContent-Encoding: gzip\r\n\r\n",
            head + b"Content-Length: 4\r\nX-Forwarded-For: 198.51.100.7, 10.0.0.1\r\n\r\n",
            head.replace(b"1.1\r", b"1.0\r") + b"Connection: keep-alive\r\nContent-Length: 2\r\n\r\nab",
            head + b"Transfer-Encoding: chunked\r\nExpect: 100-continue\r\n\r\n0a\r\n0123456789\r\n0\r\n\r\n",
            head.replace(b"json", b"json; charset=UTF-8") + b"Content-Length: 3\r\n\r\nabc",
        ],
        "stream": [
            message(1, one, flags=5) + message(2, b"") + chunked + b"GET/?\x01\x01\0x!",
            answer + struct.pack("<IIB", 5, 0, 0) + answer,
        ],
        "queries": [
            b"/apps/1/events\n" + query + b"&auth_signature=SIGNATURE\n{}",
            b"/a\na=1&auth_key=key&auth_signature=SIGNATURE&auth_timestamp=%d&auth_version=1.0&info=x\n" % NOW_S,
            b"/api/v1/apps/1/events\n" + query + b"&auth_signature=SIGNATURE-OF-SHORT-PATH\n{}",
            b"/api/v1/apps/1/channels\n" + escaped.removesuffix(b"&info=%C3%A9") + b"&auth_signature=SIGNATURE\nx",
            b"/apps/1/channels\n" + escaped + b"&auth_signature=SIGNATURE\nx",
        ],
        "bodies": [
            b"\0\0" + event,
            bytes([ERRORS, UNLOGGED]) + event + SEPARATOR + b"\0" + one,
            bytes([0, BATCH | NO_LINES]) + batch + SEPARATOR + b"\0" + event + SEPARATOR + bytes([BATCH]) + batch,
            bytes([EXPIRES, LIMITED]) + one + SEPARATOR + b"\0" + event + SEPARATOR + b"\0" + one,
            bytes([0, OTHER_APP | BATCH | UNLOGGED | NO_LINES]) + batch + SEPARATOR + stored,
            bytes([CHECKED | ERRORS, 0]) + one + SEPARATOR + b"\0" + event + SEPARATOR + b"\0" + one,
            bytes([CHECKED | REFUSED, 0]) + event + SEPARATOR + b"\0" + one,
            bytes([OF_EACH | ERRORS, BATCH]) + batch + SEPARATOR + b"\0" + event + SEPARATOR + b"\0" + one,
            bytes([OF_EACH | EXPIRES, 0]) + event + SEPARATOR + b"\0" + event + SEPARATOR + b"\0" + one,
        ],
        "publishes": [
            b"\0\0"
            + message(1, event)
            + message(2, batch, batch=True, prefix="/api/v1", flags=4)
            + message(3, one)[:-1],
            bytes([0, UNLOGGED | NO_LINES]) + message(7, one, app="2", flags=1) + message(8, one, app="3"),
        ],
    }
