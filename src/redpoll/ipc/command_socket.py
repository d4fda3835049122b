"""The operator's side of the Unix socket on which a running server takes commands.

A `Command` goes to `control.sock` in the data folder as one line of JSON, and an `Answer` comes back as another.
control/commands/commands.py is the other side. This module imports little: `redpoll health` runs every few seconds in a
container.
"""

import contextlib
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

__all__ = [
    "Answer",
    "Command",
    "CommandError",
    "ask",
    "decode_command",
    "encode",
    "socket_address",
    "socket_path",
]

# Linux' sun_path has 108 bytes including the final zero.
_MAX_PATH_BYTES = 107


class CommandError(Exception):
    """The command failed. The text is a sentence for the operator."""


class Command(msgspec.Struct, frozen=True):
    """`verb` is one of control/commands/commands.py, with its arguments."""

    verb: str
    args: dict[str, Any]


class Answer(msgspec.Struct, frozen=True, omit_defaults=True):
    """What the command found, or why it failed: a sentence for the operator."""

    result: Any = None
    error: str | None = None


def encode(message: Command | Answer) -> bytes:
    """A command or an answer as its line."""
    return msgspec.json.encode(message) + b"\n"


def decode_command(line: bytes) -> Command:
    """Raises msgspec.DecodeError."""
    return msgspec.json.decode(line, type=Command)


def socket_path(data_dir: str | Path) -> Path:
    """The Unix socket on which a running server takes commands."""
    return Path(data_dir) / "control.sock"


@contextlib.contextmanager
def socket_address(path: Path) -> Iterator[str]:
    """The path as an address for bind and connect. A path that is too long is given relative to its open folder."""
    if len(os.fsencode(path)) <= _MAX_PATH_BYTES:
        yield str(path)
        return
    folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)


def ask(path: str | Path, verb: str, args: dict[str, Any], timeout_s: float = 30.0) -> Any:
    """Sends one command to the running server and returns its result. Blocks.

    Raises CommandError with the server's message, or if there was no answer, though the command may have been executed.
    Raises FileNotFoundError or ConnectionRefusedError if no server runs; the command was not executed then.
    """
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(timeout_s)
        with socket_address(Path(path)) as address:
            connection.connect(address)
        try:
            answer = _exchange(connection, encode(Command(verb, args)))
        except OSError as error:
            raise CommandError(
                f"the server did not answer ({error}); the command may have been executed nevertheless"
            ) from error
    reply = msgspec.json.decode(answer, type=Answer)
    if reply.error is not None:
        raise CommandError(reply.error)
    return reply.result


def _exchange(connection: socket.socket, request: bytes) -> bytes:
    connection.sendall(request)
    answer = b""
    while data := connection.recv(65_536):
        answer += data
    if not answer.endswith(b"\n"):
        raise ConnectionResetError("the connection was closed")
    return answer
