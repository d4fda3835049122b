"""The hidden commands `worker` and `control`, which the supervisor starts. They import no other command."""

from typing import TYPE_CHECKING

import click

from redpoll.cli import without_collections

if TYPE_CHECKING:
    from redpoll.ipc.child_pipe import ChildPipe

__all__ = ["control", "worker"]


def _child_pipe(fd: int) -> "ChildPipe":
    from redpoll.ipc.child_pipe import ChildPipe

    return ChildPipe(fd)


@click.command(hidden=True)
@click.argument("number", type=int)
@click.option("--pipe", "pipe_fd", type=int, required=True)
def worker(number: int, pipe_fd: int) -> None:
    """A worker process, started by `serve`. The number only serves to tell workers apart in a process list."""
    with without_collections():
        from redpoll.worker.main import main as run_worker

    run_worker(_child_pipe(pipe_fd))


@click.command(hidden=True)
@click.option("--pipe", "pipe_fd", type=int, required=True)
def control(pipe_fd: int) -> None:
    """The control plane, started by `serve`."""
    with without_collections():
        from redpoll.control.main import main as run_control

    run_control(_child_pipe(pipe_fd))
