import msgspec
import pytest

from redpoll.protocol import incoming
from redpoll.protocol.incoming import SignIn, Subscribe


def raw(json: bytes) -> msgspec.Raw:
    return incoming.decode_message(b'{"event":"x","data":' + json + b"}").data


@pytest.mark.parametrize(
    "data",
    [b'{"channel":"c","auth":"a"}', b'"{\\"channel\\":\\"c\\",\\"auth\\":\\"a\\"}"', b' {"auth":"a","channel":"c"}'],
)
def test_data_of_a_control_event_may_be_an_object_or_a_string_of_one(data):
    assert incoming.decode_subscribe(incoming.data_of(raw(data))) == Subscribe("c", "a")


def test_an_invalid_history_request_does_not_make_the_message_malformed():
    asked = incoming.decode_subscribe(b'{"channel":"c","rewind":7,"since":[],"recover":"x"}')
    assert (asked.channel, asked.rewind, asked.since, asked.recover) == ("c", 7, [], "x")
    page = incoming.decode_history(b'{"channel":"c","limit":"x","before":{}}')
    assert (page.channel, page.limit, page.before, page.since) == ("c", "x", {}, None)
    for data in (b"{}", b'{"channel":7}', b'{"limit":1}'):
        with pytest.raises(msgspec.ValidationError):
            incoming.decode_history(data)


def test_a_sign_in_needs_both_its_strings():
    assert incoming.decode_sign_in(b'{"auth":"a","user_data":"u","more":1}') == SignIn("a", "u")
    for data in (
        b"{}",
        b'{"auth":"a"}',
        b'{"user_data":"u"}',
        b'{"auth":"a","user_data":{}}',
        b'{"auth":null,"user_data":"u"}',
    ):
        with pytest.raises(msgspec.ValidationError):
            incoming.decode_sign_in(data)


def test_missing_data_is_an_error_of_a_control_event_and_empty_in_a_client_event():
    missing = incoming.decode_message(b'{"event":"x"}').data
    with pytest.raises(msgspec.ValidationError, match="data"):
        incoming.data_of(missing)
    assert incoming.text_of(missing) == "{}"


@pytest.mark.parametrize(
    ("data", "text"), [(b'"a\\u00e9"', "a\u00e9"), (b'{ "a":1.50 }', '{ "a":1.50 }'), (b"null", "null"), (b'""', "")]
)
def test_data_of_a_client_event_keeps_its_senders_spelling(data, text):
    assert incoming.text_of(raw(data)) == text
