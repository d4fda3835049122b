"""The table of settings and the sample file."""

import tomllib
from pathlib import Path

import msgspec
import pytest

from redpoll.settings import TABLE, Settings, sample

ROOT = Path(__file__).parent.parent


def test_sample_file_matches_the_table():
    assert (ROOT / "deploy" / "redpoll.toml").read_text() == sample(), (
        "regenerate deploy/redpoll.toml with redpoll.settings.sample()"
    )


def test_sample_file_shows_the_defaults():
    lines = [line[1:] for line in sample().splitlines() if line.startswith("#") and line[1] != " "]
    shown = tomllib.loads("\n".join(lines))
    assert list(shown) == [setting.name for setting in TABLE]
    for setting in TABLE:
        default = list(setting.default) if setting.is_list else setting.default
        assert shown[setting.name] == ("" if default is None else default)


def test_settings_survive_json_unchanged():
    settings = Settings(tls_port=0, trusted_proxies=("10.0.0.0/8",), proxy_protocol=True)
    assert msgspec.json.decode(msgspec.json.encode(settings), type=Settings) == settings


def test_secrets_have_no_flag():
    secrets = [setting.name for setting in TABLE if setting.is_secret]
    assert secrets == ["database_url", "admin_password", "app_secret", "encryption_master_key"]
    assert not any(setting.has_flag for setting in TABLE if setting.is_secret)


def test_every_explanation_ends_with_a_period():
    for setting in TABLE:
        assert setting.help.endswith("."), setting.name


def test_master_key_of_another_length_is_refused():
    with pytest.raises(ValueError, match="it has 3 bytes"):
        Settings(encryption_master_key="YWJj").master_key()
