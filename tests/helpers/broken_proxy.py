"""A reverse proxy that breaks what people's proxies break: the Upgrade header, idle connections, answers that
come bit by bit. Not a test."""

import asyncio
import contextlib


class BrokenProxy:
    """A reverse proxy for one server. It relays bytes and breaks what the test wants broken."""

    def __init__(
        self, port: int, *, drops_upgrade: bool = False, idle_s: float | None = None, tls=None, collects: bytes = b""
    ) -> None:
        self.upstream_port = port
        self.drops_upgrade = drops_upgrade
        self.idle_s = idle_s
        self.tls = tls
        # Answers to requests with this in their head are passed on when they are whole.
        self.collects = collects
        self.port = 0

    async def __aenter__(self):
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0, ssl=self.tls)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *error):
        self._server.close()

    async def _serve(self, reader, writer):
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            if self.drops_upgrade:
                lines = head.split(b"\r\n")
                hop_by_hop = (b"upgrade:", b"connection:")
                head = b"\r\n".join(line for line in lines if not line.lower().startswith(hop_by_hop))
            up_reader, up_writer = await asyncio.open_connection("127.0.0.1", self.upstream_port)
            up_writer.write(head)
            if self.collects and self.collects in head:
                writer.write(await up_reader.read())
                return
            # Bytes in either direction are life.
            async with asyncio.timeout(self.idle_s) as idle:
                ways = (reader, up_writer), (up_reader, writer)
                pumps = [asyncio.ensure_future(self._pump(*way, idle)) for way in ways]
                try:
                    await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    for pump in pumps:
                        pump.cancel()
                    up_writer.close()
        except (asyncio.IncompleteReadError, OSError, TimeoutError):
            pass
        finally:
            writer.close()

    async def _pump(self, reader, writer, idle):
        with contextlib.suppress(OSError):
            while data := await reader.read(65_536):
                if self.idle_s is not None:
                    idle.reschedule(asyncio.get_running_loop().time() + self.idle_s)
                writer.write(data)
                await writer.drain()
