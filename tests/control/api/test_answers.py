import pytest

from redpoll.control.api.answers import attributes_of, cursor_of, page_limit, parse_cursor, signed
from redpoll.protocol.apps import App, Key
from redpoll.protocol.auth import channel_fault, encryption_secret
from redpoll.protocol.errors import ApiError
from redpoll.protocol.messages import AuthRequest

APP = App(id="1", name="one", keys=(Key(key="k", secret="s"),))
MEMBER = '{"user_id":"1"}'


@pytest.mark.parametrize(
    ("channel", "shown"),
    [("news", {"subscription_count": 2}), ("presence-a", {"subscription_count": 2, "user_count": 1}), ("#x", None)],
)
def test_only_what_applies_to_the_channel_is_shown(channel, shown):
    channel = "#server-to-user-1" if shown is None else channel
    attributes = attributes_of(channel, ("subscription_count", "user_count"), lambda: 2, lambda: 1)
    given = {name: getattr(attributes, name) for name in ("subscription_count", "user_count")}
    assert {name: value for name, value in given.items() if isinstance(value, int)} == (shown or {})


@pytest.mark.parametrize("channel", ["private-a", "presence-a", "private-encrypted-a"])
def test_a_signed_subscription_is_accepted(channel):
    asked = AuthRequest(socket_id="1.2", channel_name=channel, channel_data=MEMBER)
    answer = signed(asked, APP, "k", bytes(32))
    data = MEMBER if channel.startswith("presence-") else None
    assert channel_fault(APP, "1.2", channel, answer.auth, data) is None
    if channel.startswith("private-encrypted-"):
        assert answer.shared_secret == encryption_secret(bytes(32), channel)


def test_a_key_that_is_disabled_signs_nothing():
    with pytest.raises(ApiError) as refused:
        signed(AuthRequest(socket_id="1.2", channel_name="private-a"), APP, "other", None)
    assert refused.value.code == "app_disabled"


def test_a_cursor_is_read_back_and_others_are_refused():
    assert parse_cursor(cursor_of(3, "presence-ü"), 64) == (3, "presence-ü")
    assert parse_cursor(None, 64) is None
    for bad in ("", "x", cursor_of(64, "a"), "é"):
        with pytest.raises(ApiError):
            parse_cursor(bad, 64)


def test_a_page_has_1_to_1000_channels():
    assert (page_limit(None), page_limit("1"), page_limit("1000")) == (100, 1, 1000)
    for bad in ("0", "1001", "x", "１"):
        with pytest.raises(ApiError):
            page_limit(bad)
