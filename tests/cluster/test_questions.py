"""The messages between nodes: their form on the topic."""

import msgspec
import pytest

from redpoll.cluster.questions import Move, SilenceOfUser, TopicMessage, UserSilent, encode, publication
from redpoll.cluster.redis.keys import Keys


@pytest.mark.parametrize(
    "message", [Move({"a.1.0": 5}, 2.5, id="1"), SilenceOfUser("1", "7", "u", ["a.1.0"]), UserSilent("1", None)]
)
def test_message_arrives_as_it_was_sent(message: TopicMessage):
    assert msgspec.json.decode(encode(message), type=type(message)) == message
    assert msgspec.json.decode(encode(message))["type"] == type(message).__name__


def test_message_to_all_workers_is_published_on_sys():
    message = UserSilent("1", 2.5)
    assert publication(Keys(), message) == (b"PUBLISH", Keys().sys, encode(message))
