"""What one request publishes: its events, whether they are allowed, their commands for Redis, and what the event log
says of them.

A `Call` is filled by the reader of usual bodies (_publish_body), or by protocol/messages.py from any other request.
What comes after that is here, once. protocol/messages.py passes the rules that hold for all apps, and has the text of
each refusal.
"""

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from cpython.unicode cimport PyUnicode_DecodeUTF8
from libc.stdint cimport uint8_t
from libc.stdlib cimport free, realloc
from libc.string cimport memchr, memcmp, memset

from redpoll._frame cimport Publish, measure_publish, put_publish
from redpoll._shards cimport Shards
from redpoll._text cimport Span, Text, add, is_same, reserve, span_of, span_of_text, taken

from enum import IntEnum

__all__ = ["CACHED", "RULED", "Call", "Commands", "Limits", "Refusal", "Rules"]

# What an event needs besides PUBLISH: it becomes the channel's cached event; a rule of the app's history names the
# channel.
CACHED = 1
RULED = 2


class Refusal(IntEnum):
    """Why a call is refused; 0 if it isn't."""

    TOO_MANY_CHANNELS = Fault.TOO_MANY_CHANNELS
    RESERVED_CHANNEL = Fault.RESERVED_CHANNEL
    INVALID_CHANNEL = Fault.INVALID_CHANNEL
    ENCRYPTED_CHANNEL = Fault.ENCRYPTED_CHANNEL
    NAME_MISSING = Fault.NAME_MISSING
    NAME_SIZE = Fault.NAME_SIZE
    NAME_RESERVED = Fault.NAME_RESERVED
    DATA_MISSING = Fault.DATA_MISSING
    DATA_SIZE = Fault.DATA_SIZE
    SOCKET_ID = Fault.SOCKET_ID


# -- texts -------------------------------------------------------------------------------------------------------


cdef inline bint starts_with(Span text, bytes prefix) noexcept:
    cdef Py_ssize_t size = PyBytes_GET_SIZE(prefix)
    return text.size >= size and (size == 0 or text.at[0] == <uint8_t> PyBytes_AS_STRING(prefix)[0]) and memcmp(
        text.at, PyBytes_AS_STRING(prefix), size
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


cdef Py_ssize_t chars_of(Span text) noexcept nogil:
    """The characters of UTF-8 text: its bytes but those that continue one."""
    cdef Py_ssize_t i, count = 0
    for i in range(text.size):
        count += text.at[i] & 0xC0 != 0x80
    return count


cdef inline bint is_digits(const uint8_t* at, Py_ssize_t size) noexcept nogil:
    cdef Py_ssize_t i
    for i in range(size):
        if not 48 <= at[i] <= 57:
            return False
    return size > 0


cdef inline bint is_our_number(const uint8_t* at, Py_ssize_t size) noexcept nogil:
    """Digits that a worker may have given: below 10^18, without a leading zero."""
    return size <= 18 and (size == 1 or at[0] != b"0")


cdef str str_of(Span text):
    return PyUnicode_DecodeUTF8(<const char*> text.at, text.size, NULL) if text.size else ""


cdef inline Span span_in(Text* room) noexcept nogil:
    cdef Span span
    span.at, span.size = <const uint8_t*> room.at, room.size
    return span


# -- rules -------------------------------------------------------------------------------------------------------


cdef class Rules:
    """What holds for the names of every app. Channels have at most `max_channel_chars` of `channel_chars`; those of a
    user begin with `user_prefix`, and those with `own_prefix` are the server's."""

    def __init__(
        self,
        *,
        bytes channel_chars not None,
        int max_channel_chars,
        bytes own_prefix not None,
        bytes user_prefix not None,
        bytes encrypted_prefix not None,
        tuple cache_prefixes not None,
        tuple reserved_names not None,
    ):
        memset(self.channel_chars, 0, 256)
        for char in channel_chars:
            self.channel_chars[<uint8_t> char] = 1
        memset(self.begins_channel, 0, sizeof(self.begins_channel))
        memset(self.begins_name, 0, sizeof(self.begins_name))
        for prefix in (own_prefix, user_prefix, encrypted_prefix, *cache_prefixes):
            self.begins_channel[<uint8_t> prefix[0]] = True
        for prefix in reserved_names:
            self.begins_name[<uint8_t> prefix[0]] = True
        self.max_channel_chars = max_channel_chars
        self.own_prefix = own_prefix
        self.user_prefix = user_prefix
        self.encrypted_prefix = encrypted_prefix
        self.cache_prefixes = cache_prefixes
        self.reserved_names = reserved_names


cdef class Limits:
    """What an app's record says about publishes. `stored` and `stored_prefixes` are the channels that a rule of its
    history names; `caches`: cache channels keep their last event."""

    def __init__(
        self,
        app,
        Rules rules not None,
        *,
        int max_channels,
        int max_batch,
        int max_name_chars,
        int max_data_bytes,
        bint caches,
        tuple stored not None=(),
        tuple stored_prefixes not None=(),
    ):
        self.app = app
        self.app_id = app.id.encode()
        self.rules = rules
        self.max_channels = max_channels
        self.max_batch = max_batch
        self.max_name_chars = max_name_chars
        self.max_data_bytes = max_data_bytes
        self.caches = caches
        self.stores = len(stored) + len(stored_prefixes) > 0
        self.stored = stored
        self.stored_prefixes = stored_prefixes

    cdef Fault check_channel(self, Span channel) noexcept:
        cdef:
            Rules rules = self.rules
            Py_ssize_t i = 0
        if channel.size == 0:
            return INVALID_CHANNEL
        if rules.begins_channel[channel.at[0]]:
            if starts_with(channel, rules.own_prefix):
                return RESERVED_CHANNEL
            if starts_with(channel, rules.user_prefix):
                i = PyBytes_GET_SIZE(rules.user_prefix)
                if i == channel.size:
                    return INVALID_CHANNEL
        if channel.size > rules.max_channel_chars:
            return INVALID_CHANNEL
        while i < channel.size:
            if not rules.channel_chars[channel.at[i]]:
                return INVALID_CHANNEL
            i += 1
        return NO_FAULT

    cdef int needs(self, Span channel) noexcept:
        """CACHED and RULED, for an event on this channel, which isn't refused."""
        cdef int needed = 0
        if (
            self.caches
            and self.rules.begins_channel[channel.at[0]]
            and starts_with_any(channel, self.rules.cache_prefixes)
        ):
            needed |= 1
        if self.stores and (starts_with_any(channel, self.stored_prefixes) or is_any(channel, self.stored)):
            needed |= 2
        return needed


# -- commands ----------------------------------------------------------------------------------------------------


cdef class Commands:
    """Commands in RESP, in order: `data` has all `count` of them."""

    def each(self) -> list:
        """`(shard, command)` of each."""
        cdef:
            const Place* places = <const Place*> PyBytes_AS_STRING(self.places)
            const char* at = PyBytes_AS_STRING(self.data)
            list commands = []
            int i
        for i in range(self.count):
            commands.append((places[i].shard, PyBytes_FromStringAndSize(at, places[i].size)))
            at += places[i].size
        return commands


cdef Commands commands_of(Text* commands, Text* places):
    """What was added to the two texts, which are empty afterwards."""
    cdef Commands made = Commands.__new__(Commands)
    made.count = <int> (places.size // <Py_ssize_t> sizeof(Place))
    made.data = taken(commands)
    made.places = taken(places)
    return made


# -- calls -------------------------------------------------------------------------------------------------------


cdef class Call:
    """The events of one request to publish. `infos`: for each event, the attributes that were asked for. A batch has
    one channel for each event."""

    def __init__(self, Limits limits not None, bint is_batch=False):
        self.begin(limits, is_batch)
        self.texts = []
        self.infos = self.ends = ()

    def __dealloc__(self):
        free(self.events)
        free(self.channels)

    cdef void begin(self, Limits limits, bint is_batch) noexcept:
        self.limits = limits
        self.is_batch = is_batch
        self.event_count = self.channel_count = 0

    cdef int make_room(self, int events, int channels) except -1:
        """For as many events and channels in all."""
        cdef void* at
        if events > self.event_room:
            events = max(events, 2 * self.event_room)
            at = realloc(self.events, events * sizeof(Event))
            if at == NULL:
                raise MemoryError
            self.events, self.event_room = <Event*> at, events
        if channels > self.channel_room:
            channels = max(channels, 2 * self.channel_room)
            at = realloc(self.channels, channels * sizeof(Span))
            if at == NULL:
                raise MemoryError
            self.channels, self.channel_room = <Span*> at, channels
        return 0

    def add(self, names, name, data, socket_id) -> None:
        """Add an event. All but the channels' `names` may be None: it wasn't given. Raises UnicodeEncodeError for
        lone surrogates."""
        cdef:
            Py_ssize_t count = len(names)
            Event* event
            int i
        self.make_room(self.event_count + 1, self.channel_count + <int> count)
        event = &self.events[self.event_count]
        event.name, event.data, event.socket_id = optional_span(name), optional_span(data), optional_span(socket_id)
        for i in range(count):
            self.channels[self.channel_count + i] = span_of_text(<str?> names[i])
        self.texts += (names, name, data, socket_id)
        event.first_channel = self.channel_count
        event.channel_count = <int> count
        self.channel_count += <int> count
        self.event_count += 1

    # -- checks

    cdef Fault check_channels(self, Event* event) noexcept:
        """Refuse the channels of the last event, or make each of them occur once."""
        cdef:
            Span* channels = self.channels + event.first_channel
            int i, j, count = 0
            Fault fault
        if event.channel_count > self.limits.max_channels:
            return TOO_MANY_CHANNELS
        for i in range(event.channel_count):
            fault = self.limits.check_channel(channels[i])
            if fault != NO_FAULT:
                self.refused = channels[i]
                return fault
        for i in range(event.channel_count):
            for j in range(count):
                if is_same(channels[j], channels[i]):
                    break
            else:
                channels[count] = channels[i]
                count += 1
        self.channel_count -= event.channel_count - count
        event.channel_count = count
        if count > 1:
            # Each encrypted channel has its own key, so its ciphertext is of use in no other channel.
            for i in range(count):
                if starts_with(channels[i], self.limits.rules.encrypted_prefix):
                    self.refused = channels[i]
                    return ENCRYPTED_CHANNEL
        return NO_FAULT

    cdef Fault check_event(self, Event* event) noexcept:
        """Refuse the event's other members. The socket is forgotten if no connection can have this id."""
        cdef:
            Limits limits = self.limits
            Span socket_id = event.socket_id
            const uint8_t* dot
            Py_ssize_t after
        if event.name.at == NULL:
            return NAME_MISSING
        if event.name.size == 0 or (
            event.name.size > limits.max_name_chars and chars_of(event.name) > limits.max_name_chars
        ):
            return NAME_SIZE
        if limits.rules.begins_name[event.name.at[0]] and starts_with_any(event.name, limits.rules.reserved_names):
            return NAME_RESERVED
        if event.data.at == NULL:
            return DATA_MISSING
        if event.data.size > limits.max_data_bytes:
            return DATA_SIZE
        if socket_id.at == NULL:
            return NO_FAULT
        dot = <const uint8_t*> memchr(socket_id.at, b".", socket_id.size)
        if dot == NULL:
            return SOCKET_ID
        after = socket_id.at + socket_id.size - dot - 1
        if not is_digits(socket_id.at, dot - socket_id.at) or not is_digits(dot + 1, after):
            return SOCKET_ID
        if not is_our_number(socket_id.at, dot - socket_id.at) or not is_our_number(dot + 1, after):
            event.socket_id.at = NULL
        return NO_FAULT

    cdef bint is_valid(self) noexcept:
        """Whether nothing in the call is refused. Of several events, each has one channel."""
        cdef int i
        if self.is_batch and self.event_count > self.limits.max_batch:
            return False
        for i in range(self.event_count):
            if self.check_channels(&self.events[i]) != NO_FAULT or self.check_event(&self.events[i]) != NO_FAULT:
                return False
        return True

    def refusal_of_channels(self) -> int:
        """Why the channels of the last event are refused, a Refusal; 0: they aren't, and each now occurs once."""
        return self.check_channels(&self.events[self.event_count - 1])

    def refusal_of_event(self) -> int:
        """Why the last event is refused besides its channels; 0: it isn't."""
        return self.check_event(&self.events[self.event_count - 1])

    @property
    def refused_channel(self) -> str:
        """The channel for which `refusal_of_channels` refused the event."""
        return str_of(self.refused)

    # -- what it contains

    @property
    def app(self):
        return self.limits.app

    @property
    def count(self) -> int:
        """How many events are published: one for each channel."""
        return self.channel_count

    def events_of(self) -> list:
        """`(name, data, channels, socket_id)` of each event; the last is None if no connection is excluded."""
        cdef:
            Event* event
            list events = []
            int i, j
        for i in range(self.event_count):
            event = &self.events[i]
            names = [str_of(self.channels[event.first_channel + j]) for j in range(event.channel_count)]
            socket_id = None if event.socket_id.at == NULL else str_of(event.socket_id)
            events.append((str_of(event.name), str_of(event.data), names, socket_id))
        return events

    cdef bint is_publish_only(self) noexcept:
        cdef int i
        if not self.limits.caches and not self.limits.stores:
            return True
        for i in range(self.channel_count):
            if self.limits.needs(self.channels[i]):
                return False
        return True

    @property
    def is_plain(self) -> bool:
        """Each event needs nothing but PUBLISH."""
        return self.is_publish_only()

    def needs(self) -> list:
        """For each channel of the call, what its event needs besides PUBLISH: CACHED and RULED, added."""
        cdef int i
        return [self.limits.needs(self.channels[i]) for i in range(self.channel_count)]

    # -- for Redis

    cdef int add_commands(self, Text* commands, Text* places, Span command, Shards shards, Span trace) except -1:
        """Add the command that publishes each event on each of its channels, and where it belongs."""
        cdef:
            Publish publish
            Event* event
            Place* place
            Py_ssize_t size
            int i, j
        publish.command = command
        publish.app = span_of(self.limits.app_id)
        publish.parts.text[1] = trace
        publish.parts.text[2].at = NULL
        publish.parts.text[2].size = 0
        reserve(places, self.channel_count * <Py_ssize_t> sizeof(Place))
        for i in range(self.event_count):
            event = &self.events[i]
            publish.parts.text[0] = event.socket_id
            publish.parts.text[3] = event.name
            publish.parts.text[4] = event.data
            for j in range(event.channel_count):
                publish.channel = self.channels[event.first_channel + j]
                size = measure_publish(&publish, shards)
                reserve(commands, size)
                put_publish(<uint8_t*> commands.at + commands.size, &publish)
                commands.size += size
                place = <Place*> (places.at + places.size)
                place.size, place.shard = <int> size, publish.shard
                places.size += sizeof(Place)
        return 0

    def pack(self, bytes command not None, Shards shards not None, str trace=None) -> Commands:
        """The commands, PUBLISH or SPUBLISH, of all events. `trace` goes to the workers."""
        cdef Text commands, places
        memset(&commands, 0, sizeof(Text))
        memset(&places, 0, sizeof(Text))
        try:
            self.add_commands(&commands, &places, span_of(command), shards, optional_span(trace))
            return commands_of(&commands, &places)
        finally:
            free(commands.at)
            free(places.at)

    # -- for the event log

    cdef Span names(self, Text* room) except *:
        """The events' names, each once and in order, with `, ` between them; in `room` if they are several."""
        cdef int i, j
        if self.event_count == 1:
            return self.events[0].name
        room.size = 0
        for i in range(self.event_count):
            for j in range(i):
                if is_same(self.events[j].name, self.events[i].name):
                    break
            else:
                reserve(room, self.events[i].name.size + 2)
                if i:
                    add(room, COMMA)
                add(room, self.events[i].name)
        return span_in(room)

    cdef bint is_first(self, int at) noexcept:
        """No earlier event has this channel."""
        cdef int i
        if self.event_count > 1:
            for i in range(at):
                if is_same(self.channels[i], self.channels[at]):
                    return False
        return True

    cdef Span channel_list(self, Text* room) except *:
        """The channels, each once and in order, as they are within the quotes of a list in JSON; in `room` if they are
        several."""
        cdef int i
        if self.channel_count == 1:
            return self.channels[0]
        room.size = 0
        for i in range(self.channel_count):
            if self.is_first(i):
                reserve(room, self.channels[i].size + 3)
                if i:
                    add(room, QUOTED_COMMA)
                add(room, self.channels[i])
        return span_in(room)

    cdef Py_ssize_t data_bytes(self) noexcept:
        cdef:
            Py_ssize_t size = 0
            int i
        for i in range(self.event_count):
            size += self.events[i].data.size
        return size

    def describe(self) -> tuple:
        """`(names, channels, bytes)` for the event log: all names as one text, the channels, each once, and the bytes
        of the events' data."""
        cdef:
            Text room
            int i
        memset(&room, 0, sizeof(Text))
        try:
            names = str_of(self.names(&room))
        finally:
            free(room.at)
        channels = [str_of(self.channels[i]) for i in range(self.channel_count) if self.is_first(i)]
        return names, channels, self.data_bytes()


cdef bytes comma = b", ", quoted_comma = b'","'
cdef Span COMMA = span_of(comma), QUOTED_COMMA = span_of(quoted_comma)


cdef inline Span optional_span(text) except *:
    cdef Span span
    if text is not None:
        return span_of_text(<str?> text)
    span.at = NULL
    span.size = 0
    return span
