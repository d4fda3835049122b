"""Ports that belong to one test. Not a test.

A port that was found free and closed again may be given to another test before it is used. These stay bound, so the
kernel gives them to nobody else. The sockets don't listen: connections are refused until a server of the test listens.
"""

import contextlib
import socket
from collections.abc import Iterator


@contextlib.contextmanager
def reserved_ports(count: int) -> Iterator[list[int]]:
    """Ports of 127.0.0.1. A server that sets SO_REUSEADDR, as all of the tests do, may listen on them."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            one.bind(("127.0.0.1", 0))
        yield [one.getsockname()[1] for one in sockets]


@contextlib.contextmanager
def kept_port(port: int) -> Iterator[None]:
    """Keeps the port of a running server with several workers, whose sockets share it, when the server ends."""
    with socket.socket() as one:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        one.bind(("127.0.0.1", port))
        yield
