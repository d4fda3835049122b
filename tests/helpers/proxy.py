"""A proxy for failure tests, between redpoll and its Redis or any other client and server.

It forwards bytes unchanged. A test can make it cut all connections, or stall: then it neither reads nor writes, like a
host that hangs. Between a client and Redis it can also record the commands, and leave out the messages of PUBLISH. It
runs in its own thread, so that it works while a test blocks.
"""

from __future__ import annotations

import asyncio
import re
import shutil
import tempfile
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Self, TypeVar

import hiredis

Result = TypeVar("Result")
CHUNK_BYTES = 1 << 18
# The beginning of a push (RESP3) with a message of a topic.
_MESSAGE = re.compile(rb">\d+\r\n\$\d+\r\ns?message\r\n")


def _end_of_reply(data: bytes, at: int) -> int | None:
    """Where the reply or push ends that begins at `at`; None if it isn't complete."""
    line_end = data.find(b"\r\n", at)
    if line_end < 0:
        return None
    kind, after = data[at : at + 1], line_end + 2
    if kind in b"+-:_#,(":
        return after
    count = int(data[at + 1 : line_end])
    if kind in b"$!=":
        end = after + count + 2 if count >= 0 else after
        return end if end <= len(data) else None
    for _ in range(2 * count if kind == b"%" else count):
        following = _end_of_reply(data, after)
        if following is None:
            return None
        after = following
    return after


class Proxy:
    """`with Proxy(upstream) as proxy:` listens on the Unix socket `proxy.path` (`proxy.url`) and on 127.0.0.1,
    `proxy.port`.

    `upstream` is the path of a Unix socket, or (host, port). `swallow_messages` needs `splits_replies`. `accepted`
    counts the connections to the proxy. `commands` has the Redis commands since `note_commands()`, each as a list of
    bytes.
    """

    def __init__(self, upstream: str | tuple[str, int], *, splits_replies: bool = False) -> None:
        self.upstream = upstream
        self.splits_replies = splits_replies
        self.commands: list[list[bytes]] = []
        self._folder = Path(tempfile.mkdtemp(prefix="rp"))
        self.path = str(self._folder / "proxy.sock")
        self.port = 0
        self.accepted = 0
        self._noting = False
        self._swallowing = False
        self._open: set[asyncio.StreamWriter] = set()
        # Of `_open`: the ends of clients, and those at the upstream server whose client's end was aborted.
        self._clients: set[asyncio.StreamWriter] = set()
        self._orphans: set[asyncio.StreamWriter] = set()
        self._flowing: asyncio.Event | None = None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="proxy", daemon=True)
        self._listening = threading.Event()

    @property
    def url(self) -> str:
        return f"unix://{self.path}"

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._listening.wait(60), "the proxy did not start"
        return self

    def __exit__(self, *error: object) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        shutil.rmtree(self._folder, ignore_errors=True)

    # -- called by tests

    def cut(self) -> None:
        """Aborts all connections at both ends. New ones are accepted."""
        self._do(self._cut)

    def orphan(self) -> None:
        """Aborts all connections at the client's end only: upstream keeps them until the proxy ends, as a server does
        of a client whose network was cut. New ones are accepted."""
        self._do(self._orphan)

    def stall(self) -> None:
        """Forwards nothing in either direction until `resume`. Connections stay open."""
        self._do(self._flow().clear)

    def resume(self) -> None:
        """Forwards bytes again, first those that waited."""
        self._do(self._flow().set)

    def note_commands(self) -> None:
        """Records the commands of all connections in `commands` from now on."""
        self.commands.clear()
        self._noting = True

    def swallow_messages(self) -> None:
        """Leaves out the messages that Redis delivers to subscribers, until `deliver_messages`. Replies arrive."""
        self._swallowing = True

    def deliver_messages(self) -> None:
        self._swallowing = False

    # -- in the proxy's thread

    def _do(self, action: Callable[[], Result]) -> Result:
        async def inside() -> Result:
            return action()

        return asyncio.run_coroutine_threadsafe(inside(), self._loop).result(60)

    def _flow(self) -> asyncio.Event:
        assert self._flowing is not None
        return self._flowing

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._flowing = asyncio.Event()
        self._flowing.set()
        self._loop.run_until_complete(self._listen())
        self._listening.set()
        self._loop.run_forever()
        self._loop.run_until_complete(self._end())
        self._loop.close()

    async def _listen(self) -> None:
        unix = await asyncio.start_unix_server(self._serve, self.path)
        tcp = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self._servers = (unix, tcp)
        self.port = tcp.sockets[0].getsockname()[1]

    async def _end(self) -> None:
        for listening in (listening for server in self._servers for listening in server.sockets):
            self._loop.remove_reader(listening.fileno())
        # asyncio accepts a connection in a task, which leaks the connection if it doesn't run to its end.
        while accepting := [task for task in asyncio.all_tasks() if "accept" in task.get_coro().__qualname__]:
            await asyncio.wait(accepting)
        for server in self._servers:
            server.close()
        await asyncio.sleep(0)
        self._cut()
        serving = asyncio.all_tasks() - {asyncio.current_task()}
        for task in serving:
            task.cancel()
        await asyncio.gather(*serving, return_exceptions=True)
        await asyncio.sleep(0)

    def _cut(self) -> None:
        for writer in self._open:
            writer.transport.abort()

    def _orphan(self) -> None:
        self._orphans |= self._open - self._clients
        for writer in self._clients:
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        ends = {writer}
        self._open.add(writer)
        self._clients.add(writer)
        try:
            if isinstance(self.upstream, str):
                other_reader, other_writer = await asyncio.open_unix_connection(self.upstream)
            else:
                other_reader, other_writer = await asyncio.open_connection(*self.upstream)
            self.accepted += 1
            ends.add(other_writer)
            self._open.add(other_writer)
            async with asyncio.TaskGroup() as group:
                group.create_task(self._pass(reader, other_writer, hiredis.Reader()))
                replies = self._pass_replies if self.splits_replies else partial(self._pass, commands=None)
                group.create_task(replies(other_reader, writer))
        except* (OSError, EOFError):
            pass
        finally:
            self._clients.discard(writer)
            ends -= self._orphans
            self._open -= ends
            for end in ends:
                end.transport.abort()

    async def _pass_replies(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        received = b""
        while data := await reader.read(CHUNK_BYTES):
            await self._flow().wait()
            received += data
            at = begin = 0
            forwarded = b""
            while (end := _end_of_reply(received, at)) is not None:
                if self._swallowing and _MESSAGE.match(received, at):
                    forwarded += received[begin:at]
                    begin = end
                at = end
            writer.write(forwarded + received[begin:at])
            received = received[at:]
            await writer.drain()
        raise EOFError

    async def _pass(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, commands: hiredis.Reader | None
    ) -> None:
        while data := await reader.read(CHUNK_BYTES):
            await self._flow().wait()
            if commands is not None:
                commands.feed(data)
                try:
                    while (command := commands.gets()) is not False:
                        if self._noting:
                            self.commands.append(command)
                except hiredis.ProtocolError:
                    commands = None  # this client doesn't speak the Redis protocol
            writer.write(data)
            await writer.drain()
        raise EOFError
