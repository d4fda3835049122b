"""The reader of usual bodies, in the module that calls it."""

import json

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ext.fast_publishing import Control, body


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
        b"\\u00e9\\u20AC\\ud83d\\ude00x",
        b"\\u0000\\u0041\\u07ff\\u0800\\uffff\\udbff\\udfff",
        b"\\ud83d",
        b"\\ud83d\\u0041",
        b"\\ude00\\ud83d",
        b"\\u00g9",
        b"\x1f",
    ],
)
def test_texts_are_read_as_python_reads_them_or_not_here(data):
    found = Control().takes(body(data))
    try:
        # Half of a surrogate pair can't be encoded.
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


NAMES = [b"plain", b"App\\\\Events\\\\Shipped", b"caf\\u00e9", b"caf\xc3\xa9", b'a\\"b', b"a\\nb", b"\\ud800", b"a\nb"]


@pytest.mark.parametrize("name", NAMES)
def test_names_are_read_and_logged_as_python_does_it_or_not_here(name):
    control = Control()
    found = control.takes(body(name=name))
    try:
        expected = json.loads(body(name=name))["name"]
        expected.encode()
    except ValueError:
        assert found is None
        return
    assert [command[2].partition(b"\n")[2] for command in found] == [expected.encode() + b"{}"]
    control.published[-1][1](1)
    control.fast.finish()
    ((*_, rows, _, _),) = control.completed
    assert json.loads(b"[" + rows[:-1] + b"]")[0][4] == expected
    assert rows.split(b",")[4] == msgspec.json.encode(expected)


@pytest.mark.parametrize("socket_id", [b"null", b'"1.2"', b"nul", b"nulls", b"1", b'null,"socket_id":"1.2"'])
def test_a_socket_id_may_be_null_as_the_library_for_rust_sends_it(socket_id):
    found = Control().takes(body(more=b',"socket_id":' + socket_id))
    assert (found is not None) == (socket_id in (b"null", b'"1.2"'))
