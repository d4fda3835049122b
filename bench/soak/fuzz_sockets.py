"""What bench/soak/fuzz.py feeds to connections on real sockets, plain ones and with TLS, and to audiences.

A connection is made, its handshakes are done, and then an input is carried out on both ends: records that are whole,
cut, damaged or garbage, in pieces of any size; pauses, frames, closes and resets of either side. What the WebSocket
hears must be what the client has sent, up to where one of the two ended it, and each connection must end once. The
frames of audiences, while sinks come and go, are compared with lists.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import importlib.util
import socket
import ssl
import struct
import termios
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from bench.soak.fuzz_http import Difference

ROOT = Path(__file__).parents[2]
KEY = b"dGhlIHNhbXBsZSBub25jZQ=="
HEAD = (
    b"GET /app/key HTTP/1.1\r\nHost: h\r\nUpgrade: websocket\r\nConnection: keep-alive, Upgrade\r\n"
    b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: " + KEY + b"\r\n\r\n"
)
ANSWER_BYTES = 129
# Bits of a connection's first byte: TLS, 1.2 at most; its handshake is left to the input, or is damaged by it; small
# buffers in the kernel; the client doesn't read; the head is left to the input; the head comes with the last bytes of
# the handshake.
TLS, OLD, RAW, DAMAGED, SMALL, DEAF, NO_HEAD, EARLY = (1 << bit for bit in range(8))
# After this many passes of the loop everything must be over.
PASSES = 2000


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class SocketTargets:
    """Feeds one input to one of the targets. The certificate is written to `folder`."""

    def __init__(self, folder: Path) -> None:
        from redpoll import _engine, _fanout
        from redpoll._openssl import KEY_BYTES, Context, set_ticket_keys
        from redpoll._sockets import Poller
        from redpoll._tls import OpenSslSocket, PythonTlsSocket

        class Recorder(_engine.WebSocket):
            """Its callbacks are in `heard`; `begun`: a head has begun."""

            begun = False

            def head_begun(self) -> None:
                if self.begun:
                    raise Difference("head_begun() was called twice")
                self.begun = True

            def head_received(self, head: bytes) -> None:
                if KEY in head:
                    self.accept(KEY)
                elif b"1.0" in head:
                    self.answer(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
                else:
                    self.serve_http()

            def http_began(self, data: bytes) -> bool:
                self.heard.append(("http", data))
                return True

            def http_received(self, data: bytes) -> None:
                self.heard.append(("http", data))
                if b"end" in data:
                    self.end_http()

            def message_received(self, message: bytes) -> None:
                self.heard.append(("text", message))

            def binary_message_received(self, message: bytes) -> None:
                self.heard.append(("binary", message))

            def closed(self, code: int, reason: str) -> None:
                self.heard.append(("closed", code, reason))

            def gone(self) -> None:
                self.heard.append(("gone",))

            def released(self) -> None:
                self.heard.append(("released",))

        self.engine, self.fanout, self.recorder = _engine, _fanout, Recorder
        self.reference = load(ROOT / "tests" / "ext" / "reference.py")
        folder.mkdir(parents=True, exist_ok=True)
        certificate = load(ROOT / "tests" / "helpers" / "certs.py").self_signed(folder)
        set_ticket_keys([bytes(KEY_BYTES)])
        pair = certificate[1].read_bytes() + certificate[0].read_bytes()
        direct = Context(pair)

        def of_name(number: int) -> Any:
            made = Context(pair)
            made.set_staple(0, b"an OCSP response", time.time() + 86_400)
            return made

        # The name that clients ask for.
        direct.serve_names({"localhost": 1}, of_name)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(*certificate)
        # By the lowest bit of an input's first size.
        self.tls_types = ((OpenSslSocket, direct), (PythonTlsSocket, context))
        self.trusting = ssl.create_default_context(cafile=certificate[0])
        self.trusting_old = ssl.create_default_context(cafile=certificate[0])
        self.trusting_old.maximum_version = ssl.TLSVersion.TLSv1_2
        self.loop = asyncio.new_event_loop()
        self.faults: list[Any] = []
        self.loop.set_exception_handler(lambda loop, context: self.faults.append(context))
        self.poller = Poller(self.loop)
        self.flusher = _fanout.Flusher(lambda: self.loop.call_soon(self.flusher.flush), poller=self.poller)

    def connections(self, data: bytes) -> None:
        """A byte of bits, four for sizes of pieces, and steps: a byte of kind, a byte of size, and as many bytes."""
        if len(data) > 5:
            self.loop.run_until_complete(Conversation(self, data[0], data[1:5], data[5:]).run())
            if self.faults:
                raise Difference(str(self.faults.pop()))

    def audiences(self, data: bytes) -> None:
        """Sinks that come, go and get frames of audiences, whose posts are noted in parts."""
        flusher = self.fanout.Flusher(lambda: None)
        flusher.post_at_once, flusher.post_part = data[0] % 4 if data else 1, 1 + (data[1] % 4 if len(data) > 1 else 0)
        flusher.max_few = 4
        groups = [self.fanout.Audience(flusher) for _ in range(2)]
        sinks = [(self.fanout.Sink(flusher), Written()) for _ in range(12)]
        expected: list[list[bytes]] = [[] for _ in sinks]
        members: list[set[int]] = [set(), set()]
        for number, (sink, transport) in enumerate(sinks):
            sink.set_sid(1, number + 1)
            sink.attach_to(transport)
        for at in range(2, len(data) - 1, 2):
            kind, place, turn = data[at] >> 5, data[at + 1] % len(sinks), data[at] & 1
            group, sink = groups[turn], sinks[place][0]
            if kind < 2:
                if group.add(sink) != (place not in members[turn]):
                    raise Difference("add() is wrong")
                members[turn].add(place)
            elif kind == 2:
                self._leave(group, sink, expected[place], members[turn], place)
            elif kind == 3:
                flusher.flush()
            elif kind == 4:
                group.finish_posts()
            else:
                # Of one audience only: the order among several isn't defined.
                for _ in range(1 if kind < 7 else 70):
                    frame = b"%d:%d," % (turn, at)
                    skipped = place + 1 if kind == 6 else 0
                    group.post(frame, 1 if skipped else 0, skipped)
                    for member in members[turn]:
                        if member + 1 != skipped:
                            expected[member].append(frame)
            if len(group) != len(members[turn]) or (sink in group) != (place in members[turn]):
                raise Difference("a member too many, or too few")
        while flusher.flush():
            pass
        for (_, transport), frames in zip(sinks, expected, strict=True):
            self._compare_frames(b"".join(transport.written), frames)
        for sink, _ in sinks:
            for group in groups:
                group.discard(sink)

    @staticmethod
    def _leave(group: Any, sink: Any, frames: list[bytes], members: set[int], place: int) -> None:
        if group.discard(sink) != (place in members):
            raise Difference("discard() is wrong")
        if place in members:
            members.discard(place)
            # Which of the posts under way it had got isn't defined: each that it gets later counts.
            frames.append(b"left")

    @staticmethod
    def _compare_frames(written: bytes, expected: list[bytes]) -> None:
        for turn in (b"0:", b"1:"):
            left = [frame for frame in written.split(b",")[:-1] if frame.startswith(turn)]
            wanted = [frame[:-1] if frame != b"left" else frame for frame in expected]
            last_leave = max((at for at, frame in enumerate(wanted) if frame == b"left"), default=-1)
            before = [frame for frame in wanted[: last_leave + 1] if frame.startswith(turn)]
            after = [frame for frame in wanted[last_leave + 1 :] if frame.startswith(turn)]
            if after and left[-len(after) :] != after:
                raise Difference(f"{left} doesn't end in {after}")
            rest = iter(before)
            if not all(frame in rest for frame in left[: len(left) - len(after)]):
                raise Difference(f"{left} isn't in the order of {wanted}")


class Written:
    """A transport that records writes."""

    def __init__(self) -> None:
        self.written: list[bytes] = []

    def get_extra_info(self, name: str, default: object = None) -> object:
        return default

    def write(self, data: bytes) -> None:
        self.written.append(bytes(data))

    def abort(self) -> None: ...


class Conversation:
    """One connection, and what an input says of it."""

    def __init__(self, targets: SocketTargets, bits: int, cuts: bytes, steps: bytes) -> None:
        self.targets, self.bits, self.cuts, self.steps = targets, bits, cuts, steps
        self.ours, self.theirs = socket.socketpair()
        for sock in (self.ours, self.theirs):
            sock.setblocking(False)
            if bits & SMALL:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4608)
        self.ws = targets.recorder(targets.flusher, 65536)
        self.ws.heard = []
        self.settled: list[str | None] = []
        self.tls: ssl.SSLObject | None = None
        self.server: Any = None
        self.piece = 0
        # What the client has sent of the WebSocket's stream, and what it has read; the frames that were sent to it.
        self.sent, self.read_back = b"", b""
        self.frames: list[bytes] = []
        # Nothing has ended or damaged it so far, and there is a handshake.
        self.intact = not (bits & TLS and bits & RAW)
        self.held = False
        # The server has stopped reading within a piece: what came after it would be another stream than `sent`.
        self.stuck = False

    async def run(self) -> None:
        poller, bits = self.targets.poller, self.bits
        if bits & TLS:
            kind, served_by = self.targets.tls_types[self.cuts[0] & 1]
            self.server = kind(poller, lambda: served_by, self.ws, lambda tls, fault: self.settled.append(fault))
            self.incoming, self.outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
            context = self.targets.trusting_old if bits & OLD else self.targets.trusting
            self.tls = context.wrap_bio(self.incoming, self.outgoing, server_hostname="localhost")
            poller.adopt(self.ours.detach(), self.server)
        else:
            poller.adopt(self.ours.detach(), self.ws)
        if self.tls is not None and not bits & RAW and not await self.shake():
            self.intact = False
        if not bits & NO_HEAD:
            await self.write(HEAD)
        at = 0
        while at < len(self.steps):
            kind, size = self.steps[at] % 16, self.steps[at + 1] if at + 1 < len(self.steps) else 0
            at += 2
            await self.step(kind, size, self.steps[at : at + size] if kind < 8 else b"")
            at += size if kind < 8 else 0
        await self.end()

    async def passes(self, count: int) -> None:
        for _ in range(count):
            await asyncio.sleep(0)

    async def push(self, data: bytes) -> None:
        """Send bytes of the socket, in pieces."""
        while data and not self.stuck:
            size = 1 + self.cuts[self.piece % 4] ** 2 // 4
            self.piece += 1
            try:
                sent = self.theirs.send(data[:size])
            except BlockingIOError:
                sent = 0
                if not await self.room():
                    self.intact, self.stuck = False, True
                    return
            except OSError:
                self.intact = False
                return
            data = data[sent:]
            await self.passes(1)
            self.receive()

    async def room(self) -> bool:
        """Whether the server reads on. It doesn't while it waits for us to read, or was told to pause."""
        for _ in range(50):
            await self.passes(1)
            self.receive()
            if self.unread() < 2048:
                return True
        return False

    def unread(self) -> int:
        """Bytes of ours that the server hasn't read."""
        if self.theirs.fileno() < 0:
            return 0
        (size,) = struct.unpack("i", fcntl.ioctl(self.theirs, termios.TIOCOUTQ, b"\0\0\0\0"))
        return size

    def receive(self, always: bool = False) -> None:
        if self.bits & DEAF and not always:
            return
        try:
            while data := self.theirs.recv(65536):
                if self.tls is None:
                    self.read_back += data
                else:
                    self.incoming.write(data)
        except OSError:
            pass
        if self.tls is not None and not self.bits & RAW and self.settled == [None]:
            try:
                while data := self.tls.read(65536):
                    self.read_back += data
            except ssl.SSLError:
                pass

    async def shake(self) -> bool:
        """The handshake; the first step of the input damages it, if it should."""
        damage = self.steps[:3] if self.bits & DAMAGED else b""
        for flight in range(6):
            try:
                self.tls.do_handshake()
                done = True
            except ssl.SSLWantReadError:
                done = False
            except ssl.SSLError:
                return False
            if done and self.bits & EARLY and not self.bits & NO_HEAD:
                self.bits |= NO_HEAD
                self.tls.write(HEAD)
                self.sent += HEAD
            word = bytearray(self.outgoing.read())
            if len(damage) == 3 and word and damage[0] % 2 == flight % 2:
                word[int.from_bytes(damage[:2], "big") % len(word)] ^= damage[2]
                self.intact &= not damage[2]
            await self.push(bytes(word))
            if done:
                return True
            for _ in range(20):
                await self.passes(1)
                try:
                    self.incoming.write(self.theirs.recv(65536))
                    break
                except BlockingIOError:
                    continue
                except OSError:
                    return False
        return False

    async def write(self, data: bytes) -> None:
        """Send bytes of the WebSocket's stream."""
        await self.push(self.encrypted(data))

    def encrypted(self, data: bytes) -> bytes:
        if self.tls is None or self.bits & RAW:
            self.sent += data
            return data
        if not data:
            return b""
        try:
            self.tls.write(data)
        except ssl.SSLError:
            self.intact = False
            return b""
        self.sent += data
        return self.outgoing.read()

    async def step(self, kind: int, size: int, data: bytes) -> None:
        server = self.server if self.server is not None else self.ws
        if kind < 4:
            await self.write(data)
        elif kind == 4:
            # Several records, then their bytes.
            word = b"".join(self.encrypted(data[at : at + 7]) for at in range(0, len(data), 7))
            await self.push(word)
        elif kind == 5:
            await self.raw(data)
        elif kind == 6:
            word = bytearray(self.encrypted(data))
            if self.tls is not None and word:
                word[size * 7 % len(word)] ^= 1 << size % 8
                self.intact = False
            await self.push(bytes(word))
        elif kind == 7:
            word = self.encrypted(data)
            if self.tls is not None:
                self.intact = False
                word = word[: len(word) - 1 - size % 32]
            await self.push(word)
        elif kind == 8:
            await self.passes(size % 8)
        elif kind in (9, 10):
            payload = bytes([size]) * (size * 16 + 126)
            if self.ws.send(b"\x82\x7e" + struct.pack(">H", len(payload)) + payload):
                self.frames.append(payload)
        elif kind == 11:
            self.held = not self.held
            (self.ws.pause_reading if self.held else self.ws.resume_reading)()
        elif kind == 12:
            await self.leave(size)
        elif kind == 13:
            self.intact = False
            if size % 4 == 0:
                server.abort()
            elif size % 4 == 1 and self.server is not None:
                self.server.close()
            else:
                self.ws.close(4000 + size, "because")
        elif kind == 14:
            self.receive(always=True)
        elif kind == 15:
            self.cuts = bytes([size]) + self.cuts[1:]

    async def raw(self, data: bytes) -> None:
        """Bytes that no client sends there: without TLS they are part of the stream."""
        if self.tls is None:
            self.sent += data
        elif data:
            self.intact = False
        await self.push(data)

    async def leave(self, size: int) -> None:
        self.intact = False
        try:
            if size % 3 == 0:
                self.theirs.shutdown(socket.SHUT_WR)
            elif size % 3 == 1 and self.tls is not None:
                with contextlib.suppress(ssl.SSLError):
                    self.tls.unwrap()
                await self.push(self.outgoing.read())
            else:
                self.theirs.close()
        except OSError:
            pass

    async def end(self) -> None:
        if self.held:
            self.ws.resume_reading()
        for _ in range(PASSES):
            self.receive(always=True)
            if not self.unread() and not self.ws.unsent_bytes:
                break
            await self.passes(1)
        # What is left in OpenSSL's buffers, 256 bytes in each turn.
        for _ in range(20):
            await self.passes(1)
            self.receive(always=True)
        self.theirs.close()
        for _ in range(PASSES):
            if not self.targets.poller.sockets and (self.server is None or self.settled):
                break
            await self.passes(1)
        await self.passes(3)
        self.compare_end()
        self.compare()

    def compare(self) -> None:
        """What the WebSocket heard of the client, and the client of it."""
        heard = [event for event in self.ws.heard if event[0] in ("text", "binary")]
        if self.bits & NO_HEAD and not self.sent.startswith(HEAD):
            return
        expected = self.targets.reference.parse(self.sent[len(HEAD) :], 65536)
        messages = [event for event in expected if event[0] in ("text", "binary")]
        if heard != messages[: len(heard)] or (self.intact and len(heard) < len(messages)):
            raise Difference(f"messages: {heard} for {expected}")
        if not self.intact or any(event[0] in ("close", "fail") for event in expected):
            return
        frames = self.targets.reference.server_frames(self.read_back[ANSWER_BYTES:])
        if [payload for opcode, payload in frames if opcode == 2] != self.frames:
            raise Difference(f"{len(self.frames)} frames were sent, not {frames}")
        pings = [event[1] for event in expected if event[0] == "ping"]
        if [payload for opcode, payload in frames if opcode == 10] != pings:
            raise Difference(f"pongs: {frames} for {expected}")

    def compare_end(self) -> None:
        """Each connection ends once, and lets go of everything."""
        if self.targets.poller.sockets:
            raise Difference("the socket stays")
        ends = [event[0] for event in self.ws.heard if event[0] in ("closed", "gone", "released")]
        began = self.server is None or self.settled == [None]
        if len(self.settled) != (self.server is not None):
            raise Difference(f"settled: {self.settled}")
        if ends not in ([["closed", "released"], ["gone", "released"]] if began else [[]]):
            raise Difference(f"ended by {ends}, settled: {self.settled}")


def seeds(reference: Any) -> dict[str, list[bytes]]:
    """Valid inputs of each target, to be damaged."""

    def step(kind: int, data: bytes | int) -> bytes:
        return bytes([kind, data]) if isinstance(data, int) else bytes([kind, len(data)]) + data

    frame: Callable[..., bytes] = reference.client_frame
    hello, ping = frame(1, b"hello"), frame(9, b"ping")
    long = frame(2, bytes(range(200)))
    usual = (
        step(0, hello + ping)
        + step(9, 40)
        + step(0, long)
        + step(8, 3)
        + step(4, hello * 9)
        + step(0, frame(8, b"\x03\xe8"))
    )
    held = step(11, 0) + step(0, hello * 15) + step(0, hello * 15) + step(8, 3) + step(11, 0) + step(10, 255) * 9
    broken = step(0, hello) + step(6, hello) + step(0, hello)
    garbage = step(5, b"\x16\x03\x01\x00\x05\x01\x00\x00\x01\x00") + step(5, b"\x17\x03\x03\x00\x04abcd")
    hello_request = step(5, b"\x16\x03\x03\x00\x04\0\0\0\0") + step(0, hello)
    ends = [step(12, 0), step(12, 1), step(12, 2), step(13, 0), step(13, 1), step(13, 2), step(7, hello)]
    cuts = (b"\xff" * 4, b"\x00\x01\x04\x10", b"\x20\x40\x08\x80")
    made = [
        bytes([bits]) + cut + steps
        for bits in (0, TLS, TLS | OLD, TLS | SMALL | EARLY, SMALL | DEAF)
        for cut in cuts
        for steps in (usual, held, broken)
    ]
    made += [bytes([bits]) + cuts[0] + usual + end for bits in (0, TLS, TLS | OLD) for end in ends]
    made += [bytes([TLS | bits]) + cuts[1] + garbage for bits in (RAW, 0, OLD)]
    made += [bytes([TLS | bits]) + cuts[0] + hello_request for bits in (OLD, OLD | EARLY)]
    made += [
        bytes([TLS | DAMAGED | bits]) + cuts[0] + damage
        for bits in (0, OLD)
        for damage in (b"\0\x0b\xff", b"\1\x04\x01")
    ]
    made.append(
        bytes([NO_HEAD]) + cuts[2] + step(0, b"POST / HTTP/1.1\r\nHost: h\r\n\r\n") + step(0, b"more") + step(0, b"end")
    )
    made.append(bytes([NO_HEAD | TLS]) + cuts[2] + step(0, b"GET / HTTP/1.0\r\nHost: h\r\n\r\n") + step(0, b"more"))
    joins = b"".join(bytes([turn, place]) for turn in (0, 1) for place in range(12))
    posts = b"".join(bytes([kind << 5 | turn, place]) for kind in (5, 6, 7) for turn in (0, 1) for place in (0, 5))
    leaves = b"".join(bytes([kind << 5, place]) for place in (1, 3, 11) for kind in (2, 3, 5, 0, 4))
    return {
        "connections": made,
        "audiences": [b"\1\1" + joins + posts + leaves, b"\0\0" + joins + leaves + posts * 2, b"\3\3" + joins + posts],
    }
