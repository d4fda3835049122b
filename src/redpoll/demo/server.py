"""The demo's own server: `redpoll serve` in a temporary folder, with an app and rules of history, until the demo ends.

The server gets no Ctrl-C from the terminal, because the demo stops it itself; if the demo is killed, the kernel kills
the server's processes (`arm_child`).
"""

import contextlib
import os
import re
import secrets
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Literal, Self

from redpoll.config.setting_table import variable_of, without_settings
from redpoll.demo.backend import Account
from redpoll.ipc import command_socket
from redpoll.ipc.child_pipe import arm_child

__all__ = ["KEEP", "KEEP_S", "RULES", "STOPS", "OwnServer", "ServerError"]

# The signals that end the demo.
STOPS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_READY_WITHIN_S: Final = 120.0
_STOPPED_WITHIN_S: Final = 10.0
_REMOVED_WITHIN_S: Final = 5.0
_READY_LINE: Final = re.compile(r"^ready public=http://(\S+):(\d+) control=(\S+)", re.MULTILINE)
_WORKERS: Final = 2
# How many messages of a channel are stored, and for how many seconds.
KEEP: Final = 500
KEEP_S: Final = 3_600
# The examples' channels with history, and how many messages a new subscriber gets. In the text's history these
# would be words of earlier texts; its page says how many it wants.
RULES: Final = (("presence-demo-chat", 50), ("demo-ticker", 60), ("demo-text", 0))


class ServerError(Exception):
    """The demo's server did not start. The text is for the person who started the demo."""


class OwnServer:
    """`with OwnServer(host) as server:` starts it and waits until it is ready; the end of the block leaves nothing."""

    def __init__(self, host: str) -> None:
        self._host = host
        self.folder = Path(tempfile.mkdtemp(prefix="redpoll-demo-"))
        self._process: subprocess.Popen[str] | None = None
        self.account = Account(host, 0, False, "1001", secrets.token_hex(10), secrets.token_hex(20))
        self.password = secrets.token_urlsafe(9)
        self.control_url = ""

    def __enter__(self) -> Self:
        try:
            self._start()
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    def _start(self) -> None:
        command = [sys.executable, "-P", "-m", "redpoll", "serve", "--host", self._host, "--port", "0"]
        command += ["--control-port", "0", "--workers", str(_WORKERS), "--data-dir", str(self.folder / "data")]
        with open(self._log, "w") as log:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                cwd=self.folder,
                env=self._environment(),
                start_new_session=True,
                preexec_fn=arm_child,
            )
        host, port, self.control_url = self._ready_line()
        self.account = self.account._replace(host=host, port=port)
        self._ask("app set", {"id": self.account.app_id, "settings": {"idempotency": "true"}})
        for name, replay in RULES:
            # The fields of protocol/apps.py HistoryRule.
            rule = {"name": name, "keep": KEEP, "seconds": KEEP_S, "replay": replay}
            self._ask("history rule add", {"app": self.account.app_id, **rule})

    @property
    def _log(self) -> Path:
        return self.folder / "log"

    def _environment(self) -> dict[str, str]:
        settings = {
            "app_id": self.account.app_id,
            "app_key": self.account.key,
            "app_secret": self.account.secret,
            "admin_password": self.password,
            # All pages and the back end are one address.
            "trigger_rate_per_minute": "0",
            "shutdown_grace_s": "1",
        }
        return (
            without_settings(os.environ)
            | {variable_of(name): value for name, value in settings.items()}
            | {"TMPDIR": str(self.folder)}
        )

    def _ready_line(self) -> tuple[str, int, str]:
        """The public port's host and number, and the control port's address. Raises ServerError."""
        assert self._process is not None
        assert self._process.stdout is not None
        text, deadline = "", time.monotonic() + _READY_WITHIN_S
        descriptor = self._process.stdout.fileno()
        while (left_s := deadline - time.monotonic()) > 0:
            if not select.select([descriptor], [], [], left_s)[0]:
                break
            data = os.read(descriptor, 65_536)
            if not data:
                break
            text += data.decode(errors="replace")
            if (match := _READY_LINE.search(text)) is not None:
                return match[1].strip("[]"), int(match[2]), match[3]
        log = "\n".join(self._log.read_text(errors="replace").splitlines()[-8:])
        raise ServerError(f"the demo's server did not start within {_READY_WITHIN_S:g} s; its log ends with:\n{log}")

    def _ask(self, verb: str, args: dict[str, Any]) -> Any:
        try:
            return command_socket.ask(command_socket.socket_path(self.folder / "data"), verb, args)
        except (command_socket.CommandError, OSError) as error:
            raise ServerError(f"the demo's server refused `{verb}`: {error}") from error

    def kill(self, what: Literal["worker", "redis"]) -> int | None:
        """Kills the worker with the most connections, or Redis, with SIGKILL. Returns its process id; None if it is
        being started again."""
        pids = [pid for pid, command in self._children() if _is(what, command)]
        if not pids:
            return None
        pid = max(pids, key=_open_sockets)
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            return None
        return pid

    def _children(self) -> list[tuple[int, list[str]]]:
        """The process ids and command lines of the supervisor's children."""
        assert self._process is not None
        children = []
        for entry in os.scandir("/proc"):
            if not entry.name.isdigit():
                continue
            try:
                # The name in brackets may contain anything: the other fields begin after the last bracket.
                parent = Path(entry.path, "stat").read_text().rpartition(")")[2].split()[1]
                command = Path(entry.path, "cmdline").read_text(errors="replace").split("\0")
            except OSError:
                continue
            if int(parent) == self._process.pid:
                children.append((int(entry.name), command))
        return children

    def _end(self) -> None:
        """Stops the server and removes the folder. Another Ctrl-C doesn't interrupt it; it takes 15 s at most."""
        before = {number: signal.signal(number, signal.SIG_IGN) for number in STOPS}
        try:
            if self._process is not None:
                self._process.terminate()
                try:
                    self._process.wait(_STOPPED_WITHIN_S)
                except subprocess.TimeoutExpired:
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(self._process.pid, signal.SIGKILL)
                    self._process.wait()
                if self._process.stdout is not None:
                    self._process.stdout.close()
            self._remove_folder()
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _remove_folder(self) -> None:
        """If the server had to be killed, its children die a moment later, and may write until then."""
        gives_up_at = time.monotonic() + _REMOVED_WITHIN_S
        while True:
            shutil.rmtree(self.folder, ignore_errors=True)
            if not self.folder.exists() or time.monotonic() > gives_up_at:
                return
            time.sleep(0.05)


def _is(what: Literal["worker", "redis"], command: list[str]) -> bool:
    if what == "worker":
        return "worker" in command
    return bool(re.search(r"(redis|valkey)-server", command[0]))


def _open_sockets(pid: int) -> int:
    count = 0
    with contextlib.suppress(OSError):
        for entry in os.scandir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                count += os.readlink(entry.path).startswith("socket:")
    return count
