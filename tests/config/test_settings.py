import msgspec
import pytest

from redpoll.config.settings import Settings


def test_settings_survive_json_unchanged():
    settings = Settings(tls_port=0, trusted_proxies=("10.0.0.0/8",), proxy_protocol=True)
    assert msgspec.json.decode(msgspec.json.encode(settings), type=Settings) == settings


def test_master_key_of_another_length_is_refused():
    with pytest.raises(ValueError, match="it has 3 bytes"):
        Settings(encryption_master_key="YWJj").master_key()
