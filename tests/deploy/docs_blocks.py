"""Blocks of code of the documentation, written as files and run. Not a test.

A block's title is the name of a file. Blocks use `ID`, `KEY`, `SECRET` and the port 6001, as README.md does.
"""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import pytest

from helpers.server import Server
from helpers.wire import Api, eventually
from redpoll.ipc.command_socket import ask, socket_path

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "deploy" / "docs"
NODE_MODULES = ROOT / "tests" / "clients" / "node_modules"
BLOCK = re.compile(r"^```(\w+)(?: title=\"([^\"]+)\")?\n(.*?)^```$", re.DOTALL | re.MULTILINE)
needs_node = pytest.mark.skipif(not NODE_MODULES.is_dir(), reason="run `npm ci` in tests/clients first")


def name_of(path: Path) -> str:
    return path.relative_to(DOCS).as_posix()


def blocks_of(page: str) -> dict[str, str]:
    """The blocks of a page by title."""
    return {title: text for _, title, text in BLOCK.findall((DOCS / page).read_text()) if title}


@contextmanager
def folder_with_libraries(empty: Path) -> Iterator[Path]:
    """A folder below node_modules, where an `import` finds the libraries; `empty` where they aren't installed."""
    if not NODE_MODULES.is_dir():
        yield empty
        return
    made = Path(tempfile.mkdtemp(prefix=".docs-", dir=NODE_MODULES))
    yield made
    shutil.rmtree(made)


def operate(server: Server, verb: str, **args: object):
    """Runs an operator's command in the server."""
    return ask(socket_path(server.folder / "data"), verb, args)


def written(folder: Path, server: Server, page: str, *titles: str, **values: str) -> list[Path]:
    """Writes blocks of a page as files, with id, key, secret and port filled in and other texts replaced."""
    replaced = {"ID": server.app_id, "KEY": server.app_key, "SECRET": server.app_secret, "6001": str(server.port)}
    paths = []
    for title in titles:
        text = blocks_of(page)[title]
        text = re.sub(r"(?<![\w$])(?:ID|KEY|SECRET|6001)(?!\w)", lambda found: replaced[found[0]], text)
        for old, new in values.items():
            text = text.replace(old, new)
        path = folder / title
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        paths.append(path)
    return paths


class Process:
    """A running program. `line()` waits for its next line of output."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    async def line(self) -> str:
        assert self._process.stdout is not None
        async with asyncio.timeout(60):
            line = await self._process.stdout.readline()
        assert line, "the program ended"
        return line.decode().strip()

    async def until(self, text: str) -> str:
        while text not in (line := await self.line()):
            pass
        return line


@asynccontextmanager
async def running(*command: object, **environment: str) -> AsyncIterator[Process]:
    words = [str(word) for word in command]
    process = await asyncio.create_subprocess_exec(
        *words,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env={"PATH": os.environ["PATH"], "PYTHONUNBUFFERED": "1", **environment},
    )
    try:
        yield Process(process)
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def run(*command: object, **environment: str) -> str:
    """Runs a program to its end. Returns its output."""
    async with running(*command, **environment) as process:
        assert process._process.stdout is not None
        async with asyncio.timeout(60):
            text = (await process._process.stdout.read()).decode()
            assert await process._process.wait() == 0, text
        return text


@asynccontextmanager
async def subscriber(server: Server, *command: object, channel: str = "news") -> AsyncIterator[Process]:
    """A program that subscribes to a channel; the block begins when it has."""
    async with Api(server) as api:
        # The subscriber of the test before has left.
        await eventually(lambda: api.subscription_count(channel), 0)
        async with running(*command) as process:
            await eventually(lambda: api.subscription_count(channel), 1)
            yield process
