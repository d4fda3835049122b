"""Publishes of the usual shape in the control plane: from a worker's message to the command for Redis, and from Redis'
reply to the answer, without a Python object per request.

`FastPublish.take` reads messages. A signed publish without anything unusual is carried out here; any other message
becomes a request that control/api/middleware.py handles. So nothing here refuses anything, and both ways give the same
answers and the same rows in the event log. The signature is checked before the body is read (protocol/README.md
"Request signing"). Limits and prefixes of names are those of redpoll.protocol, passed by control/publish/fast_publish.py.
"""

from cpython.bytearray cimport PyByteArray_AS_STRING
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from cpython.unicode cimport PyUnicode_DecodeASCII
from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t
from libc.stdlib cimport free, malloc, realloc
from libc.string cimport memchr, memcmp, memcpy, memset, strlen

from redpoll._frame cimport Publish, measure_publish, put_publish
from redpoll._http cimport (
    FLAG_AUTHENTICATED,
    FLAG_CLOSES,
    FLAG_LAST,
    FLAG_SECURE,
    AnswerHead,
    RequestHead,
    Signed,
    is_body_right,
    is_right,
    read_request,
    read_signed,
    whole_request,
)
from redpoll._shards cimport Shards
from redpoll._text cimport Span, put, put_number

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
    # An empty buffer keeps this much: the commands of a read of 256 KiB, but not of large events for many channels.
    MAX_KEPT_BYTES = 1048576

# -- text --------------------------------------------------------------------------------------------------------

# Characters of a channel's name, and those that are written in JSON as they are.
cdef uint8_t[256] channel_chars
cdef uint8_t[256] plain_chars
memset(channel_chars, 0, 256)
memset(plain_chars, 0, 256)


def _fill_tables():
    for char in b"-_=@,.;0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz":
        channel_chars[char] = 1
    for char in range(0x20, 0x7F):
        plain_chars[char] = 1
    plain_chars[<int> b'"'] = plain_chars[<int> b"\\"] = 0


_fill_tables()
del _fill_tables


cdef struct Text:
    # Bytes that grow at their end.
    char* at
    Py_ssize_t size
    Py_ssize_t room


cdef int reserve(Text* text, Py_ssize_t more) except -1:
    """Make room for `more` bytes. Pointers into the text end here."""
    cdef:
        Py_ssize_t room
        char* at
    if text.room - text.size >= more:
        return 0
    room = max(2 * text.room, text.size + more)
    at = <char*> realloc(text.at, room)
    if at == NULL:
        raise MemoryError
    text.at = at
    text.room = room
    return 0


cdef inline void give_back(Text* text) noexcept:
    """Don't keep the memory of a burst for ever. The text is used up."""
    if text.room > MAX_KEPT_BYTES:
        free(text.at)
        text.at = NULL
        text.room = 0


cdef inline void add(Text* text, const char* source, Py_ssize_t size) noexcept:
    # After `reserve`. Of nothing, either may be NULL, which memcpy doesn't allow.
    if size:
        memcpy(text.at + text.size, source, size)
        text.size += size


cdef inline void add_literal(Text* text, const char* literal) noexcept:
    add(text, literal, strlen(literal))


cdef inline void add_number(Text* text, uint64_t number) noexcept:
    text.size += put_number(<uint8_t*> text.at + text.size, number)


cdef inline void add_span(Text* text, Span span) noexcept:
    add(text, <const char*> span.at, span.size)


cdef inline bytes taken(Text* text):
    """The text as bytes; it is empty afterwards."""
    cdef bytes made = PyBytes_FromStringAndSize(text.at, text.size)
    text.size = 0
    give_back(text)
    return made


cdef inline Span span_of(bytes of) noexcept:
    cdef Span span
    span.at = <const uint8_t*> PyBytes_AS_STRING(of)
    span.size = PyBytes_GET_SIZE(of)
    return span


cdef Span DASH = span_of(b"-")


cdef inline bint is_same(Span a, Span b) noexcept nogil:
    return a.size == b.size and memcmp(a.at, b.at, a.size) == 0


cdef inline bint is_plain(Span text) noexcept nogil:
    cdef Py_ssize_t i
    for i in range(text.size):
        if not plain_chars[text.at[i]]:
            return False
    return True


cdef inline bint starts_with(Span text, bytes prefix) noexcept:
    return text.size >= PyBytes_GET_SIZE(prefix) and memcmp(
        text.at, PyBytes_AS_STRING(prefix), PyBytes_GET_SIZE(prefix)
    ) == 0


cdef bint starts_with_any(Span text, tuple prefixes) noexcept:
    for prefix in prefixes:
        if starts_with(text, <bytes> prefix):
            return True
    return False


cdef bint is_any(Span text, tuple texts) noexcept:
    for other in texts:
        if is_same(text, span_of(<bytes> other)):
            return True
    return False


cdef bint is_utf8(const uint8_t* at, const uint8_t* end) noexcept nogil:
    """Whether the bytes are UTF-8 without surrogates (RFC 3629 section 4)."""
    cdef:
        uint32_t code
        int more, i
        uint32_t least
    while at < end:
        if at[0] < 0x80:
            at += 1
            continue
        if at[0] & 0xE0 == 0xC0:
            code, more, least = at[0] & 0x1F, 1, 0x80
        elif at[0] & 0xF0 == 0xE0:
            code, more, least = at[0] & 0x0F, 2, 0x800
        elif at[0] & 0xF8 == 0xF0:
            code, more, least = at[0] & 0x07, 3, 0x10000
        else:
            return False
        if end - at <= more:
            return False
        for i in range(1, more + 1):
            if at[i] & 0xC0 != 0x80:
                return False
            code = code << 6 | (at[i] & 0x3F)
        if code < least or code > 0x10FFFF or 0xD800 <= code <= 0xDFFF:
            return False
        at += more + 1
    return True


# -- JSON of the usual shape -------------------------------------------------------------------------------------


cdef struct Json:
    const uint8_t* at
    const uint8_t* end
    # Where texts with escapes are written: as much room as the body is long.
    uint8_t* to


cdef struct Event:
    Span name
    Span data
    Span socket_id
    # In `channels` of the call.
    int first_channel
    int channel_count


cdef struct Call:
    Event[MAX_EVENTS] events
    Span[MAX_CHANNELS] channels
    int event_count
    int channel_count


cdef inline void skip_space(Json* json) noexcept nogil:
    while json.at < json.end and (json.at[0] == 0x20 or json.at[0] == 0x0A or json.at[0] == 0x0D or json.at[0] == 0x09):
        json.at += 1


cdef inline bint skip(Json* json, uint8_t char_) noexcept nogil:
    """Whether the next token is this character, which is passed."""
    skip_space(json)
    if json.at == json.end or json.at[0] != char_:
        return False
    json.at += 1
    return True


cdef bint read_plain(Json* json, Span* found) noexcept nogil:
    """A string of printable ASCII without escapes."""
    if not skip(json, b'"'):
        return False
    found.at = json.at
    while json.at < json.end and plain_chars[json.at[0]]:
        json.at += 1
    found.size = json.at - found.at
    if json.at == json.end or json.at[0] != b'"':
        return False
    json.at += 1
    return True


cdef inline uint64_t is_special(const uint8_t* at) noexcept nogil:
    """Not 0 if one of eight bytes is a quote, a backslash, below 0x20 or above 0x7F. No such byte is missed."""
    cdef:
        uint64_t word, ones = 0x0101010101010101, high = 0x8080808080808080
        uint64_t quote, back
    memcpy(&word, at, 8)
    quote = word ^ (ones * 0x22)
    back = word ^ (ones * 0x5C)
    return ((word - ones * 0x20) | (quote - ones) | (back - ones) | word) & high


cdef bint read_text(Json* json, Span* found) noexcept nogil:
    """A string of any characters, with escapes of one character."""
    cdef:
        const uint8_t* at
        const uint8_t* end = json.end
        const uint8_t* run
        uint8_t* to = json.to
        uint8_t char_
        bint ascii_ = True
    if not skip(json, b'"'):
        return False
    at = run = json.at
    found.at = NULL
    while True:
        while end - at >= 8 and not is_special(at):
            at += 8
        if at >= end:
            return False
        char_ = at[0]
        if char_ == b'"':
            break
        if char_ == b"\\":
            to = put(to, <const char*> run, at - run)
            if end - at < 2:
                return False
            char_ = at[1]
            if char_ == b'"' or char_ == b"\\" or char_ == b"/":
                to[0] = char_
            elif char_ == b"n":
                to[0] = 0x0A
            elif char_ == b"r":
                to[0] = 0x0D
            elif char_ == b"t":
                to[0] = 0x09
            elif char_ == b"b":
                to[0] = 0x08
            elif char_ == b"f":
                to[0] = 0x0C
            else:
                return False
            to += 1
            at += 2
            run = at
            found.at = json.to
        elif char_ < 0x20:
            return False
        else:
            if char_ >= 0x80:
                ascii_ = False
            at += 1
    if found.at == NULL:
        found.at = run
        found.size = at - run
    else:
        to = put(to, <const char*> run, at - run)
        found.size = to - json.to
        json.to = to
    json.at = at + 1
    return ascii_ or is_utf8(found.at, found.at + found.size)


cdef bint read_event(Json* json, Call* call, bint in_batch) noexcept nogil:
    """An object with an event: each member once, and none that asks for more than a publish."""
    cdef:
        Event* event
        Span key
        bint has_channel = False
    if call.event_count == MAX_EVENTS or not skip(json, b"{"):
        return False
    event = &call.events[call.event_count]
    call.event_count += 1
    event.name.at = event.data.at = event.socket_id.at = NULL
    event.first_channel = call.channel_count
    while True:
        if not read_plain(json, &key) or not skip(json, b":"):
            return False
        if key.size == 4 and memcmp(key.at, b"name", 4) == 0:
            if event.name.at != NULL or not read_plain(json, &event.name):
                return False
        elif key.size == 4 and memcmp(key.at, b"data", 4) == 0:
            if event.data.at != NULL or not read_text(json, &event.data):
                return False
        elif key.size == 7 and memcmp(key.at, b"channel", 7) == 0:
            if has_channel or call.channel_count == MAX_CHANNELS:
                return False
            has_channel = True
            if not read_plain(json, &call.channels[call.channel_count]):
                return False
            call.channel_count += 1
        elif not in_batch and key.size == 8 and memcmp(key.at, b"channels", 8) == 0:
            if has_channel or not skip(json, b"["):
                return False
            has_channel = True
            while True:
                if call.channel_count == MAX_CHANNELS or not read_plain(json, &call.channels[call.channel_count]):
                    return False
                call.channel_count += 1
                if not skip(json, b","):
                    break
            if not skip(json, b"]"):
                return False
        elif key.size == 9 and memcmp(key.at, b"socket_id", 9) == 0:
            if event.socket_id.at != NULL or not read_plain(json, &event.socket_id):
                return False
        else:
            return False
        if not skip(json, b","):
            break
    event.channel_count = call.channel_count - event.first_channel
    return has_channel and event.name.at != NULL and event.data.at != NULL and skip(json, b"}")


cdef bint read_call(Json* json, Call* call, bint is_batch) noexcept nogil:
    """The whole body of `POST events` or `POST batch_events`."""
    cdef Span key
    call.event_count = call.channel_count = 0
    if is_batch:
        if not skip(json, b"{") or not read_plain(json, &key) or key.size != 5 or memcmp(key.at, b"batch", 5) != 0:
            return False
        if not skip(json, b":") or not skip(json, b"["):
            return False
        while True:
            if not read_event(json, call, True):
                return False
            if not skip(json, b","):
                break
        if not skip(json, b"]") or not skip(json, b"}"):
            return False
    elif not read_event(json, call, False):
        return False
    skip_space(json)
    return json.at == json.end


cdef inline bint is_number(const uint8_t* at, Py_ssize_t size) noexcept nogil:
    """One of the two numbers of a socket id."""
    cdef Py_ssize_t i
    if not 0 < size <= 18 or (size > 1 and at[0] == b"0"):
        return False
    for i in range(size):
        if not 48 <= at[i] <= 57:
            return False
    return True


cdef bint is_socket_id(Span text) noexcept nogil:
    cdef const uint8_t* dot = <const uint8_t*> memchr(text.at, b".", text.size)
    return dot != NULL and is_number(text.at, dot - text.at) and is_number(dot + 1, text.at + text.size - dot - 1)


# -- apps --------------------------------------------------------------------------------------------------------


cdef class FastApp:
    """What publishing needs of an app's record. `record` is the app; `keys` are `(key, inner, outer)`: its enabled keys,
    each with HMAC's two hashes of its secret, to be copied. Requests for these channels take the other way, because their
    events may be stored: those in `stored`, those that begin with one of `stored_prefixes`, and if `caches`, cache
    channels. Until `slow_until` (Unix seconds) all requests of the app do."""

    cdef:
        readonly object record
        bytes id
        tuple keys
        int max_channels
        int max_batch
        int max_name_chars
        int max_data_bytes
        bint caches
        bint stores
        tuple stored
        tuple stored_prefixes
        double slow_until

    def __init__(
        self,
        record,
        tuple keys not None,
        *,
        int max_channels,
        int max_batch,
        int max_name_chars,
        int max_data_bytes,
        bint caches,
        double slow_until,
        tuple stored not None=(),
        tuple stored_prefixes not None=(),
    ):
        self.record = record
        self.id = record.id.encode()
        self.keys = keys
        self.max_channels = max_channels
        self.max_batch = max_batch
        self.max_name_chars = max_name_chars
        self.max_data_bytes = max_data_bytes
        self.caches = caches
        self.stores = len(stored) + len(stored_prefixes) > 0
        self.stored = stored
        self.stored_prefixes = stored_prefixes
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


cdef class Published:
    """Publishes of one worker that were sent to Redis together: called with each reply or error, in order, and at last
    with the reply to `check`, if there is one. `of_each` is for replies in any order.

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

    def __call__(self, reply):
        cdef Entry* entry
        cdef int i
        if self.current == self.count:
            if not self.owner.check or self.is_checked:
                raise ValueError("a reply without a publish")
            # The last reply says whether all this was published on a primary.
            self.is_checked = True
            if isinstance(reply, Exception) and self.owner.refusal(reply):
                self.expire(reply)
                return
            for i in range(self.count):
                if not self.entries[i].over:
                    self.end(&self.entries[i], None)
            return
        entry = &self.entries[self.current]
        entry.left -= 1
        if entry.left == 0:
            self.current += 1
        if entry.over:
            return
        if isinstance(reply, Exception):
            self.end(entry, reply)
        elif entry.left == 0 and not self.owner.check:
            self.end(entry, None)

    cdef int end(self, Entry* entry, error) except -1:
        entry.over = True
        self.left -= 1
        if error is None:
            self.owner.complete(self, entry)
        else:
            self.owner.fail(self, entry, error)
        return 0

    @property
    def over(self) -> bool:
        """No request waits any more."""
        return self.left == 0

    def of_each(self) -> list:
        """For replies in any order: what is called with the reply of each command."""
        cdef list each = []
        cdef int i
        for i in range(self.count):
            each += [_OfOne(self, i)] * self.entries[i].events
        return each

    def expire(self, error):
        """End every request that has no answer yet with `error`."""
        cdef int i
        for i in range(self.count):
            if not self.entries[i].over:
                self.end(&self.entries[i], error)


cdef class _OfOne:
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

    def __call__(self, reply):
        cdef Entry* entry = &self.published.entries[self.index]
        entry.left -= 1
        if entry.over:
            return
        if isinstance(reply, Exception):
            self.published.end(entry, reply)
        elif entry.left == 0:
            self.published.end(entry, None)


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


cdef void put_hex(char* to, uint64_t number, int digits) noexcept nogil:
    cdef int i
    for i in range(digits):
        to[digits - 1 - i] = b"0123456789abcdef"[number & 15]
        number >>= 4


cdef class FastPublish:
    """`take` reads a worker's messages; `finish` ends a pass of replies.

    `apps` are the records by id, and `fast_app(record)` makes a FastApp, or None for an app whose requests all take the
    other way. `stand_in` are HMAC's two hashes for an app or key that doesn't exist. `clock` returns Unix time,
    `timer` monotonic seconds. `limit`: None, or called with the client's address; it counts a publish and returns
    header lines, or None without counting if there were too many. `dateline.line` is the header line with the date.

    `ready()` says how many of the next publishes must take the other way; -1: all. `publish(commands, published)`
    sends to Redis, which answers each of `published.events` commands. If `check` isn't empty, it follows them, and
    confirms them by its reply unless `refusal(reply)` says why not. `completed(link, answers, count, app, is_batch,
    events, times, microseconds, rows, first_ms, last_ms)` gets what was answered: messages for the worker, and rows of
    the event log, empty if it is off; `times` are pairs of a slot of Route.times and a count. `failed(link, message,
    trace, lines, app, events, began, error)` answers a request that Redis didn't confirm.
    """

    cdef:
        dict apps
        dict fast_apps
        object make_app
        tuple stand_in
        Shards shards
        Span command
        bytes command_bytes
        object clock, timer, limit, dateline
        object ready, publish, completed, failed, refusal
        bytes check
        tuple reserved_events, cache_channels
        bytes own_prefix, encrypted_prefix, api_prefix
        int max_skew_s, max_channel_chars
        bint logs
        # What a pass has answered, of one worker, app and route.
        object link
        FastApp app
        bint is_batch
        Text answers, rows
        int answered, events
        int[SLOTS] slots
        int64_t microseconds, first_ms, last_ms
        # While a message is read.
        Text commands, unescaped
        Signed signed
        Call call

    def __init__(
        self,
        dict apps not None,
        fast_app,
        tuple stand_in not None,
        bytes command not None,
        Shards shards not None,
        *,
        clock,
        timer,
        limit,
        dateline,
        ready,
        publish,
        completed,
        failed,
        tuple reserved_events not None,
        tuple cache_channels not None,
        bytes own_prefix not None,
        bytes encrypted_prefix not None,
        int max_skew_s,
        int max_channel_chars,
        bytes api_prefix not None,
        bint logs,
        bytes check not None=b"",
        refusal=None,
    ):
        self.apps = apps
        self.fast_apps = {}
        self.make_app = fast_app
        self.stand_in = stand_in
        self.command_bytes = command
        self.command = span_of(command)
        self.shards = shards
        self.clock, self.timer, self.limit, self.dateline = clock, timer, limit, dateline
        self.ready, self.publish, self.completed, self.failed = ready, publish, completed, failed
        self.check, self.refusal = check, refusal
        self.reserved_events = reserved_events
        self.cache_channels = cache_channels
        self.own_prefix = own_prefix
        self.encrypted_prefix = encrypted_prefix
        self.api_prefix = api_prefix
        self.max_skew_s = max_skew_s
        self.max_channel_chars = max_channel_chars
        self.logs = logs

    def __dealloc__(self):
        free(self.answers.at)
        free(self.rows.at)
        free(self.commands.at)
        free(self.unescaped.at)

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
        self.commands.size = 0
        while True:
            whole = whole_request(start + used, size - used, &head)
            if whole == 0:
                break
            is_usual = not head.flags & ~(FLAG_SECURE | FLAG_CLOSES) and not head.refusal and not head.fields_size
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
        if self.check:
            reserve(&self.commands, PyBytes_GET_SIZE(self.check))
            add_span(&self.commands, span_of(self.check))
        self.publish(taken(&self.commands), published)
        return requests, used, published.count

    cdef bint take_one(self, Published published, const char* message, RequestHead* head, double now_s) except -1:
        """Publish this message's events, if it is of the usual shape: add its commands and its entry."""
        cdef:
            const uint8_t* at = <const uint8_t*> message + sizeof(RequestHead)
            const uint8_t* query_mark
            Span method, client, path, query, id, rest
            FastApp app
            bint is_batch
            bytes body
            Entry* entry
            Json json
            tuple hashes
            bint known = False
        method.at, method.size = at, head.method_size
        at += method.size
        client.at, client.size = at, head.client_size
        at += client.size
        query_mark = <const uint8_t*> memchr(at, b"?", head.target_size)
        if query_mark == NULL or method.size != 4 or memcmp(method.at, b"POST", 4) != 0:
            return False
        path.at, path.size = at, query_mark - at
        query.at, query.size = query_mark + 1, head.target_size - path.size - 1
        at += head.target_size
        # /apps/ID/events and /apps/ID/batch_events, with or without the prefix.
        rest = path
        if starts_with(rest, self.api_prefix):
            rest.at += PyBytes_GET_SIZE(self.api_prefix)
            rest.size -= PyBytes_GET_SIZE(self.api_prefix)
        if rest.size < 6 or memcmp(rest.at, b"/apps/", 6) != 0:
            return False
        id.at, id.size = rest.at + 6, 0
        while id.size < rest.size - 6 and channel_chars[id.at[id.size]]:
            id.size += 1
        rest.at += 6 + id.size
        rest.size -= 6 + id.size
        if rest.size == 7 and memcmp(rest.at, b"/events", 7) == 0:
            is_batch = False
        elif rest.size == 13 and memcmp(rest.at, b"/batch_events", 13) == 0:
            is_batch = True
        else:
            return False
        if id.size == 0 or not read_signed(&self.signed, method, path, query, now_s, self.max_skew_s):
            return False
        # An unknown app or key costs as much as a known one.
        app = self.app_of(id)
        hashes = self.stand_in
        if app is not None:
            for entry_of_key in app.keys:
                if is_same(span_of(<bytes> (<tuple> entry_of_key)[0]), self.signed.key):
                    hashes, known = (<tuple> entry_of_key)[1], True
                    break
        if not is_right(&self.signed, hashes[0], hashes[1]) or not known:
            return False
        body = PyBytes_FromStringAndSize(<const char*> at, message + 4 + head.size - <const char*> at)
        if self.signed.more or now_s < app.slow_until or not is_body_right(&self.signed, body):
            return False
        reserve(&self.unescaped, PyBytes_GET_SIZE(body) + 1)
        json.at = <const uint8_t*> PyBytes_AS_STRING(body)
        json.end = json.at + PyBytes_GET_SIZE(body)
        json.to = <uint8_t*> self.unescaped.at
        if not read_call(&json, &self.call, is_batch) or not self.is_usual(app, is_batch) or not is_plain(client):
            return False
        entry = published.new_entry()
        entry.lines_at, entry.lines_size = published.text.size, 0
        if self.limit is not None:
            lines = self.limit(PyUnicode_DecodeASCII(<const char*> client.at, client.size, NULL))
            if lines is None:
                return False
            entry.lines_size = PyBytes_GET_SIZE(<bytes?> lines)
            reserve(&published.text, entry.lines_size)
            add_span(&published.text, span_of(<bytes> lines))
        entry.number = head.number
        entry.flags = head.flags
        entry.is_batch = is_batch
        entry.over = False
        entry.events = entry.left = self.call.channel_count
        if not published.apps or published.apps[-1] is not app:
            published.apps.append(app)
        entry.app = len(published.apps) - 1
        put_hex(entry.trace, published.began_us // 1000, 12)
        put_hex(entry.trace + 12, random_bits(), 4)
        put_hex(entry.trace + 16, random_bits(), 16)
        entry.row_at = published.text.size
        if self.logs:
            self.add_row(published, entry, app, client)
        entry.row_size = published.text.size - entry.row_at
        self.add_commands(app)
        published.events += self.call.channel_count
        return True

    cdef FastApp app_of(self, Span id):
        """The app with this id; None: there is none, or its requests take the other way."""
        cdef FastApp app
        name = PyUnicode_DecodeASCII(<const char*> id.at, id.size, NULL)
        record = self.apps.get(name)
        if record is None:
            self.fast_apps.pop(name, None)
            return None
        app = self.fast_apps.get(name)
        if app is None or app.record is not record:
            app = self.make_app(record)
            if app is None:
                return None
            self.fast_apps[name] = app
        return app

    cdef bint is_usual(self, FastApp app, bint is_batch) noexcept:
        """Whether every event of the call is valid, and a plain PUBLISH."""
        cdef:
            Call* call = &self.call
            Event* event
            Span* channel
            int i, j, k
        if is_batch and call.event_count > app.max_batch:
            return False
        for i in range(call.event_count):
            event = &call.events[i]
            if not 0 < event.name.size <= app.max_name_chars or starts_with_any(event.name, self.reserved_events):
                return False
            if event.data.size > app.max_data_bytes or event.channel_count > app.max_channels:
                return False
            if event.socket_id.at != NULL and not is_socket_id(event.socket_id):
                return False
            for j in range(event.channel_count):
                channel = &call.channels[event.first_channel + j]
                if not 0 < channel.size <= self.max_channel_chars:
                    return False
                for k in range(channel.size):
                    if not channel_chars[channel.at[k]]:
                        return False
                if app.stores and (
                    starts_with_any(channel[0], app.stored_prefixes) or is_any(channel[0], app.stored)
                ):
                    return False
                if channel.at[0] == b"p" or channel.at[0] == b"c":
                    if starts_with(channel[0], self.own_prefix):
                        return False
                    if app.caches and starts_with_any(channel[0], self.cache_channels):
                        return False
                    # Each has its own key, so it must be alone.
                    if event.channel_count > 1 and starts_with(channel[0], self.encrypted_prefix):
                        return False
                for k in range(j):
                    if is_same(channel[0], call.channels[event.first_channel + k]):
                        return False
        return True

    cdef int add_commands(self, FastApp app) except -1:
        cdef:
            Publish publish
            Event* event
            Py_ssize_t size
            int i, j
        publish.command = self.command
        publish.app = span_of(app.id)
        publish.parts.text[1] = DASH
        publish.parts.text[2].at = DASH.at
        publish.parts.text[2].size = 0
        for i in range(self.call.event_count):
            event = &self.call.events[i]
            publish.parts.text[0] = DASH if event.socket_id.at == NULL else event.socket_id
            publish.parts.text[3] = event.name
            publish.parts.text[4] = event.data
            for j in range(event.channel_count):
                publish.channel = self.call.channels[event.first_channel + j]
                size = measure_publish(&publish, self.shards)
                reserve(&self.commands, size)
                put_publish(<uint8_t*> self.commands.at + self.commands.size, &publish)
                self.commands.size += size
        return 0

    cdef int add_row(self, Published published, Entry* entry, FastApp app, Span client) except -1:
        """The call's row of the event log, as store/eventlog.py encodes CallRow, with a comma after it."""
        cdef:
            Text* text = &published.text
            Call* call = &self.call
            Py_ssize_t room = 256 + TRACE_SIZE + len(app.id) + self.signed.key.size + client.size
            Py_ssize_t bytes_ = 0
            int i, j
            bint first = True
        for i in range(call.event_count):
            room += call.events[i].name.size + 2
            bytes_ += call.events[i].data.size
        for i in range(call.channel_count):
            room += call.channels[i].size + 3
        reserve(text, room)
        add_literal(text, b'["')
        add(text, entry.trace, TRACE_SIZE)
        add_literal(text, b'","')
        add_span(text, span_of(app.id))
        add_literal(text, b'",null,')
        add_number(text, published.began_us // 1000)
        add_literal(text, b',"')
        # Names and channels of a batch once each, in order.
        for i in range(call.event_count):
            for j in range(i):
                if is_same(call.events[j].name, call.events[i].name):
                    break
            else:
                if i:
                    add_literal(text, b", ")
                add_span(text, call.events[i].name)
        add_literal(text, b'",[')
        for i in range(call.channel_count):
            for j in range(i):
                if is_same(call.channels[j], call.channels[i]):
                    break
            else:
                add_literal(text, b',"' if i else b'"')
                add_span(text, call.channels[i])
                add_literal(text, b'"')
        add_literal(text, b"],")
        add_number(text, bytes_)
        add_literal(text, b',"key ')
        add_span(text, self.signed.key)
        add_literal(text, b" from ")
        add_span(text, client)
        add_literal(text, b'",200,false,')
        add_number(text, published.began_us)
        add_literal(text, b"],")
        return 0

    # -- replies

    cdef int complete(self, Published published, Entry* entry) except -1:
        """Redis has confirmed all events of a request."""
        cdef:
            FastApp app = published.apps[entry.app]
            AnswerHead head
            Span dateline
            double took_s = self.timer() - published.began
            int64_t microseconds = <int64_t> (took_s * 1e6), rest
            Py_ssize_t start, size
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
            memset(self.slots, 0, sizeof(self.slots))
            self.events = 0
            self.microseconds = 0
            self.first_ms = self.last_ms = published.began_us // 1000
        self.answered += 1
        self.events += entry.events
        # As Route.count.
        self.microseconds += microseconds
        rest = microseconds
        while rest:
            slot += 1
            rest >>= 1
        self.slots[min(slot, SLOTS - 1)] += 1
        self.first_ms = min(self.first_ms, published.began_us // 1000)
        self.last_ms = max(self.last_ms, published.began_us // 1000)
        if entry.row_size:
            reserve(&self.rows, entry.row_size)
            add(&self.rows, published.text.at + entry.row_at, entry.row_size)
        # As Request.ok and Response.render.
        line = self.dateline.line
        dateline = span_of(<bytes?> line)
        size = sizeof(AnswerHead) + 200 + dateline.size + TRACE_SIZE + entry.lines_size
        reserve(&self.answers, size)
        start = self.answers.size
        self.answers.size += sizeof(AnswerHead)
        add_literal(&self.answers, b"HTTP/1.1 200 OK\r\n")
        add_span(&self.answers, dateline)
        add_literal(&self.answers, b"Content-Type: application/json\r\nX-Service-Trace-Id: ")
        add(&self.answers, entry.trace, TRACE_SIZE)
        add_literal(&self.answers, b"\r\n")
        add(&self.answers, published.text.at + entry.lines_at, entry.lines_size)
        if entry.flags & FLAG_CLOSES:
            add_literal(&self.answers, b"Connection: close\r\n")
        add_literal(&self.answers, b"Content-Length: 2\r\n\r\n{}")
        head.size = <uint32_t> (self.answers.size - start - 4)
        head.number = entry.number
        head.flags = FLAG_AUTHENTICATED | (FLAG_LAST if entry.flags & FLAG_CLOSES else 0)
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
            self.app.record,
            self.is_batch,
            self.events,
            times,
            self.microseconds,
            taken(&self.rows),
            self.first_ms,
            self.last_ms,
        )

    cdef int fail(self, Published published, Entry* entry, error) except -1:
        cdef FastApp app = published.apps[entry.app]
        self.failed(
            published.link,
            published.chunk[entry.message_at : entry.message_at + entry.message_size],
            PyUnicode_DecodeASCII(entry.trace, TRACE_SIZE, NULL),
            PyBytes_FromStringAndSize(published.text.at + entry.lines_at, entry.lines_size),
            app.record,
            entry.events,
            published.began,
            error,
        )
        return 0
