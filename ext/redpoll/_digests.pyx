"""HMAC-SHA256 and MD5 by OpenSSL's functions, called without a Python object for each hash.

The functions are those of the libcrypto that Python's `_hashlib` has loaded: dlsym(3) finds them in that module and in the
libraries that it was linked with, so a fix of the system's OpenSSL is a fix for us. Where Python has OpenSSL linked in,
or the functions aren't there, hashlib does the same work.
"""

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from libc.stdint cimport uint8_t, uint32_t
from libc.string cimport memcpy, memset

import hashlib
import importlib
import os

__all__ = ["HmacKey", "by_openssl", "md5_hex"]

cdef extern from "<dlfcn.h>" nogil:
    void* dlopen(const char* path, int flags)
    void* dlsym(void* handle, const char* name)
    enum:
        RTLD_NOLOAD
        RTLD_NOW

cdef extern from "<string.h>" nogil:
    void explicit_bzero(void* at, size_t size)

cdef enum:
    BLOCK_BYTES = 64
    SHA256_BYTES = 32
    MD5_BYTES = 16

cdef struct Functions:
    # 1 if they succeed (SHA256_Init(3), MD5_Init(3)). SHA256 and MD5 hash a whole text.
    int (*init)(Sha256*) noexcept nogil
    int (*update)(Sha256*, const void*, size_t) noexcept nogil
    int (*final)(unsigned char*, Sha256*) noexcept nogil
    unsigned char* (*md5)(const void*, size_t, unsigned char*) noexcept nogil

cdef Functions openssl
cdef bint has_openssl = False


def by_openssl() -> bool:
    """Whether OpenSSL's functions were found."""
    return has_openssl


cdef bint look_up() except -1:
    cdef:
        void* handle
        Functions functions
        bytes path
    try:
        module = importlib.import_module("_hashlib")
    except ImportError:
        return False
    file = getattr(module, "__file__", None)
    if file is None:
        return False
    path = os.fsencode(file)
    # It stays loaded as long as the process, and so do the libraries that it needs.
    handle = dlopen(PyBytes_AS_STRING(path), RTLD_NOLOAD | RTLD_NOW)
    if handle == NULL:
        return False
    (<void**> &functions.init)[0] = dlsym(handle, b"SHA256_Init")
    (<void**> &functions.update)[0] = dlsym(handle, b"SHA256_Update")
    (<void**> &functions.final)[0] = dlsym(handle, b"SHA256_Final")
    (<void**> &functions.md5)[0] = dlsym(handle, b"MD5")
    if functions.init == NULL or functions.update == NULL or functions.final == NULL or functions.md5 == NULL:
        return False
    openssl.init, openssl.update, openssl.final = functions.init, functions.update, functions.final
    openssl.md5 = functions.md5
    return True


cdef bint are_right() except -1:
    """Whether the functions give what hashlib gives. Their structure is public and has never changed, but a library that
    only has the same names must not be trusted."""
    cdef:
        bytes text = b"redpoll" * 30
        uint8_t[SHA256_BYTES] digest
        Sha256 context
    if not openssl.init(&context) or not openssl.update(&context, PyBytes_AS_STRING(text), PyBytes_GET_SIZE(text)):
        return False
    if not openssl.final(digest, &context):
        return False
    if PyBytes_FromStringAndSize(<char*> digest, SHA256_BYTES) != hashlib.sha256(text).digest():
        return False
    if openssl.md5(PyBytes_AS_STRING(text), PyBytes_GET_SIZE(text), digest) == NULL:
        return False
    return PyBytes_FromStringAndSize(<char*> digest, MD5_BYTES) == hashlib.md5(text, usedforsecurity=False).digest()


cdef object new_md5 = hashlib.md5(usedforsecurity=False)
has_openssl = look_up() and are_right()


cdef class HmacKey:
    """A secret, ready to sign (RFC 2104)."""

    def __init__(self, bytes secret not None):
        cdef:
            bytes block = (hashlib.sha256(secret).digest() if len(secret) > BLOCK_BYTES else secret).ljust(BLOCK_BYTES, b"\0")
            bytes inner = bytes([byte ^ 0x36 for byte in block])
            bytes outer = bytes([byte ^ 0x5C for byte in block])
        if not has_openssl:
            self.inner_hash, self.outer_hash = hashlib.sha256(inner), hashlib.sha256(outer)
            return
        if not (
            openssl.init(&self.inner)
            and openssl.update(&self.inner, PyBytes_AS_STRING(inner), BLOCK_BYTES)
            and openssl.init(&self.outer)
            and openssl.update(&self.outer, PyBytes_AS_STRING(outer), BLOCK_BYTES)
        ):
            raise RuntimeError("OpenSSL's SHA256_Init or SHA256_Update failed")

    def __dealloc__(self):
        explicit_bzero(&self.inner, sizeof(Sha256))
        explicit_bzero(&self.outer, sizeof(Sha256))

    cdef int sign(self, const char* text, Py_ssize_t size, uint8_t* digest) except -1:
        """Write the 32 bytes of the text's HMAC."""
        cdef Sha256 context
        if self.inner_hash is not None:
            hashed = self.inner_hash.copy()
            hashed.update(PyBytes_FromStringAndSize(text, size))
            result = self.outer_hash.copy()
            result.update(hashed.digest())
            memcpy(digest, PyBytes_AS_STRING(<bytes> result.digest()), SHA256_BYTES)
            return 0
        context = self.inner
        if openssl.update(&context, text, size) and openssl.final(digest, &context):
            context = self.outer
            if openssl.update(&context, digest, SHA256_BYTES) and openssl.final(digest, &context):
                return 0
        raise RuntimeError("OpenSSL's SHA256_Update or SHA256_Final failed")

    def hexdigest(self, bytes text not None) -> str:
        """The text's HMAC in lower-case hex."""
        cdef uint8_t[SHA256_BYTES] digest
        self.sign(PyBytes_AS_STRING(text), PyBytes_GET_SIZE(text), digest)
        return PyBytes_FromStringAndSize(<char*> digest, SHA256_BYTES).hex()


cdef int put_md5(const char* text, Py_ssize_t size, uint8_t* digest) except -1:
    """Write the 16 bytes of the text's MD5."""
    if has_openssl:
        if openssl.md5(text, size, digest) == NULL:
            raise RuntimeError("OpenSSL's MD5 failed")
        return 0
    hashed = new_md5.copy()
    hashed.update(PyBytes_FromStringAndSize(text, size))
    memcpy(digest, PyBytes_AS_STRING(<bytes> hashed.digest()), MD5_BYTES)
    return 0


def md5_hex(bytes text not None) -> str:
    """The text's MD5 in lower-case hex."""
    cdef uint8_t[MD5_BYTES] digest
    put_md5(PyBytes_AS_STRING(text), PyBytes_GET_SIZE(text), digest)
    return PyBytes_FromStringAndSize(<char*> digest, MD5_BYTES).hex()


cdef bint is_hex_of(const uint8_t* hex_digits, const uint8_t* digest, int size) noexcept nogil:
    """Whether these are the `size` bytes of a digest in lower-case hex, in a time that doesn't tell how many of them are
    the same."""
    cdef:
        uint8_t different = 0, high, low
        int i
    for i in range(size):
        high, low = digest[i] >> 4, digest[i] & 15
        # 39 is from the character after 9 to `a`.
        different |= hex_digits[2 * i] ^ <uint8_t> (48 + high + (high > 9) * 39)
        different |= hex_digits[2 * i + 1] ^ <uint8_t> (48 + low + (low > 9) * 39)
    return different == 0
