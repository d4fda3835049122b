"""Publishes of the usual shape in the control plane: from a worker's message to the command for Redis, and from Redis'
reply to the answer, without a Python object per request.

`FastPublish.take` reads messages. A signed publish without anything unusual is carried out here; any other message
becomes a request that control/api/middleware.py handles. So nothing here refuses anything. The signature is checked
before the body is read (protocol/README.md "Request signing"). What both ways do after they have read a request has one
description: the checks, the commands and what the event log says are in _publish, the bytes of answer and row are made
in Python once, as forms (control/publish/forms.py).
"""

from cpython.bytearray cimport PyByteArray_AS_STRING
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from cpython.unicode cimport PyUnicode_DecodeASCII
from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t
from libc.stdlib cimport free, realloc
from libc.string cimport memchr, memcmp, memcpy, memset

from redpoll._digests cimport HmacKey
from redpoll._frame cimport escaped_size, put_escaped
from redpoll._http cimport (
    FLAG_CLOSES,
    FLAG_HTTP_1_0,
    FLAG_SECURE,
    AnswerHead,
    RequestHead,
    Signed,
    is_body_right,
    is_signed_by,
    read_request,
    read_signed,
    whole_request,
)
from redpoll._publish cimport Call, Limits, commands_of
from redpoll._publish_body cimport read_body
from redpoll._replies cimport Taker
from redpoll._shards cimport Shards
from redpoll._text cimport (
    Form,
    Span,
    Text,
    add,
    is_literal,
    is_plain,
    is_same,
    put_number,
    reserve,
    span_of,
    span_of_text,
    taken,
)

import os

__all__ = ["FastApp", "FastPublish", "Published"]

cdef enum:
    # Of one request; with more, Python decides.
    MAX_EVENTS = 32
    MAX_CHANNELS = 32
    SLOTS = 26
    TRACE_SIZE = 32
    # How many rows are collected for the event log at most.
    MAX_ROWS = 500


cdef Span NOTHING
NOTHING.at, NOTHING.size = NULL, 0


cdef inline Span span_at(const void* at, Py_ssize_t size) noexcept nogil:
    cdef Span span
    span.at, span.size = <const uint8_t*> at, size
    return span


cdef class FastApp:
    """What the fast path needs of an app's record. `keys` are `(key, secret)`: its enabled keys. Until `slow_until` (Unix seconds) all its requests take the other way."""

    cdef:
        Limits limits
        tuple keys
        double slow_until

    def __init__(self, Limits limits not None, tuple keys not None, double slow_until):
        self.limits = limits
        # A row has its key as it is.
        self.keys = tuple([(key, HmacKey(secret)) for key, secret in keys if is_plain(span_of(<bytes?> key))])
        self.slow_until = slow_until


# -- requests that wait for Redis --------------------------------------------------------------------------------


cdef struct Entry:
    uint32_t number
    uint8_t flags
    bint is_batch
    # The answer is sent; replies may still come.
    bint over
    # Events, and replies to come for them.
    int events
    int left
    int app
    # Of the message in `chunk`; of header lines and of the event log's row in `text`.
    Py_ssize_t message_at, message_size
    Py_ssize_t lines_at, lines_size
    Py_ssize_t row_at, row_size
    char[TRACE_SIZE] trace


cdef class Published(Taker):
    """Publishes of one worker that were sent to Redis together: called with each reply or error, in order, and at last
    with the outcome of the check that follows them, if there is one. `of_each` is for replies in any order.

    `left`: requests without an answer. `events`: how many events they are. `expire(error)` ends all that wait.
    """

    cdef:
        FastPublish owner
        object link
        bytes chunk
        list apps
        Entry* entries
        int count, room
        # The entry that the next reply belongs to, if replies come in order.
        int current
        bint is_checked
        Text text
        double began
        int64_t began_us
        readonly int left
        readonly int events

    def __dealloc__(self):
        free(self.entries)
        free(self.text.at)

    cdef Entry* new_entry(self) except NULL:
        cdef Entry* entries
        if self.count == self.room:
            self.room = max(16, 2 * self.room)
            entries = <Entry*> realloc(self.entries, self.room * sizeof(Entry))
            if entries == NULL:
                raise MemoryError
            self.entries = entries
        return &self.entries[self.count]

    cdef int take_reply(self, object reply) except -1:
        cdef Entry* entry
        if self.current == self.count:
            if not self.owner.is_checked or self.is_checked:
                raise ValueError("a reply without a publish")
            # The last one says whether all this was published on a primary.
            self.is_checked = True
            return self.end_all(reply if isinstance(reply, Exception) else None)
        entry = &self.entries[self.current]
        entry.left -= 1
        if entry.left == 0:
            self.current += 1
        if entry.over:
            return 0
        if isinstance(reply, Exception):
            self.end(entry, reply, self.owner.timer())
        elif entry.left == 0 and not self.owner.is_checked:
            self.end(entry, None, self.owner.timer())
        return 0

    cdef int end(self, Entry* entry, error, double now) except -1:
        entry.over = True
        self.left -= 1
        if error is None:
            self.owner.complete(self, entry, <int64_t> ((now - self.began) * 1e6))
        else:
            self.owner.fail(self, entry, error)
        return 0

    cdef int end_all(self, error) except -1:
        # One reading of the clock for all.
        cdef double now = self.owner.timer()
        cdef int i
        for i in range(self.count):
            if not self.entries[i].over:
                self.end(&self.entries[i], error, now)
        return 0

    @property
    def over(self) -> bool:
        """No request waits any more."""
        return self.left == 0

    def of_each(self) -> list:
        """For replies in any order: what is called with the reply of each command."""
        cdef list takers = []
        cdef int i
        for i in range(self.count):
            takers += [_OfOne(self, i)] * self.entries[i].events
        return takers

    def expire(self, error):
        """End every request that has no answer yet with `error`."""
        self.end_all(error)


cdef class _OfOne(Taker):
    """Takes the replies of one request of several."""

    cdef:
        Published published
        int index

    def __init__(self, Published published, int index):
        self.published = published
        self.index = index

    @property
    def over(self) -> bool:
        return self.published.entries[self.index].over

    cdef int take_reply(self, object reply) except -1:
        cdef Entry* entry = &self.published.entries[self.index]
        entry.left -= 1
        if entry.over:
            return 0
        if isinstance(reply, Exception):
            return self.published.end(entry, reply, self.published.owner.timer())
        if entry.left == 0:
            return self.published.end(entry, None, self.published.owner.timer())
        return 0


# -- the way -----------------------------------------------------------------------------------------------------


cdef uint64_t[4] random_state


def _seed():
    cdef bytes seed = os.urandom(32)
    memcpy(random_state, PyBytes_AS_STRING(seed), 32)


_seed()


cdef uint64_t random_bits() noexcept nogil:
    # xoshiro256++: trace ids are unique, but not secret.
    cdef:
        uint64_t* s = random_state
        uint64_t sum_ = s[0] + s[3]
        uint64_t result = (sum_ << 23 | sum_ >> 41) + s[0]
        uint64_t shifted = s[1] << 17
    s[2] ^= s[0]
    s[3] ^= s[1]
    s[1] ^= s[2]
    s[0] ^= s[3]
    s[2] ^= shifted
    s[3] = s[3] << 45 | s[3] >> 19
    return result


cdef inline bint is_id_char(uint8_t of) noexcept nogil:
    """What an app's id may have in a path without escapes."""
    return of == b"-" or of == b"_" or of == b"." or 48 <= of <= 57 or 65 <= of <= 90 or 97 <= of <= 122


cdef void put_hex(char* to, uint64_t number, int digits) noexcept nogil:
    cdef int i
    for i in range(digits):
        to[digits - 1 - i] = b"0123456789abcdef"[number & 15]
        number >>= 4


cdef class FastPublish:
    """`take` reads a worker's messages; `finish` ends a pass of replies.

    `apps` are the records by id, and `fast_app(record)` makes a FastApp, or None for an app whose requests all take the
    other way. `stand_in` is the secret for an app or key that doesn't exist. `clock` returns Unix time,
    `timer` monotonic seconds. `limit`: None, or called with the client's address; it counts a publish and returns
    header lines, or None without counting if there were too many. `dateline.line` is the header line with the date.

    `answers` are three pairs of flags and a Form: of answers after which the connection stays open, of those after
    which it closes, and of those after which a connection of HTTP/1.0 stays open. Their values are the trace id, header
    lines and the dateline. `row` is the Form of a row of the event log, with a comma after it, or None if the log is
    off. Its values are the trace id, the app's id, the time in µs and in ms, names, channels, bytes, the caller and the
    client's address.

    `caller(id, fields)` says for an app's id and packed header fields what the log calls a caller who has a right
    credential of the app in them; None: the other way decides.

    `ready()` says how many of the next publishes must take the other way; -1: all. `publish(commands, published)`
    sends to Redis, which answers each of `published.events` commands; `is_checked`: `published` gets the outcome of a
    check after that. `soon(finish)` calls `finish` after this pass of replies. `completed(link, answers, count, app,
    is_batch, events, times, microseconds, rows, first_ms, last_ms)` gets what was answered: messages for the worker,
    and rows, empty if the log is off; `times` are pairs of a slot of Route.times and a count. `failed(link, message,
    trace, lines, app, events, began, error)` answers a request that Redis didn't confirm.
    """

    cdef:
        dict apps
        dict fast_apps
        object make_app
        HmacKey stand_in
        Shards shards
        Span command
        bytes command_bytes
        object clock, timer, limit, dateline, caller
        object ready, publish, soon, completed, failed
        bint is_checked
        bytes api_prefix
        int max_skew_s
        Form open_answer, last_answer, open_1_0_answer, row
        uint8_t open_flags, last_flags, open_1_0_flags
        # What a pass has answered, of one worker, app and route.
        object link
        Limits app
        bint is_batch
        Text answers, rows
        int answered, events
        int[SLOTS] slots
        int64_t microseconds, first_ms, last_ms
        # While a message is read.
        str last_id
        Text commands, places, unescaped, names, escaped, channels, caller_text
        Signed signed
        Call call

    def __init__(
        self,
        dict apps not None,
        fast_app,
        bytes stand_in not None,
        bytes command not None,
        Shards shards not None,
        *,
        clock,
        timer,
        limit,
        caller,
        dateline,
        ready,
        publish,
        soon,
        completed,
        failed,
        answers,
        Form row,
        int max_skew_s,
        bytes api_prefix not None,
        bint is_checked,
    ):
        self.apps = apps
        self.fast_apps = {}
        self.make_app = fast_app
        self.stand_in = HmacKey(stand_in)
        self.command_bytes = command
        self.command = span_of(command)
        self.shards = shards
        self.clock, self.timer, self.limit, self.dateline = clock, timer, limit, dateline
        self.ready, self.publish, self.soon = ready, publish, soon
        self.completed, self.failed = completed, failed
        self.caller = caller
        (
            (self.open_flags, self.open_answer),
            (self.last_flags, self.last_answer),
            (self.open_1_0_flags, self.open_1_0_answer),
        ) = answers
        self.row = row
        self.max_skew_s = max_skew_s
        self.api_prefix = api_prefix
        self.is_checked = is_checked
        self.last_id = ""
        self.call = Call.__new__(Call)
        self.call.make_room(MAX_EVENTS, MAX_CHANNELS)

    def __dealloc__(self):
        free(self.answers.at)
        free(self.rows.at)
        free(self.commands.at)
        free(self.places.at)
        free(self.unescaped.at)
        free(self.names.at)
        free(self.escaped.at)
        free(self.channels.at)
        free(self.caller_text.at)

    def take(self, link, kind, bytearray buffer not None, Py_ssize_t size, tuple names not None) -> tuple:
        """`(requests, used, taken)`: the messages in the first `size` bytes of `buffer` that take the other way, as in
        `_http.read_requests`; how many bytes all whole messages are; how many were taken here."""
        cdef:
            const char* start = PyByteArray_AS_STRING(buffer)
            Py_ssize_t used = 0, whole
            RequestHead head
            Published published = None
            list requests = []
            int slow = self.ready()
            bint is_usual
            double now_s = self.clock()
        # What is left of a read that failed.
        self.commands.size = self.places.size = 0
        while True:
            whole = whole_request(start + used, size - used, &head)
            if whole == 0:
                break
            is_usual = not head.flags & ~(FLAG_SECURE | FLAG_CLOSES | FLAG_HTTP_1_0) and not head.refusal
            if slow == 0 and is_usual:
                if published is None:
                    published = Published.__new__(Published)
                    published.owner = self
                    published.link = link
                    published.apps = []
                    published.began = self.timer()
                    published.began_us = <int64_t> (now_s * 1e6)
                if self.take_one(published, start + used, &head, now_s):
                    published.entries[published.count].message_at = used
                    published.entries[published.count].message_size = whole
                    published.count += 1
                    used += whole
                    continue
            if slow > 0:
                slow -= 1
            requests.append(read_request(kind, start + used, &head, names))
            used += whole
        if published is None or published.count == 0:
            return requests, used, 0
        # For those that fail.
        published.chunk = PyBytes_FromStringAndSize(start, used)
        published.left = published.count
        self.publish(commands_of(&self.commands, &self.places), published)
        return requests, used, published.count

    cdef bint take_one(self, Published published, const char* message, RequestHead* head, double now_s) except -1:
        """Publish this message's events, if it is of the usual shape: add its commands and its entry."""
        cdef:
            const uint8_t* at = <const uint8_t*> message + sizeof(RequestHead)
            const uint8_t* query_mark
            Call call = self.call
            Span method, client, path, query, id, rest
            Span fields, body
            FastApp app
            bint is_batch
            Entry* entry
            Py_ssize_t size
        method.at, method.size = at, head.method_size
        at += method.size
        client.at, client.size = at, head.client_size
        at += client.size
        query_mark = <const uint8_t*> memchr(at, b"?", head.target_size)
        if not is_literal(method, b"POST"):
            return False
        path.at, path.size = at, head.target_size
        query = NOTHING
        if query_mark != NULL:
            path.size = query_mark - at
            query.at, query.size = query_mark + 1, head.target_size - path.size - 1
        at += head.target_size
        fields.at, fields.size = at, head.fields_size
        at += fields.size
        # /apps/ID/events and /apps/ID/batch_events, with or without the prefix.
        rest = path
        size = PyBytes_GET_SIZE(self.api_prefix)
        if rest.size >= size and memcmp(rest.at, PyBytes_AS_STRING(self.api_prefix), size) == 0:
            rest.at += size
            rest.size -= size
        if rest.size < 6 or memcmp(rest.at, b"/apps/", 6) != 0:
            return False
        id.at, id.size = rest.at + 6, 0
        while id.size < rest.size - 6 and is_id_char(id.at[id.size]):
            id.size += 1
        rest.at += 6 + id.size
        rest.size -= 6 + id.size
        if is_literal(rest, b"/events"):
            is_batch = False
        elif is_literal(rest, b"/batch_events"):
            is_batch = True
        else:
            return False
        if id.size == 0:
            return False
        body.at, body.size = at, message + 4 + head.size - <const char*> at
        if fields.size:
            app = self.app_with(id, fields, query)
        else:
            app = self.app_signed(id, method, path, query, body, now_s)
        if app is None or now_s < app.slow_until:
            return False
        if not is_plain(client):
            return False
        reserve(&self.unescaped, body.size + 1)
        call.begin(app.limits, is_batch)
        if not read_body(call, body.at, body.size, <uint8_t*> self.unescaped.at):
            return False
        if not call.is_valid() or not call.is_publish_only():
            return False
        entry = published.new_entry()
        entry.lines_at, entry.lines_size = published.text.size, 0
        if self.limit is not None:
            lines = self.limit(PyUnicode_DecodeASCII(<const char*> client.at, client.size, NULL))
            if lines is None:
                return False
            entry.lines_size = PyBytes_GET_SIZE(<bytes?> lines)
            reserve(&published.text, entry.lines_size)
            add(&published.text, span_of(<bytes> lines))
        entry.number = head.number
        entry.flags = head.flags
        entry.is_batch = is_batch
        entry.over = False
        entry.events = entry.left = call.channel_count
        if not published.apps or published.apps[-1] is not app.limits:
            published.apps.append(app.limits)
        entry.app = len(published.apps) - 1
        put_hex(entry.trace, published.began_us // 1000, 12)
        put_hex(entry.trace + 12, random_bits(), 4)
        put_hex(entry.trace + 16, random_bits(), 16)
        entry.row_at = published.text.size
        if self.row is not None:
            self.add_row(published, entry, client)
        entry.row_size = published.text.size - entry.row_at
        call.add_commands(&self.commands, &self.places, self.command, self.shards, NOTHING)
        published.events += call.channel_count
        return True

    cdef FastApp app_signed(self, Span id, Span method, Span path, Span query, Span body, double now_s):
        """The app that the request is signed for; None: the other way decides. Notes the caller."""
        cdef:
            FastApp app
            HmacKey secret = self.stand_in
            bint known = False, right
            Py_ssize_t prefix_size = PyBytes_GET_SIZE(self.api_prefix)
            Span key
        if not read_signed(&self.signed, method, path, query, now_s, self.max_skew_s):
            return None
        # An unknown app or key costs as much as a known one.
        app = self.app_of(id)
        if app is not None:
            for entry_of_key in app.keys:
                if is_same(span_of(<bytes> (<tuple> entry_of_key)[0]), self.signed.key):
                    secret, known = <HmacKey> (<tuple> entry_of_key)[1], True
                    break
        right = is_signed_by(&self.signed, secret)
        if not right and path.at + prefix_size == id.at - 6 and prefix_size:
            # Libraries sign the path without the prefix.
            path.at += prefix_size
            path.size -= prefix_size
            right = read_signed(
                &self.signed, method, path, query, now_s, self.max_skew_s
            ) and is_signed_by(&self.signed, secret)
        if not right or not known or self.signed.more or not is_body_right(&self.signed, body):
            return None
        key = self.signed.key
        self.caller_text.size = 0
        reserve(&self.caller_text, 4 + key.size)
        add(&self.caller_text, span_at(b"key ", 4))
        add(&self.caller_text, key)
        return app

    cdef FastApp app_with(self, Span id, Span fields, Span query):
        """The app of a request with these header fields; None: the other way decides. Notes the caller."""
        cdef:
            FastApp app
            Span caller
        if query.size:
            return None
        # Asked for unknown apps, too: the time of a refusal says nothing about which ids exist.
        text = self.caller(
            PyUnicode_DecodeASCII(<const char*> id.at, id.size, NULL),
            PyBytes_FromStringAndSize(<const char*> fields.at, fields.size),
        )
        app = self.app_of(id)
        if text is None or app is None:
            return None
        caller = span_of(<bytes?> text)
        if not is_plain(caller):
            return None
        self.caller_text.size = 0
        reserve(&self.caller_text, caller.size)
        add(&self.caller_text, caller)
        return app

    cdef FastApp app_of(self, Span id):
        """The app with this id; None: there is none, or its requests take the other way."""
        cdef FastApp app
        cdef str name = self.last_id
        # Most requests are for the app of the one before.
        if not is_same(span_of_text(name), id):
            name = self.last_id = PyUnicode_DecodeASCII(<const char*> id.at, id.size, NULL)
        record = self.apps.get(name)
        if record is None:
            self.fast_apps.pop(name, None)
            return None
        app = self.fast_apps.get(name)
        if app is None or app.limits.app is not record:
            app = self.make_app(record)
            if app is None:
                return None
            self.fast_apps[name] = app
        return app

    cdef int add_row(self, Published published, Entry* entry, Span client) except -1:
        """The call's row of the event log."""
        cdef:
            Call call = self.call
            Span[9] values
            uint8_t[3][20] digits
        values[0] = span_at(entry.trace, TRACE_SIZE)
        values[1] = span_of(call.limits.app_id)
        values[2] = span_at(digits[0], put_number(digits[0], published.began_us))
        values[3] = span_at(digits[1], put_number(digits[1], published.began_us // 1000))
        values[4] = self.as_json(call.names(&self.names))
        values[5] = call.channel_list(&self.channels)
        values[6] = span_at(digits[2], put_number(digits[2], call.data_bytes()))
        values[7] = span_at(self.caller_text.at, self.caller_text.size)
        values[8] = client
        return self.row.put(&published.text, values)

    cdef Span as_json(self, Span text) except *:
        """The text as it is within the quotes of a string in JSON."""
        cdef Py_ssize_t size
        if is_plain(text):
            return text
        size = escaped_size(text.at, text.size)
        self.escaped.size = 0
        reserve(&self.escaped, size)
        put_escaped(<uint8_t*> self.escaped.at, text.at, text.size, size == text.size)
        return span_at(self.escaped.at, size)

    # -- replies

    cdef int complete(self, Published published, Entry* entry, int64_t microseconds) except -1:
        """Redis has confirmed all events of a request, so long after it was read."""
        cdef:
            Limits app = published.apps[entry.app]
            AnswerHead head
            Span[3] values
            Form answer = self.open_answer
            uint8_t answer_flags = self.open_flags
            int64_t rest = microseconds
            Py_ssize_t start
            int slot = 0
        if self.answered and (
            self.link is not published.link
            or self.app is not app
            or self.is_batch != entry.is_batch
            or self.answered == MAX_ROWS
        ):
            self.finish()
        if self.answered == 0:
            self.link, self.app, self.is_batch = published.link, app, entry.is_batch
            self.soon(self.finish)
            memset(self.slots, 0, sizeof(self.slots))
            self.events = 0
            self.microseconds = 0
            self.first_ms = self.last_ms = published.began_us // 1000
        self.answered += 1
        self.events += entry.events
        # As Route.count.
        self.microseconds += microseconds
        while rest:
            slot += 1
            rest >>= 1
        self.slots[min(slot, SLOTS - 1)] += 1
        self.first_ms = min(self.first_ms, published.began_us // 1000)
        self.last_ms = max(self.last_ms, published.began_us // 1000)
        if entry.row_size:
            reserve(&self.rows, entry.row_size)
            add(&self.rows, span_at(published.text.at + entry.row_at, entry.row_size))
        line = self.dateline.line
        values[0] = span_at(entry.trace, TRACE_SIZE)
        values[1] = span_at(published.text.at + entry.lines_at, entry.lines_size)
        values[2] = span_of(<bytes?> line)
        reserve(&self.answers, sizeof(AnswerHead))
        start = self.answers.size
        self.answers.size += sizeof(AnswerHead)
        if entry.flags & FLAG_CLOSES:
            answer, answer_flags = self.last_answer, self.last_flags
        elif entry.flags & FLAG_HTTP_1_0:
            answer, answer_flags = self.open_1_0_answer, self.open_1_0_flags
        answer.put(&self.answers, values)
        head.size = <uint32_t> (self.answers.size - start - 4)
        head.number = entry.number
        head.flags = answer_flags
        memcpy(self.answers.at + start, &head, sizeof(AnswerHead))
        return 0

    def finish(self):
        """Pass on what was answered since the last call."""
        cdef int i, count = self.answered
        if count == 0:
            return
        link, self.link = self.link, None
        self.answered = 0
        times = [(i, self.slots[i]) for i in range(SLOTS) if self.slots[i]]
        self.completed(
            link,
            taken(&self.answers),
            count,
            self.app.app,
            self.is_batch,
            self.events,
            times,
            self.microseconds,
            taken(&self.rows),
            self.first_ms,
            self.last_ms,
        )

    cdef int fail(self, Published published, Entry* entry, error) except -1:
        cdef Limits app = published.apps[entry.app]
        self.failed(
            published.link,
            published.chunk[entry.message_at : entry.message_at + entry.message_size],
            PyUnicode_DecodeASCII(entry.trace, TRACE_SIZE, NULL),
            PyBytes_FromStringAndSize(published.text.at + entry.lines_at, entry.lines_size),
            app.app,
            entry.events,
            published.began,
            error,
        )
        return 0
