import msgspec
import pytest

from redpoll.protocol.errors import HTTP_STATUS, ApiError, ClientError, Code, close_reason, fault_of


def test_an_api_error_has_the_status_of_its_code_and_one_shape():
    error = ApiError("payload_too_large", "too much")
    assert error.status == 413
    assert error.body("ab" * 16) == {
        "error": "too much",
        "code": "payload_too_large",
        "status": 413,
        "trace_id": "ab" * 16,
    }


def test_every_http_code_is_an_error_status():
    assert all(400 <= status < 600 for status in HTTP_STATUS.values())


def test_no_code_that_closes_is_one_that_clients_misread():
    """pusher-js never reconnects after a close code of 4300 and up; 4301 and 4302 are in band only."""
    assert {code for code in Code if code >= 4300} == {Code.CLIENT_EVENT_REJECTED, Code.WATCHLIST_TOO_LONG}


@pytest.mark.parametrize("error", [ApiError("internal", "the words"), ClientError(4301, "the words")])
def test_errors_say_their_words_and_code(error: Exception):
    assert "the words" in str(error)
    assert str(error.code) in str(error)


@pytest.mark.parametrize("message", ["short", "x" * 123, "x" * 500, "é" * 100, "x" + "€" * 60, "\U0001f600" * 50])
def test_a_close_reason_fits_its_frame_and_stays_whole_characters(message: str):
    reason = close_reason(message)
    assert message.startswith(reason)
    assert len(reason.encode()) <= 123
    assert reason == message or len(message[: len(reason) + 1].encode()) > 123


@pytest.mark.parametrize(
    ("text", "is_half"),
    [
        (r'{"a":"\ud83d"}', True),
        (r'{"a":"\uD83D\n"}', True),
        (r'{"a":"\\\ud83d"}', True),
        (r'{"a":"\ud83d and more"}', True),
        (r'{"a":"\ud83d\ud83d and more"}', True),
        (r'{"a":"\ude00 and more"}', True),
        (r'"\ude00"', True),
        # Cut by a network: what is missing may be the other half, or anything.
        (r'{"a":"\ud83d\ud', False),
        (r'{"a":"\\ud83d"', False),
        (r'{"a":"\ud83d\ude00', False),
        (r'{"a":"b', False),
    ],
)
def test_half_of_a_surrogate_pair_is_named(text: str, is_half: bool):
    for source in (text, text.encode()):
        with pytest.raises(msgspec.DecodeError) as refusal:
            msgspec.json.decode(source)
        assert ("surrogate pair, such as" in fault_of(refusal.value, source)) is is_half


def test_decoding_faults_are_described_without_quoting_the_bytes():
    assert fault_of(RecursionError("C stack")) == "nested too deeply"
    assert fault_of(UnicodeDecodeError("utf-8", b"secret\xff", 6, 7, "invalid")) == "not UTF-8"
