"""The table of settings and the sample file."""

import tomllib
from pathlib import Path

from redpoll.config.setting_table import TABLE, sample, without_secrets
from redpoll.config.settings import Settings

ROOT = Path(__file__).parents[2]


def test_sample_file_matches_the_table():
    assert (ROOT / "deploy" / "redpoll.toml").read_text() == sample(), (
        "regenerate deploy/redpoll.toml with redpoll.config.setting_table.sample()"
    )


def test_sample_file_shows_the_defaults():
    lines = [line[1:] for line in sample().splitlines() if line.startswith("#") and line[1] != " "]
    shown = tomllib.loads("\n".join(lines))
    assert list(shown) == [setting.name for setting in TABLE]
    for setting in TABLE:
        default = list(setting.default) if setting.is_list else setting.default
        assert shown[setting.name] == ("" if default is None else default)


def test_secrets_have_no_flag():
    secrets = [setting.name for setting in TABLE if setting.is_secret]
    assert secrets == [
        "database_url",
        "oidc_client_secret",
        "admin_password",
        "app_secret",
        "encryption_master_key",
    ]
    assert not any(setting.has_flag for setting in TABLE if setting.is_secret)


def test_every_explanation_ends_with_a_period():
    for setting in TABLE:
        assert setting.help.endswith("."), setting.name


def test_workers_get_no_secrets():
    settings = without_secrets(
        Settings(app_id="1", app_secret="secret", admin_password="password", redis_url="redis://x")
    )
    assert (settings.app_secret, settings.admin_password) == ("", "")
    assert (settings.app_id, settings.redis_url) == ("1", "redis://x")
