"""The host names at which the dashboard and /metrics may be requested.

A page of another site can let its own name resolve to this machine's address (DNS rebinding). To the browser the
control port then belongs to that site, whose page may read every response. The Host header still has the site's name,
so requests with unknown names are refused. Addresses are always accepted, because no DNS server decides where they
lead.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Iterable
from ipaddress import ip_address
from typing import Final
from urllib.parse import urlsplit

from redpoll.config.settings import Settings

__all__ = ["HostNames"]

_LOOPBACK: Final = ("localhost", "*.localhost")
_HOST = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[^:\[\]]*)(?::[0-9]*)?")


class HostNames:
    """`names` are host names in any case, without ports. `*.example.com` allows every name below example.com."""

    def __init__(self, names: Iterable[str]) -> None:
        names = [name.lower().rstrip(".") for name in (*_LOOPBACK, *names) if name]
        self._names = frozenset(name for name in names if not name.startswith("*."))
        self._suffixes = tuple(name[1:] for name in names if name.startswith("*."))

    @classmethod
    def of(cls, settings: Settings) -> HostNames:
        """The names that the settings give, and this machine's own name."""
        public_host = urlsplit(settings.public_url).hostname or ""
        return cls((*settings.control_names, settings.control_host, public_host, socket.gethostname()))

    def allow(self, host: str | None) -> bool:
        """Whether a request with this Host header may be answered. One without the header isn't from a browser."""
        if host is None:
            return True
        match = _HOST.fullmatch(host.strip())
        if match is None:
            return False
        name = match[1].lower().rstrip(".")
        if name in self._names or name.endswith(self._suffixes):
            return True
        try:
            ip_address(name.strip("[]"))
        except ValueError:
            return False
        return True
