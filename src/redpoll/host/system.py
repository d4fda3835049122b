"""What the supervisor needs from the operating system: listening sockets, the file limit, its terminal and systemd."""

import os
import resource
import socket

import structlog

__all__ = ["StartError", "has_terminal", "listen", "notify_systemd", "notify_watchdog", "raise_file_limit"]

log = structlog.get_logger()

_BACKLOG = 4096
# The kernel drops a client that has not acknowledged sent data for this long.
_TCP_USER_TIMEOUT_MS = 30_000


class StartError(Exception):
    """The server did not start. The text is one sentence for the operator."""


def listen(host: str, port: int, count: int = 1) -> list[socket.socket]:
    """`count` listening sockets on one port. With port 0 the first socket picks a free port. Raises StartError.

    The first socket gets SO_REUSEPORT only after it is bound and listening. With the option set before, a port that
    another redpoll uses would not be refused. Linux checks the option when the next socket binds.
    """
    try:
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (socket.gaierror, UnicodeError) as error:
        reason = error.strerror if isinstance(error, socket.gaierror) else "this is no host name"
        raise StartError(f"can't listen on {host!r}: {reason}") from error
    family, _, _, _, address = addresses[0]
    sockets: list[socket.socket] = []
    try:
        for number in range(count):
            listener = socket.socket(family, socket.SOCK_STREAM)
            sockets.append(listener)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                # `::` takes IPv4 as well, also where net.ipv6.bindv6only says otherwise.
                listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            if number > 0:
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            # Accepted sockets inherit both.
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _TCP_USER_TIMEOUT_MS)
            listener.bind(address)
            listener.listen(_BACKLOG)
            if number == 0 and count > 1:
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
                address = listener.getsockname()
    except OSError as error:
        for listener in sockets:
            listener.close()
        raise StartError(f"can't listen on {host} port {port}: {error.strerror}") from error
    return sockets


def raise_file_limit() -> None:
    """Raises the soft limit of open files to the hard limit. Children inherit it, and it bounds a worker's
    connections."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        log.info("file limit raised", before=soft, now=hard)


def has_terminal() -> bool:
    """Whether this process has a controlling terminal."""
    try:
        os.close(os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY))
    except OSError:
        return False
    return True


def notify_watchdog() -> None:
    """Tells systemd that this process doesn't hang, if its unit has WatchdogSec. Call it every few seconds."""
    if os.environ.get("WATCHDOG_USEC") and os.environ.get("WATCHDOG_PID", str(os.getpid())) == str(os.getpid()):
        notify_systemd("WATCHDOG=1")


def notify_systemd(state: str) -> None:
    """Sends a state to systemd, see sd_notify(3). Does nothing when systemd did not start this process."""
    path = os.environ.get("NOTIFY_SOCKET", "")
    if not path:
        return
    address = "\0" + path[1:] if path.startswith("@") else path
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notifier:
        try:
            notifier.sendto(state.encode(), address)
        except OSError as error:
            log.warning("systemd notification failed", state=state, reason=error.strerror)
