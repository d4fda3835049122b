import pytest

from redpoll.config.app_names import MAX_APP_ID_CHARS, valid_app_id, valid_app_key, valid_app_secret


@pytest.mark.parametrize("text", ["1", "my-app_2.test", "a" * MAX_APP_ID_CHARS, "..a"])
def test_ids_of_letters_digits_and_a_few_marks_are_valid(text: str):
    assert valid_app_id(text)
    assert valid_app_key(text)
    assert valid_app_secret(text)


@pytest.mark.parametrize("text", ["", ".", "..", "a:b", "a/b", "a b", "ä", "a\n", "a" * (MAX_APP_ID_CHARS + 1)])
def test_ids_that_would_mean_something_in_a_path_or_a_key_are_refused(text: str):
    assert not valid_app_id(text)


def test_keys_and_secrets_may_be_longer_and_secrets_have_more_marks():
    assert valid_app_key("a" * 128)
    assert not valid_app_key("a" * 129)
    assert not valid_app_key("a/b")
    assert valid_app_secret("a/b+c==")
    assert not valid_app_secret("a'b")
