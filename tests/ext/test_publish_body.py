"""The reader of usual bodies, in the module that calls it."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fast_publishing import Control, body


@pytest.mark.parametrize(
    "data",
    [
        b"plain",
        b"",
        b'\\"\\\\\\/\\b\\f\\n\\r\\t',
        b"12345678\\n12345678",
        b"1234567\xc3\xa9",
        b"\xe2\x82\xac",
        b"\xf0\x9f\x98\x80",
        b"\x7f",
        b"\xc3",
        b"\xe2\x82",
        b"\xf0\x9f\x98",
        b"\xc0\x80",
        b"\xc1\xbf",
        b"\xe0\x9f\xbf",
        b"\xed\xa0\x80",
        b"\xf4\x90\x80\x80",
        b"\xf8\x88\x80\x80\x80",
        b"\x80",
        b"\xff",
        b"a\nb",
        b"a\x00b",
        b"\\x",
        b"\\u00e",
        b"\x1f",
    ],
)
def test_texts_are_read_as_python_reads_them_or_not_here(data):
    found = Control().takes(body(data))
    try:
        expected = json.loads(body(data).decode())["data"].encode()
    except ValueError:
        assert found is None
    else:
        assert [command[2].partition(b"\ne")[2] for command in found] == [expected]


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=12) | st.text(max_size=12).map(str.encode))
def test_any_bytes_are_read_as_python_reads_them_or_not_here(data):
    found = Control().takes(body(data))
    if found is not None:
        given = json.loads(body(data))
        assert [command[2].partition(b"\n")[2] for command in found] == [(given["name"] + given["data"]).encode()]
        assert given.keys() == {"name", "channels", "data"}
