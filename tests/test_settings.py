"""The table of settings itself, and the sample file made of it."""

import tomllib
from pathlib import Path

import msgspec
import pytest

from redpoll.settings import TABLE, Settings, sample

ROOT = Path(__file__).parent.parent


def test_the_sample_file_is_the_table():
    assert (ROOT / "deploy" / "redpoll.toml").read_text() == sample(), (
        "write deploy/redpoll.toml anew from redpoll.settings.sample()"
    )


def test_the_sample_file_shows_the_defaults():
    lines = [line[1:] for line in sample().splitlines() if line.startswith("#") and line[1] != " "]
    shown = tomllib.loads("\n".join(lines))
    assert list(shown) == [setting.name for setting in TABLE]
    for setting in TABLE:
        default = list(setting.default) if setting.is_list else setting.default
        assert shown[setting.name] == ("" if default is None else default)


def test_settings_go_over_the_leash_unchanged():
    settings = Settings(tls_port=0, trusted_proxies=("10.0.0.0/8",), proxy_protocol=True)
    assert msgspec.json.decode(msgspec.json.encode(settings), type=Settings) == settings


def test_secrets_have_no_flag():
    secrets = [setting.name for setting in TABLE if setting.is_secret]
    assert secrets == ["admin_password", "app_secret", "encryption_master_key"]
    assert not any(setting.has_flag for setting in TABLE if setting.is_secret)


def test_every_setting_has_an_explanation_that_ends_as_a_sentence():
    for setting in TABLE:
        assert setting.help.endswith("."), setting.name


def test_a_master_key_of_another_length_is_refused():
    with pytest.raises(ValueError, match="it has 3 bytes"):
        Settings(encryption_master_key="YWJj").master_key()
