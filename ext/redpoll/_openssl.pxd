# OpenSSL's functions, as Python's ssl module has loaded them, and contexts: layout and ownership. Behaviour is in
# _openssl.pyx.

from libc.stdint cimport uint64_t


cdef struct Functions:
    # Of libssl, by their names there (OpenSSL 3.0 and later). Opaque types are void.
    void* (*TLS_server_method)() noexcept nogil
    void* (*SSL_CTX_new)(const void* method) noexcept nogil
    void (*SSL_CTX_free)(void* ctx) noexcept nogil
    long (*SSL_CTX_ctrl)(void* ctx, int what, long number, void* at) noexcept nogil
    uint64_t (*SSL_CTX_set_options)(void* ctx, uint64_t options) noexcept nogil
    int (*SSL_CTX_set_cipher_list)(void* ctx, const char* text) noexcept nogil
    void (*SSL_CTX_set_alpn_select_cb)(void* ctx, void* callback, void* argument) noexcept nogil
    int (*SSL_select_next_proto)(
        unsigned char** out, unsigned char* out_size, const unsigned char* server, unsigned int server_size,
        const unsigned char* client, unsigned int client_size,
    ) noexcept nogil
    int (*SSL_CTX_use_certificate)(void* ctx, void* certificate) noexcept nogil
    int (*SSL_CTX_use_PrivateKey)(void* ctx, void* key) noexcept nogil
    int (*SSL_CTX_check_private_key)(const void* ctx) noexcept nogil
    int (*SSL_CTX_set_tlsext_ticket_key_evp_cb)(void* ctx, void* callback) noexcept nogil
    int (*SSL_CTX_set_session_id_context)(void* ctx, const unsigned char* at, unsigned int size) noexcept nogil
    long (*SSL_CTX_set_timeout)(void* ctx, long seconds) noexcept nogil
    int (*SSL_CTX_set_num_tickets)(void* ctx, size_t count) noexcept nogil
    void* (*SSL_new)(void* ctx) noexcept nogil
    void (*SSL_free)(void* ssl) noexcept nogil
    void (*SSL_set_bio)(void* ssl, void* incoming, void* outgoing) noexcept nogil
    void (*SSL_set_accept_state)(void* ssl) noexcept nogil
    void (*SSL_set_info_callback)(void* ssl, void* callback) noexcept nogil
    int (*SSL_do_handshake)(void* ssl) noexcept nogil
    int (*SSL_read)(void* ssl, void* to, int size) noexcept nogil
    int (*SSL_write)(void* ssl, const void* at, int size) noexcept nogil
    int (*SSL_shutdown)(void* ssl) noexcept nogil
    int (*SSL_get_error)(const void* ssl, int result) noexcept nogil
    int (*SSL_pending)(const void* ssl) noexcept nogil
    int (*SSL_session_reused)(const void* ssl) noexcept nogil
    int (*SSL_version)(const void* ssl) noexcept nogil
    long (*SSL_CTX_callback_ctrl)(void* ctx, int what, void* callback) noexcept nogil
    long (*SSL_ctrl)(void* ssl, int what, long number, void* at) noexcept nogil
    const char* (*SSL_get_servername)(const void* ssl, int kind) noexcept nogil
    void* (*SSL_set_SSL_CTX)(void* ssl, void* ctx) noexcept nogil
    void* (*SSL_get_certificate)(const void* ssl) noexcept nogil
    # Of libcrypto.
    void* (*BIO_meth_new)(int kind, const char* name) noexcept nogil
    int (*BIO_meth_set_write)(void* method, void* function) noexcept nogil
    int (*BIO_meth_set_read)(void* method, void* function) noexcept nogil
    int (*BIO_meth_set_ctrl)(void* method, void* function) noexcept nogil
    void* (*BIO_new)(const void* method) noexcept nogil
    int (*BIO_free)(void* bio) noexcept nogil
    void (*BIO_set_init)(void* bio, int init) noexcept nogil
    void (*BIO_set_flags)(void* bio, int flags) noexcept nogil
    void (*BIO_clear_flags)(void* bio, int flags) noexcept nogil
    void* (*BIO_new_mem_buf)(const void* at, int size) noexcept nogil
    void* (*PEM_read_bio_X509)(void* bio, void** to, void* password, void* argument) noexcept nogil
    void* (*PEM_read_bio_PrivateKey)(void* bio, void** to, void* password, void* argument) noexcept nogil
    void (*X509_free)(void* certificate) noexcept nogil
    void (*EVP_PKEY_free)(void* key) noexcept nogil
    void (*ERR_clear_error)() noexcept nogil
    unsigned long (*ERR_peek_last_error)() noexcept nogil
    const char* (*ERR_reason_error_string)(unsigned long error) noexcept nogil
    int (*RAND_bytes)(unsigned char* to, int size) noexcept nogil
    const void* (*EVP_aes_256_cbc)() noexcept nogil
    int (*EVP_EncryptInit_ex)(
        void* ctx, const void* cipher, void* engine, const unsigned char* key, const unsigned char* iv
    ) noexcept nogil
    int (*EVP_DecryptInit_ex)(
        void* ctx, const void* cipher, void* engine, const unsigned char* key, const unsigned char* iv
    ) noexcept nogil
    int (*EVP_MAC_CTX_set_params)(void* ctx, const void* parameters) noexcept nogil
    unsigned long (*OpenSSL_version_num)() noexcept nogil
    void* (*CRYPTO_malloc)(size_t size, const char* file, int line) noexcept nogil


# All NULL until load() has found them.
cdef Functions openssl


cdef enum:
    # Kinds of keys for which OpenSSL keeps a certificate each.
    MAX_PAIRS = 8


cdef class Context:
    # Owned: an SSL_CTX. Each SSL made from it holds it, too.
    cdef void* ctx
    # Borrowed from `ctx`: its certificates (X509), in the order of the pairs.
    cdef (void*)[MAX_PAIRS] certificates
    cdef int pairs
    # Owned: by pair None or an OCSP response in DER, and until when it counts, in Unix seconds.
    cdef list staples
    # Owned: by name (bytes, lower case, also wildcards) the number of the context that is used instead; what makes it;
    # and those that were made.
    cdef dict names
    cdef object make
    cdef dict made

    cdef int use(self, bytes pair) except -1
    cdef Context find(self, const char* name)


cdef str fault_text()
