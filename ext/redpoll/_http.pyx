"""The hot path of HTTP: heads of upgrades, requests of the usual shape, the messages between worker and control, the usual
signature.

But for heads, each function knows the common case alone and returns None for anything else, which slower code then
decides: llhttp for bytes (http/reader.py), protocol/auth.py for signatures. So these refuse nothing.
"""

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from cpython.bytearray cimport PyByteArray_AS_STRING
from cpython.unicode cimport PyUnicode_DecodeASCII, PyUnicode_DecodeUTF8
from libc.stdint cimport uint8_t, uint16_t, uint32_t, uint64_t
from libc.stdio cimport snprintf
from libc.string cimport memchr, memcmp, memcpy, memset

from redpoll._digests cimport HmacKey, is_hex_of, put_md5
from redpoll._text cimport HIGH_BITS, Span, has_byte, hex_digit, put, span_of, span_of_text

import binascii
from hmac import compare_digest

__all__ = [
    "Head",
    "IncomingRequest",
    "pack_answer",
    "pack_ok",
    "pack_request",
    "pack_rest",
    "pack_simple",
    "parse_head",
    "read_answers",
    "read_requests",
    "signed_params",
    "upgrade_fault",
]

cdef extern from "<string.h>" nogil:
    void* memmem(const void* in_, size_t in_size, const void* what, size_t size)

cdef enum:
    MAX_HEAD_BYTES = 16384
    MAX_HEADERS = 100
    MAX_LENGTH_DIGITS = 7
    MAX_BODY_BYTES = 1048576
    # The body of a request that is kept until the rest of it comes (worker/ingress/http_requests.py).
    MAX_KEPT_BODY_BYTES = 16384

cdef enum CharKind:
    # Bits of what a byte may be part of (RFC 9110): a token, a target, a field's value. The usual ones are without
    # obs-text, and without what llhttp refuses in a target or reads otherwise.
    IN_TOKEN = 1
    IN_TARGET = 2
    IN_VALUE = 4
    IN_USUAL_TARGET = 8
    IN_USUAL_VALUE = 16

cdef uint8_t[256] char_kinds


def _fill_char_kinds():
    cdef int byte
    for byte in range(256):
        char_kinds[byte] = 0
        if 0x21 <= byte <= 0x7E:
            char_kinds[byte] = IN_TARGET | IN_VALUE | IN_USUAL_TARGET | IN_USUAL_VALUE
        elif byte >= 0x80:
            char_kinds[byte] = IN_TARGET | IN_VALUE
        elif byte == 0x20 or byte == 0x09:
            char_kinds[byte] = IN_VALUE | IN_USUAL_VALUE
    for byte in b'"#<>\\^`{|}':
        char_kinds[byte] &= ~IN_USUAL_TARGET
    for byte in b"!#$%&'*+-.^_`|~0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz":
        char_kinds[byte] |= IN_TOKEN


_fill_char_kinds()


# -- heads -----------------------------------------------------------------------------------------------------


cdef bint all_are(const uint8_t* at, const uint8_t* end, uint8_t kind) noexcept nogil:
    while at < end:
        if not char_kinds[at[0]] & kind:
            return False
        at += 1
    return True


cdef const uint8_t* end_of_line(const uint8_t* at, const uint8_t* end) noexcept nogil:
    """Where the next CRLF begins; `end` without one."""
    cdef const uint8_t* line_end = at
    while line_end < end:
        line_end = <const uint8_t*> memchr(line_end, 13, end - line_end)
        if line_end == NULL:
            return end
        if line_end + 1 < end and line_end[1] == 10:
            return line_end
        line_end += 1
    return end


cdef bytes bytes_of(const uint8_t* at, const uint8_t* end):
    return PyBytes_FromStringAndSize(<const char*> at, end - at)


cdef bytes lower_of(const uint8_t* at, const uint8_t* end):
    cdef:
        bytes lower = PyBytes_FromStringAndSize(NULL, end - at)
        uint8_t* to = <uint8_t*> PyBytes_AS_STRING(lower)
    while at < end:
        to[0] = at[0] | 0x20 if 65 <= at[0] <= 90 else at[0]
        to += 1
        at += 1
    return lower


cdef class Head:
    """A request head. Header names are lower case; fields given twice are joined by a comma."""

    cdef readonly bytes method
    cdef readonly bytes target
    cdef readonly tuple version
    cdef readonly dict headers

    def __init__(self, bytes method, bytes target, tuple version, dict headers):
        self.method = method
        self.target = target
        self.version = version
        self.headers = headers

    def __repr__(self):
        return f"Head({self.method!r}, {self.target!r}, {self.version!r}, {self.headers!r})"


def parse_head(bytes head not None) -> Head:
    """Parse a complete request head, with its blank line. Raises ValueError with the fault.

    It is strict where two readers could understand a head differently: no folded lines, no space before a colon, no
    control bytes.
    """
    cdef:
        const uint8_t* at = <const uint8_t*> PyBytes_AS_STRING(head)
        const uint8_t* end = at + PyBytes_GET_SIZE(head)
        const uint8_t* line_end = end_of_line(at, end)
        const uint8_t* target
        const uint8_t* version = NULL
        const uint8_t* colon
        const uint8_t* value_end
        dict headers = {}
        bytes name, value, method
    target = <const uint8_t*> memchr(at, 32, line_end - at)
    if target != NULL:
        version = <const uint8_t*> memchr(target + 1, 32, line_end - target - 1)
    if version == NULL or memchr(version + 1, 32, line_end - version - 1) != NULL:
        raise ValueError("the request line is not `method target version`")
    if target == at or not all_are(at, target, IN_TOKEN):
        raise ValueError("the method is not a token")
    if version == target + 1 or not all_are(target + 1, version, IN_TARGET):
        raise ValueError("the target has bytes that no URL has")
    method = bytes_of(at, target)
    target += 1
    version += 1
    if (
        line_end - version != 8
        or memcmp(version, b"HTTP/", 5)
        or not 48 <= version[5] <= 57
        or version[6] != 46
        or not 48 <= version[7] <= 57
    ):
        raise ValueError("the version is not HTTP/n.n")
    if end - line_end < 4 or memcmp(end - 4, b"\r\n\r\n", 4):
        raise ValueError("the head does not end in a blank line")
    # Up to the blank line.
    at = line_end + 2
    while at < end - 2:
        line_end = end_of_line(at, end)
        colon = <const uint8_t*> memchr(at, 58, line_end - at)
        if colon == NULL or colon == at or not all_are(at, colon, IN_TOKEN):
            raise ValueError("a header line is not `name: value`")
        name = lower_of(at, colon)
        at = line_end + 2
        colon += 1
        value_end = line_end
        while colon < value_end and (colon[0] == 32 or colon[0] == 9):
            colon += 1
        while colon < value_end and (value_end[-1] == 32 or value_end[-1] == 9):
            value_end -= 1
        if not all_are(colon, value_end, IN_VALUE):
            raise ValueError("a header value has control bytes")
        value = bytes_of(colon, value_end)
        if name in headers:
            value = <bytes> headers[name] + b", " + value
        headers[name] = value
    return Head(method, bytes_of(target, version - 1), (version[5] - 48, version[7] - 48), headers)


def upgrade_fault(Head head not None):
    """None if `head` may be accepted as a WebSocket (RFC 6455 4.2.1), else `(HTTP status, what is wrong)`."""
    cdef dict headers = head.headers
    if head.method != b"GET":
        return 405, "a WebSocket is opened by GET"
    if head.version < (1, 1):
        return 400, "a WebSocket needs HTTP/1.1"
    if not headers.get(b"host") or b"," in headers[b"host"]:
        return 400, "one Host header is required"
    if not _has_token(headers.get(b"upgrade", b""), b"websocket"):
        return 400, "the Upgrade header does not name websocket"
    if not _has_token(headers.get(b"connection", b""), b"upgrade"):
        return 400, "the Connection header does not name upgrade"
    if headers.get(b"sec-websocket-version") != b"13":
        return 426, "WebSocket version 13 is spoken here"
    try:
        key = binascii.a2b_base64(headers.get(b"sec-websocket-key", b""), strict_mode=True)
    except binascii.Error:
        key = b""
    if len(key) != 16:
        return 400, "Sec-WebSocket-Key is not 16 bytes in base64"
    if b"transfer-encoding" in headers or headers.get(b"content-length", b"0") != b"0":
        return 400, "an upgrade has no body"
    return None


cdef bint _has_token(bytes value, bytes token):
    """Whether the comma-separated `value` has `token`, which is in lower case."""
    value = value.lower()
    return value == token or token in [part.strip(b" \t") for part in value.split(b",")]


# -- requests ------------------------------------------------------------------------------------------------


cdef inline bint is_name(const uint8_t* at, Py_ssize_t size, const char* name, Py_ssize_t name_size) noexcept nogil:
    """Whether the header name at `at` is `name`, which is in lower case."""
    cdef Py_ssize_t i
    if size != name_size:
        return False
    for i in range(size):
        if (at[i] | 0x20) != <uint8_t> name[i]:
            return False
    return True


cdef enum FieldKind:
    # A header field after which Python decides; one that is read or ignored; one that control wants.
    UNUSUAL
    KNOWN
    WANTED


cdef struct UsualHead:
    uint8_t flags
    bint is_1_0
    bint chunked
    bint expects
    int hosts
    int lengths
    int connections
    Py_ssize_t length
    # The value of X-Forwarded-For; at == NULL: there is none.
    Span forwarded


cdef FieldKind read_field(
    UsualHead* head, const uint8_t* name, Py_ssize_t name_size, const uint8_t* value, Py_ssize_t size
) noexcept nogil:
    """Note what a header field says."""
    cdef Py_ssize_t i
    # By length first: most headers are none of these.
    if name_size == 4:
        if is_name(name, name_size, b"host", 4):
            head.hosts += 1
    elif name_size == 14:
        if is_name(name, name_size, b"content-length", 14):
            head.lengths += 1
            if not 0 < size <= MAX_LENGTH_DIGITS:
                return UNUSUAL
            for i in range(size):
                if not 48 <= value[i] <= 57:
                    return UNUSUAL
                head.length = head.length * 10 + (value[i] - 48)
    elif name_size == 10:
        if is_name(name, name_size, b"connection", 10):
            head.connections += 1
            if is_name(value, size, b"close", 5):
                head.flags |= FLAG_CLOSES
            elif not is_name(value, size, b"keep-alive", 10):
                return UNUSUAL
    elif name_size == 12:
        if is_name(name, name_size, b"content-type", 12) and not is_json_type(value, size):
            return WANTED
    elif name_size == 15:
        if is_name(name, name_size, b"x-forwarded-for", 15):
            if head.forwarded.at != NULL:
                return UNUSUAL
            head.forwarded.at, head.forwarded.size = value, size
    elif name_size == 17:
        if is_name(name, name_size, b"transfer-encoding", 17):
            if head.chunked or not is_name(value, size, b"chunked", 7):
                return UNUSUAL
            head.chunked = True
    elif name_size == 6:
        if is_name(name, name_size, b"expect", 6):
            if head.expects or not is_name(value, size, b"100-continue", 12):
                return UNUSUAL
            head.expects = True
        elif is_name(name, name_size, b"origin", 6):
            return WANTED
    elif (
        is_name(name, name_size, b"upgrade", 7)
        or is_name(name, name_size, b"te", 2)
        or is_name(name, name_size, b"trailer", 7)
        or is_name(name, name_size, b"proxy-connection", 16)
    ):
        return UNUSUAL
    elif (
        name_size == 13
        and (
            is_name(name, 13, b"authorization", 13)
            or is_name(name, 13, b"x-service-key", 13)
            or is_name(name, 13, b"if-none-match", 13)
        )
        or name_size == 16
        and (is_name(name, 16, b"x-service-secret", 16) or is_name(name, 16, b"content-encoding", 16))
        or name_size == 8 and is_name(name, 8, b"if-match", 8)
        or name_size == 30 and is_name(name, 30, b"access-control-request-headers", 30)
        or name_size == 11 and is_name(name, 11, b"traceparent", 11)
    ):
        return WANTED
    return KNOWN


cdef bint is_json_type(const uint8_t* at, Py_ssize_t size) noexcept nogil:
    """As http/head.JSON_TYPES."""
    return (
        is_name(at, size, b"application/json", 16)
        or is_name(at, size, b"application/json; charset=utf-8", 31)
        or is_name(at, size, b"application/json;charset=utf-8", 30)
    )


cdef bint is_one_chunk(const uint8_t** at, const uint8_t* end, Py_ssize_t* length) noexcept nogil:
    """Whether a body of one chunk and no trailers ends at `end`. `at` and `length` become those of its content."""
    cdef:
        const uint8_t* size_end = at[0]
        int digit
    length[0] = 0
    while size_end < end and size_end - at[0] <= MAX_LENGTH_DIGITS:
        digit = hex_digit(<char> size_end[0])
        if digit < 0:
            break
        length[0] = length[0] * 16 + digit
        size_end += 1
    if not 0 < size_end - at[0] <= MAX_LENGTH_DIGITS or not 0 < length[0] <= MAX_BODY_BYTES:
        return False
    if end - size_end != length[0] + 9 or memcmp(size_end, b"\r\n", 2) != 0:
        return False
    at[0] = size_end + 2
    return memcmp(end - 7, b"\r\n0\r\n\r\n", 7) == 0


cdef bint is_stream(const uint8_t* target, Py_ssize_t size) noexcept nogil:
    """Whether the path ends in /stream: a worker answers such requests (worker/streams)."""
    cdef const uint8_t* query = <const uint8_t*> memchr(target, 63, size)
    if query != NULL:
        size = query - target
    return size >= 7 and memcmp(target + size - 7, b"/stream", 7) == 0


def pack_simple(
    bytes data not None, uint32_t number, uint8_t flags, bytes client not None, dict places not None, client_of=None
):
    """`(flags, method, message, client, missing)` where `data` is exactly one complete request of the usual shape, or
    the beginning of a POST of it: the head is complete, and the body has at most 16 KiB. Else None.

    `message` is the request for control, as pack_request makes it, without the `missing` bytes of the body (pack_rest).
    These are negative if the client waits for 100 Continue, and 0 of a complete request. `places` has the places of the header fields that
    control wants, by their names in lower case (http/messages.FIELDS). `client_of`: called with the value of an
    X-Forwarded-For header for the client's address; None if the peer is no trusted proxy, and the header is ignored.

    The usual shape: GET or POST, an origin-form target that the worker doesn't answer itself (with /app/ in it, /,
    /healthz, and GET …/stream), HTTP/1.1 with one Host or HTTP/1.0, and no header that changes how a message is read
    except one Content-Length, or one chunk instead.
    """
    cdef:
        const uint8_t* start = <const uint8_t*> PyBytes_AS_STRING(data)
        const uint8_t* end = start + PyBytes_GET_SIZE(data)
        const uint8_t* at = start
        const uint8_t* target
        const uint8_t* name
        const uint8_t* value
        const uint8_t* value_end
        Py_ssize_t name_size, target_size, missing = 0
        int headers = 0
        FieldKind kind
        UsualHead usual
        bytes method, message
        bytes fields = b""
        RequestHead head
        uint8_t* to
    if end - at > 5 and memcmp(at, b"POST ", 5) == 0:
        method = b"POST"
        at += 5
    elif end - at > 4 and memcmp(at, b"GET ", 4) == 0:
        method = b"GET"
        at += 4
    else:
        return None
    target = at
    if at[0] != b"/":
        return None
    while at < end and char_kinds[at[0]] & IN_USUAL_TARGET:
        at += 1
    target_size = at - target
    if memmem(target, target_size, b"/app/", 5) != NULL:
        return None
    if target_size == 1 or (target_size == 8 and memcmp(target, b"/healthz", 8) == 0):
        return None
    if PyBytes_GET_SIZE(method) == 3 and is_stream(target, target_size):
        return None
    if end - at < 11 or memcmp(at, b" HTTP/1.", 8) != 0 or memcmp(at + 9, b"\r\n", 2) != 0:
        return None
    memset(&usual, 0, sizeof(UsualHead))
    usual.flags = flags
    if at[8] == b"0":
        usual.is_1_0 = True
    elif at[8] != b"1":
        return None
    at += 11
    while True:
        if end - at < 2:
            return None
        if at[0] == 13:
            if at[1] != 10:
                return None
            at += 2
            break
        headers += 1
        if headers > MAX_HEADERS:
            return None
        name = at
        while at < end and char_kinds[at[0]] & IN_TOKEN:
            at += 1
        name_size = at - name
        if name_size == 0 or at == end or at[0] != b":":
            return None
        at += 1
        while at < end and (at[0] == 32 or at[0] == 9):
            at += 1
        value = at
        while at < end and char_kinds[at[0]] & IN_USUAL_VALUE:
            at += 1
        if end - at < 2 or at[0] != 13 or at[1] != 10:
            return None
        value_end = at
        at += 2
        # llhttp keeps spaces at the end of most values.
        if value_end > value and (value_end[-1] == 32 or value_end[-1] == 9):
            return None
        kind = read_field(&usual, name, name_size, value, value_end - value)
        if kind == WANTED:
            fields += packed_field(places, name, name_size, value, value_end - value)
        elif kind == UNUSUAL:
            return None
    if at - start > MAX_HEAD_BYTES or usual.lengths > 1 or usual.length > MAX_BODY_BYTES:
        return None
    if usual.is_1_0:
        # Which of two Connection headers counts differs between readers.
        if usual.hosts > 1 or usual.chunked or usual.expects or usual.connections > 1:
            return None
        usual.flags |= FLAG_HTTP_1_0
        if usual.connections == 0:
            usual.flags |= FLAG_CLOSES
    elif usual.hosts != 1:
        return None
    if usual.chunked:
        if usual.lengths or not is_one_chunk(&at, end, &usual.length):
            return None
    elif end - at < usual.length:
        # What comes in large pieces is for the slower code.
        if usual.length > MAX_KEPT_BODY_BYTES or PyBytes_GET_SIZE(method) != 4:
            return None
        missing = usual.length - (end - at)
    elif end - at != usual.length:
        return None
    if usual.forwarded.at != NULL and client_of is not None:
        client = client_of(PyBytes_FromStringAndSize(<const char*> usual.forwarded.at, usual.forwarded.size))
    if PyBytes_GET_SIZE(client) > 255:
        return None
    head.size = <uint32_t> (
        sizeof(RequestHead) - 4 + PyBytes_GET_SIZE(method) + PyBytes_GET_SIZE(client) + target_size
        + PyBytes_GET_SIZE(fields) + usual.length
    )
    head.number = number
    head.flags = usual.flags
    head.refusal = 0
    head.method_size = <uint8_t> PyBytes_GET_SIZE(method)
    head.client_size = <uint8_t> PyBytes_GET_SIZE(client)
    head.target_size = <uint16_t> target_size
    head.fields_size = <uint16_t> PyBytes_GET_SIZE(fields)
    head.announced = 0
    message = PyBytes_FromStringAndSize(NULL, 4 + head.size - missing)
    to = put(<uint8_t*> PyBytes_AS_STRING(message), <const char*> &head, sizeof(RequestHead))
    to = put(to, PyBytes_AS_STRING(method), PyBytes_GET_SIZE(method))
    to = put(to, PyBytes_AS_STRING(client), PyBytes_GET_SIZE(client))
    to = put(to, <const char*> target, target_size)
    to = put(to, PyBytes_AS_STRING(fields), PyBytes_GET_SIZE(fields))
    put(to, <const char*> at, usual.length - missing)
    return usual.flags, method, message, client, -missing if usual.expects and at == end else missing


def pack_rest(bytes beginning not None, bytes rest not None, uint32_t number):
    """The message that begins with `beginning`, which pack_simple made, and ends with `rest` of the body; `number` is
    its request's. ValueError if `rest` isn't all that is missing."""
    cdef:
        Py_ssize_t size = PyBytes_GET_SIZE(beginning), rest_size = PyBytes_GET_SIZE(rest)
        RequestHead* head
        bytes message
    if size < <Py_ssize_t> sizeof(RequestHead):
        raise ValueError("no message of pack_simple")
    message = PyBytes_FromStringAndSize(NULL, size + rest_size)
    head = <RequestHead*> PyBytes_AS_STRING(message)
    memcpy(head, PyBytes_AS_STRING(beginning), size)
    if 4 + <Py_ssize_t> head.size != size + rest_size:
        raise ValueError(f"{rest_size} bytes of a body aren't what is missing")
    head.number = number
    memcpy(<char*> head + size, PyBytes_AS_STRING(rest), rest_size)
    return message


cdef bytes packed_field(dict places, const uint8_t* name, Py_ssize_t name_size, const uint8_t* value, Py_ssize_t size):
    """A header field as http/messages.pack_fields makes it."""
    cdef:
        uint8_t place = places[PyBytes_FromStringAndSize(<const char*> name, name_size).lower()]
        bytes packed = PyBytes_FromStringAndSize(NULL, 3 + size)
        uint8_t* to = <uint8_t*> PyBytes_AS_STRING(packed)
        uint16_t value_size = <uint16_t> size
    to[0] = place
    memcpy(to + 1, &value_size, 2)
    memcpy(to + 3, value, size)
    return packed


# -- messages (http/messages.py) -----------------------------------------------------------------------------


def pack_request(
    uint32_t number,
    uint8_t flags,
    bytes method not None,
    bytes client not None,
    bytes target not None,
    bytes fields not None,
    bytes body not None,
    announced=0,
    uint16_t refusal=0,
) -> bytes:
    """As http/messages.pack_request."""
    cdef:
        RequestHead head
        Py_ssize_t size
        bytes message
        char* to
    head.method_size = <uint8_t> PyBytes_GET_SIZE(method)
    head.client_size = <uint8_t> PyBytes_GET_SIZE(client)
    head.target_size = <uint16_t> PyBytes_GET_SIZE(target)
    head.fields_size = <uint16_t> PyBytes_GET_SIZE(fields)
    size = (
        sizeof(RequestHead)
        + PyBytes_GET_SIZE(method)
        + PyBytes_GET_SIZE(client)
        + PyBytes_GET_SIZE(target)
        + PyBytes_GET_SIZE(fields)
        + PyBytes_GET_SIZE(body)
    )
    if (
        PyBytes_GET_SIZE(method) > 255
        or PyBytes_GET_SIZE(client) > 255
        or PyBytes_GET_SIZE(target) > 65535
        or PyBytes_GET_SIZE(fields) > 65535
    ):
        raise ValueError("a part of the request is too large for a message")
    head.size = <uint32_t> (size - 4)
    head.number = number
    head.flags = flags
    head.refusal = refusal
    head.announced = <uint32_t> 0xFFFFFFFF if announced is None else <uint32_t> min(announced, 0xFFFFFFFE)
    message = PyBytes_FromStringAndSize(NULL, size)
    to = PyBytes_AS_STRING(message)
    memcpy(to, &head, sizeof(RequestHead))
    to += sizeof(RequestHead)
    for part in (method, client, target, fields, body):
        memcpy(to, PyBytes_AS_STRING(<bytes> part), PyBytes_GET_SIZE(<bytes> part))
        to += PyBytes_GET_SIZE(<bytes> part)
    return message


def pack_answer(uint32_t number, uint8_t flags, bytes response not None) -> bytes:
    """An answer's message (http/messages.py)."""
    cdef:
        AnswerHead head
        Py_ssize_t size = PyBytes_GET_SIZE(response)
        bytes message = PyBytes_FromStringAndSize(NULL, sizeof(AnswerHead) + size)
        char* to = PyBytes_AS_STRING(message)
    head.size = <uint32_t> (sizeof(AnswerHead) - 4 + size)
    head.number = number
    head.flags = flags
    memcpy(to, &head, sizeof(AnswerHead))
    memcpy(to + sizeof(AnswerHead), PyBytes_AS_STRING(response), size)
    return message


def pack_ok(
    uint32_t number, uint8_t flags, bytes dateline not None, bytes headers not None, bytes body not None
) -> bytes:
    """The message of a 200 answer after which the connection stays open: as pack_answer of the response that
    control/http/response.py renders. `flags` are those of an answer; `dateline` and `headers` are whole lines."""
    cdef:
        AnswerHead head
        char[64] length
        int length_size
        Py_ssize_t size
        bytes message
        char* to
    length_size = snprintf(length, 64, b"Content-Length: %zd\r\n\r\n", PyBytes_GET_SIZE(body))
    size = 17 + PyBytes_GET_SIZE(dateline) + PyBytes_GET_SIZE(headers) + length_size + PyBytes_GET_SIZE(body)
    head.size = <uint32_t> (sizeof(AnswerHead) - 4 + size)
    head.number = number
    head.flags = flags
    message = PyBytes_FromStringAndSize(NULL, sizeof(AnswerHead) + size)
    to = PyBytes_AS_STRING(message)
    memcpy(to, &head, sizeof(AnswerHead))
    to += sizeof(AnswerHead)
    memcpy(to, b"HTTP/1.1 200 OK\r\n", 17)
    to += 17
    memcpy(to, PyBytes_AS_STRING(dateline), PyBytes_GET_SIZE(dateline))
    to += PyBytes_GET_SIZE(dateline)
    memcpy(to, PyBytes_AS_STRING(headers), PyBytes_GET_SIZE(headers))
    to += PyBytes_GET_SIZE(headers)
    memcpy(to, length, length_size)
    to += length_size
    memcpy(to, PyBytes_AS_STRING(body), PyBytes_GET_SIZE(body))
    return message


def read_answers(bytes data not None) -> tuple:
    """`(answers, used)`: each whole answer in `data` as `(number, flags, response)`, and how many bytes they are.
    Raises ValueError for bytes that are no answers."""
    cdef:
        const char* start = PyBytes_AS_STRING(data)
        Py_ssize_t at = 0
        Py_ssize_t size = PyBytes_GET_SIZE(data)
        Py_ssize_t whole
        AnswerHead head
        list answers = []
    while size - at >= <Py_ssize_t> sizeof(AnswerHead):
        memcpy(&head, start + at, sizeof(AnswerHead))
        whole = <Py_ssize_t> head.size + 4
        if whole > size - at:
            break
        if whole < <Py_ssize_t> sizeof(AnswerHead):
            raise ValueError("a malformed message")
        answers.append((
            head.number,
            head.flags,
            PyBytes_FromStringAndSize(start + at + sizeof(AnswerHead), whole - sizeof(AnswerHead)),
        ))
        at += whole
    return answers, at


cdef dict no_fields = {}


cdef class IncomingRequest:
    """What a request holds: what was received, and what control finds out about it (control/http/request.py).

    Made by read_requests, or by __init__ if it came in another way; then it has no `number`.
    """

    def __init__(
        self,
        str method not None,
        str target not None,
        headers,
        bytes body not None,
        uint8_t flags=0,
        announced=0,
        uint16_t refusal=0,
    ):
        self.flags = flags
        self.announced = announced
        self.refusal = refusal
        self.method = method
        self.path, _, self.query = target.partition("?")
        self.remote = ""
        self.headers = headers
        self.body = body
        self.more_headers = b""


cdef Py_ssize_t whole_request(const char* at, Py_ssize_t size, RequestHead* head) except -1:
    """Bytes of the message that begins at `at`, if its `size` bytes hold all of it, else 0. ValueError for bytes that
    are no request."""
    cdef Py_ssize_t whole
    if size < <Py_ssize_t> sizeof(RequestHead):
        return 0
    memcpy(head, at, sizeof(RequestHead))
    whole = <Py_ssize_t> head.size + 4
    if whole > size:
        return 0
    if whole < <Py_ssize_t> (
        sizeof(RequestHead) + head.method_size + head.client_size + head.target_size + head.fields_size
    ):
        raise ValueError("a malformed message")
    return whole


cdef IncomingRequest read_request(kind, const char* message, RequestHead* head, tuple names):
    """The request of a whole message, as a `kind`."""
    cdef:
        const char* at = message + sizeof(RequestHead)
        const char* end = message + 4 + head.size
        const char* query
        IncomingRequest request = kind.__new__(kind)
    request.number = head.number
    request.flags = head.flags
    request.refusal = head.refusal
    request.secure = head.flags & FLAG_SECURE
    request.more_headers = b""
    request.announced = None if head.announced == <uint32_t> 0xFFFFFFFF else head.announced
    if head.method_size == 4 and memcmp(at, b"POST", 4) == 0:
        request.method = "POST"
    else:
        request.method = PyUnicode_DecodeASCII(at, head.method_size, NULL)
    at += head.method_size
    request.remote = PyUnicode_DecodeASCII(at, head.client_size, NULL)
    at += head.client_size
    query = <const char*> memchr(at, b"?", head.target_size)
    if query == NULL:
        request.path = PyUnicode_DecodeUTF8(at, head.target_size, b"surrogateescape")
        request.query = ""
    else:
        request.path = PyUnicode_DecodeUTF8(at, query - at, b"surrogateescape")
        request.query = PyUnicode_DecodeUTF8(query + 1, head.target_size - (query + 1 - at), b"surrogateescape")
    at += head.target_size
    request.headers = read_fields(at, head.fields_size, names) if head.fields_size else no_fields
    at += head.fields_size
    request.body = PyBytes_FromStringAndSize(at, end - at)
    return request


def read_requests(kind, bytearray buffer not None, Py_ssize_t size, tuple names not None) -> tuple:
    """`(requests, used)`: each whole request message in the first `size` bytes of `buffer` as a `kind`, a subclass of
    IncomingRequest, and how many bytes they are. `names` are the header names by their numbers."""
    cdef:
        const char* start = PyByteArray_AS_STRING(buffer)
        Py_ssize_t used = 0
        Py_ssize_t whole
        RequestHead head
        list requests = []
    while True:
        whole = whole_request(start + used, size - used, &head)
        if whole == 0:
            return requests, used
        requests.append(read_request(kind, start + used, &head, names))
        used += whole


cdef dict read_fields(const char* at, Py_ssize_t size, tuple names):
    cdef:
        dict fields = {}
        const char* end = at + size
        uint16_t value_size
        uint8_t place
    while at < end:
        if end - at < 3:
            raise ValueError("a malformed message")
        place = <uint8_t> at[0]
        memcpy(&value_size, at + 1, 2)
        at += 3
        if value_size > end - at or place >= len(names):
            raise ValueError("a malformed message")
        fields.setdefault(names[place], PyUnicode_DecodeUTF8(at, value_size, b"surrogateescape"))
        at += value_size
    return fields


# -- signatures (protocol/auth.py) ---------------------------------------------------------------------------

cdef enum:
    MAX_PARAMS = 32

cdef struct Field:
    const char* at
    Py_ssize_t name_size
    Py_ssize_t size
    # The value has escapes.
    bint escaped


cdef inline bint is_before(Field* a, Field* b) noexcept nogil:
    """Whether `a` comes before `b` in order of name."""
    cdef:
        Py_ssize_t common = min(a.name_size, b.name_size)
        int order = memcmp(a.at, b.at, common)
    return order < 0 or (order == 0 and a.name_size < b.name_size)


cdef inline Span value_of(Field* field) noexcept nogil:
    cdef Span value
    value.at = <const uint8_t*> field.at + field.name_size + 1
    value.size = field.size - field.name_size - 1
    return value


cdef char* put_unescaped(char* to, const char* at, Py_ssize_t size) noexcept nogil:
    """Write what is percent-encoded at `at`; returns its end. NULL: an escape is malformed, or not of an ASCII character."""
    cdef:
        const char* end = at + size
        int high, low
    while at < end:
        if at[0] != b"%":
            to[0] = at[0]
            at += 1
        else:
            if end - at < 3:
                return NULL
            high, low = hex_digit(at[1]), hex_digit(at[2])
            if high < 0 or high > 7 or low < 0:
                return NULL
            to[0] = <char> (high << 4 | low)
            at += 3
        to += 1
    return to


cdef inline bint is_name_char(uint8_t of) noexcept nogil:
    return not (of >= 0x80 or of == b"&" or of == b"%" or of == b"[" or of == b"]" or 65 <= of <= 90)


cdef inline bint is_within_value(const char* at) noexcept nogil:
    """Whether none of eight bytes is a `&`, a `%` or above 0x7F."""
    cdef uint64_t word
    memcpy(&word, at, 8)
    return not (has_byte(word, b"&") or has_byte(word, b"%") or word & HIGH_BITS)


cdef bint read_signed(Signed* signed, Span method, Span path, Span query, double now_s, int max_skew_s) noexcept nogil:
    """Read a query that is signed in the usual layout, and the text that was signed. False: it isn't, or its time is
    wrong.

    The usual layout: plain ASCII, lower-case names of which none is repeated, and no name with a bracket. Values other
    than the signature's own may have escapes of ASCII characters; a `+` is a plus.
    """
    cdef:
        Field[MAX_PARAMS] params
        Field field
        Span stamp
        char* to = signed.text
        const char* at = <const char*> query.at
        const char* end = at + query.size
        int count = 0, i, j
        int own = 0, before
        bint version = False
        uint64_t seconds = 0
    if query.size + path.size + method.size + 8 > MAX_TEXT_BYTES:
        return False
    for i in range(path.size):
        if path.at[i] >= 0x80:
            return False
    stamp.at = signed.key.at = signed.signature.at = signed.digest.at = NULL
    while True:
        if count == MAX_PARAMS:
            return False
        field.at = at
        field.escaped = False
        while at < end and at[0] != b"=":
            if not is_name_char(<uint8_t> at[0]):
                return False
            at += 1
        if at == end or at == field.at:
            return False
        field.name_size = at - field.at
        at += 1
        while end - at >= 8 and is_within_value(at):
            at += 8
        while at < end and at[0] != b"&":
            if <uint8_t> at[0] >= 0x80:
                return False
            if at[0] == b"%":
                field.escaped = True
            at += 1
        field.size = at - field.at
        # In order of name; nearly always they come so, the signature last.
        i = count
        while i > 0 and is_before(&field, &params[i - 1]):
            params[i] = params[i - 1]
            i -= 1
        if i > 0 and not is_before(&params[i - 1], &field):
            # The same name again.
            return False
        params[i] = field
        count += 1
        if at == end:
            break
        at += 1
    to = <char*> put(<uint8_t*> to, <const char*> method.at, method.size)
    to[0] = b"\n"
    to = <char*> put(<uint8_t*> to + 1, <const char*> path.at, path.size)
    to[0] = b"\n"
    to += 1
    j = 0
    for i in range(count):
        at = params[i].at
        before = own
        if params[i].name_size == 14 and memcmp(at, b"auth_signature", 14) == 0:
            if params[i].escaped:
                return False
            signed.signature = value_of(&params[i])
            own += 1
            continue
        if params[i].name_size == 8 and memcmp(at, b"auth_key", 8) == 0:
            signed.key = value_of(&params[i])
            own += 1
        elif params[i].name_size == 14 and memcmp(at, b"auth_timestamp", 14) == 0:
            stamp = value_of(&params[i])
            own += 1
        elif params[i].name_size == 12 and memcmp(at, b"auth_version", 12) == 0:
            version = params[i].size == 16 and memcmp(at + 13, b"1.0", 3) == 0
            own += 1
        elif params[i].name_size == 8 and memcmp(at, b"body_md5", 8) == 0:
            signed.digest = value_of(&params[i])
            own += 1
        if j:
            to[0] = b"&"
            to += 1
        j += 1
        if params[i].escaped:
            if own > before:
                return False
            to = <char*> put(<uint8_t*> to, at, params[i].name_size + 1)
            to = put_unescaped(to, at + params[i].name_size + 1, params[i].size - params[i].name_size - 1)
            if to == NULL:
                return False
        else:
            to = <char*> put(<uint8_t*> to, at, params[i].size)
    if signed.signature.at == NULL or signed.signature.size != 64:
        return False
    if signed.key.at == NULL or stamp.at == NULL or not version:
        return False
    if not 0 < stamp.size <= 15:
        return False
    for i in range(stamp.size):
        if not 48 <= stamp.at[i] <= 57:
            return False
        seconds = seconds * 10 + (stamp.at[i] - 48)
    if not -max_skew_s <= <double> seconds - now_s <= max_skew_s:
        return False
    signed.more = count > own
    signed.text_size = to - signed.text
    return True


cdef bint is_right(Signed* signed, inner, outer) except -1:
    """Whether the text is signed with the secret of HMAC's two hashes."""
    inner = inner.copy()
    inner.update(PyBytes_FromStringAndSize(signed.text, signed.text_size))
    outer = outer.copy()
    outer.update(inner.digest())
    # In a time that doesn't tell how much of it is the same.
    return compare_digest(outer.hexdigest(), PyUnicode_DecodeASCII(<const char*> signed.signature.at, 64, NULL))


cdef bint is_signed_by(Signed* signed, HmacKey key) except -1:
    """Whether the text is signed with this key."""
    cdef uint8_t[32] digest
    key.sign(signed.text, signed.text_size, digest)
    return is_hex_of(signed.signature.at, digest, 32)


cdef bint is_body_right(Signed* signed, Span body) except -1:
    """Whether the query has the digest of this body; it may be left out where there is no body."""
    cdef uint8_t[16] digest
    if signed.digest.at == NULL:
        return body.size == 0
    if signed.digest.size != 32:
        return False
    put_md5(<const char*> body.at, body.size, digest)
    return is_hex_of(signed.digest.at, digest, 16)


def signed_params(
    str method not None,
    str path not None,
    str query not None,
    bytes body,
    app,
    hashes_of,
    double now_s,
    int max_skew_s,
    str short_path=None,
):
    """The key of a request that is signed in the usual layout, whose signature, time and body are right, else None.

    `hashes_of(app, key)` gives HMAC's two hashes of that key's secret, and whether the app has that key enabled; a
    request with an unknown key costs as much as one with a known key. `body` None: it isn't there yet, and its digest
    isn't checked. `short_path`: this path may be signed instead. Returns `(key, more)`; `more`: there are parameters
    besides the signature's own.
    """
    cdef Signed signed
    if not (query.isascii() and path.isascii() and method.isascii()):
        return None
    if not read_signed(&signed, span_of_text(method), span_of_text(path), span_of_text(query), now_s, max_skew_s):
        return None
    key = PyUnicode_DecodeASCII(<const char*> signed.key.at, signed.key.size, NULL)
    inner, outer, known = hashes_of(app, key)
    right = is_right(&signed, inner, outer)
    if not right and short_path is not None and short_path.isascii():
        right = read_signed(
            &signed, span_of_text(method), span_of_text(short_path), span_of_text(query), now_s, max_skew_s
        ) and is_right(&signed, inner, outer)
    if not (right and known) or (body is not None and not is_body_right(&signed, span_of(body))):
        return None
    return key, signed.more
