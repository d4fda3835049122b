"""What the supervisor asks of the operating system: listening sockets, open files, its terminal, systemd."""

import os
import resource
import socket

import structlog

__all__ = ["StartError", "has_terminal", "listen", "notify_systemd", "raise_file_limit"]

log = structlog.get_logger()

_BACKLOG = 4096
# A client that vanished without a word holds what it is owed no longer than this.
_TCP_USER_TIMEOUT_MS = 30_000


class StartError(Exception):
    """Nothing was started. The text is one sentence for the operator."""


def listen(host: str, port: int, count: int = 1) -> list[socket.socket]:
    """`count` listening sockets on one port; with port 0 the first one chooses it. Raises StartError.

    The first is bound and listening before it allows others beside it (SO_REUSEPORT): allowed from the start,
    they would hide that the port is taken, by another redpoll for one. Linux looks at the option when the
    next one binds.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except socket.gaierror as error:
        raise StartError(f"can't listen on {host!r}: {error.strerror}") from error
    family, _, _, _, address = found[0]
    sockets: list[socket.socket] = []
    try:
        for number in range(count):
            each = socket.socket(family, socket.SOCK_STREAM)
            sockets.append(each)
            each.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if number > 0:
                each.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            # Accepted sockets inherit both.
            each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            each.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _TCP_USER_TIMEOUT_MS)
            each.bind(address)
            each.listen(_BACKLOG)
            if number == 0 and count > 1:
                each.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
                address = each.getsockname()
    except OSError as error:
        for each in sockets:
            each.close()
        raise StartError(f"can't listen on {host} port {port}: {error.strerror}") from error
    return sockets


def raise_file_limit() -> None:
    """Children inherit it; each worker may then hold that many connections, less a few."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    log.info("file limit", was=soft, now=hard)


def has_terminal() -> bool:
    try:
        os.close(os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY))
    except OSError:
        return False
    return True


def notify_systemd(state: str) -> None:
    """sd_notify(3): a datagram to the socket that systemd named; nothing where there is none."""
    path = os.environ.get("NOTIFY_SOCKET", "")
    if not path:
        return
    address = "\0" + path[1:] if path.startswith("@") else path
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notifier:
        try:
            notifier.sendto(state.encode(), address)
        except OSError as error:
            log.warning("systemd can't be told", state=state, why=error.strerror)
