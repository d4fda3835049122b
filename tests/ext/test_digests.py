"""Digests by OpenSSL's functions are those of hashlib and hmac."""

import hashlib
import hmac

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from redpoll._digests import HmacKey, md5_hex


@settings(deadline=None)
@given(st.binary(max_size=200), st.binary(max_size=300))
def test_digests_are_those_of_hashlib(secret, text):
    assert HmacKey(secret).hexdigest(text) == hmac.new(secret, text, hashlib.sha256).hexdigest()
    assert md5_hex(text) == hashlib.md5(text).hexdigest()


@pytest.mark.parametrize("size", [0, 55, 56, 63, 64, 65, 128, 100_000])
def test_digests_at_the_bounds_of_blocks(size):
    data = b"x" * size
    assert HmacKey(data).hexdigest(data) == hmac.new(data, data, hashlib.sha256).hexdigest()
    assert md5_hex(data) == hashlib.md5(data).hexdigest()


def test_a_key_signs_more_than_once():
    key = HmacKey(b"secret")
    assert key.hexdigest(b"a") == key.hexdigest(b"a") != key.hexdigest(b"b")
