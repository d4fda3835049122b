"""A place in the tree of processes, filled by one process after the other: Redis, control, worker 0, …

Starts a process, notices its end, says when to try again. Which place is filled with what, and when:
supervisor.py.
"""

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from time import monotonic
from typing import Any

import structlog

from redpoll.child_pipe import ChildPipe, arm_child

__all__ = ["Child"]

log = structlog.get_logger()

_RESTART_AFTER_S = 0.1
_RESTART_AFTER_AT_MOST_S = 5.0
_HEALTHY_AFTER_S = 10.0


class Child:
    """One place. `start` fills it, at first and again; `listening` and `child_pipe` are None where it has no such.
    `tls` is a second listening socket, for TLS.

    `k` and `ready` are of the present process, `quick_deaths` counts those in a row that lived less than 10
    s.
    """

    def __init__(
        self,
        name: str,
        start: Callable[[], None],
        listening: socket.socket | None = None,
        tls: socket.socket | None = None,
    ) -> None:
        self.name = name
        self.start = start
        self.listening = listening
        self.tls = tls
        self.child_pipe: ChildPipe | None = None
        self.k = 0
        self.ready = False
        self.doors_shut = asyncio.Event()
        self.vacant = asyncio.Event()
        self.vacant.set()
        self.quick_deaths = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._started_at = 0.0

    def fill(self, command: Sequence[str], pass_fds: Sequence[int] = (), process_group: int | None = None) -> None:
        """Starts a process here. Raises OSError where that can't be done."""
        # NOTIFY_SOCKET is between systemd and the supervisor.
        environment = {name: value for name, value in os.environ.items() if name != "NOTIFY_SOCKET"}
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=sys.stderr.fileno(),  # stdout is for the ready line
            pass_fds=pass_fds,
            preexec_fn=arm_child,
            process_group=process_group,
            env=environment,
        )
        self._started_at = monotonic()
        self.ready = False
        self.vacant.clear()

    def tell(self, message: dict[str, Any]) -> None:
        """Sends its process a message; one that is gone misses nothing."""
        if self.child_pipe is not None:
            self.child_pipe.tell(message)

    def listening_fds(self) -> tuple[int, ...]:
        """What each process here inherits."""
        return tuple(each.fileno() for each in (self.listening, self.tls) if each is not None)

    def stop_listening(self) -> None:
        """Closes our copies; the place can't be filled again."""
        for each in (self.listening, self.tls):
            if each is not None:
                each.close()

    def take_exit_code(self) -> int | None:
        """The exit code (negative: the signal) of a process that ended since the last look, else None."""
        if self._process is None:
            return None
        code = self._process.poll()
        if code is None:
            return None
        self._process = None
        if self.child_pipe is not None:
            # Its last words may still lie there.
            self.child_pipe.read_rest()
            self.child_pipe = None
        lived_s = monotonic() - self._started_at
        self.quick_deaths = 1 if lived_s >= _HEALTHY_AFTER_S else self.quick_deaths + 1
        self.vacant.set()
        return code

    def restart_after_s(self) -> float:
        """The pause before the next process: doubles with every quick death."""
        return min(_RESTART_AFTER_AT_MOST_S, _RESTART_AFTER_S * 2.0 ** (self.quick_deaths - 1))

    def signal(self, number: int) -> None:
        """Sends its process a signal, if there is one."""
        if self._process is not None:
            self._process.send_signal(number)

    async def wait_vacant(self, within_s: float) -> None:
        """Waits for the end of its process, and ends it by force when that takes longer."""
        try:
            await asyncio.wait_for(self.vacant.wait(), within_s)
        except TimeoutError:
            log.warning("child did not end in time, killed", child=self.name, within_s=within_s)
            self.signal(signal.SIGKILL)
            await self.vacant.wait()
