"""Which requests read a channel, and what control sees of them."""

import pytest

from redpoll.http.messages import FIELDS
from redpoll.http.reader import ParsedRequest
from redpoll.protocol.auth import check_size
from redpoll.protocol.errors import ApiError
from redpoll.protocol.streams import Live
from redpoll.worker.streams.asked import READ_FIELDS, Asked, asked_of

PATH = b"/apps/1/channels/news/stream"
AUTHORIZATION = FIELDS.index("Authorization")


def request(target: bytes, method: bytes = b"GET", **fields: bytes) -> ParsedRequest:
    places = [(READ_FIELDS.index(name.replace("_", "-")), value) for name, value in fields.items()]
    return ParsedRequest(0, method, target, places, [], b"")


def asked(target: bytes, **fields: bytes) -> Asked:
    found = asked_of(request(target, **fields))
    assert found is not None
    return found


def test_only_reads_of_a_channel_are_taken():
    for target in (PATH, PATH + b"?offset=-1", b"/api/v1" + PATH, b"/prefix" + PATH):
        assert asked_of(request(target)) is not None
        assert asked_of(request(target, b"HEAD")) is not None
    for target in (b"/apps/1/channels/stream", PATH + b"/more", b"/x?/apps/1/channels/news/stream", b"/stream"):
        assert asked_of(request(target)) is None
    assert asked_of(request(PATH, b"POST")) is None
    assert asked_of(request(PATH, b"OPTIONS")) is None


@pytest.mark.parametrize("name", [b"token", b"%74oken", b"to%6ben"])
def test_token_leaves_the_query_for_a_header(name):
    found = asked(PATH + b"?offset=-1&" + name + b"=rp%5Fabc&live=sse")
    assert found.request.target == PATH + b"?offset=-1&live=sse"
    assert found.query == "offset=-1&live=sse"
    assert found.request.fields == [(AUTHORIZATION, b"Bearer rp_abc")]
    assert "abc" not in repr(found._replace(request=found.request._replace(fields=[])))


def test_token_alone_leaves_no_query():
    assert asked(PATH + b"?token=x").request.target == PATH


def test_header_counts_more_than_the_query():
    found = asked(PATH + b"?token=b", Authorization=b"Bearer a")
    assert found.request.fields == [(AUTHORIZATION, b"Bearer a")]
    assert b"token" not in found.request.target


def test_control_gets_only_the_fields_that_it_knows():
    found = asked(PATH, Origin=b"https://a", Accept=b"text/event-stream", Last_Event_ID=b" e_1 ", If_None_Match=b'"x"')
    assert found.request.fields == [
        (FIELDS.index("Origin"), b"https://a"),
        (FIELDS.index("If-None-Match"), b'"x"'),
    ]
    assert (found.accept, found.last_event_id, found.known_etag) == ("text/event-stream", "e_1", '"x"')
    assert found._replace(last_event_id="").reading().live is Live.EVENT_SOURCE


def test_event_source_is_known_before_control_has_answered():
    assert asked(PATH + b"?offset=-1", Accept=b"text/event-stream").is_event_source
    for found in (
        asked(PATH),
        asked(PATH + b"?offset=-1&live=sse", Accept=b"text/event-stream"),
        asked(PATH + b"?offset=wrong", Accept=b"text/event-stream"),
        asked_of(request(PATH, b"HEAD", Accept=b"text/event-stream")),
    ):
        assert found is not None
        assert not found.is_event_source


def test_query_that_cannot_be_read_is_refused():
    for query in (b"?offset=%ff", b"?" + b"a=1&" * 200):
        with pytest.raises(ApiError, match="query"):
            asked(PATH + query).reading()


def test_no_more_parameters_are_decoded_than_are_needed_to_refuse_them():
    """A stranger's 16 KiB of them took 24 ms of a worker's loop."""
    found = asked(PATH + b"?token=x&" + b"%41&" * 4_000)
    assert found.query.count("&") == 100
    with pytest.raises(ApiError, match="more than 100 fields"):
        found.reading()
    with pytest.raises(ApiError, match="more than 100 parameters"):
        check_size(found.query)


def test_address_is_that_of_the_forwarding_header():
    found = asked_of(request(PATH)._replace(forwarded=["1.2.3.4", "5.6.7.8"]))
    assert found is not None
    assert found.forwarding() == {b"x-forwarded-for": b"1.2.3.4, 5.6.7.8"}
    assert asked(PATH).forwarding() == {}
