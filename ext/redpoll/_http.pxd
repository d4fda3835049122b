# Messages between worker and control, incoming requests, signatures in the usual layout: layout of what other modules
# share. Behaviour is in _http.pyx.

from libc.stdint cimport uint8_t, uint16_t, uint32_t

from redpoll._digests cimport HmacKey
from redpoll._text cimport Span

cdef enum:
    # Flags of a request (http/messages.py).
    FLAG_SECURE = 1
    FLAG_HEAD_ONLY = 2
    FLAG_CLOSES = 4
    FLAG_HTTP_1_0 = 8
    # Of an answer.
    FLAG_LAST = 1
    FLAG_AUTHENTICATED = 4

    MAX_TEXT_BYTES = 4096


cdef packed struct RequestHead:
    uint32_t size
    uint32_t number
    uint8_t flags
    uint16_t refusal
    uint8_t method_size
    uint8_t client_size
    uint16_t target_size
    uint16_t fields_size
    uint32_t announced


cdef packed struct AnswerHead:
    uint32_t size
    uint32_t number
    uint8_t flags


# What a signed query says. All spans are parts of the query; at == NULL: it isn't there.
cdef struct Signed:
    Span key
    Span signature
    Span digest
    # There are parameters besides the signature's own.
    bint more
    # The text that was signed.
    Py_ssize_t text_size
    char[MAX_TEXT_BYTES] text


cdef class IncomingRequest:
    cdef:
        readonly uint32_t number
        readonly uint8_t flags
        readonly uint16_t refusal
        readonly object announced
        public str method
        public str path
        public str query
        public str remote
        public object headers
        public bytes body
        public bint secure
        # Set while it is handled.
        public object link
        public object route
        public object parameters
        public object app
        public object token
        public object decoded
        public object found_params
        public object found_key
        public object found_trace_id
        public bytes more_headers
        public bint caller_known
        public bint sampled
        public double began


cdef Py_ssize_t whole_request(const char* at, Py_ssize_t size, RequestHead* head) except -1
cdef IncomingRequest read_request(kind, const char* message, RequestHead* head, tuple names)
cdef bint read_signed(Signed* signed, Span method, Span path, Span query, double now_s, int max_skew_s) noexcept nogil
cdef bint is_signed_by(Signed* signed, HmacKey key) except -1
cdef bint is_body_right(Signed* signed, Span body) except -1
