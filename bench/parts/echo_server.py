"""An echo server on the engine, or on picows, for Autobahn and the fuzzer. It has no channels and no Redis.

`python -m bench.parts.echo_server [--engine redpoll|transports|picows] [--tls CERT KEY] [--port N] [--max-message-bytes
N]` prints `port N` and serves until it is killed. `transports` is redpoll's engine on uvloop's transports instead of
sockets of its own. `--tls` is for the engine `redpoll`.
"""

from __future__ import annotations

import argparse
import asyncio
import socket
from pathlib import Path

import uvloop

from redpoll import _engine, _frame, _http
from redpoll._fanout import Flusher
from redpoll._openssl import Context
from redpoll._sockets import Listener, Polled, Poller
from redpoll._tls import OpenSslSocket

__all__ = ["Echo", "serve"]


class Echo(_engine.WebSocket):
    """Sends each message back."""

    __slots__ = ()

    def head_received(self, head: bytes) -> None:
        try:
            request = _http.parse_head(head)
            fault = _http.upgrade_fault(request)
        except ValueError as error:
            fault = 400, str(error)
        if fault is None:
            self.accept(request.headers[b"sec-websocket-key"])
        else:
            status, text = fault
            self.answer(f"HTTP/1.1 {status} {text}\r\nContent-Length: 0\r\nConnection: close\r\n\r\n".encode())

    def head_too_large(self) -> None:
        self.answer(b"HTTP/1.1 431 Too Large\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")

    def message_received(self, message: bytes) -> None:
        self.send(_frame.text(message))

    def binary_message_received(self, message: bytes) -> None:
        # A text frame with the opcode of a binary one.
        self.send(b"\x82" + _frame.text(message)[1:])

    def closing(self) -> None:
        # The engine has no timers. The peer has five seconds for its half of the handshake.
        asyncio.get_running_loop().call_later(5.0, self.abort)


def _flusher(max_message_bytes: int) -> Flusher:
    loop = asyncio.get_running_loop()
    # Room for an echo of the largest message while another one is being sent.
    limit = max(1 << 20, 4 * max_message_bytes)
    flusher = Flusher(lambda: loop.call_soon(flusher.flush), limit, poller=Poller(loop))
    return flusher


async def serve(port: int, max_message_bytes: int, pair: bytes = b"") -> None:
    """`pair`: key and certificate in PEM, for TLS."""
    flusher = _flusher(max_message_bytes)
    poller = flusher.poller
    assert poller is not None
    context = Context(pair) if pair else None

    def make() -> Polled:
        connection = Echo(flusher, max_message_bytes)
        if context is None:
            return connection
        return OpenSslSocket(poller, lambda: context, connection, lambda tls, fault: None)

    listening = socket.create_server(("127.0.0.1", port), backlog=4096)
    print(f"port {listening.getsockname()[1]}", flush=True)
    listener = Listener(poller, listening.detach(), make, print)
    try:
        await asyncio.get_running_loop().create_future()
    finally:
        listener.close()


async def serve_transports(port: int, max_message_bytes: int) -> None:
    flusher = _flusher(max_message_bytes)
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Echo(flusher, max_message_bytes), "127.0.0.1", port)
    print(f"port {server.sockets[0].getsockname()[1]}", flush=True)
    await server.serve_forever()


async def serve_picows(port: int, max_message_bytes: int) -> None:
    """picows' own example: every frame is sent back as it is. picows leaves fragments, UTF-8 and reserved bits to its
    users."""
    from picows import WSFrame, WSListener, WSMsgType, WSTransport, ws_create_server

    class PicowsEcho(WSListener):
        def on_ws_frame(self, transport: WSTransport, frame: WSFrame) -> None:
            if frame.msg_type == WSMsgType.CLOSE:
                transport.send_close(frame.get_close_code(), frame.get_close_message())
                transport.disconnect()
            elif frame.msg_type not in (WSMsgType.PING, WSMsgType.PONG):
                transport.send(frame.msg_type, frame.get_payload_as_bytes(), frame.fin)

    server = await ws_create_server(
        lambda request: PicowsEcho(), "127.0.0.1", port, max_frame_size=2 * max_message_bytes
    )
    print(f"port {server.sockets[0].getsockname()[1]}", flush=True)
    await server.serve_forever()


def main() -> None:
    parser = argparse.ArgumentParser(description="echo server on redpoll's engine or picows")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--max-message-bytes", type=int, default=16 << 20)
    parser.add_argument("--engine", choices=["redpoll", "transports", "picows"], default="redpoll")
    parser.add_argument("--tls", nargs=2, type=Path, default=(), metavar=("CERT", "KEY"))
    arguments = parser.parse_args()
    if arguments.tls:
        if arguments.engine != "redpoll":
            parser.error("--tls is for the engine redpoll")
        cert, key = arguments.tls
        uvloop.run(serve(arguments.port, arguments.max_message_bytes, key.read_bytes() + cert.read_bytes()))
        return
    run = {"redpoll": serve, "transports": serve_transports, "picows": serve_picows}[arguments.engine]
    uvloop.run(run(arguments.port, arguments.max_message_bytes))


if __name__ == "__main__":
    main()
