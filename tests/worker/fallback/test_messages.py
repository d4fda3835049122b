import msgspec
import pytest

from redpoll.worker.fallback.messages import Attach, Bring, Left, Missed, Status, Written, decode, encode

MESSAGES = [
    Attach(1, "run.1", "key", "7/abcdefgh", True, None),
    Attach(2, "run.1", "key", "7/abcdefgh", False, 12),
    Bring(3, "run.1", "key", "7/abcdefgh", 13, b'["\xf0\x9f\x8e\x88"]'),
    Left(4, "run.1"),
    Missed(0, "run.1", "key", "7/abcdefgh", 413),
    Written(5, "run.2", b"", False),
    Written(6, "run.2", b'a["{}"]\n', True),
    Status(7, "run.2", 404),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_message_arrives_as_it_was_sent(message):
    assert decode(encode(message)) == message


def test_missed_without_a_status_was_unavailable():
    older = msgspec.msgpack.encode(
        {"type": "Missed", "number": 0, "by": "run.1", "key": "key", "session": "7/abcdefgh"}
    )
    assert decode(older) == Missed(0, "run.1", "key", "7/abcdefgh", 503)


@pytest.mark.parametrize("payload", [b"", b"\x00nonsense", encode({"type": "Missed", "number": 0})])
def test_what_is_no_message_is_refused(payload):
    with pytest.raises(msgspec.DecodeError):
        decode(payload)
