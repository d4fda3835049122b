"""Answers as JSON: fields without a value are left out, except the few that are null."""

import msgspec
import pytest

from redpoll.control.http import schemas


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        (schemas.Empty(), b"{}"),
        (schemas.TriggerResponse(), b"{}"),
        (schemas.TriggerResponse({"a": schemas.Attributes(user_count=0)}), b'{"channels":{"a":{"user_count":0}}}'),
        (schemas.BatchResponse(), b"{}"),
        (
            schemas.BatchResponse([schemas.Attributes(), schemas.Attributes(1)]),
            b'{"batch":[{},{"subscription_count":1}]}',
        ),
        # The PHP library needs an object here, even if it is empty.
        (schemas.ChannelsResponse({}), b'{"channels":{}}'),
        (schemas.ChannelResponse(False, 0), b'{"occupied":false,"subscription_count":0}'),
        (
            schemas.ChannelResponse(True, 2, 1, schemas.CachedEvent("d", 3)),
            b'{"occupied":true,"subscription_count":2,"user_count":1,"cache":{"data":"d","ttl":3}}',
        ),
        (schemas.ChannelResponse(False, 0, cache=None), b'{"occupied":false,"subscription_count":0,"cache":null}'),
        (schemas.UsersResponse([]), b'{"users":[]}'),
        (schemas.UsersResponse([schemas.User("1")]), b'{"users":[{"id":"1"}]}'),
        (schemas.HistoryResponse("", [], None), b'{"epoch":"","messages":[],"next":null}'),
        (
            schemas.HistoryResponse("e", [schemas.Message(1000, "n", "d", 1)], "e:1000"),
            b'{"epoch":"e","messages":[{"offset":1000,"event":"n","data":"d","time_ms":1}],"next":"e:1000"}',
        ),
        (schemas.AuthResponse("k:h"), b'{"auth":"k:h"}'),
        (schemas.AuthResponse("k:h", "{}", "s"), b'{"auth":"k:h","channel_data":"{}","shared_secret":"s"}'),
    ],
)
def test_answers_are_encoded_as_the_libraries_expect(shape, expected):
    assert msgspec.json.encode(shape) == expected
