"""`redpoll serve`: locks the data folder, opens all sockets, and runs the supervisor until a signal stops it."""

import asyncio
import contextlib
import fcntl
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import structlog

from redpoll.config import certificate
from redpoll.config.config import Settings
from redpoll.config.reloading import BUNDLE_NAME, install_certificates, uses_tls
from redpoll.host import datafolder, embedded
from redpoll.host.children import Place, Sockets
from redpoll.host.supervisor import Supervisor
from redpoll.host.system import StartError, listen, raise_file_limit

__all__ = ["StartError", "child_command", "serve"]

log = structlog.get_logger()


def serve(
    settings: Settings,
    command_of: Callable[[str, int, int], list[str]] | None = None,
    reread: Callable[[], Settings] | None = None,
) -> int:
    """Runs the whole server until a signal stops it, and returns the exit code. Raises StartError.

    `command_of(role, number, pipe_fd)` returns a child's command line. Tests replace it to start stand-ins. `reread`
    reads the settings again for a reload; it raises ConfigError. By default they stay as they are.
    """
    # Files that our processes write may contain secrets.
    os.umask(0o077)
    folder = Path(settings.data_dir).resolve()
    owner = datafolder.foreign_owner(folder)
    if owner is not None:
        raise StartError(
            f"the data folder {folder} belongs to {owner}, who couldn't open what a server of root's writes there: "
            f"start the server as {owner}, or give the folder to root"
        )
    with contextlib.ExitStack() as stack:
        redis_binary = _lock_folder(settings, folder, stack)
        sockets = _open_sockets(settings, folder, stack)
        run_dir = _make_run_dir(stack)
        raise_file_limit()
        place = Place(folder, run_dir, redis_binary, command_of or child_command)

        async def run() -> int:
            return await Supervisor(settings, place, sockets, reread or (lambda: settings)).run()

        return asyncio.run(run())


def child_command(role: str, number: int, pipe_fd: int) -> list[str]:
    """The command line of a child. `-P` keeps a `redis.py` in the current folder from shadowing the library."""
    arguments = [str(number)] if role == "worker" else []
    return [sys.executable, "-P", "-m", "redpoll", role, *arguments, "--pipe", str(pipe_fd)]


def _lock_folder(settings: Settings, folder: Path, stack: contextlib.ExitStack) -> Path | None:
    """Locks the data folder. Returns the program of the embedded Redis, None if `redis_url` names another."""

    def say(holder: str) -> None:
        log.info("waiting for the data folder", data_dir=str(folder), used_by=holder)

    try:
        stack.enter_context(datafolder.lock(folder, "serve", waiting=say))
        open_to_others = datafolder.openness(folder)
        if open_to_others is not None:
            log.warning("data folder open to others", data_dir=str(folder), what=open_to_others)
        return None if settings.redis_url else embedded.find_binary(folder / "redis")
    except (datafolder.DataFolderError, embedded.RedisMissing) as error:
        raise StartError(str(error)) from error


def _make_run_dir(stack: contextlib.ExitStack) -> Path:
    """A private folder for sockets, locked while this process lives.

    systemd-tmpfiles removes what is old in /tmp, but nothing in a folder that is locked. It spares sockets in use, too,
    and doesn't know ours: with PrivateTmp, a unit's /tmp has another path on the machine.
    """
    try:
        run_dir = Path(tempfile.mkdtemp(prefix="redpoll-"))
        descriptor = os.open(run_dir, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise StartError(f"no temporary folder can be made: {error.strerror}") from error
    stack.callback(os.close, descriptor)
    stack.callback(shutil.rmtree, run_dir, ignore_errors=True)
    # A file system without locks: children.py makes the folder again if it is removed.
    with contextlib.suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    return run_dir


def _open_sockets(settings: Settings, folder: Path, stack: contextlib.ExitStack) -> Sockets:
    public = listen(settings.host, settings.port, count=settings.workers)
    for listener in public:
        stack.enter_context(listener)
    tls = []
    if settings.tls_port is not None:
        tls = listen(settings.host, settings.tls_port, count=settings.workers)
        for listener in tls:
            stack.enter_context(listener)
    if uses_tls(settings):
        try:
            install_certificates(settings, folder)
        except certificate.PairError as error:
            raise StartError(f"the TLS certificates can't be used: {error}") from error
        except OSError as error:
            raise StartError(f"the TLS certificates can't be written to {folder}: {error.strerror}") from error
        stack.callback((folder / BUNDLE_NAME).unlink, missing_ok=True)
    control = stack.enter_context(listen(settings.control_host, settings.control_port)[0])
    return Sockets(public, tls, control)
