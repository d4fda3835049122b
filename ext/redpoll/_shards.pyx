"""In which shard a channel is (cluster/README.md "Shards and stamps").

A record store with a key: SipHash-2-4 of the channel's name, so that only those who know the key can choose names of
one shard. (A CRC with a secret start wouldn't do: names of equal length that share a shard share it with every start.)
One without a key: CRC-32.
"""

from cpython.unicode cimport PyUnicode_AsUTF8AndSize
from libc.stdint cimport uint8_t, uint32_t, uint64_t

__all__ = ["KEY_BYTES", "Shards", "siphash"]

KEY_BYTES = 16

# How a channel's shard is found.
cdef enum:
    UNKNOWN
    CRC
    KEYED
    FIXED


cdef class Shards:
    """`heads` are the beginnings of keys by shard. `key` has 16 bytes, or none for CRC-32; None: it isn't known yet, and
    no shard can be asked for before `use`."""

    def __init__(self, tuple heads not None, bytes key):
        if not heads:
            raise ValueError("no shards")
        self.heads = heads
        self.way = UNKNOWN
        if key is not None:
            self.use(key)

    def use(self, bytes key not None):
        """Channels are where this key puts them, from now on. ValueError for a key of another size than 16 or 0."""
        if not key:
            self.way = CRC
            return
        set_key(self.key, key)
        self.way = KEYED

    def of(self, str app_id not None, str channel not None) -> int:
        """The number of the channel's shard."""
        cdef:
            Py_ssize_t app_size = 0
            Py_ssize_t channel_size = 0
            const char* app = PyUnicode_AsUTF8AndSize(app_id, &app_size)
            const char* name = PyUnicode_AsUTF8AndSize(channel, &channel_size)
        return self.place(<const uint8_t*> app, app_size, <const uint8_t*> name, channel_size)

    def head(self, str app_id not None, str channel not None) -> bytes:
        """The beginning of the channel's keys."""
        cdef:
            Py_ssize_t app_size = 0
            Py_ssize_t channel_size = 0
            const char* app = PyUnicode_AsUTF8AndSize(app_id, &app_size)
            const char* name = PyUnicode_AsUTF8AndSize(channel, &channel_size)
        return self.heads[self.place(<const uint8_t*> app, app_size, <const uint8_t*> name, channel_size)]

    def fixed(self, Py_ssize_t at) -> Shards:
        """The same shards with every channel in shard `at`."""
        cdef Shards made = Shards(self.heads, None)
        if not 0 <= at < len(self.heads):
            raise IndexError(f"no shard {at}")
        made.way, made.only = FIXED, at
        return made

    cdef Py_ssize_t place(
        self, const uint8_t* app, Py_ssize_t app_size, const uint8_t* channel, Py_ssize_t channel_size
    ) except -1:
        """The shard of a channel whose app id and name are UTF-8."""
        cdef:
            Sip sip
            uint32_t crc = 0xFFFFFFFF
        if self.way == KEYED:
            sip_begin(&sip, self.key)
            sip_add(&sip, app, app_size)
            sip_add(&sip, <const uint8_t*> b":", 1)
            sip_add(&sip, channel, channel_size)
            return sip_end(&sip) % <uint64_t> len(self.heads)
        if self.way == CRC:
            crc = crc_of(crc, app, app_size)
            crc = crc_of(crc, <const uint8_t*> b":", 1)
            crc = ~crc_of(crc, channel, channel_size)
            return crc % <uint32_t> len(self.heads)
        if self.way == FIXED:
            return self.only
        raise RuntimeError("the record store's shard key isn't known yet")


def siphash(bytes key not None, bytes data not None) -> int:
    """SipHash-2-4 of the data, 64 bits. ValueError unless the key has 16 bytes."""
    cdef:
        Sip sip
        uint64_t[2] words
    set_key(words, key)
    sip_begin(&sip, words)
    sip_add(&sip, data, len(data))
    return sip_end(&sip)


# -- SipHash-2-4 (Aumasson and Bernstein, "SipHash: a fast short-input PRF") ----------------------------------


cdef struct Sip:
    uint64_t v0
    uint64_t v1
    uint64_t v2
    uint64_t v3
    # Bytes that don't fill a word yet, from the lowest on, and how many bits they are.
    uint64_t rest
    int rest_bits
    uint64_t size


cdef inline uint64_t word_at(const uint8_t* at) noexcept nogil:
    # Little-endian on every machine; the compiler makes one load of it where it can.
    return (
        <uint64_t> at[0] | <uint64_t> at[1] << 8 | <uint64_t> at[2] << 16 | <uint64_t> at[3] << 24
        | <uint64_t> at[4] << 32 | <uint64_t> at[5] << 40 | <uint64_t> at[6] << 48 | <uint64_t> at[7] << 56
    )


cdef int set_key(uint64_t* words, bytes key) except -1:
    cdef const uint8_t* at = key
    if len(key) != KEY_BYTES:
        raise ValueError(f"a shard key has {KEY_BYTES} bytes, not {len(key)}")
    words[0], words[1] = word_at(at), word_at(at + 8)
    return 0


cdef inline uint64_t rotated(uint64_t word, int bits) noexcept nogil:
    return word << bits | word >> (64 - bits)


cdef inline void sip_round(Sip* sip) noexcept nogil:
    sip.v0 += sip.v1
    sip.v2 += sip.v3
    sip.v1 = rotated(sip.v1, 13) ^ sip.v0
    sip.v3 = rotated(sip.v3, 16) ^ sip.v2
    sip.v0 = rotated(sip.v0, 32)
    sip.v2 += sip.v1
    sip.v0 += sip.v3
    sip.v1 = rotated(sip.v1, 17) ^ sip.v2
    sip.v3 = rotated(sip.v3, 21) ^ sip.v0
    sip.v2 = rotated(sip.v2, 32)


cdef inline void sip_word(Sip* sip, uint64_t word) noexcept nogil:
    sip.v3 ^= word
    sip_round(sip)
    sip_round(sip)
    sip.v0 ^= word


cdef inline void sip_begin(Sip* sip, const uint64_t* key) noexcept nogil:
    sip.v0 = key[0] ^ <uint64_t> 0x736F6D6570736575
    sip.v1 = key[1] ^ <uint64_t> 0x646F72616E646F6D
    sip.v2 = key[0] ^ <uint64_t> 0x6C7967656E657261
    sip.v3 = key[1] ^ <uint64_t> 0x7465646279746573
    sip.rest = 0
    sip.rest_bits = 0
    sip.size = 0


cdef inline void sip_add(Sip* sip, const uint8_t* at, Py_ssize_t size) noexcept nogil:
    cdef uint64_t word
    sip.size += <uint64_t> size
    while size >= 8:
        word = word_at(at)
        if sip.rest_bits:
            sip_word(sip, sip.rest | word << sip.rest_bits)
            sip.rest = word >> (64 - sip.rest_bits)
        else:
            sip_word(sip, word)
        at += 8
        size -= 8
    while size:
        sip.rest |= <uint64_t> at[0] << sip.rest_bits
        sip.rest_bits += 8
        if sip.rest_bits == 64:
            sip_word(sip, sip.rest)
            sip.rest, sip.rest_bits = 0, 0
        at += 1
        size -= 1


cdef inline uint64_t sip_end(Sip* sip) noexcept nogil:
    cdef int i
    sip_word(sip, sip.rest | sip.size << 56)
    sip.v2 ^= 0xFF
    for i in range(4):
        sip_round(sip)
    return sip.v0 ^ sip.v1 ^ sip.v2 ^ sip.v3


# -- CRC-32 as in zlib ---------------------------------------------------------------------------------------

cdef uint32_t[256] crc_table


def _fill_crc_table():
    cdef uint32_t crc
    cdef int byte, bit
    for byte in range(256):
        crc = <uint32_t> byte
        for bit in range(8):
            crc = (crc >> 1) ^ (0xEDB88320 if crc & 1 else 0)
        crc_table[byte] = crc


_fill_crc_table()
del _fill_crc_table


cdef inline uint32_t crc_of(uint32_t crc, const uint8_t* at, Py_ssize_t size) noexcept nogil:
    cdef Py_ssize_t i
    for i in range(size):
        crc = crc_table[(crc ^ at[i]) & 0xFF] ^ (crc >> 8)
    return crc
