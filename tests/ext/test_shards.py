"""In which shard a channel is: SipHash-2-4 with a key, CRC-32 without one."""

import os
from collections import Counter
from zlib import crc32

import pytest
from hypothesis import given
from hypothesis import strategies as st

from redpoll import _frame
from redpoll._shards import KEY_BYTES, Shards, siphash

HEADS = tuple(b"rp:{%d}:" % at for at in range(64))
KEY = bytes(range(KEY_BYTES))
# Text that UTF-8 can encode.
names = st.text(st.characters(exclude_categories=["Cs"]), max_size=80)
# The reference implementation's vectors: the hash of the bytes 0, 1, … with KEY, by their number. The one of 15 bytes
# is also in the paper, appendix A.
VECTORS = {
    0: 0x726FDB47DD0E0E31,
    1: 0x74F839C593DC67FD,
    2: 0x0D6C8009D9A94F5A,
    3: 0x85676696D7FB7E2D,
    4: 0xCF2794E0277187B7,
    5: 0x18765564CD99A68D,
    6: 0xCBC9466E58FEE3CE,
    7: 0xAB0200F58B01D137,
    8: 0x93F5F5799A932462,
    9: 0x9E0082DF0BA9E4B0,
    15: 0xA129CA6149BE45E5,
    16: 0x3F2ACC7F57C29BDB,
    31: 0x32D892FAD841C342,
    32: 0x7127512F72F27CCE,
    62: 0xE51B38608EF25F57,
    63: 0x958A324CEB064572,
}


def crc_shard(app_id: str, channel: str) -> int:
    return crc32(f"{app_id}:{channel}".encode()) % 64


@pytest.mark.parametrize("size", VECTORS)
def test_siphash_is_that_of_its_authors(size):
    assert siphash(KEY, bytes(range(size))) == VECTORS[size]


@given(names, names, st.one_of(st.just(b""), st.binary(min_size=KEY_BYTES, max_size=KEY_BYTES)))
def test_every_way_to_a_shard_agrees(app_id, channel, key):
    shards = Shards(HEADS, key)
    name = f"{app_id}:{channel}".encode()
    at = siphash(key, name) % 64 if key else crc_shard(app_id, channel)
    assert (shards.of(app_id, channel), shards.head(app_id, channel)) == (at, HEADS[at])
    packed = _frame.pack_publish(b"PUBLISH", shards, app_id, channel, "e", "d", None, None, None)
    assert b"\r\n%bt:%b\r\n" % (HEADS[at], name) in packed


def test_names_that_share_a_shard_under_one_key_spread_over_all_under_another():
    """With a CRC that begins with a secret they would all share one again."""
    one, other = Shards(HEADS, os.urandom(KEY_BYTES)), Shards(HEADS, os.urandom(KEY_BYTES))
    for known in (one, Shards(HEADS, b"")):
        chosen = [name for name in map("x{:06d}".format, range(200_000)) if known.of("7", name) == 5]
        found = Counter(other.of("7", name) for name in chosen)
        # Of about 3,125 names, 49 in each shard; 7 is one standard deviation.
        assert set(found) == set(range(64))
        assert max(found.values()) < 49 + 10 * 7


def test_before_the_key_is_known_no_shard_can_be_asked_for():
    shards = Shards(HEADS, None)
    for ask in (shards.of, shards.head):
        with pytest.raises(RuntimeError, match="isn't known yet"):
            ask("7", "news")
    with pytest.raises(RuntimeError, match="isn't known yet"):
        _frame.pack_publish(b"PUBLISH", shards, "7", "news", "e", "d", None, None, None)
    shards.use(KEY)
    assert shards.of("7", "news") == siphash(KEY, b"7:news") % 64


@pytest.mark.parametrize("size", [1, 15, 17, 32])
def test_a_key_of_another_size_is_refused(size):
    with pytest.raises(ValueError, match=f"a shard key has 16 bytes, not {size}"):
        Shards(HEADS, bytes(size))
    with pytest.raises(ValueError, match=f"a shard key has 16 bytes, not {size}"):
        siphash(bytes(size), b"")


def test_every_channel_is_in_the_shard_that_is_fixed():
    fixed = Shards(HEADS, KEY).fixed(9)
    assert {fixed.of("7", f"a{number}") for number in range(200)} == {9}
    for at in (-1, 64):
        with pytest.raises(IndexError):
            fixed.fixed(at)


def test_a_lone_surrogate_has_no_shard():
    with pytest.raises(UnicodeEncodeError):
        Shards(HEADS, KEY).of("7", "\ud800")


def test_shards_without_heads_are_refused():
    with pytest.raises(ValueError, match="no shards"):
        Shards((), b"")
