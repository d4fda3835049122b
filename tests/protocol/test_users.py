import json

import pytest

from redpoll.protocol.errors import ClientError
from redpoll.protocol.presence import Member
from redpoll.protocol.users import MAX_WATCHED, User, parse_user


@pytest.mark.parametrize(
    ("user_data", "user"),
    [
        ('{"id":"7"}', User(Member("7", b""), (), 0)),
        ('{"id":"7","user_info":null,"watchlist":null,"more":[1]}', User(Member("7", b""), (), 0)),
        ('{"id":"a b:#","user_info":{ "n" : 1 }}', User(Member("a b:#", b'{"n":1}'), (), 0)),
        ('{"id":"7","watchlist":["8","9","8",9,10]}', User(Member("7", b""), ("8", "9", "10"), 0)),
        ('{"id":"' + "x" * 128 + '"}', User(Member("x" * 128, b""), (), 0)),
    ],
)
def test_a_user_is_read(user_data, user):
    assert parse_user(user_data) == user


def test_the_first_hundred_are_watched_and_the_others_counted():
    ids = [str(number) for number in range(MAX_WATCHED + 5)]
    user = parse_user(json.dumps({"id": "7", "watchlist": ["0", *ids]}))
    assert user.watchlist == tuple(ids[:100])
    assert user.unwatched == 5
    assert parse_user(json.dumps({"id": "7", "watchlist": ids[:100] + ids[:100]})).unwatched == 0


@pytest.mark.parametrize(
    "user_data",
    [
        "",
        "null",
        "[]",
        "{}",
        '{"id":7}',
        '{"id":null}',
        '{"id":""}',
        '{"id":"' + "x" * 129 + '"}',
        '{"id":"\\ud800"}',
        '{"user_id":"7"}',
        '{"id":"7","watchlist":"8"}',
        '{"id":"7","watchlist":{"8":1}}',
        '{"id":"7","watchlist":[null]}',
        '{"id":"7","watchlist":[["8"]]}',
        '{"id":"7","watchlist":[1.5]}',
        '{"id":"7","watchlist":[""]}',
        '{"id":"7","watchlist":["' + "x" * 129 + '"]}',
        '{"id":"7","watchlist":[' + "9" * 5000 + "]}",
        '{"id":"7","user_info":"\\ud800"}',
        '{"id":"7","user_info":' + "[" * 50_000 + "]" * 50_000 + "}",
        '{"id":"7"',
    ],
    ids=lambda text: ascii(text[:40]),
)
def test_malformed_users_are_a_client_error(user_data):
    with pytest.raises(ClientError) as refusal:
        parse_user(user_data)
    assert refusal.value.code == 4009
    assert refusal.value.message.startswith("Invalid user_data: ")
    refusal.value.message.encode()
