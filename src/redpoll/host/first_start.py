"""What the supervisor prints when the server is ready: the ready line and, at a first start, how to use the server."""

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import structlog

from redpoll.config.config import Settings
from redpoll.host.welcome import FIRST_LOGIN_NAME, first_login, how_to_use, url_host, where_to_see

__all__ = ["FirstStart"]

log = structlog.get_logger()


class FirstStart:
    """`app` is the app that control created, as `redpoll app show` prints it; None after later starts."""

    def __init__(self, settings: Settings, folder: Path) -> None:
        self.app: Mapping[str, Any] | None = None
        self._password: str | None = None
        self._settings = settings
        self._folder = folder

    def admin_created(self, password: str) -> None:
        """Writes the dashboard's first password at once: it can't be recovered if the start fails."""
        self._password = password
        path = self._folder / FIRST_LOGIN_NAME
        try:
            path.unlink(missing_ok=True)
            with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
                file.write(f"{password}\n")
        except OSError as error:
            log.error("first password not written", path=str(path), reason=error.strerror)

    def announce(self, public: int, control: int, tls: int | None) -> None:
        """Prints the first credentials and the ready line, if standard output takes them. The arguments are the
        ports."""
        try:
            self._print(public, control, tls)
        except OSError as error:
            # Its disk is full, or its reader has gone. The server serves all the same.
            log.warning("ready line not printed", reason=error.strerror)
            # What Python still holds of it would fail again at the end, and make the exit code 120.
            with open(os.devnull, "wb") as nowhere:
                os.dup2(nowhere.fileno(), sys.stdout.fileno())

    def _print(self, public: int, control: int, tls: int | None) -> None:
        host = self._settings.host
        scheme = "https" if self._settings.tls_client_ca else "http"
        control_url = f"{scheme}://{url_host(self._settings.control_host)}:{control}"
        created = {"an app": self.app, "the user admin": self._password}
        if not sys.stdout.isatty():
            # A journal or a container's log keeps what is printed, and others may read it.
            if names := [name for name, value in created.items() if value is not None]:
                print(where_to_see(names, str(self._folder)))
        else:
            if self.app is not None:
                print("redpoll created an app for the first start (`redpoll app show` shows it again):\n")
                print(how_to_use(self.app, host, public, tls))
            if self._password is not None:
                print(first_login(control_url, self._password, str(self._folder / FIRST_LOGIN_NAME)))
        tls_url = f" tls=https://{url_host(host)}:{tls}" if tls is not None else ""
        print(f"ready public=http://{url_host(host)}:{public} control={control_url}{tls_url}", flush=True)
