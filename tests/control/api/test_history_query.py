import pytest

from redpoll.control.api.history_query import answer, parse_query
from redpoll.control.http.schemas import Message
from redpoll.protocol.errors import ApiError

MESSAGES = [Message(offset, "e", "d", 0) for offset in (10, 20, 30)]


def test_the_newest_messages_come_first_oldest_without_bounds():
    selected = parse_query({})
    assert (selected.limit, selected.newest, selected.reverse) == (100, True, False)
    page = answer("E", list(MESSAGES), True, selected)
    assert [message.offset for message in page.messages] == [10, 20, 30]
    assert page.next == "E:10"
    assert parse_query({"cursor": page.next}).before == 10


def test_since_reads_forward_and_its_cursor_continues_there():
    selected = parse_query({"since": "E:5"})
    assert (selected.since, selected.newest) == (5, False)
    page = answer("E", list(MESSAGES), True, selected)
    assert page.next == "E:30:newer"
    following = parse_query({"cursor": page.next})
    assert (following.since, following.before) == (30, None)


def test_backwards_reverses_the_page():
    page = answer("E", list(MESSAGES), False, parse_query({"direction": "backwards"}))
    assert [message.offset for message in page.messages] == [30, 20, 10]
    assert page.next is None


@pytest.mark.parametrize(
    ("query", "code"),
    [
        ({"limit": "0"}, "bad_request"),
        ({"limit": "1001"}, "bad_request"),
        ({"direction": "up"}, "bad_request"),
        ({"cursor": "nonsense"}, "invalid_cursor"),
        ({"since": "E:x"}, "invalid_offset"),
        ({"until": "yesterday"}, "bad_request"),
    ],
)
def test_what_cannot_be_meant_is_refused(query, code):
    with pytest.raises(ApiError) as refused:
        parse_query(query)
    assert refused.value.code == code
