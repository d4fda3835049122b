"""Reads the settings and the certificate of a running server again: `redpoll reload` and SIGHUP.

It finds out what changed and what a running server can apply. supervisor.py applies it.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import structlog

from redpoll.config import certificate, config
from redpoll.config.config import TABLE, Settings

__all__ = ["PAIR_NAME", "Reloaded", "install_pair", "reload"]

log = structlog.get_logger()

# The TLS pair that workers load, in the data folder, which is private.
PAIR_NAME = "tls.pem"


@dataclass(frozen=True)
class Reloaded:
    """`settings` are those that count now. `faults` are sentences; with a fault nothing has changed. `applied` are
    changed settings by name with their new values, `restart` the names of those that need a restart. `certificate`:
    the workers are to load the pair again."""

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
            log.info("certificate reloaded", cert=self.settings.tls_cert)
        applied, restart = ",".join(self.applied), ",".join(self.restart)
        if applied or restart:
            log.info("settings reloaded", applied=applied or "none", need_restart=restart or "none")
        elif not self.certificate:
            log.info("nothing to reload, no setting has changed")


def install_pair(settings: Settings, folder: Path) -> None:
    """Checks the operator's certificate and key and writes them for the workers. Raises certificate.PairError."""
    certificate.write_pair(certificate.read_pair(settings.tls_cert, settings.tls_key), folder / PAIR_NAME)


def reload(settings: Settings, folder: Path, reread: Callable[[], Settings]) -> Reloaded:
    """Reads the settings with `reread`, and installs the certificate again. A fault changes nothing."""
    try:
        read = reread()
        live = {setting.name for setting in TABLE if setting.is_live}
        changed = [name for name in read.__struct_fields__ if getattr(read, name) != getattr(settings, name)]
        applied = {name: getattr(read, name) for name in changed if name in live}
        new = msgspec.structs.replace(settings, **applied)
        if new.tls_port is not None:
            install_pair(new, folder)
    except config.ConfigError as error:
        return Reloaded(settings, [str(fault) for fault in error.faults])
    except (certificate.PairError, OSError) as error:
        return Reloaded(settings, [f"the TLS certificate can't be used: {error}"])
    restart = [name for name in changed if name not in live]
    return Reloaded(new, [], applied, restart, new.tls_port is not None)
