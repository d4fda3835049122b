"""The app of the test vectors in protocol/README.md, and a fixture that checks and decodes the server's frames."""

import hashlib
import hmac
import json
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from redpoll.protocol.apps import App, Key

KEY, SECRET = "278d425bdf160c739803", "7ad3773142a6692b25b8"

# Frames with `channel` beside `event` and `data`, and frames without it (protocol/README.md "Frames").
CHANNEL_EVENTS = {
    "pusher_internal:subscription_succeeded",
    "pusher_internal:member_added",
    "pusher_internal:member_removed",
    "pusher_internal:subscription_count",
    "pusher:cache_miss",
    "pusher:subscription_error",
    "auth_required",
    "pusher:history",
    "pusher:position",
}
OTHER_EVENTS = {
    "pusher:connection_established",
    "pusher:error",
    "pusher:ping",
    "pusher:pong",
    "pusher:signin_success",
    "pusher_internal:watchlist_events",
}


@pytest.fixture(scope="session")
def app() -> App:
    return App(id="3", name="vectors", keys=(Key(key=KEY, secret=SECRET),))


@pytest.fixture(scope="session")
def sign() -> Callable[..., str]:
    """`sign(text, secret=…)`: the hex digest, by the standard library alone."""

    def sign(text: str, secret: str = SECRET) -> str:
        return hmac.new(secret.encode(), text.encode(), hashlib.sha256).hexdigest()

    return sign


@pytest.fixture(scope="session")
def changed() -> Callable[..., App]:
    """`changed(app, name=value, …)`: the app with other settings."""
    return msgspec.structs.replace


@pytest.fixture(scope="session")
def read_frame() -> Callable[[bytes], dict[str, Any]]:
    """One frame of the server, decoded. Fails if it breaks a rule that holds for all frames."""

    def read(payload: bytes) -> dict[str, Any]:
        frame = json.loads(payload.decode())
        event = frame["event"]
        assert event in CHANNEL_EVENTS | OTHER_EVENTS
        if event == "pusher:error":
            assert set(frame) == {"event", "data"}
            assert set(frame["data"]) == {"code", "message"}
            assert frame["data"]["code"] is None or type(frame["data"]["code"]) is int
            assert type(frame["data"]["message"]) is str
        else:
            assert type(frame["data"]) is str
            assert type(json.loads(frame["data"])) is dict
            assert ("channel" in frame) == (event in CHANNEL_EVENTS)
            assert set(frame) <= {"event", "data", "channel"}
        return frame

    return read
