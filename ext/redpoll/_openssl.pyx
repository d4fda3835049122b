"""OpenSSL as Python's ssl module has loaded it, without its headers and without a library of our own.

`load()` looks the functions up with dlsym(3) in the module `_ssl` and the libraries that this was linked with. So they
are those that Python itself calls, and a fix of the system's OpenSSL is a fix for us. Where Python has OpenSSL linked
in, they can't be found, and `missing()` says so. A Context is an SSL_CTX of a server. This module knows certificates,
names, OCSP responses and session tickets; it knows no sockets.

Constants are those of OpenSSL 3.0 (ssl.h, tls1.h), which later versions keep.
"""

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_GET_SIZE
from libc.string cimport memcmp, memcpy, memset
from libc.time cimport time

import os

__all__ = ["KEY_BYTES", "Context", "ContextError", "load", "missing", "set_ticket_keys"]

cdef extern from "<dlfcn.h>" nogil:
    void* dlopen(const char* path, int flags)
    void* dlsym(void* handle, const char* name)
    enum:
        RTLD_NOLOAD
        RTLD_NOW

cdef extern from "<string.h>" nogil:
    void explicit_bzero(void* at, size_t size)

cdef enum:
    OPENSSL_3 = 0x30000000
    OP_NO_COMPRESSION = 0x20000
    OP_PRIORITIZE_CHACHA = 0x200000
    OP_CIPHER_SERVER_PREFERENCE = 0x400000
    OP_NO_RENEGOTIATION = 0x40000000
    MODE_RELEASE_BUFFERS = 0x10
    CTRL_MODE = 33
    CTRL_SESS_CACHE_MODE = 44
    CTRL_SERVERNAME_CALLBACK = 53
    CTRL_SERVERNAME_ARGUMENT = 54
    CTRL_STATUS_CALLBACK = 63
    CTRL_STATUS_ARGUMENT = 64
    CTRL_STATUS_RESPONSE = 71
    CTRL_CHAIN_CERT = 89
    CTRL_MIN_PROTO_VERSION = 123
    TLS1_2 = 0x0303
    TLS1_3 = 0x0304
    EXTENSION_OK = 0
    EXTENSION_NOACK = 3
    NEGOTIATED = 1
    HOST_NAME = 0
    ERR_LIB_PEM = 9
    PEM_R_NO_START_LINE = 108
    OSSL_PARAM_UTF8_STRING = 4
    OSSL_PARAM_OCTET_STRING = 5

    NAME_BYTES = 16
    SECRET_BYTES = 32
    MAX_KEYS = 2
    # How long a session may be resumed: as long as keys stay the newest. The one before is accepted as long again.
    TICKET_S = 43200

# Of a ticket key: its name, an AES-256 key and an HMAC-SHA256 key.
KEY_BYTES = NAME_BYTES + 2 * SECRET_BYTES

# Of TLS 1.2: forward secrecy and authenticated encryption. TLS 1.3 has no others.
cdef bytes CIPHERS = b"ECDHE+AESGCM:ECDHE+CHACHA20"

cdef struct TicketKey:
    unsigned char[NAME_BYTES] name
    unsigned char[SECRET_BYTES] encryption
    unsigned char[SECRET_BYTES] authentication

# Public in OpenSSL 3 (OSSL_PARAM(3)).
cdef struct Parameter:
    const char* key
    unsigned int kind
    void* data
    size_t size
    size_t returned

# The newest first. Without any, no tickets are given.
cdef TicketKey[MAX_KEYS] ticket_keys
cdef int ticket_key_count = 0

cdef object reason_missing = None
cdef bint loaded = False


class ContextError(Exception):
    """A certificate and its key can't be used."""


def load() -> bool:
    """Look OpenSSL's functions up, once. False if they can't be found; `missing()` says why."""
    global loaded, reason_missing
    if not loaded and reason_missing is None:
        reason_missing = look_up()
        loaded = reason_missing is None
    return loaded


def missing() -> str | None:
    """One sentence about why OpenSSL's functions can't be called, or None if they can."""
    load()
    return reason_missing


cdef object look_up():
    cdef:
        void* handle
        void* function
        bytes path
    try:
        import _ssl
    except ImportError:
        return "Python has no module ssl"
    if getattr(_ssl, "__file__", None) is None:
        return "OpenSSL is linked into Python itself"
    path = os.fsencode(_ssl.__file__)
    # It stays loaded as long as the process, and so do the libraries that it needs.
    handle = dlopen(path, RTLD_NOLOAD | RTLD_NOW)
    if handle == NULL:
        return f"{_ssl.__file__} isn't a shared library"
    # A handle's own symbols come first, then those of the libraries that it was linked with (dlsym(3)).
    for number, name in enumerate(NAMES):
        function = dlsym(handle, name)
        if function == NULL:
            memset(&openssl, 0, sizeof(openssl))
            if number == 0:
                return "OpenSSL is linked into Python's module ssl"
            return f"Python's OpenSSL has no {name.decode()}, which came with OpenSSL 3.0"
        (<void**> &openssl)[number] = function
    if openssl.OpenSSL_version_num() < OPENSSL_3:
        memset(&openssl, 0, sizeof(openssl))
        return "Python's OpenSSL is older than 3.0"
    return None


# In the order of Functions.
NAMES = (
    b"TLS_server_method",
    b"SSL_CTX_new",
    b"SSL_CTX_free",
    b"SSL_CTX_ctrl",
    b"SSL_CTX_set_options",
    b"SSL_CTX_set_cipher_list",
    b"SSL_CTX_set_alpn_select_cb",
    b"SSL_select_next_proto",
    b"SSL_CTX_use_certificate",
    b"SSL_CTX_use_PrivateKey",
    b"SSL_CTX_check_private_key",
    b"SSL_CTX_set_tlsext_ticket_key_evp_cb",
    b"SSL_CTX_set_session_id_context",
    b"SSL_CTX_set_timeout",
    b"SSL_CTX_set_num_tickets",
    b"SSL_new",
    b"SSL_free",
    b"SSL_set_bio",
    b"SSL_set_accept_state",
    b"SSL_set_info_callback",
    b"SSL_do_handshake",
    b"SSL_read",
    b"SSL_write",
    b"SSL_shutdown",
    b"SSL_get_error",
    b"SSL_pending",
    b"SSL_session_reused",
    b"SSL_version",
    b"SSL_CTX_callback_ctrl",
    b"SSL_ctrl",
    b"SSL_get_servername",
    b"SSL_set_SSL_CTX",
    b"SSL_get_certificate",
    b"BIO_meth_new",
    b"BIO_meth_set_write",
    b"BIO_meth_set_read",
    b"BIO_meth_set_ctrl",
    b"BIO_new",
    b"BIO_free",
    b"BIO_set_init",
    b"BIO_set_flags",
    b"BIO_clear_flags",
    b"BIO_new_mem_buf",
    b"PEM_read_bio_X509",
    b"PEM_read_bio_PrivateKey",
    b"X509_free",
    b"EVP_PKEY_free",
    b"ERR_clear_error",
    b"ERR_peek_last_error",
    b"ERR_reason_error_string",
    b"RAND_bytes",
    b"EVP_aes_256_cbc",
    b"EVP_EncryptInit_ex",
    b"EVP_DecryptInit_ex",
    b"EVP_MAC_CTX_set_params",
    b"OpenSSL_version_num",
    b"CRYPTO_malloc",
)
assert len(NAMES) * sizeof(void*) == sizeof(Functions)


cdef str fault_text():
    """OpenSSL's reason for the last failure. Empties its queue of errors."""
    cdef:
        unsigned long error = openssl.ERR_peek_last_error()
        const char* reason = openssl.ERR_reason_error_string(error) if error else NULL
    openssl.ERR_clear_error()
    return f"SSL: {(<bytes> reason).decode('latin-1')}" if reason != NULL else "SSL: no reason"


# -- session tickets (RFC 5077, RFC 8446 4.6.1) --------------------------------------------------------------


def set_ticket_keys(keys):
    """Encrypt session tickets with the first of `keys`, KEY_BYTES each, and accept those of all (two at most). Without
    keys no session is resumed."""
    global ticket_key_count
    cdef:
        bytes key
        int count = 0
    if len(keys) > MAX_KEYS or any(len(key) != KEY_BYTES for key in keys):
        raise ValueError(f"at most {MAX_KEYS} ticket keys of {KEY_BYTES} bytes")
    # Whatever fails below, no ticket is encrypted with a key of zeros.
    ticket_key_count = 0
    explicit_bzero(&ticket_keys[0], sizeof(ticket_keys))
    for key in keys:
        memcpy(&ticket_keys[count], PyBytes_AS_STRING(key), sizeof(TicketKey))
        count += 1
    ticket_key_count = count


cdef int use_ticket_key(
    void* ssl, unsigned char* name, unsigned char* iv, void* cipher, void* mac, int encrypting
) noexcept:
    """SSL_CTX_set_tlsext_ticket_key_evp_cb(3): 1 to go on, 2 to give a new ticket, too, 0 for no ticket or one that isn't
    ours, negative for an error.

    A client of TLS 1.3 uses a ticket once (RFC 8446 C.4), so it always gets the next one. OpenSSL does the same only for
    tickets with its own keys."""
    cdef:
        int at = 0
        Parameter[3] parameters
        TicketKey* key
    if encrypting:
        if ticket_key_count == 0:
            return 0
        key = &ticket_keys[0]
        memcpy(name, &key.name[0], NAME_BYTES)
        if openssl.RAND_bytes(iv, 16) != 1:
            return -1
    else:
        while at < ticket_key_count and memcmp(name, ticket_keys[at].name, NAME_BYTES) != 0:
            at += 1
        if at == ticket_key_count:
            return 0
        key = &ticket_keys[at]
    memset(&parameters[0], 0, sizeof(parameters))
    parameters[0].key = b"key"
    parameters[0].kind = OSSL_PARAM_OCTET_STRING
    parameters[0].data = <void*> &key.authentication[0]
    parameters[0].size = SECRET_BYTES
    parameters[1].key = b"digest"
    parameters[1].kind = OSSL_PARAM_UTF8_STRING
    parameters[1].data = <void*> <const char*> b"SHA256"
    parameters[1].size = 6
    parameters[2].key = NULL
    if openssl.EVP_MAC_CTX_set_params(mac, &parameters[0]) != 1:
        return -1
    if encrypting:
        # Its 0 would mean that there is no ticket.
        if openssl.EVP_EncryptInit_ex(cipher, openssl.EVP_aes_256_cbc(), NULL, &key.encryption[0], iv) != 1:
            return -1
        return 1
    if openssl.EVP_DecryptInit_ex(cipher, openssl.EVP_aes_256_cbc(), NULL, &key.encryption[0], iv) != 1:
        return -1
    return 1 if at == 0 and openssl.SSL_version(ssl) != TLS1_3 else 2


# -- contexts ------------------------------------------------------------------------------------------------


cdef int choose_protocol(
    void* ssl, const unsigned char** out, unsigned char* out_size, const unsigned char* offered, unsigned int size,
    void* argument,
) noexcept:
    """ALPN (RFC 7301): http/1.1, or none if the client offers others only."""
    cdef unsigned char* chosen
    if openssl.SSL_select_next_proto(
        &chosen, out_size, <const unsigned char*> <const char*> b"\x08http/1.1", 9, offered, size
    ) != NEGOTIATED:
        return EXTENSION_NOACK
    out[0] = chosen
    return EXTENSION_OK


cdef int choose_context(void* ssl, int* alert, void* argument) noexcept:
    """SNI (RFC 6066 3): certificate and OCSP response of the name that the client asks for. For an unknown one, or
    none, those of the first context. TLS versions, suites and tickets are the same in all."""
    cdef:
        const char* name = openssl.SSL_get_servername(ssl, HOST_NAME)
        Context context
    if name == NULL:
        return EXTENSION_NOACK
    context = (<Context> argument).find(name)
    if context is None:
        return EXTENSION_NOACK
    openssl.SSL_set_SSL_CTX(ssl, context.ctx)
    return EXTENSION_OK


cdef int staple(void* ssl, void* argument) noexcept:
    """RFC 6066 8: the OCSP response of the certificate that was chosen, if the client asks for it."""
    cdef:
        Context context = <Context> argument
        void* certificate = openssl.SSL_get_certificate(ssl)
        void* copy
        bytes response
        int number
    for number in range(context.pairs):
        if context.certificates[number] == certificate and context.staples[number] is not None:
            response, until_s = context.staples[number]
            if time(NULL) >= until_s:
                return EXTENSION_NOACK
            # OpenSSL frees it.
            copy = openssl.CRYPTO_malloc(PyBytes_GET_SIZE(response), b"_openssl.pyx", 0)
            if copy == NULL:
                return EXTENSION_NOACK
            memcpy(copy, PyBytes_AS_STRING(response), PyBytes_GET_SIZE(response))
            openssl.SSL_ctrl(ssl, CTRL_STATUS_RESPONSE, PyBytes_GET_SIZE(response), copy)
            return EXTENSION_OK
    return EXTENSION_NOACK


cdef int no_password(char* to, int size, int writing, void* argument) noexcept nogil:
    return -1


cdef class Context:
    """A server's certificates and settings: TLS 1.2 or newer, suites with forward secrecy and authenticated encryption,
    no renegotiation, no compression.

    Each of `pairs` is PEM text: a private key, its certificate and the intermediates. They have keys of different kinds
    (RSA, ECDSA); what the client can do decides between them. Raises ContextError.
    """

    def __cinit__(self):
        self.names = {}
        self.made = {}
        self.staples = []

    def __init__(self, *pairs):
        if not load():
            raise ContextError(missing())
        if self.ctx != NULL:
            raise RuntimeError("a Context is initialised once")
        openssl.ERR_clear_error()
        self.ctx = openssl.SSL_CTX_new(openssl.TLS_server_method())
        if self.ctx == NULL:
            raise ContextError(fault_text())
        if (
            openssl.SSL_CTX_ctrl(self.ctx, CTRL_MIN_PROTO_VERSION, TLS1_2, NULL) != 1
            or openssl.SSL_CTX_set_cipher_list(self.ctx, CIPHERS) != 1
            or openssl.SSL_CTX_set_session_id_context(self.ctx, <const unsigned char*> <const char*> b"redpoll", 7) != 1
        ):
            raise ContextError(fault_text())
        # A client could make us repeat the expensive half of a handshake at will.
        openssl.SSL_CTX_set_options(
            self.ctx, OP_NO_RENEGOTIATION | OP_NO_COMPRESSION | OP_CIPHER_SERVER_PREFERENCE | OP_PRIORITIZE_CHACHA
        )
        # Buffers of 16 KiB are freed while nothing is under way.
        openssl.SSL_CTX_ctrl(self.ctx, CTRL_MODE, MODE_RELEASE_BUFFERS, NULL)
        # Sessions are in the clients' tickets, not here.
        openssl.SSL_CTX_ctrl(self.ctx, CTRL_SESS_CACHE_MODE, 0, NULL)
        openssl.SSL_CTX_set_timeout(self.ctx, TICKET_S)
        # A client that connects twice at once is rare, and each ticket takes a message.
        openssl.SSL_CTX_set_num_tickets(self.ctx, 1)
        openssl.SSL_CTX_set_tlsext_ticket_key_evp_cb(self.ctx, <void*> use_ticket_key)
        openssl.SSL_CTX_set_alpn_select_cb(self.ctx, <void*> choose_protocol, NULL)
        openssl.SSL_CTX_callback_ctrl(self.ctx, CTRL_SERVERNAME_CALLBACK, <void*> choose_context)
        openssl.SSL_CTX_ctrl(self.ctx, CTRL_SERVERNAME_ARGUMENT, 0, <void*> self)
        openssl.SSL_CTX_callback_ctrl(self.ctx, CTRL_STATUS_CALLBACK, <void*> staple)
        openssl.SSL_CTX_ctrl(self.ctx, CTRL_STATUS_ARGUMENT, 0, <void*> self)
        if not 0 < len(pairs) <= MAX_PAIRS:
            raise ValueError(f"a context has 1 to {MAX_PAIRS} certificates")
        for pair in pairs:
            self.use(pair)

    def set_staple(self, int number, bytes response not None, double until_s):
        """Give clients that ask for one this OCSP response, in DER, for the certificate of this pair, until that time in
        Unix seconds."""
        if not 0 <= number < self.pairs:
            raise IndexError("there is no such certificate")
        self.staples[number] = response, until_s

    def serve_names(self, names, make):
        """`names` maps DNS names in lower case, also wildcards, to numbers of other contexts, which are used for them.
        `make(number)` is called when one is needed for the first time. It returns the Context, or None for this one."""
        self.names = {name.encode("ascii"): number for name, number in names.items()}
        self.make = make

    cdef Context find(self, const char* name):
        """That of a name; None: this one."""
        cdef bytes wanted
        if not self.names:
            return None
        wanted = (<bytes> name).lower()
        number = self.names.get(wanted)
        if number is None:
            number = self.names.get(b"*." + wanted.partition(b".")[2])
        if number is None:
            return None
        if number not in self.made:
            self.made[number] = self.make(number)
        return self.made[number]

    def __dealloc__(self):
        if self.ctx != NULL:
            openssl.SSL_CTX_free(self.ctx)

    cdef int use(self, bytes pair) except -1:
        """Adds a key and its certificate. Those after it are added to its chain."""
        cdef:
            void* bio
            void* key
            void* certificate
            int count = 0
            unsigned long end
            bint used = True
        bio = memory_of(pair)
        key = openssl.PEM_read_bio_PrivateKey(bio, NULL, <void*> no_password, NULL)
        openssl.BIO_free(bio)
        if key == NULL:
            fault = fault_text()
            if b"ENCRYPTED" in pair:
                fault = "the key has a passphrase; use a key without one"
            raise ContextError(fault)
        bio = memory_of(pair)
        while used:
            certificate = openssl.PEM_read_bio_X509(bio, NULL, NULL, NULL)
            if certificate == NULL:
                break
            # Each takes a reference of its own.
            if count == 0:
                used = openssl.SSL_CTX_use_certificate(self.ctx, certificate) == 1
                self.certificates[self.pairs] = certificate
            else:
                used = openssl.SSL_CTX_ctrl(self.ctx, CTRL_CHAIN_CERT, 1, certificate) == 1
            openssl.X509_free(certificate)
            count += 1
        openssl.BIO_free(bio)
        if used and count:
            # The end of the certificates is an error in the queue, too; of another one, such as a certificate that is cut
            # off, clients would miss the rest of the chain.
            end = openssl.ERR_peek_last_error()
            used = end >> 23 & 0xFF == ERR_LIB_PEM and end & 0x7FFFFF == PEM_R_NO_START_LINE
        if used and count:
            openssl.ERR_clear_error()
            used = openssl.SSL_CTX_use_PrivateKey(self.ctx, key) == 1
            used = used and openssl.SSL_CTX_check_private_key(self.ctx) == 1
        openssl.EVP_PKEY_free(key)
        if not used or count == 0:
            raise ContextError(fault_text())
        self.pairs += 1
        self.staples.append(None)
        return 0


cdef void* memory_of(bytes pem) except NULL:
    """A BIO that reads `pem`, which the caller keeps alive."""
    cdef void* bio = openssl.BIO_new_mem_buf(PyBytes_AS_STRING(pem), PyBytes_GET_SIZE(pem))
    if bio == NULL:
        raise MemoryError()
    return bio
