"""One child process of the supervisor: Redis, the control plane or a worker.

A Child object outlives the process it stands for. When the process dies, the next one starts in the same Child, with
the same listening sockets. This module starts the process, notices its end and computes the delay before the next
start. supervisor.py decides what runs and when.
"""

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from time import monotonic

import structlog

from redpoll.config.setting_table import VARIABLES
from redpoll.ipc.child_pipe import ChildPipe, arm_child
from redpoll.ipc.messages import ToControl, ToWorker

__all__ = ["Child"]

log = structlog.get_logger()

_FIRST_RESTART_DELAY_S = 0.1
_MAX_RESTART_DELAY_S = 5.0
# A process that lives this long counts as healthy, and resets the restart delay.
_HEALTHY_AFTER_S = 10.0
_NOT_INHERITED = VARIABLES | {"NOTIFY_SOCKET"}


class Child:
    """A child process and what its successors inherit.

    `start` starts a process here, the first one and each successor. `listening` is the listening socket, `tls` a second
    one for TLS, and `child_pipe` the connection to the process; each is None where the child has none.

    `process` (its number) and `ready` describe the present process. `ended` is set while no process runs,
    `stopped_listening` once the process has closed its listening sockets. `unanswered_at_start` counts the calls of
    `ping` that found no answer before the present process's first one. `quick_deaths` counts the processes in a row
    that lived less than 10 s, or couldn't be started.
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
        self.process = 0
        self.ready = False
        self.stopped_listening = asyncio.Event()
        self.ended = asyncio.Event()
        self.ended.set()
        self.unanswered_at_start = 0
        self.quick_deaths = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._started_at = 0.0
        # For how many calls of `ping` in a row the process has not answered; None before its first answer, unless it
        # said that it is ready.
        self._silent_pings: int | None = None
        self._was_pinged = False

    def spawn(self, command: Sequence[str], pass_fds: Sequence[int] = (), process_group: int | None = None) -> None:
        """Starts a process. Raises OSError."""
        # NOTIFY_SOCKET is between systemd and the supervisor. Settings may be secret; children get theirs by pipe.
        environment = {name: value for name, value in os.environ.items() if name not in _NOT_INHERITED}
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=sys.stderr.fileno(),  # stdout is for the ready line
                pass_fds=pass_fds,
                preexec_fn=arm_child,
                process_group=process_group,
                env=environment,
            )
        except subprocess.SubprocessError as error:
            # From `arm_child`.
            raise OSError(str(error)) from error
        self._started_at = monotonic()
        self.ready = False
        self.unanswered_at_start = 0
        self._silent_pings = None
        self._was_pinged = False
        self.ended.clear()

    def connect(self, child_pipe: ChildPipe) -> None:
        """The pipe to the process that was spawned."""
        self.child_pipe = child_pipe

    def send(self, message: ToWorker | ToControl) -> None:
        """Sends a message to the process; does nothing when there is none."""
        if self.child_pipe is not None:
            self.child_pipe.send(message)

    def ping(self) -> int:
        """Asks the process for an answer. Returns for how many calls in a row it has not answered.

        Calls are counted, not seconds: after a stall of the supervisor, or of the whole machine, this is one late call.
        A process that starts isn't counted here until it answers or is ready: control may have to migrate the record
        store. `unanswered_at_start` counts it.
        """
        if self.child_pipe is None:
            return 0
        if self.child_pipe.pong_due:
            if self._silent_pings is not None or self.ready:
                self._silent_pings = (self._silent_pings or 0) + 1
            else:
                self.unanswered_at_start += 1
        else:
            if self._was_pinged:
                self._silent_pings = 0
            self._was_pinged = True
            self.child_pipe.ping()
        return self._silent_pings or 0

    def listening_fds(self) -> tuple[int, ...]:
        """The descriptors that each process here inherits."""
        return tuple(listener.fileno() for listener in (self.listening, self.tls) if listener is not None)

    def close_listeners(self) -> None:
        """Closes the supervisor's copies of the listening sockets. No process can be started here afterwards."""
        for listener in (self.listening, self.tls):
            if listener is not None:
                listener.close()

    def take_exit_code(self) -> int | None:
        """The exit code of a process that ended since the last call (a negative signal number if one killed it), else
        None."""
        if self._process is None:
            return None
        code = self._process.poll()
        if code is None:
            return None
        self._process = None
        if self.child_pipe is not None:
            # Messages sent just before the end may still be unread.
            self.child_pipe.read_rest()
            self.child_pipe = None
        lived_s = monotonic() - self._started_at
        self.quick_deaths = 1 if lived_s >= _HEALTHY_AFTER_S else self.quick_deaths + 1
        self.ended.set()
        return code

    def restart_delay_s(self) -> float:
        """The delay before the next start. It doubles with every quick death."""
        return min(_MAX_RESTART_DELAY_S, _FIRST_RESTART_DELAY_S * 2.0 ** (self.quick_deaths - 1))

    def delay_after_failure_s(self) -> float:
        """The delay after a process couldn't be started, which counts as a quick death."""
        self.quick_deaths += 1
        return self.restart_delay_s()

    def signal(self, number: int) -> None:
        """Sends a signal to the process; does nothing when there is none."""
        if self._process is not None:
            self._process.send_signal(number)

    async def wait_ended(self, within_s: float) -> None:
        """Waits until the process has ended. Kills it when that takes longer than `within_s`."""
        try:
            await asyncio.wait_for(self.ended.wait(), within_s)
        except TimeoutError:
            log.warning("child killed, it did not end in time", child=self.name, within_s=within_s)
            self.signal(signal.SIGKILL)
            await self.ended.wait()
