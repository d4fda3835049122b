# SHA-256 and MD5 by OpenSSL's functions: layout. Behaviour is in _digests.pyx.

from libc.stdint cimport uint8_t, uint32_t


cdef struct Sha256:
    # SHA256_CTX (openssl/sha.h).
    uint32_t[8] h
    uint32_t low, high
    uint32_t[16] data
    unsigned int count, size


cdef class HmacKey:
    cdef:
        Sha256 inner, outer
        # Where OpenSSL's functions aren't found: hashlib's objects, to be copied.
        object inner_hash, outer_hash

    cdef int sign(self, const char* text, Py_ssize_t size, uint8_t* digest) except -1


cdef int put_md5(const char* text, Py_ssize_t size, uint8_t* digest) except -1
cdef bint is_hex_of(const uint8_t* hex_digits, const uint8_t* digest, int size) noexcept nogil
