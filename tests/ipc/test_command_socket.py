"""Asking a running server over its Unix socket."""

import asyncio
import subprocess
import sys

import pytest

from redpoll.ipc.command_socket import CommandError, ask, socket_path


async def test_asking_without_a_server_raises_file_not_found(tmp_path):
    with pytest.raises(FileNotFoundError):
        ask(socket_path(tmp_path), "app list", {})


@pytest.mark.parametrize("begun", [b"", b'{"result":[1', b'{"result":[1]}'])
async def test_command_is_not_repeated_if_the_server_ends_before_it_has_answered(tmp_path, begun):
    async def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readline()
        writer.write(begun)
        writer.close()

    async with await asyncio.start_unix_server(hang_up, socket_path(tmp_path)):
        with pytest.raises(CommandError, match="may have been executed nevertheless"):
            await asyncio.to_thread(ask, socket_path(tmp_path), "app create", {"name": "x"})


def test_a_command_line_that_asks_the_server_imports_neither_its_database_nor_its_loop():
    """`redpoll health` runs every few seconds in a container."""
    heavy = "{'aiohttp', 'alembic', 'asyncio', 'logging', 'sqlalchemy', 'ssl', 'structlog'} & set(sys.modules)"
    ours = "redpoll.cli, redpoll.cli.execute, redpoll.cli.server, redpoll.ipc.command_socket, redpoll.host.datafolder"
    code = f"import sys, {ours}; print({heavy})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"
