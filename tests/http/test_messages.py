"""Requests and responses between worker and control, as bytes."""

import math

from hypothesis import given
from hypothesis import strategies as st

from helpers.messages import unpack_answer, unpack_request
from redpoll._http import pack_answer, pack_request
from redpoll.http.messages import (
    CLOSES,
    CONTINUE,
    FIELDS,
    HEAD_ONLY,
    LAST,
    SECURE,
    PullTerms,
    number_of,
    pack_fields,
    size_of,
)


@given(
    st.integers(1, 0xFFFF_FFFF),
    st.binary(max_size=16_000),
    st.lists(st.tuples(st.sampled_from(range(len(FIELDS))), st.binary(max_size=300)), unique_by=lambda one: one[0]),
    st.binary(max_size=3_000),
)
def test_a_request_arrives_as_it_was_sent(number, target, fields, body):
    packed = pack_request(number, SECURE, b"POST", b"2001:db8::1", target, pack_fields(fields), body)
    assert (size_of(packed, 0), number_of(packed)) == (len(packed), number)
    request = unpack_request(packed)
    assert (request.number, request.flags, request.method, request.client) == (number, SECURE, "POST", "2001:db8::1")
    assert request.target.encode("utf-8", "surrogateescape") == target
    assert {name: value.encode("utf-8", "surrogateescape") for name, value in request.fields.items()} == {
        FIELDS[place]: value for place, value in fields
    }
    assert request.body == body
    assert (request.announced, request.refusal) == (0, 0)


def test_of_a_field_given_twice_the_first_counts():
    place = FIELDS.index("X-Service-Key")
    packed = pack_request(1, 0, b"GET", b"", b"/", pack_fields([(place, b"a"), (place, b"b")]), b"")
    assert unpack_request(packed).fields == {"X-Service-Key": "a"}


def test_a_head_says_how_much_body_is_to_come():
    for announced, received in ((None, None), (7, 7), (1 << 40, 0xFFFF_FFFE)):
        packed = pack_request(1, HEAD_ONLY | CLOSES, b"POST", b"", b"/", b"", b"", announced, 408)
        request = unpack_request(packed)
        assert (request.announced, request.refusal, request.flags) == (received, 408, HEAD_ONLY | CLOSES)


def test_answers_follow_each_other_in_a_stream():
    stream = pack_answer(7, LAST, b"response") + pack_answer(8, CONTINUE, b"")
    size = size_of(stream, 0)
    assert unpack_answer(stream[:size]) == (7, LAST, b"response")
    assert unpack_answer(stream[size:]) == (8, CONTINUE, b"")


@given(st.integers(0, 60), st.integers(0, 100), st.integers(1, 86_400), st.integers(0, 10**9) | st.just(math.inf))
def test_terms_of_a_pull(wait_s, limit, lease_s, next_s):
    terms = PullTerms(wait_s, limit, lease_s, next_s)
    assert PullTerms.unpack(terms.packed()) == terms
