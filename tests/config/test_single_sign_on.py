"""The rules for the settings of single sign-on. Those for a provider's document: tests/doctor/test_sign_on.py."""

import pytest

from redpoll.config.config import ConfigError, load
from redpoll.config.single_sign_on import document_url

GOOD = {"REDPOLL_OIDC_ISSUER": "https://login.example.com/realms/a", "REDPOLL_OIDC_CLIENT_ID": "redpoll"}


def test_good_settings():
    settings, _ = load({}, GOOD)
    assert settings.oidc_issuer == "https://login.example.com/realms/a"
    assert document_url(settings.oidc_issuer) == "https://login.example.com/realms/a/.well-known/openid-configuration"
    assert load({}, {**GOOD, "REDPOLL_OIDC_ISSUER": "http://localhost:8080"})[0].oidc_issuer == "http://localhost:8080"


@pytest.mark.parametrize(
    ("changes", "path", "text"),
    [
        ({"REDPOLL_OIDC_ISSUER": "http://login.example.com"}, "REDPOLL_OIDC_ISSUER", "must be https, except on this"),
        ({"REDPOLL_OIDC_ISSUER": "login.example.com"}, "REDPOLL_OIDC_ISSUER", "must be an https:// URL"),
        ({"REDPOLL_OIDC_ISSUER": "https://a:b@login.example.com"}, "REDPOLL_OIDC_ISSUER", "must be an https:// URL"),
        ({"REDPOLL_OIDC_ISSUER": "https://login.example.com/?a=b"}, "REDPOLL_OIDC_ISSUER", "must have no query"),
        ({"REDPOLL_OIDC_ISSUER": ""}, "REDPOLL_OIDC_ISSUER (oidc_issuer)", "missing: oidc_client_id is set"),
        ({"REDPOLL_OIDC_CLIENT_ID": ""}, "REDPOLL_OIDC_CLIENT_ID (oidc_client_id)", "missing: the provider gives it"),
        ({"REDPOLL_OIDC_SCOPE": "profile"}, "REDPOLL_OIDC_SCOPE", "must contain openid"),
    ],
)
def test_fault_is_named(changes, path, text):
    with pytest.raises(ConfigError) as raised:
        load({}, {**GOOD, **changes})
    (fault,) = raised.value.faults
    assert fault.path == path
    assert fault.text.startswith(text)
