"""The bodies of the management API."""

import msgspec
import pytest

from redpoll.control.management.bodies import (
    AppChange,
    AppSettings,
    ManagedRule,
    NewRule,
    key_body,
    parsed_settings,
    setting_texts,
    settings_body,
)
from redpoll.protocol.apps import SETTINGS, App, HistoryRule, Key, parse_setting


def change(**values):
    return msgspec.json.decode(msgspec.json.encode({"settings": values}), type=AppChange).settings


def test_every_setting_can_be_read_and_changed():
    app = App(id="1", name="n", keys=())
    body = msgspec.to_builtins(settings_body(app))
    assert list(body) == list(AppSettings.__struct_fields__) == list(SETTINGS)
    # What is read can be written.
    assert parsed_settings(change(**body)) == {name: getattr(app, name) for name in SETTINGS}
    assert parsed_settings(change()) == {}
    assert parsed_settings(change(**dict.fromkeys(SETTINGS))) == {name: row.default for name, row in SETTINGS.items()}


@pytest.mark.parametrize("name", SETTINGS)
def test_bounds_of_settings_are_those_of_the_command_line(name):
    setting = SETTINGS[name]
    wrong = {"switch": 1, "choice": "x", "hosts": ["a"] * 51}.get(setting.type, setting.maximum + 1)
    with pytest.raises(msgspec.ValidationError, match=name):
        change(**{name: wrong})
    if setting.type in ("count", "seconds"):
        for value in (setting.minimum, setting.maximum):
            assert parsed_settings(change(**{name: value})) == {name: parse_setting(name, str(value))}


def test_numbers_and_lists_are_written_as_the_command_line_writes_them():
    given = change(user_authentication_timeout_s=1e-7, allowed_origins=["A.example", "b.example"], enabled=False)
    assert setting_texts(given)["user_authentication_timeout_s"] == "0.000000100"
    assert parsed_settings(given) == {
        "user_authentication_timeout_s": 1e-7,
        "allowed_origins": ("a.example", "b.example"),
        "enabled": False,
    }


def test_rules_have_the_fields_of_the_record():
    fields = set(HistoryRule.__struct_fields__) - {"era"}
    assert set(ManagedRule.__struct_fields__) == fields
    assert set(NewRule.__struct_fields__) == fields - {"id"}


@pytest.mark.parametrize(("secret", "shown"), [("x" * 15, "****"), ("abcd" * 4, "abcd****"), ("", "****")])
def test_secrets_are_masked(secret, shown):
    key = Key(key="k", secret=secret)
    assert (key_body(key).secret, key_body(key, whole=True).secret) == (shown, secret)
