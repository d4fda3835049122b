"""What a reload decides. test_supervisor.py has what the processes do with it."""

from msgspec import structs

from helpers.certs import self_signed
from redpoll.config.config import ConfigError, Fault
from redpoll.config.reloading import BUNDLE_NAME, install_certificates, reload
from redpoll.config.settings import Settings

SETTINGS = Settings(log_level="info", port=6001)


def test_only_what_a_running_server_can_apply_changes(tmp_path):
    outcome = reload(SETTINGS, tmp_path, lambda: structs.replace(SETTINGS, log_level="debug", port=7001))
    assert outcome.settings == structs.replace(SETTINGS, log_level="debug")
    assert outcome.answer() == {
        "faults": [],
        "applied": {"log_level": "debug"},
        "restart": ["port"],
        "certificate": False,
    }


def test_fault_changes_nothing(tmp_path):
    def reread():
        raise ConfigError([Fault("redpoll.toml: $.port", "must be a number")])

    outcome = reload(SETTINGS, tmp_path, reread)
    assert outcome.settings is SETTINGS
    assert outcome.answer() == {
        "faults": ["redpoll.toml: $.port: must be a number"],
        "applied": {},
        "restart": [],
        "certificate": False,
    }


def test_certificate_that_cannot_be_read_changes_nothing(tmp_path):
    with_tls = structs.replace(
        SETTINGS, tls_port=0, tls_cert=(str(tmp_path / "none"),), tls_key=(str(tmp_path / "none"),)
    )
    outcome = reload(with_tls, tmp_path, lambda: structs.replace(with_tls, log_level="debug"))
    assert outcome.settings is with_tls
    assert outcome.faults
    assert not outcome.certificate


def test_ports_keep_their_certificates_if_the_settings_of_tls_are_removed(tmp_path):
    cert, key = self_signed(tmp_path, "one")
    with_tls = structs.replace(SETTINGS, tls_port=0, tls_cert=(str(cert),), tls_key=(str(key),))
    install_certificates(with_tls, tmp_path)
    installed = (tmp_path / BUNDLE_NAME).read_bytes()
    outcome = reload(with_tls, tmp_path, lambda: structs.replace(SETTINGS, log_level="debug"))
    assert outcome.settings == structs.replace(with_tls, log_level="debug")
    assert outcome.answer() == {
        "faults": [],
        "applied": {"log_level": "debug"},
        "restart": ["tls_port", "tls_cert", "tls_key"],
        "certificate": False,
    }
    assert (tmp_path / BUNDLE_NAME).read_bytes() == installed
