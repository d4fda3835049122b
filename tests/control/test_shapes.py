"""What the answers look like on the wire: what doesn't apply is left out, and never null but where it says so."""

import msgspec
import pytest

from redpoll.control import shapes


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        (shapes.Empty(), b"{}"),
        (shapes.TriggerAnswer(), b"{}"),
        (shapes.TriggerAnswer({"a": shapes.Attributes(user_count=0)}), b'{"channels":{"a":{"user_count":0}}}'),
        (shapes.BatchAnswer(), b"{}"),
        (shapes.BatchAnswer([shapes.Attributes(), shapes.Attributes(1)]), b'{"batch":[{},{"subscription_count":1}]}'),
        # PHP wants an object here, also an empty one (protocol.md 14.3).
        (shapes.ChannelsAnswer({}), b'{"channels":{}}'),
        (shapes.ChannelAnswer(False, 0), b'{"occupied":false,"subscription_count":0}'),
        (
            shapes.ChannelAnswer(True, 2, 1, shapes.CachedEvent("d", 3)),
            b'{"occupied":true,"subscription_count":2,"user_count":1,"cache":{"data":"d","ttl":3}}',
        ),
        (shapes.ChannelAnswer(False, 0, cache=None), b'{"occupied":false,"subscription_count":0,"cache":null}'),
        (shapes.UsersAnswer([]), b'{"users":[]}'),
        (shapes.UsersAnswer([shapes.User("1")]), b'{"users":[{"id":"1"}]}'),
        (shapes.HistoryAnswer("", [], None), b'{"epoch":"","messages":[],"next":null}'),
        (
            shapes.HistoryAnswer("e", [shapes.Message(1000, "n", "d", 1)], "e:1000"),
            b'{"epoch":"e","messages":[{"offset":1000,"event":"n","data":"d","time_ms":1}],"next":"e:1000"}',
        ),
        (shapes.AuthAnswer("k:h"), b'{"auth":"k:h"}'),
        (shapes.AuthAnswer("k:h", "{}", "s"), b'{"auth":"k:h","channel_data":"{}","shared_secret":"s"}'),
    ],
)
def test_each_shape_is_encoded_as_the_libraries_expect_it(shape, expected):
    assert msgspec.json.encode(shape) == expected
