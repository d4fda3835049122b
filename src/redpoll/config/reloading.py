"""Reads the settings and the certificate of a running server again: `redpoll reload` and SIGHUP.

It finds out what changed and what a running server can apply. supervisor.py applies it.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import structlog

from redpoll.config import certificate, certificate_files, config
from redpoll.config.config import TABLE, Settings

__all__ = ["BUNDLE_NAME", "Reloaded", "install_certificates", "reload", "uses_tls"]

log = structlog.get_logger()

# The certificates that workers and control load, in the data folder, which is private.
BUNDLE_NAME = "tls.pem"
_CERTIFICATE_SETTINGS = frozenset(("tls_cert", "tls_key", "tls_ocsp"))


@dataclass(frozen=True)
class Reloaded:
    """`settings` are those that count now. `faults` are sentences; with a fault nothing has changed. `applied` are
    changed settings by name with their new values, `restart` the names of those that need a restart. `certificate`:
    the workers and control are to load the certificates again."""

    settings: Settings
    faults: list[str] = field(default_factory=list)
    applied: dict[str, Any] = field(default_factory=dict)
    restart: list[str] = field(default_factory=list)
    certificate: bool = False

    def answer(self) -> dict[str, Any]:
        """What the command `reload` gets."""
        return {
            "faults": self.faults,
            "applied": self.applied,
            "restart": self.restart,
            "certificate": self.certificate,
        }

    def log(self) -> None:
        """Logs what changed. The caller applies it first, since it may have changed the log level."""
        if self.faults:
            log.error("not reloaded, everything stays as it was", reason="; ".join(self.faults))
            return
        if self.certificate:
            log.info("certificates reloaded", cert=",".join(self.settings.tls_cert))
        applied, restart = ",".join(self.applied), ",".join(self.restart)
        if applied or restart:
            log.info("settings reloaded", applied=applied or "none", need_restart=restart or "none")
        elif not self.certificate:
            log.info("nothing to reload, no setting has changed")


def uses_tls(settings: Settings) -> bool:
    """A port has TLS."""
    return settings.tls_port is not None or bool(settings.tls_client_ca)


def install_certificates(settings: Settings, folder: Path) -> None:
    """Checks the operator's certificates and keys and writes them for the other processes. Raises
    certificate.PairError."""
    files = certificate_files.find(settings)
    for note in files.notes:
        log.warning("file not used for TLS", reason=note)
    certificate.write_private(certificate_files.bundle(files.certificates), folder / BUNDLE_NAME)


def reload(settings: Settings, folder: Path, reread: Callable[[], Settings]) -> Reloaded:
    """Reads the settings with `reread`, and installs the certificate again. A fault changes nothing."""
    try:
        read = reread()
        live = {setting.name for setting in TABLE if setting.is_live}
        # A port gets or loses TLS at a restart only, so until then these settings stay.
        has_certificates = uses_tls(settings) and uses_tls(read)
        if not has_certificates:
            live -= _CERTIFICATE_SETTINGS
        changed = [name for name in read.__struct_fields__ if getattr(read, name) != getattr(settings, name)]
        applied = {name: getattr(read, name) for name in changed if name in live}
        new = msgspec.structs.replace(settings, **applied)
        if has_certificates:
            install_certificates(new, folder)
    except config.ConfigError as error:
        return Reloaded(settings, [str(fault) for fault in error.faults])
    except (certificate.PairError, OSError) as error:
        return Reloaded(settings, [f"the TLS certificates can't be used: {error}"])
    restart = [name for name in changed if name not in live]
    return Reloaded(new, [], applied, restart, has_certificates)
