# What one request publishes, and the rules for it: layout. Behaviour is in _publish.pyx.

from libc.stdint cimport uint8_t

from redpoll._shards cimport Shards
from redpoll._text cimport Span, Text

cdef enum Fault:
    # Why a request is refused. protocol/messages.py has the error of each.
    NO_FAULT
    TOO_MANY_CHANNELS
    RESERVED_CHANNEL
    INVALID_CHANNEL
    ENCRYPTED_CHANNEL
    NAME_MISSING
    NAME_SIZE
    NAME_RESERVED
    DATA_MISSING
    DATA_SIZE
    SOCKET_ID


cdef struct Event:
    # at == NULL: it isn't there.
    Span name
    Span data
    Span socket_id
    # In the call's channels.
    int first_channel
    int channel_count


cdef struct Place:
    # Of one command: its bytes, and the shard that it is for.
    int size
    int shard


cdef class Rules:
    cdef:
        uint8_t[256] channel_chars
        # Whether one of the prefixes of channels, or of names, begins with this byte.
        uint8_t[256] begins_channel, begins_name
        int max_channel_chars
        bytes own_prefix, user_prefix, encrypted_prefix
        tuple cache_prefixes, reserved_names


cdef class Limits:
    cdef:
        readonly object app
        readonly int max_batch
        Rules rules
        bytes app_id
        int max_channels, max_name_chars, max_data_bytes
        bint caches, stores
        tuple stored, stored_prefixes

    cdef Fault check_channel(self, Span channel) noexcept
    cdef int needs(self, Span channel) noexcept


cdef class Commands:
    cdef:
        readonly bytes data
        readonly int count
        bytes places


cdef class Call:
    cdef:
        Limits limits
        Event* events
        Span* channels
        int event_count, event_room
        # Of all events.
        int channel_count, channel_room
        # The objects whose bytes the spans are, unless the caller keeps them.
        list texts
        # The channel that `check_channels` refused.
        Span refused
        readonly bint is_batch
        public tuple infos
        public object correlation_id
        # The places of the events that end their channels.
        public tuple ends

    cdef void begin(self, Limits limits, bint is_batch) noexcept
    cdef int make_room(self, int events, int channels) except -1
    cdef bint is_first(self, int at) noexcept
    cdef Fault check_channels(self, Event* event) noexcept
    cdef Fault check_event(self, Event* event) noexcept
    cdef bint is_valid(self) noexcept
    cdef bint is_publish_only(self) noexcept
    cdef int add_commands(self, Text* commands, Text* places, Span command, Shards shards, Span trace) except -1
    cdef Span names(self, Text* room) except *
    cdef Span channel_list(self, Text* room) except *
    cdef Py_ssize_t data_bytes(self) noexcept


cdef Commands commands_of(Text* commands, Text* places)
